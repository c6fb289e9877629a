"""What may leave: results without what acts or hides, without secrets, within their sizes, and of their declared types.

Printable text stays as it is, and so do newlines, tabs, emoji and the joiners that spelling needs. What is done about
the rest is the operator's choice: taken out, shown, reported, or a reason to withhold the result.

The usual result costs one look of the linear-time engine at all of its text; only what that finds is walked.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from sys import maxsize
from typing import Annotated, Literal, TypeGuard

from msgspec import UNSET, Meta, MsgspecError, Struct, UnsetType
from msgspec.structs import asdict, replace

from handrail.errors import HandrailError
from handrail.guards.cleaning import FEARED, Cleaning, Finding, Kind
from handrail.jsonrpc import encode
from handrail.model import Audio, Block, Image, Json, Text, ToolResult
from handrail.options import expect, mapping
from handrail.text.controls import MASK, texts_in
from handrail.text.prefilter import Sight
from handrail.text.secrets import Secrets, lacks, secrets_in

__all__ = [
    "Blocked",
    "Finding",
    "Inspector",
    "Sanitize",
    "Sanitizer",
    "ToolSanitize",
    "changes",
    "is_small",
    "risk",
    "secrets_in",
    "together",
]

log = logging.getLogger("handrail")

_CHOICES = 1_000
_FINDINGS = 64  # of one inspector
_SMALLEST = 1_000
_SMALL = 16_384  # characters that may be cleaned on the event loop, where others wait: 0.3 µs each at worst
_LARGE = 100_000  # characters of JSON whose texts are not looked for one by one in a quick look
_EACH = 64  # as many characters as a string of its own takes the time for
_CLASSES = {  # of what was changed, where that is neither a class of characters nor a secret
    "max_text": "cut text",
    "max_result": "cut result",
    "max_media": "withheld media",
    "mismatch": "withheld media",
    "scripts": "withheld media",
}
_ANCHOR = re.compile(r"[\^$]|\\[AzZ]")  # or what looks like one

Controls = Annotated[
    Literal["remove", "show", "report", "block", "keep"],
    Meta(description="Escape sequences, control, bidirectional, invisible and tag characters in a result."),
]
Hidden = Annotated[
    Literal["redact", "report", "block", "keep"],
    Meta(description="Known secrets, tokens of well-known issuers, private keys, and your patterns in a result."),
]
Media = Annotated[
    Literal["withhold", "report", "keep"],
    Meta(description="Pictures and sounds that are not of their declared type, or can hold scripts."),
]
MaxText = Annotated[int, Meta(ge=0, description="Characters of one text; 0: as many as fit into a message.")]
MaxResult = Annotated[int, Meta(ge=0, description="Characters of a result's texts, or of its data as JSON; 0: any.")]
MaxMedia = Annotated[int, Meta(ge=0, description="Bytes of one picture, sound or file in a result; 0: any.")]


class ToolSanitize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is different for some tools."""

    controls: Controls | UnsetType = UNSET
    secrets: Hidden | UnsetType = UNSET
    media: Media | UnsetType = UNSET
    max_text: MaxText | UnsetType = UNSET
    max_result: MaxResult | UnsetType = UNSET
    max_media: MaxMedia | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.over(Sanitize())

    def over(self, options: Sanitize) -> Sanitize:
        """What holds for all, with these differences."""
        return replace(options, **{name: value for name, value in asdict(self).items() if value is not UNSET})


class Sanitize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `[sanitize]`: what is done to results before they leave."""

    controls: Controls = "remove"
    secrets: Hidden = "redact"
    media: Media = "withhold"
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
            if 0 < (size := getattr(self, name) or 0) < _SMALLEST:
                raise ValueError(f"{name}: {size} is too small for a notice; use {_SMALLEST} or more, or 0")
        for name, each in mapping("Sanitize: tools", self.tools, "ToolSanitize(…) by name").items():
            expect(f"Sanitize: tools.{name}", each, "ToolSanitize(…)", ToolSanitize)
        for name, pattern in mapping("Sanitize: patterns", self.patterns, "regular expressions by name").items():
            try:
                without = lacks(pattern)
            except ValueError as problem:
                raise ValueError(f"patterns.{name}: {problem}") from None
            if not (without("") and without(MASK)):
                raise ValueError(f"patterns.{name}: {pattern!r} fits the empty text, or {MASK}; be more specific")


Inspector = Callable[[str, ToolResult], Iterable[Finding] | None]
"""Looks at the cleaned result of a tool, before it is cut; may raise `Blocked`. One that fails blocks as well."""


class Blocked(HandrailError):
    """Raised by an inspector: this result is not to leave, and why."""


def risk(findings: Iterable[Finding]) -> str | None:
    """Why a result with these findings is to be marked as dangerous; None when it is not. Colours are not."""
    rules = dict.fromkeys(finding.rule.replace("_", " ") for finding in findings if finding.rule in FEARED)
    return f"found in what the tool returned: {', '.join(rules)}" if rules else None


def changes(findings: Iterable[Finding]) -> dict[str, int]:
    """Return how often what was changed, by class: `{"tag character": 12, "secret": 1}`; of texts cut, the texts."""
    counts: Counter[str] = Counter()
    for each in findings:
        if each.changed:
            name = each.rule if each.kind == "control" else _CLASSES.get(each.rule, each.kind)
            counts[name] += 1 if each.kind == "size" else each.count
    return dict(counts)


def together(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding for each rule, with all their counts: a call may send messages without end."""
    counts: Counter[tuple[Kind, str, bool]] = Counter()
    for each in findings:
        counts[each.kind, each.rule, each.changed] += each.count
    return tuple(Finding(kind, "message", rule, n, changed) for (kind, rule, changed), n in counts.items())


