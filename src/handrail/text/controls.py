"""Foreign text that can be looked at without harm: shown in a terminal, a page or a log, never obeyed (P-33).

What acts on a screen, or is there without being seen, is written out: control characters as `\x1b`, others as
`<U+202E>`. That is C0, DEL and C1 (so every escape sequence), bidirectional controls, line and paragraph separators,
zero-width and other default-ignorable characters, tags, variation selectors, private use, noncharacters, half
surrogates. Two decisions about ordinary text:

- Emoji stay whole: joiners and selectors inside a sequence of pictographs, keycaps. Flags made of tags do not.
- U+200C and U+200D stay where spelling needs them: between letters of Arabic, Indic and related scripts, or
  after a virama. Marks of direction, zero-width spaces and ideographic variation selectors are always shown.

Results of tools (`strip_controls`) keep more, because a model and a program read them as data: line and paragraph
separators, form feeds and private use are written out for display only. All others are removed and counted by class.

The result is for eyes: a text that already contains `\x1b` in so many letters cannot be told apart afterwards. Doing
it twice changes nothing.

The second half hides secrets, by the name of what they stand under and by what they look like (P-34). It is for wires
and configurations on display; it may hide too much, and cannot know every secret: name those that are known.

Texts that look the same and are not: which names can be taken for others (P-32).

The table has what looks like a Latin letter in Greek and Cyrillic, the scripts most fonts draw alike; it is a help for
people who look at names, not a complete list of confusables (Unicode Technical Standard 39 has that).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from unicodedata import name as unicode_name, normalize

__all__ = ["confusable_names", "skeleton"]

MASK = "****"
CONTINUATION = "  | "
"""Before a line that goes on with a record of a log, or with a message of the command line."""

# What is removed from results. In planes 4 to 14 there are only tags, selectors and noncharacters.
INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U0001fffe-\U0001ffff\U0002fffe-\U0002ffff\U0003fffe-\U000effff\U000ffffe-\U000fffff"
    "\U0010fffe-\U0010ffff"
)
CONTROLS = "\x00-\x08\x0b\x0e-\x1f\x7f-\x9f"  # but for a return, which stays before a newline
# What is written out for display, and stays in results: it is seen, or is white space, and readers take it as data.
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_DATA = f"\x0c\u2028\u2029{_PRIVATE}"
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
_DISPLAY_CONTROLS = {True: "\x00-\x08\x0b-\x1f\x7f-\x9f", False: "\x00-\x1f\x7f-\x9f"}
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
_CLASSES = {  # by the sign that stands for it while it is counted
    "c": "control character",
    "n": "line break",
    "t": "tag character",
    "b": "bidirectional control",
    "m": "byte order mark",
    "s": "soft hyphen",
    "i": "invisible character",
}
_MAX_TABLE_CHARACTERS = 30_000  # characters that a table knows
_CHUNK_CHARACTERS = 16_384  # characters for which a pattern or a table needs a few milliseconds at most
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACE = re.compile(r"[ \t\r\n]+")


def escape(text: str, *, lines: bool = True) -> str:
    """The text, with everything that could act or hide written out; `lines=False` makes it one line, as for a log."""
    if lines and "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\\r")
    return _escape_all(text, lines) if _first(lines).search(text) else text


def escape_with_continuations(text: str) -> str:
    """As `escape`; every line but the first is marked, so that none passes for a record or a message of its own."""
    return escape(text).replace("\n", f"\n{CONTINUATION}")


def escape_keep_crlf(text: str) -> str:
    """Return the text of a result with what `strip_controls` would remove written out."""
    return _escape_all(_pattern("\r(?!\n)").sub(r"\\r", text), None)


def strip_invisible(text: str, *, is_data: bool = False) -> str:
    """The text for a model, without what `escape` writes out; `is_data`: without what `strip_controls` removes."""
    text = text.replace("\r\n", "\n")
    return (
        _strip_sequences(text)[0].translate(_strip_from_results if is_data else _strip_for_display)
        if _first(True).search(text)
        else text
    )


def strip_controls(text: str) -> tuple[str, dict[str, int]]:
    """Return the text of a result without what acts or hides, and how much of what was removed.

    Sequences go whole; a lone return, U+000B and U+0085 become newlines. No step of this is made in Python for each
    character that goes, for a result has room for millions.
    """
    text, counts = _strip_sequences(text)
    parts = []
    for at in range(0, len(text), _CHUNK_CHARACTERS):
        part = text[at : at + _CHUNK_CHARACTERS]
        if signs := part.translate(_class_signs):
            for sign, name in _CLASSES.items():
                counts[name] = counts.get(name, 0) + signs.count(sign)
            part = part.translate(_strip_from_results)
        parts.append(part)
    return "".join(parts), {name: count for name, count in counts.items() if count > 0}


def _strip_sequences(text: str) -> tuple[str, Counter[str]]:
    """The text without what is only recognised by its neighbours: sequences, lone returns, joiners without a use."""
    counts: Counter[str] = Counter()
    if any(map(text.__contains__, _BEGINS)):
        parts = []
        for part in _chunks(text, f"[{_BEGINS}](?!\\\\)"):  # not within a string, which may end with an escape and `\\`
            counts["colour"] += len(_pattern(_COLOUR).findall(part))
            rest, sequences = _pattern(_SEQUENCE).subn("", part)
            counts["escape sequence"] += sequences
            parts.append(rest)
        counts["escape sequence"] -= counts["colour"]
        text = "".join(parts)
    if "\r" in text:
        broken = [_pattern("\r(?!\n)").subn("\n", part) for part in _chunks(text, "[^\n]")]
        text, counts["line break"] = "".join(part for part, _ in broken), sum(times for _, times in broken)
    if any(map(text.__contains__, _NEEDED)):
        before = len(text)
        cut = f"(?<![\u200c\u200d])[^{_NEEDED}\u20e3]"  # what comes before does not depend on this, nor this on that
        text = "".join(_pattern(_NEEDLESS).sub("", part) for part in _chunks(text, cut, _CHUNK_CHARACTERS))
        counts["invisible character"] = before - len(text)
    return text, counts


def _chunks(text: str, cut: str, max_search: int | None = None) -> Iterator[str]:
    """Parts of a long text, for a pattern holds all threads up until it is through.

    They begin where `cut` is found; if that takes more than `most` characters, anywhere.
    """
    at = 0
    while len(text) - at > _CHUNK_CHARACTERS:
        end = at + _CHUNK_CHARACTERS
        match = _pattern(cut).search(text, end, len(text) if max_search is None else end + max_search)
        if match is not None:
            end = match.start()
        elif max_search is None:
            break
        yield text[at:end]
        at = end
    yield text[at:]


class _Table(dict[int, str | None]):
    """What becomes of each character, for `str.translate`; found out when it is first met."""

    def __init__(self, replacement_of: Callable[[str], str | None]) -> None:
        self._replacement_of = replacement_of

    def __missing__(self, code: int) -> str | None:
        if len(self) >= _MAX_TABLE_CHARACTERS:
            self.clear()
        self[code] = replacement = self._replacement_of(chr(code))
        return replacement


def _is_escaped_for_display(char: str) -> bool:
    """Whether it is written out for display wherever it stands."""
    return char not in _NEEDED and char != "\r" and _first(True).match(char) is not None


def _is_removed_from_results(char: str) -> bool:
    """Whether it is removed from a result wherever it stands."""
    return char not in _NEEDED and _pattern(f"[{CONTROLS}{INVISIBLE}]").match(char) is not None and char != "\r"


_strip_for_display = _Table(
    lambda char: char if not _is_escaped_for_display(char) else "\n" if char in _BREAKS else None
)
_strip_from_results = _Table(
    lambda char: char if not _is_removed_from_results(char) else "\n" if char in _BREAKS else None
)
_class_signs = _Table(lambda char: _sign(char) if _is_removed_from_results(char) else None)
_escapes = {
    True: _Table(lambda char: _name(char) if _is_escaped_for_display(char) else char),
    False: _Table(lambda char: _name(char) if _is_escaped_for_display(char) or char in _SHORT_ESCAPES else char),
    None: _Table(lambda char: _name(char) if _is_removed_from_results(char) else char),
}


def _escape_all(text: str, lines: bool | None) -> str:
    needless = _pattern(_NEEDLESS).sub(lambda match: "".join(map(_name, match[0])), text)
    return needless.translate(_escapes[lines])


@cache
def _pattern(text: str) -> re.Pattern[str]:  # these take milliseconds, and few who import this need them
    return re.compile(text, re.DOTALL)


@cache
def _first(lines: bool) -> re.Pattern[str]:
    return re.compile(f"[{_DISPLAY_CONTROLS[lines]}{INVISIBLE}{_DATA}]")


def one_line(text: str, limit: int = 80) -> str:
    """The beginning of a text as one line of at most `limit` characters; runs of white space become one space."""
    start = text[: 50 * limit]
    line = escape(_SPACE.sub(" ", start).strip(), lines=False)
    return line if len(line) <= limit and len(start) == len(text) else line[: limit - 1] + "…"


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
    return _SHORT_ESCAPES.get(char) or (f"\\x{code:02x}" if code < 0xA0 else f"<U+{code:04X}>")


def _sign(char: str) -> str:
    """Return the sign of its class in `_CLASSES`."""
    if char in _BREAKS:
        return "n"
    if char < "\xa0":
        return "c"
    if "\U000e0000" <= char < "\U000e0100":
        return "t"
    if char in _DIRECTIONS:
        return "b"
    return {"\ufeff": "m", "\xad": "s"}.get(char, "i")


# Secrets

# Names. What counts in every name, without its separators; what else counts as a word of a variable's name, also in the
# plural or with a number, as in `STRIPE_KEY`, `API_TOKENS`, `DB_PASS2`; and what else a word of one may end with.
_SECRET_NAME = re.compile(
    r"secret|passwor[dt]|passwd|passphrase|apikey|privatekey|accesskey|signingkey|authorization|credential|cookie"
    r"|(?<!progress)token$|jwt$|sessionid$|codeverifier$|^pat$|^pwd$|^auth$"
)
_VARIABLE_WORDS = frozenset("key token pass pwd pat auth cred jwt".split())
_VARIABLE_ENDINGS = tuple(
    "token apikey accesskey authkey encryptionkey masterkey privatekey secretkey sessionkey signingkey sshkey"
    " dbpass pgpass sshpass userpass rootpass adminpass dbpwd mysqlpwd".split()
)
_SECRET_FIELD = re.compile(  # in the name, title or description of a field
    r"(?i)passwor[dt]|passwd|passphrase|(?<![a-z])(?:pwd|cvv|cvc|otp)(?![a-z])|api[_ -]?key|private[_ -]?key"
    r"|access[_ -]?(?:key|token)|auth[a-z]*[_ -]?token|client[_ -]?secret|secret[_ -]?key|^secret$|^token$"
    r"|bearer[_ -]?token|credit[_ -]?card|card[_ -]?number|(?<![a-z])pin[_ -]?(?:code|number)"
    r"|recovery[_ -]?code|seed[_ -]?phrase"
)
_SECRET_MESSAGE = re.compile(
    r"(?i)\b(?:your|the|a|an|type|enter|give|send)\s+(?:[\w'-]+\s+){0,3}?(?:password|passphrase|passwd"
    r"|api[ -]key|private key|access token|secret key|credit card|card number|pin code|seed phrase)\b"
)
_BETWEEN = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])")
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
_CASE_VARIANTS = {
    0x130: "i",
    0x131: "i",
    0x17F: "s",
}  # what counts as a letter in the other case beside what `lower` knows
_RUN = re.compile(r"(?<![\w-])[\w-]*?eyj")
_SCHEME = re.compile(r"(?:bearer|dpop|basic)\s+", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{[\w:]+\}")  # to a variable: where a secret is, not what it is


def is_secret(name: str) -> bool:
    """Whether what stands under this name is probably a secret: a header, a member, a variable, an option."""
    if _SECRET_NAME.search(re.sub(r"[-_ .]", "", name.lower())):
        return True
    return name.isupper() and any(secret_words(name))


def secret_field(schema: Any, message: str = "") -> str:
    """Return the field of a form that asks for a secret, or the word of its message that does; "" if none does.

    Servers must not ask for sensitive information by a form: it passes through the client, and often a model.
    """
    fields = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        attributes = field if isinstance(field, Mapping) else {}
        labels = [str(name), *(text for key in ("title", "description") if type(text := attributes.get(key)) is str)]
        is_text = attributes.get("type", "string") == "string" and "enum" not in attributes
        if is_text and (attributes.get("format") == "password" or any(map(_SECRET_FIELD.search, labels))):
            return str(name)[:100]
    match = _SECRET_MESSAGE.search(message)
    return match[0] if match and fields else ""


def secret_words(variable: str) -> list[bool]:
    """Return for each word in the name of an environment variable whether it says that the value is a secret."""
    words = [word.lower().rstrip("0123456789") for word in _BETWEEN.split(variable)]
    return [
        any(each in _VARIABLE_WORDS or each.endswith(_VARIABLE_ENDINGS) for each in (word, word.removesuffix("s")))
        or is_secret(word)
        for word in filter(None, words)
    ]


def mask(text: str, secrets: Collection[str] = ()) -> str:
    """Return the text without known secrets, and without what looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 4:  # shorter ones would take half of every text with them
            text = text.replace(secret, MASK)
    parts, done = [], 0
    for start in _starts(text):
        if start >= done and (match := _pattern(_LOOKS_SECRET).match(text, start)):
            parts += [text[done:start], _hide(match)]
            done = match.end()
    return "".join([*parts, text[done:]]) if parts else text


