"""Prompts: from what a function returns to the messages of a result."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from msgspec import UNSET
from msgspec.structs import replace

from handrail.engine.catalog import ToolEntry, normalize
from handrail.engine.completion import make_completers
from handrail.errors import SchemaError
from handrail.guards.policy import SubjectKind
from handrail.model import (
    Audio,
    EmbeddedResource,
    Image,
    Object,
    Prompt,
    PromptArgument,
    PromptMessage,
    PromptResult,
    ResourceLink,
    Text,
    Tool,
    ToolResult,
)
from handrail.revisions import Revision
from handrail.schema.compile import compile_schema
from handrail.suggest import describe_value

_BLOCKS = (Text, Image, Audio, ResourceLink, EmbeddedResource)


class PromptEntry(ToolEntry, kw_only=True):
    """A prompt, and what is needed to get it."""

    method: ClassVar[str] = "prompts/get"
    kind: ClassVar[SubjectKind] = "prompt"
    prefix: ClassVar[str] = "prompt:"

    listing: Prompt

    def encoder_arguments(self, engine: Any, result: ToolResult) -> tuple[Any, ...]:
        roles = result.roles if isinstance(result, PromptResult) else []
        roles = [*roles, *["user"] * len(result.content)][: len(result.content)]  # middleware may add and remove blocks
        about = self.listing.description
        if about is not UNSET and engine.guard_set.sanitizer is not None:
            about = engine.guard_set.sanitizer.text(about)
        return (PromptResult(result.content, meta=result.meta, roles=roles, description=about),)

    def renamed(self, prefix: str) -> Self:
        name = prefix + self.tool.name
        return replace(self, tool=replace(self.tool, name=name), listing=replace(self.listing, name=name))

    def rename(self, name: str) -> None:
        super().rename(name)
        self.listing = replace(self.listing, name=name)

    def definition(self, revision: Revision) -> Any:
        return revision.definition(self.listing)

    def definition_losses(self, revision: Revision) -> list[str]:
        return revision.definition_losses(self.listing)


def make_prompt_entry(prompt: Prompt, schema: Object, *, complete: Any = None, **rest: Any) -> PromptEntry:
    """Check a definition, and compile everything that a request for the prompt needs of it."""
    where = f"prompt {prompt.name!r}"
    if not prompt.name or not isinstance(prompt.name, str):
        raise SchemaError(f"{where}: a name is a text of at least one character")
    required = schema.get("required", ())
    arguments = [
        PromptArgument(name, each.get("title", UNSET), each.get("description", UNSET), name in required)
        for name, each in schema.get("properties", {}).items()
    ]
    prompt = normalize(replace(prompt, arguments=arguments or UNSET), where)
    return PromptEntry(
        tool=Tool(name=prompt.name, title=prompt.title, description=prompt.description, input_schema=schema),
        listing=prompt,
        convert=to_messages,
        input=compile_schema(schema, where),
        output=None,
        wraps=False,
        dangerous=UNSET,
        complete=make_completers(complete, schema, where),
        **rest,
    )


def to_messages(value: Any, name: str = "") -> ToolResult:
    """Return the value of a prompt as messages; a text, or a block, is a message of the user."""
    if isinstance(value, ToolResult):
        return value
    messages = [_message(each) for each in (value if isinstance(value, list | tuple) else [value])]
    content = [Text(each.content) if isinstance(each.content, str) else each.content for each in messages]
    return PromptResult(content, roles=[each.role for each in messages])


def _message(value: Any) -> PromptMessage:
    if isinstance(value, PromptMessage):
        if not isinstance(value.content, (str, *_BLOCKS)):
            raise TypeError(f"PromptMessage.content: expected a text or a block, got {describe_value(value.content)}")
        return value
    if isinstance(value, (str, *_BLOCKS)):
        return PromptMessage("user", value)
    raise TypeError(
        f"a prompt returns a text, PromptMessage(…), a block or a list of them, not {describe_value(value)}"
    )
