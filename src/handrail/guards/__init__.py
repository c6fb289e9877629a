"""Checks around a call, each one object with one job, each optional."""
