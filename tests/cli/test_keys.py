"""Keys: made by a command, refused where they are weak or wrong, and asked for where they are missing."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import COMMAND, SECONDS, environment, handrail
from handrail import Server
from handrail.guards.identity import ApiKeys
from handrail.protocol.seal import Seal
from requirements import requirement

SHOP = """
from handrail import Server

server = Server("shop")


@server.tool(annotations={"readOnlyHint": True})
def search(text: str) -> str:
    return text


if __name__ == "__main__":
    server.run()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.mark.parametrize("name", ["ada", "ada@example.org", "ada.b"])
def test_a_new_key_and_the_lines_for_the_file_belong_together(home: Path, name: str) -> None:
    done = handrail("keys", "new", name, "--scopes", "orders:read,orders:write", home=home)
    assert done.returncode == 0, done.stderr
    key = next(line for line in done.stdout.splitlines() if line.startswith("hk_"))
    toml = tomllib.loads(done.stdout.replace(key, ""))
    assert toml["identities"]["keys"] == {name: ApiKeys.hashed(key)}
    assert toml["identities"]["scopes"] == {name: ["orders:read", "orders:write"]}
    assert done.stdout.count(key) == 1
    again = handrail("keys", "new", name, home=home)
    assert "scopes" not in tomllib.loads(again.stdout.replace("hk_", "#"))["identities"] and key not in again.stdout


def test_a_new_key_for_programs(home: Path) -> None:
    made = json.loads(handrail("keys", "new", "ada", "--scopes", "a b", "--json", home=home).stdout)
    assert made["hash"] == ApiKeys.hashed(made["key"]) and made["scopes"] == ["a", "b"] and made["name"] == "ada"
    assert tomllib.loads(made["toml"])["identities"]["keys"] == {"ada": made["hash"]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("new", "keys new NAME"),
        ("new local", "keys.local: not a name"),
        ("new a#b", "'a#b'"),
        ("new ada --scopes ,", "--scopes"),
        ("seal ada", "keys seal takes no name"),
        ("nwe ada", "did you mean 'new'?"),
    ],
)
def test_a_mistake_in_making_a_key_is_told(home: Path, words: str, says: str) -> None:
    done = handrail("keys", *words.split(), home=home)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ('[identities.keys]\nada = "hunter2"', "identities.keys.ada: not a hashed key"),
        ('[identities.keys]\n"a b" = "x"', "identities.keys.'a b': not a name"),
        ('[identities.scopes]\nada = ["x"]', "identities.scopes.ada: there is no key of that name"),
        (f'[identities.keys]\nada = "{"sha256:" + "0" * 63}"', "identities.keys.ada: not a hashed key"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "serve"])
def test_an_error_about_a_key_names_its_section_and_the_command(home: Path, verb: str, written: str, says: str) -> None:
    (home / "handrail.toml").write_text(written + "\n")
    done = handrail(verb, "shop.py", home=home)
    assert done.returncode == 2
    assert f"handrail.toml: {says}" in done.stderr and "`handrail keys new" in done.stderr
    assert "hunter2" not in done.stderr, "it may be a key in the clear"


@pytest.fixture
def served(home: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The addresses of a server that wants a key and of its console, and the key."""
    made = json.loads(handrail("keys", "new", "ada", "--json", home=home).stdout)
    (home / "handrail.toml").write_text(made["toml"])
    process = subprocess.Popen(
        [*COMMAND, "serve", "shop.py", "--http", "127.0.0.1:0", "--console", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=home,
        env=environment(home),
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), made["key"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)


def test_a_key_is_asked_for_where_it_is_missing_and_taken(home: Path, served: tuple[dict[str, str], str]) -> None:
    found, key = served
    without = handrail("list", found["url"], home=home)
    assert without.returncode == 7
    assert "--key" in without.stderr and "handrail keys new" in without.stderr, without.stderr
    assert "404" not in without.stderr and "register" not in without.stderr
    (home / "ada.key").write_text(key + "\n")
    assert "search" in handrail("list", found["url"], "--key", "@ada.key", home=home).stdout
    assert "search" in handrail("list", found["url"], "--key", "-", home=home, stdin=key).stdout
    wrong = handrail("list", found["url"], "--key", ApiKeys.new()[0], home=home)
    assert wrong.returncode == 7 and "not accepted" in wrong.stderr and "--key" in wrong.stderr
    both = handrail("list", found["url"], "--key", key, "--header", "Authorization: Bearer x", home=home)
    assert both.returncode == 2 and "--key" in both.stderr


def test_the_address_of_the_console_is_known_for_what_it_is(home: Path, served: tuple[dict[str, str], str]) -> None:
    link = served[0]["console"]
    place = link.partition("#")[0]
    for address in (link, place, f"{place}mcp"):
        done = handrail("list", address, home=home)
        assert done.returncode != 0
        assert "console" in done.stderr and "/mcp" in done.stderr, done.stderr
        assert "jsonrpc" not in done.stderr


# The key that seals

WEAK = {
    "a letter": "a",
    "one letter": "a" * 64,
    "a word": "swordfish",
    "a word again and again": "swordfish" * 8,
    "a default": "changeme" * 8,
    "a placeholder": "your-secret-key-of-32-bytes-goes-in-here-please",
    "16 bytes": secrets.token_hex(16),
    "24 bytes": base64.b64encode(secrets.token_bytes(24)).decode(),
    "31 bytes": secrets.token_hex(31),
    "all digits in turn": "0123456789abcdef" * 4,
    "the alphabet": "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH",
    "all digits twice": "00112233445566778899aabbccddeeff" * 2,
    "nothing": "",
}


@requirement("P-25", everywhere=True)
@pytest.mark.parametrize("key", WEAK.values(), ids=WEAK)
def test_a_weak_sealing_key_is_refused_with_the_command_that_makes_one(
    key: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", key)
    with pytest.raises(ValueError, match=r"^HANDRAIL_KEY: .*`handrail keys seal` prints") as told:
        Server("x")
    assert len(key) < 5 or key not in str(told.value)
    with pytest.raises(ValueError, match=r"keys.*`handrail keys seal` prints"):
        Server("x", keys=[key.encode()])


@requirement("P-25", everywhere=True)
@pytest.mark.parametrize("words", [["serve", "shop.py"], ["serve", "shop.py", "--http", "127.0.0.1:0"]], ids=len)
def test_a_server_with_a_weak_key_does_not_start(home: Path, words: list[str]) -> None:
    done = handrail(*words, home=home, env={"HANDRAIL_KEY": "swordfish"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "HANDRAIL_KEY: " in done.stderr and "`handrail keys seal`" in done.stderr
    alone = subprocess.run(
        [sys.executable, "shop.py"],
        env=environment(home, HANDRAIL_KEY="swordfish"),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert alone.returncode != 0 and "`handrail keys seal`" in alone.stderr


def test_what_the_command_prints_is_taken(home: Path) -> None:
    made = {handrail("keys", "seal", home=home).stdout for _ in range(2)}
    assert len(made) == 2
    for key in made:
        assert handrail("serve", "shop.py", home=home, env={"HANDRAIL_KEY": key.strip()}).returncode == 0
    assert json.loads(handrail("keys", "seal", "--json", home=home).stdout)["key"]


def test_random_keys_are_good_however_they_are_written() -> None:
    for raw in (os.urandom(32) for _ in range(500)):
        written = [raw.hex(), base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode().rstrip("=")]
        Seal([raw, *(each.encode() for each in written)])
