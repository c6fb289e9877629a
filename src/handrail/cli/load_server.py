"""A server in a Python file: import it, and with `--reload` import it again when the file has changed.

With `--reload`, what runs is a server of our own that includes the file's. When a file changes, it is imported anew,
the lifespan of the new server is entered, the tools are exchanged in one turn of the loop, and the old lifespan is left
when the last of its calls has ended. The connections belong to our server. Clients notice only that the list has
changed.

The configuration of a command, and the guards that a server has when it is served with it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from importlib import invalidate_caches
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, cast

from handrail import stores
from handrail.cli.exit_codes import UsageError
from handrail.client.state_dir import StateDirectory, state_folder
from handrail.config import FILE_NAME, SECTIONS, ConfigError, document, read
from handrail.engine.call import Call
from handrail.engine.catalog import Catalog
from handrail.engine.fleet import servers_in
from handrail.engine.guard_set import GuardOptions
from handrail.engine.pipeline import Handler
from handrail.engine.results import TOOL as READ_MORE, smallest_cap
from handrail.guards.policy import LintedSubject, lint_rules, lint_settings
from handrail.guards.sanitize import Sanitize
from handrail.model import ToolResult
from handrail.server import Server
from handrail.stores import Store, is_url, public_url
from handrail.suggest import closest

__all__ = ["CommandConfig", "ServedSource", "ServerFile", "file_stamp", "reloading_server", "settings_for"]

Stamp = tuple[int, int, int]

POLL_SECONDS = 0.5

# Not reloaded: the keys, because clients hold cursors sealed with them, and `workers` and `tracing`.
_RELOADED_ATTRIBUTES = (
    "author_metadata identity instructions limits page_size list_changed identify ttl_ms forms".split()
)
_COPIED_ATTRIBUTES = "offer has_tools seal".split()


class ServedSource(Protocol):
    """Where a server of a command comes from."""

    label: str  # as the command line has it

    @property
    def path(self) -> Path | None:
        """Its file, if it has one."""

    def load(self) -> Server: ...


class ServerFile:
    """`FILE[:OBJECT]`. It is loaded by an import: its folder is on `sys.path`, and it is not `__main__`."""

    def __init__(self, target: str) -> None:
        file, colon, name = target.rpartition(":")
        if not colon or not name.isidentifier() or len(file) < 2 or Path(target).is_file():  # "C:server" is a file
            file, name = target, ""
        self.path = Path(file).absolute()
        self.object = name
        self.label = file
        stem = self.path.stem
        is_reserved = stem in sys.modules or stem in sys.stdlib_module_names or not stem.isidentifier()
        self._module = f"handrail_served_{stem}" if is_reserved else stem
        self._stamps: dict[Path, Stamp] = {}
        self._broken = False

    def load(self) -> Server:
        """Import the file and return its server; UsageError if that fails.

        Each load imports every module of the file's folder anew. If that fails, the earlier modules stay.
        """
        before, stamps = self._modules(), self._file_stamps(everything=True)
        for name in before:
            del sys.modules[name]
        invalidate_caches()  # of the folder
        self._broken = True
        try:
            server = self._server(self._import())
            server.engine.guard_set.served_file = str(self.path.resolve())
            self._broken = False
            return server
        finally:
            if self._broken:
                for name in self._modules():
                    del sys.modules[name]
                sys.modules.update(before)
            # After a failure all files of the folder count: any of them may repair it.
            now = self._file_stamps(everything=self._broken)
            # The stamps from before the import: a change during the import counts.
            self._stamps = now | {path: stamp for path, stamp in stamps.items() if path in now}

    def has_changed(self) -> bool:
        """Return True if a file of the server has changed since it was loaded, or since the last call."""
        now, before = self._file_stamps(everything=self._broken), self._stamps
        self._stamps = before | now  # a missing file is just being replaced
        return any(before.get(path, None if self._broken else stamp) != stamp for path, stamp in now.items())

    def _file_stamps(self, *, everything: bool) -> dict[Path, Stamp]:
        """Return the stamps of the imported files; with `everything`, also of all others in the folder."""
        files = {self.path, *(Path(module.__file__) for module in self._modules().values() if module.__file__)}
        if everything:
            files.update(self.path.parent.glob("*.py"))
        return {path: stamp for path in files if (stamp := file_stamp(path))}

    def _modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in list(sys.modules.items()) if self._is_ours(name, module)}

    def _is_ours(self, name: str, module: ModuleType) -> bool:
        if name == self._module:
            return True
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not file or top in ("handrail", "__main__") or top in sys.stdlib_module_names:
            return False
        path, folder = Path(file), self.path.parent
        between = path.relative_to(folder).parts if path.is_relative_to(folder) else (".",)
        # A virtual environment in the folder does not count.
        return not any(part.startswith(".") or part.endswith("-packages") for part in between)

    def _import(self) -> ModuleType:
        if not self.path.is_file():
            kind = "a folder; name a Python file in it" if self.path.is_dir() else "no such file"
            raise UsageError(f"{self.label}: {kind}")
        if (folder := str(self.path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        loader = SourceFileLoader(self._module, str(self.path))
        spec = spec_from_file_location(self._module, self.path, loader=loader)
        assert spec is not None
        module = sys.modules[self._module] = module_from_spec(spec)
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as problem:
            problem.__traceback__ = _user_frames(problem.__traceback__)
            traceback_text = "".join(traceback.format_exception(problem))
            raise UsageError(f"{self.label}: cannot be imported: {type(problem).__name__}", traceback_text) from None
        return module

    def _server(self, module: ModuleType) -> Server:
        names = vars(module)
        names_by_server: dict[Server, str] = {}
        for name, value in names.items():
            if isinstance(value, Server):
                names_by_server.setdefault(value, name)
        if self.object and self.object not in names:
            near = closest(self.object, names)
            servers = f"; there are the servers {', '.join(names_by_server.values())}" if names_by_server else ""
            hint = f"; did you mean {near!r}?" if near else servers
            raise UsageError(f"{self.label}: there is no {self.object!r} in it{hint}")
        if self.object:
            value = names[self.object]
            if isinstance(value, Server):
                return value
            servers = f"; {', '.join(names_by_server.values())} would be one" if names_by_server else ""
            raise UsageError(f"{self.label}:{self.object} is a {type(value).__name__}, not a Server{servers}")
        if not names_by_server:
            raise UsageError(f'{self.label}: no Server in it; `server = Server("name")` at its top level makes one')
        if len(names_by_server) > 1:
            listed = ", ".join(f"{self.label}:{name}" for name in names_by_server.values())
            raise UsageError(f"{self.label}: {len(names_by_server)} servers in it; say which one: {listed}")
        return next(iter(names_by_server))


def file_stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames from the file on: the import machinery above it tells its author nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        frames = frames.tb_next
    return frames


# Reloading


def reloading_server(source: ServerFile, server: Server, note: Callable[[str], None]) -> Server:
    """Return a server whose tools follow the file, beginning with those of `server`."""
    following = _Reloader(source, server, note)
    shell = Server(server.name, lifespan=following.lifespan, workers=server.engine.thread_pool.size)
    for name in _RELOADED_ATTRIBUTES + _COPIED_ATTRIBUTES:
        setattr(shell.engine, name, getattr(server.engine, name))
    shell.engine.guard_set.served_file = server.engine.guard_set.served_file
    shell.guard(**server.engine.guard_options)  # of the first import: guards cannot change while it serves
    shell.middleware(following.count_calls)
    return shell


class _Version:
    """One import of the file, from the start of its lifespan until its last call has ended."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls = 0
        self.replaced = False
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self.server.serving():
                self.started.set_result(None)
                await self.stop.wait()
        except Exception as problem:
            if self.started.done():
                traceback.print_exc()  # raised by the end of the lifespan: no caller waits for it
            else:
                self.started.set_exception(problem)
        finally:
            if not self.started.done():  # a lifespan can raise CancelledError too, and `_start` waits
                self.started.set_exception(RuntimeError("the lifespan was cancelled"))

    def stop_if_unused(self) -> None:
        if self.replaced and not self.calls:
            self.stop.set()


