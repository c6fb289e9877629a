"""Secrets in what leaves: those that are known, those that can be nothing else, those an operator describes (P-34).

Unlike `inert.mask`, which is for displays and may hide too much, this is for results: prose about tokens and passwords
stays. A token counts only with the beginning its issuer gave it, as long as he makes them, and not if it is words.

Whether there is anything at all is asked of the linear-time engine, which reads a megabyte in less than a millisecond;
only then is it searched for. Patterns of an operator are run by no other engine, and that one does not say where it has
found something: what is masked is the word, else the line, else the whole text.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from json import dumps
from math import log2
from string import ascii_letters, digits
from urllib.parse import quote

from handrail.errors import SchemaError
from handrail.model import Json
from handrail.schema.compile import compile_schema
from handrail.text.controls import MASK, is_secret, secret_words, strip_controls

__all__ = ["PREFIXES", "URL_PASSWORD", "Hit", "Secrets", "compile_absence", "compile_absence_strict", "secrets_in"]

_EDGE = "(?<![A-Za-z0-9])"
_NEW = r"(?:\\[rn]|\s)"  # also as JSON writes it
_BASE64 = "[A-Za-z0-9+/=]"
_BLANK = r" \t-\r"  # what is blank beyond ASCII, the engines do not agree about
# The rule, what of it stays, what is masked; both engines read them. What follows a beginning is one run of characters,
# or ends where another can begin, so that the time grows with the text and not with its square.
_TOKENS = {
    "private_key": (
        r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----",
        # Only `re` reads this one. It takes back nothing of a header: else six of them can be told apart in 10^10 ways.
        rf"(?:{_NEW}{{1,8}}+[A-Z][A-Za-z-]{{1,30}}+: [^\n\\\"]{{1,200}}+){{0,6}}+"
        rf"{_NEW}{{0,8}}{_BASE64}{{32,}}(?:{_NEW}{{1,8}}{_BASE64}+)*(?:{_NEW}{{0,8}}-----END [A-Z0-9 ]{{0,40}}-----)?",
    ),
    "url_password": (rf"://[^{_BLANK}/@:\"']*:", rf"[^{_BLANK}/@\"'<>]+@"),
    "bearer": (r"B(?:earer|EARER)[ \t]{1,8}", r"[\w.~+/-]{20,}={0,2}"),
    "basic": (r"[Aa]uthorization[\"']?[ \t]{0,8}[:=][ \t]{0,8}[\"']?Basic[ \t]{1,8}", r"[\w+/-]{12,}={0,2}"),
    "jwt": (r"\.", r"eyJ[\w-]{8,}\.[\w-]*"),
    "github": (rf"{_EDGE}(?:gh[pousr]_|github_pat_)", r"[A-Za-z0-9]{20,}\w*"),
    "gitlab": (rf"{_EDGE}gl(?:pat|ptt|rt|dt|oas|cbt|ft|soat|agent)-", r"[\w-]{20,}"),
    "openai": (rf"{_EDGE}sk-", r"(?:(?:ant|proj|or|svcacct|admin)-[\w-]{20,}|[A-Za-z0-9]{20,})"),
    "model": (rf"{_EDGE}(?:gsk_|hf_|r8_|xai-|pplx-)", r"[A-Za-z0-9]{30,}"),
    "stripe": (rf"{_EDGE}(?:[rs]k_(?:live|test)_|whsec_)", r"[A-Za-z0-9+/]{16,}"),
    "aws": (rf"{_EDGE}A(?:KIA|SIA|BIA|CCA)", r"[A-Z0-9]{16}"),
    "google": (rf"{_EDGE}(?:AIza|GOCSPX-|ya29\.)", r"[\w-]{28,}"),
    "slack": (rf"{_EDGE}(?:xox[abeoprs]-|xapp-)", r"[0-9][\w-]{16,}"),
    "package": (rf"{_EDGE}(?:npm_|rubygems_|dckr_pat_|pypi-AgE)", r"[\w-]{24,}"),
    "cloud": (rf"{_EDGE}(?:do[oprt]_v1_|shp(?:at|ca|pa|ss)_|PMAK-|AccountKey=)", r"[A-Za-z0-9+/=-]{32,}"),
    "service": (rf"{_EDGE}(?:SG\.|ATATT3|lin_api_|ntn_|glsa_|figd_|tskey-|NRAK-|nvapi-)", r"[\w.=-]{24,}"),
    "handrail": (rf"{_EDGE}(?:hk_|AGE-SECRET-KEY-1)", r"[\w-]{40,}"),
}
_LINEAR = {rule: f"{prefix}(?:{secret})".replace(_EDGE, "") for rule, (prefix, secret) in _TOKENS.items()}
_LINEAR["private_key"] = _TOKENS["private_key"][0]  # of that the beginning will do
# Together are those that the engine takes no longer to look for than for one.
_EXACT = [
    "|".join(map(_LINEAR.__getitem__, rules.split()))
    for rules in ("package stripe cloud google aws", "private_key github gitlab slack", "openai model service handrail")
]
# To look for the whole of these takes longer than for a part; a password in an address must have an @, too.
_SLOW = [_LINEAR["bearer"], _LINEAR["basic"], _LINEAR["jwt"]]
_BASIC = r"Basic[ \t]{1,8}(?:[0-9_+/-]|[\w+/-]+[A-Z0-9_+/-])"  # what is no word
_PARTS = [f"{_LINEAR['bearer']}|{_BASIC}", r"eyJ[\w-]{8,}\."]
URL_PASSWORD = _LINEAR["url_password"].removeprefix(":")
# Quick looks for all of them: each begins, or goes on, with what is rare in most texts.
PREFIXES = (
    r"[_-](?:[\w.+/=-]{16,}|----BEGIN)",
    r"SG\.[\w.=-]{24,}|9\.[\w-]{28,}|yJ[\w-]{8,}\.|(?:Bearer|BEARER)[ \t]{1,8}[\w.~+/-]{20,}"
    rf"|{_BASIC}|[KSB]IA[A-Z0-9]{{16}}|CCA[A-Z0-9]{{16}}|Iza[\w-]{{28,}}|TT3[\w.=-]{{24,}}"
    r"|tKey=[A-Za-z0-9+/=-]{32,}",
)
_SAMPLE_CHARACTERS = 2000  # characters of a text by which it is judged
_DENSE_SHARE = 0.01

_PART = "(?:[A-Z]?[a-z]+|[A-Z]+|[a-z]{0,4}[0-9]{1,4})"
_WORDS = re.compile(rf"{_PART}(?:[-_./=+~]+{_PART})*[-_./=+~]*")
_PLACEHOLDER = re.compile(
    r"[*x.]+|pass(word|wd)?|pwd|secret|token|redacted|your.*|change.?me|[<${\[%].*", re.IGNORECASE
)
_ALWAYS = frozenset({"private_key", "jwt", "aws"})
_ALNUM = frozenset(ascii_letters + digits)
_URLSAFE = ascii_letters + digits + "-_"
_WORD = "[^\\s\"'`<>(){}\\[\\],;=|&?]+"
_PIECES = (re.compile(_WORD), re.compile(r"[^\n]+"), re.compile(r".+", re.DOTALL))
_LAST = re.compile(_WORD + r"\Z")
_SHORT_PART = 200  # characters in which all rules are tried sooner than it is asked which are there
_PART_OF_LINE, _LONGEST = 16_384, 16_384  # characters; the most that a token may need to be recognised
_LINES = re.compile(r".{1,4096}[^\n]*\n?", re.DOTALL)
# Values of variables
_MIN_CHARACTERS, _MIN_BITS = 8, 16  # characters; bits by the frequency of each: 17 in eight that make four pairs
_ORDINARY = re.compile(
    r"change.?me|password|disabled|required|optional|unlimited|localhost|production|development|preproduction"
    r"|undefined|anonymous|automatic|interactive|unspecified|placeholder|your[-_ ].{0,60}",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?:~?/|[A-Za-z]:[/\\])[\w./\\@ -]+|[A-Za-z][A-Za-z0-9+.-]{0,30}://[\w./:%-]+")
_RANDOM = re.compile(r"(?=.*[A-Z])(?=.*[a-z])(?=.*[0-9])[\w-]{16,}|(?=.*[0-9])[\w-]{24,}")  # for one part of a path
_WEAK = re.compile(r"(?:key|auth|pat)s?[0-9_]*\Z", re.IGNORECASE)
_SEVERAL = re.compile(r"[\s,;]+")
_LIST = re.compile(r"[\w.~+/=:\s,;-]+")
_NO_SPAN = (1 << 62, 1 << 62, "", "")

Hit = tuple[int, str]
"""Which of the texts it begins in, and the rule that found it."""


@lru_cache(maxsize=256)
def _finder(*rules: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{rule}>{_TOKENS[rule][0]})(?:{_TOKENS[rule][1]})" for rule in rules), re.ASCII)


@lru_cache(maxsize=64)
def compile_absence_strict(*patterns: str) -> Callable[[str], bool]:
    """As `compile_absence`; UnicodeEncodeError of a text with half a character."""
    schema = {"not": {"anyOf": [{"type": "string", "pattern": each} for each in patterns]}}
    try:
        return compile_schema(schema, "pattern", any_root=True, formats=False).valid
    except SchemaError as problem:
        raise ValueError(str(problem)) from None


def compile_absence(*patterns: str) -> Callable[[str], bool]:
    """Whether a text has none of these, by the linear-time engine; ValueError says why that cannot take one."""
    valid = compile_absence_strict(*patterns)

    def check(text: str) -> bool:
        try:
            return valid(text)
        except UnicodeEncodeError:
            return valid(text.encode(errors="replace").decode())

    return check


_absence_of = cache(compile_absence)  # compiled when it is needed first


def secrets_in(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the values of variables whose names say that they are secret, and each of several in one value.

    Short values, paths, addresses, and words like `changeme` are not secrets: masked, they would be missed everywhere.
    """
    values: set[str] = set()
    for name, value in environ.items():
        words = secret_words(name)
        if any(words) or is_secret(name):
            # `CLIENT_SECRET` may be words. In `TOKEN_TYPE` or `SORT_KEY` they are no secret.
            is_explicit = words[-1] and not _WEAK.search(name)
            parts = _SEVERAL.split(value) if _LIST.fullmatch(value) and "-----" not in value else [value]
            candidates = [each for each in parts if not _WORDS.fullmatch(each)]
            if (candidates or is_explicit) and not _is_ordinary(value):
                values.add(value)
            values.update(each for each in candidates if not _is_ordinary(each))
    return frozenset(values)


