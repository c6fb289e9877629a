"""Redis and PostgreSQL, as `handrail check` and `handrail doctor` look at them."""

from __future__ import annotations

import asyncio
from typing import Any

from handrail import stores
from handrail.cli.exit_codes import UsageError
from handrail.errors import TransportError
from handrail.stores import StoreError, StoreReport, is_url, public_url

__all__ = ["reports_of", "risks_of"]

CONNECT_SECONDS = 5.0


def reports_of(places: dict[str, Any]) -> dict[str, StoreReport]:
    """Connect to each place that is a URL, and return what its engine says of itself."""
    return asyncio.run(_ask_all({name: place for name, place in places.items() if is_url(place)}))


def risks_of(reports: dict[str, StoreReport]) -> list[str]:
    """Return a line for each setting of an engine that is a risk."""
    risks = [(each, f"may lose a write: {text}") for each in reports.values() for text in each.losses]
    risks += [(each, text) for each in reports.values() for text in each.warnings]
    return [f"{each.place}: {text}" for each, text in risks]


async def _ask_all(places: dict[str, str]) -> dict[str, StoreReport]:
    return {name: await _ask(name, url) for name, url in places.items()}


async def _ask(name: str, url: str) -> StoreReport:
    try:
        store = stores.open(url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await store.report()
        finally:
            await store.close()
    except StoreError as problem:  # its text says where
        raise TransportError(f"{name}: {problem}") from None
    except TimeoutError:
        raise TransportError(f"{name}: {public_url(url)}: no answer within {CONNECT_SECONDS:g} s") from None
    except (ValueError, ModuleNotFoundError) as problem:  # the URL, or an extra that is not installed
        raise UsageError(f"{name}: {problem}") from None
