"""`python benchmarks/run.py`: the benchmark, started as a script from anywhere."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # A script sees its own folder; the modules here are imported, and type-checked, as `benchmarks.…`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("benchmarks.measure", run_name="__main__")