class Walk(Struct):
    """A result that was looked at, or why it could not be."""

    cleaning: Cleaning
    made: ToolResult | Exception


class Sanitizer:
    """Cleans results. `secrets` are known values; `keep` puts the rest of a cut text away and returns its handle."""

    def __init__(
        self,
        options: Sanitize | None = None,
        *,
        secrets: Iterable[str] = (),
        inspectors: Sequence[Inspector] = (),
        keep: Callable[[str], str] | None = None,
    ) -> None:
        self._options = options or Sanitize()
        self._sight = Sight(Secrets(secrets, self._options.patterns))
        # A pattern of where a text begins or ends finds nothing in texts that are looked at together.
        self._anchored = any(map(_ANCHOR.search, self._options.patterns.values()))
        self._inspectors = inspectors
        self.keep = keep
        self._chosen: dict[str, tuple[Sanitize, int]] = {}

    def clean(
        self, tool: str, result: ToolResult, *, is_doubtful: bool = False
    ) -> tuple[ToolResult, tuple[Finding, ...]]:
        """The result as it may leave, and what was found; the same object when nothing had to be done.

        A result that may not leave becomes an error that says so. Whatever fails here, the result does not leave.
        `is_doubtful`: a quick look was taken, and was not enough.
        """
        if not is_doubtful and self.passes(tool, result):
            return result, ()
        return self.finish(tool, self.walk(tool, result))

    def walk(self, tool: str, result: ToolResult, *, copies: bool = False) -> Walk:
        """Look at every string of a result: the part of `clean` that may take long. With `copies`, in any thread."""
        cleaning = Cleaning(self._sight, (self._chosen.get(tool) or self._choose(tool))[0], copies=copies)
        try:
            return Walk(cleaning, cleaning.result(result))
        except Exception as problem:
            return Walk(cleaning, problem)

    def finish(self, tool: str, walk: Walk) -> tuple[ToolResult, tuple[Finding, ...]]:
        """The rest of `clean`, with what a walk has made: inspectors, and sizes."""
        cleaning, made = walk.cleaning, walk.made
        try:
            if isinstance(made, Exception):
                raise made
            why = cleaning.blocked()
            if not why:
                for inspect in self._inspectors:
                    cleaning.findings += islice(inspect(tool, made) or (), _FINDINGS)
                return cleaning.capped(made, self.keep), tuple(cleaning.findings)
        except Blocked as problem:
            why = self.text(str(problem))
        except RecursionError:
            why = "it is nested too deeply"
        except Exception:
            log.exception("the result of tool %r could not be looked at", tool)
            why = "it could not be looked at; the server's log has the details"
        told = Text(f"The result of {tool} was withheld: {why}.")
        return ToolResult([told], is_error=True), tuple(cleaning.findings)

    def text(self, text: str) -> str:
        """A text that is not part of a result: of an error, a progress or log message. It is never blocked."""
        return Cleaning(self._sight, self._options).string(text, "message")

    def value(self, value: Json) -> Json:
        """As `text`, for a JSON value."""
        return self.message(value)[0]

    def message(self, value: Json, *, copies: bool = False) -> tuple[Json, list[Finding]]:
        """As `value`, with what was found. With `copies`, in any thread."""
        cleaning = Cleaning(self._sight, self._options, copies=copies)
        return cleaning.value(value, "message"), cleaning.findings

    def passes(self, tool: str, result: ToolResult, mirrored: bool = False) -> bool:
        """Whether a quick look finds nothing to do, as in most results. `mirrored`: its text is its data as JSON."""
        cap = (self._chosen.get(tool) or self._choose(tool))[1]
        if self._inspectors:
            return False
        is_text = (mirrored or result.structured is UNSET) and result.meta is UNSET and not result.data
        if is_text and len(result.content) == 1 and _is_bare(block := result.content[0]):
            text = block.text
            # What is written as an escape in JSON is another text in the data.
            if not mirrored or not (self._anchored or "\\" in text):
                return len(text) <= cap and self._sight.is_plain(text)
        return not self._anchored and self._has_nothing(result, cap)

    def _has_nothing(self, result: ToolResult, cap: int) -> bool:
        strings: list[str] = []
        for block in result.content:
            if not _is_bare(block):
                return False
            strings.append(block.text)
        if len(strings) > 1 and not self._sight.is_plain("".join(strings)):
            return False
        if more := [each for each in (result.structured, result.meta, result.data or UNSET) if each is not UNSET]:
            try:
                said = encode(more).decode()
            except (MsgspecError, UnicodeEncodeError, RecursionError):
                return False
            if "\\" in said and len(said) > _LARGE:  # to find every text would take long
                return False
            strings += texts_in(more) if "\\" in said else [said]
        text = " ".join(strings)
        return len(text) <= cap and self._sight.is_plain(text)

    def _choose(self, tool: str) -> tuple[Sanitize, int]:
        """What holds for a tool, and the size below which nothing is cut."""
        rules = self._options.tools
        name = tool if tool in rules else next((each for each in rules if fnmatchcase(tool, each)), "")
        options = rules[name].over(self._options) if name in rules else self._options
        if len(self._chosen) >= _CHOICES:
            self._chosen.clear()
        made = self._chosen[tool] = options, min(options.max_text or maxsize, options.max_result or maxsize)
        return made


def is_small(value: Json) -> bool:
    """Whether a result, or a JSON value, is cleaned within a few milliseconds, whatever is in it."""
    left, rest = _SMALL, [value]
    for each in rest:
        if type(each) is str:
            left -= len(each)
        elif type(each) is dict:
            left -= _EACH * len(each)
            rest += [*each, *each.values()] if left >= 0 else ()
        elif type(each) is list:
            left -= _EACH * len(each)
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
