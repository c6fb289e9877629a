"""The command line: reads the words, loads the verb, and turns how it ended into an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from handrail import __version__
from handrail.cli.codes import Code, Usage, code_of
from handrail.cli.verbs import parser
from handrail.errors import HandrailError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `handrail` with these words and return its exit code; a verb's module is loaded when it is used."""
    words = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
    except SystemExit as end:  # by argparse, after it has printed the help
        return end.code if isinstance(end.code, int) else Code.OK
    except BrokenPipeError:  # whoever read us has seen enough; nor shall Python complain when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Code.OK
    except (HandrailError, KeyboardInterrupt) as problem:
        return _complain(problem, "--json" in words)
    except Exception:
        # The edge of the process: a traceback with Python's own exit code would be taken for a tool that failed.
        import_module("traceback").print_exc()
        return Code.BUG


def _run(words: list[str]) -> int:
    root = parser()
    args = root.parse_args(words)
    if args.version:
        python = ".".join(map(str, sys.version_info[:3]))
        if args.json:
            print(f'{{"handrail": "{__version__}", "python": "{python}"}}')
        else:
            print(f"handrail {__version__} (Python {python})")
        return Code.OK
    if args.verb is None:
        root.print_help(sys.stderr)
        return Code.USAGE
    from handrail.cli.screen import Screen  # not for a help text

    if args.verb != "serve":
        from handrail.cli.logs import hear_logs

        hear_logs()
    code: int = import_module(f"handrail.cli.{args.verb}").run(args, Screen(args.json, args.color))
    sys.stdout.flush()
    return code


def _complain(problem: BaseException, as_json: bool) -> int:
    from handrail.cli.screen import json_text
    from handrail.guards.inert import inert

    code = code_of(problem)
    text = str(problem) or code.says
    if as_json:
        told = {"error": {"code": int(code), "kind": code.name.lower(), "message": text}}
        print(json_text(told), file=sys.stderr)
        return code
    if isinstance(problem, Usage) and problem.details:
        print(inert(problem.details.rstrip("\n")), file=sys.stderr)
    print(f"handrail: {inert(text)}", file=sys.stderr)
    return code
