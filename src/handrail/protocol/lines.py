"""Messages as lines: bytes in, whole lines out, however they were cut on the way."""

from __future__ import annotations

__all__ = ["LineReader"]


class LineReader:
    """Cuts a byte stream at newlines. A line over the limit is given as None, once, and skipped to its end (P-03)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._held = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that end in `data`, without blank ones."""
        *whole, rest = data.split(b"\n")
        lines: list[bytes | None] = []
        for piece in whole:
            if self._held or self._skipping:
                self._hold(piece, lines)
                piece = b"".join(self._pieces)
                self._pieces, self._held = [], 0
                if self._skipping:
                    self._skipping = False
                    continue
            elif len(piece) > self._limit:
                lines.append(None)
                continue
            if piece and not piece.isspace():
                lines.append(piece)
        if rest:
            self._hold(rest, lines)
        return lines

    def end(self) -> list[bytes | None]:
        """What was left without a newline when the stream ended."""
        return self.feed(b"\n") if self._held else []

    def _hold(self, piece: bytes, lines: list[bytes | None]) -> None:
        if self._skipping:
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > self._limit:
            self._pieces, self._held = [], 0
            self._skipping = True
            lines.append(None)
