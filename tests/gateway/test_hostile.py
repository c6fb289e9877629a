"""Hostile upstreams behind a gateway: a typed end for their callers, none for the callers of the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

import upstreams_hostile as hostile
from faults import gone, until
from gateways_attacked import OPTIONS
from handrail import Server
from handrail.gateway.upstream import Upstream
from handrail.guards import Policy, Rule
from handrail.testing import Peer
from patience import PATIENCE, SOAK
from requirements import requirement
from standing import Standing, forget_memory, memory
from wires_http import HttpServer, HttpWire

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R4, R5 = "2025-11-25", "2026-07-28"
MEBIBYTE = 1024 * 1024
MEMORY_MIB = 64  # that a gateway may take for a moment, whatever one upstream sends
SHORT = 0.4  # seconds of a call to an upstream that does not answer
ABLE: Object = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
ACTS = re.compile(  # what acts on a screen or is not seen; lines and tabs are text
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
CANARIES = ("canary-challenge", "canary-html", "canary-idle", "canary-late", "canary-other", "canary-stderr")
NEVER_TOLD = (*CANARIES, "169.254.169.254", "127.0.0.1", "WWW-Authenticate")
NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
QUERY = "a" * 30_000 + "!"  # what a pattern that backtracks does not survive


@dataclass(frozen=True)
class Ends:
    """How the call of the bad tool ends: `ok`, `failed` as a result, `error` with a code, or `absent` from the list."""

    kind: str
    text: str = ""  # a pattern
    code: int = 0

    def check(self, answer: Object) -> None:
        if self.kind in ("error", "absent"):
            error = answer.get("error")
            assert error is not None, answer
            assert error["code"] == self.code, error
            assert re.search(self.text, error["message"]), error
            return
        result = answer.get("result")
        assert result is not None, str(answer)[:2_000]
        text = "\n".join(block.get("text", f"[{block['type']}]") for block in result["content"])
        assert result.get("isError", False) is (self.kind == "failed"), str(result)[:2_000]
        assert re.search(self.text, text), text[:2_000]
        assert len(json.dumps(result)) < 8 * MEBIBYTE


def ok(text: str = "^ok$") -> Ends:
    return Ends("ok", text)


def failed(text: str) -> Ends:
    return Ends("failed", text)


def error(code: int, text: str = "") -> Ends:
    return Ends("error", text, code)


ABSENT = Ends("absent", "Unknown tool", -32602)
NOT_THERE = failed(r"^evil is not there.* Nothing was done\.$")  # with all its tools


@dataclass(frozen=True)
class Case:
    name: str
    ends: Ends
    why: str = ""  # a pattern: what is on record of the tool, the upstream or its list
    questions: int = 0  # that its caller may be asked, at most
    others: bool = True  # its other tools are listed
    options: Object = field(default_factory=dict)


UNKNOWN_OUTCOME = r"^\w+.*\(the outcome is unknown\)\.$"
LATE = failed(r"took longer|did not answer in time")
MALFORMED = failed("malformed")
DOWN = failed(r"^\w+ (cannot be reached: .*|answered with the HTTP status \d+) \(the outcome is unknown\)\.$")
REFUSED_QUESTION = r'answer: .*"error"'


def many(ends: Ends, *names: str, **more: Any) -> list[Case]:
    return [Case(name, ends, **more) for name in names]


EVERY: list[Case] = [
    *many(ok("^I am bad$"), "ordinary", "boundary", "new_boundary"),  # the twins
    # Definitions
    *many(failed("has changed .*wording"), "rug_description", "rug_title", why="wording"),
    *many(failed("has changed .*widened"), "rug_schema_widened", "rug_schema_narrowed", why="widened"),
    *many(failed("has changed"), "rug_output_schema", "rug_nested_text", why="has changed"),
    *many(failed("has changed .*hint"), "rug_hints", "rug_hints_removed", why="hint"),
    Case("rug_invisible", failed("has changed .*invisible"), why="invisible"),
    Case("rug_name", ABSENT),
    # Lists
    *many(ok("^I am bad$"), "cursor_again", "cursors_in_turn", "pages_for_ever", "cursor_not_text", why="LOSSY-16"),
    Case("cursor_of_1_mb", ok("^I am bad$"), why="LOSSY-16"),
    Case("tools_10000", ok("^I am bad$"), why="LOSSY-16"),
    Case("description_of_1_mb", ABSENT, why="description is longer"),
    Case("title_of_1_mb", ok("^I am bad$")),
    Case("schema_deep", NOT_THERE, why="nested", others=False),
    Case("list_nested_deep", NOT_THERE, why="not a message", others=False),
    Case("list_of_100_mb", NOT_THERE, why="too long", others=False),
    Case("tools_not_list", NOT_THERE, why="no list of tools", others=False),
    Case("schema_unfolds", ABSENT, why="unfold"),
    Case("schema_in_a_loop", ABSENT, why="loop"),
    Case("schema_elsewhere", ABSENT, why="cannot be resolved"),
    Case("schema_wrong_types", ABSENT, why="not a valid schema"),
    Case("schema_not_object", ok("^I am bad$")),
    Case("schema_of_pattern_bomb", failed("does not match the pattern")),
    Case("schema_of_worse_pattern", ABSENT, why="pattern"),
    Case("output_pattern_bomb", failed("does not fit its own schema")),
    *many(ok("^I am bad$"), "tools_of_nothing", "icons_hostile", "capabilities_nonsense"),
    Case("names_hostile", ok("^I am bad$")),
    # Texts
    *many(ok("^I am bad$"), "nasty_name", "nasty_title", "nasty_description", "nasty_meta"),
    *many(ok("^I am bad$"), "nasty_server_info", "nasty_instructions"),
    Case("nasty_schema", failed("is not one of")),
    Case("nasty_argument_name", ABSENT, why="invisible"),
    Case("nasty_error", error(4711)),
    Case("nasty_bad_params", failed("^er")),
    Case("nasty_reserved_error", error(-32603, r"^\w+: er")),
    Case("nasty_handshake_error", NOT_THERE, why="initialize", others=False),
    *many(ok(), "nasty_progress", "nasty_log"),
    Case("nasty_question", ok(), questions=1),
    Case("nasty_result", ok("^okevil")),
    Case("nasty_structured", ok("^ok")),
    Case("nasty_blocks", ok("^ok")),
    Case("nasty_stderr", DOWN),
    # Results
    Case("content_not_list", MALFORMED),
    Case("content_missing", ok("^$")),
    *many(ok("malformed"), "content_of_nulls", "text_malformed", "image_malformed", "audio_malformed"),
    *many(ok("malformed"), "resource_malformed", "link_malformed"),
    Case("block_unknown", ok("hologram")),
    *many(ok("^ok"), "meta_malformed", "structured_malformed", "both_dialects", "forged_gateway_meta"),
    *many(ok("^ok"), "forged_input_required", "deep_structured"),
    Case("forged_task", ok("^$")),
    *many(failed("^it failed$"), "is_error_text", "is_error_number", "is_error_object"),
    Case("is_error_with_value", failed("^ok")),
    Case("image_is_script", ok("withheld")),
    # Answers
    *many(failed(UNKNOWN_OUTCOME), "wrong_jsonrpc", "id_as_float", "id_as_list", "result_not_object"),
    *many(failed(UNKNOWN_OUTCOME), "result_and_error", "neither_result_nor_error", "error_not_object"),
    *many(failed(UNKNOWN_OUTCOME), "error_code_text", "nan", "duplicate_keys", "invalid_utf8", "lone_surrogate"),
    *many(failed(UNKNOWN_OUTCOME), "long_number", "nested_100000_deep", "too_many_parts", "line_of_100_mb"),
    *many(LATE, "missing_jsonrpc", "id_as_text", "id_of_another", "batch_of_5000"),
    Case("id_null", error(-32700)),
    Case("error_code_huge", error(-32603)),
    Case("error_message_of_1_mb", error(4711, "^x{100,20000}\\W*$")),
    *many(ok(), "batch_answer", "answers_twice", "answers_all_ids", "answers_before_request"),
    Case("text_of_3_mb", ok("^x{1000}")),
    # Questions
    *many(ok(REFUSED_QUESTION + ".*secret"), "asks_password", "asks_api_key", "asks_secret_in_words", why="secret"),
    *many(ok(REFUSED_QUESTION), "asks_javascript", "asks_file", "asks_nonsense_form", "asks_form_deep", why="refused"),
    *many(ok(REFUSED_QUESTION), "asks_unknown", "asks_unknown_method", "asks_sampling_nonsense"),
    Case("asks_ping", ok(r'"result": \{\}')),
    Case("asks_1000_at_once", ok(), questions=1_000),
    Case("asks_idle", ok("^I am bad$")),
    Case("asks_after_answer", ok()),
    Case("new_asks_for_ever", failed("more than 8 rounds"), why="LOSSY-24", questions=8),
    Case("new_says_later_for_ever", LATE),
    Case("new_asks_nonsense", MALFORMED),
    Case("new_asks_password", failed("secret")),
    Case("new_unknown_result_type", MALFORMED),
    # Floods
    *many(ok(), "flood_list_changed", "flood_progress", "flood_progress_same", "flood_progress_of_others", "flood_log"),
    *many(ok(), "flood_unknown", "flood_cancelled", "flood_updated", "progress_nonsense", "flood_stderr"),
    Case("noise_on_stdout", ok()),
    # Life and death
    Case("exits_at_once", NOT_THERE, why="exited with code 3", others=False),
    *many(NOT_THERE, "never_initializes", "never_lists", others=False, options={"list_seconds": 1.0}),
    *many(LATE, "never_answers", "ignores_cancel"),
    *many(DOWN, "dies_mid_call", "dies_mid_answer", "closes_output", "forks_and_exits", "new_version_on_reconnect"),
    Case("version_unknown", NOT_THERE, why="2099-01-01", others=False),
    Case("handshake_nonsense", NOT_THERE, why="wants to speak", others=False),
    # HTTP
    *many(failed("did not accept the gateway's credentials"), "http_401", "http_401_json", "http_403"),
    *many(failed("takes no more calls now"), "http_429", "http_429_for_ever"),
    *many(DOWN, "http_500", "http_503", "http_302", "http_307", "http_303", "http_308", "http_wrong_type"),
    *many(DOWN, "http_empty", "http_202", "http_204", "http_gzip_bomb", "http_header_bomb"),
    Case("http_session_404", failed("^web answered with the HTTP status 404")),
    *many(DOWN, "http_endless_body", "http_event_of_100_mb", "http_event_lines", "http_stream_ends"),
    *many(DOWN, "http_length_too_long", "http_length_nonsense", "http_not_http", "http_cuts"),
    *many(failed(UNKNOWN_OUTCOME), "http_no_type", "http_array"),
    *many(LATE, "http_endless_stream", "http_drips"),
    Case("http_two_answers", ok()),
    *many(failed("answered with the id"), "http_answers_next_request", "http_stream_answers_next_request"),
    Case("http_session_always_404", NOT_THERE, why="404", others=False),
]
ALONE = set("nasty_stderr dies_mid_call dies_mid_answer closes_output forks_and_exits".split())  # they end it
ALONE |= hostile.PREPARE.keys()
CALLS = [case for case in EVERY if case.name in {*hostile.BAD, *hostile.WIRE} - ALONE]
CASES = [case for case in EVERY if case not in CALLS]
OF_HANDSHAKE = ("asks_1000_at_once", "new_asks_for_ever", "new_says_later_for_ever")  # others are asked otherwise
SHOWN = ("nasty_", "asks_", "content_", "structured_", "block_", "is_error_", "http_4", "error_")  # as the caller's
PAIRS = [
    (case, revision)
    for case in CALLS
    for revision in (R4, R5)
    if revision == R4 or (case.name not in OF_HANDSHAKE and (SOAK or case.name.startswith(SHOWN)))
]


# The gateway that is attacked


COMMAND = [sys.executable, "-S", "-E", hostile.__file__]


@dataclass
class Canary:
    """An address that nothing may connect to."""

    listening: socket.socket
    url: str

    @property
    def was_reached(self) -> bool:
        try:
            self.listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield Canary(listening, f"http://127.0.0.1:{listening.getsockname()[1]}/mcp")


@pytest.fixture(scope="module")
def web(canary: Canary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the servers over HTTP, in a process of their own."""
    command = [*COMMAND, "--http", str(tmp_path_factory.mktemp("web") / "diary")]
    environment = {"CANARY_URL": canary.url}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


