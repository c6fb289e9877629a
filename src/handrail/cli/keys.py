"""`handrail keys`: make an API key and its line for `handrail.toml`, or a key for `HANDRAIL_KEY`."""

from __future__ import annotations

import re
from argparse import Namespace
from secrets import token_urlsafe

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.terminal import Screen, json_text
from handrail.guards.identity import ApiKeys

__all__ = ["run_keys"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def run_keys(args: Namespace, screen: Screen) -> int:
    if args.what == "seal":
        if args.name or args.scopes is not None:
            raise UsageError("keys seal takes no name and no scopes: handrail keys seal")
        key = token_urlsafe(32)
        if screen.as_json:
            screen.data({"key": key})
        else:
            screen.write(key)
        return ExitCode.OK
    if not args.name:
        raise UsageError("keys new: NAME is missing: handrail keys new NAME --scopes orders:read,orders:write")
    scopes = re.split(r"[\s,]+", args.scopes.strip()) if args.scopes is not None else []
    if not all(scopes):
        raise UsageError(f"--scopes: {args.scopes!r} is not a list of scopes with commas between them")
    key, hashed = ApiKeys.new()
    try:
        ApiKeys({args.name: hashed}, scopes={args.name: scopes})
    except ValueError as wrong:
        raise UsageError(f"keys new: {wrong}") from None
    toml = _toml(args.name, hashed, scopes)
    if screen.as_json:
        screen.data({"name": args.name, "key": key, "hash": hashed, "scopes": scopes, "toml": toml})
        return ExitCode.OK
    screen.write(
        f"# The API key of {args.name}, printed only once. Send it as `--key KEY`, or `Authorization: Bearer KEY`."
    )
    screen.write(f"{key}\n")
    screen.write("# For handrail.toml. If the section exists already, add only the line.")
    screen.write(toml.rstrip("\n"))
    return ExitCode.OK


def _toml(name: str, hashed: str, scopes: list[str]) -> str:
    name = name if _BARE.fullmatch(name) else f'"{name}"'
    text = f'[identities.keys]\n{name} = "{hashed}"\n'
    return f"{text}\n[identities.scopes]\n{name} = {json_text(scopes)}\n" if scopes else text
