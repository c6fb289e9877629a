"""An everyday server: weather, a shop's databases, sums, a chart, a tone, documents, questions, and a prompt.

    python examples/everyday.py                          serve one client over standard input and output
    python examples/everyday.py --http 127.0.0.1:8000    serve any number of clients over HTTP; it says its URL
    python examples/everyday.py --demo                   serve it with its console, to look around (examples/demo.py)

Everything here is made up or comes from small tables in this file: no network, no keys, nothing to configure.
"""

from __future__ import annotations

import asyncio
import calendar
import io
import math
import runpy
import sqlite3
import struct
import sys
import time
import wave
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from msgspec import Meta

from handrail import Audio, Call, EmbeddedResource, Image, ResourceLink, ResourceNotFound, Server, ToolError

READ_ONLY = {"readOnlyHint": True, "openWorldHint": False}

# Lifespan: what it yields is `call.state` in every tool.

TABLES = {
    "users": "users(id, name, city)",
    "products": "products(id, name, price)",
    "orders": "orders(id, user_id, product_id, status)",
}
ROWS: dict[str, list[tuple[object, ...]]] = {
    "users": [(1, "Ada", "London"), (2, "Edsger", "Paris"), (3, "Grace", "New York"), (4, "Hidetoshi", "Tokyo")],
    "products": [(1, "kettle", 24.5), (2, "lamp", 39.0), (3, "notebook", 3.2)],
    "orders": [(1, 1, 2, "open"), (2, 2, 1, "shipped"), (3, 3, 3, "open"), (4, 1, 3, "cancelled")],
}


@asynccontextmanager
async def shop(server: Server) -> AsyncIterator[Path]:
    """Three small SQLite files, in a folder that lives as long as the server."""
    with TemporaryDirectory(prefix="everyday-", ignore_cleanup_errors=True) as folder:
        for name, table in TABLES.items():
            rows = ROWS[name]
            with closing(sqlite3.connect(Path(folder, f"{name}.db"))) as connection, connection:
                connection.execute(f"CREATE TABLE {table.replace('(id', '(id INTEGER PRIMARY KEY')}")
                connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        yield Path(folder)


server = Server(
    "everyday",
    version="1.0.0",
    instructions="Example tools. The weather is a table of averages and the shop is made up: do not act on either.",
    lifespan=shop,
)

# Structured output: the return type is the output schema.

# Usual temperature of each month, in °C, rounded.
CLIMATE = {
    "Lima": [23, 24, 23, 21, 19, 17, 16, 16, 16, 17, 19, 21],
    "London": [6, 6, 8, 11, 14, 17, 19, 19, 16, 12, 9, 6],
    "Nairobi": [20, 21, 21, 20, 19, 18, 17, 17, 19, 20, 19, 19],
    "New York": [1, 2, 6, 12, 18, 22, 25, 24, 21, 14, 9, 4],
    "Paris": [5, 6, 9, 12, 15, 19, 21, 21, 17, 13, 8, 6],
    "Sydney": [24, 24, 22, 19, 16, 14, 13, 14, 17, 19, 21, 23],
    "Tokyo": [5, 6, 9, 14, 19, 22, 26, 27, 23, 18, 13, 8],
}


@dataclass
class Weather:
    location: str
    month: str
    temperature: float
    unit: Literal["°C", "°F"]
    source: str = "monthly averages shipped with this example; not a measurement"


@server.tool(title="Usual weather", annotations=READ_ONLY)
async def get_weather(
    location: Annotated[str, Meta(description="City name, for example Paris", min_length=1, max_length=100)],
    units: Annotated[Literal["metric", "imperial"], Meta(description="°C or °F")] = "metric",
) -> Weather:
    """Usual temperature of a city in the present month, from a small table of averages. Not a forecast."""
    city = {name.casefold(): name for name in CLIMATE}.get(location.strip().casefold())
    if city is None:
        raise ToolError(f"No such city in the table: {location}. Known are {', '.join(CLIMATE)}.")
    month = datetime.now(UTC).month
    celsius = CLIMATE[city][month - 1]
    if units == "imperial":
        return Weather(city, calendar.month_name[month], round(celsius * 9 / 5 + 32, 1), "°F")
    return Weather(city, calendar.month_name[month], celsius, "°C")


# A `def` tool runs in a worker thread, so it may block. What a model writes is a stranger's input: bound all of it.

MAX_ROWS = 50
MAX_TEXT = 200
QUERY_SECONDS = 1.0
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

Cell = str | int | float | None


@dataclass
class Rows:
    columns: list[str]
    rows: list[list[Cell]]
    more: bool