class _Reloader:
    def __init__(self, source: ServerFile, first: Server, note: Callable[[str], None]) -> None:
        self._source = source
        self._first = first
        self._note = note
        self._versions: dict[Server, _Version] = {}  # whose lifespan has not ended

    @asynccontextmanager
    async def lifespan(self, shell: Server) -> AsyncIterator[None]:
        first = await self._start(self._first)
        shell.include(first.server)
        stop = asyncio.Event()
        task = asyncio.create_task(self._follow(shell, first, stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def count_calls(self, call: Call, next: Handler) -> ToolResult:
        if not call._state.entry.via:  # a built-in tool, not one of the file
            return await next(call)
        version = self._versions[call._state.entry.via[0]]
        version.calls += 1
        try:
            return await next(call)
        finally:
            version.calls -= 1
            version.stop_if_unused()

    async def _follow(self, shell: Server, current: _Version, stop: asyncio.Event) -> None:
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), POLL_SECONDS)
                    return
                if self._source.has_changed() and (version := await self._read()):
                    current = self._swap(shell, current, version)
        finally:
            for version in self._versions.values():
                version.stop.set()
            await asyncio.wait([version.task for version in self._versions.values()])

    async def _read(self) -> _Version | None:
        """Import the file and enter its lifespan; None if that fails."""
        try:
            return await self._start(await asyncio.to_thread(self._source.load))
        except UsageError as problem:
            why, details = str(problem), problem.details
        except Exception:
            why, details = "its lifespan failed", traceback.format_exc()
        self._note(f"{why}; the tools stay as they were\n{details}".rstrip())
        return None

    async def _start(self, server: Server) -> _Version:
        version = _Version(server)
        await version.started
        self._versions = {each.server: each for each in self._versions.values() if not each.task.done()}
        self._versions[server] = version
        return version

    def _swap(self, shell: Server, old: _Version, new: _Version) -> _Version:
        """Exchange what is listed without awaiting: no message is handled in between. Return the current version."""
        before, catalogs = _definitions(shell), shell.engine.catalogs
        for method, catalog in catalogs.items():
            names = {each.name for each in new.server.engine.catalogs[method]}
            if conflicts := names & {each.name for each in catalog.entries if not each.via}:
                text = f"the server has a {catalog.kind} {min(conflicts)!r} of its own; the tools stay as they were"
                self._note(text)
                new.replaced = True
                new.stop_if_unused()
                return old
        for catalog in catalogs.values():
            for entry in catalog.entries:
                if entry.via:
                    with suppress(KeyError):  # the old version has removed it itself
                        catalog.remove(entry.name)
        shell.include(new.server)
        for name in _RELOADED_ATTRIBUTES:
            setattr(shell.engine, name, getattr(new.server.engine, name))
        self._note(f"{self._source.label} was read again: {_difference(before, _definitions(shell))}")
        if _guards(old.server) != _guards(new.server):
            self._note("its guards have changed; those of the start stay in force until the server is restarted")
        old.replaced = True
        old.stop_if_unused()
        return new


