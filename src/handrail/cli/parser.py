"""Every verb and option of the command line. A verb is run by the function `run_VERB` of a module."""

from __future__ import annotations

import os
import re
import sys
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from handrail.cli.exit_codes import ExitCode, UsageError

__all__ = ["build_parser", "run_completion"]

_SAVE = "folder for pictures and sounds (a new temporary one)"
_TARGET = "a Python file, and the server in it if there are several"
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_ADDRESS = re.compile(r"unix:.+|(?:[^/]*:)?[0-9]{1,5}")


class CommandParser(ArgumentParser):
    """A parser that raises UsageError, so that `--json` and the exit codes apply to usage errors too."""

    def error(self, message: str) -> NoReturn:
        if match := _CHOICE.search(message):
            near = get_close_matches(match[1], match[2].replace("'", "").split(", "), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {match[2]}"
            message = f"{message[: match.start()]}unknown: {match[1]!r}; {hint}"
        if message.startswith("unrecognized arguments: -"):
            near = get_close_matches(message.split()[2], self._option_string_actions, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{message}; {self.prog} --help says more", self.format_usage())


if TYPE_CHECKING:
    from handrail.cli.terminal import Screen

    _Choice = _SubParsersAction[CommandParser]
else:
    _Choice = _SubParsersAction


class _VerbAction(_Choice):
    """Parses the words of a verb, values and options in any order; errors have the usage of the verb."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        name, *words = values
        verb = self.choices[name]
        options, unparsed = verb.parse_known_args(words)
        if unparsed:  # argparse allows no value after an option; this slower method does
            options = verb.parse_intermixed_args(words)
        vars(namespace).update(vars(options), verb=name)
        if namespace.json and getattr(namespace, "save", None):
            raise UsageError("--json and --save: choose one of them; the JSON has all that would be saved")


_AddVerb = Callable[..., CommandParser]
"""Add a verb: its name, a summary, and examples."""


def build_parser() -> CommandParser:
    codes = "\n".join(f"  {code.value:<5} {code.description}" for code in ExitCode)
    root = CommandParser(
        prog="handrail",
        description="Serve, call and guard MCP tools.",
        epilog=f"exit codes:\n{codes}\n\n`handrail VERB --help` has examples. NO_COLOR switches colours off.",
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    _add_common_options(root, False, "auto")
    root.add_argument("--version", action="store_true", help="print the version")
    # With `prog`: argparse would derive it from a usage text, which costs more than all the rest.
    verbs: _SubParsersAction[CommandParser] = root.add_subparsers(
        action=_VerbAction, dest="verb", metavar="VERB", prog="handrail", title="verbs"
    )

    def verb(name: str, summary: str, *examples: str) -> CommandParser:
        command = verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=_formatter,
            allow_abbrev=False,
        )
        _add_common_options(command, SUPPRESS, SUPPRESS)  # SUPPRESS keeps the values of options before the verb
        return command

    for group in (
        _add_serve_verb,
        _add_gateway_verbs,
        _add_call_verbs,
        _add_resource_verbs,
        _add_host_verbs,
        _add_audit_verb,
        _add_check_verbs,
        _add_approval_verbs,
        _add_other_verbs,
    ):
        group(verb)
    return root


def _add_serve_verb(verb: _AddVerb) -> None:
    serve = verb(
        "serve",
        "serve the tools of a Python file",
        "handrail serve weather.py                    one client over standard input and output",
        "handrail serve weather.py:server --reload    and reload its tools while you edit the file",
        "handrail serve weather.py --http             http://127.0.0.1:8000/mcp",
        "handrail serve weather.py --http 127.0.0.1:9000 --workers 4",
        "handrail serve weather.py --console          and print a link to a page that shows its calls",
        "handrail serve --config handrail.toml        with its guards, and the server it names",
    )
    serve.add_argument("target", nargs="?", metavar="FILE[:OBJECT]", help=_TARGET)
    _add_config_options(serve)
    _add_listen_options(serve)
    serve.add_argument(
        "--reload", action="store_true", help="reload the tools when the file changes; connections stay open"
    )


def _add_gateway_verbs(verb: _AddVerb) -> None:
    gateway = verb(
        "gateway",
        "serve the tools of other MCP servers, behind our guards",
        "handrail gateway mcp.json                    the servers of a file with mcpServers, over standard input",
        "handrail gateway --server fs='npx -y @modelcontextprotocol/server-filesystem .' --http",
        "handrail gateway --server gh=https://example.org/mcp --console",
        "handrail gateway mcp.json --agree            ask about each of its commands once, and end",
        "handrail gateway --adopt cursor              take over the servers of a host; --undo cursor gives them back",
    )
    gateway.add_argument("target", nargs="?", metavar="FILE.json", help="a file with mcpServers, in any dialect")
    _add_upstream_options(gateway)
    _add_config_options(gateway)
    _add_listen_options(gateway)
    gateway.add_argument("--trust", action="store_true", help="believe what the servers say of their tools")
    gateway.add_argument("--agree", action="store_true", help="ask about each command of the files, and end")
    hosts = "the host, or its file: claude, claude-code, cursor, vscode, windsurf or a path"
    gateway.add_argument("--adopt", metavar="HOST", help=f"put a gateway in place of the servers of {hosts}")
    gateway.add_argument("--undo", metavar="HOST", help="put the servers back in place of the gateway")
    gateway.add_argument("--yes", action="store_true", help="agree, and write, without asking")

    trust = verb(
        "trust",
        "show the tools of the servers behind a gateway, and accept what each of them is taken for",
        "handrail trust fs                            of the gateway that has a server of that name",
        "handrail trust mcp.json --accept             all as proposed, for scripts",
        "handrail trust fs --server fs='npx -y @modelcontextprotocol/server-filesystem .'",
    )
    trust.add_argument("words", nargs="*", metavar="NAME|FILE.json", help="names of servers (all), and their file")
    _add_upstream_options(trust)
    _add_config_options(trust)
    trust.add_argument("--accept", action="store_true", help="accept all as shown, without asking")
    trust.add_argument("--yes", action="store_true", help="start commands of the file without asking")


def _add_upstream_options(command: CommandParser) -> None:
    server = "a server: a command in quotes, an address, or a name from a configuration"
    command.add_argument("--server", action="append", default=[], metavar="NAME=SERVER", help=server)
    command.add_argument("--name", help="name of the gateway (gateway)")


def _add_listen_options(command: CommandParser) -> None:
    http = "serve over HTTP instead (127.0.0.1:8000)"
    command.add_argument("--http", nargs="?", const="127.0.0.1:8000", type=_address, metavar="[HOST:]PORT", help=http)
    command.add_argument("--workers", type=_count, metavar="N", help="number of processes, with --http (1)")
    console = "also serve a page that shows its calls and lets you approve them (127.0.0.1:7420)"
    command.add_argument(
        "--console", nargs="?", const="", type=lambda text: text and _address(text), metavar="[HOST:]PORT", help=console
    )


def _add_call_verbs(verb: _AddVerb) -> None:
    listing = verb(
        "list",
        "list the tools of a server",
        "handrail list weather.py",
        "handrail list https://example.org/mcp",
        "handrail list 'npx -y @modelcontextprotocol/server-everything'",
        "handrail list filesystem                a server of a host's configuration, by its name",
        "handrail list mcp.json --cost           and about how many tokens each tool costs a model",
    )
    _add_client_options(listing)
    listing.add_argument("--cost", action="store_true", help="estimate the tokens of each definition")

    show = verb("show", "show one tool as a function, with its documentation", "handrail show weather.py get_weather")
    _add_client_options(show)
    show.add_argument("tool", metavar="TOOL")

    call = verb(
        "call",
        "call a tool, after showing what is sent",
        "handrail call weather.py get_weather location=Paris units=metric",
        'handrail call weather.py get_weather --arguments \'{"location": "Paris"}\'',
        'echo \'{"location": "Paris"}\' | handrail call weather.py get_weather --arguments -',
        "handrail call weather.py forecast place.lat=48.8 days:=3 note=@note.txt --json",
    )
    _add_client_options(call)
    call.add_argument("tool", metavar="TOOL")
    _add_arguments(call, "arguments, typed by the tool's schema; KEY:=JSON")
    call.add_argument("--save", metavar="FOLDER", help=_SAVE)

    inspect = verb(
        "inspect",
        "show what a server is, what it can, and how long it takes",
        "handrail inspect weather.py",
        "handrail inspect https://example.org/mcp --wire    every message, with secrets masked",
    )
    _add_client_options(inspect)
    inspect.add_argument("--wire", action="store_true", help="show every message")

    doctor = verb(
        "doctor",
        "find out why a server does not connect: each step, its verdict, and what to do",
        "handrail doctor filesystem",
        "handrail doctor 'python my_server.py'",
        "handrail doctor redis://127.0.0.1:6379       what replicas share; postgresql://… likewise",
    )
    _add_client_options(doctor)


def _add_resource_verbs(verb: _AddVerb) -> None:
    resources = verb(
        "resources",
        "list the resources of a server, and its templates of resources",
        "handrail resources notes.py",
        "handrail resources https://example.org/mcp --json",
    )
    _add_client_options(resources)

    read = verb(
        "read",
        "read a resource",
        "handrail read notes.py file:///notes/today",
        "handrail read notes.py image://logo --save pictures    every content into a file, byte for byte",
    )
    _add_client_options(read)
    read.add_argument("uri", metavar="URI")
    read.add_argument("--save", metavar="FOLDER", help="folder for all contents (none; binary ones: a temporary one)")

    prompts = verb("prompts", "list the prompts of a server", "handrail prompts notes.py")
    _add_client_options(prompts)

    prompt = verb(
        "prompt",
        "print the messages of a prompt",
        "handrail prompt notes.py review code=@example.py style=short",
        'handrail prompt notes.py review --arguments \'{"code": "x = 1"}\' --json',
    )
    _add_client_options(prompt)
    prompt.add_argument("prompt", metavar="PROMPT")
    _add_arguments(prompt, "arguments, as texts")
    prompt.add_argument("--save", metavar="FOLDER", help=_SAVE)

    complete = verb(
        "complete",
        "print the values that an argument of a prompt, or a variable of a template, can have",
        "handrail complete notes.py review style",
        "handrail complete notes.py review style s       those that begin with s",
        "handrail complete notes.py 'file:///notes/{name}' name --known folder=work",
    )
    _add_client_options(complete)
    complete.add_argument("what", metavar="PROMPT|TEMPLATE", help="the name of a prompt, or a URI template")
    complete.add_argument("argument", metavar="ARGUMENT")
    complete.add_argument("start", nargs="?", default="", metavar="START", help="the first letters of the value")
    others = "another argument that has its value already"
    complete.add_argument("--known", dest="words", action="append", default=[], metavar="KEY=VALUE", help=others)


def _add_arguments(command: CommandParser, text: str) -> None:
    command.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help=text)
    json_text = "arguments as JSON; -: standard input"
    command.add_argument("--arguments", dest="arguments_json", metavar="JSON", help=json_text)


def _add_host_verbs(verb: _AddVerb) -> None:
    config = verb(
        "config",
        "list the servers in the configurations of hosts on this machine, and what is missing in them",
        "handrail config",
        "handrail config .mcp.json --json",
    )
    config.add_argument("files", nargs="*", metavar="FILE", help="files to read instead of those of the usual hosts")

    install = verb(
        "install",
        "write a server into the configuration of a host, after showing the difference",
        "handrail install weather.py --host cursor",
        "handrail install weather.py:server --host vscode --name weather",
        "handrail install weather.py --host claude --file ./claude_desktop_config.json --yes",
    )
    install.add_argument("target", metavar="FILE[:OBJECT]", help=_TARGET)
    hosts = ("claude", "claude-code", "cursor", "vscode", "windsurf")
    install.add_argument("--host", choices=hosts, required=True, help="the host to configure")
    install.add_argument("--name", help="name of the entry (the server's own)")
    install.add_argument("--file", metavar="PATH", help="the host's file, if it is not in the usual place")
    install.add_argument("--yes", action="store_true", help="write without asking")


def _add_audit_verb(verb: _AddVerb) -> None:
    audit = verb(
        "audit",
        "list the tool calls from here",
        "handrail audit                          the last 20 calls",
        "handrail audit -f --server 'weather*'   and new ones",
        "handrail audit --since 2h --outcome denied",
        "handrail audit --tail 0 --export csv > calls.csv",
        "handrail audit served                   the calls that `handrail serve` has answered",
        "handrail audit verify                   check the logs of calls here, and print their heads",
        "handrail audit verify trail.jsonl --head 5f3c…@1..2741,365d",
        "handrail audit export broken.db --salvage > trail.jsonl",
        "handrail audit key signing.pem          make a key that signs the log, and print the public one",
        "handrail audit verify trail.jsonl --key ed25519:MCowBQ… --checkpoints elsewhere.jsonl",
    )
    what = "served: calls that a server has answered; verify: check a log; export: copy its records; key: make a key"
    what += " that signs logs; prepare: make the tables of one in PostgreSQL; trim: delete its records that are too old"
    audit.add_argument("what", nargs="?", choices=("served", "verify", "export", "key", "prepare", "trim"), help=what)
    audit.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="audit logs: .db, .jsonl, postgresql://… (state.db in the state folder)",
    )
    _add_config_options(audit)
    audit.add_argument("--head", metavar="HEAD", help="verify: a head of the log that was printed earlier")
    heads = "verify: what was printed earlier of a log in PostgreSQL, with a head for each writer"
    audit.add_argument("--heads", metavar="FILE", help=heads)
    writers = "verify: FILE is a copy of a log in PostgreSQL, where each writer has a chain"
    audit.add_argument("--writers", action="store_true", help=writers)
    grant = "prepare: a role that may add records and read them, and not change them; may be repeated"
    audit.add_argument("--grant", action="append", default=[], metavar="ROLE", help=grant)
    audit.add_argument("--key", metavar="PUBLIC-KEY", help="verify: the key that signs the log, ed25519:… or a file")
    audit.add_argument("--checkpoints", metavar="FILE", help="verify: copies of its checkpoints; with --key")
    audit.add_argument(
        "--salvage", action="store_true", help="export: every record that can be read from a damaged file"
    )
    audit.add_argument("--tail", type=_number, default=20, metavar="N", help="only the last N; 0: all (20)")
    audit.add_argument("--server", metavar="GLOB", help="only calls of these servers")
    audit.add_argument("--tool", metavar="GLOB", help="only calls of these tools")
    audit.add_argument("--outcome", metavar="GLOB", help="only calls with this outcome: ok, error, denied, …")
    audit.add_argument("--since", metavar="TIME", help="2026-07-28, 2026-07-28T09:30, or 30m, 2h, 7d")
    audit.add_argument("--export", choices=("json", "csv"), help="print one document with every member of each call")
    audit.add_argument("-f", "--follow", action="store_true", help="wait for new calls and print them")


def _add_check_verbs(verb: _AddVerb) -> None:
    check = verb(
        "check",
        "check a configuration, and print what is in force and where it is set",
        "handrail check",
        "handrail check --config handrail.toml weather.py    and whether its rules match any tool",
    )
    check.add_argument("target", nargs="?", metavar="FILE[:OBJECT]", help=_TARGET)
    _add_config_options(check)

    explain = verb(
        "explain",
        "print what each guard would do with a call, and which rule decides, without calling",
        "handrail explain --as alice --server shop.py call cancel_order order=7",
        "handrail explain --as bob --scope orders:write call cancel_order order=7 --json",
        "handrail explain --as bob --server notes.py read file:///notes/today",
        "handrail explain --as bob --server notes.py prompt review code=x",
    )
    explain.add_argument(
        "action", choices=("call", "read", "prompt"), help="call a tool, read a resource, get a prompt"
    )
    explain.add_argument("name", metavar="NAME", help="the tool or the prompt, or the URI of the resource")
    _add_arguments(explain, "arguments, typed by the tool's schema")
    explain.add_argument("--as", dest="as_", default="local", metavar="WHO", help="the caller (local)")
    explain.add_argument("--scope", action="append", default=[], metavar="SCOPE", help="a scope of the caller")
    explain.add_argument(
        "--revision", default="2026-07-28", metavar="NAME", help="the caller's protocol revision (2026-07-28)"
    )
    explain.add_argument("--server", metavar="FILE[:OBJECT]", help=_TARGET)
    _add_config_options(explain)


def _add_approval_verbs(verb: _AddVerb) -> None:
    approve = verb(
        "approve",
        "show the calls that wait for approval, and approve or deny them",
        "handrail approve                            all that wait, one after the other",
        "handrail approve --watch                    and new ones",
        "handrail approve 3f9a1c0b7d yes --remember 2h",
        "handrail approve 3f9a1c0b7d yes --remember 2h --where 'amount={\"under\": 100}'",
        "handrail approve 3f9a1c0b7d no --note 'wrong order'",
        "handrail approve 3f9a1c0b7d edit --arguments '{\"order\": 8}'",
        "handrail approve --remembered               approvals that are remembered; --revoke ID ends one",
        "handrail approve --audit calls.db           of a server with its own audit log",
    )
    approve.add_argument("id", nargs="?", metavar="ID")
    approve.add_argument("answer", nargs="?", choices=("yes", "no", "edit"))
    approve.add_argument("--note", metavar="TEXT", help="a reason, sent to the caller")
    approve.add_argument("--remember", metavar="TIME", help="do not ask again for the same call: 30m, 2h, 7d")
    where = "with --remember: this argument may differ if it meets a condition, written as in a rule"
    approve.add_argument("--where", action="append", default=[], metavar="NAME=JSON", help=where)
    approve.add_argument(
        "--arguments", dest="arguments_json", metavar="JSON", help="with edit: the arguments to run with"
    )
    approve.add_argument("--watch", action="store_true", help="wait for new calls")
    approve.add_argument("--remembered", action="store_true", help="list the remembered approvals")
    approve.add_argument("--revoke", metavar="ID", help="revoke a remembered approval")
    _add_config_options(approve)

    stop = verb(
        "stop",
        "stop an upstream server, a tool or a caller, in all servers that run from here",
        "handrail stop fs                            its calls in flight are cancelled, new ones refused",
        "handrail stop --tool gh_delete_repository --note 'ask Grace first'",
        "handrail stop --caller bot-7",
        "handrail stop --undo fs",
        "handrail stop                               what is stopped",
    )
    stop.add_argument("upstream", nargs="?", metavar="NAME", help="an upstream server of a gateway")
    stop.add_argument("--tool", metavar="NAME", help="a tool")
    stop.add_argument("--caller", metavar="ID", help="a caller: local, or the name of its API key")
    stop.add_argument("--undo", action="store_true", help="end the stop")
    stop.add_argument("--note", metavar="TEXT", help="a reason, sent to the callers")
    _add_config_options(stop)

    grants = verb(
        "grants",
        "list who has signed in to the upstream servers of a gateway, and revoke that",
        "handrail grants                              upstream servers and callers",
        "handrail grants --revoke gh --caller alice   her next call asks her to sign in again",
        "handrail grants --revoke gh                  the same for all callers",
    )
    grants.add_argument("--revoke", metavar="NAME", help="an upstream server of a gateway")
    grants.add_argument("--caller", metavar="ID", help="a caller: local, or the name of its API key")
    _add_config_options(grants)

    console_verb = verb(
        "console",
        "print a link to the console of a running server; it works once, for five minutes",
        "handrail console                             of the only running server",
        "handrail console weather                     of the server of that name",
        "handrail console --as grace --roles view,approve",
    )
    console_verb.add_argument("name", nargs="?", metavar="SERVER", help="the server's name, if several run")
    console_verb.add_argument(
        "--as", dest="as_", metavar="WHO", help="name of the person it signs in (as configured: local)"
    )
    console_verb.add_argument("--roles", metavar="A,B", help="roles: view, call, approve, manage (as configured: all)")
    _add_config_options(console_verb)


def _add_other_verbs(verb: _AddVerb) -> None:
    keys = verb(
        "keys",
        "make an API key for a caller, or the key that seals cursors and sessions",
        "handrail keys new ada --scopes orders:read,orders:write    and its lines for handrail.toml",
        'export HANDRAIL_KEY="$(handrail keys seal)"                for servers that share sessions',
    )
    keys.add_argument("what", choices=("new", "seal"), help="an API key, or a key for HANDRAIL_KEY")
    keys.add_argument("name", nargs="?", metavar="NAME", help="new: name of the caller")
    keys.add_argument("--scopes", metavar="A,B", help="new: scopes of the caller")

    lock = verb(
        "lock",
        "write the tools of servers to a file, or compare them with it",
        "handrail lock weather.py https://example.org/mcp    into tools.lock, to review and commit",
        "handrail lock --check weather.py                    exit code 5 if a tool is not as in tools.lock",
        "handrail lock --check --yes                         every server in tools.lock, for scripts",
    )
    _add_client_options(lock, several=True)
    lock.add_argument("--check", action="store_true", help="write nothing, and print what has changed")
    lock.add_argument("--file", default="tools.lock", metavar="PATH", help="the file (tools.lock)")

    completion = verb(
        "completion",
        "print a script that completes verbs and options in a shell",
        'eval "$(handrail completion bash)"    in ~/.bashrc; zsh likewise',
        "handrail completion fish > ~/.config/fish/completions/handrail.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def _add_config_options(command: CommandParser) -> None:
    text = "the guards' configuration (handrail.toml beside the server, or here, if there is one)"
    command.add_argument("--config", metavar="FILE", help=text)
    only = "with --config: ignore another handrail.toml beside the server"
    command.add_argument("--config-only", action="store_true", help=only)
    store = "what replicas share: redis://… (HANDRAIL_STORE, or `url` in [store])"
    command.add_argument("--store", metavar="URL", help=store)
    name = "the server, where several share what --store names"
    command.add_argument("--server-name", metavar="NAME", help=name)
    audit = "the audit log: a .db or .jsonl file, or postgresql://… (HANDRAIL_AUDIT, or [audit])"
    command.add_argument("--audit", metavar="PLACE", help=audit)


def _add_client_options(command: CommandParser, *, several: bool = False) -> None:
    """The options of every verb that talks to a server."""
    server = "an address, a .py or .json file, a command in quotes, or a name from a configuration"
    if several:
        command.add_argument("servers", nargs="*", metavar="SERVER", help=f"{server} (those in the file)")
    else:
        command.add_argument("server", metavar="SERVER", help=server)
    command.add_argument("--revision", default="auto", metavar="NAME", help="auto, legacy, or one revision (auto)")
    command.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="longest time of a call (600)")
    command.add_argument(
        "--transport", choices=("auto", "streamable", "sse"), default="auto", help="the HTTP transport (auto)"
    )
    command.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="an HTTP header to send"
    )
    key = "an API key or a token, over HTTP; @FILE reads it from a file, - from standard input"
    command.add_argument("--key", metavar="KEY", help=key)
    command.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable of a command"
    )
    command.add_argument(
        "--trusted", action="store_true", help="believe the server's annotations of its tools, as with a FILE.py"
    )
    command.add_argument(
        "--yes", action="store_true", help="send without asking, for scripts; a server's questions stay unanswered"
    )


def _add_common_options(command: CommandParser, json: bool | str, color: str) -> None:
    command.add_argument("--json", action="store_true", default=json, help="print JSON, for programs")
    command.add_argument("--color", choices=("auto", "always", "never"), default=color, help="colours (auto)")


def _formatter(prog: str) -> RawDescriptionHelpFormatter:
    # argparse would import shutil to get the width, which imports much more.
    columns = int(columns_text) if (columns_text := os.environ.get("COLUMNS", "")).isdecimal() else 0
    if not columns and sys.stdout.isatty():
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    return RawDescriptionHelpFormatter(prog, width=max(columns or 100, 40) - 2)


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is not an address such as 127.0.0.1:8000 (FILE goes before --http)")
    return f"127.0.0.1:{text}" if text.isdecimal() else text


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:  # also refuses nan
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not (number := _number(text)):
        raise ArgumentTypeError("0 is not a number above 0")
    return number


# `handrail completion`


def run_completion(args: Namespace, screen: Screen) -> int:
    root = build_parser()
    verbs = next(each for each in root._actions if isinstance(each, _SubParsersAction)).choices
    script = _fish_script(root, verbs) if args.shell == "fish" else _bash_script(root, verbs)
    if args.shell == "zsh":
        script = f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{script}"
    if screen.as_json:
        screen.data({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return ExitCode.OK


def _flags(command: ArgumentParser) -> list[Action]:
    return [each for each in command._actions if each.option_strings]


def _completion_words(command: ArgumentParser) -> str:
    """Return the words that can follow the command: its choices and its options."""
    choices = [str(word) for each in command._actions if not each.option_strings for word in each.choices or ()]
    return " ".join([*choices, *(flag for each in _flags(command) for flag in each.option_strings)])


def _bash_script(root: ArgumentParser, verbs: dict[str, ArgumentParser]) -> str:
    values = {
        "|".join(each.option_strings): " ".join(map(str, each.choices))
        for command in (root, *verbs.values())
        for each in _flags(command)
        if each.choices
    }
    after = "\n".join(f'    {flags}) words="{words}" ;;' for flags, words in values.items())
    cases = "\n".join(f'      {name}) words="{_completion_words(command)}" ;;' for name, command in verbs.items())
    return f"""\
_handrail() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" verb="" word words
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in {"|".join(verbs)}) verb="$word"; break ;; esac
  done
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{after}
    *) case "$verb" in
{cases}
      *) words="{_completion_words(root)}" ;;
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _handrail handrail
"""


def _fish_script(root: ArgumentParser, verbs: dict[str, ArgumentParser]) -> str:
    start = "complete -c handrail -n"
    lines = [
        f"{start} __fish_use_subcommand -a {name} -d {_shell_quoted(command.description)}"
        for name, command in verbs.items()
    ]
    for name, command in {"": root, **verbs}.items():
        when = f"'__fish_seen_subcommand_from {name}'" if name else "__fish_use_subcommand"
        for each in command._actions:
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in each.option_strings]
            values = [f"-x -a {_shell_quoted(' '.join(map(str, each.choices)))}"] if each.choices else []
            if (flags or values) and not isinstance(each, _SubParsersAction):
                lines.append(" ".join([start, when, *flags, *values, "-d", _shell_quoted(each.help)]))
    return "\n".join(lines) + "\n"


def _shell_quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