@server.tool(title="Query a database", annotations=READ_ONLY, timeout=10.0)
def query_database(
    call: Call,
    query: Annotated[str, Meta(description="One SELECT statement, in SQLite's SQL", min_length=1, max_length=2000)],
    database: Annotated[Literal["users", "products", "orders"], Meta(description="Where to look")] = "users",
) -> Rows:
    """Run one SELECT on a database of the (made up) shop. Each database has one table of the same name.

    users(id, name, city), products(id, name, price), orders(id, user_id, product_id, status).
    Gives at most 50 rows; `more` says whether there were more. Texts are cut after 200 characters.
    """
    deadline = time.monotonic() + QUERY_SECONDS
    file = (call.state / f"{database}.db").as_uri()
    with closing(sqlite3.connect(f"{file}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 32)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: call.cancelled or time.monotonic() > deadline, 100)
        try:
            cursor = connection.execute(query)
            rows = [[cell(value) for value in row] for row in islice(cursor, MAX_ROWS)]
            more = cursor.fetchone() is not None
        except (sqlite3.Error, sqlite3.Warning, ValueError) as problem:
            raise ToolError(query_problem(problem, database)) from None
        if cursor.description is None:
            raise ToolError("The query gives no rows to read. Write one SELECT.")
        return Rows([column[0][:MAX_TEXT] for column in cursor.description], rows, more)


def cell(value: str | bytes | float | None) -> Cell:
    """A value as JSON can carry it, and no longer than is useful."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:MAX_TEXT] + "…"
    return value


def query_problem(problem: Exception, database: str) -> str:
    text = str(problem).removesuffix(".")
    if text in ("not authorized", "authorization denied"):
        return "Only reading is allowed here: write one SELECT. The database cannot be changed, nor another opened."
    if text == "interrupted":
        return f"The query was stopped after {QUERY_SECONDS:g} s. Ask for less, with WHERE or LIMIT."
    return f"The query does not work: {text}. The database {database} has the table {TABLES[database]}."


# No parameters; and schemas written by hand, in either dialect of JSON Schema.


@server.tool(title="Current time", annotations=READ_ONLY)
async def get_current_time() -> str:
    """The server's current time, in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


TWO_NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


@server.tool(title="Sum", input_schema=TWO_NUMBERS, annotations=READ_ONLY)
async def calculate_sum(a: float, b: float) -> float:
    """Add two numbers."""
    total = a + b
    if not math.isfinite(total):
        raise ToolError("The sum is too large to be written as a number.")
    return total


server.add(
    calculate_sum,
    name="calculate_sum_draft07",
    title="Sum (draft-07)",
    input_schema={"$schema": "http://json-schema.org/draft-07/schema#", **TWO_NUMBERS},
    annotations=READ_ONLY,
)

# Pictures, sounds and documents.

BAR, HEIGHT = 12, 100
SAMPLES_PER_SECOND = 8000


@server.tool(title="Bar chart", annotations=READ_ONLY)
def draw_chart(
    values: Annotated[
        list[Annotated[float, Meta(ge=0, le=1e9)]],
        Meta(description="One bar for each, from left to right", min_length=1, max_length=50),
    ],
) -> Image:
    """Draw a bar chart, as a PNG picture."""
    most = max(values) or 1
    bars = [round(value / most * HEIGHT) for value in values]
    lines = [
        b"".join((b"\x30" * (BAR - 2) if bar >= level else b"\xff" * (BAR - 2)) + b"\xff\xff" for bar in bars)
        for level in range(HEIGHT, 0, -1)
    ]
    # One byte a pixel, grey; each line begins with the number of its filter, 0.
    header = struct.pack(">IIBBBBB", BAR * len(bars), HEIGHT, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return Image(png, "image/png")


@server.tool(title="Tone", annotations=READ_ONLY)
def play_tone(
    frequency: Annotated[float, Meta(description="In Hz; 440 is concert pitch", ge=20, le=3500)] = 440,
    seconds: Annotated[float, Meta(ge=0.05, le=2)] = 0.5,
) -> Audio:
    """A pure tone, as a WAV sound."""
    count = int(seconds * SAMPLES_PER_SECOND)
    turn = 2 * math.pi * frequency / SAMPLES_PER_SECOND
    samples = struct.pack(f"<{count}h", *(round(12_000 * math.sin(turn * i)) for i in range(count)))
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, SAMPLES_PER_SECOND, count, "NONE", "not compressed"))
        file.writeframes(samples)
    return Audio(sound.getvalue(), "audio/wav")


DOCUMENTS = {
    "returns": "Send it back within 30 days, unused and in its box. The money is with you within a week.",
    "shipping": "Orders leave on the next working day. Within the country they take two days, abroad a week.",
    "warranty": "Kettles and lamps are covered for two years, notebooks until they are full.",
}
Document = Literal["returns", "shipping", "warranty"]


@server.tool(title="Find a document", annotations=READ_ONLY)
async def find_document(
    word: Annotated[str, Meta(description="A word of its title or text", min_length=2, max_length=50)],
) -> ResourceLink:
    """Find the shop's document that mentions a word; gives a link. read_document gives its text."""
    for name, text in DOCUMENTS.items():
        if word.casefold() in f"{name} {text}".casefold():
            size = len(text.encode())
            return ResourceLink(uri=f"shop://documents/{name}", name=name, mime_type="text/plain", size=size)
    raise ToolError(f"No document mentions {word!r}. There are {', '.join(DOCUMENTS)}.")


@server.tool(title="Read a document", annotations=READ_ONLY)
async def read_document(name: Annotated[Document, Meta(description="Which one")]) -> EmbeddedResource:
    """The text of one of the shop's documents."""
    return embedded(name)


def embedded(name: Document) -> EmbeddedResource:
    return EmbeddedResource({"uri": f"shop://documents/{name}", "mimeType": "text/plain", "text": DOCUMENTS[name]})


# The URIs that these tools link and embed can be read: a template of resources, with completion of its variable.


def names_of_documents(start: str) -> list[str]:
    return [name for name in DOCUMENTS if name.startswith(start)]


@server.resource(
    "shop://documents/{name}",
    title="Document of the shop",
    mime_type="text/plain",
    complete={"name": names_of_documents},
)
async def document(name: str) -> str:
    """What the shop promises its customers about one subject."""
    if name not in DOCUMENTS:
        raise ResourceNotFound()
    return DOCUMENTS[name]


# A prompt: messages that a person starts a conversation with. Arguments that are a choice complete by themselves.


@server.prompt(title="Answer a customer")
async def answer_customer(
    question: Annotated[str, Meta(description="What the customer wrote", min_length=1, max_length=2000)],
    document: Annotated[Document, Meta(description="What the answer must agree with")] = "returns",
) -> list[str | EmbeddedResource]:
    """Draft an answer to a customer that agrees with a document of the shop."""
    return [embedded(document), f"Draft a short answer that agrees with this document. A customer writes: {question}"]


# Taking part in the call: progress and questions. `call` is no part of the schema.


@server.tool(title="Count slowly", annotations=READ_ONLY)
async def slow_count(call: Call, steps: Annotated[int, Meta(ge=1, le=100)] = 5) -> str:
    """Count to a number, a twentieth of a second a step, and tell the progress."""
    for step in range(1, steps + 1):
        await asyncio.sleep(0.05)
        await call.progress(step, steps, f"step {step} of {steps}")
    return f"Counted to {steps}."


@dataclass
class Introduction:
    name: Annotated[str, Meta(description="What to call you", min_length=1, max_length=60)]
    language: Literal["English", "French", "German"] = "English"


@server.tool(title="Greet", annotations=READ_ONLY)
async def greet(call: Call) -> str:
    """Ask the person's name and language, and greet them."""
    # A form is for what everybody may see. Ask for a secret with `call.ask_url`, never like this.
    answer = await call.ask("Who are you?", Introduction)
    if answer.action != "accept":
        return "Hello, whoever you are."
    hello = {"English": "Hello", "French": "Bonjour", "German": "Guten Tag"}[answer.content.language]
    return f"{hello}, {answer.content.name}."


# A tool that says it destroys is not run before a person has agreed; that is up to the guards, not to the tool. The
# preview tells that person what would happen. It only reads.


def order_in_words(call: Call, order_id: int) -> str:
    with closing(sqlite3.connect(call.state / "orders.db")) as orders:
        found = orders.execute("SELECT product_id, user_id, status FROM orders WHERE id = ?", [order_id]).fetchone()
    if found is None:
        raise ToolError(f"There is no order {order_id}.")
    return "Order {}: product {} for customer {}, {} now.".format(order_id, *found)


@server.tool(
    title="Cancel an order",
    preview=order_in_words,
    annotations={"readOnlyHint": False, "destructiveHint": True, "idempotentHint": True, "openWorldHint": False},
)
def cancel_order(call: Call, order_id: Annotated[int, Meta(ge=1, le=1_000_000)]) -> str:
    """Cancel an open order. It cannot be undone.

    An order that is cancelled already stays so: calling again does no harm. Shipped orders cannot be cancelled.
    """
    with closing(sqlite3.connect(call.state / "orders.db", isolation_level=None)) as orders:
        found = orders.execute("SELECT status FROM orders WHERE id = ?", [order_id]).fetchall()
        match found:
            case []:
                raise ToolError(f"There is no order {order_id}. query_database lists them.")
            case [("cancelled",)]:
                return f"Order {order_id} is cancelled already; nothing was changed."
            case [("shipped",)]:
                raise ToolError(f"Order {order_id} has been shipped and cannot be cancelled; see the document returns.")
        done = orders.execute("UPDATE orders SET status = 'cancelled' WHERE id = ? AND status = 'open'", [order_id])
        if done.rowcount != 1:
            raise ToolError(f"Order {order_id} has changed in the meantime; nothing was done. Look at it again.")
    return f"Order {order_id} is cancelled."


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--demo"]:
            runpy.run_path(str(Path(__file__).with_name("demo.py")), run_name="__main__")
        case ["--http", address]:
            server.run(http=address)
        case _:
            server.run()
