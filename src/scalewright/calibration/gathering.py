"""Importance that is gathered before it is used: the squares of what layers are given, summed in one pass.

What was gathered stands on the modules, as `_imatrix_sum` and `_imatrix_count`, until the observers of their weights
take it over. Files with importance are read elsewhere (importance.py); here it is seen to that they fit the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from scalewright.calibration.distributed import Ranks
from scalewright.calibration.experts import is_fused
from scalewright.calibration.pipelines import Batch, OnStep, silent
from scalewright.calibration.plan import Plan
from scalewright.calibration.targets import first_of, output_heads, resolve_targets, routers
from scalewright.calibration.watching import watch_inputs
from scalewright.errors import DataError, ImportanceError, RecipeError, did_you_mean
from scalewright.modifiers import IMatrixGatherer, Modifier, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.shown import See
from scalewright.observers import IMatrixMSEObserver
from scalewright.observers.importance import (
    ImportanceObserver,
    empty_sum,
    forget_importance,
    leave_importance,
    sum_squares,
)

_BEFORE = "all importance that it uses was gathered before"


@dataclass(frozen=True)
class Importance:
    """How strongly the input channels of layers are driven: sums of x^2 and numbers of tokens, by the layer's name."""

    sums: Mapping[str, Tensor] = field(repr=False)
    """[in_features] each, in fp32."""
    counts: Mapping[str, int] = field(repr=False)
    """Tokens that each layer was given. An expert may have been given none."""
    model: str = ""
    """The name of the model."""
    num_tokens: int = 0
    """Tokens of the data; padding does not count."""
    seeds: tuple[int, ...] = ()
    """By which the samples were chosen."""
    origin: str = "importance"
    """What error texts call it: the file that it comes from."""
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        """E[x^2] of each input channel of a layer."""
        return self.sums[name] / max(1, self.counts[name])

    def __len__(self) -> int:
        return len(self.sums)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the sums, as plain data."""
        return {
            "model": self.model,
            "num_tokens": self.num_tokens,
            "seeds": list(self.seeds),
            "layers": [
                {"name": name, "inputs": len(sum_C), "tokens": self.counts[name]} for name, sum_C in self.sums.items()
            ],
            "notes": self.notes,
        }


# ---- the pass --------------------------------------------------------------------------------------------------------


def gather_squares(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    *,
    on_step: OnStep = silent,
    ranks: Ranks | None = None,
    blocks: Sequence[str] = (),
    **streaming: Any,
) -> dict[str, tuple[Tensor, int]]:
    """Run the batches, and give the sum of x^2 [in_features] and the number of tokens that each module was given.

    Padding does not count, and an input that several layers share is squared once. `blocks` and `streaming` are those
    of `watch_inputs`.
    """
    sums: dict[str, ImportanceObserver] = {}

    def begin() -> dict[str, tuple[nn.Module, See]]:
        sums.update({name: _empty_sum(name, module) for name, module in modules.items()})
        return {name: (module, _adding_to(sums[name])) for name, module in modules.items()}

    ranks = ranks or Ranks()
    more = {"ranks": ranks, "blocks": blocks, **streaming}
    watch_inputs(model, begin, batches, phase="gathering", on_step=on_step, **more)
    ranks.sync(list(sums.values()))
    return {name: _total(each) for name, each in sums.items()}


def _empty_sum(name: str, module: nn.Module) -> ImportanceObserver:
    """What adds up importance when a layer is quantised adds it up here, too: in the same order, to the same bits."""
    observer = IMatrixMSEObserver("weight", QuantizationArgs())
    observer.label = name
    weight = module.weight
    assert isinstance(weight, Tensor)
    observer._imatrix_sum = empty_sum(weight.shape[-1], weight.device)
    return observer


def _adding_to(observer: ImportanceObserver) -> See:
    return lambda shown: observer.add_squares(*shown.once("squares", lambda: sum_squares(shown.value, mask=shown.mask)))


def _total(observer: ImportanceObserver) -> tuple[Tensor, int]:
    assert observer._imatrix_sum is not None
    return observer._imatrix_sum.float(), int(observer._imatrix_count)


# ---- which layers ----------------------------------------------------------------------------------------------------


def layers_meant(
    model: nn.Module, gatherer: IMatrixGatherer, *, sought: str = "importance"
) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers that a gatherer means, by name, and notes. Fused experts must have been taken apart.

    `sought` is what their inputs are watched for.
    """
    meant = QuantizationModifier(scheme="W8A16", targets=gatherer.targets, ignore=gatherer.ignore)
    targets = resolve_targets(model, meant)
    notes = list(targets.notes)
    odd = [layer.name for layer in targets.layers if isinstance(layer.module, nn.Embedding)]
    if odd:
        notes.append(f"{first_of(odd)}: what goes into an embedding are token ids, which have no {sought}.")
    return {layer.name: layer.module for layer in targets.layers if layer.name not in odd}, notes


