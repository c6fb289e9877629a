"""The terminal: colours, tables, a question, a sign of life. What came from elsewhere goes through `inert` first."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from handrail.guards.inert import inert, one_line

__all__ = ["Progress", "Screen", "json_text"]

_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 24


class Screen:
    """Where a verb writes: results to standard output, all else to standard error."""

    def __init__(self, as_json: bool = False, color: str = "auto") -> None:
        self.as_json = as_json
        self.colors = {stream: _wants_color(color, stream) for stream in (sys.stdout, sys.stderr)}

    def say(self, text: str = "") -> None:
        print(text)

    def data(self, value: Any) -> None:
        """One JSON document on a line of its own."""
        print(json_text(value), flush=True)

    def note(self, text: str) -> None:
        """Something for people, which is not the result."""
        print(f"handrail: {inert(text)}", file=sys.stderr, flush=True)

    def tell(self, text: str) -> None:
        """Something to be read before a question; whatever is drawn there makes room."""
        print(f"\r\x1b[2K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def paint(self, text: str, *styles: str, stream: TextIO | None = None) -> str:
        """The text in colours where the stream has them. Colour alone never carries a meaning (APP-16)."""
        if not text or not styles or not self.colors[stream or sys.stdout]:
            return text
        return f"\x1b[{';'.join(str(_STYLES[each]) for each in styles)}m{text}\x1b[0m"

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "", styles: Sequence[str] = ()) -> None:
        """Columns as wide as they must be; the last one takes what is left. Every cell is made inert."""
        cells = [[inert(cell, lines=False) for cell in row] for row in rows]
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = indent
            for i, cell in enumerate(row):
                gap = " " * (widths[i] - _width(cell) + 2) if i < len(row) - 1 else ""
                style = styles[i] if i < len(styles) else ""
                line += (self.paint(cell, style) if style else cell) + gap
            self.say(line.rstrip())

    @property
    def is_attended(self) -> bool:
        """Whether there is a terminal on which somebody could be asked."""
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | getattr(os, "O_NOCTTY", 0)))
        except OSError:
            return False
        return True

    def ask(self, question: str) -> bool:
        """Yes or no. No answer, or nobody there, is no."""
        return (self.read(f"{question} [y/N] ") or "").lower() in ("y", "yes")

    def read(self, prompt: str) -> str | None:
        """A line typed on the terminal itself, whatever the streams are; None at its end, or if nobody is there."""
        terminal = os.devnull if os.name != "posix" else "/dev/tty"
        try:
            descriptor = os.open(terminal, os.O_RDWR | getattr(os, "O_NOCTTY", 0))
        except OSError:
            return None
        Progress.quiet = True
        try:
            if not os.isatty(descriptor):
                return None
            _forget_typed(descriptor)
            os.write(descriptor, inert(prompt).encode("utf-8", "backslashreplace"))
            line = os.read(descriptor, 64 * 1024).decode("utf-8", "replace")
            return line.strip() if line else None
        except OSError:  # the terminal has gone
            return None
        finally:
            Progress.quiet = False
            os.close(descriptor)

    def progress(self, what: str) -> Progress:
        """A sign of life on standard error while something runs; nothing where no one is looking."""
        return Progress(what, sys.stderr if sys.stderr.isatty() and not self.as_json else None)


class Progress:
    """A spinner, and a bar once it is known how far it is; `with` draws it and takes it away again."""

    quiet = False  # while somebody is asked something

    def __init__(self, what: str, stream: TextIO | None) -> None:
        self._what = what
        self._stream = stream
        self._far: tuple[float, float | None, str] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="handrail-spinner", daemon=True)

    def update(self, done: float, total: float | None = None, message: str | None = None) -> None:
        self._far = (done, total, message or "")

    def line(self, seconds: float) -> str:
        """What is drawn after so many seconds, in at most 79 columns."""
        frame = _FRAMES[int(seconds * 10) % len(_FRAMES)]
        if self._far is None:
            return f"{frame} {one_line(self._what, 60)} {seconds:.0f} s"
        done, total, message = self._far
        if total is not None and total > 0:
            part = min(max(done / total, 0.0), 1.0)
            bar = "#" * round(part * _BAR)
            shown = f"[{bar:-<{_BAR}}] {part:4.0%}"
        else:
            shown = f"{done:g}"
        return f"{frame} {one_line(self._what, 20)} {shown} {one_line(message, 24)}".rstrip()

    def __enter__(self) -> Progress:
        if self._stream is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        if self._stream is not None:
            self._thread.join()

    def _spin(self) -> None:
        began = time.monotonic()
        stream = self._stream
        assert stream is not None
        while not self._over.is_set():
            stream.write("" if Progress.quiet else f"\r\x1b[2K{self.line(time.monotonic() - began)}")
            stream.flush()
            self._over.wait(0.1)
        stream.write("\r\x1b[2K")
        stream.flush()


def json_text(value: Any) -> str:
    """JSON in ASCII alone: it says the same to a program, and nothing to a terminal (P-33)."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def _wants_color(color: str, stream: TextIO) -> bool:
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _forget_typed(descriptor: int) -> None:
    """An answer counts only if it was typed after the question could be read."""
    if sys.platform != "win32":
        import termios

        with contextlib.suppress(termios.error):
            termios.tcflush(descriptor, termios.TCIFLUSH)


def _width(text: str) -> int:
    """Columns on a terminal: none for marks that combine, two for wide characters."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(char: str) -> int:
    if unicodedata.combining(char) or char in "\u200c\u200d\ufe0e\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
