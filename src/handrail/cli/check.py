"""Verbs about `handrail.toml`: `check` prints the settings in force, `explain` a decision, `keys` new API keys."""

from __future__ import annotations

import asyncio
import os
import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from msgspec import Struct, to_builtins

from handrail.cli.arguments import parse_arguments, parse_document, unknown_name
from handrail.cli.engines import reports_of, risks_of
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.gateway import UpstreamSource, source_of
from handrail.cli.host_config import mask_values
from handrail.cli.load_server import CommandConfig
from handrail.cli.terminal import Screen, json_text
from handrail.cli.trust import see_upstreams
from handrail.config import SECTIONS, Config
from handrail.engine.catalog import ToolEntry
from handrail.guards.identity import ApiKeys
from handrail.guards.limits import ANONYMOUS, LOCAL, CallerSlots, Plans, Rates
from handrail.guards.policy import Policy, SubjectKind
from handrail.model import Object, Principal
from handrail.revisions import REVISIONS
from handrail.schema.repair import repair
from handrail.server import Server
from handrail.stores import is_url, public_url
from handrail.text.controls import mask, mask_words, one_line

__all__ = ["run_check", "run_explain", "run_keys"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_KINDS: dict[str, SubjectKind] = {"call": "tool", "read": "resource", "prompt": "prompt"}
Row = tuple[str, str, str]


def run_check(args: Namespace, screen: Screen) -> int:
    command_config = CommandConfig(args, args.target)
    config, policy, server_guards = command_config.config, command_config.config.policy(), dict[str, Any]()
    warnings, source, server = policy.warnings + command_config.self_approval_warnings(None), "", None
    if args.target or config.server.target or config.upstreams:
        served = source_of(args, command_config, args.target)
        source = served.label
        if isinstance(served, UpstreamSource):  # nothing is started, or asked
            served.plans()
            warnings += [f"{name} is left out: {reason}" for name, reason in served.left_out.items()]
        else:
            server = served.load()
    if server is not None:
        server_guards = {
            name: value for name, value in server.engine.guard_options.items() if not command_config.mentions(name)
        }
        command_config.apply_guards(server)
        policy = server.engine.guard_set.policy
        warnings = command_config.warnings(server, server.engine.catalogs.values())
    guards = {} if server is None else server.engine.guard_options
    engines = reports_of({name: guards.get(name) or getattr(config, name).url for name in ("store", "audit")})
    signed_by, problems = _signing(config, server_guards)
    warnings = [*warnings, *risks_of(engines), *problems]
    has_key = "HANDRAIL_KEY" in os.environ if server is None else server.engine.has_shared_key
    if "store" in engines and engines["store"].place.startswith("redis") and not has_key:
        warnings.append("HANDRAIL_KEY is not set, so a server that shares this store does not start: all need one key")
    if screen.as_json:
        over_http, over_stdio = command_config.approvers(server)
        report = {
            "file": str(command_config.path or ""),
            "config": _without_secrets(config),
            "server": {name: _displayable(value) for name, value in server_guards.items()},
            "warnings": warnings,
            "approved_by": {"http": over_http, "stdio": over_stdio},
            "engines": {name: to_builtins(each) for name, each in engines.items()},
            "signed_by": signed_by,
        }
        screen.data(report)
        return ExitCode.OK
    path = command_config.path
    screen.write(f"{path}: all right" if path else "no handrail.toml: what is built in is in force")
    rows = _settings(command_config, {section for name in server_guards for section in SECTIONS.get(name, {name})})
    rows += [
        (name, source, json_text(_displayable(value))) for name, value in server_guards.items() if name != "policy"
    ]
    rows.append(_approvers_row(command_config, server, source if "approvals" in server_guards else ""))
    if signed_by:
        rows.append(("the audit log is signed by", source if "trail" in server_guards else str(path), signed_by))
    whose = source if "policy" in server_guards else str(path)
    for number, rule in enumerate(policy.decisions, 1):
        rows.append((f"rules[{number}]", whose, f"{rule.rule}: {rule.verdict} if {rule.why}"))
    for name, each in engines.items():
        rows.append((f"{name} is kept in", each.place, f"{each.engine}, {each.round_trip_ms:.1f} ms away"))
    screen.table(rows, indent="  ", styles=("bold", "dim"))
    for warning in warnings:
        screen.note(f"careful: {warning}")
    return ExitCode.OK


def _approvers_row(command_config: CommandConfig, server: Server | None, source: str) -> Row:
    over_http, over_stdio = command_config.approvers(server)
    set_in = source or (str(command_config.path) if command_config.mentions("approvals") else "built in")
    return "calls are approved by", set_in, f"{over_http} over HTTP, {over_stdio} over standard input"


def _signing(config: Config, server_guards: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the public key that signs the audit log, and what is wrong with the keys and the second file.

    Only a log in a database of others is said to be unsigned: a file is in the hands of those who could read its key.
    """
    settings = server_guards.get("trail", config.audit.kept).checkpoints
    audit = server_guards.get("audit", config.audit.url or config.audit.file)
    if not settings.key:
        return ("no key: all who may write to the database could write it anew" if is_url(audit) else ""), []
    from handrail.audit.signing import load_signing_key  # deferred: it needs the extra `signing`

    public, problems = "", []
    for name in ("previous_key", "key"):
        try:
            public = load_signing_key(source).public if (source := getattr(settings, name)) else public
        except ValueError as problem:
            public = ""
            problems.append(f"audit.kept.checkpoints.{name}: the audit log is not signed: {problem}")
    if settings.file and not Path(settings.file).parent.is_dir():
        problems.append(f"audit.kept.checkpoints.file: there is no folder {Path(settings.file).parent}")
    elif (
        settings.file
        and audit
        and not is_url(audit)
        and Path(settings.file).parent.resolve() == Path(audit).parent.resolve()
    ):
        problems.append("audit.kept.checkpoints.file: it is beside the audit log; a copy elsewhere is worth more")
    return public, problems


def _settings(command_config: CommandConfig, others: set[str]) -> list[Row]:
    """Return name, origin and value of each setting; the sections in `others` are not in force."""
    rows: list[Row] = []
    config, document = command_config.config, _without_secrets(command_config.config)
    for section in config.__struct_fields__:
        value, written = getattr(config, section), command_config.raw.get(section)
        if section == "rules" or section in others:
            continue
        keys = value.__struct_fields__ if isinstance(value, Struct) else ("",)
        for key in keys:
            is_written = written is not None and (not key or key in written)
            setting = document[section][key] if key else document[section]
            name = f"{section}.{key}" if key else section
            origin = command_config.origins.get(name, str(command_config.path) if is_written else "built in")
            rows.append((name, origin, json_text(setting)))
    return rows


def _without_secrets(config: Config) -> Object:
    """Return a configuration as JSON, without what may be a secret."""
    document: Object = {**to_builtins(config), "upstreams": _masked(config)}
    for section in ("store", "audit"):
        document[section]["url"] = public_url(document[section]["url"])
    signing = document["audit"]["kept"]["checkpoints"]
    signing |= {name: " ".join(mask_words(signing[name].split())) for name in ("key", "previous_key")}
    signing["webhook"] = public_url(signing["webhook"])
    return document


def _masked(config: Config) -> Object:
    """Return the upstreams without the values of headers and variables, which may be secrets."""
    upstreams = {name: to_builtins(each) for name, each in config.upstreams.items()}
    for each in upstreams.values():
        each |= {key: mask_values(each[key]) for key in ("headers", "env")}
        if each["auth"] is not None:
            each["auth"] |= mask_values({"client_secret": each["auth"]["client_secret"]})
        each |= {"command": mask_words(words) if isinstance(words := each["command"], list) else mask(words)}
        each |= {"url": mask(each["url"].partition("?")[0])}  # a query often holds a key
    return upstreams


def _displayable(value: Any) -> Any:
    """Return a setting from Python code as JSON, as far as possible."""
    if isinstance(value, Policy):
        return [to_builtins(each) for each in value.decisions]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Struct):
        return to_builtins(value)
    return one_line(public_url(value) if is_url(value) else str(value), 200)


# `handrail explain` runs and writes nothing


def run_explain(args: Namespace, screen: Screen) -> int:
    command_config = CommandConfig(args, args.server)
    source = source_of(args, command_config, args.server, "add --server FILE")
    server = source.load()
    command_config.apply_guards(server)
    if server.upstreams:
        asyncio.run(see_upstreams(server))
    if args.revision not in REVISIONS:
        raise UsageError(f"--revision: {args.revision!r} is not one of {', '.join(REVISIONS)}")
    if (missing := _missing_stage(server, args)) is not None:
        _print_stages([missing], screen)
        return ExitCode.DENIED
    entry, call_arguments = _find(server, args)
    principal = Principal(args.as_, frozenset(args.scope))
    by = command_config.approvers(server)[args.as_ == LOCAL]
    stages, allowed = _stages(server, entry, principal, call_arguments, args.revision, by)
    stages.append(_audit(command_config, server))
    _print_stages(stages, screen)
    return ExitCode.OK if allowed else ExitCode.DENIED


def _print_stages(stages: list[Row], screen: Screen) -> None:
    if screen.as_json:
        screen.data([{"stage": stage, "verdict": verdict, "why": why} for stage, verdict, why in stages])
    else:
        screen.table(stages, styles=("bold",))


def _missing_stage(server: Server, args: Namespace) -> Row | None:
    """Return why a tool of an upstream server is not offered; None if it is, or if no upstream has it."""
    name, (entry, _) = args.name, server.engine.find(_KINDS[args.action], args.name)
    if entry is not None and not entry.withheld:
        return None
    for upstream in server.upstreams.values():
        for tool in upstream.tools:
            if tool.name == name and tool.reason:
                return "find", tool.state, f"{tool.own_name} of {upstream.name}: {tool.reason}"
        if upstream.sign_in is not None and name.startswith(upstream.terms.prefix) and not upstream.tools:
            text = f"{upstream.name} lists its tools to each caller that has signed in ({upstream.sign_in.entry.name})"
            return "find", "unknown", text
        if upstream.problem and name.startswith(upstream.terms.prefix) and not upstream.tools:
            return "find", "down", f"{upstream.name} lists nothing: {upstream.problem}"
    return None


def _find(server: Server, args: Namespace) -> tuple[ToolEntry, Object]:
    """Return the entry that a request would use, and its arguments."""
    engine, kind = server.engine, _KINDS[args.action]
    entry, variables = engine.find(kind, args.name)
    if entry is None:
        catalogs: dict[str, Iterable[ToolEntry]] = {"tool": engine.catalog, "prompt": engine.prompts}
        names = catalogs.get(kind, [*engine.resources, *engine.templates])
        raise unknown_name(kind, args.name, [each.name for each in names])
    if kind == "resource":
        return entry, variables
    if args.arguments_json is not None:
        return entry, parse_document(args.arguments_json)
    return entry, parse_arguments(args.words, {**entry.tool.input_schema, "required": []})


def _audit(command_config: CommandConfig, server: Server) -> Row:
    audit, own = command_config.config.audit, server.engine.guard_options.get("audit")
    if own is not None and not command_config.mentions("audit"):
        return "audit", "on", public_url(str(own)) if isinstance(own, str | Path) else "where its author wants it"
    return "audit", "on" if audit.on else "off", public_url(audit.url) or audit.file or "in the state folder"


def _limits(server: Server, principal: Principal, tool: str) -> list[str]:
    """Return all limits that apply to these calls."""
    rates, find = server.engine.guard_options.get("rates", Rates()), server.engine.guard_set.find_limit
    if rates is None:
        return []
    plan = Plans(rates, find)[tool]
    charges = {LOCAL: plan.local_charges, ANONYMOUS: plan.address_charges}.get(principal.id, plan.principal_charges)
    slots = [f"{plan.slots} of {plan.owner} at once"] if plan.slots else []
    share = CallerSlots(rates, find).max_slots(principal.id, tool)
    shares = [f"{share} of {plan.owner} at once for one caller"] if share else []
    return [each.limit for each in charges] + slots + shares


def _stages(
    server: Server, entry: ToolEntry, principal: Principal, call_arguments: Object, revision: str, approver: str
) -> tuple[list[Row], bool]:
    gate, policy = server.engine.guard_set, server.engine.guard_set.policy
    hide_decision = policy.hides(principal, entry.subject, revision)
    stages: list[Row] = []
    if hide_decision is not None:
        why = f"answered as an unknown {entry.kind} by {hide_decision.rule}: {hide_decision.why}"
        return [("find", "hidden", why)], False
    if not entry.scopes <= principal.scopes:
        lacking = ", ".join(sorted(entry.scopes - principal.scopes))
        return [("find", "hidden" if entry.hide else "forbidden", f"its author wants the scope {lacking}")], False
    stages.append(("find", "listed", "for this caller"))
    limits = _limits(server, principal, entry.limit_name)
    stages.append(("limit", "on" if limits else "off", ", ".join(limits)))
    if entry.input.valid(call_arguments):
        stages.append(("validate", "valid", ""))
    else:
        is_text = entry.kind != "tool"  # variables of templates and arguments of prompts come as texts
        repair_result = repair(entry.input, call_arguments) if gate.repairs or is_text else None
        if repair_result is None:
            stages.append(("validate", "refused", entry.bad_arguments(call_arguments).text))
            return stages, False
        call_arguments = repair_result[0]
        repaired = ", ".join(each.path for each in repair_result[1])
        stages.append(("validate", "valid" if is_text else "repaired", repaired))
    for name, matched, why in policy.explain(principal, entry.subject, call_arguments, revision):
        stages.append((f"rule {name}", "matches" if matched else "does not", why))
    decision = policy.decide(principal, entry.subject, call_arguments, revision)
    stages.append(("decide", decision.verdict, f"by {decision.rule}: {decision.why}"))
    if decision.verdict == "deny":
        return stages, False
    if decision.verdict == "ask":
        options = gate.approval_queue.options
        stages.append(("approve", approver, f"held {options.wait:g} s, void after {options.expires:g} s"))
    stages.append(("run", "not now", "this only explains"))
    stages.append(("sanitize", "off" if gate.sanitizer is None else "on", ""))
    return stages, True


# `handrail keys`


def run_keys(args: Namespace, screen: Screen) -> int:
    if args.what == "seal":
        if args.name or args.scopes is not None:
            raise UsageError("keys seal takes no name and no scopes: handrail keys seal")
        key = token_urlsafe(32)
        if screen.as_json:
            screen.data({"key": key})
        else:
            screen.write(key)
        return ExitCode.OK
    if not args.name:
        raise UsageError("keys new: NAME is missing: handrail keys new NAME --scopes orders:read,orders:write")
    scopes = re.split(r"[\s,]+", args.scopes.strip()) if args.scopes is not None else []
    if not all(scopes):
        raise UsageError(f"--scopes: {args.scopes!r} is not a list of scopes with commas between them")
    key, hashed = ApiKeys.new()
    try:
        ApiKeys({args.name: hashed}, scopes={args.name: scopes})
    except ValueError as wrong:
        raise UsageError(f"keys new: {wrong}") from None
    toml = _key_toml(args.name, hashed, scopes)
    if screen.as_json:
        screen.data({"name": args.name, "key": key, "hash": hashed, "scopes": scopes, "toml": toml})
        return ExitCode.OK
    screen.write(
        f"# The API key of {args.name}, printed only once. Send it as `--key KEY`, or `Authorization: Bearer KEY`."
    )
    screen.write(f"{key}\n")
    screen.write("# For handrail.toml. If the section exists already, add only the line.")
    screen.write(toml.rstrip("\n"))
    return ExitCode.OK


def _key_toml(name: str, hashed: str, scopes: list[str]) -> str:
    name = name if _BARE_KEY.fullmatch(name) else f'"{name}"'
    text = f'[identities.keys]\n{name} = "{hashed}"\n'
    return f"{text}\n[identities.scopes]\n{name} = {json_text(scopes)}\n" if scopes else text
