"""Whether there is anything in a text, at the speed of memory where there is not.

The linear-time engine looks for up to 16 characters, or 32 pairs or threes of bytes, in one go over a text, a megabyte
in 15 to 60 µs. All else it reads byte by byte, 1.3 ms a megabyte. So a long text is asked for what it must have for
something to be in it, in a few goes, and read byte by byte only if it has that.
"""

from __future__ import annotations

from collections.abc import Iterable

from handrail.text.controls import ACTING, HIDDEN
from handrail.text.secrets import SIGNS, URL_PASSWORD, Secrets, lacks_whole

__all__ = ["Sight"]


def _any_of(characters: Iterable[str]) -> str:
    return "|".join(f"(\\x{{{ord(each):x}}})" for each in characters)  # in groups, as it makes ranges of a set


# Characters up to which one go byte by byte is faster than several; and several are, than to find out which are needed.
_SHORT, _SHORT_WIDE, _MEDIUM = 200, 3000, 20_000
_LONE_RETURN = r"\r(?:[^\n]|$)"
_WIDE = rf"[{ACTING}{HIDDEN}]|{_LONE_RETURN}".replace("\ud800-\udfff", "")
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


class Sight:
    """Whether there is anything in a text, whatever is then done about it."""

    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        # These may see a secret where there is none.
        self._nothing = lacks_whole("|".join([_WIDE, *SIGNS, URL_PASSWORD]))
        self._nothing_long = lacks_whole(*_ACTING, *SIGNS, URL_PASSWORD)

    def is_plain(self, text: str) -> bool:
        """Nothing that acts or hides, and no secret."""
        try:
            if len(text) <= _SHORT:
                has_nothing = self._nothing(text)
            elif text.isascii():
                has_nothing = len(text) <= _MEDIUM and self._nothing_long(text)
            else:
                has_nothing = len(text) <= _SHORT_WIDE and self._nothing(text)
        except UnicodeEncodeError:  # half a character
            return False
        if has_nothing:
            return not self.secrets.others or all(without(text) for without in self.secrets.others)
        return self.is_calm(text) and self.secrets.absent(text)

    def is_calm(self, text: str) -> bool:
        """Nothing that acts or hides."""
        try:
            if len(text) <= _SHORT:
                return lacks_whole(_WIDE)(text)
            if not (
                lacks_whole(*_ACTING)(text) or ("\r" in text and lacks_whole(*_ACTING_BUT_RETURN, _LONE_RETURN)(text))
            ):
                return False
            if text.isascii():
                return True
            if not lacks_whole(_TWO, _THREE, _THREE_MORE)(text):
                return False
            encoded = text.encode()
            if any(first in encoded for first in _ONLY_HIDDEN):
                return False
            if _SOME_HIDDEN_OF_FOUR in encoded and not lacks_whole(_FOUR)(text):
                return False
            return not any(first in encoded for first in _SOME_HIDDEN) or lacks_whole(_WIDE)(text)
        except UnicodeEncodeError:
            return False
