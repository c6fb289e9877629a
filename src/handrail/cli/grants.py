"""`handrail grants`: which callers have signed in to which upstream servers, and an end to that."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.load_server import CommandConfig
from handrail.cli.stop import write_record
from handrail.cli.terminal import Screen
from handrail.client.state_dir import StateDirectory, state_folder
from handrail.gateway.grants import delete_sign_in, read_sign_ins
from handrail.text.controls import one_line

__all__ = ["run_grants"]


def run_grants(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_run(args, screen))


async def _run(args: Namespace, screen: Screen) -> int:
    if args.caller and not args.revoke:
        raise UsageError("--caller: of which upstream server? Name it with --revoke NAME")
    StateDirectory(state_folder(os.environ)).prepare()
    command_config = CommandConfig(args)
    store = await command_config.open_store(command_config.approval_place())
    try:
        pairs = await read_sign_ins(store)
        if args.revoke:
            revoked = [(name, who) for name, who in pairs if name == args.revoke and args.caller in (None, who)]
            if not revoked:
                who = f"the caller {args.caller!r} has not" if args.caller else "no caller has"
                raise UsageError(f"{who} signed in to {args.revoke!r}; `handrail grants` lists the sign-ins")
            for name, who in revoked:
                step = f"revoked sign-in of {one_line(who, 200)} to upstream {one_line(name, 100)}"
                await write_record(step, command_config, store)
                await delete_sign_in(store, name, who)
                screen.note(f"{one_line(name, 100)}: {one_line(who, 200)} has to sign in again")
            pairs = [each for each in pairs if each not in revoked]
    finally:
        await store.close()
    if screen.as_json:
        screen.data([{"upstream": name, "caller": who} for name, who in pairs])
    elif pairs and not args.revoke:
        screen.table(pairs)
    elif not args.revoke:
        screen.write("no caller has signed in to an upstream server")
    return ExitCode.OK
