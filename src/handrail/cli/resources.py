"""The verbs about resources and prompts: `handrail resources`, `read`, `prompts`, `prompt` and `complete` (APP-30)."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from handrail.cli.arguments import parse_arguments
from handrail.cli.connect import client_for
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.terminal import Screen
from handrail.cli.tools import (
    FileSaver,
    find_entry,
    print_lists,
    print_problems,
    read_arguments,
    render_block,
    report_to,
)
from handrail.client.prompts import ListedPrompt, PromptMessages
from handrail.client.resources import ListedResource, ReadResult
from handrail.client.state_dir import CALLS_FILE, state_folder
from handrail.client.tools import ListedEntries
from handrail.errors import RemoteProtocolError
from handrail.model import Object
from handrail.text.controls import escape, one_line

__all__ = ["run_complete", "run_prompt", "run_prompts", "run_read", "run_resources"]

_VARIABLE = re.compile(r"\{[^{}]*\}")
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
    if not args.uri:
        raise UsageError("the URI is an empty text")
    if variables := _VARIABLE.findall(args.uri):
        raise UsageError(f"{one_line(args.uri, 300)} is a template; put values in place of {', '.join(variables)}")
    with client_for(args, screen, audit=state_folder(os.environ) / CALLS_FILE) as connection:
        if ":" not in args.uri:
            find_entry("resource of the URI", connection.resources(), args.uri)
        try:
            with screen.progress(f"reading {one_line(args.uri, 100)}") as spinner:
                result = connection.read(args.uri, progress=report_to(spinner))
        except RemoteProtocolError as problem:
            if isinstance(problem.data, dict) and "uri" in problem.data:
                problem.hint = "`handrail resources` lists what there is"
            raise
    files, is_one = FileSaver(args.save), len(result.contents) == 1
    texts = (
        files.save(each.data, each.mime_type or "no media type", number)
        if args.save or each.text is None
        else ("" if is_one else f"{escape(each.uri, lines=False)}:\n") + escape(each.text)
        for number, each in enumerate(result.contents)
    )
    return _print(result, texts, screen)


def run_prompt(args: Namespace, screen: Screen) -> int:
    with client_for(args, screen, audit=state_folder(os.environ) / CALLS_FILE) as connection:
        with screen.progress(f"asking {args.server}"):
            prompt = find_entry("prompt", connection.prompts(), args.prompt)
        arguments = read_arguments(args, _schema(prompt))
        with screen.progress(f"getting {prompt.name}") as spinner:
            result = connection.prompt(prompt.name, arguments, progress=report_to(spinner))
    files = FileSaver(args.save)
    texts = (
        f"{screen.paint(f'{each.role}:', 'bold')}\n{render_block(each.content, number, files)}"
        for number, each in enumerate(result.messages)
    )
    return _print(result, texts, screen)


def _print(result: ReadResult | PromptMessages, texts: Iterable[str], screen: Screen) -> int:
    if screen.as_json:
        screen.data(result.raw)
    else:
        for text in texts:
            screen.write(text)
        print_problems(result.problems, screen)
    return ExitCode.OK


def run_complete(args: Namespace, screen: Screen) -> int:
    others = parse_arguments(args.words, _TEXTS)
    with client_for(args, screen) as connection, screen.progress(f"asking {args.server}"):
        prompts = connection.prompts() if "{" not in args.what else None
        if prompts is not None and ":" in args.what and args.what not in prompts:
            templates = ", ".join([one_line(each.key, 100) for each in connection.templates()])
            raise UsageError(f"a template is written as `handrail resources` prints it: {templates or 'there is none'}")
        what = args.what if prompts is None else find_entry("prompt", prompts, args.what)
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
