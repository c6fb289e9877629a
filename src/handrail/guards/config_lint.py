"""Settings that meet nothing: a rule, a limit or a cleaning that names what the server does not have is not in force.

A warning, no error: tools may be added later. Arguments below the first level, and those of a schema that does not
list them in one place, are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from handrail.guards.limits import Rates
from handrail.guards.policy import Policy, any_glob
from handrail.guards.predicates import first_step
from handrail.guards.sanitize import Sanitize
from handrail.model import Object
from handrail.suggest import closest

__all__ = ["LintedTool", "lint_rules", "lint_settings"]


_OPEN_KEYWORDS = frozenset({"patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})


class LintedTool(NamedTuple):
    """What there is to meet of a tool."""

    name: str
    tags: frozenset[str]
    schema: Object

    @property
    def arguments(self) -> set[str] | None:
        """Their names, as far as the schema lists them in one place."""
        listed = self.schema.get("properties")
        # Who says that there may be others, or names none at all, takes any.
        is_open = self.schema.get("additionalProperties", listed is None) is not False
        return None if is_open or self.schema.keys() & _OPEN_KEYWORDS else set(listed or ())


def lint_rules(policy: Policy, tools: Sequence[LintedTool]) -> Iterator[str]:
    for compiled in policy.compiled_rules:
        rule, where = compiled.rule, compiled.decision.rule
        yield from _unmatched(f"{where}: tools", rule.tools, tools)
        tags = sorted({tag for tool in tools for tag in tool.tags})
        for tag in rule.tags:
            if tag not in tags:
                yield f"{where}: tags: {tag!r} is on no tool{_hint(tag, tags)}"
        matches = any_glob(rule.tools or ["*"], where)
        matching = [each for each in tools if matches(each.name) and (not rule.tags or each.tags & {*rule.tags})]
        names = [each.arguments for each in matching]
        for path in rule.arguments if matching else ():
            word = first_step(path)
            if word is not None and all(each is not None and word not in each for each in names):
                arguments = sorted(set().union(*(each for each in names if each)))
                yield f"{where}: arguments: {word!r} is an argument of no tool it is about{_hint(word, arguments)}"


def lint_settings(rates: Rates | None, sanitize: Sanitize | None, tools: Sequence[LintedTool]) -> Iterator[str]:
    for section, settings in (("limits", rates), ("sanitize", sanitize)):
        if settings is not None:
            yield from _unmatched(f"{section}.tools", settings.tools, tools)


def _unmatched(where: str, patterns: Iterable[str], tools: Sequence[LintedTool]) -> Iterator[str]:
    names = [each.name for each in tools]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"{where}: {pattern!r} matches no tool{_hint(pattern, names)}"


def _hint(word: str, words: Iterable[str]) -> str:
    near = closest(word, words)
    return f"; did you mean {near!r}?" if near else ""
