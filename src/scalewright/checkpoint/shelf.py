"""The weights of a model that is not in memory: fetched when their block's turn comes, given up when it is written."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from scalewright.calibration.scratch import give_back_freed, num_bytes
from scalewright.checkpoint.mapped import MappedFiles
from scalewright.checkpoint.parts import Part
from scalewright.modifiers.layers import WatchedLayer


class Shelf:
    """The weights of a model whose parameters lie in mapped files.

    What is read becomes memory by itself. What has to be kept track of are finished layers: their weights are others,
    and in memory, while data flows through them.
    """

    def __init__(self, model: nn.Module, files: MappedFiles, check_source: Callable[[], None] = lambda: None) -> None:
        """`check_source` says no to files that have changed."""
        self._files = files
        self._check_source = check_source
        self._homes = {module: _weight(module) for module in model.modules()}
        self._here: dict[nn.Module, tuple[WatchedLayer, Mapping[str, Tensor]]] = {}
        self._away: dict[nn.Module, tuple[WatchedLayer, Mapping[str, Tensor]]] = {}

    def names_away(self) -> list[str]:
        """Finished layers that were given up."""
        return [layer.name for layer, _ in self._away.values()]

    def fetch(self, module: nn.Module) -> None:
        """Make a module ready to run: finished layers in it get their numbers again."""
        for each in module.modules():
            if each in self._away:
                self._here[each] = layer, tensors = self._away.pop(each)
                layer.refill(tensors)

    def finished(self, layer: WatchedLayer, tensors: Mapping[str, Tensor]) -> None:
        """A layer has been finished, and its tensors are kept."""
        if layer.scheme.weights is not None:
            if not isinstance(tensors, Part):  # another rank has the file
                place = self._files.scratch.place
                tensors = {
                    key: each if num_bytes(each) < mmap.PAGESIZE else place(each, is_shared=False)
                    for key, each in tensors.items()
                }
            self._here[layer.module] = (layer, tensors)
            self._files.give_back([self._home(layer.module)])

    def undone(self, layer: WatchedLayer) -> None:
        """A layer that was finished and given up is not finished after all."""
        self._away.pop(layer.module, None)

    def moved(self, module: nn.Module) -> None:
        """A module has been given another weight."""
        self._homes[module] = _weight(module)

    def give_up(self) -> None:
        """Nothing is needed in memory for now."""
        for module, (layer, tensors) in self._here.items():
            layer.empty(self._home(module))
            self._away[module] = (layer, tensors)
        self._here.clear()
        self._files.give_back_all()
        give_back_freed()
        self.check_source()

    def check_source(self) -> None:
        """Say no if the files have changed: a run that reads others than it began with goes on for nothing."""
        self._check_source()

    def _home(self, module: nn.Module) -> nn.Parameter:
        home = self._homes[module]
        assert home is not None
        return home


def _weight(module: nn.Module) -> nn.Parameter | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None
