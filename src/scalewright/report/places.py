"""Where a module stands in a model, read from its name: in which stack, how deep, of which kind, in which expert.

model.layers.3.self_attn.q_proj         model.layers   3      q_proj
model.layers.3.mlp.experts.7.up_proj    model.layers   3      experts.up_proj, of expert 7
decoder.block.1.layer.0.SelfAttention.q decoder.block  1      SelfAttention.q, where another block has a q, too
lm_head                                 (none)         none   lm_head
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a module stands."""

    stack: str
    depth: int | None
    kind: str
    expert: int | None


def places_of(names: Iterable[str]) -> dict[str, Place]:
    """The place of each module. Kinds are as short as they can be without two modules of a block sharing one."""
    parts = {name: _parts(name) for name in names}
    sizes = dict.fromkeys(parts, 1)
    while True:
        owners: dict[tuple[object, ...], list[str]] = {}
        for name, (stack, depth, rest, expert) in parts.items():
            owners.setdefault((stack, depth, expert, _ending(rest, sizes[name])), []).append(name)
        clashing = [name for some in owners.values() if len(some) > 1 for name in some]
        short = {_ending(parts[name][2], sizes[name]) for name in clashing if sizes[name] < len(parts[name][2])}
        if not short:
            break
        for name, (_, _, rest, _) in parts.items():  # those of other blocks are to have the same names
            if _ending(rest, sizes[name]) in short and sizes[name] < len(rest):
                sizes[name] += 1
    return {
        name: Place(stack, depth, ("experts." if expert is not None else "") + _ending(rest, sizes[name]), expert)
        for name, (stack, depth, rest, expert) in parts.items()
    }


def _parts(name: str) -> tuple[str, int | None, list[str], int | None]:
    """Its stack, depth, what stands behind them, and the number of its expert."""
    words = name.split(".")
    at = next((i for i, word in enumerate(words) if _is_number(word) and i > 0), None)
    if at is None or at == len(words) - 1:
        return "", None, words, None
    rest = words[at + 1 :]
    number = next((i for i, word in enumerate(rest[:-1]) if _is_number(word) and i and "expert" in rest[i - 1]), None)
    expert = None if number is None else int(rest[number])
    return ".".join(words[:at]), int(words[at]), rest if number is None else rest[number + 1 :], expert


def _ending(words: list[str], count: int) -> str:
    return ".".join(words[-count:])


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10
