"""A second reader of strict JSON, written from RFC 8259 and P-02 alone, to check the first one against.

Slow and plain on purpose. It shares no code with the package and none with the standard library's parser.
"""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["Refused", "decode", "same"]

Json = Any

DEPTH = 128
DIGITS = 1_000
KEYS = 10_000

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Refused(Exception):
    """The text is not strict JSON, or over a limit; says why."""


def decode(data: bytes) -> Json:
    """The value of a text, or `Refused`."""
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as problem:
        raise Refused("not UTF-8") from problem
    reader = _Reader(text)
    value = reader.value(1)
    reader.space()
    if reader.at != len(text):
        raise Refused("something follows")
    return value


def same(one: Json, other: Json) -> bool:
    """Whether two values are the same JSON: 1, 1.0 and true are three things."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self, wanted: str) -> None:
        if not self.text.startswith(wanted, self.at):
            raise Refused(f"expected {wanted!r}")
        self.at += len(wanted)

    def space(self) -> None:
        while self.peek() and self.peek() in _SPACE:
            self.at += 1

    def value(self, depth: int) -> Json:
        self.space()
        first = self.peek()
        if first in ("{", "["):
            if depth > DEPTH:
                raise Refused("too deep")
            return self.object(depth) if first == "{" else self.array(depth)
        if first == '"':
            return self.string()
        for word, meaning in (("true", True), ("false", False), ("null", None)):
            if first == word[0]:
                self.take(word)
                return meaning
        return self.number()

    def object(self, depth: int) -> Json:
        made: dict[str, Json] = {}
        self.take("{")
        self.space()
        if self.peek() == "}":
            self.take("}")
            return made
        while True:
            self.space()
            name = self.string()
            if name in made:
                raise Refused("a key twice")
            self.space()
            self.take(":")
            made[name] = self.value(depth + 1)
            self.space()
            if self.peek() == "}":
                self.take("}")
                if len(made) > KEYS:
                    raise Refused("too many keys")
                return made
            self.take(",")

    def array(self, depth: int) -> Json:
        made: list[Json] = []
        self.take("[")
        self.space()
        if self.peek() == "]":
            self.take("]")
            return made
        while True:
            made.append(self.value(depth + 1))
            self.space()
            if self.peek() == "]":
                self.take("]")
                return made
            self.take(",")

    def string(self) -> str:
        self.take('"')
        made: list[str] = []
        while True:
            letter = self.peek()
            if letter == "" or letter < " ":
                raise Refused("a text that does not end, or a control character in it")
            self.at += 1
            if letter == '"':
                return "".join(made)
            made.append(self.escape() if letter == "\\" else letter)

    def escape(self) -> str:
        letter = self.peek()
        self.at += 1
        if letter != "u":
            if letter not in _PLAIN:
                raise Refused("an unknown escape")
            return _PLAIN[letter]
        unit = self.unit()
        if 0xDC00 <= unit <= 0xDFFF:
            raise Refused("half a surrogate pair")
        if 0xD800 <= unit <= 0xDBFF:
            self.take("\\u")
            low = self.unit()
            if not 0xDC00 <= low <= 0xDFFF:
                raise Refused("half a surrogate pair")
            unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
        return chr(unit)

    def unit(self) -> int:
        digits = self.text[self.at : self.at + 4]
        if len(digits) != 4 or any(each not in "0123456789abcdefABCDEF" for each in digits):
            raise Refused("not four hexadecimal digits")
        self.at += 4
        return int(digits, 16)

    def number(self) -> Json:
        found = _NUMBER.match(self.text, self.at)
        if not found:
            raise Refused("not a value")
        self.at = found.end()
        if sum(each.isdigit() for each in found[0]) > DIGITS:
            raise Refused("too many digits")
        if found[1] is None and found[2] is None:
            return int(found[0])
        value = float(found[0])
        if not math.isfinite(value):
            raise Refused("larger than a number can be")
        return value
