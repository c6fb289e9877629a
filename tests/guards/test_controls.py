"""Foreign text on display: every character that acts or hides is written out, ordinary text is not touched."""

from __future__ import annotations

import json
import re
import sys
import time
import unicodedata

import pytest
from hypothesis import given, strategies as st

from handrail.model import Object
from handrail.text import controls as module
from handrail.text.controls import MASK, escape, is_secret, mask, mask_secrets, mask_words, one_line
from requirements import requirement

CONTROLS = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
# They are format characters that can be seen: signs written before a number or a word (Prepended_Concatenation_Mark).
VISIBLE = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
# Not controls by category, and not seen either (Default_Ignorable_Code_Point): fillers, joiners, selectors.
UNSEEN = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x3164, 0xFFA0}
UNSEEN |= {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
NEVER = {*range(0xFDD0, 0xFDF0), *(plane + end for plane in range(0, 0x110000, 0x10000) for end in (0xFFFE, 0xFFFF))}

anything = st.text(st.characters(), max_size=40)  # with surrogates and unassigned ones
nasty = st.lists(
    st.sampled_from(
        [*"aب क्1\n\t\r", *"\x1b\x9b\x07\u200b\u200c\u200d\ufe0f\u20e3\u202e", "👩", "💻", "❤", "\U0001f3fd"]
    ),
    max_size=12,
).map("".join)


def acting() -> list[str]:
    found = {code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in CONTROLS}
    return [chr(code) for code in sorted((found | UNSEEN | NEVER) - VISIBLE)]


@requirement("P-33", "APP-08", everywhere=True)
@pytest.mark.parametrize(
    ("around", "kept"),
    [
        ("", ""),
        ("a", ""),
        ("1", ""),
        ("漢", ""),
        ("ب", "\u200c\u200d"),
        ("क", "\u200c\u200d"),
        ("👩", "\u200d\ufe0e\ufe0f"),
    ],
    ids="alone latin digit han arabic devanagari emoji".split(),
)
def test_every_character_that_acts_or_hides_is_written_out(around: str, kept: str) -> None:
    every = [char for char in acting() if char not in f"\n\t{kept}"]  # those have tests of their own
    assert len(every) > 137_000  # most of them private use
    shown = escape(around + around.join(every) + around)
    assert set(shown) & set(every) == set()
    assert shown.count("<U+") + shown.count("\\") == len(every)


@requirement("P-33", everywhere=True)
def test_everything_else_is_left_alone() -> None:
    hidden = set(acting()) - {"\n", "\t"}
    changed = [
        hex(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) != "Cn"
        and chr(code) not in hidden
        and escape(f"a{chr(code)}b") != f"a{chr(code)}b"
    ]
    assert changed == []


@requirement("P-33", everywhere=True)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("\x7f\x00", r"\x7f\x00"),
        ("safe\rEVIL", r"safe\rEVIL"),
        ("one\r\ntwo", "one\ntwo"),
        ("admin\u202etxt.exe", "admin<U+202E>txt.exe"),
        ("pay\u200bpal", "pay<U+200B>pal"),
        ("a\u200db", "a<U+200D>b"),
        ("x\U000e0041\U000e007f", "x<U+E0041><U+E007F>"),
        ("😀\U000e0101\U000e0102", "😀<U+E0101><U+E0102>"),
        ("\ud83d", "<U+D83D>"),
        ("\ue000", "<U+E000>"),
        ("a\u2028b", "a<U+2028>b"),
    ],
)
def test_what_acts_is_shown(text: str, shown: str) -> None:
    assert escape(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Grüße, Ελλάδα, Привет, 日本語, 한국어, ไทย",
        "می‌خواهم",  # Persian, with U+200C
        "क्‍ष and ക്‍",  # U+200D after a virama, also at the end of a word
        "ᠠ᠋",  # Mongolian, with its own selector
        "👩‍💻 👨‍👩‍👧 ❤️ 👍🏽 🏳️‍🌈 1️⃣ ☎︎ ©️",
        "3 × 5 – “quoted” … €",
        "non\u00a0breaking",
        "e\u0301",
        "\u0601123",  # an Arabic number sign, which can be seen
    ],
)
def test_ordinary_text_of_any_script_stays(text: str) -> None:
    assert escape(text) == text


