"""What may leave: results without what acts or hides, without secrets, within their sizes, and of their declared types.

Printable text stays as it is, and so do newlines, tabs, emoji and the joiners that spelling needs. What is done about
the rest is the operator's choice: taken out, shown, reported, or a reason to withhold the result.

The usual result costs one look of the linear-time engine at all of its text; only what that finds is walked.

Pictures and sounds that are what they say: the first bytes of a block against its declared type.
"""

from __future__ import annotations

import logging
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from html import unescape
from itertools import count, islice
from sys import maxsize
from typing import Annotated, Literal, TypeGuard
from unicodedata import combining

from msgspec import UNSET, Meta, MsgspecError, Struct, UnsetType
from msgspec.json import decode as parse
from msgspec.structs import asdict, replace

from handrail.errors import HandrailError
from handrail.jsonrpc import encode
from handrail.model import Audio, Block, EmbeddedResource, Image, Json, Object, Text, ToolResult
from handrail.suggest import expect, mapping
from handrail.text.controls import MASK, escape_keep_crlf, strip_controls, texts_in
from handrail.text.prefilter import Prefilter
from handrail.text.secrets import Secrets, compile_absence, secrets_in

log = logging.getLogger("handrail")

__all__ = [
    "DANGEROUS_RULES",
    "Blocked",
    "Finding",
    "Inspector",
    "ResultCleaner",
    "Sanitize",
    "Sanitizer",
    "ToolSanitize",
    "active_svg",
    "changes",
    "check_media",
    "is_small",
    "merge_findings",
    "risk",
    "secrets_in",
    "size_of",
]

_HEAD_BYTES = 512