def wants_importance(layer: WatchedLayer) -> bool:
    """Whether the observer of a layer's weight will ask for importance."""
    observer = layer.new_observers().get("weight")
    is_weighted = isinstance(observer, ImportanceObserver) and observer.wants_inputs
    return is_weighted and not isinstance(layer.module, nn.Embedding)


def check_fits(importance: Importance, model: nn.Module) -> None:
    """Say no to importance of another model."""
    modules = dict(model.named_modules())
    known = {name: int(each.in_features) for name, each in modules.items() if isinstance(each, nn.Linear)}
    fused = tuple(f"{name}." for name, module in modules.items() if is_fused(module))  # nobody wanted their experts
    for name, sum_C in importance.sums.items():
        columns = known.get(name)
        if columns is None and not name.startswith(fused):
            raise ImportanceError(
                f"{importance.origin}: has importance of {name}, and the model has no such layer."
                f"{did_you_mean(name, known)} Use a file that was gathered from this model."
            )
        if columns is not None and columns != len(sum_C):
            raise ImportanceError(
                f"{importance.origin}: has importance of {len(sum_C)} input channels for {name}, and the layer has "
                f"{columns}. Use a file that was gathered from this model."
            )


# ---- gatherers of a recipe -------------------------------------------------------------------------------------------


@dataclass
class Gathering:
    """What is gathered before a plan is carried out."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    """Layers whose inputs are watched, by name."""
    given: dict[str, tuple[nn.Module, Tensor, int]] = field(default_factory=dict)
    """Layers, with what files say of them: sums of x^2 and numbers of tokens."""
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The layers that will have importance."""
        return {*self.modules, *self.given}

    def smoothed(self, powers: Mapping[str, Tensor]) -> None:
        """What files say is of inputs that have been divided by powers of two since, by the names of their layers."""
        for name in self.given.keys() & powers.keys():
            module, sum_C, count = self.given[name]
            self.given[name] = (module, sum_C * torch.exp2(-2.0 * powers[name].float()), count)

    @contextmanager
    def standing(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        on_step: OnStep = silent,
        ranks: Ranks | None = None,
        *,
        blocks: Sequence[str] = (),
        **streaming: Any,
    ) -> Iterator[list[str]]:
        """Gather, and give notes. While inside, importance stands on the modules until it is used; none does after."""
        found = dict(self.given)
        if self.modules:
            squares = gather_squares(
                model, self.modules, batches, on_step=on_step, ranks=ranks, blocks=blocks, **streaming
            )
            for name, (sum_C, count) in squares.items():
                found[name] = (self.modules[name], sum_C, count)
        try:
            for module, sum_C, count in found.values():
                forget_importance(module)
                if count > 0:
                    weight = module.weight
                    assert isinstance(weight, Tensor)
                    leave_importance(module, sum_C.to(weight.device), torch.tensor(count, device=weight.device))
            yield note_unseen({name: count for name, (_, _, count) in found.items()})
        finally:
            for module, _, _ in found.values():
                forget_importance(module)


def note_unseen(counts: Mapping[str, int]) -> list[str]:
    """A note if there are layers that were given no token."""
    unseen = [name for name, count in counts.items() if count == 0]
    return [f"{first_of(unseen)}: no token was seen while importance was gathered. Add samples."] if unseen else []


