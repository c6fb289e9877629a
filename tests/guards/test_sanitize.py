"""What leaves: no character that acts or hides, no secret, no more than allowed, nothing that is not what it says."""

from __future__ import annotations

import base64
import html
import json
import re
import string
import sys
import time
import unicodedata
from collections.abc import Iterator
from random import Random
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import seeds_data
from handrail.guards.sanitize import (
    Blocked,
    Finding,
    Sanitize,
    Sanitizer,
    ToolSanitize,
    risk,
    secrets_in,
)
from handrail.jsonrpc import encode
from handrail.model import UNSET, Audio, Block, EmbeddedResource, Image, Json, ResourceLink, Text, ToolResult
from handrail.text import secrets
from handrail.text.controls import MASK, mask
from requirements import requirement
from subject import PNG, WAV

DEFAULT = Sanitizer()

CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
# Format characters that can be seen (Prepended_Concatenation_Mark), and those of other categories that cannot.
VISIBLE = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
UNSEEN = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x3164, 0xFFA0}
UNSEEN |= {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
NEVER = {*range(0xFDD0, 0xFDF0), *(plane + end for plane in range(0, 0x110000, 0x10000) for end in (0xFFFE, 0xFFFF))}
FORBIDDEN = {
    chr(code)
    for code in {
        *(code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in CATEGORIES),
        *UNSEEN,
        *NEVER,
    }
    - VISIBLE
    - {*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)}
} - set("\n\t\x0c\u2028\u2029")  # what is seen, or is white space, is data


