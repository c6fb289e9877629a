"""Checks around a call, each one object with one job, each optional. The one for logs is on from the first import."""

from handrail.text import log_lines as log_lines
