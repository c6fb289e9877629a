"""Folders with texts that are not ours: where a setting says, else in `../shared` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared"


def folder(setting: str, beside: Path) -> Path | None:
    """Return the folder that the variable `setting` names, else `beside`; None if there is none."""
    named = os.environ.get(setting)
    if named and not Path(named).is_dir():
        raise FileNotFoundError(f"{setting}={named}: there is no such folder")
    found = Path(named) if named else beside
    return found if found.is_dir() else None


SCHEMAS = folder("HANDRAIL_SCHEMAS", SHARED / "spec" / "schema")
NO_SCHEMAS = (
    "answers are checked against the lists of members only; HANDRAIL_SCHEMAS=folder names the official schemas, a file"
    " for each revision, such as 2025-11-25.json"
)
SEEDS = folder("HANDRAIL_SEEDS", SHARED / "seeds")
NO_SEEDS = "the seed texts are not here; HANDRAIL_SEEDS=folder names them"
