"""What may leave: results without what acts or hides, without secrets, within their sizes, and of their declared types.

Printable text stays as it is, and so do newlines, tabs, emoji and the joiners that spelling needs. What is done about
the rest is the operator's choice: taken out, shown, reported, or a reason to withhold the result.

The usual result costs one look of the linear-time engine at all of its text; only what that finds is walked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from sys import maxsize
from typing import Annotated

from msgspec import UNSET, Meta, MsgspecError, Struct, UnsetType, field
from msgspec.structs import asdict

from handrail.errors import HandrailError
from handrail.guards.cleaning import (
    FEARED,
    Cleaning,
    Controls,
    Finding,
    Hidden,
    MaxMedia,
    MaxResult,
    MaxText,
    Media,
    Policy,
    Sight,
)
from handrail.guards.inert import MASK
from handrail.guards.secrets import Secrets, lacks, secrets_in
from handrail.jsonrpc import encode
from handrail.model import Json, Text, ToolResult

__all__ = ["Blocked", "Finding", "Inspector", "Sanitize", "Sanitizer", "ToolSanitize", "risk", "secrets_in"]

log = logging.getLogger("handrail")

_POLICIES = 1_000
_FINDINGS = 64  # of one inspector


class ToolSanitize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is different for some tools."""

    controls: Controls | UnsetType = UNSET
    secrets: Hidden | UnsetType = UNSET
    media: Media | UnsetType = UNSET
    max_text: MaxText | UnsetType = UNSET
    max_result: MaxResult | UnsetType = UNSET
    max_media: MaxMedia | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.over(Policy())

    def over(self, policy: Policy) -> Policy:
        """The policy with these differences."""
        chosen = {name: getattr(policy, name) for name in Policy.__struct_fields__}
        return Policy(**chosen | {name: value for name, value in asdict(self).items() if value is not UNSET})


class Sanitize(Policy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `[sanitize]`: what is done to results before they leave."""

    patterns: Annotated[
        dict[str, str],
        Meta(description="Further secrets by name: regular expressions without look-around and back-references."),
    ] = field(default_factory=dict)
    tools: Annotated[
        dict[str, ToolSanitize],
        Meta(description="What is different for a tool, by its name or a glob; a name counts before the first glob."),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, pattern in self.patterns.items():
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
        self._inspectors = inspectors
        self.keep = keep
        self._policies: dict[str, tuple[Policy, int]] = {}

    def clean(self, tool: str, result: ToolResult) -> tuple[ToolResult, tuple[Finding, ...]]:
        """The result as it may leave, and what was found; the same object when nothing had to be done.

        A result that may not leave becomes an error that says so. Whatever fails here, the result does not leave.
        """
        policy, cap = self._policies.get(tool) or self._policy(tool)
        if not self._inspectors and self._has_nothing(result, cap):
            return result, ()
        cleaning = Cleaning(self._sight, policy)
        try:
            made = cleaning.result(result)
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
        return Cleaning(self._sight, self._options).value(value, "message")

    def _has_nothing(self, result: ToolResult, cap: int) -> bool:
        strings: list[str] = []
        for block in result.content:
            if type(block) is not Text or block.annotations is not UNSET or block.meta is not UNSET:
                return False
            strings.append(block.text)
        if len(strings) > 1 and not self._sight.is_plain("".join(strings)):
            return False
        if result.structured is not UNSET or result.meta is not UNSET or result.data:
            more = [result.structured, result.meta, result.data]
            try:
                said = encode([each for each in more if each is not UNSET]).decode()
                if "\\" in said:  # what is written as an escape in JSON
                    _gather(more, strings)
                else:
                    strings.append(said)
            except (MsgspecError, UnicodeEncodeError, RecursionError):
                return False
        text = " ".join(strings)
        return len(text) <= cap and self._sight.is_plain(text)

    def _policy(self, tool: str) -> tuple[Policy, int]:
        """What holds for a tool, and the size below which nothing is cut."""
        rules = self._options.tools
        name = tool if tool in rules else next((each for each in rules if fnmatchcase(tool, each)), "")
        policy = rules[name].over(self._options) if name in rules else self._options
        if len(self._policies) >= _POLICIES:
            self._policies.clear()
        made = self._policies[tool] = policy, min(policy.max_text or maxsize, policy.max_result or maxsize)
        return made


def _gather(value: Json, into: list[str]) -> None:
    """Every string in a JSON value."""
    if type(value) is str:
        into.append(value)
    elif type(value) is dict:
        into.extend(value)
        for inner in value.values():
            _gather(inner, into)
    elif type(value) is list:
        for inner in value:
            _gather(inner, into)
