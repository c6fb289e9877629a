"""The rules of the protocol, without I/O, clock or tasks."""
