"""Texts that look the same and are not: which names can be taken for others (P-32).

The table has what looks like a Latin letter in Greek and Cyrillic, the scripts most fonts draw alike; it is a help for
people who look at names, not a complete list of confusables (Unicode Technical Standard 39 has that).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from unicodedata import name as unicode_name, normalize

from handrail.text.controls import strip_invisible

__all__ = ["confusable_names", "skeleton"]

_LATIN_EQUIVALENTS = str.maketrans(
    "АВЕЅІЈКМНОРСТУХԌԚԜавеѕіјкморсухһԁԛԝӏɡΑΒΕΖΗΙΚΜΝΟΡΤΥΧαιουκνρχγ\u00a0\u2007\u202f\u2002\u2003\u2009",
    "ABESIJKMHOPCTYXGQWabesijkmopcyxhdqwlgABEZHIKMNOPTYXaioukvpxy      ",
)
_NAME_EQUIVALENTS = str.maketrans("01i5", "olls", "-_. ")
_WORD = re.compile(r"[^\W\d_]+")


def skeleton(text: str) -> str:
    """Return the same text for texts that look the same: visible characters only, in Latin letters where possible."""
    return (
        text
        if text.isascii() and text.isprintable()
        else normalize("NFC", strip_invisible(text)).translate(_LATIN_EQUIVALENTS)
    )


def confusable_names(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names that can be taken for another: each with that other, or with what it reads as if there is none.

    >>> look_alikes(["read_file", "readFile", "write"])
    [('readFile', 'read_file')]
    """
    names_by_skeleton: dict[str, str] = {}
    confusables: list[tuple[str, str]] = []
    for name in sorted(set(names), key=lambda each: (not each.isascii(), each.lower(), each)):
        reading = normalize("NFKC", skeleton(name))
        other = names_by_skeleton.setdefault(reading.lower().translate(_NAME_EQUIVALENTS), name)
        if other != name:
            confusables.append((name, other))
        elif reading != name and (reading.isascii() or any(map(_is_mixed, _WORD.findall(name)))):
            confusables.append((name, reading))
    return confusables


def _is_mixed(word: str) -> bool:
    """Whether letters of several scripts stand in one word."""
    return not word.isascii() and len({unicode_name(letter, "?").split()[0] for letter in word}) > 1