def that_quantise(stages: Sequence[Sequence[Modifier]]) -> list[list[Modifier]]:
    """The stages that quantise, and their modifiers that do."""
    kept = [[each for each in stage if not isinstance(each, IMatrixGatherer | SmoothQuantModifier)] for stage in stages]
    if not any(kept) and any(isinstance(each, SmoothQuantModifier) for stage in stages for each in stage):
        raise RecipeError(
            "the recipe smooths inputs, and there is nothing in it that quantises them. Add a QuantizationModifier or "
            "a GPTQModifier."
        )
    if not any(kept):
        raise RecipeError(
            "the recipe gathers importance, and there is nothing in it that uses it. Add a QuantizationModifier; to "
            "keep importance in a file, use `scalewright importance`."
        )
    return [stage for stage in kept if stage]


def plan_gatherings(
    model: nn.Module,
    stages: Sequence[Sequence[Modifier]],
    plans: Sequence[Plan],
    *,
    files: Mapping[str, Importance],
    pipeline: str = "auto",
    has_data: bool = False,
) -> list[Gathering]:
    """What is gathered before each of the `plans`, which were made of those of the stages `that_quantise`.

    Plans that then have all they want to know need no data any more, and are changed so. `files` has what the files of
    gatherers say, by their names. Nothing is gathered that nobody uses.
    """
    gatherings: list[Gathering] = []
    gathered: set[str] = set()
    asking = [{layer.name for layer in plan.layers if wants_importance(layer)} for plan in plans]
    waiting: list[IMatrixGatherer] = []
    for stage in stages:
        waiting += [each for each in stage if isinstance(each, IMatrixGatherer)]
        others = [each for each in stage if isinstance(each, QuantizationModifier)]
        if not others:
            continue
        place = len(gatherings)
        plan, wanted = plans[place], set().union(*asking[place:])
        collects = has_data and pipeline != "data_free"
        gathering = _gathering(model, waiting, wanted, files, collects=collects)
        if gathering.modules:
            _check_data(pipeline, has_data=has_data)
        gatherings.append(gathering)
        gathered |= gathering.names
        wanted = asking[place]
        needs_data = any(each.data == "needed" for each in others)
        if pipeline == "auto" and wanted and wanted <= gathered and not needs_data:
            plan.pipeline, plan.why = "data_free", _BEFORE
        waiting = []
    if waiting:
        gatherings[-1].notes.append(
            "IMatrixGatherer: nothing that comes after it uses what it gathers, so it is not run. Put it before the "
            "modifier that does."
        )
    return gatherings


def _gathering(
    model: nn.Module,
    gatherers: Sequence[IMatrixGatherer],
    wanted: set[str],
    files: Mapping[str, Importance],
    *,
    collects: bool,
) -> Gathering:
    found = Gathering()
    for gatherer in gatherers:
        meant, notes = layers_meant(model, gatherer)
        found.notes += notes
        importance = None if gatherer.file is None else files[gatherer.file]
        used = [name for name in meant if name in wanted]
        twice = next((name for name in used if name in found.names), None)
        if twice is not None:
            raise RecipeError(f"{twice}: two gatherers mean it. Use ignore, or narrower targets.")
        unused = [name for name in meant if name not in wanted and (importance is None or name in importance.sums)]
        if "ignore" not in gatherer.given:  # few quantise them, so that it goes without saying
            left_alone = output_heads(model) | routers(model)
            unused = [name for name in unused if name not in left_alone]
        if unused:
            found.notes.append(
                f"{first_of(unused)}: no observer of the recipe uses importance here, so it is not gathered. Ignore "
                "it, or name an observer such as imatrix_mse."
            )
        if importance is None:
            found.modules |= {name: meant[name] for name in used}
            continue
        check_fits(importance, model)
        missing = [name for name in used if name not in importance.sums]
        if missing:
            what = "its importance comes from the data" if collects else "all errors weigh the same"
            found.notes.append(f"{first_of(missing)}: {importance.origin} has no importance of it, so {what}.")
        for name in used:
            if name not in missing:
                found.given[name] = (meant[name], importance.sums[name], importance.counts[name])
    return found


def _check_data(pipeline: str, *, has_data: bool) -> None:
    if not has_data:
        raise DataError("IMatrixGatherer runs data through the model. Give a dataset, or a file with importance.")
    if pipeline == "data_free":
        raise DataError(
            "IMatrixGatherer runs data through the model, so the recipe cannot be run data_free. Give it a file with "
            "importance."
        )