def strings(value: Json) -> Iterator[str]:
    """Every string of a result, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from strings(getattr(value, name))


def everywhere(text: str, number: int = 0) -> ToolResult:
    """A result with this text in every member that can hold it."""
    inside = {text: text, "list": [text, {text: [text]}]}
    solid = "".join(text.split()) or "x"
    return ToolResult(
        [
            Text(text, annotations={"note": text, **inside}, meta=inside),
            Image(PNG, f"image/png;{text}", annotations=inside, meta=inside),
            Audio(WAV, f"audio/wav;{text}", meta=inside),
            ResourceLink(
                f"file:///{solid}", text, title=text, description=text, mime_type=text, icons=[{"src": text, text: 1}]
            ),
            EmbeddedResource({"uri": f"note://{solid}", "text": text, "mimeType": text, "_meta": inside}),
            EmbeddedResource({"uri": f"note://{solid}", "blob": b"abc", "mimeType": text}),
            {"type": "unknown", "words": text, text: inside},
        ],
        structured=inside,
        meta=inside,
        data={"details": inside, text: number},
        is_error=bool(number % 2),
    )


def text_of(result: ToolResult, at: int) -> str:
    block = result.content[at]
    assert isinstance(block, Text)
    return block.text


def cleaned(text: str, by: Sanitizer = DEFAULT, tool: str = "tool") -> str:
    result, _ = by.clean(tool, ToolResult([Text(text)]))
    return result.text


# Characters


@requirement("P-33", "SRV-604", everywhere=True)
@pytest.mark.parametrize("verdict", ["remove", "show"])
def test_p33_no_character_that_acts_or_hides_leaves_in_any_member(verdict: str) -> None:
    every = sorted(FORBIDDEN)
    assert len(every) > 2_500
    few = [char for char in every if unicodedata.category(char) not in ("Cs", "Mn") or ord(char) % 256 < 2]
    by = Sanitizer(msgspec.convert({"controls": verdict}, Sanitize))
    result, findings = by.clean("tool", everywhere(f"a{'a'.join(few)}a"))
    left = {char for each in strings(result) for char in each}
    assert left & FORBIDDEN == set()
    assert {each.where.partition("/")[0] for each in findings} >= {"content", "structuredContent", "_meta", "data"}
    assert len(result.content) == 7 and not result.is_error
    assert set(cleaned(f"a{'a'.join(every)}a", by)) & FORBIDDEN == set()


@requirement("P-33", everywhere=True)
def test_p33_each_character_is_seen_alone_too() -> None:
    """Not only in company: one look decides whether a result is walked at all."""
    few = {char for char in FORBIDDEN if unicodedata.category(char) != "Cs" or ord(char) % 64 == 0}
    gone = ("a", "ab", "a\nb")  # an escape takes the letter with it
    assert [hex(ord(char)) for char in few if cleaned(f"a{char}b") not in gone] == []
    # A long text is looked at in other ways, one of ASCII in others again.
    assert len(few) > 500
    for company in ("x" * 300, "x" * 30_000, "ü" * 4000, "“x” " * 1000, "字\uff0c" * 2000, "👍 " * 2000, "x\r\n" * 99):
        missed = [hex(ord(char)) for char in few if cleaned(whole := f"{company}{char}y") == whole]
        assert missed == [], company[:4]


@requirement("P-33", everywhere=True)
def test_every_other_character_stays() -> None:
    others = [char for code in range(sys.maxunicode + 1) if (char := chr(code)) not in FORBIDDEN]
    kept = "".join(char for char in others if unicodedata.category(char) != "Cn")
    result = ToolResult([Text(kept)])
    assert DEFAULT.clean("tool", result) == (result, ())


@requirement("P-33", everywhere=True)
@pytest.mark.parametrize("company", ["", "x" * 300, "x" * 30_000, "ü" * 4000, "字\uff0c" * 2000], ids=lambda it: it[:2])
def test_a_return_stays_before_a_new_line_and_nowhere_else(company: str) -> None:
    assert cleaned(f"{company}a\r\nb\r\n") == f"{company}a\r\nb\r\n"
    for wrong in ("a\rb\r\n", "a\r\r\nb", "a\r\nb\r"):
        assert cleaned(f"{company}{wrong}") != f"{company}{wrong}"


ORDINARY = [
    "",
    "hello",
    "two\nlines\tand a tab\r\nas on Windows\r\n",
    "Grüße, Ελλάδα, Привет, 日本語, 한국어, ไทย, עברית",
    "می‌خواهم",
    "क्‍ष and ക്‍",
    "ᠠ᠋",
    "👩‍💻 👨‍👩‍👧‍👦 ❤️ 👍🏽 🏳️‍🌈 🏴‍☠️ 1️⃣ #️⃣ ☎︎ ©️ 🇩🇪 👁️‍🗨️ 🧑🏿‍🤝‍🧑🏻",
    "two\u2028lines\u2029and a page\x0c, icons \ue0b0 \uf8ff \U000f0001 \U0010fffd",
    "3 × 5 – “quoted” … € non\u00a0breaking e\u0301 \u0601123",
    '{"escaped": "\\u001b[31m stays in so many letters"}',
    "%1b%5b31m and \\x1b[31m and ^[[31m",
]


@pytest.mark.parametrize("text", ORDINARY)
@pytest.mark.parametrize("length", [1, 300])
def test_ordinary_text_is_the_same_object(text: str, length: int) -> None:
    result = ToolResult([Text(text * length)], {"text": text, text: [text]}, meta={"k": text})
    made, findings = DEFAULT.clean("tool", result)
    assert made is result and findings == ()
    assert DEFAULT.text(text) is text


SEQUENCES = {
    "colour": ("a\x1b[31mred\x1b[0mb", "aredb"),
    "many colours": ("\x1b[1;38;5;196;48:2:1:2:3mx\x1b[m", "x"),
    "cursor": ("a\x1b[2J\x1b[1;1Hb", "ab"),
    "private mode": ("\x1b[?1049hx\x1b[?25l", "x"),
    "intermediate bytes": ("\x1b[3 qx\x1b[!p", "x"),
    "title, by BEL": ("\x1b]0;title\x07x", "x"),
    "title, by ST": ("\x1b]2;title\x1b\\x", "x"),
    "link": ("\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\", "click"),
    "clipboard": ("x\x1b]52;c;ZXZpbA==\x07y", "xy"),
    "device control": ("\x1bP1$r0m\x1b\\x", "x"),
    "application": ("\x1b_Gi=1;AAAA\x1b\\x", "x"),
    "privacy message": ("\x1b^secret\x1b\\x", "x"),
    "C1 control sequence": ("a\x9b31mb", "ab"),
    "C1 title": ("\x9d0;title\x9cx", "x"),
    "C1 device control": ("\x90q#0\x9cx", "x"),
    "reset": ("\x1bcx", "x"),
    "character set": ("\x1b(0x\x1b(B", "x"),
    "save and restore": ("\x1b7x\x1b8", "x"),
    "never ended title": ("\x1b]0;title", "0;title"),
    "never ended sequence": ("a\x1b[12", "a12"),
    "a lone escape": ("a\x1b", "a"),
    "escape in escape": ("\x1b\x1b[31mx", "x"),
    "across lines": ("\x1b]0;a\nb\x07x", "x"),
    "backspace": ("a\bb", "ab"),
    "null": ("a\0b", "ab"),
    "carriage return": ("50 %\r100 %", "50 %\n100 %"),
    "carriage returns before a newline": ("a\r\r\nb", "a\n\r\nb"),
    "vertical tab, next line": ("b\vc\x85d", "b\nc\nd"),
    "override": ("user\u202etxt.exe", "usertxt.exe"),
    "isolates": ("\u2066x\u2069", "x"),
    "zero width": ("pass\u200bword\ufeff", "password"),
    "tags": ("hi\U000e0041\U000e0042\U000e007f", "hi"),
    "flag of tags": ("🏴\U000e0067\U000e0062\U000e007f", "🏴"),
    "selectors as a channel": ("😀\U000e0101\U000e0102\ufe01", "😀"),
    "soft hyphen": ("co\xadop", "coop"),
    "half a character": ("a\ud83db", "ab"),
    "joiner between letters": ("a\u200db", "ab"),
}


@requirement("P-33", "SRV-604", everywhere=True)
@pytest.mark.parametrize(("text", "left"), SEQUENCES.values(), ids=SEQUENCES)
def test_p33_sequences_go_whole(text: str, left: str) -> None:
    result, findings = DEFAULT.clean("tool", ToolResult([Text(text)]))
    assert result.text == left
    assert findings and {each.kind for each in findings} == {"control"}
    assert {each.where for each in findings} == {"content/0/text"}


def test_shown_is_as_on_a_display() -> None:
    by = Sanitizer(Sanitize(controls="show"))
    assert cleaned("a\x1b[31mb\u202e\r\nc\rd", by) == "a\\x1b[31mb<U+202E>\r\nc\\rd"
    for text, _ in SEQUENCES.values():
        shown = cleaned(text, by)
        assert FORBIDDEN.isdisjoint(shown.replace("\r\n", "\n"))
        assert cleaned(shown, by) == shown


def test_keys_that_become_equal_are_both_kept() -> None:
    result, _ = DEFAULT.clean("tool", ToolResult(structured={"a": 1, "a\u200b": 2, "\u200ba": 3, "b": 4}))
    assert result.structured == {"a": 1, "a_2": 2, "a_3": 3, "b": 4}


def test_the_text_of_structured_content_says_what_that_says() -> None:
    data = {"name": "\x1b[31mMallory"}
    result, _ = DEFAULT.clean("tool", ToolResult([Text("first"), Text(json.dumps(data, indent=1))], data))
    assert result.structured == {"name": "Mallory"}
    assert (text_of(result, 0), json.loads(text_of(result, 1))) == ("first", {"name": "Mallory"})


def test_a_link_of_which_nothing_is_left_is_withheld() -> None:
    result, _ = DEFAULT.clean("tool", ToolResult([ResourceLink("x:\u200b", "name"), Text("rest")]))
    assert result.text.startswith("[withheld") and result.text.endswith("rest")


# Secrets


def random_text(alphabet: str, length: int, seed: int = 1) -> str:
    made = "".join(Random(f"{seed}{alphabet}{length}").choices(alphabet, k=length - 2))
    return f"{made[: length // 2]}7{made[length // 2 :]}K"  # a digit and a capital, whatever chance wants


LETTERS = string.ascii_letters + string.digits
URLSAFE = LETTERS + "-_"
HEX = string.digits + "abcdef"
UPPER = string.ascii_uppercase + "234567"


def jwt(header: str = '{"alg":"HS256","typ":"JWT"}', payload: str = '{"sub":"1234567890"}') -> str:
    parts = (header.encode(), payload.encode(), b"signature-of-it-all")
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def pem(kind: str, lines: int = 6, end: str = "\n", headers: str = "") -> str:
    body = end.join(random_text(LETTERS + "+/", 64, seed) for seed in range(lines))
    edge = "-" * 5
    return f"{edge}BEGIN {kind}{edge}{end}{headers}{body}{end}abcd=={end}{edge}END {kind}{edge}"


def tokens(seed: int) -> dict[str, str]:
    """Tokens of well-known kinds, put together here so that nobody takes them for real ones."""

    def letters(alphabet: str, length: int) -> str:
        return random_text(alphabet, length, seed)

    def hexadecimal(length: int) -> str:
        return letters(HEX, length).lower().replace("k", "a")

    return {
        **{f"gh{kind}": f"gh{kind}_" + letters(LETTERS, 36) for kind in "pousr"},
        "github fine-grained": "github" + "_pat_" + letters(LETTERS, 22) + "_" + letters(LETTERS, 59),
        "gitlab": "gl" + "pat-" + letters(URLSAFE, 20),
        "gitlab without digits": "gl" + "pat-" + "abcDEFghiJKL_mnoPQRs",
        "gitlab runner": "gl" + "rt-" + letters(URLSAFE, 20),
        "openai": "sk" + "-" + letters(LETTERS, 48),
        "openai project": "sk" + "-proj-" + letters(URLSAFE, 120),
        "openai service": "sk" + "-svcacct-" + letters(URLSAFE, 60),
        "anthropic": "sk" + "-ant-api03-" + letters(URLSAFE, 93),
        "openrouter": "sk" + "-or-v1-" + hexadecimal(64),
        "deepseek": "sk" + "-" + hexadecimal(32),
        "groq": "gs" + "k_" + letters(LETTERS, 52),
        "hugging face": "h" + "f_" + letters(string.ascii_letters, 34),
        "replicate": "r" + "8_" + letters(LETTERS, 37),
        "xai": "xa" + "i-" + letters(LETTERS, 80),
        "perplexity": "ppl" + "x-" + letters(LETTERS, 48),
        "nvidia": "nv" + "api-" + letters(URLSAFE, 64),
        "stripe": "sk" + "_live_" + letters(LETTERS, 24),
        "stripe test": "sk" + "_test_" + letters(LETTERS, 24),
        "stripe restricted": "rk" + "_live_" + letters(LETTERS, 24),
        "stripe webhook": "wh" + "sec_" + letters(LETTERS + "+/", 32),
        "aws": "AK" + "IA" + letters(UPPER, 16),
        "aws, only letters": "AK" + "IA" + "ABCDEFGHIJKLMNOP",
        "aws session": "AS" + "IA" + letters(UPPER, 16),
        "google": "AI" + "za" + letters(URLSAFE, 35),
        "google without signs": "AI" + "za" + letters(LETTERS, 35),
        "google client": "GOC" + "SPX-" + letters(URLSAFE, 28),
        "google access": "ya" + "29." + letters(LETTERS, 60),
        "slack bot": "xo" + "xb-123456789012-1234567890123-" + letters(LETTERS, 24),
        "slack user": "xo" + "xp-123456789012-1234567890123-" + hexadecimal(32),
        "slack app": "xa" + "pp-1-A0123456789-1234567890123-" + hexadecimal(64),
        "npm": "np" + "m_" + letters(LETTERS, 36),
        "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + letters(URLSAFE, 80),
        "rubygems": "ruby" + "gems_" + hexadecimal(48),
        "docker": "dckr" + "_pat_" + letters(URLSAFE, 27),
        "digital ocean": "do" + "p_v1_" + hexadecimal(64),
        "shopify": "shp" + "at_" + hexadecimal(32),
        "postman": "PM" + "AK-" + hexadecimal(24) + "-" + hexadecimal(34),
        "azure storage": "Account" + "Key=" + letters(LETTERS + "+/", 86) + "==",
        "sendgrid": "S" + "G." + letters(LETTERS, 22) + "." + letters(LETTERS, 43),
        "atlassian": "ATA" + "TT3" + letters(URLSAFE + "=", 180),
        "atlassian without signs": "ATA" + "TT3" + letters(LETTERS, 180),
        "linear": "lin" + "_api_" + letters(LETTERS, 40),
        "notion": "nt" + "n_" + letters(LETTERS, 46),
        "grafana": "gl" + "sa_" + letters(LETTERS, 32) + "_" + hexadecimal(8),
        "figma": "fi" + "gd_" + letters(URLSAFE, 40),
        "tailscale": "ts" + "key-auth-" + letters(LETTERS, 16) + "-" + letters(LETTERS, 32),
        "new relic": "NR" + "AK-" + letters(UPPER, 27),
        "age": "AGE" + "-SECRET-KEY-1" + letters(UPPER, 58),
        "ours": "h" + "k_" + letters(URLSAFE, 43),
        "jwt": jwt(),
        "jwt with a long header": jwt(header=json.dumps({"alg": "RS256", "x5c": ["A" * 3000]}).replace(" ", "")),
        "jwt without signature": jwt().rpartition(".")[0] + ".",
        "private key": pem("PRIVATE KEY"),
        "rsa key": pem("RSA PRIVATE KEY"),
        "ec key": pem("EC PRIVATE KEY", 2),
        "openssh key": pem("OPENSSH PRIVATE KEY"),
        "encrypted key": pem("RSA PRIVATE KEY", headers="Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00FF\n\n"),
        "pgp key": pem("PGP PRIVATE KEY BLOCK", headers="Version: GnuPG v2\n\n"),
        "key in json": json.dumps(pem("PRIVATE KEY"))[1:-1],
        "key in one line": pem("PRIVATE KEY", end=" "),
        "key that was cut": pem("PRIVATE KEY").partition("\nabcd")[0],
    }


TOKENS = tokens(1)
# In these only the end is the secret: what is around it stays.
IN_PLACE = {
    "bearer": ("Authorization: Bear" + "er " + random_text(LETTERS, 40), 40),
    "bearer, lower hex": ("Bear" + "er " + "0123456789abcdef" * 2 + "01234567", 40),
    "bearer jwt": ("Bear" + "er " + jwt(), len(jwt())),
    "basic": ("Authorization: Bas" + "ic " + base64.b64encode(b"user:pass1234").decode(), 20),
    "basic, a digit first": ("Authorization: Bas" + "ic " + "1abcdefghijklm", 14),
    "basic, a sign first": ('"authorization": "Bas' + "ic " + "+abcdefghijklm", 14),
    "basic, a capital last": ("authorization=Bas" + "ic " + "abcdefghijklM", 13),
    "url": ("postgres://me:" + "hunter2", 7),
    "url without user": ("redis://:" + "hunter2", 7),
}


@requirement("P-34", "SRV-604", everywhere=True)
@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(
    "around", [("", ""), ("it is ", ", they say"), ("KEY=", "\n"), ('{"k":"', '"}'), ("_", " "), ("é", "é")]
)
def test_p34_tokens_are_masked(token: str, around: tuple[str, str]) -> None:
    before, after = around
    shown = cleaned(before + token + after)
    assert shown.startswith(before) and shown.endswith(after) and MASK in shown
    assert len(shown) - len(before) - len(after) < 50
    assert token[len(token) // 2 :][:10] not in shown
    assert cleaned(shown) == shown
    assert cleaned("word " * 100 + before + token + after) == "word " * 100 + shown
    _, findings = DEFAULT.clean("tool", ToolResult([Text(before + token + after)]))
    assert [each.kind for each in findings] == ["secret"]
    assert token not in repr(findings)


COMPANY = {
    "some words": "word " * 100,
    "many words": "word " * 5000,
    "full of signs": "a-b_c " * 5000,
    "addresses": "me@a.example https://a.example/x " * 800,
    "other letters": "wört " * 5000,
    "another script": "言葉、" * 3000,
}


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("company", COMPANY.values(), ids=COMPANY)
def test_p34_tokens_are_masked_in_every_company(company: str) -> None:
    """Long texts are not looked at as short ones are, nor those with many signs of a token as those with few."""
    secrets = [*TOKENS.values(), *(f"{text}@db" if "://" in text else text for text, _ in IN_PLACE.values())]
    shown = {secret: cleaned(f"{secret} x") for secret in secrets}
    assert [secret for secret in secrets if MASK not in shown[secret]] == []
    assert [secret for secret in secrets if cleaned(f"{company}{secret} x") != f"{company}{shown[secret]}"] == []


_KINDS = [
    re.compile(f"{shown.replace(secrets._EDGE, '')}(?:{hidden})", re.ASCII)
    for shown, hidden in secrets._TOKENS.values()
]
_BESIDE = st.text(st.sampled_from("aA1-_.=/+ \n:@\"'"), max_size=8)


@requirement("P-34", everywhere=True)
@settings(max_examples=400, suppress_health_check=[*HealthCheck])
@given(
    token=st.one_of([st.from_regex(kind, fullmatch=True) for kind in _KINDS]),
    company=st.sampled_from(["", *COMPANY.values()]),
    before=_BESIDE,
    after=_BESIDE,
)
@example(token="nt" + "n_000000000000000.00000000", company="", before="", after="")
@example(token="://:\xa0@", company="", before="", after="")
def test_p34_no_quick_look_misses_what_a_search_finds(token: str, company: str, before: str, after: str) -> None:
    """Whatever a token is made of: what is asked first must let nothing pass that would be masked."""
    text = f"{company}{before}{token}{after}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_no_token", lambda text: False)
        masked, _ = secrets.Secrets().mask_texts([text])
    assert secrets.Secrets().mask_texts([text])[0] == masked
    if masked != [text]:
        assert not DEFAULT.is_clean("tool", ToolResult([Text(text)]))


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("seed", range(2, 22))
def test_p34_tokens_are_masked_whatever_is_in_them(seed: int) -> None:
    missed = [kind for kind, token in tokens(seed).items() if token[len(token) // 2 :][:10] in cleaned(f"x {token} y")]
    assert missed == []


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize(("text", "length"), IN_PLACE.values(), ids=IN_PLACE)
def test_p34_what_stands_before_a_secret_stays(text: str, length: int) -> None:
    end = "@db.example/x" if "://" in text else " and so on"
    assert cleaned(f"say {text}{end}") == f"say {text[:-length]}{MASK}{end}"
    assert cleaned(f"say {text[:-length]}{MASK}{end}") == f"say {text[:-length]}{MASK}{end}"


INNOCENT = [
    *("token: one of the words", "password: must have 8 characters", "the secret is patience", "api_key: required"),
    *("Bearer authentication is used", "a bearer token", "Bearer <token>", "Bearer YOUR_ACCESS_TOKEN_GOES_HERE"),
    *("Bearer rfc6750-compliant-authorization", "Authorization: Bearer $TOKEN", "Authorization: Basic authentication"),
    *(
        "Authorization: Bearer {access_token}",
        "WWW-Authenticate: Bearer realm=example, scope=read",
        "basic understanding",
    ),
    *(
        "sk-learn-contrib-and-friends",
        "sk-internationalization",
        "task-force-one-two-three-four",
        "sk-your-api-key-here",
    ),
    *(
        "risk-assessment-of-the-quarter",
        "sk-xxxxxxxxxxxxxxxxxxxxxxxx",
        "pk_live_is_public",
        "desk_live_stream_settings",
    ),
    *("ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "ghp_short", "github_pat_token_for_automation", "ghs_", "high_ghp"),
    *(
        "npm_config_registry_for_our_company",
        "npm_lifecycle_event",
        "npm_package_dependencies_react_dom",
        "npm run build",
    ),
    *("pypi-publish-action-for-everyone", "pypi-AgE", "hf_transformer_model_checkpoint_name", "hk_kitchen_and_garden"),
    *("glpat-token-for-deployment-jobs", "AKIA", "AKIAL", "ASIAN markets", "AKIAABCDEFGHIJKLMNOPQRSTUVWXYZ", "AIzaak"),
    *("xoxo, your friend", "xoxb-token", "xapp-development-with-friends", "SG.example.company.internal.network"),
    *("eyJ", "eyJhbGciOiJIUzI1NiJ9", "x.eyJhbGciOiJIUzI1NiJ9.y", "hello.eyJub3QiOiJhIGhlYWRlciJ9.z", "the eyJ prefix"),
    *(
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQ",
    ),
    *("a file that starts with -----BEGIN PRIVATE KEY----- and goes on", "-----BEGIN PRIVATE KEY-----\n...\n"),
    *("https://example.com:8080/path@2", "https://me@example.com", "mailto:me@example.com", "http://[::1]:80/"),
    *(
        "postgres://user:password@localhost/db",
        "postgres://user:${PASSWORD}@db",
        "redis://:<secret>@host",
        "a://b:****@c",
    ),
    *("git@github.com:owner/name.git", "https://a.example/x:y@z", "npm://x:{token}@y", "see RFC 6750, section 2.1"),
    *(
        "550e8400-e29b-41d4-a716-446655440000",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ),
    *(
        "d41d8cd98f00b204e9800998ecf8427e",
        "commit c4dac5f1877ff932a37ae9dbd09e5582ae9",
        "data:image/png;base64,iVBORw0KGgo",
    ),
    *("max_tokens: 1000", '{"progressToken": "abc-123"}', "PATH=/usr/bin:/bin", "snake_case_identifier_of_some_length"),
    *("test_a_link_of_which_nothing_is_left_is_withheld", "kebab-case-identifier-of-some-length-2024", "__init__"),
    *("Jefferson.The_quick_brown_fox_jumps", "AccountKey=", "ATATT3", "ya29.", "19.the_value_is_a_long_identifier_x"),
]


@requirement("SRV-604", everywhere=True)
@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_no_secret_stays(text: str) -> None:
    for whole in (text, f"It says {text}, no more.", f'{{"a":"{text}"}}', f"{text}\n" * 40):
        result = ToolResult([Text(whole)], {"x": [whole], whole: 1})
        assert DEFAULT.clean("tool", result) == (result, ())


def test_there_are_enough_of_both() -> None:
    assert len(TOKENS) >= 40 and len(INNOCENT) >= 60


CANARIES = ["correct-horse-battery", 'quo"ted\\s3cret', "sp ace & per%cent", "größe-ünd-mehr", "two\nlines-of-it"]


def spellings(secret: str) -> dict[str, str]:
    return {
        "as it is": secret,
        "json": json.dumps(secret)[1:-1],
        "json, unicode": json.dumps(secret, ensure_ascii=False)[1:-1],
        "html": html.escape(secret),
        "address": quote(secret, safe=""),
        "path": quote(secret),
        **{f"base64 after {n}": base64.b64encode(b"x" * n + secret.encode()).decode() for n in range(4)},
        **{f"base64 before {n}": base64.b64encode(secret.encode() + b"y" * n).decode() for n in range(3)},
        "base64, url-safe": base64.urlsafe_b64encode(b"?>" + secret.encode() + b"?>").decode(),
    }


@requirement("P-34", "SRV-604", everywhere=True)
@pytest.mark.parametrize("secret", CANARIES)
def test_p34_known_secrets_are_found_in_every_spelling(secret: str) -> None:
    by = Sanitizer(secrets=CANARIES)
    for how, text in spellings(secret).items():
        shown = cleaned(f"before {text} after", by)
        core = text.strip("=")[5:-5]
        assert MASK in shown and core not in shown, how
        assert shown.startswith("before ") and shown.endswith(" after"), how
        assert cleaned(shown, by) == shown


@requirement("P-34", "SRV-604", everywhere=True)
@pytest.mark.parametrize("secret", [CANARIES[0], TOKENS["ghp"], TOKENS["key in json"], "ACME-1234"])
def test_p34_secrets_are_found_in_every_member(secret: str) -> None:
    by = Sanitizer(Sanitize(patterns={"acme": r"ACME-\d{4}"}), secrets=CANARIES)
    for number in (0, 1):
        result, findings = by.clean("tool", everywhere(secret, number))
        assert not [each for each in strings(result) if secret[5:] in each]
        assert result.is_error == bool(number)
        assert secret not in repr(findings)
    assert secret not in by.text(f"failed with {secret}")
    assert by.text(f"failed with {secret}").startswith("failed with ")


@requirement("P-34", "SRV-604", everywhere=True)
@pytest.mark.parametrize(
    "secret", [CANARIES[0], TOKENS["ghp"], TOKENS["jwt"], TOKENS["aws"], TOKENS["rsa key"], "ACME-1234"]
)
def test_p34_a_secret_cut_in_two_or_more_blocks_is_found(secret: str) -> None:
    by = Sanitizer(Sanitize(patterns={"acme": r"ACME-\d{4}"}), secrets=CANARIES)
    for cut in range(1, len(secret)):
        parts: list[Block] = [Text(f"before {secret[:cut]}"), Image(PNG, "image/png"), Text(f"{secret[cut:]} after")]
        result, findings = by.clean("tool", ToolResult(parts))
        left = "".join(block.text for block in result.content if isinstance(block, Text))
        assert MASK in left and secret.rstrip("-")[-4:] not in left.replace("PRIVATE KEY", ""), cut
        assert left.startswith("before ") and left.endswith(" after"), cut
        assert findings
    letters = [Text(char) for char in f"x {secret} y"]
    result, _ = by.clean("tool", ToolResult([*letters]))
    if secret != "ACME-1234":  # patterns are looked for in two neighbours
        assert secret[len(secret) // 2 :][:8] not in result.text.replace("\n", "")


def test_a_token_at_the_beginning_of_a_block_is_found_whatever_stands_before() -> None:
    result, _ = DEFAULT.clean("tool", ToolResult([Text("abc"), Text(TOKENS["ghp"])]))
    assert result.text == f"abc\nghp_{MASK}"


@requirement("P-34", everywhere=True)
def test_p34_a_secret_with_something_hidden_in_it_is_found() -> None:
    by = Sanitizer(secrets=CANARIES)
    for secret in (CANARIES[0], TOKENS["ghp"]):
        for hidden in ("\u200b", "\x1b[0m", "\U000e0041", "\x00"):
            assert secret[-6:] not in cleaned(hidden.join(secret), by)


def test_a_known_secret_is_looked_for_as_it_would_leave() -> None:
    assert (
        cleaned("it is half\udc80\u200b-a-secret", Sanitizer(secrets=["half\udc80\u200b-a-secret"])) == f"it is {MASK}"
    )


def test_only_variables_that_sound_secret_and_hold_something_are_secrets() -> None:
    environ = {
        "GITHUB_TOKEN": "abcdefgh1",
        "DB_PASSWORD": "swordfish",
        "MY_API_KEY": "12345678",
        "SHORT_TOKEN": "abc",
        "OTHER_PASSWORD": "changeme",
        "AWS_CREDENTIALS": "/home/me/.aws/credentials",
        "PATH": "/usr/bin:/bin",
        "EDITOR": "something-long",
        "SHOP_TOKENS": "first-9f3a7b2c; second-4d1e8a6f none",
        "SERVICE_CREDENTIALS": (account := '{"client_email": "a@b.example", "client_id": 118000000}'),
        "SIGNING_KEY": (pem := "-----BEGIN PUBLIC KEY-----\nMFkwEwYH\n-----END PUBLIC KEY-----"),
        "LOW_SECRET": "aaaabbbb",
    }
    several = {environ["SHOP_TOKENS"], "first-9f3a7b2c", "second-4d1e8a6f"}
    assert secrets_in(environ) == {"abcdefgh1", "swordfish", "12345678", account, pem, *several}


# Patterns of an operator


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        (r"ACME-\d{4}", "key=ACME-1234, and ACME-12345 too", "key=****, and **** too"),
        (r"ACME-\d{4}", '{"a":"ACME-1234","b":1}', '{"a":"****","b":1}'),
        (r"\d{4} \d{4}", "one\ncard 1234 5678 here\nthree", "one\n****\nthree"),
        (r"begin[\s\S]*end", "x begin\ny end z", "****"),
        (r"ACME-\d{4}", "nothing", "nothing"),
        (r"größe-\d+", "die größe-12 ist", "die **** ist"),
    ],
)
def test_what_fits_a_pattern_is_masked_with_its_word(pattern: str, text: str, left: str) -> None:
    by = Sanitizer(Sanitize(patterns={"mine": pattern}))
    assert cleaned(text, by) == left
    assert cleaned(left, by) == left
    _, findings = by.clean("tool", ToolResult([Text(text)]))
    assert {each.rule for each in findings} == ({"mine"} if text != left else set())


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("pattern", [r"^\d{4}$", r"\A\d{4}", r"\d{4}\z"])
def test_p34_a_pattern_of_whole_texts_holds_for_each_text_of_a_result(pattern: str) -> None:
    by = Sanitizer(Sanitize(patterns={"pin": pattern}))
    data = {"pin": "1234", "more": ["1234"]}
    for result in (
        ToolResult([Text(encode(data).decode())], data),
        ToolResult([Text("your pin:"), Text("1234")]),
        ToolResult([Text("1234")], meta=data),
        ToolResult([Text("no")], is_error=True, data=data),
    ):
        assert not by.is_clean("tool", result, mirrored=result.structured is not UNSET)
        assert "1234" not in [*strings(by.clean("tool", result)[0])]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"patterns": {"x": "(?<=a)b"}}, "patterns.x"),
        ({"patterns": {"x": r"(a)\1"}}, "linear-time"),
        ({"patterns": {"x": "a*"}}, "empty text"),
        ({"patterns": {"x": r"\*{2}"}}, "be more specific"),
        ({"max_text": 10}, "too small"),
        ({"max_result": 999}, "1000 or more"),
        ({"tools": {"x": {"max_text": 10}}}, "too small"),
        ({"max_media": -1}, ">= 0"),
        ({"controls": "delete"}, "controls"),
        ({"colour": True}, "colour"),
        ({"tools": {"x": {"patterns": {}}}}, "patterns"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Json, complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(complaint)):
        msgspec.convert(options, Sanitize)


def test_a_pattern_costs_time_in_proportion_whatever_it_is() -> None:
    by = Sanitizer(Sanitize(patterns={"evil": r"(a+)+b"}))
    began = time.process_time()
    assert cleaned("a" * 200_000, by) == "a" * 200_000
    assert time.process_time() - began < 5


LONG = {
    "dots": ".eyJ" * 100_000,
    "headers": "eyJ-" * 100_000,
    "keys": "-----BEGIN PRIVATE KEY----- A: " * 12_000,
    "addresses": "://a:" * 80_000,
    "tokens": "ghp_" * 100_000,
    "bearers": "Bearer " * 60_000,
    "escapes": "\x1b[31m" * 80_000,
    "titles": "\x1b]0;" * 100_000,
    "strings": "\x90" * 400_000,
    "strings with something in them": "a\x9d" * 200_000,
    "joiners": "\u200d" * 400_000,
    "pictures": "👩\u200d💻" * 80_000,
    "returns": "\r" * 400_000,
    "dashes": "a-" * 200_000,
    "words": "gl" + "pat-" + "a-" * 200_000 + "a1b",
    "words of a bearer": "Bearer " + "Abc.12/" * 60_000 + "a1b",
    "secrets": "correct-horse-" * 30_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_nothing_takes_more_than_a_moment(text: str) -> None:
    by = Sanitizer(secrets=CANARIES)
    began = time.process_time()
    cleaned(f"{text} {TOKENS['ghp']}\x1b", by)
    mask(text)
    assert time.process_time() - began < 5  # in a square of the length it would be hours


ALMOST = [
    *("Visual Basic 6", "Basic HTML", "Basic Authentication-2", "keyJoinColumns.name", "surveyJsonSchema.parse"),
    *(
        "//nolint:me@x",
        "me@a.example",
        "BASIA",
        "XAIzalea",
        "a_name_with_many_parts_in_it",
        "a-long-name.with-parts-in-it",
    ),
]


@pytest.mark.parametrize("phrase", ALMOST)
@pytest.mark.parametrize("length", [1, 500, 10_000])
def test_what_is_almost_a_secret_is_not_searched_for(phrase: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To search in a megabyte takes two hundred times as long as to ask whether there is anything."""

    def searched(*rules: str) -> re.Pattern[str]:
        raise AssertionError("searched")

    monkeypatch.setattr(secrets, "_finder", searched)
    result = ToolResult([Text("some plain words; " * length + f"{phrase} end")])
    assert DEFAULT.clean("tool", result) == (result, ())


