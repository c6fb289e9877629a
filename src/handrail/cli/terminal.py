"""The terminal: colours, tables, a question, a sign of life, what is logged. What came from elsewhere is made inert."""

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

from handrail.cli.lines import mark_foreign_lines, message
from handrail.text.controls import escape, one_line

__all__ = ["Screen", "Spinner", "json_text", "run_in_daemon_thread", "setup_logs_and_signals"]

MAX_LOGGED = 20
FIRST_LINES, LAST_LINES = 100, 100  # shown of what a server writes on standard error
MAX_LINE_CHARS = 1_000

P = ParamSpec("P")
T = TypeVar("T")

_prompt_lock = threading.Lock()  # one question at a time: an answer must not go to another question
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 24


class Screen:
    """Where a verb writes: results to standard output, all else to standard error."""

    def __init__(self, as_json: bool = False, color: str = "auto") -> None:
        self.as_json = as_json
        self.colors = {stream: _wants_color(color, stream) for stream in (sys.stdout, sys.stderr)}
        self._logs: list[_ServerLog] = []

    def write(self, text: str = "") -> None:
        """Part of the result. On a terminal no line of it passes for one of this command's, which are on it too."""
        print(mark_foreign_lines(text) if sys.stdout.isatty() else text)

    def data(self, value: Any) -> None:
        """One JSON document on a line of its own."""
        print(json_text(value), flush=True)

    def server_log(self, server: str) -> Callable[[str], None]:
        """Return what takes each line that a server writes on standard error, and shows it on ours."""
        self._logs.append(_ServerLog(self, server))
        return self._logs[-1].write_line

    def close(self) -> None:
        """Show the last lines of servers that wrote more than was shown at once."""
        for each in self._logs:
            each.close()
        self._logs.clear()

    def note(self, text: str) -> None:
        """Something for people, which is not the result."""
        print(message(text), file=sys.stderr, flush=True)

    def show_context(self, text: str) -> None:
        """Something to be read before a question; whatever is drawn there makes room."""
        text = mark_foreign_lines(text)
        print(f"\r\x1b[2K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def paint(self, text: str, *styles: str, stream: TextIO | None = None) -> str:
        """The text in colours where the stream has them. Colour alone never carries a meaning (APP-16)."""
        if not text or not styles or not self.colors[stream or sys.stdout]:
            return text
        return f"\x1b[{';'.join(str(_STYLES[each]) for each in styles)}m{text}\x1b[0m"

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "", styles: Sequence[str] = ()) -> None:
        """Columns as wide as they must be; the last one takes what is left. Every cell is made inert."""
        cells = [[escape(cell, lines=False) for cell in row] for row in rows]
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = indent
            for cell, width, style in zip_longest(row, widths, styles[: len(widths)]):
                line += (self.paint(cell, style) if style else cell) + " " * (width - _width(cell) + 2)
            self.write(line.rstrip(" "))

    @property
    def is_attended(self) -> bool:
        """Whether there is a terminal on which somebody could be asked."""
        if (descriptor := _terminal()) is not None:
            os.close(descriptor)
        return descriptor is not None

    def ask(self, question: str) -> bool:
        """Yes or no. No answer, or nobody there, is no."""
        return (self.read(f"{question} [y/N] ") or "").lower() in ("y", "yes")

    def read(self, prompt: str) -> str | None:
        """A line typed on the terminal itself, whatever the streams are; None at its end, or if nobody is there."""
        if (descriptor := _terminal()) is None:
            return None
        import termios

        Spinner.paused = True
        try:
            with contextlib.suppress(termios.error):  # an answer counts only if it was typed after the question
                termios.tcflush(descriptor, termios.TCIFLUSH)
            os.write(descriptor, mark_foreign_lines(escape(prompt)).encode("utf-8", "backslashreplace"))
            line = os.read(descriptor, 64 * 1024).decode("utf-8", "replace")
            return line.strip() if line else None
        except OSError:  # the terminal has gone
            return None
        finally:
            Spinner.paused = False
            os.close(descriptor)

    async def read_live(self, prompt: str, status: Callable[[], Awaitable[str | None]]) -> str | None:
        """As `read`, under a line that is drawn anew each second; None too once `status` has nothing to say.

        The line must be shorter than the terminal is wide.
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
            with contextlib.suppress(termios.error):  # an answer counts only if it was typed after the question
                termios.tcflush(descriptor, termios.TCIFLUSH)
            os.write(descriptor, escape(f"{first}\n{prompt}").encode("utf-8", "backslashreplace"))
            loop.add_reader(descriptor, on_readable)
            while not (await asyncio.wait([typed], timeout=1.0))[0]:
                line = await status()
                if line is None:
                    os.write(descriptor, b"\n")
                    return None
                if os.environ.get("TERM") != "dumb":  # one line up and back, past what is being typed
                    os.write(descriptor, f"\x1b7\x1b[1A\r\x1b[2K{escape(line, lines=False)}\x1b8".encode())
            return typed.result().decode("utf-8", "replace").strip() if typed.result() else None
        except OSError:  # the terminal has gone
            return None
        finally:
            Spinner.paused = False
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def ring(self) -> None:
        """The terminal's bell, where there is a terminal."""
        if (descriptor := _terminal()) is not None:
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\a")
            os.close(descriptor)

    def progress(self, what: str) -> Spinner:
        """A sign of life on standard error while something runs; nothing where no one is looking."""
        return Spinner(what, sys.stderr if sys.stderr.isatty() and not self.as_json else None)


