"""`python -m handrail`: what is installed, and how to begin."""

from __future__ import annotations

import argparse
import platform

from handrail import __version__

_EXAMPLES = """examples:
  python -m handrail --version
  python my_server.py              serve the tools of a file that ends in server.run()
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="handrail",
        description="MCP tools you can hold on to.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"handrail {__version__} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
