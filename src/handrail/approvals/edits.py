"""Arguments that a person was shown with masks, and edited: a secret stays where it stood, and goes nowhere else."""

from __future__ import annotations

from handrail.model import Json, Object
from handrail.schema.compile import Checker
from handrail.schema.jsonable import keys_of, pointer
from handrail.text.controls import MASK

__all__ = ["edit_problems", "unmasked"]

Misplaced = tuple[str, str]
"""Where a mask stands that hides nothing, and what to do about it."""


def unmasked(real: Json, shown: Json, edited: Json, path: str, problems: list[Misplaced]) -> Json:
    """What stands where it stood, as it was shown, is what it was; a mask that stands anywhere else is nobody's."""
    if type(edited) is dict:
        known = type(real) is type(shown) is dict and len(real) == len(shown)
        names = dict(zip(shown, real, strict=True)) if known else {}
        made: Object = {}
        for key, value in edited.items():
            here = pointer(path, key)
            if key in names:
                made[names[key]] = unmasked(real[names[key]], shown[key], value, here, problems)
            else:
                made[unmasked(None, None, key, here, problems)] = unmasked(None, None, value, here, problems)
        return made
    if type(edited) is list:
        # An item that is not as it was may be another one, which has moved here: a secret does not go over to it.
        known = type(real) is type(shown) is list and len(edited) == len(shown)
        pairs = [*zip(real, shown, strict=True)] if known else [(None, None)] * len(edited)
        pairs = [pair if pair[1] == each else (None, None) for pair, each in zip(pairs, edited, strict=True)]
        places = enumerate(zip(pairs, edited, strict=True))
        return [unmasked(*pair, each, pointer(path, at), problems) for at, (pair, each) in places]
    if type(edited) is type(shown) and edited == shown:
        return real
    if type(edited) is str and MASK in edited:
        text = f"{MASK} stands for a secret you were not shown: leave it where it is, or write a value of your own"
        problems.append((path, text))
    return edited


def edit_problems(shown: Object, hidden: set[str], edited: Object, checker: Checker | None) -> list[Misplaced]:
    """What is wrong with edited arguments, as far as can be told without the secrets in those named by `hidden`.

    Whether a secret that was left in place fits is asked again when the call runs: it is there then.
    """
    problems: list[Misplaced] = []
    unmasked(shown, shown, edited, "", problems)
    if not problems and checker is not None:
        found = [(each.path, each.text) for each in checker.problems(edited)]
        problems = [(path, text) for path, text in found if not _is_masked(edited, keys_of(path), hidden)]
    return problems


def _is_masked(value: Json, keys: list[str], hidden: set[str]) -> bool:
    """Whether a mask stands there."""
    if not keys or keys[0] not in hidden:
        return False
    for key in keys:
        value = value[int(key)] if type(value) is list else value.get(key) if type(value) is dict else None
    return type(value) is str and MASK in value
