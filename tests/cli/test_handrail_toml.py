"""`handrail.toml`: what it says is what is in force, and what it must not say is said clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail import Server
from handrail.approvals.queue import Approvals
from handrail.audit.log import TrailSettings
from handrail.config import FILE_NAME, Config, ConfigError, load_config, read
from handrail.guards.limits import Rates, ToolRate
from handrail.guards.policy import Rule
from handrail.model import Principal
from handrail.testing import Peer
from requirements import requirement

HASH = "sha256:" + "5e" * 32
WHOLE = f"""
[server]
target = "shop.py:server"

[http]
listen = "127.0.0.1:8000"
hosts = ["shop.example"]
origins = ["https://shop.example"]
workers = 2
metrics = "127.0.0.1:9000"
access_log = true

[identities]
keys = {{ alice = "{HASH}" }}
scopes = {{ alice = ["orders:write"] }}

[groups]
staff = ["alice", "bot-*"]

[access]
default = "deny"
destructive = "deny"

[[rules]]
name = "staff"
verdict = "allow"
groups = ["staff"]

[[rules]]
verdict = "ask"
tools = ["refund_*"]
arguments = {{ amount = {{ over = 100 }} }}

[limits]
principal = "5/second"
tools = {{ "mail_*" = {{ rate = "1/minute", concurrent = 2 }} }}

[approvals]
by = "operator"
wait = 5

[sanitize]

[repair]
on = true

[audit]
file = "trail.jsonl"
arguments = true
kept = {{ keep_days = 7 }}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / FILE_NAME
    path.write_text(text)
    return path


def test_every_section_is_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, WHOLE))
    assert (config.server.target, config.http.listen, config.http.workers) == ("shop.py:server", "127.0.0.1:8000", 2)
    assert config.identities.scopes == {"alice": ["orders:write"]} and config.identities.verifier() is not None
    assert config.rules[1] == Rule(verdict="ask", tools=["refund_*"], arguments={"amount": {"over": 100}})
    assert config.limits == Rates(principal="5/second", tools={"mail_*": ToolRate(rate="1/minute", concurrent=2)})
    assert config.approvals == Approvals(by="operator", wait=5) and config.repair.on
    assert config.audit.file == str(tmp_path / "trail.jsonl") and config.audit.kept == TrailSettings(keep_days=7)
    guards = config.guards(tmp_path / "state")
    assert (guards["audit"], guards["store"]) == (tmp_path / "trail.jsonl", tmp_path / "state" / "state.db")
    assert guards["repair"] and guards["audit_arguments"] and guards["rates"] == config.limits