def _guards(server: Server) -> dict[str, Any]:
    """Return the guard options in a form that can be compared."""
    return {**server.engine.guard_options, "policy": server.engine.guard_set.policy.version}


def _definitions(server: Server) -> dict[tuple[str, str], Any]:
    """Return what a server lists, by kind and name."""
    catalogs, revision = server.engine.catalogs.values(), server.engine.offer.newest
    return {(each.kind, each.name): each.definition(revision) for catalog in catalogs for each in catalog}


def _difference(old: dict[tuple[str, str], Any], new: dict[tuple[str, str], Any]) -> str:
    parts = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {key for key in new.keys() & old.keys() if new[key] != old[key]},
    }
    counts = Counter(kind for kind, _ in new)
    numbers = [f"{counts[each]} {each}{'s' * (counts[each] != 1)}" for each in {"tool": 0, **counts}]
    changes = [f"{word}: {', '.join(sorted(name for _, name in keys))}" for word, keys in parts.items() if keys]
    return "; ".join([", ".join(numbers), *changes])


def settings_for(target: str | None) -> Path | None:
    """Return the `handrail.toml` beside the served file, or else that of the working folder, or None."""
    beside = [_short_path(ServerFile(target).path.parent / FILE_NAME)] if target else []
    # A file that cannot be read is an error later, not passed over here.
    return next((each for each in (*beside, Path(FILE_NAME)) if os.path.lexists(each)), None)


