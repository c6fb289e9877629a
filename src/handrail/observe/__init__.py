"""Observers of calls: metrics, spans, and the activity feed that the console shows."""
