"""Thin shells around the engine: bytes from somewhere, bytes to somewhere."""
