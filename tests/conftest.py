"""What every test may use: where it ran (`ran`), other implementations (`installed_peer`), the record of rules."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from postgres_servers import postgres as postgres, schema as schema
from requirements import RAN, Places, record_ran
from tools.requirements import RECORD, REVISIONS, RULES, read_rules

# No clock judges an example: a busy machine is slow, not wrong. What goes in is judged on the same examples each time;
# at home every run looks somewhere else.
settings.register_profile("home", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") == "true" else "home")

# Started in the background, by `&` or by nohup, a process ignores Ctrl-C or the end of its terminal, and so would all
# that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A process that keeps no bytecode compiles all that it imports: a server takes twice as long to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parent.parent
KNOWN_TRANSPORTS = frozenset({"stdio", "memory", "http"})
EVERYWHERE = ("*", "*")
# The files that take longest, first: where several processes share the tests, none is left alone with one at the end.
LONGEST = """
    client/settles console/decisions client/faults console/browser docs/docs gateway/matrix cli/guards interop/client
    fleet/fleet client/client console/looks interop/http audit/postgres stores/stores console/loading audit/checkpoints
    audit/log transports/stdio guards/redis_limits interop/stdio transports/load stores/redis fleet/gateways
    transports/supervisor gateway/hostile cli/gateway guards/fire cli/gateway_auth server/calling console/hostile
    stores/postgres gateway/grants server/log_lines
    console/forms_browser console/resources_browser client/grid interop/conformance_client cli/keys
    interop/conformance_gateway gateway/faults guards/resources approvals/binding cli/local_file console/tools_browser
    console/upstreams_browser protocol/notices protocol/resources docs/example interop/client_resources
    interop/resources http1/connection interop/gateway_upstreams interop/conformance guards/guards gateway/isolation
""".split()

Entry = dict[str, list[str] | list[tuple[str, str]]]

PASSED: pytest.StashKey[bool] = pytest.StashKey()
PROVED: pytest.StashKey[dict[str, Entry | None]] = pytest.StashKey()


@pytest.fixture
def ran(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Call it with the revision as on the wire and the transport, once the test really speaks them."""

    def record(revision: str, transport: str) -> None:
        if revision not in REVISIONS.values() or transport not in KNOWN_TRANSPORTS:
            raise ValueError(f"ran({revision!r}, {transport!r}): not a revision and a transport")
        record_ran(request, revision, transport)

    return record


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """As pytest has it, but what an earlier test left behind has its say first: asyncio logs when it is collected."""
    gc.collect()
    return caplog


@pytest.fixture(scope="session")
def installed_peer() -> Callable[[str], Path]:
    """Folder of another implementation, as tests/peers/install.sh names it; without it the test is skipped.

    HANDRAIL_REQUIRE_PEERS=1 turns the skip into a failure, so that it cannot hide a break.
    """

    def folder(name: str) -> Path:
        path = ROOT / ".peers" / name
        if (path / ".ready").exists():
            return path
        log = path.with_suffix(".log")
        lines = log.read_text("utf-8", "replace").split("\n") if log.exists() else []
        reason = f"{name} is not installed: {next(filter(None, lines), 'run make peers')}"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)

    return folder


@pytest.fixture(scope="session")
def bytecode() -> str:
    """Where the peers' modules are compiled to, once instead of in every walk; their folders stay as installed."""
    return str(ROOT / ".peers" / "bytecode")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {rule.id for rule in read_rules(RULES.read_text("utf-8"))}
    wrong = [
        f"{item.nodeid}: {name} is not in docs/requirements.md"
        for item in items
        for mark in item.iter_markers("requirement")
        for name in mark.args
        if name not in known
    ]
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    turns = {name: turn for turn, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: turns.get(f"{item.path.parent.name}/{item.path.stem.removeprefix('test_')}", len(turns))
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROVED] = {}
    gc.disable()  # collection makes objects that all stay


def pytest_collection_finish() -> None:
    """Take what was collected out of what the garbage collector walks: 22,000 tests are 0.4 s each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Where several processes share the tests, the first writes the record of all."""
    node.config.stash[PROVED].update(getattr(node, "workeroutput", {}).get("proved", {}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure is reported as skipped, an unexpected pass as failed: neither proves anything.
    item.stash[PASSED] = item.stash.get(PASSED, True) and report.passed
    if report.when == "teardown" and any(item.iter_markers("requirement")):
        item.config.stash[PROVED][item.nodeid] = _entry(item) if item.stash[PASSED] else None
    return report


def _entry(item: pytest.Item) -> Entry:
    """The ids of one passed test and the places it was seen in."""
    marks = list(item.iter_markers("requirement"))
    places: Places = item.stash.get(RAN, set())
    if all(mark.kwargs.get("everywhere") for mark in marks):
        places = places | {EVERYWHERE}
    elif any(mark.kwargs.get("everywhere") for mark in marks):
        raise pytest.UsageError(f"{item.nodeid}: requirement(everywhere=True) beside one without; use two tests")
    return {"ids": sorted({name for mark in marks for name in mark.args}), "ran": sorted(places)}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was proved. A run of everything replaces the record, a run of a few tests changes only theirs."""
    config = session.config
    proved = config.stash.get(PROVED, {})
    if hasattr(config, "workeroutput"):
        config.workeroutput["proved"] = proved
        return
    if config.option.collectonly or not proved:
        return
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (
        config.option.keyword or config.option.markexpr or session.shouldstop or session.shouldfail
    )
    record = config.rootpath / RECORD.name
    before: dict[str, Entry | None] = {}
    if not whole and record.exists():
        before = json.loads(record.read_text("utf-8"))
    entries = {name: entry for name, entry in sorted((before | proved).items()) if entry}
    record.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