class Attack:
    """A gateway with a good upstream and hostile ones, and what a caller of it was asked."""

    def __init__(self, web: str, folder: Path, canary: Canary) -> None:
        self.web = web
        self.canary = canary
        self.diary = folder / "diary"
        self.trail = folder / "audit.jsonl"
        self.asked: list[tuple[str, Object]] = []
        self.server = Server("gateway", policy=Policy([Rule(verdict="allow")]), rates=None, audit=self.trail)
        self.server.include(f"{web}/ordinary/mcp", name="good", prefix="good_", trusted=True)

    def include(self, behaviour: str, name: str = "evil", **options: Any) -> None:
        options = {"timeout": (PATIENCE, PATIENCE), **options}
        options |= {"name": name, "prefix": f"{name}_", "trusted": True}
        if behaviour.startswith("http_"):
            self.server.include(f"{self.web}/{behaviour}/mcp", **options)
        else:
            environment = {"CANARY_URL": self.canary.url}
            self.server.include([*COMMAND, behaviour, str(self.diary)], env=environment, **options)

    def notes(self, kind: str) -> list[Object]:
        """What the hostile upstreams have noted."""
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [each for each in map(json.loads, lines) if each["kind"] == kind]

    def records(self, skip: int = 0) -> list[Object]:
        return [json.loads(line) for line in self.trail.read_text().splitlines()[skip:]]

    def answers(self, method: str, params: Object) -> Object:
        self.asked.append((method, params))
        if method == "roots/list":
            return {"roots": []}
        if method == "sampling/createMessage":
            return {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m"}
        return {"action": "accept", "content": {}}

    def caller(self, revision: str = R4) -> Peer:
        return Peer(self.server, revision=revision, capabilities=ABLE, answers=self.answers, timeout=PATIENCE)

    def reasons(self, name: str = "evil") -> str:
        """Everything that the gateway has on record of an upstream."""
        upstream: Upstream = self.server.upstreams[name]
        tools = [f"{tool.own_name} {tool.state} {tool.reason}" for tool in upstream.tools]
        return "\n".join([upstream.problem, *upstream.lossy, *tools])


async def names_of(peer: Peer) -> list[str]:
    answer = await peer.request("tools/list")
    names = [each["name"] for each in answer["result"]["tools"]]
    assert all(map(NAME.fullmatch, names)), names
    return names


async def bad_call(attack: Attack, peer: Peer, name: str, arguments: Object | None = None) -> Object:
    """The answer to a call; of a caller that is asked by answers, the last one."""
    meta: Object = {"progressToken": "mine"}
    if peer.revision.stateless:
        meta["io.modelcontextprotocol/logLevel"] = "debug"
    params: Object = {"name": name, "arguments": arguments or {}}
    while True:
        answer = await peer.request("tools/call", params, meta)
        result = answer.get("result", {})
        if result.get("resultType") != "input_required":
            return answer
        asked: Object = result["inputRequests"]
        params["inputResponses"] = {key: attack.answers(each["method"], each["params"]) for key, each in asked.items()}
        params["requestState"] = result["requestState"]


async def echo(peer: Peer, upstream: str, text: str) -> None:
    answer = await peer.request("tools/call", {"name": f"{upstream}_echo", "arguments": {"text": text}})
    assert answer.get("result", {}).get("content") == [{"type": "text", "text": text}], answer


async def good_calls(peer: Peer, until_done: asyncio.Future[Any], at_least: int = 5) -> list[float]:
    """Call the good upstream again and again, and check each result; the seconds each took."""
    took: list[float] = []
    while not until_done.done() or len(took) < at_least:
        began = time.perf_counter()
        await echo(peer, "good", f"good {len(took)}")
        took.append(time.perf_counter() - began)
    return took


def texts(value: Json) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def check_is_clean(wire: list[bytes]) -> None:
    """Nothing that acts, hides, or is nobody's business has reached the caller."""
    for line in wire:
        for text in texts(json.loads(line)):
            assert not ACTS.search(text), ascii(text)[:500]
            for word in NEVER_TOLD:
                assert word not in text, text[:500]


class Logged(logging.Handler):
    """Keeps what is logged; `caplog` of these tests would collect garbage before each of them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[Logged]:
    handler, logger = Logged(), logging.getLogger("handrail")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def check_records(records: list[Object], name: str, logged: Logged) -> None:
    """The call has an outcome on record; nothing there or in the log acts."""
    assert any(each.get("tool") == name or each.get("outcome") in ("unknown_tool", "failed") for each in records), (
        records
    )
    for text in texts(records):
        assert not ACTS.search(text), ascii(text)
    for record in logged.records:
        assert not ACTS.search(record.getMessage()), ascii(record.getMessage())


class Harm:
    """What a gateway suffers while something is done: how much memory it takes, what reaches its caller."""

    def __init__(self, attack: Attack, peer: Peer) -> None:
        self.attack = attack
        self.peer = peer
        forget_memory()
        self._memory = memory("VmRSS")
        self._wire = len(peer.wire)
        self._records = len(attack.records())
        attack.asked.clear()

    def check(self, case: Case, name: str, logged: Logged) -> None:
        assert memory("VmHWM") - self._memory < MEMORY_MIB * MEBIBYTE
        assert not self.attack.canary.was_reached
        asked = [method for method, _ in self.attack.asked if method != "roots/list"]  # that a server may ask any time
        assert len(asked) <= case.questions, self.attack.asked[:3]
        check_is_clean(self.peer.wire[self._wire :])
        check_records(self.attack.records(self._records), name, logged)
        if case.why:
            reasons = self.attack.reasons(name.partition("_")[0])
            assert re.search(case.why, reasons), reasons


# Calls: all of these upstreams are behind one gateway


def upstream_of(case: Case) -> str:
    web = "web" if case.name in hostile.WIRE else "new" if case.name.startswith("new_") else "evil"
    return f"{web}late" if case.ends is LATE else web


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attack(web: str, canary: Canary, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attack]:
    attack = Attack(web, tmp_path_factory.mktemp("attack"), canary)
    for name, behaviour in (("evil", "all"), ("new", "new_all"), ("web", "http_all")):
        attack.include(behaviour, name)
        attack.include(behaviour, f"{name}late", timeout=(SHORT, SHORT))
    async with attack.server.serving():
        yield attack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def callers(attack: Attack) -> AsyncIterator[dict[str, Peer]]:
    async with attack.caller(R4) as old, attack.caller(R5) as new:
        yield {R4: old, R5: new}


@requirement("GW-15", "GW-16", "GW-17", "P-33", "P-35")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("case", "revision"), PAIRS, ids=[f"{case.name}-{revision}" for case, revision in PAIRS])
async def test_a_hostile_answer_harms_its_own_call_and_no_other(
    case: Case, revision: str, attack: Attack, callers: dict[str, Peer], logged: Logged, ran: Ran
) -> None:
    ran(revision, "memory")
    peer, upstream = callers[revision], upstream_of(case)
    async with asyncio.timeout(2 * PATIENCE):
        await echo(peer, upstream, "it is there")
        harm = Harm(attack, peer)
        name = f"{upstream}_{case.name}"
        calling = asyncio.ensure_future(bad_call(attack, peer, name))
        await good_calls(peer, calling)
        case.ends.check(await calling)
        await echo(peer, upstream, "still there")
        await echo(peer, "good", "still there")
        harm.check(case, name, logged)


# Definitions, lists, life and death: a gateway for each


@pytest.fixture
async def nothing_is_left() -> AsyncIterator[None]:
    """The threads of the loop's own pool end with the loop."""
    before = Standing.now()

    def is_back() -> bool:
        return not before.more(Standing.now()._replace(threads=before.threads))

    yield
    await until(is_back, "nothing is left")


@requirement("GW-15", "GW-17", "GW-21", "P-14", "P-31", "P-33", "P-35")
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_a_hostile_upstream_harms_its_own_callers_and_no_others(
    case: Case, web: str, canary: Canary, tmp_path: Path, logged: Logged, ran: Ran
) -> None:
    ran(R4, "memory")
    attack = Attack(web, tmp_path, canary)
    attack.include(case.name, **case.options)
    async with asyncio.timeout(2 * PATIENCE), attack.caller() as peer:
        harm = Harm(attack, peer)
        listed = await names_of(peer)
        assert "good_echo" in listed
        assert ("evil_echo" in listed) is case.others
        if case.name in hostile.TURNS:
            await peer.request("tools/call", {"name": "evil_turn"})
            await attack.server.upstreams["evil"].refresh()
        arguments = {"x": QUERY} if "evil_bad" in listed else {}
        calling = asyncio.ensure_future(bad_call(attack, peer, "evil_bad", arguments))
        await good_calls(peer, calling)
        case.ends.check(await calling)
        if case.others:
            await echo(peer, "evil", "still there")
        await echo(peer, "good", "still there")
        harm.check(case, "evil_bad", logged)
    for note in attack.notes("child"):
        await until(partial(gone, note["pid"]), "what it has forked is gone")
    if not case.others:
        assert any("evil" in record.getMessage() for record in logged.records if record.levelno >= logging.WARNING)


@requirement("GW-17", "P-35")
@pytest.mark.parametrize("name", ["never_initializes", "never_lists"])
async def test_only_the_first_list_waits_for_an_upstream_that_does_not_answer(
    name: str, web: str, canary: Canary, tmp_path: Path, ran: Ran
) -> None:
    ran(R4, "memory")
    attack = Attack(web, tmp_path, canary)
    attack.include(name, list_seconds=1.0)
    async with asyncio.timeout(PATIENCE), attack.caller() as peer:
        assert "good_echo" in await names_of(peer)
        listing = asyncio.ensure_future(names_of(peer))
        unknown = asyncio.ensure_future(peer.request("tools/call", {"name": "evil_bad"}))
        for _ in range(50):  # a machine on which these take longer than the wait proves nothing, and fails nothing
            await echo(peer, "good", "x")
        assert listing.done()
        assert unknown.done()


# How long the others take meanwhile


RAGING = """
    line_of_100_mb too_many_parts nested_100000_deep text_of_3_mb batch_of_5000 answers_all_ids asks_1000_at_once
    flood_list_changed flood_log flood_progress flood_progress_of_others flood_unknown flood_stderr noise_on_stdout
    http_endless_body http_endless_stream http_event_lines http_gzip_bomb http_header_bomb
""".split()
MEASURED = 300  # calls
ENVELOPE: Object = {"protocolVersion": R5, "clientCapabilities": {"elicitation": {"form": {}}}, "logLevel": "debug"}


async def rage(url: str, name: str) -> None:
    """Call a hostile tool again and again, as a caller that reads its answers and does nothing with them."""
    address = urlsplit(url)
    meta = {f"io.modelcontextprotocol/{each}": value for each, value in ENVELOPE.items()}
    params = {"name": name, "arguments": {}, "_meta": {"progressToken": "mine", **meta}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    head = (
        f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        "Accept: application/json, text/event-stream\r\nConnection: close\r\n"
        f"MCP-Protocol-Version: {R5}\r\nMcp-Method: tools/call\r\nMcp-Name: {name}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    while True:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(head.encode() + body)
            first = await reader.readline()
            assert first.split()[1] == b"200", first
            while await reader.read(1 << 20):
                pass
        finally:
            writer.close()


@requirement("GW-17", "P-35")
@pytest.mark.skipif(not SOAK, reason="a promised time decides where nothing else runs: make soak")
async def test_p99_of_other_upstreams_is_at_most_twice_the_idle_one(web: str, tmp_path: Path, ran: Ran) -> None:
    """Of a gateway in a process of its own, by a caller who is not the one that is harmed."""
    ran(R5, "http")
    upstreams = {"good": "ordinary", "evil": "all", "web": f"{web}/http_all/mcp"}
    options = {"upstreams": upstreams, "diary": str(tmp_path / "diary"), "audit": None, "timeout": SHORT}
    os.environ[OPTIONS] = json.dumps(options)
    gateway = HttpServer("gateways_attacked:made")
    wire = HttpWire(R5, gateway)
    slow = []

    async def p99() -> float:
        took = []
        for number in range(MEASURED):
            began = time.perf_counter()
            answer = await wire.call("good_echo", {"text": str(number)})
            took.append(time.perf_counter() - began)
            assert answer["result"]["content"][0]["text"] == str(number)
        return statistics.quantiles(took, n=100)[98]

    try:
        await wire.open()
        await wire.request("tools/list")
        await p99()
        for name in RAGING:
            was = await p99()
            raging = asyncio.ensure_future(rage(gateway.url, f"{'web' if name in hostile.WIRE else 'evil'}_{name}"))
            now = await p99()
            assert not raging.done(), raging
            raging.cancel()
            await asyncio.wait({raging})
            print(f"{name}: p99 idle {was * 1e3:.2f} ms, meanwhile {now * 1e3:.2f} ms")
            slow += [name] if now > 2 * was else []
    finally:
        await wire.close()
        gateway.stop()
    assert not slow
