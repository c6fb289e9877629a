"""The table of messages that are wrong, odd or at a limit, and what each is answered with.

A line is written once for all revisions: `@ID@` is an id of its own, `@META@` the `_meta` member a request needs (the
whole envelope in 2026-07-28), `@ENV@` the members inside it, `@FILL@` as many letters as make the line `size` bytes.

Where the id stands: `ECHO` it could be read and comes back; `NONE` it could not, and is null or absent as the revision
has it (PD-28); `MAYBE` the text is so broken that both are right, but never another id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["CASES", "LIMIT", "TOO_LONG", "Case", "Expect", "line_of"]

Json = Any

LIMIT: Final = 4 * 1024 * 1024  # of a message, by default
ECHO: Final = "@echo@"
NONE: Final = "@none@"
MAYBE: Final = "@maybe@"

R2 = "2025-03-26"
R5 = "2026-07-28"
RESULT_FORM = ("2025-11-25", "2026-07-28")  # where invalid arguments are told as a tool's result (PD-4)


@dataclass(frozen=True)
class Expect:
    """What comes back: nothing, an error with one of `codes`, a result, a failed result, or a list of those."""

    kind: str
    codes: tuple[int, ...] = ()
    ident: Json = ECHO
    items: tuple[Expect, ...] = ()


@dataclass(frozen=True)
class Case:
    name: str
    line: bytes
    expect: Expect
    but: Mapping[str, Expect] = field(default_factory=dict)  # revision -> what it does otherwise
    size: int = 0
    http: Expect | None = None  # where a body is not a line

    def expected(self, revision: str) -> Expect:
        return self.but.get(revision, self.expect)


def line_of(case: Case, revision: str, ident: int) -> bytes:
    """The bytes to send, without the newline at the end."""
    envelope = {
        "io.modelcontextprotocol/protocolVersion": revision,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "rig", "version": "1"},
    }
    inside = json.dumps(envelope, separators=(",", ":"))[1:-1].encode() if revision == R5 else b""
    line = case.line.replace(b"@META@", b'"_meta":{' + inside + b"}")
    line = line.replace(b"@ENV@", inside + b"," if inside else b"").replace(b"@ID@", str(ident).encode())
    return line.replace(b"@FILL@", b"x" * (case.size - len(line) + len(b"@FILL@"))) if case.size else line


def _error(*codes: int, ident: Json = ECHO) -> Expect:
    return Expect("error", codes, ident)


SILENT = Expect("silent")
RESULT = Expect("result")
FAILED = Expect("failed")

PARSE = _error(-32700)
PARSE_NONE = _error(-32700, ident=NONE)
PARSE_MAYBE = _error(-32700, ident=MAYBE)
BOUND = _error(-32700, -32602)  # THREATS, default limits: nesting, digits, keys
BOUND_MAYBE = _error(-32700, -32602, ident=MAYBE)
INVALID = _error(-32600)
INVALID_NONE = _error(-32600, ident=NONE)
UNKNOWN = _error(-32601)
PARAMS = _error(-32602)
VERSION = _error(-32022)
ARGUMENTS = dict.fromkeys(RESULT_FORM, FAILED)
TOO_LONG = Expect("refused", (413,))  # over HTTP by its status, with a text for people


def _ping(params: bytes = b"{@META@}", ident: bytes = b"@ID@") -> bytes:
    # A call, because it is the one request that every revision has.
    if params == b"{@META@}":
        return b'{"jsonrpc":"2.0","id":%b,"method":"tools/call","params":{@META@,"name":"nothing"}}' % ident
    return b'{"jsonrpc":"2.0","id":%b,"method":"tools/call","params":%b}' % (ident, params)


def _with(member: bytes) -> bytes:
    """A good call with one more thing in its `_meta`, where anything may stand."""
    return b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{"name":"nothing","_meta":{@ENV@%b}}}' % member


def _value(value: bytes) -> bytes:
    return _with(b'"x":' + value)


def _echo(arguments: bytes) -> bytes:
    return (
        b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@,"name":"echo","arguments":%b}}' % arguments
    )


def _call(members: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@%b}}' % members


def _method(method: bytes, params: bytes = b"{@META@}") -> bytes:
    return b'{"jsonrpc":"2.0","id":@ID@,"method":%b,"params":%b}' % (method, params)


def _notify(method: bytes, params: bytes | None = None) -> bytes:
    more = b"" if params is None else b',"params":' + params
    return b'{"jsonrpc":"2.0","method":%b%b}' % (method, more)


_GOOD = _ping()

_NOT_JSON = [
    Case("a word", b"hello", PARSE_NONE),
    Case("an opening brace", b"{", PARSE_NONE),
    Case("a closing brace", b"}", PARSE_NONE),
    Case("an opening bracket", b"[", PARSE_NONE),
    Case("a closing bracket", b"]", PARSE_NONE),
    Case("a quote", b'"', PARSE_NONE),
    Case("a comma", b",", PARSE_NONE),
    Case("half a key", b'{"jsonrpc"', PARSE_NONE),
    Case("half a message", b'{"jsonrpc":"2.0","id":@ID@,"method":"pi', PARSE_MAYBE),
    Case("a message without its last brace", _GOOD[:-1], PARSE_MAYBE),
    Case("a message without its first brace", _GOOD[1:], PARSE_MAYBE),
    Case("a message with a brace too many", _GOOD + b"}", PARSE_MAYBE),
    Case("single quotes", b"{'jsonrpc':'2.0','id':@ID@,'method':'ping'}", PARSE_MAYBE),
    Case("keys without quotes", b'{jsonrpc:"2.0",id:@ID@,method:"ping"}', PARSE_MAYBE),
    Case("a comma at the end of an object", b'{"jsonrpc":"2.0","id":@ID@,"method":"ping",}', PARSE_MAYBE),
    Case("a comma at the end of an array", _value(b"[1,]"), PARSE_MAYBE),
    Case("two commas", _value(b"[1,,2]"), PARSE_MAYBE),
    Case("no comma", b'{"jsonrpc":"2.0" "id":@ID@,"method":"ping"}', PARSE_MAYBE),
    Case("no colon", b'{"jsonrpc" "2.0","id":@ID@,"method":"ping"}', PARSE_MAYBE),
    Case("an equals sign", b'{"jsonrpc"="2.0","id":@ID@,"method":"ping"}', PARSE_MAYBE),
    Case("a line comment", _GOOD + b" // please", PARSE_MAYBE),
    Case("a comment", b"/* please */" + _GOOD, PARSE_MAYBE),
    Case("a hash comment", b"# please", PARSE_NONE),
    Case("a number as a key", _value(b"{1:2}"), PARSE_MAYBE),
    Case("a bracket closed by a brace", _value(b"[1}"), PARSE_MAYBE),
    Case("text before the message", b"INFO " + _GOOD, PARSE_MAYBE),
    Case("text after the message", _GOOD + b" ok", PARSE_MAYBE),
    Case("two messages on one line", _GOOD + _GOOD, PARSE_MAYBE),
    Case("two messages with a space", _GOOD + b" " + _GOOD, PARSE_MAYBE),
    Case("two messages with a comma", _GOOD + b"," + _GOOD, PARSE_MAYBE),
    Case("two messages with a carriage return", _GOOD + b"\r" + _GOOD, PARSE_MAYBE),
    Case("a header of another protocol", b"Content-Length: 52\r", PARSE_NONE),
    Case("a line of HTTP", b"POST /mcp HTTP/1.1\r", PARSE_NONE),
    Case("XML", b'<?xml version="1.0"?><methodCall/>', PARSE_NONE),
    Case("YAML", b"jsonrpc: 2.0", PARSE_NONE),
    Case("Python", b"{'jsonrpc': '2.0', 'id': None}", PARSE_NONE),
    Case("a terminal's escape sequence", b"\x1b[31mred\x1b[0m", PARSE_NONE),
    Case("a record separator before", b"\x1e" + _GOOD, PARSE_MAYBE),
    Case("binary", bytes(n for n in range(256) if n != 10), PARSE_NONE),
    Case("a TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", PARSE_NONE),
]

_LITERALS = [
    Case(f"the value {value.decode()}", _value(value), expect)
    for value, expect in [
        (b"NaN", PARSE),
        (b"Infinity", PARSE),
        (b"-Infinity", PARSE),
        (b"[1,[NaN]]", PARSE),
        (b"nan", PARSE_MAYBE),
        (b"inf", PARSE_MAYBE),
        (b"True", PARSE_MAYBE),
        (b"TRUE", PARSE_MAYBE),
        (b"None", PARSE_MAYBE),
        (b"nul", PARSE_MAYBE),
        (b"nulll", PARSE_MAYBE),
        (b"undefined", PARSE_MAYBE),
        (b"01", PARSE_MAYBE),
        (b"-01", PARSE_MAYBE),
        (b"00", PARSE_MAYBE),
        (b"+1", PARSE_MAYBE),
        (b".5", PARSE_MAYBE),
        (b"1.", PARSE_MAYBE),
        (b"1e", PARSE_MAYBE),
        (b"1e+", PARSE_MAYBE),
        (b"-", PARSE_MAYBE),
        (b"--1", PARSE_MAYBE),
        (b"0x10", PARSE_MAYBE),
        (b"1_000", PARSE_MAYBE),
        (b"1 000", PARSE_MAYBE),
        (b"1e400", _error(-32700, -32602)),  # JSON, but it would arrive as Infinity
        (b"-1e400", _error(-32700, -32602)),
    ]
] + [
    Case("NaN alone", b"NaN", PARSE_NONE),
    Case("NaN as id", _ping(ident=b"NaN"), PARSE_NONE),
    Case(
        "NaN as argument",
        b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@,"name":"add","arguments":{"a":NaN,"b":1}}}',
        PARSE,
    ),
    Case(
        "1e400 as argument",
        b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@,"name":"add",'
        b'"arguments":{"a":1e400,"b":1}}}',
        _error(-32700, -32602),
    ),
]

_ENCODING = [
    Case("a byte order mark before", b"\xef\xbb\xbf" + _GOOD, PARSE_MAYBE),
    Case("a byte order mark after", _GOOD + b"\xef\xbb\xbf", PARSE_MAYBE),
    Case("a byte order mark alone", b"\xef\xbb\xbf", PARSE_NONE),
    Case("UTF-16, little end first", '{"jsonrpc":"2.0","id":5,"method":"x"}'.encode("utf-16-le"), PARSE_NONE),
    Case("UTF-16 with a mark", '{"jsonrpc":"2.0","id":5,"method":"x"}'.encode("utf-16"), PARSE_NONE),
    Case("UTF-32", '{"jsonrpc":"2.0","id":5,"method":"x"}'.encode("utf-32-be"), PARSE_NONE),
    Case("Latin-1", _value('"caf\u00e9"'.encode("latin-1")), PARSE),
    Case("the byte FF", _value(b'"\xff"'), PARSE),
    Case("the byte FE", _value(b'"\xfe"'), PARSE),
    Case("a continuation byte alone", _value(b'"a\x80b"'), PARSE),
    Case("an over-long slash", _value(b'"\xc0\xaf"'), PARSE),
    Case("an over-long slash of three bytes", _value(b'"\xe0\x80\xaf"'), PARSE),
    Case("an over-long null", _value(b'"\xc0\x80"'), PARSE),
    Case("a surrogate in bytes", _value(b'"\xed\xa0\x80"'), PARSE),
    Case("a pair of surrogates in bytes", _value(b'"\xed\xa0\xbd\xed\xb8\x80"'), PARSE),
    Case("a code point past the last", _value(b'"\xf4\x90\x80\x80"'), PARSE),
    Case("a sequence of five bytes", _value(b'"\xf8\x88\x80\x80\x80"'), PARSE),
    Case("a sequence cut by the quote", _value(b'"\xe2\x82"'), PARSE),
    Case("a sequence cut by the end of the line", _GOOD[:-1] + b',"x":"\xf0\x9f', PARSE_MAYBE),
    Case("a bad byte in a key", _with(b'"\xff":1'), PARSE),
    Case("a bad byte in the method", _method(b'"tools/\xff"'), PARSE),
    Case("a bad byte in the id", _ping(ident=b'"x\xff"'), PARSE_NONE),
    Case("a bad byte in a key beside the id", b'{"jsonrpc":"2.0","i\xff":1,"id":@ID@,"method":"ping"}', PARSE),
    Case("a bad byte between members", b'{"jsonrpc":"2.0",\xff"id":@ID@,"method":"ping"}', PARSE_MAYBE),
    Case("a bad byte after the message", _GOOD + b"\xff", PARSE_MAYBE),
    Case("half a surrogate pair, high", _value(b'"\\ud800"'), PARSE),
    Case("half a surrogate pair, low", _value(b'"\\udc00"'), PARSE),
    Case("a surrogate pair the wrong way round", _value(b'"\\ude00\\ud83d"'), PARSE),
    Case("two high halves", _value(b'"\\ud83d\\ud83d"'), PARSE),
    Case("a high half and a letter", _value(b'"\\ud83dx"'), PARSE),
    Case("a high half and an escape", _value(b'"\\ud83d\\n"'), PARSE),
    Case("a high half and half an escape", _value(b'"\\ud83d\\u00"'), PARSE_MAYBE),
    Case("a high half at the end of a long text", _value(b'"' + b"x" * 5000 + b'\\ud83d"'), PARSE),
    Case("half a pair in a key", _with(b'"\\ud800":1'), PARSE),
    Case("half a pair in the method", _method(b'"\\udfff"'), PARSE),
    Case("half a pair in the tool's name", _call(b',"name":"\\ud800"'), PARSE),
    Case("half a pair in the argument", _echo(b'{"text":"\\ud800"}'), PARSE),
    Case("half a pair as id", _ping(ident=b'"\\ud800"'), PARSE_NONE),
    Case("half a pair inside the id", _ping(ident=b'"abc\\udc00def"'), PARSE_NONE),
    Case("half a pair as id of an answer", b'{"jsonrpc":"2.0","id":"\\ud800","result":{}}', PARSE_NONE),
    Case("a null byte raw", _value(b'"a\x00b"'), PARSE_MAYBE),
    Case("a tabulator raw", _value(b'"a\tb"'), PARSE_MAYBE),
    Case("a carriage return raw", _value(b'"a\rb"'), PARSE_MAYBE),
    Case("an escape character raw", _value(b'"\x1b[31m"'), PARSE_MAYBE),
    Case("a unit separator raw", _value(b'"\x1f"'), PARSE_MAYBE),
    Case("a control character in the id", _ping(ident=b'"a\x01"'), _error(-32700, ident=NONE)),
    Case("a null byte before", b"\x00" + _GOOD, PARSE_MAYBE),
    Case("a null byte after", _GOOD + b"\x00", PARSE_MAYBE),
    Case("a null byte alone", b"\x00", PARSE_NONE),
    Case("a vertical tabulator as space", b"\x0b" + _GOOD, PARSE_MAYBE),
    Case("a form feed as space", _GOOD + b"\x0c", PARSE_MAYBE),
    Case("a hard space as space", "\u00a0".encode() + _GOOD, PARSE_MAYBE),
    Case("a line separator as space", "\u2028".encode() + _GOOD, PARSE_MAYBE),
    Case("an unknown escape", _value(b'"\\x41"'), PARSE_MAYBE),
    Case("an escaped quote of the other kind", _value(b'"\\\'"'), PARSE_MAYBE),
    Case("a short escape", _value(b'"\\u12"'), PARSE_MAYBE),
    Case("an escape that is not hexadecimal", _value(b'"\\u00g0"'), PARSE_MAYBE),
    Case("an escape with braces", _value(b'"\\u{41}"'), PARSE_MAYBE),
    Case("a lone backslash", _value(b'"\\"'), PARSE_MAYBE),
]

_DUPLICATES = [
    Case("the method twice", b'{"jsonrpc":"2.0","id":@ID@,"method":"ping","method":"tools/list"}', PARSE),
    Case("the method twice, alike", b'{"jsonrpc":"2.0","id":@ID@,"method":"ping","method":"ping"}', PARSE),
    Case("jsonrpc twice", b'{"jsonrpc":"1.0","jsonrpc":"2.0","id":@ID@,"method":"ping"}', PARSE),
    Case("the id twice, alike", b'{"jsonrpc":"2.0","id":@ID@,"id":@ID@,"method":"ping"}', PARSE_MAYBE),
    Case(
        "params twice", b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{"name":"echo"},"params":{}}', PARSE
    ),
    Case("the tool's name twice", _call(b',"name":"echo","name":"nothing"'), PARSE),
    Case("the tool's name twice, escaped", _call(b',"name":"echo","n\\u0061me":"nothing"'), PARSE),
    Case("the arguments twice", _call(b',"name":"echo","arguments":{"text":"a"},"arguments":{"text":"b"}'), PARSE),
    Case("an argument twice", _echo(b'{"text":"a","text":"b"}'), PARSE),
    Case("an argument twice, escaped", _echo(b'{"text":"a","\\u0074ext":"b"}'), PARSE),
    Case("an argument twice, both escaped", _echo(b'{"\\u0074ext":"a","t\\u0065xt":"b"}'), PARSE),
    Case("an argument twice, in big and small digits", _echo(b'{"te\\u006Axt":"a","te\\u006axt":"b"}'), PARSE),
    Case("a key twice in _meta", _with(b'"a":1,"a":2'), PARSE),
    Case("a key thrice", _value(b'{"a":1,"a":2,"a":3}'), PARSE),
    Case("a key twice, deep", _value(b'[[{"b":[{"a":1,"c":{"x":1,"x":2}}]}]]'), PARSE),
    Case(
        "a key twice, far apart",
        _value(b'{"a":1,' + b",".join(b'"k%d":0' % n for n in range(2000)) + b',"a":2}'),
        PARSE,
    ),
    Case("the empty key twice", _value(b'{"":1,"":2}'), PARSE),
    Case("a key of a colon twice", _value(b'{":":1,":":2}'), PARSE),
    Case("a key of colons and quotes twice", _value(b'{"a\\":b":1,"a\\":b":2}'), PARSE),
    Case("a key twice, spaces before the colons", _value(b'{"a" :1,"a"  :2}'), PARSE),
    Case("a key twice, tabulators before the colons", _value(b'{"a"\t:1,"a"\r:2}'), PARSE),
    Case("a key twice beside colons in texts", _value(b'{"a":"x:y","a":"::","u":"http://a:1/"}'), PARSE),
    Case("a key twice beside what looks like members", _value(b'{"a":"\\":","a":" :","u":"\\"k\\":\\"v\\""}'), PARSE),
    Case("a key twice, an empty object between", _value(b'{"a":{},"b":{},"a":{}}'), PARSE),
    Case("an emoji as key twice, once escaped", _value('{"\U0001f600":1,"\\ud83d\\ude00":2}'.encode()), PARSE),
    Case("a slash as key twice, once escaped", _value(b'{"/":1,"\\/":2}'), PARSE),
    Case("the null character as key twice", _value(b'{"\\u0000":1,"\\u0000":2}'), PARSE),
    Case("__proto__ twice", _value(b'{"__proto__":1,"__proto__":2}'), PARSE),
    Case("keys that differ in case", _value(b'{"a":1,"A":2}'), RESULT),
    Case("keys that differ in normal form", _value('{"\u00e9":1,"e\u0301":2}'.encode()), RESULT),
    Case("keys alike in different objects", _value(b'[{"a":1},{"a":1,"b":{"a":1}}]'), RESULT),
    Case("colons everywhere but no key twice", _value(b'{"a:":"::","b" : "\\":","c":" :"}'), RESULT),
    Case("a key twice in a batch", b'[{"jsonrpc":"2.0","id":@ID@,"method":"ping","x":{"a":1,"a":2}}]', PARSE_MAYBE),
]

_TOP = _value(b"")[:-3]  # a call, up to where a value in its `_meta` stands: three levels deep


def _deep(opening: bytes, closing: bytes, levels: int) -> bytes:
    return _value(opening * (levels - 3) + (b"1" if b":" in opening else b"") + closing * (levels - 3))


_BOUNDS = [
    Case("128 levels of arrays", _deep(b"[", b"]", 128), RESULT),
    Case("129 levels of arrays", _deep(b"[", b"]", 129), BOUND),
    Case("128 levels of objects", _deep(b'{"a":', b"}", 128), RESULT),
    Case("129 levels of objects", _deep(b'{"a":', b"}", 129), BOUND),
    Case("129 levels of both", _value(b'{"a":[' * 63 + b"1" + b"]}" * 63), BOUND),
    Case("500 levels", _deep(b"[", b"]", 500), BOUND),
    Case("1,000 levels", _deep(b"[", b"]", 1000), BOUND_MAYBE),
    Case("100,000 levels of arrays", _deep(b"[", b"]", 100_000), BOUND_MAYBE),
    Case("100,000 levels of objects", _deep(b'{"a":', b"}", 100_000), BOUND_MAYBE),
    Case("100,000 levels alone", b"[" * 100_000 + b"]" * 100_000, _error(-32700, -32602, -32600, ident=NONE)),
    Case("100,000 brackets never closed", b"[" * 100_000, PARSE_NONE),
    Case("100,000 objects never closed", b'{"a":' * 100_000, PARSE_NONE),
    Case("100,000 brackets in a text", _value(b'"' + b"[" * 100_000 + b'"'), RESULT),
    Case("1,000 digits", _value(b"1" * 1000), RESULT),
    Case("1,000 digits and a sign", _value(b"-" + b"1" * 1000), RESULT),
    Case("1,000 digits and a sign beside colons", _value(b'["::",-' + b"1" * 1000 + b"]"), RESULT),
    Case("1,000 digits, point and exponent", _value(b"-1." + b"3" * 997 + b"e-10"), RESULT),
    Case("1,000 digits, point and exponent, beside colons", _value(b'["::",-1.' + b"3" * 997 + b"e-10]"), RESULT),
    Case("1,001 digits, point and exponent", _value(b"-1." + b"3" * 998 + b"e-10"), BOUND),
    Case("1,001 digits", _value(b"1" * 1001), BOUND),
    Case("1,001 digits, negative", _value(b"-" + b"1" * 1001), BOUND),
    Case("1,001 digits after the point", _value(b"0." + b"1" * 1001), BOUND),
    Case("1,001 digits in two halves", _value(b"0." + b"0" * 500 + b"1e-" + b"0" * 500), BOUND),
    Case("1,001 digits in the exponent", _value(b"1e-" + b"0" * 1000 + b"1"), BOUND),
    Case("1,001 digits in an array", _value(b"[1,2," + b"9" * 1001 + b"]"), BOUND),
    Case("1,001 digits as argument", _echo(b'{"text":' + b"9" * 1001 + b"}"), BOUND),
    Case("5,000 digits", _value(b"1" * 5000), BOUND),
    Case("1,000,000 digits", _value(b"1" * 1_000_000), BOUND),
    Case("1,001 digits as id", _ping(ident=b"1" * 1001), _error(-32700, -32600, ident=NONE)),
    Case("5,000 digits as id", _ping(ident=b"1" * 5000), _error(-32700, -32600, ident=NONE)),
    Case("5,000 digits in a text", _value(b'"' + b"1" * 5000 + b'"'), RESULT),
    Case("10,000 keys", _value(b"{" + b",".join(b'"%d":0' % n for n in range(10_000)) + b"}"), RESULT),
    Case("10,001 keys", _value(b"{" + b",".join(b'"%d":0' % n for n in range(10_001)) + b"}"), BOUND),
    Case("10,001 keys, deep", _value(b"[[{" + b",".join(b'"%d":0' % n for n in range(10_001)) + b"}]]"), BOUND),
    Case("10,001 keys as arguments", _echo(b"{" + b",".join(b'"%d":0' % n for n in range(10_001)) + b"}"), BOUND),
    Case(
        "20,000 keys in two objects",
        _value(b"[" + b",".join([b"{" + b",".join(b'"%d":0' % n for n in range(10_000)) + b"}"] * 2) + b"]"),
        RESULT,
    ),
    Case("a message as long as allowed", _value(b'"@FILL@"'), RESULT, size=LIMIT),
    Case(
        "a message as long as allowed, all colons",
        _value(b'"' + b":" * (LIMIT - 1000) + b'@FILL@"'),
        RESULT,
        size=LIMIT,
    ),
    Case("a message one byte too long", _value(b'"@FILL@"'), INVALID_NONE, size=LIMIT + 1),
    Case("a line of letters, too long", b"@FILL@", INVALID_NONE, size=LIMIT + 1),
    Case("a line twice as long as allowed", _value(b'"@FILL@"'), INVALID_NONE, size=2 * LIMIT),
    Case("a line of spaces and a letter, too long", b" " * LIMIT + b"x", INVALID_NONE),
    Case(
        "a notification that is too long",
        _notify(b'"notifications/x"', b'{"x":"@FILL@"}'),
        INVALID_NONE,
        size=LIMIT + 1,
    ),
    Case("an array of 100,000 numbers", _value(b"[" + b"1," * 100_000 + b"1]"), RESULT),
]

_ENVELOPE = [
    *(
        Case(f"{text.decode()} instead of a message", text, INVALID_NONE)
        for text in (b"1", b"0", b"-1.5", b'"x"', b'""', b"null", b"true", b"false", b"{}")
    ),
    Case("no jsonrpc", b'{"id":@ID@,"method":"ping"}', INVALID),
    *(
        Case(f"jsonrpc {text.decode()}", b'{"jsonrpc":%b,"id":@ID@,"method":"ping"}' % text, INVALID)
        for text in (b'"1.0"', b'"2.00"', b'"2"', b'" 2.0"', b'""', b"2.0", b"2", b"null", b"true", b'["2.0"]', b"{}")
    ),
    Case("JSONRPC in capitals", b'{"JSONRPC":"2.0","id":@ID@,"method":"ping"}', INVALID),
    Case("Method with a capital", b'{"jsonrpc":"2.0","id":@ID@,"Method":"ping"}', INVALID),
    Case("ID in capitals: a notification", b'{"jsonrpc":"2.0","ID":@ID@,"method":"tools/list"}', SILENT),
    Case(
        "an id with a space in its name: a notification", b'{"jsonrpc":"2.0","id ":@ID@,"method":"tools/list"}', SILENT
    ),
    Case("no method", b'{"jsonrpc":"2.0","id":@ID@}', INVALID),
    Case("no method, but params", b'{"jsonrpc":"2.0","id":@ID@,"params":{}}', INVALID),
    Case("neither id nor method", b'{"jsonrpc":"2.0"}', INVALID_NONE),
    *(
        Case(f"the method {text.decode()}", _method(text), INVALID)
        for text in (b"null", b"1", b"true", b'["ping"]', b'{"a":1}', b"1.5")
    ),
    Case("the method null without an id", b'{"jsonrpc":"2.0","method":null}', INVALID_NONE),
    *(
        Case(f"the id {text.decode()}", _ping(ident=text), INVALID_NONE)
        for text in (
            b"null",
            b"true",
            b"false",
            b"1.5",
            b"1.0",
            b"1e3",
            b"-0.0",
            b"{}",
            b"[]",
            b"[1]",
            b'{"a":1}',
            b"1E0",
        )
    ),
    Case("the id null of an unknown method", b'{"jsonrpc":"2.0","id":null,"method":"nope"}', INVALID_NONE),
    Case(
        "the id null of a notification",
        b'{"jsonrpc":"2.0","id":null,"method":"notifications/initialized"}',
        INVALID_NONE,
    ),
    Case("the empty id", _ping(ident=b'""'), Expect("result", ident="")),
    Case("the id 0", _ping(ident=b"0"), Expect("result", ident=0)),
    Case("the id -0", _ping(ident=b"-0"), Expect("result", ident=0)),
    Case("a negative id", _ping(ident=b"-7"), Expect("result", ident=-7)),
    Case("an id past 53 bits", _ping(ident=b"9007199254740993"), Expect("result", ident=9007199254740993)),
    Case("an id past 64 bits", _ping(ident=b"18446744073709551617"), Expect("result", ident=18446744073709551617)),
    Case("an id far below zero", _ping(ident=b"-" + b"8" * 400), Expect("result", ident=-int("8" * 400))),
    Case("an id of 1,000 digits", _ping(ident=b"7" * 1000), Expect("result", ident=int("7" * 1000))),
    Case("an id of digits in a text", _ping(ident=b'"1"'), Expect("result", ident="1")),
    Case("an id with a null character", _ping(ident=b'"a\\u0000b"'), Expect("result", ident="a\0b")),
    Case("an id with a line break", _ping(ident=b'"a\\nb\\u2028"'), Expect("result", ident="a\nb\u2028")),
    Case("an emoji as id", _ping(ident=b'"\\ud83d\\ude00"'), Expect("result", ident="\U0001f600")),
    Case("a very long id", _ping(ident=b'"' + b"i" * 100_000 + b'"'), Expect("result", ident="i" * 100_000)),
    Case("a request with a result", b'{"jsonrpc":"2.0","id":@ID@,"method":"ping","result":{}}', INVALID),
    Case(
        "a request with an error",
        b'{"jsonrpc":"2.0","id":@ID@,"method":"ping","error":{"code":1,"message":""}}',
        INVALID,
    ),
    Case("a request with a result that is null", b'{"jsonrpc":"2.0","id":@ID@,"method":"ping","result":null}', INVALID),
    Case("result and error", b'{"jsonrpc":"2.0","id":@ID@,"result":{},"error":{"code":1,"message":""}}', INVALID),
    Case("a member nobody knows", _GOOD[:-1] + b',"extra":{"a":[1]}}', RESULT),
    Case("an answer nobody asked for", b'{"jsonrpc":"2.0","id":@ID@,"result":{}}', SILENT),
    Case("an answer with a text as id", b'{"jsonrpc":"2.0","id":"1","result":{}}', SILENT),
    Case("an answer that is null", b'{"jsonrpc":"2.0","id":@ID@,"result":null}', SILENT),
    Case("an error nobody asked for", b'{"jsonrpc":"2.0","id":@ID@,"error":{"code":-32603,"message":"no"}}', SILENT),
    Case("an error that is a text", b'{"jsonrpc":"2.0","id":@ID@,"error":"no"}', SILENT),
    Case("an error without id", b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"what"}}', SILENT),
    Case("an error with the id null", b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"what"}}', SILENT),
    Case("an answer without id", b'{"jsonrpc":"2.0","result":{}}', INVALID_NONE),
    Case("an answer with the id null", b'{"jsonrpc":"2.0","id":null,"result":{}}', INVALID_NONE),
    Case("an answer with the id true", b'{"jsonrpc":"2.0","id":true,"result":{}}', INVALID_NONE),
    Case("an answer with the id 1.5", b'{"jsonrpc":"2.0","id":1.5,"result":{}}', INVALID_NONE),
    Case("an answer with an object as id", b'{"jsonrpc":"2.0","id":{},"result":{}}', INVALID_NONE),
    Case("an answer without jsonrpc", b'{"id":@ID@,"result":{}}', INVALID),
]

_PARAMS = [
    *(
        Case(f"params {text.decode()}", _ping(text), PARAMS)
        for text in (b"[]", b"[1,2]", b'[{"name":"echo"}]', b"null", b'"x"', b'""', b"5", b"true")
    ),
    Case("no params", b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call"}', PARAMS),
    Case("empty params", _ping(b"{}"), PARAMS),
    Case("no tool named", _call(b""), PARAMS),
    *(
        Case(f"the tool's name {text.decode()}", _call(b',"name":' + text), PARAMS)
        for text in (
            b"null",
            b"1",
            b"1.5",
            b"true",
            b'["echo"]',
            b'{"a":1}',
            b'""',
            b'"nope"',
            b'"Echo"',
            b'"echo "',
            b'"echo\\u0000"',
            b'"__class__"',
            b'"../echo"',
        )
    ),
    Case("a tool's name of 100,000 letters", _call(b',"name":"' + b"e" * 100_000 + b'"'), PARAMS),
    Case("Name with a capital", _call(b',"Name":"echo"'), PARAMS),
    *(
        Case(f"the arguments {text.decode()}", _echo(text), PARAMS)
        for text in (b"null", b"[]", b'["x"]', b'"x"', b'""', b"5", b"true")
    ),
    Case("no arguments where one is needed", _call(b',"name":"echo"'), PARAMS, ARGUMENTS),
    *(
        Case(f"arguments that do not fit: {text.decode()}", _echo(text), PARAMS, ARGUMENTS)
        for text in (
            b"{}",
            b'{"text":1}',
            b'{"text":null}',
            b'{"text":["x"]}',
            b'{"text":"x","more":1}',
            b'{"Text":"x"}',
            b'{"tex\\u0074s":"x"}',
        )
    ),
    Case(
        "a boolean for a number",
        b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@,"name":"add",'
        b'"arguments":{"a":true,"b":1}}}',
        PARAMS,
        ARGUMENTS,
    ),
    Case(
        "a text for a number",
        b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{@META@,"name":"add","arguments":{"a":"1","b":1}}}',
        PARAMS,
        ARGUMENTS,
    ),
    *(
        Case(
            f"_meta {text.decode()}",
            b'{"jsonrpc":"2.0","id":@ID@,"method":"tools/call","params":{"name":"nothing","_meta":%b}}' % text,
            PARAMS,
        )
        for text in (
            b"null",
            b"[]",
            b'"x"',
            b"5",
            b"true",
            b'"io.modelcontextprotocol/protocolVersion"',
            b'["io.modelcontextprotocol/protocolVersion"]',
        )
    ),
    Case("_meta 5 of a list", _method(b'"tools/list"', b'{"_meta":5}'), PARAMS),
    *(
        Case(f"the progress token {text.decode()}", _with(b'"progressToken":' + text), PARAMS)
        for text in (b"null", b"true", b"1.5", b"{}", b"[]", b"[1]")
    ),
    Case("a progress token past 64 bits", _with(b'"progressToken":' + b"9" * 40), RESULT),
    *(
        Case(f"the cursor {text[:30].decode()}", _method(b'"tools/list"', b'{@META@,"cursor":%b}' % text), PARAMS)
        for text in (
            b"null",
            b"0",
            b"1.5",
            b"true",
            b"[]",
            b"{}",
            b'""',
            b'"0"',
            b'"garbage"',
            b'"\\u0000"',
            b'"eyJhIjoxfQ=="',
            b'"../../etc/passwd"',
            b'"\xf0\x9f\x98\x80"',
            b'"' + b"A" * 100_000 + b'"',
        )
    ),
    *(
        Case(
            f"the level {text.decode()}",
            _method(b'"logging/setLevel"', b'{@META@,"level":%b}' % text),
            PARAMS,
            {R5: UNKNOWN},
        )
        for text in (b"null", b"1", b'"loud"', b'"INFO"', b'""', b'["info"]', b"true")
    ),
    Case("no level", _method(b'"logging/setLevel"'), PARAMS, {R5: UNKNOWN}),
    *(
        Case(f"an opening with {text.decode()}", _method(b'"initialize"', text), PARAMS)
        for text in (
            b"{}",
            b"[]",
            b"null",
            b'{"protocolVersion":1,"capabilities":{},"clientInfo":{"name":"a","version":"1"}}',
            b'{"protocolVersion":"2025-06-18","capabilities":[],"clientInfo":{"name":"a","version":"1"}}',
            b'{"protocolVersion":"2025-06-18","capabilities":null,"clientInfo":{"name":"a","version":"1"}}',
            b'{"protocolVersion":"2025-06-18","clientInfo":{"name":"a","version":"1"}}',
            b'{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":"a"}',
            b'{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":1,"version":"1"}}',
            b'{"capabilities":{},"clientInfo":{"name":"a","version":"1"}}',
        )
    ),
    *(
        Case(
            f"the envelope names {text.decode()}",
            _ping(
                b'{"name":"nothing","_meta":{"io.modelcontextprotocol/protocolVersion":%b,'
                b'"io.modelcontextprotocol/clientCapabilities":{}}}' % text
            ),
            expect,
        )
        for text, expect in (
            (b'"1999-01-01"', VERSION),
            (b'"2025-11-25"', VERSION),
            (b'"pocket"', VERSION),
            (b'""', VERSION),
            (b'"2026-07-28 "', VERSION),
            (b"20260728", PARAMS),
            (b"null", PARAMS),
            (b"true", PARAMS),
            (b"[]", PARAMS),
            (b"{}", PARAMS),
        )
    ),
    *(
        Case(
            f"an envelope with {text.decode()}",
            _ping(b'{"name":"nothing","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"%b}}' % text),
            PARAMS,
        )
        for text in (
            b"",
            b',"io.modelcontextprotocol/clientCapabilities":null',
            b',"io.modelcontextprotocol/clientCapabilities":[]',
            b',"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":"me"',
            b',"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{}',
            b',"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/logLevel":"loud"',
            b',"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/logLevel":null',
        )
    ),
    *(
        Case(f"a retry with {text[1:].decode()}", _call(b',"name":"nothing"' + text), RESULT, {R5: PARAMS})
        for text in (
            b',"inputResponses":[]',
            b',"inputResponses":null',
            b',"inputResponses":{"a":1}',
            b',"requestState":1',
            b',"requestState":null',
            b',"requestState":"garbage"',
            b',"requestState":""',
        )
    ),
]

_METHODS = [
    *(
        Case(f"the method {text[:40].decode()}", _method(text), UNKNOWN)
        for text in (
            b'""',
            b'"nope"',
            b'"tools/lists"',
            b'"Tools/list"',
            b'"tools/list "',
            b'" tools/list"',
            b'"tools"',
            b'"tools/call\\u0000"',
            b'"tools\\\\call"',
            b'"__class__"',
            b'"rpc.discover"',
            b'"resources/list"',
            b'"prompts/get"',
            b'"completion/complete"',
            b'"tasks/get"',
            b'"notifications/cancelled"',
            b'"notifications/initialized"',
            b'"notifications/unheard"',
            b'"$/cancelRequest"',
            b'"' + b"m" * 100_000 + b'"',
            '"\u0442ools/list"'.encode(),
        )
    ),
    Case("the method ping in the last revision", _method(b'"ping"'), RESULT, {R5: UNKNOWN}),
    *(
        Case(f"the new method {text.decode()}", _method(text), UNKNOWN, {R5: expect})
        for text, expect in ((b'"server/discover"', RESULT), (b'"subscriptions/listen"', PARAMS))
    ),
    Case("an unknown method with bad params", _method(b'"nope"', b"[1]"), _error(-32601, -32602)),
]

_BATCHES = [
    Case("an empty batch", b"[]", INVALID_NONE),
    Case("an empty batch with a space", b"[ ]", INVALID_NONE),
    Case("a batch of a number", b"[1]", INVALID_NONE, {R2: Expect("batch", items=(INVALID_NONE,))}),
    Case(
        "a batch of many things that are no messages",
        b'[1,null,"x",true,{},[]]',
        INVALID_NONE,
        {R2: Expect("batch", items=(INVALID_NONE,) * 6)},
    ),
    Case("a batch of one call", b"[" + _GOOD + b"]", INVALID_NONE, {R2: Expect("batch", items=(RESULT,))}),
    Case("a batch inside a batch", b"[[" + _GOOD + b"]]", INVALID_NONE, {R2: Expect("batch", items=(INVALID_NONE,))}),
    Case("a batch of a notification", b"[" + _notify(b'"notifications/x"') + b"]", INVALID_NONE, {R2: SILENT}),
    Case("a batch of an answer", b'[{"jsonrpc":"2.0","id":@ID@,"result":{}}]', INVALID_NONE, {R2: SILENT}),
    Case(
        "a batch of good and bad",
        b"[" + _GOOD + b',{"jsonrpc":"2.0","id":"b","method":"nope"},3,' + _notify(b'"notifications/x"') + b"]",
        INVALID_NONE,
        {R2: Expect("batch", items=(RESULT, _error(-32601, ident="b"), INVALID_NONE))},
    ),
    Case(
        "a batch with an opening in it",
        b"["
        + _method(
            b'"initialize"',
            b'{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":{"name":"a","version":"1"}}',
        )
        + b"]",
        INVALID_NONE,
        {R2: Expect("batch", items=(INVALID,))},
    ),
    *(
        Case(
            f"a batch whose _meta is {text.decode()}",
            b"[" + _ping(b'{"name":"nothing","_meta":%b}' % text) + b"]",
            INVALID_NONE,
            {R2: Expect("batch", items=(PARAMS,))},
        )
        for text in (
            b"5",
            b"true",
            b"null",
            b"[]",
            b'"x"',
            b"1.5",
            b'"io.modelcontextprotocol/protocolVersion"',
            b'["io.modelcontextprotocol/protocolVersion"]',
        )
    ),
    Case(
        "a batch whose params are an array",
        b"[" + _ping(b"[1]") + b"]",
        INVALID_NONE,
        {R2: Expect("batch", items=(PARAMS,))},
    ),
    Case(
        "a batch that names the last revision",
        b'[{"jsonrpc":"2.0","id":@ID@,"method":"server/discover","params":{"_meta":'
        b'{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}}}]',
        INVALID_NONE,
        {R2: Expect("batch", items=(INVALID,))},
    ),
    Case(
        "a batch of 256",
        b"[" + b",".join(_ping(ident=b'"b%d"' % n) for n in range(256)) + b"]",
        INVALID_NONE,
        {R2: Expect("batch", items=tuple(Expect("result", ident=f"b{n}") for n in range(256)))},
    ),
    Case("a batch of 257", b"[" + b",".join(_ping(ident=b'"b%d"' % n) for n in range(257)) + b"]", INVALID_NONE),
    Case("a batch of 99,999 empty objects", b"[" + b"{}," * 99_998 + b"{}]", INVALID_NONE),
    Case("one object or array too many", b"[" + b"{}," * 99_999 + b"{}]", PARSE_MAYBE),
    Case("far too many arrays", b"[" * 500_001, PARSE_MAYBE),
    Case("a batch that is not closed", b"[" + _GOOD, PARSE_MAYBE),
    Case("a batch with a comma at the end", b"[" + _GOOD + b",]", PARSE_MAYBE),
]

_NOTIFICATIONS = [
    *(
        Case(f"the notification {text.decode()}", _notify(text), SILENT)
        for text in (
            b'"notifications/unheard"',
            b'"nope"',
            b'""',
            b'"ping"',
            b'"tools/list"',
            b'"tools/call"',
            b'"initialize"',
            b'"server/discover"',
            b'"notifications/progress"',
            b'"notifications/message"',
            b'"notifications/roots/list_changed"',
            b'"notifications/cancelled"',
            b'"subscriptions/listen"',
        )
    ),
    *(
        Case(f"a notification with params {text.decode()}", _notify(b'"notifications/unheard"', text), SILENT)
        for text in (b"[]", b"[1]", b"null", b'"x"', b"5", b"true", b'{"_meta":5}')
    ),
    *(
        Case(
            f"the cancelling of {text.decode()}",
            _notify(b'"notifications/cancelled"', b'{"requestId":%b}' % text),
            SILENT,
        )
        for text in (b"1", b'"1"', b"null", b"true", b"1.5", b"{}", b"[]", b'""', b"9" * 40)
    ),
    Case("a cancelling with params of another kind", _notify(b'"notifications/cancelled"', b"[1]"), SILENT),
    Case("progress of nothing", _notify(b'"notifications/progress"', b'{"progressToken":true,"progress":"x"}'), SILENT),
    Case("a call without id", b'{"jsonrpc":"2.0","method":"tools/call","params":{@META@,"name":"crashes"}}', SILENT),
    Case(
        "a call without id of an unknown tool",
        b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"nope"}}',
        SILENT,
    ),
    Case("a notification without jsonrpc", b'{"method":"notifications/x"}', INVALID_NONE),
    Case("a notification of another jsonrpc", b'{"jsonrpc":"1.0","method":"notifications/x"}', INVALID_NONE),
]

_FRAMING = [
    Case("an empty line", b"", SILENT, http=PARSE_NONE),
    Case("many empty lines", b"\n" * 1000, SILENT, http=PARSE_NONE),
    Case("a line of spaces", b"     ", SILENT, http=PARSE_NONE),
    Case("a line of tabulators and returns", b"\t \t\r", SILENT, http=PARSE_NONE),
    Case("a return and a line feed after a message", _GOOD + b"\r", RESULT),
    Case("a return and a line feed between messages", b"\r\n\r\n" + _GOOD + b"\r\n\r", RESULT),
    Case("spaces around a message", b"  \t" + _GOOD + b"  \t", RESULT),
    Case("spaces inside a message", _GOOD.replace(b",", b" ,\t").replace(b"{", b"{ ").replace(b'":', b'"\t: '), RESULT),
    Case(
        "a message over two lines",
        b'{"jsonrpc":"2.0",\n"id":@ID@,"method":"ping"}',
        Expect("several", items=(PARSE_NONE, PARSE_MAYBE)),
        http=RESULT,
    ),
    Case(
        "a message in pretty print",
        b'{\n  "id": @ID@\n}',
        Expect("several", items=(PARSE_NONE, PARSE_NONE, PARSE_NONE)),
        http=INVALID,
    ),
    Case(
        "a raw line feed in a text",
        _value(b'"a\nb"'),
        Expect("several", items=(PARSE_MAYBE, PARSE_NONE)),
        http=PARSE_MAYBE,
    ),
    Case("a line separator in a text", _value('"a\u2028b\u2029c\u0085d"'.encode()), RESULT),
    Case("a delete character in a text", _value(b'"\x7f"'), RESULT),
    Case(
        "half a message, then a whole one",
        _GOOD[:30] + b"\n" + _GOOD,
        Expect("several", items=(PARSE_MAYBE, RESULT)),
        http=PARSE_MAYBE,
    ),
]

CASES: list[Case] = [
    *_NOT_JSON,
    *_LITERALS,
    *_ENCODING,
    *_DUPLICATES,
    *_BOUNDS,
    *_ENVELOPE,
    *_PARAMS,
    *_METHODS,
    *_BATCHES,
    *_NOTIFICATIONS,
    *_FRAMING,
]
