"""The command line as its users meet it: a process of its own, with pipes or with a terminal."""

from __future__ import annotations

import json
import os
import pty
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

from handrail.model import Object
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


OPENING = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Client:
    """The least that can be called one: lines out, lines in, by a deadline."""

    def __init__(self, *words: str, home: Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=home,
            env=environment(home),
        )
        self.out: queue.Queue[str] = queue.Queue()
        self.err: queue.Queue[str] = queue.Queue()
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=_pump, args=pair)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()
        self._id = 0

    def say(self, method: str, params: Object | None = None, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "method": method, "params": params or {}, **more}) + "\n"
        )
        self.process.stdin.flush()

    def ask(self, method: str, params: Object | None = None) -> Object:
        self._id += 1
        self.say(method, params, id=self._id)
        message = self.hear()
        assert message["id"] == self._id, message
        result: Object = message["result"]
        return result

    def hear(self) -> Object:
        line = self.out.get(timeout=SECONDS)
        assert line, f"it has ended: {[*self.err.queue]}"
        message: Object = json.loads(line)
        return message

    def told(self, words: str) -> str:
        """Standard error up to a line with these words."""
        seen = ""
        while True:
            seen += (line := self.err.get(timeout=SECONDS))
            assert line, f"it has ended: {seen}"
            if words in line:
                return seen

    def open(self) -> Object:
        opened = self.ask("initialize", OPENING)
        self.say("notifications/initialized")
        return opened

    def names(self) -> list[str]:
        return [tool["name"] for tool in self.ask("tools/list")["tools"]]

    def call(self, name: str, **arguments: Any) -> str:
        text: str = self.ask("tools/call", {"name": name, "arguments": arguments})["content"][0]["text"]
        return text

    def changed(self) -> None:
        assert self.hear() == {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}

    def end(self) -> int:
        """Close its input, and see how it ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(SECONDS)

    def close(self) -> None:
        with self.process:
            self.process.kill()
            for thread in self._threads:
                thread.join()


def _pump(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


@contextmanager
def client(*words: str, home: Path) -> Iterator[Client]:
    made = Client(*words, home=home)
    with closing(made):
        yield made
        assert made.end() == 0


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
