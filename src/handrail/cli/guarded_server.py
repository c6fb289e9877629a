"""The configuration of a command, and the guards that a server has when it is served with it."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import cast

from handrail import stores
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
from handrail.stores import Store

__all__ = ["CommandConfig", "settings_for"]


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

    def describe_guards(self, server: Server, source: ServerFile) -> str:
        """Return one line: the file that the guards are from, and what is switched off, by the file or in the code."""
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
        """Return the file with the approvals and the addresses of open consoles."""
        options = self.config.guards(state_folder(os.environ))
        return cast(Path, options.get("store", options.get("audit")))

    def store(self, file: Path) -> Store:
        return stores.open(file, durable=self.config.audit.kept.sync == "every-call")

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

    def warnings(self, server: Server, catalog: ToolCatalog) -> list[str]:
        """Return a warning for each setting without effect on this server, with these tools."""
        tools = [LintedTool(each.tool.name, each.tags, each.tool.input_schema) for each in catalog.entries]
        guards = server.engine.guard_options
        rates, sanitize = guards.get("rates"), guards.get("sanitize", Sanitize())
        if sanitize is not None and smallest_cap(sanitize):  # then the server adds this tool
            tools.append(LintedTool(READ_MORE.name, frozenset(), READ_MORE.input_schema))
        policy = server.engine.guard_set.policy
        warnings = [*policy.warnings, *lint_rules(policy, tools), *lint_settings(rates, sanitize, tools)]
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
