"""What may reach a model: text as a person would see it."""

from __future__ import annotations

import re

# Controls except tab and newlines, characters that turn the direction of text, that nobody sees, or that spell words in
# invisible letters (tags, variation selectors beyond the common two), and halves of characters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text without what a person would not see of it."""
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub("", text.replace("\r\n", "\n"))