class CommandConfig:
    """The settings of a command: of `--config`, or of the `handrail.toml` that applies, or the built-in ones.

    `target` is the file that is served. `raw` has only the settings that the configuration file itself has.
    """

    def __init__(self, args: Namespace, target: str | None = None) -> None:
        self._only = bool(getattr(args, "config_only", False))
        if self._only and not args.config:
            raise UsageError("--config-only: which file? Name it with --config")
        self.path = Path(args.config) if args.config else settings_for(target)
        self._check_beside(ServerFile(target).path.parent if target else None)
        self.raw = {} if self.path is None else document(self.path)
        self.config = read(self.raw, str(self.path or FILE_NAME))
        self._server_name: str = getattr(args, "server_name", None) or ""
        self.origins: dict[str, str] = {}  # of the settings that are not the file's
        self._name_place("store", getattr(args, "store", None))
        self._name_place("audit", getattr(args, "audit", None))

    def _name_place(self, section: str, option: str | None) -> None:
        """Let an option, or else a variable, name a place instead of the file."""
        variable = f"HANDRAIL_{section.upper()}"
        place, origin = (option, f"--{section}") if option else (os.environ.get(variable), variable)
        if not place:
            return
        key = "url" if section == "store" or is_url(place) else "file"
        written = {name: value for name, value in self.raw.get(section, {}).items() if name not in ("url", "file")}
        value = os.path.abspath(place) if key == "file" else place
        self.raw = {**self.raw, section: {**written, key: value}}
        self.origins[f"{section}.{key}"] = origin
        try:
            self.config = read(self.raw, str(self.path or FILE_NAME))
        except ConfigError as problem:
            raise UsageError(f"{origin}: {str(problem).partition(': ')[2]}") from None

    def server_file(self, target: str | None, by: str = "name a FILE") -> ServerFile:
        if target:
            return ServerFile(target)
        if self.path is None or not self.config.server.target:
            raise UsageError(f"no server: {by}, or say `target` in the [server] section of {FILE_NAME}")
        source = ServerFile(str(self.path.parent / self.config.server.target))
        self._check_beside(source.path.parent)
        return source

    def _check_beside(self, folder: Path | None) -> None:
        """Refuse to ignore a `handrail.toml` beside the server: a person who reads it expects it to be in force."""
        if folder is None or self._only or not os.path.lexists(beside := folder / FILE_NAME):
            return
        if self.path is None or os.path.realpath(self.path) != os.path.realpath(beside):
            hint = f"leave --config out to use it, or add --config-only to use {self.path} alone"
            raise UsageError(f"{_short_path(beside)} lies beside the server and is not used: {hint}")

    def describe_guards(self, server: Server, source: ServedSource) -> str:
        """Return one line: the file that the guards are from, and what is switched off, by the file or in the code."""
        if self.path is None:
            beside = f"beside {source.path.name} or " if source.path is not None else ""
            text = f"guards: built in; there is no {FILE_NAME} {beside}in this folder"
        else:
            text = f"guards: {self.path}"
            others = os.path.lexists(FILE_NAME) and os.path.realpath(FILE_NAME) != os.path.realpath(self.path)
            text += f"; the {FILE_NAME} of this folder is not used" if others else ""
        off = self.config.disabled_guards()
        guards = server.engine.guard_options
        if not self.mentions("policy") and server.engine.guard_set.policy.destructive == "allow":
            off.append('Server(policy=Policy(destructive="allow"))')
        off += [f"Server({name}=None)" for name in ("audit", "rates", "sanitize") if guards.get(name, name) is None]
        return f"{text}; switched off: {', '.join(off)}" if off else text

    def approval_place(self) -> Path | str:
        """Return the place of the approvals, the stops and the addresses of open consoles: a file, or a URL."""
        return self.config.approval_place(state_folder(os.environ))

    async def open_store(self, place: Path | str) -> Store:
        """Open the store of an `approval_place`; where several servers have one, that of `--server-name`."""
        name = self._server_name
        if is_url(place) and not stores.is_database(str(place)) and not name:
            names = await servers_in(str(place))
            if len(names) != 1:
                which = f"name one with --server-name: {', '.join(names)}" if names else "no server has used it yet"
                raise UsageError(f"{public_url(str(place))}: {which}")
            [name] = names
        return stores.open(place, durable=self.config.audit.kept.sync == "every-call", name=name)

    def apply_for_serving(self, server: Server) -> None:
        """Guard a server that is to be served. It has an audit log, unless the configuration switches it off."""
        state = StateDirectory(state_folder(os.environ))
        state.prepare()
        self.apply_guards(server, state.folder)

    def apply_guards(self, server: Server, state: Path | None = None) -> None:
        """Set the guards. Settings of the file replace those in the server's code; the others of the code stay."""
        is_ours = server.engine.guard_options.keys().isdisjoint({"audit", "store"})
        options = {
            name: value
            for name, value in self.config.guards(state).items()
            if self.mentions(name) or (is_ours and name in ("audit", "store"))
        }
        try:
            server.guard(**cast(GuardOptions, options))
        except ValueError as problem:  # the file names a secret that is not set
            raise UsageError(f"{self.path}: {problem}") from None

    def warnings(self, server: Server, catalogs: Iterable[Catalog[Any]]) -> list[str]:
        """Return a warning for each setting without effect on this server, with these tools, resources and prompts."""
        subjects = [
            LintedSubject(each.tool.name, each.tags, each.tool.input_schema, each.kind, each.limit_name)
            for catalog in catalogs
            for each in catalog.entries
        ]
        policy, guards = server.engine.guard_set.policy, server.engine.guard_options
        if server.upstreams:  # what they have is known when they are asked
            return policy.warnings + self.self_approval_warnings(server)
        rates, sanitize = guards.get("rates"), guards.get("sanitize", Sanitize())
        if sanitize is not None and smallest_cap(sanitize):  # then the server adds this tool
            subjects.append(LintedSubject(READ_MORE.name, frozenset(), READ_MORE.input_schema))
        warnings = [*policy.warnings, *lint_rules(policy, subjects), *lint_settings(rates, sanitize, subjects)]
        warnings += ["upstreams: these servers count for `handrail gateway` only"] if self.config.upstreams else []
        return warnings + self.self_approval_warnings(server)

    def approvers(self, server: Server | None) -> tuple[str, str]:
        """Return who may approve a call over HTTP, and who over standard input."""
        own = None if server is None else server.engine.guard_options.get("approvals")
        options = own or self.config.approvals
        return options.deciders(self.config.identities.verifier() is not None), options.deciders(False)

    def self_approval_warnings(self, server: Server | None) -> list[str]:
        """Return a warning if callers with an API key may approve their own calls."""
        if self.config.identities.verifier() is None or (by := self.approvers(server)[0]) not in ("anyone", "caller"):
            return []
        text = f"approvals.by = {by!r}: over HTTP, a calling agent may approve its own calls by answering for its user"
        return [f"{text}; leave it out, or say 'another' or 'operator'"]

    def mentions(self, guard: str) -> bool:
        """Return True if the file has a setting of this guard."""
        return not self.raw.keys().isdisjoint(SECTIONS.get(guard, {guard}))


def _short_path(path: Path) -> Path:
    """Return the path relative to the working folder if it lies below it."""
    short = Path(os.path.relpath(path))
    return path if ".." in short.parts else short
