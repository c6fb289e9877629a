"""`handrail console`: a link to the console of a server that runs."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from msgspec.json import decode

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.guarded_server import CommandConfig
from handrail.cli.terminal import Screen
from handrail.console.access import ROLES, SessionStore, new_code

__all__ = ["run_console"]


def run_console(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_run(args, screen))


async def _run(args: Namespace, screen: Screen) -> int:
    command_config = CommandConfig(args)
    file = command_config.store_file()
    roles = args.roles.split(",") if args.roles else None
    if unknown := sorted(set(roles or ()) - set(ROLES)):
        raise UsageError(f"--roles: {unknown[0]!r} is not one of {', '.join(ROLES)}")
    if not file.exists():
        raise UsageError(f"{file}: nothing has been served from here; `handrail serve FILE --console` opens one")
    store = command_config.store(file)
    try:
        rows = await store.scan("console-at:")
        consoles = [(key.split(":", 1)[1].rpartition(":")[0], decode(value)["url"]) for key, value in rows]
        if args.name:
            consoles = [each for each in consoles if each[0] == args.name]
        if not consoles:
            which = f" of {args.name!r}" if args.name else ""
            raise UsageError(f"no console{which} is open; `handrail serve FILE --console` opens one")
        if len({name for name, _ in consoles}) > 1:
            raise UsageError(f"several are open, name one: {', '.join(sorted({name for name, _ in consoles}))}")
        links = []
        for name, url in consoles:
            code = new_code()
            await SessionStore(store, name, lambda: 0.0).add_code(
                code, args.as_ or command_config.config.console.principal, roles
            )
            links.append(f"{url}/#code={code}")
    finally:
        await store.close()
    for link in links:
        screen.data({"console": link}) if screen.as_json else screen.write(link)
    return ExitCode.OK
