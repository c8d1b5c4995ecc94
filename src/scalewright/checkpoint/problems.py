"""What may be wrong with a checkpoint, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a checkpoint: a tensor, a file or an entry of one, and a sentence on it."""

    where: str
    what: str

    def __str__(self) -> str:
        # Names come from files of strangers, and may be anything.
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in f"{self.where}: {self.what}")
