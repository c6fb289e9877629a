"""Secrets, and characters that act or hide, planted and then looked for in everything that leaves (P-33, P-34)."""

from __future__ import annotations

import json
import logging
import secrets
import unicodedata
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from cli_runs import handrail
from clients import ALL
from handrail import Call, EmbeddedResource, Image, ResourceLink, Server, Text, ToolError, ToolResult
from handrail.errors import RemoteProtocolError
from handrail.guards.sanitize import Sanitize
from handrail.model import UNSET
from handrail.testing import Peer
from handrail.text.controls import escape
from requirements import requirement

Object = dict[str, Any]


def canary() -> str:
    return f"canary{secrets.token_hex(12)}"


def planted(known: str, folder: Path) -> Server:
    """Tools that spill a secret in every way a tool can."""
    server = Server("spilling", audit=folder / "state.db", audit_arguments=True, secrets=[known])

    @server.tool
    async def says() -> str:
        return f"the key is {known}."

    @server.tool
    async def halves() -> list[Text]:
        return [Text(f"the key is {known[:9]}"), Text(f"{known[9:]} and no other")]

    @server.tool
    async def structures() -> dict[str, Any]:
        return {"deep": [{known: known, "url": f"https://u:{known}@example.org/"}]}

    @server.tool
    async def raises() -> str:
        raise ValueError(f"cannot log in with {known}")

    @server.tool
    async def fails() -> str:
        raise ToolError(f"wrong password {known}", hint=known)

    @server.tool
    async def links() -> list[Any]:
        note = {"uri": f"note://{known}", "mimeType": "text/plain", "text": known, "_meta": {"k": known}}
        more: Any = {"title": known, "description": known, "meta": {"k": known}}
        return [EmbeddedResource(note), ResourceLink(f"https://example.org/{known}", known, **more)]

    @server.tool
    async def hides() -> ToolResult:
        return ToolResult([Image(b"\x89PNG\r\n\x1a\n", "image/png")], meta={"key": known}, risk=f"beware of {known}")

    @server.tool
    async def talks(call: Call) -> str:
        await call.progress(1, 2, f"trying {known}")
        await call.log("error", {"tried": known})
        return "done"

    @server.tool
    async def takes(text: str) -> str:
        return f"it has {len(text)} characters"

    @server.tool
    async def wants(number: int) -> int:
        return number

    return server


@requirement("P-34", "SRV-604")
@pytest.mark.parametrize("revision", ALL)
async def test_p34_no_canary_leaves_the_server_or_reaches_its_records_and_logs(
    revision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, ran: Any
) -> None:
    known = canary()
    server = planted(known, tmp_path)
    heard: list[bytes] = []
    with caplog.at_level(logging.DEBUG):
        async with Peer(server, revision=revision) as peer:
            ran(revision, "memory")
            for tool in await peer.tools():
                arguments: Object = {"takes": {"text": known}, "wants": {"number": known}}.get(tool.name, {})
                try:
                    await peer.call(tool.name, arguments, progressToken="t", **_level(revision))
                except RemoteProtocolError as refused:
                    heard.append(str((refused, refused.data)).encode())
            heard += peer.wire
    everything = b"\n".join([*heard, caplog.text.encode(), *files_of(tmp_path)])
    assert b"****" in everything and b"characters" in everything
    assert known.encode() not in everything


def files_of(folder: Path) -> list[bytes]:
    return [each.read_bytes() for each in folder.iterdir()]


def _level(revision: str) -> Object:
    return {"io.modelcontextprotocol/logLevel": "debug"} if revision == "2026-07-28" else {}


@requirement("P-34")
async def test_p34_a_secret_of_the_environment_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = canary()
    monkeypatch.setenv("SHOP_API_TOKEN", known)
    server = Server("spilling")

    @server.tool
    async def says() -> str:
        return f"the key is {known}."

    async with Peer(server) as peer:
        assert (await peer.call("says")).text == "the key is ****."


