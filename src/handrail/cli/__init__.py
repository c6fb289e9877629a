"""The command line: parse the words, load the module of the verb, and turn errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from handrail import __version__
from handrail.cli.exit_codes import ExitCode, UsageError, exit_code_for
from handrail.cli.parser import build_parser
from handrail.errors import CallTimeout, HandrailError

__all__ = ["main"]

_MODULES = dict.fromkeys(("list", "show", "call", "inspect", "doctor"), "tools")
_MODULES |= dict.fromkeys(("read", "prompts", "prompt", "complete"), "resources")
_MODULES |= {"config": "host_config", "install": "host_config", "explain": "check", "keys": "check"}
_MODULES |= {"console": "serve", "completion": "parser"}
"""The modules of the verbs that have none of their own name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `handrail` with these words and return its exit code. The module of a verb is imported when it is used."""
    words = sys.argv[1:] if argv is None else list(argv)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # started without one; open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
    except SystemExit as end:  # raised by argparse after it has printed the help
        return end.code if isinstance(end.code, int) else ExitCode.OK
    except BrokenPipeError:  # the reader of the pipe has closed it; Python must not fail when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except (HandrailError, KeyboardInterrupt) as problem:
        return _report_error(problem, "--json" in words)
    except BaseException as problem:  # also asyncio's CancelledError, which is not an Exception
        if (
            isinstance(problem, OSError) and problem.filename is not None
        ):  # not a bug: a file or folder that cannot be used
            return _report_error(UsageError(f"{problem.filename}: {problem.strerror}"), "--json" in words)
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _report_error(UsageError(f"standard output: {problem.strerror}"), "--json" in words)
        # The edge of the process: with Python's own exit code, a traceback would look like a tool that failed.
        import_module("traceback").print_exc()
        return ExitCode.BUG


def _run(words: list[str]) -> int:
    root = build_parser()
    args = root.parse_args(words)
    if args.version:
        python = ".".join(map(str, sys.version_info[:3]))
        if args.json:
            print(f'{{"handrail": "{__version__}", "python": "{python}"}}')
        else:
            print(f"handrail {__version__} (Python {python})")
        return ExitCode.OK
    if args.verb is None:
        root.print_help(sys.stderr)
        return ExitCode.USAGE
    from handrail.cli.terminal import Screen, setup_logs_and_signals  # a help text does without it

    if args.verb not in ("serve", "gateway"):
        setup_logs_and_signals()
    module = import_module(f"handrail.cli.{_MODULES.get(args.verb, args.verb)}")
    screen = Screen(args.json, args.color)
    try:
        code: int = getattr(module, f"run_{args.verb}")(args, screen)
    finally:
        screen.close()
    sys.stdout.flush()
    return code


def _report_error(problem: BaseException, as_json: bool) -> int:
    from handrail.cli.exit_codes import message
    from handrail.text.controls import escape_with_continuations

    code = exit_code_for(problem)
    if isinstance(problem, CallTimeout):
        problem.hint = "--timeout gives it longer"
    text = str(problem) or code.description
    if as_json:
        from handrail.cli.terminal import json_text

        payload = {"error": {"code": int(code), "kind": code.name.lower(), "message": text}}
        print(json_text(payload), file=sys.stderr)
        return code
    if isinstance(problem, UsageError) and problem.details:
        print(escape_with_continuations(problem.details.rstrip("\n")), file=sys.stderr)
    print(message(text), file=sys.stderr)
    return code
