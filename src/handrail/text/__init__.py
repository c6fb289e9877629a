"""Untrusted text: control characters, secrets, confusable names, media."""
