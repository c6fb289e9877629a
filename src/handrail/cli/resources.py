"""The verbs about resources and prompts: `handrail resources`, `read`, `prompts`, `prompt` and `complete` (APP-30)."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from handrail.cli.arguments import parse_arguments, unknown_name
from handrail.cli.connect import client_for
from handrail.cli.exit_codes import ExitCode
from handrail.cli.terminal import Screen
from handrail.cli.tools import FileSaver, print_lists, read_arguments, render_block, report_to
from handrail.client.client import BlockingClient
from handrail.client.prompts import ListedPrompt
from handrail.client.resources import ListedResource
from handrail.client.state_dir import CALLS_FILE, state_folder
from handrail.client.tools import ListedEntries
from handrail.errors import RemoteProtocolError
from handrail.model import EmbeddedResource, Object
from handrail.text.controls import escape, one_line

__all__ = ["run_complete", "run_prompt", "run_prompts", "run_read", "run_resources"]

_TEXTS: Object = {"type": "object", "additionalProperties": {"type": "string"}}


def run_resources(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen) as connection:
        with screen.progress(f"listing the resources of {args.server}"):
            lists: dict[str, ListedEntries[Any]] = {
                "resources": connection.resources(),
                "resourceTemplates": connection.templates(),
            }
        print_lists(connection, lists, _resource_texts, screen)
    return ExitCode.OK


def run_prompts(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen) as connection:
        with screen.progress(f"listing the prompts of {args.server}"):
            lists = {"prompts": connection.prompts()}
        print_lists(connection, lists, lambda each: (_signature(each), each.title, each.description), screen)
    return ExitCode.OK


def run_read(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen, audit=state_folder(os.environ) / CALLS_FILE) as connection:
        try:
            with screen.progress(f"reading {one_line(args.uri, 100)}") as spinner:
                result = connection.read(args.uri, progress=report_to(spinner))
        except RemoteProtocolError as problem:
            if isinstance(problem.data, dict) and "uri" in problem.data:
                problem.hint = "`handrail resources` lists what there is"
            raise
    if screen.as_json:
        screen.data(result.raw)
        return ExitCode.OK
    files = FileSaver(args.save)
    for number, content in enumerate(result.contents):
        if args.save or content.text is None:
            screen.write(files.save(content.data, content.mime_type or "no media type", number))
        elif len(result.contents) == 1:
            screen.write(escape(content.text))
        else:
            screen.write(render_block(EmbeddedResource({"uri": content.uri, "text": content.text}), number, files))
    for flaw in result.problems:
        screen.note(one_line(flaw, 300))
    return ExitCode.OK


def run_prompt(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen, audit=state_folder(os.environ) / CALLS_FILE) as connection:
        with screen.progress(f"asking {args.server}"):
            prompt = _find(connection, args.prompt)
        arguments = read_arguments(args, _schema(prompt))
        with screen.progress(f"getting {prompt.name}") as spinner:
            result = connection.prompt(prompt.name, arguments, progress=report_to(spinner))
    if screen.as_json:
        screen.data(result.raw)
        return ExitCode.OK
    files = FileSaver(args.save)
    for number, message in enumerate(result.messages):
        screen.write(screen.paint(f"{message.role}:", "bold"))
        screen.write(render_block(message.content, number, files))
    for flaw in result.problems:
        screen.note(one_line(flaw, 300))
    return ExitCode.OK


def run_complete(args: Namespace, screen: Screen) -> int:
    others = parse_arguments(args.words, _TEXTS)
    with client_for(args, screen) as connection, screen.progress(f"asking {args.server}"):
        what = args.what if "{" in args.what else _find(connection, args.what)
        completion = connection.complete(what, args.argument, args.start, context=others)
    if screen.as_json:
        screen.data({"values": completion.values, "total": completion.total, "hasMore": completion.has_more})
        return ExitCode.OK
    for value in completion:
        screen.write(escape(value, lines=False))
    if not completion.values:
        screen.note("no values")
    elif completion.has_more:
        of_all = "" if completion.total is None else f" of {completion.total:,}"
        screen.note(f"{len(completion)}{of_all} values; a longer start gives fewer")
    return ExitCode.OK


def _find(connection: BlockingClient, name: str) -> ListedPrompt:
    prompts = connection.prompts()
    prompt = prompts.get(name)
    if prompt is None:
        raise unknown_name("prompt", name, [each.name for each in prompts])
    return prompt


def _schema(prompt: ListedPrompt) -> Object:
    """Return the schema of the arguments of a prompt, which are texts."""
    names = {each["name"]: {"type": "string"} for each in prompt.arguments}
    required = [each["name"] for each in prompt.arguments if each.get("required") is True]
    return {"type": "object", "properties": names, "required": required, "additionalProperties": False}


def _signature(prompt: ListedPrompt) -> str:
    """`review(code, style?)`"""
    names = (f"{each['name']}{'' if each.get('required') is True else '?'}" for each in prompt.arguments)
    return f"{prompt.name}({', '.join(names)})"


def _resource_texts(entry: ListedResource) -> tuple[str, str, str]:
    size = "" if entry.size is None else f"{entry.size:,} bytes"
    facts = ", ".join([each for each in (entry.mime_type, size) if each])
    first = entry.description.strip().split("\n")[0]
    return entry.key, entry.title, f"{first} ({facts})".strip() if facts else first
