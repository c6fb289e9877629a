"""The server a command is about, with the guards that would be on if it were served."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import cast

from handrail.cli.exit_codes import Usage
from handrail.cli.load_server import Source
from handrail.client.state_dir import State, state_folder
from handrail.config import NAME, SECTIONS, document, read
from handrail.engine.catalog import Catalog
from handrail.engine.guard_set import GuardOptions
from handrail.engine.truncation import TOOL as READ_MORE, smallest_cap
from handrail.guards.config_lint import Known, settings_that_meet_nothing
from handrail.guards.sanitize import Sanitize
from handrail.server import Server
from handrail.stores.sqlite import SqliteStore

__all__ = ["Guarded", "settings_for"]


def settings_for(target: str | None) -> Path | None:
    """The `handrail.toml` beside the file that is served, else that of the working folder; None: neither is there."""
    beside = [_near(Source(target).path.parent / NAME)] if target else []
    # One that is there and cannot be read is an error, later.
    return next((each for each in (*beside, Path(NAME)) if os.path.lexists(each)), None)


class Guarded:
    """`--config`, or the `handrail.toml` beside the server or of the working folder, or none: then what is built in.

    `target` is the file that is served. `written` is what the file of settings itself says.
    """

    def __init__(self, args: Namespace, target: str | None = None) -> None:
        self._only = bool(getattr(args, "config_only", False))
        if self._only and not args.config:
            raise Usage("--config-only: which file? Name it with --config")
        self.path = Path(args.config) if args.config else settings_for(target)
        self._check_beside(Source(target).path.parent if target else None)
        self.written = {} if self.path is None else document(self.path)
        self.config = read(self.written, str(self.path or NAME))

    def source(self, target: str | None, by: str = "name a FILE") -> Source:
        if target:
            return Source(target)
        if self.path is None or not self.config.server.target:
            raise Usage(f"no server: {by}, or say `target` in the [server] section of {NAME}")
        source = Source(str(self.path.parent / self.config.server.target))
        self._check_beside(source.path.parent)
        return source

    def _check_beside(self, folder: Path | None) -> None:
        """Refuse to pass over a file that lies beside the server: its reader takes it for what is in force."""
        if folder is None or self._only or not os.path.lexists(beside := folder / NAME):
            return
        if self.path is None or os.path.realpath(self.path) != os.path.realpath(beside):
            hint = f"leave --config out to use it, or add --config-only to use {self.path} alone"
            raise Usage(f"{_near(beside)} lies beside the server and is not used: {hint}")

    def in_force(self, server: Server, source: Source) -> str:
        """One line: which file the guards are from, and what is switched off, by the file or in the code."""
        if self.path is None:
            text = f"guards: built in; there is no {NAME} beside {source.path.name} or in this folder"
        else:
            text = f"guards: {self.path}"
            others = os.path.lexists(NAME) and os.path.realpath(NAME) != os.path.realpath(self.path)
            text += f"; the {NAME} of this folder is not used" if others else ""
        off = self.config.switched_off()
        guards = server.engine.guards
        if not self.speaks_of("policy") and server.engine.gate.policy.destructive == "allow":
            off.append('Server(policy=Policy(destructive="allow"))')
        off += [f"Server({name}=None)" for name in ("audit", "rates", "sanitize") if guards.get(name, name) is None]
        return f"{text}; switched off: {', '.join(off)}" if off else text

    def store_file(self) -> Path:
        """Where approvals wait, and open consoles are to be found."""
        kept = self.config.guards(state_folder(os.environ))
        return cast(Path, kept.get("store", kept.get("audit")))

    def store(self, file: Path) -> SqliteStore:
        return SqliteStore(file, durable=self.config.audit.kept.sync == "every-call")

    def guard(self, server: Server) -> None:
        """Guard a server that is to be served: what it does is on record, unless somebody said otherwise."""
        state = State(state_folder(os.environ))
        state.prepare()
        self.rule(server, state.folder)

    def rule(self, server: Server, state: Path | None = None) -> None:
        """What the file says wins over what the server's author said; where it is silent, the author's word holds."""
        is_ours = server.engine.guards.keys().isdisjoint({"audit", "store"})
        options = {
            name: value
            for name, value in self.config.guards(state).items()
            if self.speaks_of(name) or (is_ours and name in ("audit", "store"))
        }
        try:
            server.guard(**cast(GuardOptions, options))
        except ValueError as problem:  # what the file is right to name, and is not there: a secret
            raise Usage(f"{self.path}: {problem}") from None

    def doubts(self, server: Server, catalog: Catalog) -> list[str]:
        """What is set and does nothing on this server, with these tools."""
        tools = [Known(each.tool.name, each.tags, each.tool.input_schema) for each in catalog.entries]
        guards = server.engine.guards
        rates, sanitize = guards.get("rates"), guards.get("sanitize", Sanitize())
        if sanitize is not None and smallest_cap(sanitize):  # then it will be there too
            tools.append(Known(READ_MORE.name, frozenset(), READ_MORE.input_schema))
        policy = server.engine.gate.policy
        doubts = [*policy.warnings, *policy.warnings_for(tools), *settings_that_meet_nothing(rates, sanitize, tools)]
        return doubts + self.self_approval(server)

    def deciders(self, server: Server | None) -> tuple[str, str]:
        """Who may approve a call over HTTP, and over standard input, by what is in force."""
        own = None if server is None else server.engine.guards.get("approvals")
        options = own or self.config.approvals
        return options.deciders(self.config.identities.verifier() is not None), options.deciders(False)

    def self_approval(self, server: Server | None) -> list[str]:
        """A warning where callers with a name may approve their own calls."""
        if self.config.identities.verifier() is None or (by := self.deciders(server)[0]) not in ("anyone", "caller"):
            return []
        text = f"approvals.by = {by!r}: over HTTP, a calling agent may approve its own calls by answering for its user"
        return [f"{text}; leave it out, or say 'another' or 'operator'"]

    def speaks_of(self, guard: str) -> bool:
        """Whether the file says anything of it."""
        return not self.written.keys().isdisjoint(SECTIONS.get(guard, {guard}))


def _near(path: Path) -> Path:
    """The path as a person would write it: from the working folder, where it lies below it."""
    short = Path(os.path.relpath(path))
    return path if ".." in short.parts else short