VARIABLES = (
    "STRIPE_KEY ENCRYPTION_KEY DB_PASS MYSQL_PWD GITHUB_PAT API_TOKENS REDIS_AUTH HANDRAIL_KEY KEY SECRET TOKEN"
    " PASSWORD PASSPHRASE CREDENTIALS SIGNING_KEYS KEY_2 API_KEY_2 STRIPE_KEY2 SECRET1 KEY_STRIPE SHOP_KEY_LIVE"
    " TOKEN_FOR_SHOP PGPASSWORD SSHPASS APIKEY SHOP_APIKEY DBPASS AUTH_TOKEN AUTHTOKEN MY_CREDS SSH_PASSPHRASE"
    " SMTP_PASSWD DB_PWDS NPM_AUTH PATS stripe_key stripeKey shop.pass npm_config_//registry.example/:_authToken"
    " COOKIE_SECRET CI_JOB_JWT"
).split()
OTHER_VARIABLES = {
    "AUTH_REQUIRED": "true",
    "AUTH_MODE": "production",
    "SECRET_ENV": "production",
    "DB_PASS": "production",
    "TOKEN_TYPE": "reference",
    "SORT_KEY": "created_at",
    "PARTITION_KEY": "customer-id",
    "KEY_ALGORITHM": "sha-256",
    "PREFERRED_AUTH": "publickey,keyboard-interactive",
    "SSH_AUTH_SOCK": "/run/user/1000/keyring/ssh",
    "TLS_KEY": "/etc/ssl/private/server.pem",
    "KEY_FILE": "C:\\Users\\ada\\server.pem",
    "AUTH_URL": "https://login.example.com/oauth/authorize",
    "PASSWORD": "changeme",
    "MY_SECRET": "xxxxxxxxxxxx",
    "XAUTHORITY": "cl1ent9f3a7b",
    "KEYBOARD": "pc105-9f3a7b2c",
    "KEYMAP": "pc105-9f3a7b2c",
    "PATH": "bin9f3a7b2c1d",
    "COMPASS": "n0rth9f3a7b2c",
    "BYPASS_LIST": "h0st9f3a7b2c",
    "MONKEY": "b4nana9f3a7b",
    "AUTHOR": "4da9f3a7b2c1d",
    "TOKENIZER": "bp39f3a7b2c1d",
    "PATTERN": "x9f3a7b2c1d4e",
    "PASSENGER_APP": "a9f3a7b2c1d4e",
}


@requirement("P-34", everywhere=True)
async def test_p34_every_variable_whose_name_says_secret_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: secrets.token_hex(32) for name in VARIABLES}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    server = Server("spilling")

    @server.tool
    async def says(name: str) -> str:
        return f"the value is {values[name]}."

    async with Peer(server) as peer:
        said = {name: (await peer.call("says", {"name": name})).text for name in values}
    assert said == dict.fromkeys(values, "the value is ****.")


@requirement("P-34", everywhere=True)
async def test_p34_each_of_several_tokens_in_one_variable_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = canary(), canary()
    monkeypatch.setenv("API_TOKENS", f"{first},{second}")
    server = Server("spilling")

    @server.tool
    async def says() -> str:
        return f"{first} and {second}"

    async with Peer(server) as peer:
        assert (await peer.call("says")).text == "**** and ****"


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize(("name", "value"), OTHER_VARIABLES.items(), ids=OTHER_VARIABLES)
async def test_ordinary_words_and_other_variables_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    server = Server("speaking")

    @server.tool
    async def says() -> str:
        return f"it is {value}."

    async with Peer(server) as peer:
        assert (await peer.call("says")).text == f"it is {value}."


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("verdict", ["redact", "keep"])  # of results: what is written down is another matter
async def test_p34_what_an_operator_describes_reaches_no_record_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verdict: Any
) -> None:
    described, known = "cust-93847561", canary()
    sanitize = Sanitize(patterns={"customer": "cust-[0-9]{8}"}, secrets=verdict)
    server = Server("shop", audit=tmp_path / "calls.jsonl", audit_arguments=True, secrets=[known], sanitize=sanitize)

    @server.tool
    async def find(who: Any) -> str:
        raise RuntimeError(f"no {who}")

    encoded = b64encode(known.encode()).decode()
    async with Peer(server) as peer:
        await peer.call("find", {"who": [f"it is {described}", {described: encoded}, known]})
    written = b"\n".join([caplog.text.encode(), *files_of(tmp_path)]).decode()
    assert '"arguments":{"who":["it is ****",{"****":"****"},"****"]}' in written and "no [" in written
    assert not [each for each in (described, known, encoded) if each in written]


KEY: Object = {"type": "string", "pattern": "^canary[0-9a-f]{24}$"}
OBJECT: Object = {"type": "object", "properties": {"key": KEY, "name": {"type": "string"}}, "required": ["key"]}