def test_an_empty_file_is_what_is_built_in(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == read({}) == Config()
    guards = Config().guards(tmp_path)
    assert guards["audit"] == tmp_path / "state.db" and "store" not in guards
    assert "audit" not in Config().guards(None)


@pytest.mark.parametrize(
    ("text", "audit", "store"),
    [
        ("", "state.db", None),
        ('[audit]\nfile = "x.db"', "x.db", None),
        ('[audit]\nfile = "x.jsonl"', "x.jsonl", "state.db"),
        ("[audit]\non = false", None, "state.db"),
    ],
)
def test_approvals_wait_in_a_file_whatever_the_audit_is(
    tmp_path: Path, text: str, audit: str | None, store: str | None
) -> None:
    """`handrail approve` is another process: it has to find them."""
    guards = load_config(write(tmp_path, text)).guards(tmp_path)
    assert (guards.get("audit"), guards.get("store")) == tuple(each and tmp_path / each for each in (audit, store))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[acess]\ndefault = 'deny'", "acess: unknown key; did you mean 'access'?"),
        ("[access]\ndefalt = 'deny'", "access.defalt: unknown key; did you mean 'default'?"),
        ("[access]\nxyz = 1", "access.xyz: unknown key; known are default, destructive"),
        ("[[access.rules]]\nverdict = 'deny'", "access.rules: unknown key; 'rules' is a section of its own"),
        ("[[rules]]\nverdict = 'deny'\ntool = ['x']", "rules[1].tool: unknown key; did you mean 'tools'?"),
        (
            "[[rules]]\nverdict='deny'\n[[rules]]\nverdict='deny'\nuser=['x']",
            "rules[2].user: unknown key",
        ),
        ("[limits.tools.mail]\nrat = '1/day'", "limits.tools.mail.rat: unknown key; did you mean 'rate'?"),
        ("[audit.kept]\nkeep_day = 1", "audit.kept.keep_day: unknown key; did you mean 'keep_days'?"),
        ("[audit]\nfile = 'trail.txt'", "audit.file: 'trail.txt' does not end in .jsonl"),
        ("[access]\ndefault = 'no'", "'no'"),
        ("[[rules]]\nverdict = 'denied'", "'denied'"),
        ("[[rules]]\ntools = ['x']", "verdict"),
        ("[[rules]]\nverdict = 'deny'\ngroups = ['staff']", "staff"),
        ("[[rules]]\nverdict = 'hide'\narguments = { a = { over = 1 } }", "arguments"),
        ("[[rules]]\nverdict = 'deny'\ntools = ['a?']", "a?"),
        ("[limits]\nprincipal = 'many'", "'many' is not a rate"),
        ("[approvals]\nwait = 0", "approvals.wait: 0"),
        ("[approvals]\nby = 'me'", "'me'"),
        ("[audit.kept]\nsync = 'never'", "'never'"),
        ("[http]\nworkers = 0", ">= 1"),
        ("[http]\nlisten = 'here'", "http.listen: 'here' is not an address"),
        ("[http]\nmetrics = '127.0.0.1'", "http.metrics: '127.0.0.1' is not an address"),
        ("[identities]\nissuer = 'https://a'", "belong together"),
        (f"[identities]\nkeys = {{ a = '{HASH}' }}\nissuer = 'https://a'", "choose one"),
        ("[identities]\nkeys = { alice = 'hunter2' }", "not a hashed key"),
        ("rules = 1", "rules"),
        ("[access", "not TOML"),
        ("\x00", "not TOML"),
    ],
)
@requirement("SRV-602", everywhere=True)
def test_what_cannot_be_meant_is_an_error_that_says_where(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ") and told in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rules": [{"verdict": "denied"}]}, "rules[1].verdict: 'denied' is not one of allow, deny, ask, hide"),
        ({"rules": [{"tools": ["x"]}]}, "rules[1]: `verdict` is missing"),
        ({"rules": {"verdict": "deny"}}, "rules: expected a list, got a section"),
        (
            {"rules": [{"verdict": "deny"}, {"verdict": "deny", "tools": [5]}]},
            "rules[2].tools[1]: expected a text, got a whole number",
        ),
        ({"http": {"workers": "two"}}, "http.workers: expected a whole number, got a text"),
        ({"sanitize": {"max_text": "2k"}}, "sanitize.max_text: expected a whole number, got a text"),
        ({"limits": {"shared": "no"}}, "limits.shared: expected true or false, got a text"),
        ({"audit": {"on": "yes"}}, "audit.on: expected true or false, got a text"),
        ({"audit": {"file": "trail.txt"}}, "audit.file: 'trail.txt' does not end in .jsonl"),
        ({"identities": {"keys": {"alice": 5}}}, "identities.keys.alice: expected a text, got a whole number"),
        ({"limits": {"tools": {"mail": {"concurrent": -1}}}}, "limits.tools.mail.concurrent: -1 is less than 1"),
        ({"approvals": {"by": "me"}}, "approvals.by: 'me' is not one of auto, anyone, caller, operator, another"),
    ],
)
def test_a_wrong_value_is_told_by_its_place_with_what_would_be_right(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(given)
    assert str(caught.value).startswith(f"{FILE_NAME}: {told}")


def test_a_file_that_is_not_there_or_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="more than"):
        load_config(write(tmp_path, "#" * 1_100_000))
    path = tmp_path / FILE_NAME
    path.write_bytes(b'[server]\ntarget = "\xff"')
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


@requirement("SRV-602", everywhere=True)
async def test_the_same_from_a_file_and_from_python(tmp_path: Path) -> None:
    text = '[access]\ndestructive = "deny"\n[[rules]]\nverdict = "hide"\ntools = ["secret"]\nprincipals = ["bob"]'
    for config in (load_config(write(tmp_path, text)), made()):
        server = Server("shop")
        server.add(lambda: "", name="secret")
        server.add(lambda: "", name="wipe", annotations={"destructiveHint": True})
        server.guard(**config.guards(None))
        for who, names in (("alice", ["secret", "wipe"]), ("bob", ["wipe"])):
            async with Peer(server, principal=Principal(who)) as peer:
                assert [tool.name for tool in await peer.tools()] == names
                answer: Any = await peer.request("tools/call", {"name": "wipe", "arguments": {}})
                assert answer["result"]["isError"] and "not allowed" in answer["result"]["content"][0]["text"]


def made() -> Config:
    base = Config()
    access = type(base.access)(destructive="deny")
    return Config(access=access, rules=[Rule(verdict="hide", tools=["secret"], principals=["bob"])])
