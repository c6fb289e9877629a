"""Results of calls, for programs, for people and for models."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, TypeVar, cast

from msgspec import UNSET, DecodeError, to_builtins
from msgspec.json import decode

from handrail.client.tools import ListedTool
from handrail.errors import CallFailed, InvalidResult, Refused
from handrail.jsonrpc import encode
from handrail.model import REFUSED, RISK, SANITIZED, Block, EmbeddedResource, Image, Json, Object, Text, ToolResult
from handrail.revisions import Revision
from handrail.schema.derive import reader_for
from handrail.text.controls import strip_invisible

T = TypeVar("T")
Shape = Literal["anthropic", "openai", "text"]


class CallResult:
    """The result of a tool. `raw` is all of it, unchanged.

    `text` is its text, `data` its structured content (None without), `content` its blocks. `problems` lists what is
    malformed in it but does not make it useless; with `Client(strict=True)` such a result is an error.
    """

    def __init__(self, raw: Object, tool: ListedTool, revision: Revision, problems: list[str]) -> None:
        self.raw = raw
        self.tool = tool
        self.revision = revision.name
        self._problems = problems
        self._wire_revision = revision
        self._result: ToolResult | None = None
        # Decoded only if the flag is not plainly false.
        self.is_error = raw.get("isError") is not False and self.result.is_error

    def __repr__(self) -> str:
        state = "error" if self.is_error else "result"
        return f"<{state} of {self.tool.name!r}: {self.text[:100]!r}>"

    @property
    def result(self) -> ToolResult:
        """The result as `ToolResult`, the same for all revisions."""
        if self._result is None:
            self._result = self._wire_revision.read(self.raw)
        return self._result

    @property
    def problems(self) -> list[str]:
        return self._problems + self._wire_revision.result_problems(self.raw)

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def data(self) -> Any:
        structured = self.result.structured
        return None if structured is UNSET else structured

    def into(self, kind: type[T]) -> T:
        """Return the data as a dataclass, Struct, TypedDict or pydantic model; InvalidResult where it does not fit.

        Without structured content the text is parsed as JSON. CallFailed if the tool reports a failure.
        """
        if self.is_error:
            raise CallFailed(self.text, result=self)
        name = getattr(kind, "__name__", str(kind))
        data = self.data
        if data is None:
            try:
                data = decode(self.text)
            except DecodeError:
                text = f"the result has no structured content, and its text is not JSON: it cannot become {name}"
                raise InvalidResult(text, result=self) from None
        read = reader_for(kind)
        try:
            return cast(T, read(data))
        except Refused as problem:
            # Servers wrap a value that is not an object, in revisions that require one.
            if type(data) is dict and data.keys() == {"result"}:
                with suppress(Refused):
                    return cast(T, read(data["result"]))
            raise InvalidResult(f"the result does not fit {name}: {problem.text}", result=self) from None

    @property
    def content(self) -> list[Block]:
        return self.result.content

    @property
    def risk(self) -> str:
        """The reason why the result needs caution; empty without."""
        risk = self.result.meta.get(RISK) if type(self.result.meta) is dict else None
        return str(risk.get("reason", "")) if type(risk) is dict else ""

    @property
    def sanitized(self) -> dict[str, int]:
        """Changes by the server's sanitizer, by class: `{"tag character": 12, "secret": 1}`."""
        counts = self.result.meta.get(SANITIZED) if type(self.result.meta) is dict else None
        return {name: n for name, n in counts.items() if type(n) is int} if type(counts) is dict else {}

    @property
    def refused(self) -> str:
        """Why a Handrail server did not run the tool ("forbidden": denied by a rule); empty if unknown."""
        meta = self.raw.get("_meta")
        kind = meta.get(REFUSED) if type(meta) is dict else None
        return kind if self.is_error and type(kind) is str else ""

    def for_model(self, shape: Shape = "text") -> Any:
        """Return what the model is to see: blocks for it, errors in words, risks marked, no invisible characters.

        As one text, or as the content of a tool result in the shape of a model's API.
        """
        parts: list[Json] = []
        if self.risk:
            parts.append(f"[caution: {strip_invisible(self.risk)}]")
        if self.is_error:
            parts.append("[the tool failed]")
        # A block that cannot be decoded is named at its place below.
        problems = [each for each in self._wire_revision.result_problems(self.raw) if not each.startswith("content/")]
        parts += [f"[malformed result: {strip_invisible(each)}]" for each in problems]
        for block in self.content:
            members = to_builtins(block)
            members = members if type(members) is dict else {}
            if _is_for_model(members.get("annotations")):
                parts.append(_part(block, members))
        if not self.content and self.data is not None:
            parts.append(strip_invisible(encode(self.data).decode(), is_data=True))
        if shape == "text":
            return "\n".join(each if isinstance(each, str) else each["alt"] for each in parts)
        return [
            {"type": "text", "text": each} if isinstance(each, str) else _IMAGE_BLOCK[shape](each) for each in parts
        ]


def _is_for_model(notes: Json) -> bool:
    audience = notes.get("audience") if type(notes) is dict else None
    return type(audience) is not list or not audience or "assistant" in audience


def _part(block: Block, members: Object) -> Json:
    """Return a text, or an image with an alternative text."""
    if isinstance(block, Text):
        return strip_invisible(block.text, is_data=True)
    if isinstance(block, EmbeddedResource) and "text" in block.resource:
        return f"[{strip_invisible(block.resource['uri'])}]\n{strip_invisible(block.resource['text'], is_data=True)}"
    kind, mime = members.get("type"), str(members.get("mimeType", ""))
    if kind == "resource_link":
        return strip_invisible(f"[{members.get('name')}: {members.get('uri')}]")
    alt = strip_invisible(f"[{kind if type(kind) is str else 'unreadable content'}{', ' + mime if mime else ''}]")
    return {"alt": alt, "mime": mime, "data": members["data"]} if isinstance(block, Image) else alt


def _anthropic(picture: Object) -> Object:
    return {"type": "image", "source": {"type": "base64", "media_type": picture["mime"], "data": picture["data"]}}


def _openai(picture: Object) -> Object:
    return {"type": "image_url", "image_url": {"url": f"data:{picture['mime']};base64,{picture['data']}"}}


_IMAGE_BLOCK = {"anthropic": _anthropic, "openai": _openai}
