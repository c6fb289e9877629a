"""Whether there is anything in a text, at the speed of memory where there is not.

The linear-time engine looks for up to 16 characters, or 32 pairs or threes of bytes, in one go over a text, a megabyte
in 15 to 60 µs. All else it reads byte by byte, 1.3 ms a megabyte. So a long text is asked for what it must have for
something to be in it, in a few goes, and read byte by byte only if it has that.
"""

from __future__ import annotations

from collections.abc import Iterable

from handrail.text.controls import CONTROLS, INVISIBLE
from handrail.text.secrets import PREFIXES, URL_PASSWORD, Secrets, compile_absence_strict

__all__ = ["Prefilter"]


def _any_of(characters: Iterable[str]) -> str:
    return "|".join(f"(\\x{{{ord(each):x}}})" for each in characters)  # in groups, as it makes ranges of a set


# Characters up to which one go byte by byte is faster than several; and several are, than to find out which are needed.
_SHORT, _SHORT_WIDE, _MEDIUM = 200, 3000, 20_000
_LONE_RETURN = r"\r(?:[^\n]|$)"
_WIDE = rf"[{CONTROLS}{INVISIBLE}]|{_LONE_RETURN}".replace("\ud800-\udfff", "")
# What acts in ASCII. The engine keeps characters in eight buckets, by their lower four bits, else by their place, and
# halts at every character whose lower and whose upper half are in one bucket. In this order none halts at other text.
_ACTING_BUT_RETURN = (
    _any_of("\x0f\x1f\x7f\x00\x10\x01\x11\x02\x12\x03\x13\x04\x14\x05\x15\x06"),
    _any_of("\x16\x07\x17\x08\x18\x0b\x1d\x19\x1b\x0e\x1c\x1a\x1e"),
)
_ACTING = (_ACTING_BUT_RETURN[0], rf"{_ACTING_BUT_RETURN[1]}|(\r)")
# What hides beyond ASCII, by how many bytes it has in UTF-8; the bytes with which only such begin, and with which some.
_TWO = _any_of([*map(chr, range(0x80, 0xA0)), "\xad", "\u034f", "\u061c"])
_THREE = _any_of(
    "\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u180f\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
)
_THREE_MORE = _any_of([*map(chr, range(0x2060, 0x2070)), "\u3164"])
_PLANES = (0x20000, 0x30000, 0x40000)  # each ends with two that are no characters
_FOUR = _any_of(
    chr(code)
    for first, last in ((0x13430, 0x1343F), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), *((n - 2, n - 1) for n in _PLANES))
    for code in range(first, last + 1)
)
_ONLY_HIDDEN = (b"\xf1", b"\xf2")
_SOME_HIDDEN, _SOME_HIDDEN_OF_FOUR = (b"\xef", b"\xf3", b"\xf4"), b"\xf0"


class Prefilter:
    """Whether there is anything in a text, whatever is then done about it."""

    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        # These may see a secret where there is none.
        self._is_clean_short = compile_absence_strict("|".join([_WIDE, *PREFIXES, URL_PASSWORD]))
        self._is_clean_ascii = compile_absence_strict(*_ACTING, *PREFIXES, URL_PASSWORD)

    def is_clean(self, text: str) -> bool:
        """Nothing that acts or hides, and no secret."""
        try:
            if len(text) <= _SHORT:
                is_clean = self._is_clean_short(text)
            elif text.isascii():
                is_clean = len(text) <= _MEDIUM and self._is_clean_ascii(text)
            else:
                is_clean = len(text) <= _SHORT_WIDE and self._is_clean_short(text)
        except UnicodeEncodeError:  # half a character
            return False
        if is_clean:
            return not self.secrets.other_checks or all(is_absent(text) for is_absent in self.secrets.other_checks)
        return self.has_no_controls(text) and self.secrets.has_none(text)

    def has_no_controls(self, text: str) -> bool:
        """Nothing that acts or hides."""
        try:
            if len(text) <= _SHORT:
                return compile_absence_strict(_WIDE)(text)
            if not (
                compile_absence_strict(*_ACTING)(text)
                or ("\r" in text and compile_absence_strict(*_ACTING_BUT_RETURN, _LONE_RETURN)(text))
            ):
                return False
            if text.isascii():
                return True
            if not compile_absence_strict(_TWO, _THREE, _THREE_MORE)(text):
                return False
            encoded = text.encode()
            if any(first in encoded for first in _ONLY_HIDDEN):
                return False
            if _SOME_HIDDEN_OF_FOUR in encoded and not compile_absence_strict(_FOUR)(text):
                return False
            return not any(first in encoded for first in _SOME_HIDDEN) or compile_absence_strict(_WIDE)(text)
        except UnicodeEncodeError:
            return False
