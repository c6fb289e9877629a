"""Messages as lines: bytes in, whole lines out, however they were cut on the way."""

from __future__ import annotations

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