@requirement("P-33", everywhere=True)
@given(anything | nasty)
def test_twice_is_once_and_nothing_is_left_that_acts(text: str) -> None:
    shown = escape(text)
    assert escape(shown) == shown
    shown.encode()  # no half character is left
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]", shown)


@requirement("P-33", everywhere=True)
@given(anything | nasty)
def test_a_record_of_a_log_is_one_line(text: str) -> None:
    assert len(f"{escape(text, lines=False)}.".splitlines()) == 1


@given(anything | nasty, st.integers(5, 30))
def test_one_line_is_one_line_of_that_length(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert escape(line, lines=False) == line or line.endswith("…")
    assert len(f"{line}.".splitlines()) == 1


def test_one_line_says_that_there_is_more() -> None:
    assert one_line("a\n  b\tc", 20) == "a b c"
    assert one_line("x" * 21, 20) == "x" * 19 + "…"
    assert one_line(" " * 5000 + "hidden", 20).endswith("…")


LONG = [
    *(
        "\x1b[31m" * 200_000,
        "می\u200cخواهم " * 100_000,
        "👩\u200d💻" * 200_000,
        "\u200d" * 1_000_000,
        "://a:" * 200_000,
    ),
    *('"token' * 150_000, "-----BEGIN PRIVATE KEY-----" * 40_000, "eyJaaaaaaaaa." * 80_000, "bearer " * 150_000),
    *("a-" * 500_000, "token " + " " * 1_000_000),
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: ascii(text[:12]))
def test_a_megabyte_takes_no_more_than_a_moment(text: str) -> None:
    began = time.process_time()
    escape(text)
    mask(text)
    assert time.process_time() - began < 10  # it takes 0.3 s; in a square of the length it would be hours


# Secrets


SECRETS = {
    "a bearer token": ("Authorization: Bearer abc.def-123456", "Authorization: Bearer ****"),
    "a bearer token in prose": ("use bearer abcdef123456 here", "use bearer **** here"),
    "a key of OpenAI's kind": ("key sk-proj-abcdefghijkl1234", "key sk-****"),
    "a key of GitHub": ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_****"),
    "a fine-grained key of GitHub": ("github_pat_11ABCDEFG0abcdefghij", "github_pat_****"),
    "a key of AWS": ("AKIAIOSFODNN7EXAMPLE", "AKIA****"),
    "a key of ours": ("hk_abcdefghijklmnopqrstu", "hk_****"),
    "a JSON Web Token": ("t=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl;", "t=****;"),
    "a password in an address": ("postgres://me:hunter2@db/x", "postgres://me:****@db/x"),
    "a parameter of an address": ("https://x/?api_key=abc&page=2", "https://x/?api_key=****&page=2"),
    "a member of JSON": ('{"access_token": "abc", "n": 1}', '{"access_token": "****", "n": 1}'),
    "a member of JSON in JSON": (r'"{\"password\":\"abc\"}"', r'"{\"password\":\"****\"}"'),
    "a variable": ("API_KEY=abc", "API_KEY=****"),
    "a private key": ("x -----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- y", "x **** y"),
}


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize(("text", "masked"), SECRETS.values(), ids=SECRETS)
def test_what_looks_like_a_secret_is_masked(text: str, masked: str) -> None:
    assert mask(text) == masked
    assert mask(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        *('{"progressToken": "abc"}', '"max_tokens": 100', "maxTokens=5", "the token was wrong", "TOKEN=${TOKEN}"),
        *('"token": null', "https://example.com:8080/path", "sk-1", "a tokenizer: fast"),
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask(text) == text


@requirement("P-34", everywhere=True)
def test_a_message_on_the_wire_shows_no_secret_and_all_the_rest() -> None:
    wire: Object = {
        "headers": {"Authorization": "Bearer abc", "X-API-Key": "abc", "Mcp-Session-Id": "abc", "Accept": "text/plain"},
        "pairs": [["Cookie", "a=abc"], ["Host", "example.com"]],
        "body": {
            "method": "tools/call",
            "params": {
                "_meta": {"progressToken": "p-1"},
                "arguments": {
                    "password": "abc",
                    "credentials": {"user": "abc", "pins": ["abc"]},
                    "text": "sk-abcdefghijklmnop",
                },
            },
            "schema": {"properties": {"password": {"type": "string", "description": "yours"}}},
            "client_secret": "${SECRET}",
            "tokens": 17,
        },
    }
    shown = mask_secrets(wire)
    assert "abc" not in json.dumps(shown)
    assert wire["headers"]["Authorization"] == "Bearer abc", "the original is not touched"
    assert shown["headers"] == {
        "Authorization": f"Bearer {MASK}",
        "X-API-Key": MASK,
        "Mcp-Session-Id": MASK,
        "Accept": "text/plain",
    }
    assert shown["pairs"][1] == ["Host", "example.com"]
    assert shown["body"]["params"]["_meta"] == {"progressToken": "p-1"}
    assert shown["body"]["schema"] == wire["body"]["schema"]
    assert (shown["body"]["client_secret"], shown["body"]["tokens"]) == ("${SECRET}", 17)


@requirement("P-34", everywhere=True)
def test_secrets_that_are_known_are_found_anywhere() -> None:
    assert mask("user=me word=correct-horse", ["correct-horse", "me"]) == "user=me word=****"
    assert mask_secrets({"x": ["a correct-horse b"]}, ["correct-horse"]) == {"x": ["a **** b"]}


_PIECES = [*module._BEGINNINGS, *"eyJ progress Bearer A1b2 abcdefghijklmnop null **** -----END é ſ ı İ K".split()]
_PIECES += ["-----BEGIN RSA PRIVATE KEY-----", "-eyJhbGciOiJIUzI1NiJ9.e30x.abc", *" \n-_.:=@/,{\"'\\"]


@requirement("P-34", everywhere=True)
@given(st.lists(st.one_of(st.sampled_from(_PIECES), st.sampled_from(_PIECES).map(str.upper)), max_size=25).map("".join))
def test_looking_only_where_a_secret_can_begin_finds_all_there_are(text: str) -> None:
    assert mask(text) == module._pattern(module._LOOKS_SECRET).sub(module._hide, text)


@requirement("P-34", everywhere=True)
def test_a_command_shows_no_secret() -> None:
    words = ["run", "--token", "abc", "--api-key=abc", "-v", "--password", "-x", "positional"]
    assert mask_words(words) == ["run", "--token", "****", "--api-key=****", "-v", "--password", "-x", "positional"]


@pytest.mark.parametrize(
    "name",
    ["Authorization", "api_key", "X-Api-Key", "GITHUB_TOKEN", "clientSecret", "Set-Cookie", "db.password", "DB_PASS"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["progressToken", "tokens", "author", "keyboard", "session", "path", "key", "KEYBOARD", "PATH"]
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("quoted", [0, 1, 2], ids=["once", "in a text", "in a list"])
def test_p34_a_secret_in_quotes_is_hidden_to_their_end(quoted: int) -> None:
    """As JSON writes it, also where that stands in a text of JSON."""
    secret = 'correct horse, battery "staple"; \\ & more}'
    text = json.dumps({"user": "bob", "password": secret, "last": "seen"})
    shown = mask(text if quoted == 0 else json.dumps({"text": text} if quoted == 1 else [text]))
    assert not [word for word in ("horse", "staple", "more") if word in shown]
    assert "bob" in shown and "seen" in shown
    assert mask("password: 'two words' and more") == f"password: '{MASK}' and more"
    assert mask('password: "not closed, and more') == f'password: "{MASK} closed, and more'
