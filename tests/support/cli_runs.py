"""The command line as its users meet it: a process of its own, with pipes or with a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from paths import SRC
from patience import PATIENCE

SOURCE = str(SRC)
COMMAND = (sys.executable, "-m", "handrail")
SECONDS = PATIENCE


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of ours, and a home that is a test's own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "SYSTEMROOT") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "PYTHONPATH": SOURCE,
        "PYTHONUTF8": "1",
        "TERM": "xterm",
        "COLUMNS": "100",
    } | more


def handrail(
    *words: str, home: Path, cwd: Path | None = None, stdin: str = "", env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run it to its end, without a terminal anywhere: `start_new_session` takes the controlling one away."""
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
        cwd=cwd or home,
        env=environment(home, **(env or {})),
        start_new_session=True,
    )


class Terminal:
    """A process on a terminal of its own, which is its controlling one too."""

    def __init__(self, *command: str, home: Path, env: Mapping[str, str] | None = None) -> None:
        self.seen = ""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            try:
                os.chdir(home)
                os.execve(command[0], command, environment(home, **(env or {})))
            finally:
                os._exit(127)

    def until(self, text: str) -> str:
        """What was shown up to and with `text`, and is not given again."""
        deadline = time.monotonic() + SECONDS
        while text not in self.seen:
            if not self._more(deadline):
                raise AssertionError(f"{text!r} was not shown: {self.seen!r}")
        end = self.seen.index(text) + len(text)
        shown, self.seen = self.seen[:end], self.seen[end:]
        return shown

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> tuple[int, str]:
        """The exit code, and the rest of what was shown."""
        deadline = time.monotonic() + SECONDS
        while self._more(deadline):
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), self.seen

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"nothing more within {SECONDS} s: {self.seen!r}")
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)
