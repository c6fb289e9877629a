"""`handrail completion`: a script for a shell, made from the parser itself."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace, _SubParsersAction

from handrail.cli.exit_codes import ExitCode
from handrail.cli.parser import build_parser
from handrail.cli.terminal import Screen

__all__ = ["run_completion"]


def run_completion(args: Namespace, screen: Screen) -> int:
    root = build_parser()
    verbs = next(each for each in root._actions if isinstance(each, _SubParsersAction)).choices
    script = _fish(root, verbs) if args.shell == "fish" else _bash(root, verbs)
    if args.shell == "zsh":
        script = f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{script}"
    if screen.as_json:
        screen.data({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return ExitCode.OK


def _options(command: ArgumentParser) -> list[Action]:
    return [each for each in command._actions if each.option_strings]


def _words(command: ArgumentParser) -> str:
    """What can stand after it: the words it knows itself, and its options."""
    choices = [str(word) for each in command._actions if not each.option_strings for word in each.choices or ()]
    return " ".join([*choices, *(flag for each in _options(command) for flag in each.option_strings)])


def _bash(root: ArgumentParser, verbs: dict[str, ArgumentParser]) -> str:
    values = {
        "|".join(each.option_strings): " ".join(map(str, each.choices))
        for command in (root, *verbs.values())
        for each in _options(command)
        if each.choices
    }
    after = "\n".join(f'    {flags}) words="{words}" ;;' for flags, words in values.items())
    cases = "\n".join(f'      {name}) words="{_words(command)}" ;;' for name, command in verbs.items())
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
      *) words="{_words(root)}" ;;
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _handrail handrail
"""


def _fish(root: ArgumentParser, verbs: dict[str, ArgumentParser]) -> str:
    start = "complete -c handrail -n"
    lines = [
        f"{start} __fish_use_subcommand -a {name} -d {_quoted(command.description)}" for name, command in verbs.items()
    ]
    for name, command in {"": root, **verbs}.items():
        when = f"'__fish_seen_subcommand_from {name}'" if name else "__fish_use_subcommand"
        for each in command._actions:
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in each.option_strings]
            values = [f"-x -a {_quoted(' '.join(map(str, each.choices)))}"] if each.choices else []
            if (flags or values) and not isinstance(each, _SubParsersAction):
                lines.append(" ".join([start, when, *flags, *values, "-d", _quoted(each.help)]))
    return "\n".join(lines) + "\n"


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
