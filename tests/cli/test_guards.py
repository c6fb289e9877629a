"""The guards on the command line: on without a word, checked, explained, and answered by whoever is asked."""

from __future__ import annotations

import json
import os
import pwd
import re
import sqlite3
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli_runs import COMMAND, SECONDS, Client, Terminal as RawTerminal, environment, handrail
from handrail.audit.format import verify
from handrail.audit.reader import TrailFile
from paths import ROOT
from requirements import requirement
from tests.cli.test_terminal import Terminal, terminal as terminal

Object = dict[str, Any]
EXAMPLE = str(ROOT / "examples" / "everyday.py")
SHOP = """
from pathlib import Path
from handrail import Server

server = Server("shop")
log = Path(__file__).with_name("log")

@server.tool(annotations={"destructiveHint": True}, tags=["orders"])
def cancel_order(order: int) -> str:
    '''Cancel an order.'''
    with log.open("a") as file:
        file.write(f"{order}\\n")
    return f"order {order} is cancelled"

@server.tool
def refund(amount: int, note: str = "") -> str:
    return f"refunded {amount}"
"""
RULED = SHOP.replace(
    'server = Server("shop")',
    """from handrail.guards.policy import Policy, Rule
server = Server("shop", policy=Policy([Rule(verdict="deny", name="by its author", tools=["refund"])]))""",
)
RULES = """
[[rules]]
name = "no large sums"
verdict = "deny"
tools = ["refund"]
arguments = { amount = { over = 100 } }

[[rules]]
verdict = "hide"
tools = ["cancel_*"]
principals = ["bob"]
"""
STATE = Path(".local/state/handrail/state.db")
ABLE: Object = {"elicitation": {}}
OLD, NEW = "2025-06-18", "2026-07-28"