@requirement("P-33", everywhere=True)
@pytest.mark.parametrize(
    "unit", ["\u200b", "a\u200b", "\x1b", "a\x1b[31m", "\0", "a\r", "a\u200d", "\U000e0041\u202e", "\x90a"]
)
def test_hidden_characters_by_the_million_are_not_looked_at_one_by_one(unit: str) -> None:
    by = Sanitizer()

    def steps(text: str) -> int:
        """Calls of functions of Python."""
        made = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            cleaned(text, by)
        finally:
            sys.setprofile(None)
        return made

    steps(unit * 100)  # tables and patterns are made when they are first needed
    assert steps(unit * 10_000) < steps(unit * 100) + 50  # some are of the garbage collector


# Verdicts


NASTY = f"\x1b]0;x\x07{TOKENS['aws']}"


@requirement("SRV-604", everywhere=True)
def test_each_tool_has_its_policy() -> None:
    by = Sanitizer(
        Sanitize(
            tools={
                "show_*": ToolSanitize(controls="show"),
                "raw": ToolSanitize(controls="keep", secrets="keep"),
                "watched": ToolSanitize(controls="report", secrets="report"),
                "strict*": ToolSanitize(controls="block"),
                "strict_secret": ToolSanitize(secrets="block"),
            }
        )
    )
    assert cleaned(NASTY, by, "any") == f"AKIA{MASK}"
    assert cleaned("\x1b]0;x\x07y", by, "show_log") == "\\x1b]0;x\\x07y"
    assert cleaned(NASTY, by, "show_log") == f"AKIA{MASK}", "what is written out would hide the secret"
    result = ToolResult([Text(NASTY)])
    assert by.clean("raw", result) == (result, ())
    made, findings = by.clean("watched", result)
    assert made is result
    assert findings == (
        Finding("control", "content/0/text", "escape sequence", 1),
        Finding("secret", "content/0/text", "aws", 1),
    )
    for tool, why in {"strict": "escape sequence in content/0/text", "strict_secret": "aws in content/0/text"}.items():
        made, findings = by.clean(tool, result)
        assert made.is_error and made.text == f"The result of {tool} was withheld: it has {why}."
        assert made.structured is UNSET and len(findings) == 2


