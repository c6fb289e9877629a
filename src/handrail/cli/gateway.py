"""`handrail gateway`: the servers of an `mcpServers` file, of `--server` and of `[upstreams]`, behind our guards."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Unpack, cast

from msgspec import Struct
from msgspec.structs import replace

from handrail.cli.connect import consent_to_entry, target_of
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.load_server import POLL_SECONDS, CommandConfig, ServedSource, Stamp, file_stamp
from handrail.cli.serve import listen_at, serve
from handrail.cli.terminal import Screen
from handrail.client.mcp_config import EntryError, MissingVariable, ServerEntry, fill_in, load
from handrail.client.state_dir import Consents, StateDirectory, state_folder
from handrail.config import ConfigError, load_config
from handrail.engine.core import ServerOptions
from handrail.errors import Denied, HandrailError
from handrail.gateway.settings import UpstreamOptions, UpstreamSettings
from handrail.schema.jsonable import pointer
from handrail.server import Server
from handrail.text.controls import mask, mask_words

if TYPE_CHECKING:
    from handrail.gateway.upstreams import Upstreams

__all__ = ["UpstreamSource", "records_of", "run_gateway", "source_of"]

LOCK_FILE = "tools.lock"
KEY_FILE = "sign-in-key.json"  # in the state folder
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_IN_PREFIX = re.compile(r"[^A-Za-z0-9_-]")
_CANNOT_INCLUDE = (HandrailError, ValueError, TypeError, OSError, ModuleNotFoundError)


def run_gateway(args: Namespace, screen: Screen) -> int:
    if args.adopt or args.undo:
        from handrail.cli.adopt import run_adopt  # few start it

        return run_adopt(args, screen)
    command_config = CommandConfig(args, args.target)
    address, _ = listen_at(args, command_config)
    # A host that starts the gateway may have a terminal of its own: a question would disturb its screen.
    can_ask = screen.is_attended and (args.agree or address is not None or sys.stdin.isatty())
    source = UpstreamSource(args, command_config, screen if can_ask or args.yes else None)
    if args.agree:
        if refused := [each.name for each in source.plans() if not source.agrees(each)]:
            raise Denied(f"not agreed to: {', '.join(refused)}; a terminal asks about each, --yes agrees to all")
        screen.note("agreed to all of them")
        return ExitCode.OK
    server = source.load()
    source.report(screen)
    source.write_record(server)
    server.alongside(lambda: source.following(server, screen))
    return serve(server, source, server.engine.catalogs.values(), command_config, args, screen)


class UpstreamPlan(Struct, frozen=True):
    """An upstream server as it is configured: what `Server.include` takes, and its settings."""

    name: str
    thing: Any
    settings: UpstreamSettings = UpstreamSettings()
    written: ServerEntry | None = None  # in `handrail.toml`, with its variables

    @property
    def prefix(self) -> str:
        prefix = self.settings.prefix
        return f"{_NOT_IN_PREFIX.sub('_', self.name)}_" if prefix is None else prefix

    def authorization(self, config_file: Path | None) -> UpstreamOptions:
        """Return the option `auth`, if the settings have one."""
        if self.settings.auth is None or config_file is None:
            return {}
        texts = {name: text for name, text in self.thing.auth.items() if name != "grant"}
        return {"auth": self.settings.auth.oauth(texts, config_file.parent)}


class UpstreamSource:
    """Where the upstream servers of a gateway are configured. `screen` is where a person is asked; None: nowhere.

    Without `pins`, what is seen is not pinned, unless the file is there already.
    """

    def __init__(
        self, args: Namespace, command_config: CommandConfig, screen: Screen | None, *, pins: bool = True
    ) -> None:
        self.file = Path(args.target).absolute() if args.target else None
        self.config_file = command_config.path and command_config.path.absolute()
        self.path = self.file or self.config_file
        self.label = args.target or ""
        self.name = args.name or "gateway"
        self.left_out: dict[str, str] = {}  # why an upstream is not included, by its name
        self._args = args
        self._config = command_config.config
        self.sign_in_store = command_config.approval_place()
        self._screen = screen
        self._pins = pins
        self._current: dict[str, UpstreamPlan] = {}  # what is included
        self._state = StateDirectory(state_folder(os.environ))
        self._stamps = self._file_stamps()
        if self.file is not None and not self.file.is_file():
            raise UsageError(f"{args.target}: no such file; it is a .json file with `mcpServers`")

    @property
    def lock(self) -> Path:
        """The file that pins the tools: beside the configuration, or in the state folder."""
        beside = self.config_file or self.file
        if beside is not None and (os.access(beside.parent, os.W_OK) or (beside.parent / LOCK_FILE).exists()):
            return beside.parent / LOCK_FILE
        return self._state.folder / f"{self._key}.{LOCK_FILE}"

    @property
    def _key(self) -> str:
        parts = [self.name, str(self.path or ""), *self._args.server]
        return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    # What is configured

    def plans(self) -> list[UpstreamPlan]:
        """Return the upstreams that can be used, in their order; the reasons of the others go to `left_out`."""
        self.left_out = {}
        plans = []
        for plan, missing in self._plans_of_files():
            if unset := {each.variable: None for each in missing if each.entry == plan.name}:
                self.left_out[plan.name] = f"the variable {', '.join(unset)} is not set"
            else:
                plans.append(plan)
        plans += map(_plan_of_words, self._args.server)
        names = [each.name for each in plans]
        if twice := next((each for each in names if names.count(each) > 1), None):
            raise UsageError(f"two servers are called {twice!r}; their names are the beginnings of their tools' names")
        return plans

    def _plans_of_files(self) -> Iterator[tuple[UpstreamPlan, list[MissingVariable]]]:
        if self.file is not None:
            entries, missing = load(self.file, os.environ)
            yield from ((UpstreamPlan(each.name, each), missing) for each in entries if not each.disabled)
        for name, settings in self._config.upstreams.items():
            assert self.config_file is not None
            written, _ = _entry_of(name, settings, self.config_file, None)
            entry, missing = _entry_of(name, settings, self.config_file, os.environ)
            yield UpstreamPlan(name, entry, settings, written), missing

    def agrees(self, plan: UpstreamPlan) -> bool:
        """Return whether a person has agreed to what a file starts or connects to; ask, where that can be (P-28)."""
        entry, consents = plan.thing, Consents(self._state)
        if not isinstance(entry, ServerEntry) or not entry.source or consents.has_consent(entry):
            return True
        if self._screen is None or not consent_to_entry(self._args, self._screen, consents, entry, plan.written):
            return False
        consents.add(entry)
        return True

    # The server

    def load(self, names: Collection[str] = (), **options: Unpack[UpstreamOptions]) -> Server:
        """Return a server that includes the upstreams, or those of these names; UsageError if there is none."""
        self._state.prepare()
        plans = self.plans()
        server = Server(self.name, **self._key_options(plans))
        if unknown := [each for each in names if each not in (*(plan.name for plan in plans), *self.left_out)]:
            there = f"there are {', '.join(each.name for each in plans)}" if plans else "there is none"
            raise UsageError(f"no upstream server is called {unknown[0]!r}; {there}")
        for plan in plans:
            if not names or plan.name in names:
                try:
                    configured = self._options(plan)
                    configured.update(options)
                    server.include(plan.thing, prefix=plan.prefix, **configured)
                    self._current[plan.name] = plan
                except _CANNOT_INCLUDE as problem:
                    self.left_out[plan.name] = str(problem)
        if not server.upstreams:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in self.left_out.items())
            hint = "name a FILE.json, or add --server NAME='COMMAND', or [upstreams.NAME] to handrail.toml"
            raise UsageError(f"no upstream server can be used{reasons}" if reasons else f"no upstream server: {hint}")
        return server

    def _key_options(self, plans: list[UpstreamPlan]) -> ServerOptions:
        """Return the key that seals the sign-ins of callers, if there may be some: the next process opens them."""
        has_users = any(plan.settings.auth is not None and plan.settings.auth.grant == "user" for plan in plans)
        if not has_users or "HANDRAIL_KEY" in os.environ:
            return {}
        if not isinstance(self._state.read(KEY_FILE), str):
            self._state.write(KEY_FILE, token_urlsafe(48))
        return {"keys": [self._state.read(KEY_FILE).encode()]}

    def _options(self, plan: UpstreamPlan) -> UpstreamOptions:
        """Return the options of an upstream; Denied if nobody has agreed to it."""
        if not self.agrees(plan):
            config = ["--config", self._args.config] if self._args.config else []
            command = shlex.join(["handrail", "gateway", *filter(None, [self.label]), *config, "--agree"])
            raise Denied(f"nobody has agreed to what the file starts here; this shows it and asks: {command}")
        return {
            **plan.settings.options(),
            **plan.authorization(self.config_file),
            "name": plan.name,
            "trusted": plan.settings.trusted or self._args.trust,
            "agree": lambda entry: True,
            "lock": self.lock if self._pins or self.lock.exists() else None,
        }

    def report(self, screen: Screen) -> None:
        for name, reason in self.left_out.items():
            screen.note(f"{name}: left out: {mask(reason)}")

    # While it runs

    @asynccontextmanager
    async def following(self, server: Server, screen: Screen) -> AsyncIterator[None]:
        """Apply edits of the files to the upstreams that they touch."""
        task = asyncio.create_task(self._follow(server, screen))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _follow(self, server: Server, screen: Screen) -> None:
        self._screen = None  # nobody is asked while it serves
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (stamps := self._file_stamps()) == self._stamps:
                continue
            self._stamps = stamps
            try:
                if self.config_file is not None:
                    self._config = load_config(self.config_file)
                plans = {each.name: each for each in self.plans()}
            except HandrailError as problem:
                screen.note(f"{problem}; the upstream servers stay as they were")
                continue
            await self._apply(cast("Upstreams", server.engine.upstreams), plans)
            self.report(screen)

    async def _apply(self, upstreams: Upstreams, plans: dict[str, UpstreamPlan]) -> None:
        for name in self._current.keys() - plans.keys():
            await upstreams.remove(name)
            del self._current[name]
        for name, plan in plans.items():
            if self._current.get(name) == plan:
                continue
            try:
                options = self._options(plan)
                if name in upstreams.by_name:
                    await upstreams.replace(name, plan.thing, plan.prefix, options)
                else:
                    upstreams.include(plan.thing, plan.prefix, options)
                self._current[name] = plan
            except _CANNOT_INCLUDE as problem:
                self.left_out[name] = str(problem)
                if name not in upstreams.by_name:
                    self._current.pop(name, None)

    def _file_stamps(self) -> list[Stamp | None]:
        return [file_stamp(each) for each in (self.file, self.config_file) if each is not None]

    def write_record(self, server: Server) -> None:
        """Note for `handrail trust NAME` how this gateway is configured, unless there is a secret in its words."""
        words = self._args.server
        if mask_words(words) == words:
            record = {
                "name": self.name,
                "target": str(self.file or ""),
                "server": words,
                "upstreams": [*server.upstreams],
            }
            self._state.write(f"gateway-{self._key}.json", {**record, "config": str(self.config_file or "")})


def records_of(upstream: str) -> list[dict[str, Any]]:
    """Return the words of the gateways that have run here with an upstream of this name."""
    state = StateDirectory(state_folder(os.environ))
    records = [state.read(each.name) for each in sorted(state.folder.glob("gateway-*.json"))]
    return [each for each in records if isinstance(each, dict) and upstream in each.get("upstreams", ())]


def source_of(
    args: Namespace, command_config: CommandConfig, target: str | None, by: str = "name a FILE"
) -> ServedSource:
    """Return the server of a command: those of a .json file and of `[upstreams]` stand behind a gateway."""
    config = command_config.config
    if (target or "").endswith(".json") or (not target and config.upstreams and not config.server.target):
        words = Namespace(target=target, server=[], trust=False, name=None, config=args.config)
        return UpstreamSource(words, command_config, None, pins=False)
    return command_config.server_file(target, by)


def _plan_of_words(words: str) -> UpstreamPlan:
    name, _, text = words.partition("=")
    if not text or not _NAME.fullmatch(name):
        word = mask_words([words])[0]
        raise UsageError(f"--server {word!r}: not NAME='COMMAND' or NAME=https://…, such as fs='npx -y server'")
    thing = target_of(text)
    if isinstance(thing, Path) and thing.suffix == ".json":
        raise UsageError(f"--server {name}: {thing} is a file of servers: handrail gateway {thing}")
    return UpstreamPlan(name, thing)


def _entry_of(
    name: str, settings: UpstreamSettings, path: Path, environ: Mapping[str, str] | None
) -> tuple[ServerEntry, list[MissingVariable]]:
    """Return a section of `handrail.toml` as an entry of that file, with its variables substituted."""
    try:
        command = shlex.split(settings.command) if isinstance(settings.command, str) else settings.command
        members: dict[str, Any] = {"command": command[0], "args": command[1:]} if command else {}
        members |= {"url": settings.url} if settings.url else {}
        members |= {"headers": settings.headers, "env": settings.env}
        [entry], missing = load({"mcpServers": {name: members}}, environ)
        if (auth := settings.auth) is not None:
            if not settings.url:
                raise ConfigError(f"{path}: upstreams.{name}.auth: a command has no authorization over HTTP; use env")
            texts, unset = fill_in(auth.texts, pointer("/mcpServers", name) + "/auth", name, environ)
            entry, missing = replace(entry, auth={"grant": auth.grant, **texts}), missing + unset
    except EntryError as problem:
        text = "; ".join(each.replace("/mcpServers/", "upstreams.", 1) for each in problem.problems)
        raise ConfigError(f"{path}: {text}") from None
    except ValueError as problem:
        raise ConfigError(f"{path}: upstreams.{name}.command: {problem}") from None
    folder = str(path.parent / settings.cwd) if command else ""
    return replace(entry, source=str(path), cwd=folder), missing
