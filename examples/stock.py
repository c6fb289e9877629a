"""An upstream server for the gateway of the demo: articles in stock. It speaks 2024-11-05 only, as an old server does.

    python examples/stock.py                          serve one client over standard input and output
    handrail gateway --server stock='python examples/stock.py'

In that revision a tool has no hints and a result is text: what the gateway makes of both is in docs/explanation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from handrail import Server, ToolError

Article = Annotated[str, Meta(min_length=1, max_length=60)]

server = Server("stock", version="1.0.0", revisions=["2024-11-05"])
shelves = {"kettle": 12, "lamp": 3, "notebook": 40}


@dataclass
class Found:
    article: str
    pieces: int


@server.tool
async def find_article(article: Article) -> Found:
    """How many pieces of an article are in stock."""
    if article not in shelves:
        raise ToolError(f"There is no article {article}; there are {', '.join(shelves)}.")
    return Found(article, shelves[article])


@server.tool
async def remove_article(article: Article) -> str:
    """Take an article out of the stock for good."""
    if shelves.pop(article, None) is None:
        raise ToolError(f"There is no article {article}.")
    return f"{article} is no longer in stock."


if __name__ == "__main__":
    server.run()
