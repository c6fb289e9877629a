"""Who ends a server if we are killed: nothing but good manners makes it leave when its input ends."""

from __future__ import annotations

import logging
import os
import weakref
from subprocess import DEVNULL, PIPE, Popen
from typing import IO

log = logging.getLogger("handrail")

_SHELL = "/bin/sh"

CLOSE_AFTER_FORK: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
"""Ends of pipes that a fork of ours must not keep (`multiprocessing`): nobody would see us end while it lives."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [end.close() for end in CLOSE_AFTER_FORK])


def guard_group(group: int) -> Popen[bytes] | None:
    """A shell that ends a process group when its own input ends, which it does when we die, in whatever way."""
    shell = (_SHELL, "-c", 'read -r _ || kill -9 "-$1"', "sh", str(group))
    try:
        guard = Popen(shell, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, cwd="/", env={}, start_new_session=True)
    except OSError as problem:
        log.debug("process %d has no guard, and may outlive us: %s", group, problem)
        return None
    CLOSE_AFTER_FORK.update(filter(None, [guard.stdin]))
    return guard