def mask_secrets(value: Any, secrets: Collection[str] = ()) -> Any:
    """A copy of a JSON value without its secrets; texts are masked as by `mask`."""
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {mask(str(key), secrets): _member(str(key), inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and is_secret(value[0]):  # a header, as name and value
            return [value[0], _member(value[0], value[1], secrets)]
        return [mask_secrets(inner, secrets) for inner in value]
    return value


def mask_words(words: Iterable[str], secrets: Collection[str] = ()) -> list[str]:
    """The words of a command without their secrets: also what follows an option such as `--token`."""
    masked, hidden = [], False
    for word in words:
        masked.append(MASK if hidden and not word.startswith("-") else mask(word, secrets))
        hidden = word.startswith("-") and "=" not in word and is_secret(word)
    return masked


def _starts(text: str) -> list[int]:
    """Where something that looks like a secret can begin, in order."""
    lower = (text if text.isascii() else text.translate(_CASE_VARIANTS)).lower()
    starts = [at for word in _BEGINNINGS for at in _places(lower, word)]
    if "eyj" in lower:  # a token of three parts may have something before it, up to where its word begins
        starts += [run.start() for run in _RUN.finditer(lower)]
    return sorted(starts)


def _places(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def _hide(match: re.Match[str]) -> str:
    groups = match.groupdict()
    prefix = groups["scheme"] or groups["prefix"] or groups["user"] or groups["member"] or ""
    return f"{prefix}{groups['how']} {MASK}" if groups["how"] else prefix + MASK


def _member(name: str, value: Any, secrets: Collection[str]) -> Any:
    if not is_secret(name) or (isinstance(value, Mapping) and value.keys() & {"type", "$ref", "anyOf", "oneOf"}):
        return mask_secrets(value, secrets)  # a schema that speaks of a secret is none
    if isinstance(value, str):
        scheme = _SCHEME.match(value)
        prefix, rest = (scheme[0], value[scheme.end() :]) if scheme else ("", value)
        return value if not rest or _REFERENCE.fullmatch(rest) else prefix + MASK
    if isinstance(value, Mapping):
        return {key: _member(name, inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_member(name, inner, secrets) for inner in value]
    return MASK if type(value) in (int, float) else value


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