@requirement("P-34", everywhere=True)
def test_p34_a_refusal_does_not_tell_the_secret() -> None:
    by = Sanitizer(Sanitize(secrets="block", controls="block"))
    made, findings = by.clean("tool", ToolResult(structured={TOKENS["ghp"]: {"\x1b[2J": TOKENS["ghp"]}}))
    assert made.is_error and TOKENS["ghp"][10:] not in f"{made}{findings}" and "\x1b" not in f"{made.text}{findings}"


def test_many_findings_are_told_together() -> None:
    result = ToolResult(structured=[{f"k{n}": "\u200b"} for n in range(1_000)])
    _, findings = DEFAULT.clean("tool", result)
    assert len(findings) <= 70 and sum(each.count for each in findings) == 1_000


@requirement("SRV-605", everywhere=True)
def test_what_makes_a_result_dangerous() -> None:
    def of(text: str) -> str | None:
        return risk(DEFAULT.clean("tool", ToolResult([Text(text)]))[1])

    assert of("\x1b]0;x\x07\u202e") == "found in what the tool returned: escape sequence, bidirectional control"
    assert of("x\U000e0041") == "found in what the tool returned: tag character"
    assert of(TOKENS["rsa key"]) == "found in what the tool returned: private key"
    assert of("\x1b[31mred\x1b[0m") is None and of("a\u200bb") is None and of("fine") is None
    assert risk(DEFAULT.clean("tool", ToolResult([Image(b"%PDF-1.7", "image/png")]))[1])
    assert risk([]) is None


