"""`python benchmarks/console.py [--page]`: what a console costs, and whether its page keeps up."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("benchmarks.console_cost", run_name="__main__")
