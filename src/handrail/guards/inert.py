"""Foreign text that can be looked at without harm: shown in a terminal, a page or a log, never obeyed (P-33).

What acts on a screen, or is there without being seen, is written out: control characters as `\\x1b`, others as
`<U+202E>`. That is C0, DEL and C1 (so every escape sequence), bidirectional controls, line and paragraph separators,
zero-width and other default-ignorable characters, tags, variation selectors, private use, noncharacters, half
surrogates. Two decisions about ordinary text:

- Emoji stay whole: joiners and selectors inside a sequence of pictographs, keycaps. Flags made of tags do not.
- U+200C and U+200D stay where spelling needs them: between letters of Arabic, Indic and related scripts, or
  after a virama. Marks of direction, zero-width spaces and ideographic variation selectors are always shown.

The result is for eyes: a text that already contains `\\x1b` in so many letters cannot be told apart afterwards. Doing
it twice changes nothing.

The second half hides secrets, by the name of what they stand under and by what they look like (P-34). It is for wires
and configurations on display; it may hide too much, and cannot know every secret: name those that are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

MASK = "****"

HIDDEN = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ue000-\uf8ff\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U00013430-\U0001343f"
    # From plane 4 on there are only tags, selectors, private use and noncharacters. Few ranges are faster than many.
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U0001fffe-\U0001ffff\U0002fffe-\U0002ffff\U0003fffe-\U0010ffff"
)
_PICTURES = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25a0-\u27bf\u2934\u2935\u2b00-\u2bff\u3030\u303d"
    "\u3297\u3299\U0001f000-\U0001faff"
)
_JOINING = (
    "\u0620-\u06d3\u06fa-\u06ff\u0710-\u074f\u0750-\u077f\u07ca-\u07f5\u0840-\u0858\u0860-\u086a\u08a0-\u08c9\u08d3-\u08e1"
    "\u08e3-\u08ff\u0900-\u0dff\u0f00-\u0fff\u1000-\u109f\u1780-\u17b3\u17b6-\u17d3\u1820-\u18aa\u1b00-\u1b7f\ufb50-\ufdcf"
    "\ufe70-\ufefc"
)
_VIRAMA = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca\u0f84\u1039\u103a\u17d2\u1b44"
_ACTING = {True: "\x00-\x08\x0b-\x1f\x7f-\x9f", False: "\x00-\x1f\x7f-\x9f"}
# Whole sequences of ECMA-48: control sequences, strings up to their end, and the shorter ones. A string ends before the
# next begins, and of a run of beginnings all but the last are one: the time grows with the text, whatever is in it.
_BEGINS = "\x1b\x90\x98\x9b\x9d\x9e\x9f"
_COLOUR = "(?:\x1b\\[|\x9b)[0-9;:]*+m"
_SEQUENCE = (
    "(?:\x1b\\[|\x9b)[0-?]*+[ -/]*+[@-~]"
    f"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x9c{_BEGINS}]*+(?:\x07|\x1b\\\\|\x9c)"
    f"|\x1b[ -/]*+[0-~]|[{_BEGINS}]+(?=[{_BEGINS}])|[{_BEGINS}]"
)
# What spelling and emoji sometimes need, where they do not: beside a picture, a letter, a key.
_NEEDED = "\u180b\u180c\u180d\u180f\u200c\u200d\ufe0e\ufe0f"
_NEEDLESS = (
    f"(?:[\ufe0e\ufe0f](?<![{_PICTURES}].)(?<![0-9#*]\ufe0f(?=\u20e3))|[\u180b-\u180d\u180f](?<![\u1820-\u18aa].)"
    f"|[\u200c\u200d](?<![{_VIRAMA}].)(?<![{_JOINING}].(?=[{_JOINING}]))"
    f"(?<![{_PICTURES}]\u200d(?=[{_PICTURES}]))(?<![{_PICTURES}][\ufe0e\ufe0f]\u200d(?=[{_PICTURES}])))+"
)
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # marks of direction turn nothing around
_BREAKS = "\x0b\x0c\x85\u2028\u2029"
_MANY = 30_000  # characters that a table knows
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACE = re.compile(r"[ \t\r\n]+")


def inert(text: str, *, lines: bool = True) -> str:
    """The text, with everything that could act or hide written out; `lines=False` makes it one line, as for a log."""
    if lines and "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\\r")
    return _written_out(text, lines) if _first(lines).search(text) else text


def written_out(text: str) -> str:
    """As `inert`, with `\\r\\n` as it is: for the eyes of models, and of programs that read lines."""
    return _written_out(_pattern("\r(?!\n)").sub(r"\\r", text), True)


def seen(text: str) -> str:
    """The text without what `inert` would write out: for models, which read what people do not see."""
    text = text.replace("\r\n", "\n")
    return quiet(text)[0] if _first(True).search(text) else text


def quiet(text: str) -> tuple[str, dict[str, int]]:
    """The text without what acts or hides, and how much of what that was.

    Sequences go whole, other breaks become newlines, and `\\r\\n` stays as it is. No step of this is made in Python for
    each character that goes, for a result has room for millions.
    """
    colours = sequences = returns = needless = 0
    if any(map(text.__contains__, _BEGINS)):
        colours = len(_pattern(_COLOUR).findall(text))
        text, sequences = _pattern(_SEQUENCE).subn("", text)
    if "\r" in text:
        text, returns = _pattern("\r(?!\n)").subn("\n", text)
    if any(map(text.__contains__, _NEEDED)):
        before, text = len(text), _pattern(_NEEDLESS).sub("", text)
        needless = before - len(text)
    signs = text.translate(_signs)
    counts = {
        "colour": colours,
        "escape sequence": sequences - colours,
        "control character": signs.count("c") + returns,
        "tag character": signs.count("t"),
        "bidirectional control": signs.count("b"),
        "invisible character": signs.count("i") + needless,
    }
    return text.translate(_left), {kind: count for kind, count in counts.items() if count > 0}


class _Table(dict[int, str | None]):
    """What becomes of each character, for `str.translate`; found out when it is first met."""

    def __init__(self, made: Callable[[str], str | None]) -> None:
        self._made = made

    def __missing__(self, code: int) -> str | None:
        if len(self) >= _MANY:
            self.clear()
        self[code] = made = self._made(chr(code))
        return made


def _hides(char: str) -> bool:
    """Whether it does wherever it stands."""
    return char >= "\U0003fffe" or (char not in _NEEDED and char != "\r" and _first(True).match(char) is not None)


_left = _Table(lambda char: char if not _hides(char) else "\n" if char in _BREAKS else None)
_signs = _Table(lambda char: _sign(char) if _hides(char) else None)
_names = {
    True: _Table(lambda char: _name(char) if _hides(char) else char),
    False: _Table(lambda char: _name(char) if _hides(char) or char in _SHORT else char),
}


def _written_out(text: str, lines: bool) -> str:
    needless = _pattern(_NEEDLESS).sub(lambda found: "".join(map(_name, found[0])), text)
    return needless.translate(_names[lines])


@cache
def _pattern(text: str) -> re.Pattern[str]:  # these take milliseconds, and few who import this need them
    return re.compile(text, re.DOTALL)


@cache
def _first(lines: bool) -> re.Pattern[str]:
    return re.compile(f"[{_ACTING[lines]}{HIDDEN}]")


def one_line(text: str, limit: int = 80) -> str:
    """The beginning of a text as one line of at most `limit` characters; runs of white space become one space."""
    start = text[: 50 * limit]
    made = inert(_SPACE.sub(" ", start).strip(), lines=False)
    return made if len(made) <= limit and len(start) == len(text) else made[: limit - 1] + "…"


def texts_in(value: Any) -> list[str]:
    """Every text in a JSON value, and every key."""
    rest = [value]
    for each in rest:
        if type(each) is dict:
            rest += [*each, *each.values()]
        elif type(each) is list:
            rest += each
    return [each for each in rest if type(each) is str]


def _name(char: str) -> str:
    code = ord(char)
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0xA0 else f"<U+{code:04X}>")


def _sign(char: str) -> str:
    """The first letter of what it is called."""
    if char < "\xa0":
        return "c"
    if "\U000e0000" <= char < "\U000e0100":
        return "t"
    return "b" if char in _DIRECTIONS else "i"


# Secrets

_SECRET_NAME = re.compile(
    r"secret|passwor[dt]|passwd|passphrase|apikey|privatekey|accesskey|signingkey|authorization|credential|cookie"
    r"|(?<!progress)token$|jwt$|sessionid$|codeverifier$|^pat$|^pwd$|^auth$"
)
_WORDS = (
    r"secret|passwor[dt]|passwd|passphrase|api[_-]?key|private[_-]?key|access[_-]?key|signing[_-]?key|authorization"
    r"|credential|(?<!progress)(?<!progress_)token(?![a-z])"
)
# Every part is bounded or cannot begin where another has just failed: the time grows with the text, whatever is in it.
_LOOKS_SECRET = (
    r"(?i)(?P<scheme>\b(?:bearer|dpop|basic)\s{1,8})[\w.~+/=-]{8,}"
    r"|(?P<prefix>\b(?:[spr]k[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|npm_|hf_|hk_|pypi-))[\w-]{12,}"
    r"|(?<![\w-])(?=(?:[\w-]*-)?eyJ)[\w-]{11,}+\.[\w-]{4,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}-----|\Z)"
    r"|(?P<user>://[^\s/@:\"]{0,256}:)[^\s/@\"]{1,512}(?=@)"
    rf"|(?P<member>(?:{_WORDS})[\w-]{{0,40}}(?:\\?[\"'])?\s{{0,8}}[:=]\s{{0,8}}(?P<quote>\\?[\"'])?)"
    r"(?:(?P<how>bearer|dpop|basic)\s{1,8})?+(?!\*\*\*\*|null\b|true\b|false\b|\$\{[\w:]+\}|[{\[])"
    # In quotes it goes on to the end of them, if they have one; a quote in it may be written as `\"`, or `\\\"`.
    r"(?:(?(quote)(?:(?!(?P=quote))(?:\\\\\\.|\\.|[^\\])){1,4096}+(?=(?P=quote))|(?!))|[^\s\"'\\&,;}\]]+)"
)
# What each of these begins with, in lower case. To look for it takes a hundredth of the time of trying them everywhere.
_BEGINNINGS = (
    "bearer dpop basic sk- sk_ pk- pk_ rk- rk_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- xox akia asia aiza npm_ hf_ "
    "hk_ pypi- -----begin :// secret passwo passwd passphrase apikey api_key api-key privatekey private_key "
    "private-key accesskey access_key access-key signingkey signing_key signing-key authorization credential token"
).split()
_LIKE = {0x130: "i", 0x131: "i", 0x17F: "s"}  # what counts as a letter in the other case beside what `lower` knows
_RUN = re.compile(r"(?<![\w-])[\w-]*?eyj")
_SCHEME = re.compile(r"(?:bearer|dpop|basic)\s+", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{[\w:]+\}")  # to a variable: where a secret is, not what it is


def is_secret(name: str) -> bool:
    """Whether what stands under this name is probably a secret: a header, a member, a variable, an option."""
    return _SECRET_NAME.search(re.sub(r"[-_ .]", "", name.lower())) is not None


def mask(text: str, known: Collection[str] = ()) -> str:
    """The text without what looks like a secret, and without those that are known."""
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= 4:  # shorter ones would take half of every text with them
            text = text.replace(secret, MASK)
    made, done = [], 0
    for start in _starts(text):
        if start >= done and (found := _pattern(_LOOKS_SECRET).match(text, start)):
            made += [text[done:start], _hide(found)]
            done = found.end()
    return "".join([*made, text[done:]]) if made else text


def mask_secrets(value: Any, known: Collection[str] = ()) -> Any:
    """A copy of a JSON value without its secrets; texts are masked as by `mask`."""
    if isinstance(value, str):
        return mask(value, known)
    if isinstance(value, Mapping):
        return {mask(str(key), known): _member(str(key), inner, known) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and is_secret(value[0]):  # a header, as name and value
            return [value[0], _member(value[0], value[1], known)]
        return [mask_secrets(inner, known) for inner in value]
    return value


def mask_words(words: Iterable[str], known: Collection[str] = ()) -> list[str]:
    """The words of a command without their secrets: also what follows an option such as `--token`."""
    shown, hidden = [], False
    for word in words:
        shown.append(MASK if hidden and not word.startswith("-") else mask(word, known))
        hidden = word.startswith("-") and "=" not in word and is_secret(word)
    return shown


def _starts(text: str) -> list[int]:
    """Where something that looks like a secret can begin, in order."""
    lower = (text if text.isascii() else text.translate(_LIKE)).lower()
    found = [at for word in _BEGINNINGS for at in _places(lower, word)]
    if "eyj" in lower:  # a token of three parts may have something before it, up to where its word begins
        found += [run.start() for run in _RUN.finditer(lower)]
    return sorted(found)


def _places(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def _hide(found: re.Match[str]) -> str:
    groups = found.groupdict()
    shown = groups["scheme"] or groups["prefix"] or groups["user"] or groups["member"] or ""
    return f"{shown}{groups['how']} {MASK}" if groups["how"] else shown + MASK


def _member(name: str, value: Any, known: Collection[str]) -> Any:
    if not is_secret(name) or (isinstance(value, Mapping) and value.keys() & {"type", "$ref", "anyOf", "oneOf"}):
        return mask_secrets(value, known)  # a schema that speaks of a secret is none
    if isinstance(value, str):
        scheme = _SCHEME.match(value)
        said, rest = (scheme[0], value[scheme.end() :]) if scheme else ("", value)
        return value if not rest or _REFERENCE.fullmatch(rest) else said + MASK
    if isinstance(value, Mapping):
        return {key: _member(name, inner, known) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_member(name, inner, known) for inner in value]
    return MASK if type(value) in (int, float) else value
