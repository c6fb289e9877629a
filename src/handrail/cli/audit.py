"""`handrail audit`: list the calls from here, or with `served` the calls answered here, a line each (APP-13).

`verify` checks the audit logs themselves, `export` copies their records unchanged (P-16), and `key` makes a key that
signs them.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from handrail.audit.format import BEGINNING, VerifyReport, merge_reports, verify, verify_chains
from handrail.audit.reader import TrailFile, csv_cell, open_log, parse_record, record_time
from handrail.cli.arguments import parse_seconds
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.signatures import defect_text, print_key, print_signatures, signature_check
from handrail.cli.terminal import Screen, json_text
from handrail.client.state_dir import CALLS_FILE, state_folder
from handrail.model import Json, Object
from handrail.stores import is_database
from handrail.text.controls import escape, mask_secrets, one_line

if TYPE_CHECKING:
    from handrail.audit.signature_check import Chains

__all__ = ["run_audit"]

POLL_SECONDS = 0.2
NOTED_HEAD = re.compile(r"\b([0-9a-f]{1,64}):([0-9a-f]{64}@[0-9]+\.\.[0-9]+(?:,[0-9]+d)?(?:,[0-9]+MB)?)")
WRITER = re.compile(rb'"writer":"([0-9a-f]{1,64})"')  # the first is the record's own
COLUMNS = "time server tool outcome seconds confirmed revision arguments_digest arguments".split()


def run_audit(args: Namespace, screen: Screen) -> int:
    if args.what == "key":
        return print_key(args, screen)
    paths = _paths(args)
    if args.what in ("prepare", "trim"):
        return asyncio.run(_maintain(args.what, paths, args, screen))
    if folders := [path for path in paths if isinstance(path, Path) and path.is_dir()]:
        raise UsageError(f"{folders[0]}: a folder; name an audit log in it, .db or .jsonl")
    if args.what == "verify":
        return max([_verify_any(path, args, screen) for path in paths])
    return _copy(paths, args) if args.what == "export" else _list_calls(paths, args, screen)


async def _maintain(what: str, paths: Sequence[Path | str], args: Namespace, screen: Screen) -> ExitCode:
    """Make the tables of a log in PostgreSQL, or delete its old records, as a role that may."""
    if len(paths) != 1 or not isinstance(paths[0], str):
        raise UsageError(f"audit {what}: name a log in PostgreSQL: postgresql://…")
    from handrail.audit.postgres import PostgresTable  # deferred: it needs the extra `postgres`
    from handrail.cli.load_server import CommandConfig  # it imports a whole server
    from handrail.stores.postgres import PostgresStore

    try:
        store = PostgresStore(paths[0], durable=False, name="audit")
    except ValueError as problem:
        raise UsageError(f"audit {what}: {problem}") from None
    try:
        report = await store.report()
        if what == "prepare":
            for role in args.grant:
                await store.database.grant(role)
            roles = f", also for {one_line(', '.join(args.grant), 200)}" if args.grant else ""
            screen.write(f"{report.place}: ready{roles}")
        else:
            limits = CommandConfig(args).config.audit.kept.limits
            await PostgresTable(store, limits, time.time, owns_store=False).trim()
            kept = f"{limits.keep_days} days" if limits.keep_days else "for ever"
            screen.write(f"{report.place}: records are kept {kept}")
    finally:
        await store.close()
    return ExitCode.OK


def _list_calls(paths: Sequence[Path | str], args: Namespace, screen: Screen) -> int:
    if args.what and (missing := [path for path in paths if isinstance(path, Path) and not path.exists()]):
        raise UsageError(f"{missing[0]}: there is no such file")
    if args.follow and args.what:
        raise UsageError("--follow: works for calls from here only; list served calls without it")
    if args.follow and args.export:
        raise UsageError("--follow: never ends, and --export prints one document; choose one of them")
    calls, matches = _CallReader(paths), _filter(args)
    records: Iterable[Object] = filter(matches, chain(calls.read(), calls.unfinished()))
    if args.tail:
        records = deque(records, args.tail)
    if args.export:
        _export(args.export, records)
    else:
        for record in records:
            _show(record, screen)
    if calls.unreadable_lines:
        screen.note(f"{calls.unreadable_lines} lines are not records; `handrail audit verify` says which")
    if args.follow:
        _follow(calls, matches, screen)
    if calls.damage:
        raise UsageError(f"{calls.damage}: only a part was read; `handrail audit export --salvage` may find more")
    return ExitCode.OK


def _follow(calls: _CallReader, matches: Callable[[Object], bool], screen: Screen) -> None:
    """Print new calls until the log is damaged twice in a row: once, it may be a file that is just being created."""
    before = damage = ""
    while not (before and damage):
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)
        before = calls.damage
        for record in filter(matches, calls.read()):
            _show(record, screen)
        damage = calls.damage


def _paths(args: Namespace) -> list[Path | str]:
    """Return the logs on the command line; by default that of the calls from here, of `handrail serve`, or of both."""
    state = state_folder(os.environ)
    client_file = state / CALLS_FILE
    if not args.what or args.files:
        return [each if is_database(each) else Path(each) for each in args.files] or [client_file]
    from handrail.cli.load_server import CommandConfig  # it imports a whole server

    server_log = CommandConfig(args).config.audit_place(state)
    if args.what == "verify" and not args.head and not args.key and client_file.exists():
        is_there = isinstance(server_log, str) or server_log.exists()
        return [server_log, client_file] if is_there else [client_file]
    return [server_log]


class _CallReader:
    """Reads logs and joins the records of each call: how it was confirmed, and its outcome."""

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self._last = dict.fromkeys(paths, 0)  # number of the last record that was read
        self._intents: dict[str, Object] = {}
        self.unreadable_lines = 0
        self.damage = ""  # why the last `read` stopped early

    def read(self) -> Iterator[Object]:
        """Yield the calls that have ended since the last `read`."""
        self.damage = ""
        for path, last in self._last.items():
            if isinstance(path, Path) and not path.exists():
                continue
            trail = open_log(path)
            for _, line in trail.lines(last):
                try:
                    record = {"event": "", "call": "", "number": 0, **parse_record(line)}
                    if not isinstance(record["call"], str) or not isinstance(record["number"], int):
                        raise ValueError("a record of another program")
                except ValueError:
                    self.unreadable_lines += 1
                    continue
                self._last[path] = record["number"]
                if record["event"] == "intent":
                    self._intents[record["call"]] = record
                elif record["event"] in ("outcome", "refusal", "answered"):
                    yield _call_record({**self._intents.pop(record["call"], {}), **record})
            self.damage = self.damage or trail.damage

    def unfinished(self) -> Iterator[Object]:
        for record in self._intents.values():
            yield _call_record({**record, "outcome": "unknown: it was begun, and nothing more is on record"})


def _call_record(record: Object) -> Object:
    return mask_secrets({**record, "confirmed": record.get("agreed") or record.get("rule", "")})  # type: ignore[no-any-return]  # a dict stays one


def _filter(args: Namespace) -> Callable[[Object], bool]:
    globs = {name: glob for name in ("server", "tool", "outcome") if (glob := getattr(args, name)) is not None}
    since = _since(args.since) if args.since is not None else None

    def matches(record: Object) -> bool:
        if not all(fnmatchcase(str(record.get(name, "")), glob) for name, glob in globs.items()):
            return False
        try:
            return since is None or record_time(record) >= since
        except ValueError:
            return False

    return matches


def _since(text: str) -> float:
    try:
        ago = parse_seconds(text)
        return record_time({"time": text}) if ago is None else (datetime.now(UTC) - timedelta(seconds=ago)).timestamp()
    except (ValueError, OverflowError):  # the second: before the year 1
        raise UsageError(f"--since: {text!r} is not a time such as 2026-07-28T09:30, or 30m, 2h, 7d ago") from None


def _show(record: Object, screen: Screen) -> None:
    if screen.as_json:
        screen.data(record)
        return
    outcome = one_line(str(record.get("outcome", "?")), 20)
    style = "green" if outcome == "ok" else "yellow" if outcome == "denied" else "red"
    seconds = record.get("seconds")
    duration = f"{seconds:.3f} s" if isinstance(seconds, int | float) and abs(seconds) < 1e9 else "-"
    when, server, tool = (one_line(str(record.get(name, "?")), 64) for name in ("time", "server", "tool"))
    confirmation = f"  {one_line(str(record['confirmed']), 20)}" if record.get("confirmed") else ""
    screen.write(
        f"{when}  {server}  {screen.paint(tool, 'bold')}  {screen.paint(outcome, style)}  {duration}{confirmation}"
    )
    if "arguments" in record:
        screen.write(f"    {escape(json.dumps(record['arguments'], ensure_ascii=False), lines=False)}")


def _export(form: str, records: Iterable[Object]) -> None:
    if form == "json":
        print(json_text(list(records)))
        return
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in records:
        table.writerow([_cell(record.get(name)) for name in COLUMNS])


def _cell(value: Json) -> str:
    if value is None:
        return ""
    text = escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), lines=False)
    return csv_cell(text)


def _copy(paths: Sequence[Path | str], args: Namespace) -> ExitCode:
    if sys.stdout.isatty():
        raise UsageError("export: records are printed unchanged, and a terminal might obey them; add > trail.jsonl")
    for path in paths:
        trail = open_log(path)
        if isinstance(trail, TrailFile):
            lines = trail.salvage() if args.salvage else (line for _, line in trail.lines())
        else:  # chain by chain, so that the copy can be checked
            lines = (line for _, chain_lines in trail.chains() for _, line in chain_lines)
        sys.stdout.buffer.writelines(lines)
        if trail.damage:
            raise UsageError(f"{trail.damage}: only a part was read; --salvage finds every record that is left")
    return ExitCode.OK


def _verify_any(path: Path | str, args: Namespace, screen: Screen) -> ExitCode:
    log = open_log(path)
    if not isinstance(log, TrailFile):
        return _verify_chains(log.name, log.chains, args, screen)
    if args.writers:
        return _verify_chains(str(path), lambda: _chains_in(log.lines()), args, screen)
    if args.heads:
        raise UsageError(f"--heads: is for a log in PostgreSQL; {path} has one head: --head HASH@first..last")
    return _verify(log, path, args, screen)


def _chains_in(lines: Iterable[tuple[str, bytes]]) -> Chains:
    """Return the chains in a copy of a log in PostgreSQL, which has one after the other."""
    return groupby(lines, lambda each: match[1].decode() if (match := WRITER.search(each[1])) else "")


def _verify_chains(name: str, read_chains: Callable[[], Chains], args: Namespace, screen: Screen) -> ExitCode:
    """Check the chain of each writer, and that none of those whose heads were noted is gone."""
    if args.head:
        raise UsageError("--head: a log in PostgreSQL has one for each writer; --heads FILE takes an earlier output")
    signatures = signature_check(read_chains, args)
    chains = read_chains() if signatures is None else signatures.watch(read_chains())
    reports = list(verify_chains(chains, _noted_heads(args.heads)))
    signed = None if signatures is None else signatures.report(is_noted=bool(args.heads))
    total = merge_reports(report for _, report in reports)
    code = ExitCode.USAGE if total.flaw or (signed and signed.flaws) else ExitCode.OK
    noted = {writer: f"{writer}:{report.noted}" for writer, report in reports if report.noted}
    if screen.as_json:
        writers = [
            {"writer": writer, "ok": report.flaw is None, **to_builtins(report), "noted": noted.get(writer, "")}
            for writer, report in reports
        ]
        document = {"file": name, "ok": not code, **to_builtins(total), "writers": writers}
        screen.data(document if signed is None else {**document, "signatures": to_builtins(signed)})
        return code
    verdict = screen.paint("bad", "red") if code else screen.paint("good", "green")
    screen.write(f"{escape(name, lines=False)}: {verdict}: {total.records} records of {len(reports)} writers")
    for writer, report in reports:
        places = f", {report.first} to {report.last}" if report.records else ""
        if report.flaw:
            screen.write(f"  writer {one_line(writer, 64)}: bad: {report.records} records{places}")
            text = one_line(report.flaw.text, 600)
            screen.write(f"    record {report.flaw.number} ({one_line(report.flaw.place, 200)}): {text}")
        if report.bad > 1:
            screen.write(f"    and {report.bad - 1} more such places")
    if signed is not None:
        print_signatures(signed, screen)
    _show_remains(total, screen)
    for head in noted.values():
        screen.write(f"  head {one_line(head, 200)}")
    return code


def _noted_heads(file: str | None) -> dict[str, str]:
    """Return the heads in an earlier output of `verify`, by their writers."""
    if not file:
        return {}
    try:
        text = Path(file).read_text("utf-8", "replace")
    except OSError as problem:
        raise UsageError(f"--heads: {file}: {problem.strerror}") from None
    heads = dict(NOTED_HEAD.findall(text))
    if not heads:
        raise UsageError(f"--heads: {file}: no head is in it, such as `handrail audit verify` prints of a database")
    return heads


def _verify(trail: TrailFile, path: Path | str, args: Namespace, screen: Screen) -> ExitCode:
    signatures = signature_check(lambda: [("", trail.lines())], args)
    chains = [("", trail.lines())]
    [(_, lines)] = chains if signatures is None else signatures.watch(chains)
    try:
        result = verify(lines, head=args.head or "")
    except ValueError as problem:
        raise UsageError(f"--head: {problem}") from None
    signed = None if signatures is None else signatures.report(is_noted=bool(args.head))
    code = ExitCode.USAGE if result.flaw or trail.damage or (signed and signed.flaws) else ExitCode.OK
    if screen.as_json:
        report = {"file": str(path), "ok": not code, "damage": trail.damage, **to_builtins(result)}
        screen.data(report if signed is None else {**report, "signatures": to_builtins(signed)})
        return code
    verdict = screen.paint("bad", "red") if code else screen.paint("good", "green")
    is_begun = result.flaw is not None and result.flaw.place == BEGINNING and result.bad == 1
    if is_begun and not trail.damage and not (signed and signed.flaws):
        verdict = screen.paint("incomplete", "yellow")
    places = f", {result.first} to {result.last}" if result.records else ""
    screen.write(f"{escape(str(path), lines=False)}: {verdict}: {result.records} records{places}")
    if result.flaw:
        screen.write(f"  {defect_text(result.flaw)}")
    if result.bad > 1:
        screen.write(f"  and {result.bad - 1} more such places")
    if signed is not None:
        print_signatures(signed, screen)
    if trail.damage:
        screen.write(f"  {escape(trail.damage, lines=False)}; `handrail audit export --salvage` reads what is left")
    if result.torn:
        screen.write(f"  the last {result.torn} bytes are a record that was never finished")
    _show_remains(result, screen)
    if result.head:
        screen.write(f"  head {result.noted}")
    return code


def _show_remains(result: VerifyReport, screen: Screen) -> None:
    if result.unfinished:
        names = one_line(", ".join(result.unfinished), 400)
        screen.write(f"  {len(result.unfinished)} calls have begun and not ended: {names}")
    if result.missed:
        screen.write(f"  {result.missed} records could not be written, as the trail says itself")
