"""Edited arguments whose secrets were masked for the editor: a secret stays at its place, and moves to no other."""

from __future__ import annotations

from handrail.model import Json, Object
from handrail.schema.compile import Checker
from handrail.schema.jsonable import keys_of, pointer
from handrail.text.controls import MASK

__all__ = ["edit_problems", "unmask"]

MaskProblem = tuple[str, str]
"""Where a mask stands that hides nothing, and what to do about it."""


def unmask(real: Json, masked: Json, edited: Json, path: str, problems: list[MaskProblem]) -> Json:
    """Return the edited value with the secrets back at their own places. A mask at any other place is a problem."""
    if type(edited) is dict:
        is_same_shape = type(real) is type(masked) is dict and len(real) == len(masked)
        names = dict(zip(masked, real, strict=True)) if is_same_shape else {}
        result: Object = {}
        for key, value in edited.items():
            key_path = pointer(path, key)
            if key in names:
                result[names[key]] = unmask(real[names[key]], masked[key], value, key_path, problems)
            else:
                result[unmask(None, None, key, key_path, problems)] = unmask(None, None, value, key_path, problems)
        return result
    if type(edited) is list:
        # An item that is not as it was may be another one, which has moved here: a secret does not go over to it.
        is_same_shape = type(real) is type(masked) is list and len(edited) == len(masked)
        pairs = [*zip(real, masked, strict=True)] if is_same_shape else [(None, None)] * len(edited)
        pairs = [pair if pair[1] == each else (None, None) for pair, each in zip(pairs, edited, strict=True)]
        places = enumerate(zip(pairs, edited, strict=True))
        return [unmask(*pair, each, pointer(path, at), problems) for at, (pair, each) in places]
    if type(edited) is type(masked) and edited == masked:
        return real
    if type(edited) is str and MASK in edited:
        text = f"{MASK} stands for a secret you were not shown: leave it where it is, or write a value of your own"
        problems.append((path, text))
    return edited


def edit_problems(masked: Object, hidden: set[str], edited: Object, checker: Checker | None) -> list[MaskProblem]:
    """Return the problems of edited arguments, as far as they show without the secrets in those named by `hidden`.

    Whether a secret that was left in place fits is asked again when the call runs: it is there then.
    """
    problems: list[MaskProblem] = []
    unmask(masked, masked, edited, "", problems)
    if not problems and checker is not None:
        schema_problems = [(each.path, each.text) for each in checker.problems(edited)]
        problems = [(path, text) for path, text in schema_problems if not _has_mask(edited, keys_of(path), hidden)]
    return problems


def _has_mask(value: Json, keys: list[str], hidden: set[str]) -> bool:
    """Whether a mask stands there."""
    if not keys or keys[0] not in hidden:
        return False
    for key in keys:
        value = value[int(key)] if type(value) is list else value.get(key) if type(value) is dict else None
    return type(value) is str and MASK in value
