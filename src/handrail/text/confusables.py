"""Texts that look the same and are not: which names can be taken for others (P-32).

The table has what looks like a Latin letter in Greek and Cyrillic, the scripts most fonts draw alike; it is a help for
people who look at names, not a complete list of confusables (Unicode Technical Standard 39 has that).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from unicodedata import name as unicode_name, normalize

from handrail.text.controls import seen

__all__ = ["look_alikes", "looks"]

_LIKE = str.maketrans(
    "АВЕЅІЈКМНОРСТУХԌԚԜавеѕіјкморсухһԁԛԝӏɡΑΒΕΖΗΙΚΜΝΟΡΤΥΧαιουκνρχγ\u00a0\u2007\u202f\u2002\u2003\u2009",
    "ABESIJKMHOPCTYXGQWabesijkmopcyxhdqwlgABEZHIKMNOPTYXaioukvpxy      ",
)
_SAME_IN_A_NAME = str.maketrans("01i5", "olls", "-_. ")
_WORD = re.compile(r"[^\W\d_]+")


def looks(text: str) -> str:
    """The same for texts that look the same: without what nobody sees, in Latin letters where others are like them."""
    return text if text.isascii() and text.isprintable() else normalize("NFC", seen(text)).translate(_LIKE)


def look_alikes(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names that can be taken for another: each with that other, or with what it reads as if there is none.

    >>> look_alikes(["read_file", "readFile", "write"])
    [('readFile', 'read_file')]
    """
    first: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for name in sorted(set(names), key=lambda each: (not each.isascii(), each.lower(), each)):
        plain = normalize("NFKC", looks(name))
        other = first.setdefault(plain.lower().translate(_SAME_IN_A_NAME), name)
        if other != name:
            found.append((name, other))
        elif plain != name and (plain.isascii() or any(map(_is_mixed, _WORD.findall(name)))):
            found.append((name, plain))
    return found


def _is_mixed(word: str) -> bool:
    """Whether letters of several scripts stand in one word."""
    return not word.isascii() and len({unicode_name(letter, "?").split()[0] for letter in word}) > 1
