"""URI templates of resources: RFC 6570 read backwards, and the spelling of URIs.

A URI is matched whole, without backtracking, and its values are percent-decoded once. A value that could leave the
folder it is used in is refused: a function that opens `f"notes/{name}"` is safe. Every accepted URI has one canonical
form, `expand(match(uri))`, which access rules are compared with; `match` of that form gives the same values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Literal
from unicodedata import normalize
from urllib.parse import quote, unquote

from msgspec import Struct

__all__ = ["MAX_URI_CHARS", "UriTemplate", "is_safe_path", "normalize_spelling", "normalize_uri", "uri_problem"]

MAX_URI_CHARS = 2_048

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_EXPRESSION = re.compile(r"\{([^{}]*)\}")
_PREFIXES = {"": "", "+": "", "#": "#", ".": ".", "/": "/", ";": ";{}="}  # what an expression puts before its value
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_ASCII = "".join(map(chr, range(128)))
_IN_PATH = "/:@!$&'()*+,;="  # reserved characters that a multi-segment value keeps
# Not in a URI; after the backquote and its like, characters that Python prints though they cannot be seen.
_FORBIDDEN = re.compile(
    '[ "<>\\\\^`{|}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]'
)
# Control characters and half surrogates. An escape that is left after decoding could be decoded by a careless function.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]|%(?:2e|2f|5c|00)", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:")
_PARTS = re.compile(r"([^:]*:)(//[^/?#]*)?([^?#]*)(.*)", re.DOTALL)  # scheme, authority, path, query and fragment
_Kind = Literal["segment", "path", "query"]


class _Variable(Struct, frozen=True):
    """A variable; `delimiters` never occur in its raw value, `keeps` are not percent-encoded in the canonical one."""

    name: str
    kind: _Kind
    delimiters: str
    keeps: str = ""

    def decode(self, raw: str) -> str | None:
        """Return the value; None if it is malformed or unsafe."""
        if any(sign in raw for sign in self.delimiters) or _BAD_ESCAPE.search(raw):
            return None
        try:
            value = unquote(raw, errors="strict")
        except UnicodeDecodeError:
            return None
        return value if _is_safe(value, self.kind) else None


class UriTemplate:
    """A template such as `file:///notes/{name}`, checked when it is made.

    `{name}` is one segment, `{+path}`, `{path*}` and `{/path*}` are several, `{?a,b}` and `{&a}` are optional members
    of the query in any order; `{.a}`, `{/a}`, `{;a}` and `{#a}` are one segment behind their sign. `shape` is equal for
    templates that match the same URIs; of several that match, the one with the greatest `literal_length` is meant.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        pieces = _EXPRESSION.split(text)  # literals, with an expression between each two
        if "{" in "".join(pieces[::2]) or "}" in "".join(pieces[::2]):
            raise ValueError(f"URI template {text!r}: a brace has no partner; a variable is written {{name}}")
        if problem := uri_problem(pieces[0] if len(pieces) == 1 else "x".join(pieces[::2])):
            raise ValueError(f"URI template {text!r}: {problem}")
        if len(pieces) == 1:
            raise ValueError(f"URI template {text!r}: there is no variable such as {{name}}; this is a static URI")
        if not _SCHEME.match(pieces[0]):
            raise ValueError(f"URI template {text!r}: the scheme cannot be variable; begin with one, such as 'file:'")
        self._literals = [normalize_spelling(pieces[0])]
        self._variables: list[_Variable] = []
        self._query: dict[str, _Variable] = {}
        for expression, literal in zip(pieces[1::2], pieces[2::2], strict=True):
            if problem := self._add(expression, _normalize_escapes(literal)):
                raise ValueError(f"URI template {text!r}: {{{expression}}}: {problem}")
        self.optional = frozenset(self._query)
        self.literal_length = sum(map(len, self._literals))
        is_path = [variable.kind == "path" for variable in self._variables]
        self._pivot = is_path.index(True) if True in is_path else 0
        _, mark, query = "".join(self._literals).partition("?")
        self._fixed_members = query.count("&") + 1 if mark else 0  # of the query, in the literals
        signs = ["{+}" if each else "{}" for each in is_path]
        self.shape = "".join(map("".join, zip(self._literals, [*signs, ""], strict=True)))
        self.shape += f"{{?{','.join(sorted(self._query))}}}" if self._query else ""

    @property
    def names(self) -> tuple[str, ...]:
        return (*(variable.name for variable in self._variables), *self._query)

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the decoded variables; None if the URI is another one, malformed, or has an unsafe value."""
        return None if uri_problem(uri) else self.match_normal(normalize_spelling(uri))

    def match_normal(self, uri: str) -> dict[str, str] | None:
        """Do the same for a URI that is checked, and written as `normalize_spelling` returns it."""
        if (values := self._scan(uri)) is None or len(canonical := self.expand(values)) > MAX_URI_CHARS:
            return None
        # Literals between variables can be read in two ways: only what the canonical form agrees with is accepted.
        return values if canonical == uri or self._scan(canonical) == values else None

    def expand(self, variables: Mapping[str, str]) -> str:
        """Return the canonical URI of these values; a variable of the query may be absent."""
        out = self._literals[0]
        for variable, literal in zip(self._variables, self._literals[1:], strict=True):
            out += quote(variables[variable.name], safe=variable.keeps) + literal
        members = [f"{name}={quote(variables[name], safe='')}" for name in self._query if name in variables]
        return out + ("&" if self._fixed_members else "?") * bool(members) + "&".join(members)

    def _add(self, expression: str, literal: str) -> str:
        """Add an expression and the literal after it; return what is wrong."""
        operator = expression[:1] if expression[:1] in {*_PREFIXES, "?", "&"} else ""
        names = expression.removeprefix(operator).split(",")
        before = "".join(self._literals)
        if operator in ("?", "&"):
            if literal or "#" in before:
                return "query variables end a URI; put them last, without a fragment"
            if ("?" in before) is not (operator == "&") and not self._query:
                return "write {?name} for the first member of a query, and {&name} after one"
            added = [_Variable(name, "query", "?#&") for name in names]
        elif len(names) > 1:
            return "several variables stand in a query only, {?a,b}; write a literal between them, {a}/{b}"
        else:
            is_path = operator == "+" or (operator in ("", "/") and names[0].endswith("*"))
            name = names[0].removesuffix("*") if operator != "+" and is_path else names[0]
            self._literals[-1] += _PREFIXES[operator].format(name)
            if self._query or not self._literals[-1]:
                return "two variables touch, or one follows the query; put a literal such as / between them"
            if is_path and any(variable.kind == "path" for variable in self._variables):
                return "a second variable of several segments; where the first ends would be a guess"
            in_query = "?" in before
            keeps = _IN_PATH.replace("&", "") if in_query else _IN_PATH
            kind: _Kind = "path" if is_path else "segment"
            added = [_Variable(name, kind, "?#&" if in_query else "?#", keeps if is_path else "")]
        for variable in added:
            if problem := _name_problem(variable.name):
                return problem
            if variable.name in self.names:
                return f"{variable.name!r} occurs twice; give each variable a name of its own"
            if variable.kind == "query":
                self._query[variable.name] = variable
            else:
                self._variables.append(variable)
                self._literals.append(literal)
        return ""

    def _scan(self, uri: str) -> dict[str, str] | None:
        if not uri.startswith(self._literals[0]):
            return None
        base, members = uri, list[str]()
        if self._query:
            base, mark, query = uri.partition("?")
            members = query.split("&") if mark else []
            fixed, members = members[: self._fixed_members], members[self._fixed_members :]
            base += mark + "&".join(fixed) if self._fixed_members else ""
        if (raw := self._split(base)) is None:
            return None
        pairs = [*zip(self._variables, raw, strict=True)]
        for name, mark, value in (member.partition("=") for member in members):
            if not mark or name not in self._query:
                return None
            pairs.append((self._query[name], value))
        values: dict[str, str] = {}
        for variable, text in pairs:
            decoded = variable.decode(text)
            if decoded is None or variable.name in values:
                return None
            values[variable.name] = decoded
        return values

    def _split(self, uri: str) -> list[str] | None:
        """Return the raw values between the literals: up to the pivot each is the shortest, after it too, from the end.

        The pivot is the variable of several segments, or the first: so `{name}.{suffix}` splits at the last full stop.
        """
        first, *between, last = literals = [*self._literals, ""] if not self._variables else self._literals
        start, end = len(first), len(uri) - len(last)
        if not self._variables:
            return [] if uri == literals[0] else None
        if start >= end or not uri.startswith(first) or not uri.endswith(last):
            return None
        left, right = list[str](), list[str]()
        for literal in between[: self._pivot]:
            if (at := uri.find(literal, start + 1, end)) < 0:
                return None
            left.append(uri[start:at])
            start = at + len(literal)
        for literal in reversed(between[self._pivot :]):
            if (at := uri.rfind(literal, start, end - 1)) < 0:
                return None
            right.append(uri[at + len(literal) : end])
            end = at
        return [*left, uri[start:end], *reversed(right)]


def uri_problem(uri: str) -> str:
    """Return why a text is no absolute URI; empty if it is one. Letters of all scripts are accepted."""
    ascii_chars = len(uri.encode("ascii", "ignore"))
    if ascii_chars + 3 * (len(uri.encode("utf-8", "replace")) - ascii_chars) > MAX_URI_CHARS:  # as it is escaped
        return f"longer than {MAX_URI_CHARS:,} characters"
    if not _SCHEME.match(uri) or _SCHEME.fullmatch(uri):
        return "not an absolute URI such as 'file:///notes/today'"
    if not uri.isprintable() or _FORBIDDEN.search(uri):
        return 'a space, a control or invisible character, or one of "<>\\^`{|}; percent-encode it'
    return "a % without two hexadecimal digits; write %25" if _BAD_ESCAPE.search(uri) else ""


def normalize_uri(uri: str) -> str:
    """Return the one spelling of a URI that resources and rules are looked up by.

    The host is in lower case, and reserved characters are not escaped, but where that would change the query.
    """
    uri = normalize_spelling(uri)
    if (match := _PARTS.fullmatch(uri)) is None:
        return uri
    scheme, authority, path, rest = match[1], match[2] or "", match[3], match[4]
    user, at, host = authority.rpartition("@")
    path = "/" if not path and scheme in ("http:", "https:") else path
    return scheme + _normalize_escapes(f"{user}{at}{host.lower()}{path}", "&=") + _normalize_escapes(rest, "")


def is_safe_path(value: str) -> bool:
    """Return whether a relative path with `/` stays in its folder, on every system and in every Unicode form."""
    return _is_safe(value, "path")


def _is_safe(value: str, kind: _Kind) -> bool:
    for form in (value, normalize("NFKC", value)):  # full-width dots and slashes are plain ones to some readers
        if _UNSAFE.search(form):
            return False
        segments = form.replace("\\", "/").split("/")
        if kind == "query":
            if ".." in segments:
                return False
        elif (
            "\\" in form
            or not {"", ".", ".."}.isdisjoint(segments)
            or (kind == "segment" and len(segments) > 1)
            or _DRIVE.match(form)
        ):
            return False
    return True


def _name_problem(name: str) -> str:
    if name.isascii() and name.isidentifier() and not iskeyword(name):
        return ""
    if ":" in name or "*" in name:
        return f"{name!r}: modifiers are not supported, but {{path*}} and {{/path*}}; write the name only"
    plain = re.sub(r"[-.]", "_", name)
    example = plain if plain.isascii() and plain.isidentifier() and not iskeyword(plain) else "name"
    return f"{name!r} cannot be a parameter of a Python function; write {example!r}"


def normalize_spelling(uri: str) -> str:
    """Return a URI with its scheme in lower case and its escapes in their one form (RFC 3986, section 6.2.2)."""
    end = match.end() if (match := _SCHEME.match(uri)) else 0  # 0: a pattern that begins with *
    return uri[:end].lower() + _normalize_escapes(uri[end:])


def _normalize_escapes(text: str, reserved: str | None = None) -> str:
    """Escape what is not ASCII, decode the escapes of unreserved characters, write the others in upper case.

    With `reserved`, decode also the escapes of these, and of those characters that mean nothing in a path or a query.
    """
    plain = _UNRESERVED if reserved is None else _UNRESERVED.union("!$'()+,;:@", reserved)

    def normal(match: re.Match[str]) -> str:
        sign = chr(int(match[1], 16))
        return sign if sign in plain else match[0].upper()

    return _ESCAPE.sub(normal, quote(text, safe=_ASCII, errors="replace"))