# Sizes


def counted() -> tuple[dict[str, str], Sanitizer]:
    kept: dict[str, str] = {}

    def keep(rest: str) -> str:
        kept[f"h-{len(kept)}"] = rest
        return f"h-{len(kept) - 1}"

    return kept, Sanitizer(Sanitize(max_text=1_000, max_result=2_500), store_remainder=keep)


@requirement("SRV-604", everywhere=True)
def test_a_long_text_is_cut_and_can_be_read_on() -> None:
    kept, by = counted()
    text = string.ascii_letters * 50
    result, findings = by.clean("tool", ToolResult([Text("short"), Text(text)]))
    shown, notice = text_of(result, 1).rsplit("\n", 1)
    assert shown + kept["h-0"] == text
    assert notice == '[… 800 of 2,600 characters shown; call read_more with handle "h-0" for the rest]'
    assert findings == (Finding("size", "content/1/text", "max_text", 2600, changed=True),)
    assert by.clean("tool", result) == (result, ())
    assert not result.is_error


def test_without_a_place_to_keep_it_the_notice_says_that_it_is_gone() -> None:
    assert cleaned("x" * 1_001, Sanitizer(Sanitize(max_text=1_000))).endswith(
        "\n[… 800 of 1,001 characters shown; the rest was cut, so ask for less at a time]"
    )
    assert cleaned("x" * 1_000, Sanitizer(Sanitize(max_text=1_000))) == "x" * 1_000
    assert cleaned("x" * 3_000_000) == "x" * 3_000_000


