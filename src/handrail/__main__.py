"""`python -m handrail`: what is installed, and how to begin."""

from __future__ import annotations

import platform
import sys

from handrail import __version__

_HELP = """
MCP tools you can hold on to.

  python -m handrail --version
  python my_server.py              serve the tools of a file that ends in server.run()
"""


def main() -> None:
    print(f"handrail {__version__} (Python {platform.python_version()})")
    if "--version" not in sys.argv:
        print(_HELP)


if __name__ == "__main__":
    main()