# What begins so, or has this from the given place on, is of that type. The first that fits counts.
_SIGNATURES: tuple[tuple[str, int, tuple[bytes, ...]], ...] = (
    ("image/png", 0, (b"\x89PNG\r\n\x1a\n",)),
    ("image/jpeg", 0, (b"\xff\xd8\xff",)),
    ("image/gif", 0, (b"GIF87a", b"GIF89a")),
    ("image/webp", 8, (b"WEBP",)),
    ("image/bmp", 0, (b"BM",)),
    ("image/tiff", 0, (b"II*\0", b"MM\0*")),
    ("image/avif", 4, (b"ftypavif",)),
    ("image/heic", 4, (b"ftyphei", b"ftypmif1")),
    ("audio/wav", 8, (b"WAVE",)),
    ("audio/mpeg", 0, (b"ID3", b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")),
    ("audio/aac", 0, (b"\xff\xf1", b"\xff\xf9")),
    ("audio/ogg", 0, (b"OggS",)),
    ("audio/flac", 0, (b"fLaC",)),
    ("audio/webm", 0, (b"\x1aE\xdf\xa3",)),
    ("audio/mp4", 4, (b"ftyp",)),
    ("application/pdf", 0, (b"%PDF",)),
    ("an archive", 0, (b"PK\x03\x04", b"\x1f\x8b", b"Rar!", b"7z\xbc\xaf")),
    ("a document with macros", 0, (b"\xd0\xcf\x11\xe0", b"{\\rtf")),
    ("a program", 0, (b"MZ", b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\0asm", b"#!")),
)
_TYPE_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-ms-bmp": "image/bmp",
    "image/heif": "image/heic",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "audio/x-aac": "audio/aac",
    "audio/aacp": "audio/aac",
    "audio/opus": "audio/ogg",
    "audio/vorbis": "audio/ogg",
    "audio/x-flac": "audio/flac",
    "audio/x-m4a": "audio/mp4",
    "audio/m4a": "audio/mp4",
}
_RECOGNISED_TYPES = frozenset(kind for kind, _, _ in _SIGNATURES if kind.startswith(("image/", "audio/")))


# What a picture of markup acts with: scripts, handlers of events, pages inside of it, addresses that are scripts.
_ACTIVE = re.compile(
    r"<\s*(?:[a-z]{1,20}:)?(?:script|foreignobject|iframe|embed|object|handler)\b"
    r"|[\s\"'/]on[a-z]{3,30}\s*=|(?:javascript|vbscript)\s*:|data\s*:\s*text/html|<!ENTITY",
    re.IGNORECASE,
)
_SVG = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--.{0,2000}?-->\s*)?(?:<!DOCTYPE\s+svg|<svg[\s>])", re.IGNORECASE | re.DOTALL
)


def active_svg(declared: str, text: str) -> str:
    """Why a text that is a picture of markup is not to be shown as one; "" if it is none, or cannot act.

    A text that is declared as another kind of text is read, not shown.
    """
    kind = declared.partition(";")[0].strip().lower()
    is_svg = kind.startswith("image/svg") or (kind in ("", "text/xml", "application/xml") and _SVG.match(text))
    return f"{declared or 'image/svg+xml'} holds scripts" if is_svg and _ACTIVE.search(unescape(text)) else ""


def size_of(data: bytes | str) -> int:
    """How many bytes that is; a text is their base64."""
    return len(data) if not isinstance(data, str) else len(data) * 3 // 4 - data[-2:].count("=")


def check_media(declared: str, data: bytes | str) -> tuple[str, str] | None:
    """What is wrong with the bytes of a picture or a sound: the rule, and the reason; None when nothing is.

    "scripts": a picture that can hold them. "mismatch": the bytes are of another type. "unrecognised": they begin like
    nothing that is known here, so they may be damaged, or made up for a test. Other types are not judged.
    """
    kind = declared.partition(";")[0].strip().lower()
    kind = _TYPE_ALIASES.get(kind, kind)
    if kind.startswith("image/svg"):
        return "scripts", f"{declared} can hold scripts"
    if kind not in _RECOGNISED_TYPES:
        return None
    detected = _kind_of(b64decode(data[: _HEAD_BYTES // 3 * 4]) if isinstance(data, str) else bytes(data[:_HEAD_BYTES]))
    if detected is None:
        return "unrecognised", f"declared {declared}, but it does not begin like one"
    return None if detected == kind else ("mismatch", f"declared {declared}, but the bytes are {detected}")


def _kind_of(head: bytes) -> str | None:
    for kind, at, signs in _SIGNATURES:
        if head.startswith(signs, at):
            return kind
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    is_markup = text[:1] == b"<" and (text[1:2].isalpha() or text[1:2] in (b"!", b"?"))
    return "markup, which can hold scripts" if is_markup else None


DANGEROUS_RULES = frozenset(
    {"escape sequence", "tag character", "bidirectional control", "private_key", "mismatch", "scripts"}
)
_MAX_FINDINGS = 64  # findings listed one by one
_NOTICE_CHARACTERS = 200  # characters reserved for the notice
_JOINING_CHARACTERS = "\u200c\u200d\ufe0e\ufe0f\u20e3" + "".join(map(chr, range(0x1F3FB, 0x1F400)))

FindingKind = Literal["control", "secret", "media", "size", "inspector"]


class Finding(Struct, frozen=True):
    """One finding in a result. Of a secret it has only the rule that matched."""

    kind: FindingKind
    where: str  # "content/0/text", "structuredContent/user/name", "message"
    rule: str
    count: int = 1
    changed: bool = False  # whether something was removed, masked, cut or withheld


_MAX_TOOL_OPTIONS = 1_000
_MAX_INSPECTOR_FINDINGS = 64  # of one inspector
_MIN_LIMIT = 1_000
_INLINE_CHARACTERS = 16_384  # characters that may be cleaned on the event loop, where others wait: 0.3 µs each at worst
_MAX_ESCAPED_JSON = 100_000  # characters of JSON whose texts are not looked for one by one in a quick look
_ITEM_CHARACTERS = 64  # as many characters as a string of its own takes the time for
_CHANGE_CLASSES = {  # of what was changed, where that is neither a class of characters nor a secret
    "max_text": "cut text",
    "max_result": "cut result",
    "max_media": "withheld media",
    "mismatch": "withheld media",
    "scripts": "withheld media",
}
_ANCHOR = re.compile(r"[\^$]|\\[AzZ]")  # or what looks like one

ControlsAction = Annotated[
    Literal["remove", "show", "report", "block", "keep"],
    Meta(description="Escape sequences, control, bidirectional, invisible and tag characters in a result."),
]
SecretsAction = Annotated[
    Literal["redact", "report", "block", "keep"],
    Meta(description="Known secrets, tokens of well-known issuers, private keys, and your patterns in a result."),
]
MediaAction = Annotated[
    Literal["withhold", "report", "keep"],
    Meta(description="Pictures and sounds that are not of their declared type, or can hold scripts."),
]
MaxText = Annotated[int, Meta(ge=0, description="Characters of one text; 0: as many as fit into a message.")]
MaxResult = Annotated[int, Meta(ge=0, description="Characters of a result's texts, or of its data as JSON; 0: any.")]
MaxMedia = Annotated[int, Meta(ge=0, description="Bytes of one picture, sound or file in a result; 0: any.")]


class ToolSanitize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is different for some tools."""

    controls: ControlsAction | UnsetType = UNSET
    secrets: SecretsAction | UnsetType = UNSET
    media: MediaAction | UnsetType = UNSET
    max_text: MaxText | UnsetType = UNSET
    max_result: MaxResult | UnsetType = UNSET
    max_media: MaxMedia | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.apply_to(Sanitize())

    def apply_to(self, options: Sanitize) -> Sanitize:
        """What holds for all, with these differences."""
        return replace(options, **{name: value for name, value in asdict(self).items() if value is not UNSET})


class Sanitize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `[sanitize]`: what is done to results before they leave."""

    controls: ControlsAction = "remove"
    secrets: SecretsAction = "redact"
    media: MediaAction = "withhold"
    max_text: MaxText | None = None
    max_result: MaxResult | None = None
    max_media: MaxMedia = 3 * 1024 * 1024  # as base64 that is a whole message
    patterns: Annotated[
        dict[str, str],
        Meta(description="Further secrets by name: regular expressions without look-around and back-references."),
    ] = {}
    tools: Annotated[
        dict[str, ToolSanitize],
        Meta(description="What is different for a tool, by its name or a glob; a name counts before the first glob."),
    ] = {}

    def __post_init__(self) -> None:
        for name in ("max_text", "max_result"):
            if 0 < (size := getattr(self, name) or 0) < _MIN_LIMIT:
                raise ValueError(f"{name}: {size} is too small for a notice; use {_MIN_LIMIT} or more, or 0")
        for name, each in mapping("Sanitize: tools", self.tools, "ToolSanitize(…) by name").items():
            expect(f"Sanitize: tools.{name}", each, "ToolSanitize(…)", ToolSanitize)
        for name, pattern in mapping("Sanitize: patterns", self.patterns, "regular expressions by name").items():
            try:
                is_absent = compile_absence(pattern)
            except ValueError as problem:
                raise ValueError(f"patterns.{name}: {problem}") from None
            if not (is_absent("") and is_absent(MASK)):
                raise ValueError(f"patterns.{name}: {pattern!r} fits the empty text, or {MASK}; be more specific")


Inspector = Callable[[str, ToolResult], Iterable[Finding] | None]
"""Looks at the cleaned result of a tool, before it is cut; may raise `Blocked`. One that fails blocks as well."""


class Blocked(HandrailError):
    """Raised by an inspector: this result is not to leave, and why."""


def risk(findings: Iterable[Finding]) -> str | None:
    """Why a result with these findings is to be marked as dangerous; None when it is not. Colours are not."""
    rules = dict.fromkeys(finding.rule.replace("_", " ") for finding in findings if finding.rule in DANGEROUS_RULES)
    return f"found in what the tool returned: {', '.join(rules)}" if rules else None


def changes(findings: Iterable[Finding]) -> dict[str, int]:
    """Return how often what was changed, by class: `{"tag character": 12, "secret": 1}`; of texts cut, the texts."""
    counts: Counter[str] = Counter()
    for each in findings:
        if each.changed:
            name = each.rule if each.kind == "control" else _CHANGE_CLASSES.get(each.rule, each.kind)
            counts[name] += 1 if each.kind == "size" else each.count
    return dict(counts)


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding for each rule, with all their counts: a call may send messages without end."""
    counts: Counter[tuple[FindingKind, str, bool]] = Counter()
    for each in findings:
        counts[each.kind, each.rule, each.changed] += each.count
    return tuple(Finding(kind, "message", rule, n, changed) for (kind, rule, changed), n in counts.items())


class ResultCleaner:
    """The cleaning of one result, and its findings.

    `copies`: the result is looked at in another thread. Code of its author may change its lists and objects meanwhile,
    so that what leaves are the copies that were looked at.
    """

    __slots__ = ("_copies", "_merged_at", "_options", "_prefilter", "findings")

    def __init__(self, prefilter: Prefilter, options: Sanitize, *, copies: bool = False) -> None:
        self._prefilter = prefilter
        self._options = options
        self._copies = copies
        self.findings: list[Finding] = []
        self._merged_at: dict[tuple[str, str, str], int] = {}  # indices of merged findings

    def result(self, result: ToolResult) -> ToolResult:
        """All of it but its size; the same object when nothing had to be done."""
        structured = self.value(result.structured, "structuredContent")
        content = [*result.content] if self._copies else result.content
        if any(each.changed for each in self.findings):  # a client that parses the text would get it back
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
                while name in cleaned:  # two keys differed only in removed characters
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
            return self._media(block, _mime_type(block), block.resource["blob"], where)
        if isinstance(block, EmbeddedResource) and "\\" in (text := _text(block)) and "json" in _mime_type(block):
            block = replace(block, resource={**block.resource, "text": self._json(text, where)})
        if isinstance(block, EmbeddedResource) and self._options.media != "keep" and "<" in _text(block):
            reason = active_svg(_mime_type(block), _text(block))
            is_withheld = bool(reason) and self._options.media == "withhold"
            if reason:
                self._add_finding("media", where, "scripts", changed=is_withheld)
            return Text(f"[resource withheld: {reason}]") if is_withheld else block
        return block

    def _json(self, text: str, where: str) -> str:
        """Return a JSON text without what its escapes say."""
        try:
            value = parse(text)
        except (MsgspecError, UnicodeEncodeError):
            return text
        cleaned = self.value(value, where)
        return text if cleaned == value else encode(cleaned).decode()

    def _media(self, block: Image | Audio | EmbeddedResource, mime: str, data: bytes | str, where: str) -> Block:
        label = "resource" if isinstance(block, EmbeddedResource) else type(block).__name__.lower()
        size, limit = size_of(data), self._options.max_media or maxsize
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
        for _ in range(32):  # not inside of one visible character
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


class Scan(Struct):
    """A result that was looked at, or why it could not be."""

    cleaner: ResultCleaner
    outcome: ToolResult | Exception


class Sanitizer:
    """The cleaning of results, as configured.

    `secrets` are known values. `store_remainder` keeps the rest of a cut text and returns its handle.
    """

    def __init__(
        self,
        options: Sanitize | None = None,
        *,
        secrets: Iterable[str] = (),
        inspectors: Sequence[Inspector] = (),
        store_remainder: Callable[[str], str] | None = None,
    ) -> None:
        self._options = options or Sanitize()
        self._prefilter = Prefilter(Secrets(secrets, self._options.patterns))
        # A pattern of where a text begins or ends finds nothing in texts that are looked at together.
        self._anchored = any(map(_ANCHOR.search, self._options.patterns.values()))
        self._inspectors = inspectors
        self.store_remainder = store_remainder
        self._tool_options: dict[str, tuple[Sanitize, int]] = {}

    def clean(
        self, tool: str, result: ToolResult, *, is_prefiltered: bool = False
    ) -> tuple[ToolResult, tuple[Finding, ...]]:
        """Return the cleaned result and the findings; the same object when nothing had to be done.

        A result that may not leave becomes an error that says so. Whatever fails here, the result does not leave.
        `is_prefiltered`: the prefilter has run, and the result is not clean by it.
        """
        if not is_prefiltered and self.is_clean(tool, result):
            return result, ()
        return self.finish(tool, self.scan(tool, result))

    def scan(self, tool: str, result: ToolResult, *, copies: bool = False) -> Scan:
        """Look at every string of a result: the part of `clean` that may take long. With `copies`, in any thread."""
        cleaner = ResultCleaner(
            self._prefilter, (self._tool_options.get(tool) or self._options_for(tool))[0], copies=copies
        )
        try:
            return Scan(cleaner, cleaner.result(result))
        except Exception as problem:
            return Scan(cleaner, problem)

    def finish(self, tool: str, scan: Scan) -> tuple[ToolResult, tuple[Finding, ...]]:
        """Do the rest of `clean` after `scan`: inspectors and sizes."""
        cleaner, outcome = scan.cleaner, scan.outcome
        try:
            if isinstance(outcome, Exception):
                raise outcome
            why = cleaner.block_reason()
            if not why:
                for inspect in self._inspectors:
                    cleaner.findings += islice(inspect(tool, outcome) or (), _MAX_INSPECTOR_FINDINGS)
                return cleaner.cap(outcome, self.store_remainder), tuple(cleaner.findings)
        except Blocked as problem:
            why = self.text(str(problem))
        except RecursionError:
            why = "it is nested too deeply"
        except Exception:
            log.exception("sanitize: result of tool %r withheld: it could not be scanned", tool)
            why = "it could not be looked at; the server's log has the details"
        notice = Text(f"The result of {tool} was withheld: {why}.")
        return ToolResult([notice], is_error=True), tuple(cleaner.findings)

    def text(self, text: str) -> str:
        """A text that is not part of a result: of an error, a progress or log message. It is never blocked."""
        return ResultCleaner(self._prefilter, self._options).string(text, "message")

    def value(self, value: Json) -> Json:
        """As `text`, for a JSON value."""
        return self.message(value)[0]

    def message(self, value: Json, *, copies: bool = False) -> tuple[Json, list[Finding]]:
        """Return the same as `value`, and the findings. With `copies`, in any thread."""
        cleaner = ResultCleaner(self._prefilter, self._options, copies=copies)
        return cleaner.value(value, "message"), cleaner.findings

    def is_clean(self, tool: str, result: ToolResult, mirrored: bool = False) -> bool:
        """Whether a quick look finds nothing to do, as in most results. `mirrored`: its text is its data as JSON."""
        cap = (self._tool_options.get(tool) or self._options_for(tool))[1]
        if self._inspectors:
            return False
        is_text = (mirrored or result.structured is UNSET) and result.meta is UNSET and not result.data
        if is_text and len(result.content) == 1 and _is_bare(block := result.content[0]):
            text = block.text
            # What is written as an escape in JSON is another text in the data.
            if not mirrored or not (self._anchored or "\\" in text):
                return len(text) <= cap and self._prefilter.is_clean(text)
        return not self._anchored and self._all_clean(result, cap)

    def _all_clean(self, result: ToolResult, cap: int) -> bool:
        strings: list[str] = []
        for block in result.content:
            if not _is_bare(block):
                return False
            strings.append(block.text)
        if len(strings) > 1 and not self._prefilter.is_clean("".join(strings)):
            return False
        if structures := [each for each in (result.structured, result.meta, result.data or UNSET) if each is not UNSET]:
            try:
                json_text = encode(structures).decode()
            except (MsgspecError, UnicodeEncodeError, RecursionError):
                return False
            if "\\" in json_text and len(json_text) > _MAX_ESCAPED_JSON:  # to find every text would take long
                return False
            strings += texts_in(structures) if "\\" in json_text else [json_text]
        text = " ".join(strings)
        return len(text) <= cap and self._prefilter.is_clean(text)

    def _options_for(self, tool: str) -> tuple[Sanitize, int]:
        """What holds for a tool, and the size below which nothing is cut."""
        rules = self._options.tools
        name = tool if tool in rules else next((each for each in rules if fnmatchcase(tool, each)), "")
        options = rules[name].apply_to(self._options) if name in rules else self._options
        if len(self._tool_options) >= _MAX_TOOL_OPTIONS:
            self._tool_options.clear()
        choice = self._tool_options[tool] = options, min(options.max_text or maxsize, options.max_result or maxsize)
        return choice


def is_small(value: Json) -> bool:
    """Whether a result, or a JSON value, is cleaned within a few milliseconds, whatever is in it."""
    left, rest = _INLINE_CHARACTERS, [value]
    for each in rest:
        if type(each) is str:
            left -= len(each)
        elif type(each) is dict:
            left -= _ITEM_CHARACTERS * len(each)
            rest += [*each, *each.values()] if left >= 0 else ()
        elif type(each) is list:
            left -= _ITEM_CHARACTERS * len(each)
            rest += each if left >= 0 else ()
        elif isinstance(each, Struct):  # of a picture or a sound only the beginning is looked at
            skipped = "data" if isinstance(each, Image | Audio) else ""
            rest += [getattr(each, name) for name in each.__struct_fields__ if name != skipped]
        if left < 0:
            return False
    return True


def _is_bare(block: Block) -> TypeGuard[Text]:
    """Whether a block is a text with nothing beside it."""
    return type(block) is Text and block.annotations is UNSET and block.meta is UNSET


def _differ(cleaned: Iterable[object], originals: Iterable[object]) -> bool:
    cleaned, originals = list(cleaned), list(originals)
    return len(cleaned) != len(originals) or any(new is not old for new, old in zip(cleaned, originals, strict=True))


def _text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    return block.resource.get("text", "") if isinstance(block, EmbeddedResource) else ""


def _mime_type(block: EmbeddedResource) -> str:
    mime_type: str = block.resource.get("mimeType", "")
    return mime_type


def _is_json_of(block: Block, value: Json) -> bool:
    """Whether this is a text that says the same in JSON."""
    try:
        return isinstance(block, Text) and bool(parse(block.text) == value)
    except (MsgspecError, UnicodeEncodeError):
        return False
