"""The server a command is about, with the guards that would be on if it were served."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from handrail.cli.codes import Usage
from handrail.cli.source import Source
from handrail.client.state import State, state_folder
from handrail.config import NAME, STATE, Config, load
from handrail.server import Server

__all__ = ["Guarded", "state_file"]


class Guarded:
    """`--config`, or the `handrail.toml` of the working folder, or neither: then what is built in."""

    def __init__(self, args: Namespace) -> None:
        given = args.config or (NAME if Path(NAME).is_file() else None)
        self.path = None if given is None else Path(given)
        self.config = Config() if self.path is None else load(self.path)

    def source(self, target: str | None) -> Source:
        if target:
            return Source(target)
        if self.path is None or not self.config.server.target:
            raise Usage(f"no server: name a FILE, or say `target` in the [server] section of {NAME}")
        return Source(str(self.path.parent / self.config.server.target))

    def guard(self, server: Server) -> None:
        """What the file says wins over what the server's author said; without a file only the audit is added."""
        state = State(state_folder(os.environ))
        state.prepare()
        if self.path is not None:
            try:
                server.guard(**self.config.guards(state.folder))
            except ValueError as problem:  # what the file is right to name, and is not there: a secret
                raise Usage(f"{self.path}: {problem}") from None
        elif "audit" not in server.engine.guards:
            server.guard(audit=state.folder / STATE)


def state_file(args: Namespace) -> Path:
    """Where approvals wait."""
    config = Guarded(args).config
    if config.audit.file and not config.audit.file.endswith(".jsonl"):
        return Path(config.audit.file)
    return state_folder(os.environ) / STATE