def test_a_resource_is_cut_as_well() -> None:
    kept, by = counted()
    note = EmbeddedResource({"uri": "note://1", "text": "y" * 2_000})
    result, _ = by.clean("tool", ToolResult([note]))
    made = result.content[0]
    assert isinstance(made, EmbeddedResource) and made.resource["uri"] == "note://1"
    assert made.resource["text"].count("y") == 800 and kept == {"h-0": "y" * 1_200}


def test_all_texts_together_are_cut_and_read_on_as_one() -> None:
    kept, by = counted()
    content: list[Block] = [Text("a" * 900), Text("b" * 900), Text("c" * 900), Image(PNG, "image/png"), Text("d" * 900)]
    result, _ = by.clean("tool", ToolResult(content))
    assert [type(block).__name__ for block in result.content] == ["Text", "Text", "Text", "Image"]
    assert len(result.text) <= 2_500
    assert kept["h-0"] == "c" * 400 + "\n" + "d" * 900
    assert by.clean("tool", result) == (result, ())


@requirement("SRV-604", everywhere=True)
def test_data_that_is_too_large_becomes_text_and_an_error() -> None:
    kept, by = counted()
    data = {"rows": [{"id": number} for number in range(500)]}
    said = json.dumps(data, separators=(",", ":"))
    result, _ = by.clean("tool", ToolResult([Text(said)], data))
    assert result.is_error and result.structured is UNSET
    assert f"{len(said):,} characters of JSON; 2,500 are allowed" in result.text
    assert text_of(result, 1).partition("\n[…")[0] + kept["h-0"] == said


