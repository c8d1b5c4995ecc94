"""IMatrixGatherer: how strongly the inputs of layers are driven, found out before anything is quantised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from scalewright.errors import RecipeError
from scalewright.modifiers.base import Modifier
from scalewright.modifiers.quantization import parse_names, parse_targets


class IMatrixGatherer(Modifier):
    """Gather the importance E[x^2] of the input channels of layers, for the observers of modifiers that come after it.

    It takes one pass over the data, or a `file` that `scalewright importance` has written. It changes no weight.
    Gatherers of a stage run before its other modifiers.
    """

    fields: ClassVar[Mapping[str, str]] = {
        "targets": "class names, module names, wildcards or re: patterns of the layers (Linear)",
        "ignore": "the same, of layers to leave out",
        "file": "a file with importance, which is used instead of data",
    }

    def __init__(self, **given: Any) -> None:
        if isinstance(given.get("file"), os.PathLike):
            given["file"] = os.fspath(given["file"])
        super().__init__(**given)
        self.targets = parse_targets(self.given.get("targets", ["Linear"]), ("targets",))
        self.ignore = parse_names(self.given.get("ignore", []), ("ignore",))
        file = self.given.get("file")
        if file is not None and (not isinstance(file, str) or not file):
            raise RecipeError(f"file: expected the name of a file, got {file!r}.", key=("file",))
        self.file: str | None = file