def _is_ordinary(value: str) -> bool:
    """Whether a value is too short or too simple for a secret, or is what configurations often have."""
    if len(value) < _MIN_CHARACTERS or _ORDINARY.fullmatch(value):
        return True
    if _PATH.fullmatch(value):
        return not any(map(_RANDOM.fullmatch, re.split(r"[/\\]", value)))
    bits = -sum(n * log2(n / len(value)) for n in Counter(value).values())
    return bits < _MIN_BITS


class Secrets:
    """The secrets to mask: known values, also as JSON, HTML, addresses and base64 write them, tokens, and patterns.

    A known value of less than 4 characters is ignored: it would mask half of every text.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Mapping[str, str] | None = None) -> None:
        spellings = sorted({each for secret in values for each in _spellings(secret)})
        self._patterns = {name: compile_absence(pattern) for name, pattern in (patterns or {}).items()}
        batches = [spellings[at : at + 16] for at in range(0, len(spellings), 16)]
        self._value_batches = [
            (compile_absence("|".join({re.escape(each[:16]) for each in batch})), batch) for batch in batches
        ]
        self.other_checks = [
            *(is_absent for is_absent, _ in self._value_batches),
            *self._patterns.values(),
        ]  # beside tokens

    def has_none(self, text: str) -> bool:
        """Whether there is none; what is none may still be taken for one."""
        return _no_token(text) and (not self.other_checks or all(each(text) for each in self.other_checks))

    def mask_texts(self, texts: Sequence[str]) -> tuple[list[str], list[Hit]]:
        """Texts that follow each other, without the secrets in them, also those that go from one into the next."""
        hits: list[Hit] = []
        masked = list(texts)
        if len(masked) > 1 and not self.has_none("".join(masked)):
            masked = self._mask(masked, hits)
            for at in range(1, len(masked) if self._patterns else 0):
                self._mask_border(masked, at, hits)
        for at, text in enumerate(masked):
            if not self.has_none(text):
                [text] = self._mask([text], hits, at)
                masked[at] = self._mask_described(text, hits, at)
        return masked, hits

    def redact(self, value: Json) -> Json:
        """A copy of a JSON value without them, in its keys too."""
        if isinstance(value, str):
            return self.mask_texts([value])[0][0]
        if isinstance(value, dict):
            return {self.redact(key): self.redact(inner) for key, inner in value.items()}
        return [self.redact(inner) for inner in value] if isinstance(value, list) else value

    def _mask(self, texts: list[str], hits: list[Hit], number: int = 0) -> list[str]:
        spans = iter(sorted(self._spans("".join(texts))))
        start, end, prefix, rule = next(spans, _NO_SPAN)
        masked, offset = [], 0
        for at, text in enumerate(texts, number):
            parts, done, limit = [], 0, offset + len(text)
            while start < limit:
                if start >= offset + done:  # else it began in the text before, or inside another
                    parts += [text[done : start - offset], prefix, MASK]
                    hits.append((at, rule))
                done = max(done, min(end, limit) - offset)
                if end > limit:
                    break
                start, end, prefix, rule = next(spans, _NO_SPAN)
            masked.append("".join([*parts, text[done:]]))
            offset = limit
        return masked

    def _spans(self, text: str) -> Iterator[tuple[int, int, str, str]]:
        """From where to where, what is left standing before the mask, by which rule."""
        for is_absent, batch in self._value_batches:
            if not is_absent(text):
                yield from ((at, at + len(each), "", "known") for each in batch for at in _places(text, each))
        for match in self._tokens(text):
            (start, end), rule = match.span(), match.lastgroup or ""
            prefix = match[rule]
            hidden, innocent = match[0][len(prefix) :], _WORDS
            if rule == "jwt":
                header = text[max(0, start - 8192) : start]
                header = header[len(header.rstrip(_URLSAFE)) :]
                if "eyJ" not in header:
                    continue
                start, prefix = start - len(header) + header.index("eyJ"), ""
            elif rule == "url_password":
                end, hidden, innocent = end - 1, hidden[:-1], _PLACEHOLDER
            elif rule == "aws" and text[end : end + 1] in _ALNUM:
                continue
            if rule in _ALWAYS or not innocent.fullmatch(hidden):
                yield start, end, prefix, rule

    def _tokens(self, text: str) -> Iterator[re.Match[str]]:
        first, *rest = _TOKENS
        done = 0
        for at in _places(text, "-----BEGIN "):  # the one of many lines
            if at >= done and (match := _finder(first).match(text, at)):
                yield match
                done = match.end()
        for lines in _LINES.finditer(text):
            if _no_token(lines[0]):
                continue
            at, end = lines.span()
            while at < end:  # a long line part by part, for a pattern holds all threads up until it is through
                limit, done = at + _PART_OF_LINE, at
                part = text[at : min(end, limit + _LONGEST)]
                rules = rest
                if len(part) > _SHORT_PART:
                    rules = [rule for rule in rest if not _absence_of(_LINEAR[rule])(part)]
                if rules:
                    finder = _finder(*rules)
                    for match in finder.finditer(text, at, at + len(part)):
                        if match.start() >= limit:
                            break
                        if match.end() == limit + _LONGEST:  # it may go on
                            match = finder.match(text, match.start(), end) or match
                        yield match
                        done = match.end()
                at = max(limit, done)

    def _mask_described(self, text: str, hits: list[Hit], number: int) -> str:
        for name, is_absent in self._patterns.items():
            for pieces in _PIECES:
                if is_absent(text):
                    break

                def replace(
                    piece: re.Match[str], is_absent: Callable[[str], bool] = is_absent, name: str = name
                ) -> str:
                    if is_absent(piece[0]):
                        return piece[0]
                    hits.append((number, name))
                    return MASK

                text = pieces.sub(replace, text)
        return text

    def _mask_border(self, texts: list[str], at: int, hits: list[Hit]) -> None:
        left, right = _LAST.search(texts[at - 1], max(0, len(texts[at - 1]) - 200)), _PIECES[0].match(texts[at])
        for name, is_absent in self._patterns.items():
            if left and right and is_absent(left[0]) and is_absent(right[0]) and not is_absent(left[0] + right[0]):
                texts[at - 1], texts[at] = texts[at - 1][: left.start()] + MASK, texts[at][right.end() :]
                hits.append((at - 1, name))
                return


def _no_token(text: str) -> bool:
    """Whether there is none; what is none may still be taken for one."""
    if "@" in text and not _absence_of(_LINEAR["url_password"])(text):
        return False
    beginning = text[
        :_SAMPLE_CHARACTERS
    ]  # where signs are everywhere, to halt at each takes longer than to look for more
    has_many = beginning.count("-") + beginning.count("_") > _DENSE_SHARE * len(beginning)
    if not has_many and _absence_of(*PREFIXES)(text):
        return True
    return _absence_of(*_EXACT)(text) and (_absence_of(*_PARTS)(text) or _absence_of(*_SLOW)(text))


def _places(text: str, word: str) -> Iterator[int]:
    """Where a word is, not within itself."""
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + len(word))


def _spellings(secret: str) -> Iterator[str]:
    """A secret as it may be written: as it is, in JSON, Python, HTML, an address, hexadecimal, somewhere in base64."""
    secret = strip_controls(secret)[0]
    if len(secret) < 4:
        return
    yield secret
    as_html = secret  # `html` would be imported for these five
    for char, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#x27;")):
        as_html = as_html.replace(char, name)
    yield from (dumps(secret)[1:-1], dumps(secret, ensure_ascii=False)[1:-1], as_html)
    quoted = quote(secret, safe="")
    yield from (
        quoted,
        quote(secret),
        quoted.replace("%", "%25"),
        re.sub("%..", lambda match: match[0].lower(), quoted),
    )
    yield from (repr(secret)[1:-1], as_html.replace("&quot;", "&#34;").replace("&#x27;", "&#39;"))
    if len(secret) >= 8:
        raw = secret.encode()
        yield from (raw.hex(), raw.hex().upper())
        for shift in range(3):  # the first and last characters depend on what stands beside
            whole = b64encode(bytes(shift) + raw).decode().rstrip("=")
            inner = whole[(0, 2, 3)[shift] : len(whole) - ((shift + len(raw)) % 3 > 0)]
            yield from (inner, inner.replace("+", "-").replace("/", "_"))
