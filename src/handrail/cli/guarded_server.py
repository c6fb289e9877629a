"""The server a command is about, with the guards that would be on if it were served."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import cast

from handrail.cli.exit_codes import UsageError
from handrail.cli.load_server import ServerFile
from handrail.client.state_dir import StateDirectory, state_folder
from handrail.config import FILE_NAME, SECTIONS, document, read
from handrail.engine.catalog import ToolCatalog
from handrail.engine.guard_options import GuardOptions
from handrail.engine.truncation import TOOL as READ_MORE, smallest_cap
from handrail.guards.config_lint import LintedTool, lint_rules, lint_settings
from handrail.guards.sanitize import Sanitize
from handrail.server import Server
from handrail.stores.sqlite import SqliteStore

__all__ = ["CommandConfig", "settings_for"]


def settings_for(target: str | None) -> Path | None:
    """The `handrail.toml` beside the file that is served, else that of the working folder; None: neither is there."""
    beside = [_short_path(ServerFile(target).path.parent / FILE_NAME)] if target else []
    # One that is there and cannot be read is an error, later.
    return next((each for each in (*beside, Path(FILE_NAME)) if os.path.lexists(each)), None)


class CommandConfig:
    """`--config`, or the `handrail.toml` beside the server or of the working folder, or none: then what is built in.

    `target` is the file that is served. `raw` is what the file of settings itself says.
    """

    def __init__(self, args: Namespace, target: str | None = None) -> None:
        self._only = bool(getattr(args, "config_only", False))
        if self._only and not args.config:
            raise UsageError("--config-only: which file? Name it with --config")
        self.path = Path(args.config) if args.config else settings_for(target)
        self._check_beside(ServerFile(target).path.parent if target else None)
        self.raw = {} if self.path is None else document(self.path)
        self.config = read(self.raw, str(self.path or FILE_NAME))

    def server_file(self, target: str | None, by: str = "name a FILE") -> ServerFile:
        if target:
            return ServerFile(target)
        if self.path is None or not self.config.server.target:
            raise UsageError(f"no server: {by}, or say `target` in the [server] section of {FILE_NAME}")
        source = ServerFile(str(self.path.parent / self.config.server.target))
        self._check_beside(source.path.parent)
        return source

    def _check_beside(self, folder: Path | None) -> None:
        """Refuse to pass over a file that lies beside the server: its reader takes it for what is in force."""
        if folder is None or self._only or not os.path.lexists(beside := folder / FILE_NAME):
            return
        if self.path is None or os.path.realpath(self.path) != os.path.realpath(beside):
            hint = f"leave --config out to use it, or add --config-only to use {self.path} alone"
            raise UsageError(f"{_short_path(beside)} lies beside the server and is not used: {hint}")

    def describe_guards(self, server: Server, source: ServerFile) -> str:
        """One line: which file the guards are from, and what is switched off, by the file or in the code."""
        if self.path is None:
            text = f"guards: built in; there is no {FILE_NAME} beside {source.path.name} or in this folder"
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

    def store_file(self) -> Path:
        """Where approvals wait, and open consoles are to be found."""
        options = self.config.guards(state_folder(os.environ))
        return cast(Path, options.get("store", options.get("audit")))

    def store(self, file: Path) -> SqliteStore:
        return SqliteStore(file, durable=self.config.audit.kept.sync == "every-call")

    def apply_for_serving(self, server: Server) -> None:
        """Guard a server that is to be served: what it does is on record, unless somebody said otherwise."""
        state = StateDirectory(state_folder(os.environ))
        state.prepare()
        self.apply_guards(server, state.folder)

    def apply_guards(self, server: Server, state: Path | None = None) -> None:
        """What the file says wins over what the server's author said; where it is silent, the author's word holds."""
        is_ours = server.engine.guard_options.keys().isdisjoint({"audit", "store"})
        options = {
            name: value
            for name, value in self.config.guards(state).items()
            if self.mentions(name) or (is_ours and name in ("audit", "store"))
        }
        try:
            server.guard(**cast(GuardOptions, options))
        except ValueError as problem:  # what the file is right to name, and is not there: a secret
            raise UsageError(f"{self.path}: {problem}") from None

    def warnings(self, server: Server, catalog: ToolCatalog) -> list[str]:
        """What is set and does nothing on this server, with these tools."""
        tools = [LintedTool(each.tool.name, each.tags, each.tool.input_schema) for each in catalog.entries]
        guards = server.engine.guard_options
        rates, sanitize = guards.get("rates"), guards.get("sanitize", Sanitize())
        if sanitize is not None and smallest_cap(sanitize):  # then it will be there too
            tools.append(LintedTool(READ_MORE.name, frozenset(), READ_MORE.input_schema))
        policy = server.engine.guard_set.policy
        warnings = [*policy.warnings, *lint_rules(policy, tools), *lint_settings(rates, sanitize, tools)]
        return warnings + self.self_approval_warnings(server)

    def approvers(self, server: Server | None) -> tuple[str, str]:
        """Who may approve a call over HTTP, and over standard input, by what is in force."""
        own = None if server is None else server.engine.guard_options.get("approvals")
        options = own or self.config.approvals
        return options.deciders(self.config.identities.verifier() is not None), options.deciders(False)

    def self_approval_warnings(self, server: Server | None) -> list[str]:
        """A warning where callers with a name may approve their own calls."""
        if self.config.identities.verifier() is None or (by := self.approvers(server)[0]) not in ("anyone", "caller"):
            return []
        text = f"approvals.by = {by!r}: over HTTP, a calling agent may approve its own calls by answering for its user"
        return [f"{text}; leave it out, or say 'another' or 'operator'"]

    def mentions(self, guard: str) -> bool:
        """Whether the file says anything of it."""
        return not self.raw.keys().isdisjoint(SECTIONS.get(guard, {guard}))


def _short_path(path: Path) -> Path:
    """The path as a person would write it: from the working folder, where it lies below it."""
    short = Path(os.path.relpath(path))
    return path if ".." in short.parts else short
