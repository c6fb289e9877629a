"""Processes that serve: signals, parents, several workers."""
