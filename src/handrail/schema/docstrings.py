"""Docstrings: what they say of each parameter, in the forms of Google, NumPy and Sphinx, and the prose around that."""

from __future__ import annotations

import re
from collections.abc import Collection

_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters):\s*")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"(?:Other )?Parameters\s*")
_NUMPY_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_SPHINX_ENTRY = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_SPHINX_TYPE = re.compile(r":(?:type|vartype)\s+\w+\s*:.*")


def split(docstring: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the prose of a clean docstring, and the descriptions of the parameters it names.

    A section that names none of them is left where it is.
    """
    lines = docstring.splitlines()
    prose: list[str] = []
    described: dict[str, str] = {}
    at = 0
    while at < len(lines):
        end, entries = _section(lines, at, names)
        descriptions = {name: _joined(text) for name, text in entries.items() if name in names and _joined(text)}
        if end > at and (descriptions or any(name in names for name in entries)):
            described |= {name: text for name, text in descriptions.items() if name not in described}
            at = end
        else:
            prose.append(lines[at])
            at += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(prose)).strip(), described


def _section(lines: list[str], at: int, parameters: Collection[str]) -> tuple[int, dict[str, list[str]]]:
    """Return where the section of parameters that begins here ends, and the lines of each; `at` if none begins."""
    line, after = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
    if _GOOGLE.fullmatch(line):
        return _google(lines, at + 1)
    if _NUMPY.fullmatch(line) and re.fullmatch(r"-{3,}\s*", after):
        return _numpy(lines, at + 2, parameters)
    if entry := _SPHINX_ENTRY.fullmatch(line):
        end = _indented(lines, at + 1)
        while end < len(lines) and _SPHINX_TYPE.fullmatch(lines[end]):
            end = _indented(lines, end + 1)
        continuation = [each for each in lines[at + 1 : end] if not _SPHINX_TYPE.fullmatch(each)]
        return end, {entry[1]: [entry[2], *continuation]}
    return at, {}


def _google(lines: list[str], begin: int) -> tuple[int, dict[str, list[str]]]:
    end, entries, margin, name = _indented(lines, begin, over_blanks=True), dict[str, list[str]](), -1, ""
    for line in lines[begin:end]:
        indent = len(line) - len(line.lstrip())
        margin = indent if margin < 0 and line.strip() else margin
        entry = _GOOGLE_ENTRY.fullmatch(line.strip()) if indent == margin else None
        if entry:
            name = entry[1]
            entries[name] = [entry[2]]
        elif name:
            entries[name].append(line)
    return end, entries


def _numpy(lines: list[str], begin: int, parameters: Collection[str]) -> tuple[int, dict[str, list[str]]]:
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    end = begin
    while end < len(lines):
        line = lines[end]
        if end + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[end + 1]):
            break
        entry = _NUMPY_ENTRY.fullmatch(line) if line and not line[0].isspace() else None
        if entry:
            entry_names = [each.strip().lstrip("*") for each in entry[1].split(",")]
            if not lines[end - 1].strip() and not any(each in parameters for each in entry_names):
                break  # prose after the section
            names = entry_names
            entries |= {each: [] for each in names}
        elif line.strip() and not line[0].isspace():
            break
        else:
            for each in names:
                entries[each].append(line)
        end += 1
    return end, entries


def _indented(lines: list[str], begin: int, *, over_blanks: bool = False) -> int:
    end = begin
    while end < len(lines) and (lines[end][:1].isspace() or (over_blanks and not lines[end].strip())):
        end += 1
    return end


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
