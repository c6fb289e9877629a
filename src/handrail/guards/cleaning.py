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
from handrail.text.controls import escape_keep_crlf, strip_controls
from handrail.text.media import active_svg, check_media, size_of
from handrail.text.prefilter import Prefilter

if TYPE_CHECKING:
    from handrail.guards.sanitize import Sanitize

__all__ = ["DANGEROUS_RULES", "Finding", "ResultCleaner"]

DANGEROUS_RULES = frozenset(
    {"escape sequence", "tag character", "bidirectional control", "private_key", "mismatch", "scripts"}
)
_MAX_FINDINGS = 64  # findings told one by one
_NOTICE_CHARACTERS = 200  # characters kept free for it
_JOINING_CHARACTERS = "\u200c\u200d\ufe0e\ufe0f\u20e3" + "".join(map(chr, range(0x1F3FB, 0x1F400)))

FindingKind = Literal["control", "secret", "media", "size", "inspector"]


class Finding(Struct, frozen=True):
    """Something that was found in a result. Of a secret only the rule that found it is told."""

    kind: FindingKind
    where: str  # "content/0/text", "structuredContent/user/name", "message"
    rule: str
    count: int = 1
    changed: bool = False  # whether something was removed, masked, cut or withheld


class ResultCleaner:
    """One result on its way, and what has been found in it.

    `copies`: the result is looked at in another thread. Code of its author may change its lists and objects meanwhile,
    so that what leaves are the copies that were looked at.
    """

    __slots__ = ("_copies", "_merged_at", "_options", "_prefilter", "findings")

    def __init__(self, prefilter: Prefilter, options: Sanitize, *, copies: bool = False) -> None:
        self._prefilter = prefilter
        self._options = options
        self._copies = copies
        self.findings: list[Finding] = []
        self._merged_at: dict[tuple[str, str, str], int] = {}  # where findings are that are told together

    def result(self, result: ToolResult) -> ToolResult:
        """All of it but its size; the same object when nothing had to be done."""
        structured = self.value(result.structured, "structuredContent")
        content = [*result.content] if self._copies else result.content
        if any(each.changed for each in self.findings):  # the same as text would give it back to whoever parses that
            json_text = encode(structured).decode()
            content = [Text(json_text) if _is_json_of(each, result.structured) else each for each in content]
        parts: Object = {
            "content": self._content(content),
            "structured": structured,
            "meta": self.value(result.meta, "_meta"),
            "data": self.value(result.data, "data"),
        }
        changed = {name: part for name, part in parts.items() if part is not getattr(result, name)}
        return replace(result, **changed) if changed else result

    def string(self, text: str, where: str) -> str:
        if self._prefilter.is_clean(text):
            return text
        [cleaned] = self._mask_secrets([self._strip_controls(text, where)], [where])
        return text if cleaned == text else cleaned

    def value(self, value: Json, where: str) -> Json:
        """A JSON value with every string in it cleaned, keys too; itself when nothing had to be done."""
        if isinstance(value, str):
            return self.string(value, where)
        if isinstance(value, dict):
            cleaned: Object = {}
            same = True
            suffixes = count(2)  # one for all keys: the time must not grow with the square of their number
            for key, inner in [*value.items()] if self._copies else value.items():
                name = plain = self.string(key, where)
                new = self.value(inner, self._member_path(where, name))
                same = same and name is key and new is inner
                while name in cleaned:  # two keys differed only in what was taken out
                    name = f"{plain}_{next(suffixes)}"
                cleaned[name] = new
            return value if same and not self._copies else cleaned
        if isinstance(value, list):
            items = [self.value(inner, f"{where}/{at}") for at, inner in enumerate([*value])]
            return items if self._copies or _differ(items, value) else value
        return value

    def block_reason(self) -> str:
        """Why the result may not leave; "" when it may."""
        verdicts = {"control": self._options.controls, "secret": self._options.secrets}
        blocking = [each for each in self.findings if verdicts.get(each.kind) == "block"]
        reasons = [*dict.fromkeys(f"{each.rule.replace('_', ' ')} in {each.where}" for each in blocking)]
        return f"it has {', '.join(reasons[:5])}" if reasons else ""

    def cap(self, result: ToolResult, store_remainder: Callable[[str], str] | None) -> ToolResult:
        """The result within its sizes: texts are cut, with a notice how to read on. Data cannot be cut."""
        content, limit = [*result.content], self._options.max_result or maxsize
        if result.structured is not UNSET and self._options.max_result:
            json_text = encode(result.structured).decode()
            if len(json_text) > limit:
                self._add_finding("size", "structuredContent", "max_result", len(json_text), changed=True)
                why = f"The data of this result is {len(json_text):,} characters of JSON; {limit:,} are allowed. "
                why += "Here as text:"
                content = [Text(why), Text(json_text), *(each for each in content if _text(each) != json_text)]
                result = replace(result, structured=UNSET, is_error=True)
        for at, block in enumerate(content):
            if len(_text(block)) > (self._options.max_text or maxsize):
                content[at] = self._cut(block, (self._options.max_text or 0) - _NOTICE_CHARACTERS, "", store_remainder)
                self._add_finding("size", f"content/{at}/text", "max_text", len(_text(block)), changed=True)
        total = sum(len(_text(block)) for block in content)
        if total > limit:
            self._add_finding("size", "content", "max_result", total, changed=True)
            content = self._fit(content, limit - _NOTICE_CHARACTERS, store_remainder)
        return replace(result, content=content) if _differ(content, result.content) else result

    def _content(self, blocks: list[Block]) -> list[Block]:
        cleaned = [self._block(block, f"content/{at}") for at, block in enumerate(blocks)]
        texts = {at: block for at, block in enumerate(cleaned) if isinstance(block, Text)}
        where = [f"content/{at}/text" for at in texts]
        stripped = [self._strip_controls(block.text, place) for block, place in zip(texts.values(), where, strict=True)]
        for (at, block), text in zip(texts.items(), self._mask_secrets(stripped, where), strict=True):
            if text != block.text:
                cleaned[at] = replace(block, text=text)
        return cleaned if _differ(cleaned, blocks) else blocks

    def _block(self, block: Block, where: str) -> Block:
        """The block, but for the text of a Text: those are looked at together."""
        if isinstance(block, dict):
            unknown: Object = self.value(block, where)
            return unknown
        values = {name: getattr(block, name) for name in block.__struct_fields__ if name not in ("text", "data")}
        cleaned = {name: self.value(value, f"{where}/{name}") for name, value in values.items()}
        changed = {name: value for name, value in cleaned.items() if value is not values[name]}
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
                self._add_finding("media", where, "scripts", changed=is_withheld)
            return Text(f"[resource withheld: {reason}]") if is_withheld else block
        return block

    def _media(self, block: Image | Audio | EmbeddedResource, mime: str, data: bytes | str, where: str) -> Block:
        label, size, limit = type(block).__name__.lower(), size_of(data), self._options.max_media or maxsize
        if size > limit:
            self._add_finding("size", where, "max_media", size, changed=True)
            return Text(f"[{label} withheld: {size:,} bytes, more than the {limit:,} allowed]")
        defect = check_media(mime, data) if self._options.media != "keep" else None
        if defect is None:
            return block
        rule, reason = defect
        is_withheld = rule in DANGEROUS_RULES and self._options.media == "withhold"
        self._add_finding("media", where, rule, changed=is_withheld)
        return Text(f"[{label} withheld: {reason}]") if is_withheld else block

    def _strip_controls(self, text: str, where: str) -> str:
        """Without what acts or hides."""
        action = self._options.controls
        if action == "keep" or self._prefilter.has_no_controls(text):
            return text
        stripped, counts = strip_controls(text)
        for rule, times in counts.items():
            self._add_finding("control", where, rule, times, changed=action != "report")
        if action == "show" and self._prefilter.secrets.has_none(
            stripped
        ):  # written out inside a secret it would hide that
            return escape_keep_crlf(text)
        return text if action == "report" else stripped

    def _mask_secrets(self, texts: list[str], where: Sequence[str]) -> list[str]:
        """Without secrets, also those that go from one text into the next."""
        action = self._options.secrets
        if action == "keep":
            return texts
        masked, hits = self._prefilter.secrets.mask_texts(texts)
        for (at, rule), times in Counter(hits).items():
            self._add_finding("secret", where[at], rule, times, changed=action != "report")
        return texts if action == "report" else masked

    def _add_finding(self, kind: FindingKind, where: str, rule: str, count: int = 1, *, changed: bool = False) -> None:
        if len(self.findings) >= _MAX_FINDINGS:
            where = where.partition("/")[0]
            at = self._merged_at.setdefault((kind, where, rule), len(self.findings))
            if at < len(self.findings):
                self.findings[at] = replace(self.findings[at], count=self.findings[at].count + count)
                return
        self.findings.append(Finding(kind, where, rule, count, changed))

    def _member_path(self, where: str, key: str) -> str:
        if not self._prefilter.is_clean(key):  # it may be what is not to leave
            [key], _ = self._prefilter.secrets.mask_texts([strip_controls(key)[0]])
        return f"{where}/{key[:80]}" if len(where) < 400 else where

    def _fit(self, content: list[Block], left: int, store_remainder: Callable[[str], str] | None) -> list[Block]:
        """The content up to where it is too long; the texts that follow are read on as one."""
        fitting: list[Block] = []
        for at, block in enumerate(content):
            if len(_text(block)) > left:
                later = "".join(f"\n{_text(each)}" for each in content[at + 1 :] if _text(each))
                return [
                    *fitting,
                    self._cut(block, left, later, store_remainder),
                    *(e for e in content[at + 1 :] if not _text(e)),
                ]
            left -= len(_text(block))
            fitting.append(block)
        return fitting

    def _cut(self, block: Block, end: int, later: str, store_remainder: Callable[[str], str] | None) -> Block:
        text = _text(block)
        for _ in range(32):  # not inside of what is seen as one character
            if end == 0 or not (text[end] in _JOINING_CHARACTERS or text[end - 1] == "\u200d" or combining(text[end])):
                break
            end -= 1
        rest = "the rest was cut, so ask for less at a time"
        if store_remainder is not None:
            rest = f'call read_more with handle "{store_remainder(text[end:] + later)}" for the rest'
        excerpt = f"{text[:end]}\n[… {end:,} of {len(text) + len(later):,} characters shown; {rest}]"
        if isinstance(block, EmbeddedResource):
            return replace(block, resource={**block.resource, "text": excerpt})
        return Text(excerpt)


def _differ(cleaned: Iterable[object], originals: Iterable[object]) -> bool:
    cleaned, originals = list(cleaned), list(originals)
    return len(cleaned) != len(originals) or any(new is not old for new, old in zip(cleaned, originals, strict=True))


def _text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    return block.resource.get("text", "") if isinstance(block, EmbeddedResource) else ""


def _is_json_of(block: Block, value: Json) -> bool:
    """Whether this is a text that says the same in JSON."""
    try:
        return isinstance(block, Text) and bool(parse(block.text) == value)
    except (MsgspecError, UnicodeEncodeError):
        return False
