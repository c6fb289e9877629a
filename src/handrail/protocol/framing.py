"""Event streams: messages as server-sent events, and back, in whatever pieces they arrive.

What an event stream is stands in https://html.spec.whatwg.org/multipage/server-sent-events.html.

Messages as lines: bytes in, whole lines out, however they were cut on the way.
"""

from __future__ import annotations

from msgspec import Struct

Line = bytes | bytearray | None


class LineReader:
    """Cuts a byte stream at newlines. A line over the limit is given as None, once, and skipped to its end (P-03)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial = bytearray()  # one object: a line may come a byte at a time
        self._skipping = False

    def feed(self, data: bytes) -> list[Line]:
        """The lines that end in `data`, without blank ones."""
        lines: list[Line] = []
        pieces: list[bytes | bytearray] = [*data.split(b"\n")]
        rest = pieces.pop()
        if pieces and (self._partial or self._skipping):
            self._buffer(pieces[0], lines)
            pieces[0], self._partial, self._skipping = self._partial, bytearray(), False
        for piece in pieces:
            if len(piece) > self._limit:
                lines.append(None)
            elif piece and not piece.isspace():
                lines.append(piece)
        if rest:
            self._buffer(rest, lines)
        return lines

    def flush(self) -> list[Line]:
        """What was left without a newline when the stream ended."""
        return self.feed(b"\n") if self._partial else []

    def _buffer(self, piece: bytes | bytearray, lines: list[Line]) -> None:
        if self._skipping:
            return
        self._partial += piece
        if len(self._partial) > self._limit:
            self._partial.clear()
            self._skipping = True
            lines.append(None)


KEEP_ALIVE = b": keep-alive\n\n"

_BOM = b"\xef\xbb\xbf"
_COLON = ord(":")
_MAX_FIELD_BYTES = 16 * 1024  # what an event may hold beside its data: names of fields, its id
_MAX_RETRY_DIGITS = 15


def encode_event(data: bytes, *, event_id: str = "", name: str = "", retry_ms: int = 0) -> bytes:
    """One event. `data` is one line, as every message of ours is; empty data only carries the id and the retry time."""
    head = f"event: {name}\n" if name else ""
    head += f"id: {event_id}\n" if event_id else ""
    head += f"retry: {retry_ms}\n" if retry_ms else ""
    return head.encode() + (b"data: " + data if data else b"data:") + b"\n\n"


class ServerSentEvent(Struct, frozen=True):
    """What came between two blank lines; `event_id` and `retry_ms` are None where it had none."""

    data: bytes = b""
    event_id: str | None = None
    name: str = ""
    retry_ms: int | None = None
    too_long: bool = False  # its data was over the limit, and is not here


class EventReader:
    """Cuts a byte stream into events. What is left when the stream ends was no whole event, and is forgotten.

    An event over the limit is given once, empty and marked, as soon as it is known to be too long, and skipped to its
    end (P-03): the next one is read as if nothing had been. One without data is given if it has an id or a retry time.
    """

    def __init__(self, limit: int) -> None:
        self.comment_count = 0  # so far; servers send them to say that they are still there
        self._limit = limit
        self._max_bytes = limit + _MAX_FIELD_BYTES
        self._head: bytearray | None = bytearray()  # the first three bytes, which may be a byte order mark
        self._line = bytearray()  # one object: a line may come a byte at a time
        self._in_comment = False
        self._after_cr = False
        self._reset()

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that end in `data`."""
        events: list[ServerSentEvent] = []
        if self._head is not None:
            self._head += data
            if len(self._head) < len(_BOM):
                return events
            data, self._head = bytes(self._head).removeprefix(_BOM), None
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        if not data:
            return events
        lines: list[bytes | bytearray] = [*data.splitlines()]  # of bytes: at CR, LF and CRLF, and nowhere else
        self._after_cr = data.endswith(b"\r")
        rest = b"" if data.endswith((b"\r", b"\n")) else lines.pop()
        if lines and self._in_comment:
            lines[0], self._in_comment = b":", False
        elif lines and self._line:
            self._line += lines[0]
            lines[0], self._line = self._line, bytearray()
        for line in lines:
            self._read_line(line, events)
        if rest:
            self._buffer_partial(rest, events)
        return events

    def _reset(self) -> None:
        self._data: list[bytes | bytearray] = []
        self._data_size = -1  # of the lines joined
        self._size = 0  # of all lines but comments
        self._event_id: str | None = None
        self._name = ""
        self._retry_ms: int | None = None
        self._skipping = False

    def _read_line(self, line: bytes | bytearray, events: list[ServerSentEvent]) -> None:
        """A whole line."""
        if not line:
            if self._size or self._skipping:
                if not self._skipping and (self._data or self._event_id is not None or self._retry_ms is not None):
                    events.append(ServerSentEvent(b"\n".join(self._data), self._event_id, self._name, self._retry_ms))
                self._reset()
        elif line[0] == _COLON:
            self.comment_count += 1
        elif not self._skipping:
            self._size += len(line)
            if self._size <= self._max_bytes:
                self._read_field(line)
            if self._size > self._max_bytes or self._data_size > self._limit:
                self._skip_event(events)

    def _buffer_partial(self, part: bytes | bytearray, events: list[ServerSentEvent]) -> None:
        """A line, or more of it, that has not ended."""
        if self._in_comment or (not self._line and part[0] == _COLON):
            self._in_comment = True
        elif self._skipping:
            self._line += part[:1]  # all there is to know: it is not a blank line
            del self._line[1:]
        else:
            self._line += part
            if self._size + len(self._line) > self._max_bytes:
                self._skip_event(events)

    def _skip_event(self, events: list[ServerSentEvent]) -> None:
        events.append(ServerSentEvent(b"", self._event_id, self._name, self._retry_ms, too_long=True))
        self._data.clear()
        self._skipping = True

    def _read_field(self, line: bytes | bytearray) -> None:
        """A field, or something else, which is left out."""
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            self._data.append(value)
            self._data_size += len(value) + 1
        elif field == b"id":
            if b"\0" not in value:
                self._event_id = value.decode("utf-8", "replace")
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
            self._retry_ms = int(value)