class Spinner:
    """A spinner, and a bar once it is known how far it is; `with` draws it and takes it away again."""

    paused = False  # while somebody is asked something

    def __init__(self, what: str, stream: TextIO | None) -> None:
        self._what = what
        self._stream = stream
        self._position: tuple[float, float | None, str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="handrail-spinner", daemon=True)

    def update(self, done: float, total: float | None = None, message: str | None = None) -> None:
        self._position = (done, total, message or "")

    def line(self, seconds: float) -> str:
        """What is drawn after so many seconds, in at most 79 columns."""
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
    """What a server writes on standard error: each line marked with its name, dimmed, and bounded.

    The first lines are shown as they come, the last ones at the end. None is shown while a question is open: what a
    server writes must not push the question off the screen.
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
    """What is logged while a verb runs: errors only, as one inert line each, and not without end."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._left = MAX_LOGGED

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= 1
        if self._left >= 0:
            print(message(one_line(record.getMessage(), 300)), file=sys.stderr, flush=True)


async def run_in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread that ends with the process: whoever types may never come to an end, and Ctrl-C has to be heard."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from here on nobody can take it back, and it may be set

    def run() -> None:
        try:
            with _prompt_lock:
                done.set_result(work(*args, **kwargs))
        except Exception as problem:
            done.set_exception(problem)

    threading.Thread(target=run, name="handrail-form", daemon=True).start()
    return await asyncio.wrap_future(done)


def setup_logs_and_signals() -> None:
    """Verbs say themselves what there is to say; a hang-up and a request to end count as Ctrl-C."""
    logger = logging.getLogger("handrail")
    logger.addHandler(_ErrorLogHandler())
    logger.propagate = False
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)


def json_text(value: Any) -> str:
    """JSON in ASCII alone: it says the same to a program, and nothing to a terminal (P-33)."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def _wants_color(color: str, stream: TextIO) -> bool:
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _terminal() -> int | None:
    """The terminal itself, whatever the streams are; None if there is none, as always on Windows."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY) if sys.platform != "win32" else None
    except OSError:
        return None


def _width(text: str) -> int:
    """Columns on a terminal: none for marks that combine, two for wide characters."""
    drawn = [char for char in text if not unicodedata.combining(char) and char not in "\u200c\u200d\ufe0e\ufe0f"]
    return len(drawn) + sum(unicodedata.east_asian_width(char) in "WF" for char in drawn)
