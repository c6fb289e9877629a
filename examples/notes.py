"""An upstream server for the gateway of the demo: notes, in every revision of the protocol.

python examples/notes.py                          serve one client over standard input and output
handrail gateway --server notes='python examples/notes.py'
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from handrail import Server, ToolError

Name = Annotated[str, Meta(min_length=1, max_length=60)]
Words = Annotated[str, Meta(max_length=2_000)]

server = Server("notes", version="1.0.0")
notes = {"lamps": "Three are left.", "returns": "Ask for the receipt."}


@server.tool(read_only=True)
async def search_notes(word: Words) -> list[str]:
    """Names of the notes that have a word in them."""
    return [name for name, text in notes.items() if word.lower() in f"{name} {text}".lower()]


@server.tool
async def write_note(name: Name, text: Words) -> str:
    """Write a note, or write it anew."""
    if len(notes) >= 100 and name not in notes:
        raise ToolError("There are 100 notes already; delete one first.")
    notes[name] = text
    return f"The note {name} is written."


@server.tool
async def delete_note(name: Name) -> str:
    """Delete a note."""
    if notes.pop(name, None) is None:
        raise ToolError(f"There is no note {name}.")
    return f"The note {name} is deleted."


if __name__ == "__main__":
    server.run()