@requirement("P-34", "SRV-604")
@pytest.mark.parametrize("revision", ALL)
@pytest.mark.parametrize("around", [False, True])
async def test_p34_data_that_no_longer_fits_its_schema_is_not_sent_as_if_it_did(
    revision: str, around: bool, ran: Any
) -> None:
    known, other = canary(), canary()
    server = Server("spilling", secrets=[known])

    @server.tool(output_schema=OBJECT)
    async def fetch(key: str) -> ToolResult:
        return ToolResult([Text("fetched")], {"key": key, "name": "a\x1b[31mb"})

    if around:

        @server.middleware
        async def passes(call: Call, forward: Any) -> ToolResult:
            return await forward(call)  # type: ignore[no-any-return]  # a result, as every handler gives

    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        withheld = await peer.call("fetch", {"key": known})
        assert withheld.is_error and withheld.structured is UNSET
        text = "\n".join(block.text for block in withheld.content if isinstance(block, Text))
        assert text.startswith("The data of this result is withheld: ") and text.count("withheld") == 1
        assert "fetched" in text and '"key":"****"' in text and known not in text
        fits = await peer.call("fetch", {"key": other})
        assert not fits.is_error
        assert fits.structured in ({"key": other, "name": "ab"}, UNSET)  # which some revisions do not have


async def test_a_server_without_the_guard_lets_the_canary_out(tmp_path: Path) -> None:
    """The twin: what is looked for above can be found."""
    known = canary()
    server = planted(known, tmp_path)
    server.guard(sanitize=None)  # shows that the canaries would be found
    async with Peer(server) as peer:
        assert known in (await peer.call("says")).text


def forbidden() -> str:
    """Every code point that acts on a screen or hides, with a letter before each; what JSON cannot carry left out."""
    category = unicodedata.category
    points = [chr(code) for code in range(0x110000) if category(chr(code)) in ("Cc", "Cf", "Co", "Zl", "Zp")]
    return "".join(f"x{char}" for char in points if char not in "\n\t\r" and escape(f"x{char}") != f"x{char}")


HIDDEN = frozenset(forbidden()) - {"x"}


@requirement("P-33", "SRV-604")
@pytest.mark.parametrize("revision", [ALL[0], ALL[-1]])
async def test_p33_no_code_point_that_acts_or_hides_reaches_wire_or_log(
    revision: str, caplog: pytest.LogCaptureFixture, ran: Any
) -> None:
    server, text = Server("spoilt"), forbidden()

    @server.tool
    async def says() -> str:
        return text

    @server.tool
    async def fails() -> str:
        raise ToolError(text)

    @server.tool
    async def breaks() -> str:
        raise ValueError(text)

    with caplog.at_level(logging.DEBUG):
        async with Peer(server, revision=revision) as peer:
            ran(revision, "memory")
            # Some letters belong to an escape sequence, and go with it.
            assert (await peer.call("says")).text.count("x") > 0.99 * text.count("x")
            for name in ("fails", "breaks"):
                assert (await peer.call(name)).is_error
    wire = "".join(json.dumps(json.loads(line), ensure_ascii=False) for line in peer.wire)
    data = {char for char in HIDDEN if unicodedata.category(char) in ("Co", "Zl", "Zp")} | {"\x0c"}  # to a program
    assert len(HIDDEN) > 100_000 and len(HIDDEN - data) > 200 and (HIDDEN - data).isdisjoint(wire)
    assert "ValueError" in caplog.text and HIDDEN.isdisjoint(caplog.text)


SPOILT = """
import os
from handrail import Server
server = Server("spoilt", sanitize=None)  # the terminal is what is tested: it is sent everything
@server.tool
async def says() -> str:
    with open(os.path.join(os.path.dirname(__file__), "text"), encoding="utf-8", newline="") as file:
        return file.read()
server.run()
"""


@requirement("P-33", "SRV-604", everywhere=True)
def test_p33_no_code_point_that_acts_or_hides_reaches_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "spoilt.py").write_text(SPOILT)
    (tmp_path / "text").write_text(forbidden(), encoding="utf-8", newline="")
    done = handrail("call", str(tmp_path / "spoilt.py"), "says", "--yes", home=tmp_path)
    assert done.returncode == 0 and done.stdout.count("x") > 100_000
    assert HIDDEN.isdisjoint(done.stdout) and HIDDEN.isdisjoint(done.stderr)
