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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

__all__ = ["HIDDEN", "MASK", "inert", "is_secret", "mask", "mask_secrets", "mask_words", "one_line", "quiet", "seen"]

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
_PICTURE = f"[{_PICTURES}](?:[\ufe0e\ufe0f]|[\U0001f3fb-\U0001f3ff])?"
_JOINING = (
    "\u0620-\u06d3\u06fa-\u06ff\u0710-\u074f\u0750-\u077f\u07ca-\u07f5\u0840-\u0858\u0860-\u086a\u08a0-\u08c9\u08d3-\u08e1"
    "\u08e3-\u08ff\u0900-\u0dff\u0f00-\u0fff\u1000-\u109f\u1780-\u17b3\u17b6-\u17d3\u1820-\u18aa\u1b00-\u1b7f\ufb50-\ufdcf"
    "\ufe70-\ufefc"
)
_VIRAMA = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca\u0f84\u1039\u103a\u17d2\u1b44"
_KEPT = (
    f"{_PICTURE}(?:\u200d{_PICTURE})*|(?<=[0-9#*])\ufe0f(?=\u20e3)|(?<=[{_VIRAMA}])[\u200c\u200d]"
    f"|(?<=[{_JOINING}])[\u200c\u200d](?=[{_JOINING}])|(?<=[\u1820-\u18aa])[\u180b-\u180d\u180f]"
)
_ACTING = {True: "\x00-\x08\x0b-\x1f\x7f-\x9f", False: "\x00-\x1f\x7f-\x9f"}
# Whole sequences of ECMA-48: control sequences, strings up to their end, and the shorter ones; colours by themselves.
_SEQUENCE = (
    "(?P<colour>(?:\x1b\\[|\x9b)[0-9;:]*+m)|(?P<escape>(?:\x1b\\[|\x9b)[0-?]*+[ -/]*+[@-~]"
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x9c]*+(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]*+[0-~]|[\x1b\x90\x98\x9b\x9d-\x9f])"
)
_REST = f"(?:[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x8f\x91-\x97\x99\x9a\x9c{HIDDEN}]|\r(?!\n))+"
_ORDINARY = f"[^\x00-\x08\x0b-\x1f\x7f-\x9f{HIDDEN}{_PICTURES}]++"
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # marks of direction turn nothing around
_BREAKS = "\r\x0b\x0c\x85\u2028\u2029"
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACE = re.compile(r"[ \t\r\n]+")


def inert(text: str, *, lines: bool = True) -> str:
    """The text, with everything that could act or hide written out; `lines=False` makes it one line, as for a log."""
    if lines and "\r" in text:
        text = text.replace("\r\n", "\n")
    return _each(lines).sub(_write_out, text) if _first(lines).search(text) else text


@cache
def _first(lines: bool) -> re.Pattern[str]:  # these take milliseconds, and few who import this need them
    return re.compile(f"[{_ACTING[lines]}{HIDDEN}]")


@cache
def _each(lines: bool) -> re.Pattern[str]:
    return re.compile(f"(?P<kept>{_KEPT})|[{_ACTING[lines]}{HIDDEN}]+")


def seen(text: str) -> str:
    """The text without what `inert` would write out: for models, which read what people do not see."""
    text = text.replace("\r\n", "\n")
    return quiet(text)[0] if _first(True).search(text) else text


def quiet(text: str, *, show: bool = False) -> tuple[str, Counter[str]]:
    """The text without what acts or hides (or with it written out), and how much of what that was.

    Sequences go whole, other breaks become newlines, and `\\r\\n` stays as it is.
    """
    counts: Counter[str] = Counter()

    def replace(found: re.Match[str]) -> str:
        kind, run = found.lastgroup, found[0]
        if kind == "kept":
            return run
        counts.update(["colour" if kind == "colour" else "escape sequence"] if kind else map(_kind, run))
        if show:
            return inert(run) if kind else "".join(map(_name, run))
        return "" if kind else "".join("\n" for char in run if char in _BREAKS)

    return _quiet_parts().sub(replace, text), counts


@cache
def _quiet_parts() -> re.Pattern[str]:  # made when first needed: it takes as long as the rest of this module
    return re.compile(f"(?P<kept>{_ORDINARY}|{_KEPT}|\r(?=\n))|{_SEQUENCE}|{_REST}")


def one_line(text: str, limit: int = 80) -> str:
    """The beginning of a text as one line of at most `limit` characters; runs of white space become one space."""
    start = text[: 50 * limit]
    made = inert(_SPACE.sub(" ", start).strip(), lines=False)
    return made if len(made) <= limit and len(start) == len(text) else made[: limit - 1] + "…"


def _write_out(found: re.Match[str]) -> str:
    return found[0] if found["kept"] else "".join(map(_name, found[0]))


def _name(char: str) -> str:
    code = ord(char)
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0xA0 else f"<U+{code:04X}>")


def _kind(char: str) -> str:
    if char < "\xa0":
        return "control character"
    if "\U000e0000" <= char < "\U000e0100":
        return "tag character"
    return "bidirectional control" if char in _DIRECTIONS else "invisible character"


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
_LOOKS_SECRET = re.compile(
    r"(?P<scheme>\b(?:bearer|dpop|basic)\s{1,8})[\w.~+/=-]{8,}"
    r"|(?P<prefix>\b(?:[spr]k[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|npm_|hf_|hk_|pypi-))[\w-]{12,}"
    r"|(?<![\w-])(?=(?:[\w-]*-)?eyJ)[\w-]{11,}+\.[\w-]{4,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}-----|\Z)"
    r"|(?P<user>://[^\s/@:\"]{0,256}:)[^\s/@\"]{1,512}(?=@)"
    rf"|(?P<member>(?:{_WORDS})[\w-]{{0,40}}(?:\\?[\"'])?\s{{0,8}}[:=]\s{{0,8}}(?:\\?[\"'])?)"
    r"(?:(?P<how>bearer|dpop|basic)\s{1,8})?+(?!\*\*\*\*|null\b|true\b|false\b|\$\{[\w:]+\}|[{\[])[^\s\"'\\&,;}\]]+",
    re.IGNORECASE | re.DOTALL,
)
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
    return _LOOKS_SECRET.sub(_hide, text)


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