@pytest.mark.parametrize("whole", ["👩🏽‍💻", "e\u0301\u0302", "❤️", "1️⃣"])
def test_no_character_is_cut_in_two(whole: str) -> None:
    by = Sanitizer(Sanitize(max_text=1_000))
    for shift in range(12):
        shown = cleaned("x" * (800 - shift) + whole + "y" * 500, by).partition("\n[…")[0]
        assert shown.endswith("x") or whole in shown


# Pictures and sounds


def blocks(result: ToolResult, by: Sanitizer = DEFAULT) -> tuple[str, list[str]]:
    made, findings = by.clean("tool", result)
    return made.text, [each.rule for each in findings]


GENUINE = {
    "image/png": PNG,
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/jpg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/gif": b"GIF89a\1\0\1\0",
    "image/webp": b"RIFF\0\0\0\0WEBPVP8 ",
    "image/bmp": b"BM\0\0",
    "image/avif": b"\0\0\0\x20ftypavif",
    "image/x-unheard-of": b"%PDF-1.7",
    "audio/wav": WAV,
    "audio/x-wav": WAV,
    "audio/mpeg": b"ID3\4\0",
    "audio/mp3": b"\xff\xfb\x90\0",
    "audio/ogg; codecs=opus": b"OggS\0\2",
    "audio/flac": b"fLaC\0\0",
    "audio/mp4": b"\0\0\0\x20ftypM4A ",
    "audio/webm": b"\x1aE\xdf\xa3\x9f",
    "audio/x-unheard-of": b"anything",
}


@pytest.mark.parametrize(("mime", "data"), GENUINE.items(), ids=GENUINE)
def test_what_is_of_its_type_passes(mime: str, data: bytes) -> None:
    kind = Image if mime.startswith("image") else Audio
    for form in (data, base64.b64encode(data).decode()):
        result = ToolResult([kind(form, mime), EmbeddedResource({"uri": "x:1", "blob": data, "mimeType": mime})])
        made, findings = DEFAULT.clean("tool", result)
        assert made is result and findings == ()


FALSE = {
    "pdf": b"%PDF-1.7 ...",
    "html": b"\n <!DOCTYPE html><script>",
    "svg": b"\xef\xbb\xbf<svg xmlns='x' onload='alert(1)'/>",
    "xml": b"<?xml version='1.0'?>",
    "zip": b"PK\x03\x04....",
    "elf": b"\x7fELF\2\1",
    "exe": b"MZ\x90\0",
    "script": b"#!/bin/sh\nrm",
    "another picture": b"GIF89a....",
    "a sound": WAV,
}


@requirement("SRV-604", everywhere=True)
@pytest.mark.parametrize("data", FALSE.values(), ids=FALSE)
def test_what_is_of_another_type_is_withheld(data: bytes) -> None:
    for form in (data, base64.b64encode(data + bytes(1_000)).decode()):
        for block in (
            Image(form, "image/png"),
            EmbeddedResource({"uri": "x:1", "blob": form, "mimeType": "image/png"}),
        ):
            text, rules = blocks(ToolResult([block]))
            assert "withheld: declared image/png, but the bytes are" in text and rules == ["mismatch"]
            reported, rules = blocks(ToolResult([block]), Sanitizer(Sanitize(media="report")))
            assert reported == "" and rules == ["mismatch"]
            assert blocks(ToolResult([block]), Sanitizer(Sanitize(media="keep"))) == ("", [])


