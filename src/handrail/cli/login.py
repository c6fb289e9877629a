"""Logging in at a server's authorization server, with the person on the terminal (P-26)."""

from __future__ import annotations

from handrail.cli.forms import aside
from handrail.cli.screen import Screen
from handrail.client.state import State
from handrail.guards.inert import inert
from handrail.oauth.agent import OAuth, open_browser

__all__ = ["authorization"]


def authorization(screen: Screen, state: State) -> OAuth:
    """Asks before a browser is opened; without one, the address to visit is shown, and the one that came back taken."""

    def log_in(address: tuple[str, str]) -> bool | str:
        url, host = address
        screen.tell(f"{inert(host)} wants you to log in:\n  {inert(url, lines=False)}")
        if screen.ask("Open it in your browser?") and open_browser(url):
            return True
        return screen.read("Visit it yourself, and paste the address you were sent back to: ") or False

    async def browser(url: str, host: str) -> bool | str:
        found: bool | str = await aside(log_in, (url, host))
        return found

    return OAuth(browser=browser, folder=state.folder / "credentials")