class Caller(Client):
    """A client that speaks a revision, can be asked or not, and need not wait."""

    def __init__(self, *words: str, home: Path, revision: str = OLD, able: bool = False) -> None:
        super().__init__(*words, home=home)
        self.capabilities = ABLE if able else {}
        self.envelope: Object = {}
        about = {"name": "test", "version": "1"}
        if revision == NEW:
            named = {"protocolVersion": NEW, "clientCapabilities": self.capabilities, "clientInfo": about}
            self.envelope = {"_meta": {f"io.modelcontextprotocol/{key}": value for key, value in named.items()}}
        else:
            self.ask(
                "initialize", {"protocolVersion": revision, "capabilities": self.capabilities, "clientInfo": about}
            )
            self.say("notifications/initialized")

    def begin(self, name: str, arguments: Object, **more: Any) -> None:
        self.say("tools/call", {"name": name, "arguments": arguments, **more, **self.envelope}, id="call")

    def answer(self, ident: Any, result: Object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": ident, "result": result}) + "\n")
        self.process.stdin.flush()

    def result(self, name: str, arguments: Object) -> Object:
        self.begin(name, arguments)
        return self.hear()


@contextmanager
def caller(*words: str, home: Path, revision: str = OLD, able: bool = False) -> Iterator[Caller]:
    made = Caller("serve", *words, home=home, revision=revision, able=able)
    with closing(made):
        yield made
        assert made.end() == 0


def text_of(answer: Object) -> str:
    text: str = answer["result"]["content"][0]["text"]
    return text


def records(path: Path) -> list[Object]:
    found = TrailFile(path)
    verdict = verify(found.lines())
    assert verdict.flaw is None and not verdict.unfinished
    return [json.loads(line) for _, line in TrailFile(path).lines()]


def waiting(home: Path, *words: str) -> Object:
    """The one approval that waits, as soon as it does."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done = handrail("approve", "--json", *words, home=home)
        assert done.returncode == 0, done.stderr
        if done.stdout.strip() and (found := json.loads(done.stdout)):
            [one] = found
            return dict(one)
    raise AssertionError("nothing waits")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


# Without a configuration


@requirement("SRV-601", "SRV-604", "SRV-614", everywhere=True)
def test_a_served_file_is_guarded_without_a_word(tmp_path: Path) -> None:
    with caller(EXAMPLE, home=tmp_path) as client:
        assert text_of(client.result("calculate_sum", {"a": 1, "b": 2})) == "3"
        assert "error" in client.result("calculate_sum", {"a": "1", "b": 2})  # validated, and not repaired
        unknown = client.result("get_weather", {"location": "A\x1b[31m\u202etlantis"})
        assert unknown["result"]["isError"] and "Atlantis" in text_of(unknown)
        assert not {"\x1b", "\u202e"} & set(text_of(unknown))
    state = tmp_path / STATE
    assert stat.S_IMODE(state.stat().st_mode) == 0o600 and stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    told = [(each.get("tool", ""), each.get("outcome", "")) for each in records(state) if "call" in each]
    assert told == [
        ("calculate_sum", ""),
        ("", "ok"),
        ("calculate_sum", "bad_arguments"),
        ("get_weather", ""),
        ("", "tool_error"),
    ]
    good = handrail("audit", "verify", home=tmp_path)
    assert good.returncode == 0 and "good" in good.stdout
    with closing(sqlite3.connect(state)) as database, database:
        database.execute("UPDATE audit SET line = CAST(replace(line, 'tool_error', 'ok') AS BLOB)")
    assert handrail("audit", "verify", home=tmp_path).returncode == 2


@requirement("SRV-602", "P-19", "APP-03", everywhere=True)
@pytest.mark.parametrize("revision", [OLD, NEW])
def test_the_example_asks_whoever_can_be_asked(tmp_path: Path, revision: str) -> None:
    with caller(EXAMPLE, home=tmp_path, revision=revision, able=True) as client:
        for yes, ended in ((False, "was not approved by its user"), (True, "Order 1 is cancelled.")):
            client.begin("cancel_order", {"order_id": 1})
            asked = client.hear()
            said = {"action": "accept" if yes else "decline"}
            if revision == NEW:
                [(key, question)] = asked["result"]["inputRequests"].items()
                state = asked["result"]["requestState"]
                client.begin("cancel_order", {"order_id": 1}, requestState=state, inputResponses={key: said})
            else:
                question = asked
                client.answer(asked["id"], said)
            assert question["method"] == "elicitation/create"
            assert question["params"]["message"].startswith("Allow Cancel an order (cancel_order) on everyday?\n")
            shown = '\n{"order_id":1}\nPreview:\n| Order 1: product 2 for customer 1, open now.\n'
            assert shown in question["params"]["message"]
            assert ended in text_of(client.hear())


@requirement("SRV-602", "P-19", "APP-03", "APP-04", everywhere=True)
@pytest.mark.parametrize("revision", [OLD, NEW])
def test_a_call_that_nobody_there_can_agree_to_waits_for_the_terminal(tmp_path: Path, revision: str) -> None:
    with caller(EXAMPLE, home=tmp_path, revision=revision) as client:
        client.begin("cancel_order", {"order_id": 1})
        one = waiting(tmp_path)
        shown = handrail("approve", home=tmp_path).stdout
        for text in (one["id"], "(cancel_order) on everyday", "pending", "asked by local with test", '"order_id": 1'):
            assert text in shown
        claims = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "mallory")
        done = handrail("approve", one["id"], "no", "--note", "not that one", home=tmp_path, env=claims)
        assert (done.returncode, done.stderr) == (0, f"handrail: {one['id']}: denied\n")
        assert "was not approved by an operator: not that one" in text_of(client.hear())
        twice = handrail("approve", one["id"], "yes", home=tmp_path)
        user = pwd.getpwuid(os.getuid()).pw_name
        assert twice.returncode == 2 and f"has been denied by operator {user}" in twice.stderr
        client.begin("cancel_order", {"order_id": 3})
        one = waiting(tmp_path)
        loose = handrail("approve", one["id"], "yes", "--where", 'order_id={"under": 9}', home=tmp_path)
        assert loose.returncode == 2 and "--where: a condition on what is remembered; add --remember" in loose.stderr
        for answer in (["no"], ["edit", "--arguments", '{"order_id": 4}']):
            moot = handrail("approve", one["id"], *answer, "--remember", "2h", home=tmp_path)
            assert moot.returncode == 2 and "--remember: only a yes to the original call" in moot.stderr
        kept = handrail("approve", one["id"], "yes", "--remember", "999999d", home=tmp_path)
        assert text_of(client.hear()) == "Order 3 is cancelled."
        assert "cancelled already" in text_of(client.result("cancel_order", {"order_id": 3}))  # remembered
        [grant] = json.loads(handrail("approve", "--remembered", "--json", home=tmp_path).stdout)
        until = datetime.fromtimestamp(grant["until"], UTC).isoformat(timespec="seconds")
        assert round(grant["until"] - grant["made"]) == 30 * 86_400, "there is a longest time"
        assert (kept.returncode, kept.stderr) == (0, f"handrail: {one['id']}: approved, and remembered until {until}\n")
        assert "local  cancel_order" in handrail("approve", "--remembered", home=tmp_path).stdout
        assert handrail("approve", "--revoke", grant["id"], home=tmp_path).returncode == 0
        client.begin("cancel_order", {"order_id": 3})
        one = waiting(tmp_path)
        wrong = handrail("approve", one["id"], "edit", "--arguments", '{"order": 2}', home=tmp_path)
        assert wrong.returncode == 2 and "nothing is decided" in wrong.stderr and "order_id" in wrong.stderr
        edited = handrail("approve", one["id"], "edit", "--arguments", '{"order_id": 2}', home=tmp_path)
        assert edited.returncode == 0
        assert "Order 2 has been shipped" in text_of(client.hear())
    steps = [each["step"] for each in records(tmp_path / STATE) if each["event"] == "approval"]
    assert steps == "asked denied asked approved remembered revoked asked approved".split()


def test_a_doctor_tells_a_wrong_path_and_a_wrong_scheme(tmp_path: Path) -> None:
    client = Client("serve", EXAMPLE, "--http", "127.0.0.1:0", home=tmp_path)
    with closing(client):
        url = client.told("Serving").split()[-1]
        lost = handrail("doctor", url.replace("/mcp", "/nope"), home=tmp_path)
        assert lost.returncode == 4 and "HTTP 404" in lost.stdout and "The path is often /mcp" in lost.stdout
        plain = handrail("doctor", url.replace("http:", "https:"), home=tmp_path)
        assert plain.returncode == 4 and f"does it speak TLS at all? {url}" in plain.stdout
        told = handrail("list", url.replace("http:", "https:"), home=tmp_path)
        assert told.returncode == 4 and "no TLS there" in told.stderr


@requirement("SRV-603", "P-30", everywhere=True)
def test_over_http_callers_are_limited_without_a_word(tmp_path: Path) -> None:
    client = Client("serve", EXAMPLE, "--http", "127.0.0.1:0", home=tmp_path)
    with closing(client):
        url = client.told("Serving").split()[-1]

        def post(body: object, **headers: str) -> tuple[str, str]:
            usual = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
            request = urllib.request.Request(url, json.dumps(body).encode(), usual | headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                return reply.read().decode(), reply.headers.get("Mcp-Session-Id", "")

        about = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        _, session = post({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about})
        pings = [{"jsonrpc": "2.0", "id": number, "method": "ping"} for number in range(250)]
        told = [post(pings, **{"Mcp-Session-Id": session})[0] for _ in range(12)]
        assert "Too many requests" not in told[0] and "Too many requests" in told[-1]


# With one


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize("revision", ["2025-06-18", "2026-07-28"])
def test_a_no_over_http_is_told_as_one_and_not_as_a_missing_scope(home: Path, revision: str) -> None:
    (home / "handrail.toml").write_text('[server]\ntarget = "shop.py"\n' + RULES)
    client = Client("serve", "--http", "127.0.0.1:0", home=home)
    with closing(client):
        url = client.told("Serving").split()[-1]
        told = handrail("call", url, "refund", "amount=101", "--yes", "--revision", revision, home=home)
    assert told.returncode == 5 and "refund is not allowed like this for this caller" in told.stderr


@requirement("SRV-602", everywhere=True)
def test_what_the_file_says_is_in_force(home: Path) -> None:
    (home / "handrail.toml").write_text('[server]\ntarget = "shop.py"\n' + RULES)
    with caller(home=home) as client:
        refused = client.result("refund", {"amount": 101})
        assert "not allowed" in text_of(refused) and refused["result"]["isError"]
        assert text_of(client.result("refund", {"amount": 100})) == "refunded 100"
    told = [(each.get("rule"), each.get("outcome")) for each in records(home / STATE) if each["event"] == "refusal"]
    assert told == [("no large sums", "forbidden")]
    (home / "other.toml").write_text('[access]\ndefault = "deny"')
    with caller("shop.py", "--config", "other.toml", "--config-only", home=home) as client:
        assert client.result("refund", {"amount": 1})["error"]["message"] == "Unknown tool: refund"
    (home / "handrail.toml").write_text("[acess]")
    broken = handrail("serve", "shop.py", home=home)
    assert broken.returncode == 2 and "did you mean 'access'?" in broken.stderr


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("", True),
        ('[limits]\nprincipal = "5/second"', True),  # says nothing of access
        ('[access]\ndefault = "allow"', False),
        ('[[rules]]\nverdict = "allow"\ntools = ["*"]', False),
    ],
)
def test_where_the_file_is_silent_the_author_decides(home: Path, text: str, is_refused: bool) -> None:
    (home / "shop.py").write_text(RULED)
    (home / "handrail.toml").write_text(text)
    with caller("shop.py", home=home) as client:
        assert ("not allowed" in text_of(client.result("refund", {"amount": 1}))) is is_refused
    shown = handrail("check", "shop.py", home=home).stdout
    assert ("by its author" in shown) is is_refused
    explained = handrail("explain", "--server", "shop.py", "call", "refund", "amount=1", home=home)
    assert explained.returncode == (5 if is_refused else 0)


def test_an_audit_of_lines_lies_beside_the_file_and_approvals_are_found(home: Path) -> None:
    (home / "conf").mkdir()
    config = home / "conf" / "guards.toml"
    config.write_text('[server]\ntarget = "../shop.py"\n[audit]\nfile = "trail.jsonl"\narguments = true')
    with caller("--config", str(config), home=home) as client:
        client.begin("cancel_order", {"order": 7})
        one = waiting(home, "--config", str(config))
        assert handrail("approve", one["id"], "yes", "--config", str(config), home=home).returncode == 0
        assert text_of(client.hear()) == "order 7 is cancelled"
    told = records(home / "conf" / "trail.jsonl")
    assert [each["arguments"] for each in told if each["event"] == "intent"] == [{"order": 7}]
    assert [each["step"] for each in told if each["event"] == "approval"] == ["asked", "approved"]
    assert handrail("audit", "verify", "conf/trail.jsonl", home=home).returncode == 0


def test_approvals_in_the_audit_that_the_author_chose_are_found(home: Path) -> None:
    (home / "shop.py").write_text(SHOP.replace('Server("shop")', 'Server("shop", audit="calls.db")'))
    with caller("shop.py", home=home) as client:
        client.begin("cancel_order", {"order": 7})
        one = waiting(home, "--audit", "calls.db")
        assert handrail("approve", one["id"], "yes", "--audit", "calls.db", home=home).returncode == 0
        assert text_of(client.hear()) == "order 7 is cancelled"
    assert [each["step"] for each in records(home / "calls.db") if each["event"] == "approval"] == ["asked", "approved"]
    assert not (home / STATE).exists()
    for file in ("no.db", "shop.py", "trail.jsonl"):
        done = handrail("approve", "--audit", file, home=home)
        assert done.returncode == 2 and file in done.stderr
    assert not (home / "no.db").exists()


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize(("by", "why"), [("another", "somebody else than its caller"), ("operator", "")])
def test_p19_who_may_approve_is_the_servers_word_not_the_folders(home: Path, by: str, why: str) -> None:
    (home / "conf").mkdir()
    (home / "conf" / "guards.toml").write_text(f'[server]\ntarget = "../shop.py"\n[approvals]\nby = "{by}"\n')
    with caller("--config", "conf/guards.toml", home=home) as client:
        client.begin("cancel_order", {"order": 7})
        one = waiting(home)  # in a folder without that configuration
        assert one["asked"]["by"] == by and one["caller"] == "waiting" and one["used"] is False
        done = handrail("approve", one["id"], "yes", home=home)
        assert (done.returncode == 0) is not bool(why) and why in done.stderr
        if why:
            client.say("notifications/cancelled", {"requestId": "call"})
        else:
            assert text_of(client.hear()) == "order 7 is cancelled"
    assert (home / "log").exists() is not bool(why)


@requirement("P-19", everywhere=True)
def test_p19_no_command_decides_what_was_left_to_the_person_at_the_client(home: Path) -> None:
    (home / "conf").mkdir()
    (home / "conf" / "guards.toml").write_text('[server]\ntarget = "../shop.py"\n[approvals]\nby = "caller"\n')
    with caller("--config", "conf/guards.toml", home=home, able=True) as client:
        client.begin("cancel_order", {"order": 7})
        asked = client.hear()
        for answer in ("yes", "no"):
            done = handrail("approve", waiting(home)["id"], answer, home=home)
            assert done.returncode != 0 and "only the person at the calling client may decide" in done.stderr
        client.answer(asked["id"], {"action": "decline"})
        assert "was not approved by its user" in text_of(client.hear())
    assert not (home / "log").exists()


KEYS = f'[identities.keys]\nada = "sha256:{"ab" * 32}"\n'


@requirement("SRV-602", "P-19", everywhere=True)
@pytest.mark.parametrize(
    ("settings", "http", "stdio", "careful"),
    [
        ("", "anyone", "anyone", False),
        (KEYS, "another", "anyone", False),
        (KEYS + '[approvals]\nby = "another"\n', "another", "another", False),
        (KEYS + '[approvals]\nby = "anyone"\n', "anyone", "anyone", True),
        (KEYS + '[approvals]\nby = "caller"\n', "caller", "caller", True),
        ('[approvals]\nby = "anyone"\n', "anyone", "anyone", False),
    ],
)
@pytest.mark.parametrize("target", [[], ["shop.py"]])
def test_check_says_who_approves_and_warns_where_callers_approve_their_own_calls(
    home: Path, settings: str, http: str, stdio: str, careful: bool, target: list[str]
) -> None:
    (home / "handrail.toml").write_text(settings)
    done = handrail("check", *target, home=home)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["calls are approved by"][1] == f"{http} over HTTP, {stdio} over standard input"
    assert ("a calling agent may approve its own calls" in done.stderr) is careful
    told = json.loads(handrail("check", *target, "--json", home=home).stdout)
    assert told["approved_by"] == {"http": http, "stdio": stdio}
    assert any("approve its own calls" in each for each in told["warnings"]) is careful


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize("line", ["xyz yes", "xyz", "--revoke xyz"])
def test_where_nothing_was_served_nothing_can_be_decided(home: Path, line: str) -> None:
    done = handrail("approve", *line.split(), home=home)
    assert done.returncode == 2 and "xyz: there is no such thing" in done.stderr
    for listing in ([], ["--remembered"]):
        told = handrail("approve", "--json", *listing, home=home)
        assert (told.returncode, told.stdout) == (0, "[]\n")
        assert "nothing has been served from here" in told.stderr


def test_without_an_audit_approvals_are_found_too(home: Path) -> None:
    (home / "handrail.toml").write_text("[audit]\non = false")
    with caller("shop.py", home=home) as client:
        client.begin("cancel_order", {"order": 7})
        assert handrail("approve", waiting(home)["id"], "yes", home=home).returncode == 0
        assert text_of(client.hear()) == "order 7 is cancelled"
    assert records(home / STATE) == []


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize("guards", ["author", "file"])
def test_guards_stay_while_the_file_changes(home: Path, guards: str) -> None:
    source = RULED if guards == "author" else SHOP
    (home / "shop.py").write_text(source)
    if guards == "file":
        (home / "handrail.toml").write_text('[[rules]]\nverdict = "deny"\ntools = ["refund"]')
    with caller("shop.py", "--reload", home=home) as client:
        assert "not allowed" in text_of(client.result("refund", {"amount": 1}))
        changed = source.replace("Cancel an order.", "Cancel one.").replace('tools=["refund"]', 'tools=["other"]')
        (home / "shop.py").write_text(changed)
        client.told("was read again")
        if guards == "author":
            client.told("its guards have changed")
        client.changed()
        assert "not allowed" in text_of(client.result("refund", {"amount": 1}))
    outcomes = [each["outcome"] for each in records(home / STATE) if each["event"] == "refusal"]
    assert outcomes == ["forbidden"] * 2


@requirement("P-17", everywhere=True)
@pytest.mark.parametrize("file", ["none/trail.db", "none/trail.jsonl", "broken.db"])
def test_p17_without_a_place_for_records_nothing_is_served(home: Path, file: str) -> None:
    (home / "broken.db").write_bytes(b"not a database" * 1000)
    (home / "handrail.toml").write_text(f'[audit]\nfile = "{file}"')
    for http in ([], ["--http", "127.0.0.1:0"], ["--http", "127.0.0.1:0", "--workers", "2"]):
        done = handrail("serve", "shop.py", *http, home=home)
        assert done.returncode == 2 and "records and approvals cannot be kept there" in done.stderr
        assert file in done.stderr and "Traceback" not in done.stderr


@requirement("SRV-603", everywhere=True)
@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ("alice", "5/minute for this tool, 9/minute for this caller, 2 of this tool at once, {share}"),
        ("local", "5/minute for this tool, 2 of this tool at once"),
        (
            "anonymous",
            "5/minute for this tool, 200/second burst 2000 for this address, 2 of this tool at once, {share}",
        ),
    ],
)
def test_explain_tells_all_limits_of_a_call(home: Path, who: str, expected: str) -> None:
    limits = '[limits]\nprincipal = "9/minute"\n[limits.tools."ref*"]\nrate = "5/minute"\nconcurrent = 2'
    (home / "handrail.toml").write_text(limits)
    words = ("explain", "--as", who, "--server", "shop.py", "call", "refund", "amount=1")
    told = expected.format(share="1 of this tool at once for one caller")
    assert rows(handrail(*words, home=home).stdout)["limit"] == ["on", told]


# Checked


@requirement("SRV-602", everywhere=True)
def test_check_says_what_is_in_force_and_from_where(home: Path) -> None:
    bare = handrail("check", home=home)
    assert bare.returncode == 0 and bare.stdout.startswith("no handrail.toml: what is built in is in force\n")
    lines = rows(bare.stdout)
    assert lines["access.destructive"] == ["built in", '"ask"'] and lines["audit.on"] == ["built in", "true"]
    (home / "handrail.toml").write_text('[server]\ntarget = "shop.py"\n[access]\ndestructive = "ask"\n' + RULES)
    done = handrail("check", home=home)
    lines = rows(done.stdout)
    assert lines["access.destructive"] == ["handrail.toml", '"ask"']  # said, if it is what is built in
    assert lines["access.default"] == ["built in", '"allow"']
    assert lines["rules[1]"] == ["handrail.toml", "no large sums: deny if tools refund; amount over 100"]
    assert lines["rules[2]"][1].startswith("rule 2: hide if tools cancel_*; principals bob")
    told = json.loads(handrail("check", "--json", home=home).stdout)
    assert told["file"] == "handrail.toml" and told["config"]["rules"][0]["name"] == "no large sums"


def rows(shown: str) -> dict[str, list[str]]:
    found = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in shown.splitlines()]
    return {cells[0]: cells[1:] for cells in found if len(cells) > 1}


@requirement("SRV-602", everywhere=True)
def test_check_doubts_rules_that_meet_nothing(home: Path) -> None:
    (home / "handrail.toml").write_text(
        '[[rules]]\nverdict = "deny"\ntools = ["refnd"]\n[[rules]]\nname = "all"\nverdict = "allow"'
    )
    done = handrail("check", "shop.py", home=home)
    assert done.returncode == 0
    assert "careful: rule 1: tools: 'refnd' matches no tool; did you mean 'refund'?" in done.stderr
    assert "careful: all: has no condition" in done.stderr
    assert len(json.loads(handrail("check", "shop.py", "--json", home=home).stdout)["warnings"]) == 2
    (home / "handrail.toml").write_text("[limits.tools.refnd]\nconcurrent = 1")
    for verb in (["check", "shop.py"], ["serve", "shop.py"]):
        said = handrail(*verb, home=home).stderr
        assert "careful: limits.tools: 'refnd' matches no tool; did you mean 'refund'?" in said
    for verb in (["check", "shop.py"], ["serve", "shop.py"], ["serve", "shop.py", "--reload"]):
        (home / "handrail.toml").write_text('[[rules]]\nverdict = "deny"\ntools = ["refnd", "refund", "read_more"]')
        said = handrail(*verb, home=home).stderr
        assert said.count("careful") == 2 and "'refnd' matches no tool; did you mean 'refund'?" in said
        assert "'read_more' matches no tool" in said
        with (home / "handrail.toml").open("a") as file:
            file.write("\n[sanitize]\nmax_text = 2000\n")  # then there is one
        assert handrail(*verb, home=home).stderr.count("careful") == 1
    (home / "handrail.toml").write_text("[[rules]]\nverdict = 'denied'")
    wrong = handrail("check", home=home)
    assert wrong.returncode == 2 and "handrail.toml: " in wrong.stderr and "'denied'" in wrong.stderr
    gone = handrail("check", "--config", "none.toml", home=home)
    assert gone.returncode == 2 and "none.toml: No such file" in gone.stderr


# Explained

EXPLAINED: list[tuple[list[str], int, list[tuple[str, str]]]] = [
    (["call", "refund", "amount=7"], 0, [("decide", "allow")]),
    (["call", "refund", "amount=101"], 5, [("rule no large sums", "matches"), ("decide", "deny")]),
    (["call", "refund", "amount=x"], 2, []),
    (["call", "refund", "--arguments", '{"amount": "7"}'], 5, [("validate", "refused")]),
    (["call", "cancel_order", "order=7"], 0, [("decide", "ask"), ("approve", "anyone")]),
    (["--as", "bob", "call", "cancel_order", "order=7"], 5, [("find", "hidden")]),
    (["--as", "bob", "call", "cancel_ordr", "order=7"], 2, []),
    (["--revision", "1999-01-01", "call", "refund", "amount=7"], 2, []),
    (["list", "refund"], 2, []),
]


@requirement("SRV-602", everywhere=True)
@pytest.mark.parametrize(("words", "code", "stages"), EXPLAINED)
def test_explain_says_what_each_guard_would_do(
    home: Path, words: list[str], code: int, stages: list[tuple[str, str]]
) -> None:
    (home / "handrail.toml").write_text('[server]\ntarget = "shop.py"\n' + RULES)
    done = handrail("explain", *words, "--json", home=home)
    assert done.returncode == code, done.stderr
    told = [(each["stage"], each["verdict"]) for each in json.loads(done.stdout or "[]")]
    assert set(stages) <= set(told) and bool(told) is (code != 2)
    shown = handrail("explain", *words, home=home)
    assert all(f"{stage}  " in shown.stdout and verdict in shown.stdout for stage, verdict in stages)
    assert not (home / "log").exists() and not (home / STATE).exists()  # nothing is run, nothing written


# In a terminal


@contextmanager
def watching(home: Path, *words: str) -> Iterator[RawTerminal]:
    """`handrail approve --watch` on a terminal, until Ctrl-C."""
    made = RawTerminal(sys.executable, "-m", "handrail", "approve", "--watch", *words, home=home)
    try:
        made.until("waiting for calls to approve")
        yield made
    finally:
        made.type("\x03")
        code, rest = made.end()
    assert code == 130 and "Traceback" not in rest


def time_left(shown: str) -> int:
    """The seconds on the last line that counts."""
    minutes, seconds = re.findall(r"(\d+):(\d\d) left", shown)[-1]
    return int(minutes) * 60 + int(seconds)


PROMPT = "Allow it? [y/N/e(dit)/s(kip)] "


@requirement("APP-03", "APP-04", "P-19", everywhere=True)
def test_whoever_watches_hears_a_bell_sees_the_time_left_and_answers_with_a_note(home: Path) -> None:
    (home / "handrail.toml").write_text('[approvals]\nby = "operator"\nwait = 600\n')
    with caller("shop.py", home=home) as client, watching(home) as screen:
        client.begin("cancel_order", {"order": 7})
        assert "\a" in screen.until("cancel_order")
        shown = screen.until(PROMPT)
        assert '"order": 7' in shown
        first = later = time_left(shown)
        while later == first:  # drawn anew each second, until it has counted
            later = time_left(screen.until(" left\x1b8"))
        assert later < first
        screen.type("n not before noon\n")
        assert (
            text_of(client.hear()) == "cancel_order was not approved by an operator: not before noon. Nothing was done."
        )
        screen.until("denied")
        client.begin("cancel_order", {"order": 8})
        screen.until("\a")
        screen.until(PROMPT)
        screen.type("perhaps\n")  # neither yes nor no: asked again
        screen.until(PROMPT)
        screen.type("y 2h go on\n")
        assert text_of(client.hear()) == "order 8 is cancelled"
        screen.until("and remembered until")
        assert text_of(client.result("cancel_order", {"order": 8})) == "order 8 is cancelled"
    told = [each for each in records(home / STATE) if each["event"] == "approval"]
    assert [each["step"] for each in told] == ["asked", "denied", "asked", "approved", "remembered"]


@requirement("APP-03", "P-19", everywhere=True)
def test_whoever_watches_is_told_what_was_decided_elsewhere_and_who_has_left(home: Path) -> None:
    (home / "handrail.toml").write_text('[approvals]\nby = "operator"\nwait = 1\n')
    with caller("shop.py", home=home) as client, watching(home) as screen:
        client.begin("cancel_order", {"order": 7})
        screen.until(PROMPT)
        assert "Call it again" in text_of(client.hear())
        screen.until("its caller has left: it runs if it calls again")
        one = waiting(home)
        assert one["caller"] == "left"
        assert handrail("approve", one["id"], "yes", home=home).returncode == 0
        screen.until(f"{one['id']}: has been approved by operator")
        shown = handrail("approve", one["id"], home=home).stdout
        assert "approved, not used yet: it runs if its caller calls again" in shown
        assert text_of(client.result("cancel_order", {"order": 7})) == "order 7 is cancelled"
        assert "consumed" in handrail("approve", one["id"], home=home).stdout


def test_without_a_terminal_watching_rings_no_bell_and_asks_nobody(home: Path) -> None:
    with caller("shop.py", home=home) as client:
        client.begin("cancel_order", {"order": 7})
        waiting(home)
        command = [*COMMAND, "approve", "--watch", "--json"]
        with subprocess.Popen(
            command, cwd=home, env=environment(home), stdout=subprocess.PIPE, start_new_session=True
        ) as watcher:
            assert watcher.stdout is not None
            line = watcher.stdout.readline()
            watcher.terminate()
            rest = watcher.stdout.read()
        assert json.loads(line)["caller"] == "waiting" and b"\a" not in line + rest
        client.say("notifications/cancelled", {"requestId": "call"})


@requirement("APP-03", "APP-04", "P-19", "P-33", everywhere=True)
def test_an_operator_decides_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Shown whole and inert; yes, no, edit and skip; what cannot be decided stops nothing else."""
    (tmp_path / "shop.py").write_text(SHOP.replace("order: int", "order: int, why: str = ''"))
    with caller("shop.py", home=tmp_path) as client:
        for ident, order in enumerate((1, 2, 3, 4)):
            arguments = {"order": order, "why": "\x1b[2J\u202eevil"} if order == 1 else {"order": order}
            client.say("tools/call", {"name": "cancel_order", "arguments": arguments}, id=ident)
        deadline = time.monotonic() + SECONDS
        while len(json.loads(handrail("approve", "--json", home=tmp_path).stdout or "[]")) < 4:
            assert time.monotonic() < deadline
        terminal.run("approve")
        allow, arguments_json = "Allow it? [y/N/e(dit)/s(kip)]", "Arguments to run with, as JSON:"
        shown = terminal.until('"order": 1', allow)
        assert "cancel_order on shop" in shown and "\\u001b[2J<U+202E>evil" in shown
        terminal.type("y")
        terminal.until('"order": 2', allow)
        terminal.type("n")
        terminal.until('"order": 3', allow)
        terminal.type("e")
        terminal.until('"order": 3', arguments_json)
        terminal.type("not json")
        terminal.until("the arguments: 'not json' is not JSON")  # and on it goes
        terminal.until('"order": 4', allow)
        terminal.type("e")
        terminal.until('"order": 4', arguments_json)
        terminal.type('{"order": 44}')
        terminal.until("EXIT=0")
        answers = {each["id"]: text_of(each) for each in (client.hear() for _ in range(3))}
        assert answers[0] == "order 1 is cancelled" and answers[3] == "order 44 is cancelled"
        assert "was not approved by an operator" in answers[1]
        terminal.run("approve", "--watch")
        terminal.until('"order": 3', allow)
        terminal.type("s")
        client.say("tools/call", {"name": "cancel_order", "arguments": {"order": 5}}, id=5)
        terminal.until('"order": 5', allow)
        terminal.type("y")
        assert client.hear()["id"] == 5
        terminal.interrupt()
        terminal.until("EXIT=130")
        terminal.run("approve", "--watch")
        terminal.until('"order": 3', allow)
        terminal.interrupt()  # while it asks
        terminal.until("EXIT=130")
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "44", "5"]