def test_a_picture_that_can_hold_scripts_is_withheld() -> None:
    drawing = Image(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")
    assert blocks(ToolResult([drawing])) == ("[image withheld: image/svg+xml can hold scripts]", ["scripts"])
    assert blocks(ToolResult([drawing]), Sanitizer(Sanitize(media="report"))) == ("", ["scripts"])


@pytest.mark.parametrize("data", [b"png", b"", bytes(100)])
def test_what_is_like_nothing_known_is_only_mentioned(data: bytes) -> None:
    assert blocks(ToolResult([Image(data, "image/png")])) == ("", ["unrecognised"])


def test_a_picture_that_is_too_large_is_withheld() -> None:
    by = Sanitizer(Sanitize(max_media=100, media="keep"))
    large = PNG + bytes(100)
    for data in (large, base64.b64encode(large).decode()):
        text, rules = blocks(ToolResult([Image(data, "image/png")]), by)
        assert text == f"[image withheld: {len(large)} bytes, more than the 100 allowed]" and rules == ["max_media"]
    text, _ = blocks(ToolResult([EmbeddedResource({"uri": "x:1", "blob": large})]), by)
    assert "withheld" in text
    result = ToolResult([Image(PNG, "image/png")])
    assert by.clean("tool", result) == (result, ())
    assert (
        Sanitizer(Sanitize(max_media=0)).clean("tool", ToolResult([Image(PNG + bytes(9_000_000), "image/png")]))[1]
        == ()
    )


# Inspectors


@requirement("SRV-604", everywhere=True)
def test_an_inspector_sees_the_cleaned_result_and_adds_what_it_finds() -> None:
    seen: list[tuple[str, str]] = []

    def inspect(tool: str, result: ToolResult) -> list[Finding] | None:
        seen.append((tool, result.text))
        return [Finding("inspector", "content/0/text", "mood")] if "sad" in result.text else None

    by = Sanitizer(Sanitize(max_text=1_000), inspectors=[inspect])
    fine = ToolResult([Text("fine")])
    assert by.clean("tool", fine) == (fine, ())
    result, findings = by.clean("tool", ToolResult([Text("\x1b[31msad " + "x" * 2_000)]))
    assert seen == [("tool", "fine"), ("tool", "sad " + "x" * 2_000)]
    assert [each.kind for each in findings] == ["control", "inspector", "size"] and len(result.text) < 1_000


def test_an_inspector_can_block_and_says_why_without_secrets() -> None:
    def inspect(tool: str, result: ToolResult) -> None:
        raise Blocked(f"it speaks of {TOKENS['ghp']}\x1b[2J")

    result, _ = Sanitizer(inspectors=[inspect]).clean("tool", ToolResult([Text("hello")]))
    assert result.is_error and result.text == f"The result of tool was withheld: it speaks of ghp_{MASK}."


def test_an_inspector_that_fails_blocks_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def inspect(tool: str, result: ToolResult) -> None:
        raise ZeroDivisionError("of mine")

    result, _ = Sanitizer(inspectors=[inspect]).clean("tool", ToolResult([Text("hello")], {"a": 1}))
    assert result.is_error and "hello" not in result.text and "of mine" not in result.text
    assert result.structured is UNSET
    assert "of mine" in caplog.text


def test_what_is_nested_too_deeply_is_withheld() -> None:
    deep: Json = "\x1b"
    for _ in range(100_000):
        deep = [deep]
    result, _ = DEFAULT.clean("tool", ToolResult(structured=deep))
    assert result.is_error and "nested too deeply" in result.text
    while isinstance(deep, list):  # taken apart by hand: the interpreter would go as deep to do it
        deep = deep.pop()


# For every result

pieces = st.sampled_from(
    [
        *'aB1 \n\t\r_-.:/@"\\=',
        *("é", "ب", "क्", "👩", "💻", "❤", "\U0001f3fd", "🇩", "日"),
        *(
            "\x1b",
            "[31m",
            "]0;",
            "\x07",
            "\x9b",
            "\x9c",
            "\u200b",
            "\u200c",
            "\u200d",
            "\ufe0f",
            "\u20e3",
            "\u202e",
            "\u2028",
        ),
        *(
            "\ud83d",
            "\U000e0041",
            "\ue000",
            "\x00",
            "\x85",
            "ghp_",
            "sk-",
            "AKIA",
            "eyJ",
            "://",
            "Bearer ",
            "ABCDEFGH12345678",
        ),
        *("-----BEGIN PRIVATE KEY-----", "correct-", "horse-", "battery", "****", "ACME-", "1234"),
    ]
)
texts = st.lists(pieces, max_size=14).map("".join) | st.text(st.characters(), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
results = st.builds(
    ToolResult,
    st.lists(
        st.builds(Text, texts) | st.builds(Text, texts, meta=st.dictionaries(texts, texts, max_size=2)), max_size=4
    ),
    values,
    st.booleans(),
    st.dictionaries(texts, values, max_size=2),
    st.dictionaries(texts, values, max_size=2),
)
GUARDED = Sanitizer(Sanitize(patterns={"acme": r"ACME-\d{4}"}), secrets=[CANARIES[0]])
GONE = FORBIDDEN - set("\u200c\u200d\ufe0e\ufe0f\u180b\u180c\u180d\u180f\r")  # those may stay where they belong


@requirement("P-33", "P-34", everywhere=True)
@settings(max_examples=150)
@given(results)
def test_p33_p34_nothing_is_left_and_twice_is_once(result: ToolResult) -> None:
    made, _ = GUARDED.clean("tool", result)
    for each in strings(made):
        assert GONE.isdisjoint(each)
        assert not re.search(r"\r(?!\n)|ACME-\d{4}", each)
        assert "correct-horse-battery" not in each
    assert "correct-horse-battery" not in "".join(block.text for block in made.content if isinstance(block, Text))
    again, findings = GUARDED.clean("tool", made)
    assert again is made and findings == ()


WALKED = Sanitizer(Sanitize(patterns={"acme": r"ACME-\d{4}"}), secrets=[CANARIES[0]], inspectors=[lambda *_: None])


@requirement("P-33", "P-34", everywhere=True)
@settings(max_examples=300)
@given(values, st.booleans())
@example({"a": "ACME-1234"}, True)
@example(["\x7f"], True)
@example(["\x1b[31m"], True)
@example({"\u202e": 1}, True)
def test_p33_p34_what_a_quick_look_lets_pass_has_nothing_in_it(value: Json, mirrored: bool) -> None:
    try:
        result = ToolResult([Text(encode(value).decode())], value)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return  # which no tool can have returned
    if GUARDED.is_clean("tool", result, mirrored):
        assert WALKED.clean("tool", result) == (result, ())


printable = st.text(
    st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters="_-:/.=" + "".join(map(chr, UNSEEN))),
    max_size=200,
)


@requirement("SRV-604", everywhere=True)
@settings(max_examples=150)
@given(st.lists(printable, max_size=3), printable)
def test_printable_text_is_returned_as_the_same_object(several: list[str], text: str) -> None:
    result = ToolResult([Text(each) for each in several], {"text": text, text: [text]})
    assert DEFAULT.clean("tool", result) == (result, ())
    assert DEFAULT.clean("tool", result)[0] is result
    assert DEFAULT.text(text) is text


@requirement("SRV-604", everywhere=True)
def test_the_seed_examples_pass_as_they_are() -> None:
    shown = [value for name in dir(seeds_data) if isinstance(value := getattr(seeds_data, name), list | tuple | dict)]
    found = [each for each in walk(shown) if isinstance(each, ToolResult)]
    assert len(found) >= 5
    for result in found:
        assert DEFAULT.clean("tool", result) == (result, ())
    for text in (each for each in walk(shown) if isinstance(each, str)):
        assert DEFAULT.text(text) is text


def walk(value: object) -> Iterator[object]:
    yield value
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from walk(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from walk(getattr(value, name))
