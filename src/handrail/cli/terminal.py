"""The terminal: colours, tables, questions, progress and logs. Control characters in foreign text are escaped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, ParamSpec, TextIO, TypeVar

from handrail.cli.exit_codes import mark_foreign_lines, message
from handrail.text.controls import escape, one_line

__all__ = ["Screen", "Spinner", "json_text", "run_in_daemon_thread", "setup_logs_and_signals"]

MAX_LOGGED = 20
FIRST_LINES, LAST_LINES = 100, 100  # printed of a server's standard error
MAX_LINE_CHARS = 1_000

P = ParamSpec("P")
T = TypeVar("T")

_prompt_lock = threading.Lock()  # one question at a time: an answer must not go to another question
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 24


class Screen:
    """The output of a verb: results on standard output, all else on standard error."""

    def __init__(self, as_json: bool = False, color: str = "auto") -> None:
        self.as_json = as_json
        self.colors = {stream: _wants_color(color, stream) for stream in (sys.stdout, sys.stderr)}
        self._logs: list[_ServerLog] = []

    def write(self, text: str = "") -> None:
        """Print a part of the result. On a terminal, lines that look like messages of this command are marked."""
        print(mark_foreign_lines(text) if sys.stdout.isatty() else text)

    def data(self, value: Any) -> None:
        """Print one JSON document on a line of its own."""
        print(json_text(value), flush=True)

    def server_log(self, server: str) -> Callable[[str], None]:
        """Return a callback that prints each line of a server's standard error on ours."""
        self._logs.append(_ServerLog(self, server))
        return self._logs[-1].write_line

    def close(self) -> None:
        """Print the last lines of servers that wrote more than FIRST_LINES."""
        for each in self._logs:
            each.close()
        self._logs.clear()

    def note(self, text: str) -> None:
        """Print a message for people that is not part of the result."""
        print(message(text), file=sys.stderr, flush=True)

    def show_context(self, text: str) -> None:
        """Print a text to be read before a question, in place of a spinner."""
        text = mark_foreign_lines(text)
        print(f"\r\x1b[2K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def paint(self, text: str, *styles: str, stream: TextIO | None = None) -> str:
        """Return the text in colours if the stream has them. A colour never carries a meaning alone (APP-16)."""
        if not text or not styles or not self.colors[stream or sys.stdout]:
            return text
        return f"\x1b[{';'.join(str(_STYLES[each]) for each in styles)}m{text}\x1b[0m"

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "", styles: Sequence[str] = ()) -> None:
        """Print aligned columns. Control characters in cells are escaped."""
        cells = [[escape(cell, lines=False) for cell in row] for row in rows]
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = indent
            for cell, width, style in zip_longest(row, widths, styles[: len(widths)]):
                line += (self.paint(cell, style) if style else cell) + " " * (width - _width(cell) + 2)
            self.write(line.rstrip(" "))

    @property
    def is_attended(self) -> bool:
        """Return True if there is a terminal to ask questions at."""
        if (descriptor := _terminal()) is not None:
            os.close(descriptor)
        return descriptor is not None

    def ask(self, question: str) -> bool:
        """Ask yes or no. No answer, or no terminal, is no."""
        return (self.read(f"{question} [y/N] ") or "").lower() in ("y", "yes")

    def read(self, prompt: str) -> str | None:
        """Read a line from the terminal itself, not from standard input; None at its end, or without a terminal."""
        if (descriptor := _terminal()) is None:
            return None
        import termios

        Spinner.paused = True
        try:
            with contextlib.suppress(termios.error):  # discard input from before the question
                termios.tcflush(descriptor, termios.TCIFLUSH)
            os.write(descriptor, mark_foreign_lines(escape(prompt)).encode("utf-8", "backslashreplace"))
            line = os.read(descriptor, 64 * 1024).decode("utf-8", "replace")
            return line.strip() if line else None
        except OSError:  # the terminal is closed
            return None
        finally:
            Spinner.paused = False
            os.close(descriptor)

    async def read_live(self, prompt: str, status: Callable[[], Awaitable[str | None]]) -> str | None:
        """Read a line under a status line that is drawn each second; None also when `status` returns None.

        The status line must be shorter than the width of the terminal.
        """
        first = await status()
        if first is None or (descriptor := _terminal()) is None:
            return None
        import termios

        loop = asyncio.get_running_loop()
        typed: asyncio.Future[bytes] = loop.create_future()

        def on_readable() -> None:
            loop.remove_reader(descriptor)
            with contextlib.suppress(asyncio.InvalidStateError):
                typed.set_result(os.read(descriptor, 64 * 1024))

        Spinner.paused = True
        try:
            with contextlib.suppress(termios.error):  # discard input from before the question
                termios.tcflush(descriptor, termios.TCIFLUSH)
            os.write(descriptor, escape(f"{first}\n{prompt}").encode("utf-8", "backslashreplace"))
            loop.add_reader(descriptor, on_readable)
            while not (await asyncio.wait([typed], timeout=1.0))[0]:
                line = await status()
                if line is None:
                    os.write(descriptor, b"\n")
                    return None
                if os.environ.get("TERM") != "dumb":  # one line up and back, around the input line
                    os.write(descriptor, f"\x1b7\x1b[1A\r\x1b[2K{escape(line, lines=False)}\x1b8".encode())
            return typed.result().decode("utf-8", "replace").strip() if typed.result() else None
        except OSError:  # the terminal is closed
            return None
        finally:
            Spinner.paused = False
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def ring(self) -> None:
        """Ring the bell of the terminal, if there is one."""
        if (descriptor := _terminal()) is not None:
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\a")
            os.close(descriptor)

    def progress(self, what: str) -> Spinner:
        """Return a spinner on standard error; it draws nothing if that is not a terminal, or with --json."""
        return Spinner(what, sys.stderr if sys.stderr.isatty() and not self.as_json else None)


