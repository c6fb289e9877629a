"""The prompts of one server: listed, filled in, and completed while they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.client.inflight import deadline_at
from handrail.client.tools import ListedEntry
from handrail.errors import InvalidResult, LocalProtocolError, RemoteProtocolError
from handrail.jsonrpc import encode
from handrail.model import Json, Object, PromptMessage, Text
from handrail.revisions import Revision
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.suggest import describe_value

if TYPE_CHECKING:
    from handrail.client.server_tools import ServerTools
    from handrail.guards.policy import SubjectKind

_UNKNOWN_METHOD = -32601


class ListedPrompt(ListedEntry):
    """A prompt of a server; `name` is its name in this client, `raw` the whole entry of the server."""

    kind = "prompt"

    @property
    def arguments(self) -> list[Object]:
        """The arguments as the server lists them: `name`, and perhaps `title`, `description` and `required`."""
        arguments = self.raw.get("arguments")
        arguments = arguments if type(arguments) is list else []
        return [each for each in arguments if type(each) is dict and type(each.get("name")) is str]


class PromptMessages:
    """The messages of a prompt. `raw` is all of the result, unchanged.

    The content of a message is a block of a tool result; one of an unknown kind is the dict it came as. `problems`
    lists what is malformed in it but does not make it useless; with `Client(strict=True)` such a result is an error.
    """

    def __init__(self, raw: Object, revision: Revision) -> None:
        self.raw = raw
        self.messages: list[PromptMessage] = []
        self.problems: list[str] = []
        messages = raw.get("messages")
        if type(messages) is not list:
            raise InvalidResult("there is no list of messages", result=raw)
        for place, message in enumerate(messages):
            role = message.get("role") if type(message) is dict else None
            if role not in ("user", "assistant") or type(message.get("content")) is not dict:
                self.problems.append(f"messages/{place}: not an object with a role, user or assistant, and one content")
                continue
            # Read as the content of a result. Twice, since pocket takes one empty text for none.
            block = revision.read({"content": [message["content"]] * 2}).content[0]
            flaws = revision.result_problems({"content": [message["content"]]})
            self.problems += [each.replace("content/0", f"messages/{place}/content", 1) for each in flaws]
            self.messages.append(PromptMessage(role, block))
        if messages and not self.messages:
            raise InvalidResult("; ".join(self.problems[:3]), result=raw)

    def __repr__(self) -> str:
        return f"<{len(self.messages)} messages: {self.text[:100]!r}>"

    @property
    def description(self) -> str:
        description = self.raw.get("description")
        return description if type(description) is str else ""

    @property
    def text(self) -> str:
        """All texts, one below the other."""
        return "\n".join([each.content.text for each in self.messages if isinstance(each.content, Text)])


class Completion(Struct, frozen=True):
    """Values that an argument can have. `total` is how many there are, if the server tells; `raw` is what it said."""

    values: list[str] = []
    total: int | None = None
    has_more: bool = False
    raw: Object = {}

    @property
    def text(self) -> str:
        return "\n".join(self.values)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


async def get_prompt(remote: ServerTools, name: str, arguments: Mapping[str, Any], **options: Any) -> PromptMessages:
    params = {"name": name, "arguments": _texts(remote, f"prompts/get {name}", arguments)}
    return await remote.request("prompt", name, "prompts/get", params, PromptMessages, **options)


async def complete(
    remote: ServerTools, own_name: str, is_template: bool, argument: str, value: str, context: Mapping[str, Any]
) -> Completion:
    connection, phase = remote.connection, f"completion/complete {own_name}"
    name = {"type": "ref/resource", "uri": own_name} if is_template else {"type": "ref/prompt", "name": own_name}
    params: Object = {"ref": name, "argument": {"name": argument, "value": value}}
    texts, deadline = _texts(remote, phase, context), connection.now() + connection.clocks.total
    if type(value) is not str:
        raise LocalProtocolError(f"{remote.name}: {phase}: not sent: value is a text, got {describe_value(value)}")
    async with deadline_at(deadline, connection.clocks):
        await connection.open()
    revision = connection.revision
    assert revision is not None
    if "completions" in revision.server_capabilities and not connection.offers("completions"):
        return Completion()
    if texts and "context" in revision.requests["completion/complete"].__struct_fields__:
        params["context"] = {"arguments": texts}
    kind: SubjectKind = "resource" if is_template else "prompt"
    try:
        return await remote.request(kind, own_name, "completion/complete", params, _completion, deadline=deadline)
    except RemoteProtocolError as refused:
        if refused.code == _UNKNOWN_METHOD:
            return Completion()
        raise


def _completion(raw: Object, revision: Revision) -> Completion:
    completion: Json = raw.get("completion")
    values = completion.get("values") if type(completion) is dict else None
    if type(values) is not list or not all(type(each) is str for each in values):
        raise InvalidResult("there is no list of texts to choose from", result=raw)
    total = completion.get("total")
    return Completion(values, total if type(total) is int else None, completion.get("hasMore") is True, raw)


def _texts(remote: ServerTools, phase: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as they are sent; None is left out."""
    if not isinstance(arguments, Mapping):
        raise LocalProtocolError(f"{remote.name}: {phase}: not sent: arguments are a dict, by name")
    try:
        present = to_jsonable({name: value for name, value in arguments.items() if value is not None})
    except NotJson as problem:
        raise LocalProtocolError(f"{remote.name}: {phase}: not sent: {problem}") from None
    return {name: value if type(value) is str else encode(value).decode() for name, value in present.items()}
