"""Formats as `modifiers.schemes.in_words` writes them, read again: `int4, groups of 128, asymmetric` and the like."""

from __future__ import annotations

import re
from dataclasses import dataclass

_KIND = re.compile(r"(int|fp)(\d+)")
_GROUPS = re.compile(r"groups of (\d+)")


@dataclass(frozen=True)
class Format:
    """What values are written in."""

    kind: str
    bits: int
    by: str
    """What shares a scale: `group`, or the words for it."""
    group_size: int | None
    is_global: bool
    is_dynamic: bool

    @property
    def is_int(self) -> bool:
        """Whether they are integers."""
        return self.kind == "int"


def format_of(words: str) -> Format | None:
    """The format that some words stand for; None for values that stay as they are, and for words of others."""
    first, *others = words.split(", ")
    kind = _KIND.fullmatch(first)
    if kind is None or not others:
        return None
    groups = _GROUPS.fullmatch(others[0])
    return Format(
        kind[1],
        int(kind[2]),
        "group" if groups else others[0],
        int(groups[1]) if groups else None,
        "under a global scale" in others,
        any(word.startswith("dynamic") for word in others),
    )