class Spinner:
    """A spinner, or a progress bar once there is progress. The context manager draws and erases it."""

    paused = False  # while a question is open

    def __init__(self, what: str, stream: TextIO | None) -> None:
        self._what = what
        self._stream = stream
        self._position: tuple[float, float | None, str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="handrail-spinner", daemon=True)

    def update(self, done: float, total: float | None = None, message: str | None = None) -> None:
        self._position = (done, total, message or "")

    def line(self, seconds: float) -> str:
        """Return the line to draw after `seconds`, of at most 79 columns."""
        frame = _FRAMES[int(seconds * 10) % len(_FRAMES)]
        if self._position is None:
            return f"{frame} {one_line(self._what, 60)} {seconds:.0f} s"
        done, total, message = self._position
        if total is not None and total > 0:
            part = min(max(done / total, 0.0), 1.0)
            bar = "#" * round(part * _BAR)
            amount = f"[{bar:-<{_BAR}}] {part:4.0%}"
        else:
            amount = f"{done:g}"
        return f"{frame} {one_line(self._what, 20)} {amount} {one_line(message, 24)}".rstrip()

    def __enter__(self) -> Spinner:
        if self._stream is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        if self._stream is not None:
            self._thread.join()

    def _spin(self) -> None:
        began = time.monotonic()
        stream = self._stream
        assert stream is not None
        while not self._stopped.is_set():
            stream.write("" if Spinner.paused else f"\r\x1b[2K{self.line(time.monotonic() - began)}")
            stream.flush()
            self._stopped.wait(0.1)
        stream.write("\r\x1b[2K")
        stream.flush()


class _ServerLog:
    """The standard error of a server: each line with the server's name, dimmed, and cut to a maximum length.

    The first lines are printed at once, the last ones at the end. Nothing is printed while a question is open: a server
    must not push the question off the screen.
    """

    def __init__(self, screen: Screen, server: str) -> None:
        self._screen = screen
        self._mark = f"  {one_line(server, 40)} | "
        self._line_count = self._skipped_count = 0
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def write_line(self, line: str) -> None:
        if self._line_count < FIRST_LINES and not self._last and not Spinner.paused:
            self._line_count += 1
            self._show(line)
        else:
            self._skipped_count += len(self._last) == LAST_LINES
            self._last.append(line)

    def close(self) -> None:
        if self._skipped_count:
            self._show(f"… {self._skipped_count:,} lines left out …")
        for line in self._last:
            self._show(line)
        self._last.clear()

    def _show(self, line: str) -> None:
        text = escape(line[:MAX_LINE_CHARS], lines=False).expandtabs(4)
        more = len(line) - MAX_LINE_CHARS
        text += f"… ({more:,} characters more)" if more > 0 else ""
        self._screen.show_context(self._screen.paint(f"{self._mark}{text}".rstrip(), "dim", stream=sys.stderr))


class _ErrorLogHandler(logging.Handler):
    """Prints errors of the `handrail` logger, one escaped line each, at most MAX_LOGGED of them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._left = MAX_LOGGED

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= 1
        if self._left >= 0:
            print(message(one_line(record.getMessage(), 300)), file=sys.stderr, flush=True)


async def run_in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a daemon thread: it may wait for input without end, and Ctrl-C must still end the process."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it cannot be cancelled any more, so its result can be set

    def run() -> None:
        try:
            with _prompt_lock:
                done.set_result(work(*args, **kwargs))
        except Exception as problem:
            done.set_exception(problem)

    threading.Thread(target=run, name="handrail-form", daemon=True).start()
    return await asyncio.wrap_future(done)


def setup_logs_and_signals() -> None:
    """Print only errors of the logger, since verbs print their own messages; treat SIGTERM and SIGHUP as Ctrl-C."""
    logger = logging.getLogger("handrail")
    logger.addHandler(_ErrorLogHandler())
    logger.propagate = False
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)


def json_text(value: Any) -> str:
    """Return JSON in ASCII: the same for a program, and harmless on a terminal (P-33)."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def _wants_color(color: str, stream: TextIO) -> bool:
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _terminal() -> int | None:
    """Open the terminal itself, even if the streams are redirected; None without one, and on Windows."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY) if sys.platform != "win32" else None
    except OSError:
        return None


def _width(text: str) -> int:
    """Return the columns of a text: combining marks have none, wide characters two."""
    drawn = [char for char in text if not unicodedata.combining(char) and char not in "\u200c\u200d\ufe0e\ufe0f"]
    return len(drawn) + sum(unicodedata.east_asian_width(char) in "WF" for char in drawn)
