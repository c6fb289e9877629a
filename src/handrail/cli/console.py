"""`handrail console`: a link to the console of a server that runs."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from msgspec.json import decode

from handrail.cli.exit_codes import Code, Usage
from handrail.cli.guarded_server import Guarded
from handrail.cli.terminal import Screen
from handrail.console.access import ROLES, Access, new_code

__all__ = ["run_console"]


def run_console(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_run(args, screen))


async def _run(args: Namespace, screen: Screen) -> int:
    guarded = Guarded(args)
    file = guarded.store_file()
    roles = args.roles.split(",") if args.roles else None
    if unknown := sorted(set(roles or ()) - set(ROLES)):
        raise Usage(f"--roles: {unknown[0]!r} is not one of {', '.join(ROLES)}")
    if not file.exists():
        raise Usage(f"{file}: nothing has been served from here; `handrail serve FILE --console` opens one")
    store = guarded.store(file)
    try:
        rows = await store.scan("console-at:")
        found = [(key.split(":", 1)[1].rpartition(":")[0], decode(value)["url"]) for key, value in rows]
        if args.name:
            found = [each for each in found if each[0] == args.name]
        if not found:
            which = f" of {args.name!r}" if args.name else ""
            raise Usage(f"no console{which} is open; `handrail serve FILE --console` opens one")
        if len({name for name, _ in found}) > 1:
            raise Usage(f"several are open, name one: {', '.join(sorted({name for name, _ in found}))}")
        links = []
        for name, url in found:
            code = new_code()
            await Access(store, name, lambda: 0.0).offer(code, args.as_ or guarded.config.console.principal, roles)
            links.append(f"{url}/#code={code}")
    finally:
        await store.close()
    for link in links:
        screen.data({"console": link}) if screen.as_json else screen.say(link)
    return Code.OK
