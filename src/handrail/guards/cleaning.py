"""One result, walked: every string of it looked at, every picture and sound, every size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from sys import maxsize
from typing import TYPE_CHECKING, Literal
from unicodedata import combining

from msgspec import UNSET, MsgspecError, Struct
from msgspec.json import decode as parse
from msgspec.structs import replace

from handrail.jsonrpc import encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, Text, ToolResult
from handrail.text.controls import quiet, written_out
from handrail.text.media import active_svg, size_of, trouble
from handrail.text.prefilter import Sight

if TYPE_CHECKING:
    from handrail.guards.sanitize import Sanitize

__all__ = ["FEARED", "Cleaning", "Finding"]

FEARED = frozenset({"escape sequence", "tag character", "bidirectional control", "private_key", "mismatch", "scripts"})
_MANY = 64  # findings told one by one
_NOTICE = 200  # characters kept free for it
_JOINS = "\u200c\u200d\ufe0e\ufe0f\u20e3" + "".join(map(chr, range(0x1F3FB, 0x1F400)))

Kind = Literal["control", "secret", "media", "size", "inspector"]


class Finding(Struct, frozen=True):
    """Something that was found in a result. Of a secret only the rule that found it is told."""

    kind: Kind
    where: str  # "content/0/text", "structuredContent/user/name", "message"
    rule: str
    count: int = 1
    changed: bool = False  # whether something was removed, masked, cut or withheld


class Cleaning:
    """One result on its way, and what has been found in it.

    `copies`: the result is looked at in another thread. Code of its author may change its lists and objects meanwhile,
    so that what leaves are the copies that were looked at.
    """

    __slots__ = ("_copies", "_options", "_sight", "_told", "findings")

    def __init__(self, sight: Sight, options: Sanitize, *, copies: bool = False) -> None:
        self._sight = sight
        self._options = options
        self._copies = copies
        self.findings: list[Finding] = []
        self._told: dict[tuple[str, str, str], int] = {}  # where findings are that are told together

    def result(self, given: ToolResult) -> ToolResult:
        """All of it but its size; the same object when nothing had to be done."""
        structured = self.value(given.structured, "structuredContent")
        content = [*given.content] if self._copies else given.content
        if any(each.changed for each in self.findings):  # the same as text would give it back to whoever parses that
            said = encode(structured).decode()
            content = [Text(said) if _says(each, given.structured) else each for each in content]
        parts: Object = {
            "content": self._content(content),
            "structured": structured,
            "meta": self.value(given.meta, "_meta"),
            "data": self.value(given.data, "data"),
        }
        changed = {name: part for name, part in parts.items() if part is not getattr(given, name)}
        return replace(given, **changed) if changed else given

    def string(self, text: str, where: str) -> str:
        if self._sight.is_plain(text):
            return text
        [made] = self._hidden([self._quiet(text, where)], [where])
        return text if made == text else made

    def value(self, value: Json, where: str) -> Json:
        """A JSON value with every string in it cleaned, keys too; itself when nothing had to be done."""
        if isinstance(value, str):
            return self.string(value, where)
        if isinstance(value, dict):
            made: Object = {}
            same = True
            spare = count(2)  # one for all keys: the time must not grow with the square of their number
            for key, inner in [*value.items()] if self._copies else value.items():
                name = plain = self.string(key, where)
                new = self.value(inner, self._below(where, name))
                same = same and name is key and new is inner
                while name in made:  # two keys differed only in what was taken out
                    name = f"{plain}_{next(spare)}"
                made[name] = new
            return value if same and not self._copies else made
        if isinstance(value, list):
            items = [self.value(inner, f"{where}/{at}") for at, inner in enumerate([*value])]
            return items if self._copies or _differ(items, value) else value
        return value

    def blocked(self) -> str:
        """Why the result may not leave; "" when it may."""
        verdicts = {"control": self._options.controls, "secret": self._options.secrets}
        found = [each for each in self.findings if verdicts.get(each.kind) == "block"]
        reasons = [*dict.fromkeys(f"{each.rule.replace('_', ' ')} in {each.where}" for each in found)]
        return f"it has {', '.join(reasons[:5])}" if reasons else ""

    def capped(self, result: ToolResult, keep: Callable[[str], str] | None) -> ToolResult:
        """The result within its sizes: texts are cut, with a notice how to read on. Data cannot be cut."""
        content, most = [*result.content], self._options.max_result or maxsize
        if result.structured is not UNSET and self._options.max_result:
            said = encode(result.structured).decode()
            if len(said) > most:
                self._note("size", "structuredContent", "max_result", len(said), changed=True)
                why = (
                    f"The data of this result is {len(said):,} characters of JSON; {most:,} are allowed. Here as text:"
                )
                content = [Text(why), Text(said), *(each for each in content if _text(each) != said)]
                result = replace(result, structured=UNSET, is_error=True)
        for at, block in enumerate(content):
            if len(_text(block)) > (self._options.max_text or maxsize):
                content[at] = self._cut(block, (self._options.max_text or 0) - _NOTICE, "", keep)
                self._note("size", f"content/{at}/text", "max_text", len(_text(block)), changed=True)
        total = sum(len(_text(block)) for block in content)
        if total > most:
            self._note("size", "content", "max_result", total, changed=True)
            content = self._fitted(content, most - _NOTICE, keep)
        return replace(result, content=content) if _differ(content, result.content) else result

    def _content(self, blocks: list[Block]) -> list[Block]:
        made = [self._block(block, f"content/{at}") for at, block in enumerate(blocks)]
        texts = {at: block for at, block in enumerate(made) if isinstance(block, Text)}
        where = [f"content/{at}/text" for at in texts]
        quieter = [self._quiet(block.text, place) for block, place in zip(texts.values(), where, strict=True)]
        for (at, block), text in zip(texts.items(), self._hidden(quieter, where), strict=True):
            if text != block.text:
                made[at] = replace(block, text=text)
        return made if _differ(made, blocks) else blocks

    def _block(self, block: Block, where: str) -> Block:
        """The block, but for the text of a Text: those are looked at together."""
        if isinstance(block, dict):
            unknown: Object = self.value(block, where)
            return unknown
        values = {name: getattr(block, name) for name in block.__struct_fields__ if name not in ("text", "data")}
        made = {name: self.value(value, f"{where}/{name}") for name, value in values.items()}
        changed = {name: value for name, value in made.items() if value is not values[name]}
        if changed:
            try:
                block = replace(block, **changed)
            except ValueError:  # of an address nothing may be left
                return Text("[withheld: without what had to be taken out it is not valid]")
        if isinstance(block, Image | Audio):
            return self._media(block, block.mime_type, block.data, where)
        if isinstance(block, EmbeddedResource) and "blob" in block.resource:
            return self._media(block, block.resource.get("mimeType", ""), block.resource["blob"], where)
        if isinstance(block, EmbeddedResource) and self._options.media != "keep" and "<" in _text(block):
            reason = active_svg(block.resource.get("mimeType", ""), _text(block))
            is_withheld = bool(reason) and self._options.media == "withhold"
            if reason:
                self._note("media", where, "scripts", changed=is_withheld)
            return Text(f"[resource withheld: {reason}]") if is_withheld else block
        return block

    def _media(self, block: Image | Audio | EmbeddedResource, mime: str, data: bytes | str, where: str) -> Block:
        what, size, most = type(block).__name__.lower(), size_of(data), self._options.max_media or maxsize
        if size > most:
            self._note("size", where, "max_media", size, changed=True)
            return Text(f"[{what} withheld: {size:,} bytes, more than the {most:,} allowed]")
        found = trouble(mime, data) if self._options.media != "keep" else None
        if found is None:
            return block
        rule, reason = found
        is_withheld = rule in FEARED and self._options.media == "withhold"
        self._note("media", where, rule, changed=is_withheld)
        return Text(f"[{what} withheld: {reason}]") if is_withheld else block

    def _quiet(self, text: str, where: str) -> str:
        """Without what acts or hides."""
        wanted = self._options.controls
        if wanted == "keep" or self._sight.is_calm(text):
            return text
        made, counts = quiet(text)
        for rule, times in counts.items():
            self._note("control", where, rule, times, changed=wanted != "report")
        if wanted == "show" and self._sight.secrets.absent(made):  # written out inside a secret it would hide that
            return written_out(text)
        return text if wanted == "report" else made

    def _hidden(self, texts: list[str], where: Sequence[str]) -> list[str]:
        """Without secrets, also those that go from one text into the next."""
        wanted = self._options.secrets
        if wanted == "keep":
            return texts
        made, hits = self._sight.secrets.masked(texts)
        for (at, rule), times in Counter(hits).items():
            self._note("secret", where[at], rule, times, changed=wanted != "report")
        return texts if wanted == "report" else made

    def _note(self, kind: Kind, where: str, rule: str, count: int = 1, *, changed: bool = False) -> None:
        if len(self.findings) >= _MANY:
            where = where.partition("/")[0]
            at = self._told.setdefault((kind, where, rule), len(self.findings))
            if at < len(self.findings):
                self.findings[at] = replace(self.findings[at], count=self.findings[at].count + count)
                return
        self.findings.append(Finding(kind, where, rule, count, changed))

    def _below(self, where: str, key: str) -> str:
        if not self._sight.is_plain(key):  # it may be what is not to leave
            [key], _ = self._sight.secrets.masked([quiet(key)[0]])
        return f"{where}/{key[:80]}" if len(where) < 400 else where

    def _fitted(self, content: list[Block], left: int, keep: Callable[[str], str] | None) -> list[Block]:
        """The content up to where it is too long; the texts that follow are read on as one."""
        made: list[Block] = []
        for at, block in enumerate(content):
            if len(_text(block)) > left:
                later = "".join(f"\n{_text(each)}" for each in content[at + 1 :] if _text(each))
                return [*made, self._cut(block, left, later, keep), *(e for e in content[at + 1 :] if not _text(e))]
            left -= len(_text(block))
            made.append(block)
        return made

    def _cut(self, block: Block, end: int, later: str, keep: Callable[[str], str] | None) -> Block:
        text = _text(block)
        for _ in range(32):  # not inside of what is seen as one character
            if end == 0 or not (text[end] in _JOINS or text[end - 1] == "\u200d" or combining(text[end])):
                break
            end -= 1
        rest = "the rest was cut, so ask for less at a time"
        if keep is not None:
            rest = f'call read_more with handle "{keep(text[end:] + later)}" for the rest'
        shown = f"{text[:end]}\n[… {end:,} of {len(text) + len(later):,} characters shown; {rest}]"
        if isinstance(block, EmbeddedResource):
            return replace(block, resource={**block.resource, "text": shown})
        return Text(shown)


def _differ(made: Iterable[object], given: Iterable[object]) -> bool:
    made, given = list(made), list(given)
    return len(made) != len(given) or any(new is not old for new, old in zip(made, given, strict=True))


def _text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    return block.resource.get("text", "") if isinstance(block, EmbeddedResource) else ""


def _says(block: Block, value: Json) -> bool:
    """Whether this is a text that says the same in JSON."""
    try:
        return isinstance(block, Text) and bool(parse(block.text) == value)
    except (MsgspecError, UnicodeEncodeError):
        return False
