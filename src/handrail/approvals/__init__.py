"""Calls that wait for a person: filed, decided once, used once."""
