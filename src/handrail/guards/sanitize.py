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
from handrail.guards.cleaning import DANGEROUS_RULES, Finding, FindingKind, ResultCleaner
from handrail.jsonrpc import encode
from handrail.model import Audio, Block, Image, Json, Text, ToolResult
from handrail.options import expect, mapping
from handrail.text.controls import MASK, texts_in
from handrail.text.prefilter import Prefilter
from handrail.text.secrets import Secrets, compile_absence, secrets_in

__all__ = [
    "Blocked",
    "Finding",
    "Inspector",
    "Sanitize",
    "Sanitizer",
    "ToolSanitize",
    "changes",
    "is_small",
    "merge_findings",
    "risk",
    "secrets_in",
]

log = logging.getLogger("handrail")

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


class Scan(Struct):
    """A result that was looked at, or why it could not be."""

    cleaner: ResultCleaner
    outcome: ToolResult | Exception


class Sanitizer:
    """Cleans results. `secrets` are known values; `store_remainder` stores the rest of a cut text."""

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
        """The result as it may leave, and what was found; the same object when nothing had to be done.

        A result that may not leave becomes an error that says so. Whatever fails here, the result does not leave.
        `is_doubtful`: a quick look was taken, and was not enough.
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
        """The rest of `clean`, with what a walk has made: inspectors, and sizes."""
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
            log.exception("the result of tool %r could not be looked at", tool)
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
        """As `value`, with what was found. With `copies`, in any thread."""
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
