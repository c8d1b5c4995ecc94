"""`observe`: data flows through a model once, and what layers are given is looked at. Nothing is quantised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from scalewright.calibration.gathering import layers_meant
from scalewright.calibration.pipelines import OnStep, silent
from scalewright.calibration.sources import DataOptions
from scalewright.calibration.targets import first_of
from scalewright.calibration.watching import watch_inputs
from scalewright.checkpoint.cut_files import outliving_cuts
from scalewright.errors import DataError, LayoutError, ScalewrightError
from scalewright.modifiers import IMatrixGatherer
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.modifiers.schemes import in_words, scheme_named, wants_values
from scalewright.numerics.layout import check_groups, check_strategy, strategy_of
from scalewright.observers import Observer
from scalewright.observing.observations import Observations
from scalewright.observing.records import LayerRecord, Watcher, WeightRecord
from scalewright.preparing import layers_and_data, name_of, refuse_if_strict

OBSERVERS = ("static_minmax", "percentile", "histogram_mse", "balanced_mse", "optimal")
SCHEME = "W8A8"
_WATCHED = {"weight": "weights", "input": "activations"}


@outliving_cuts()
def observe(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    observers: str | Sequence[str] = (),
    scheme: str = SCHEME,
    targets: str | Sequence[str] = "Linear",
    ignore: str | Sequence[str] = LEFT_ALONE,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Observations:
    """Run data through a model, and give ranges, outliers, dead channels and experts, and what observers would choose.

    The model, given as an object or by its path or hub name, stays as it is. `scheme` says how weights and activations
    would be rounded, where losses are told; each of the `observers` is asked for what it is made for. Experts see only
    the tokens that the router gives them. Data options are those of `oneshot`.
    """
    gatherer = IMatrixGatherer(targets=targets, ignore=ignore)
    asked = _Asked(scheme, (observers,) if isinstance(observers, str) else tuple(observers))
    if dataset is None:
        raise DataError("a model is observed by running data through it. Give a dataset.")
    with layers_and_data(
        model,
        dataset,
        lambda loaded: layers_meant(loaded, gatherer, sought="range"),
        DataOptions(num_calibration_samples, batch_size=batch_size, column=column, pack=pack, split=split, seed=seed),
        max_seq_length=max_seq_length,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        strict=strict,
        on_step=on_step,
    ) as ready:
        notes = [*ready.notes, *asked.notes()]
        watchers = {name: asked.watcher(name, module) for name, module in ready.layers.items()}
        weights = {}
        for i, (name, module) in enumerate(ready.layers.items()):
            on_step("weighing", name, i, len(ready.layers))
            weights[name] = asked.weight(name, module)
        on_step("weighing", f"{len(weights)} weights", len(weights), len(weights))
        sees = {name: (module, watchers[name].see) for name, module in ready.layers.items()}
        watch_inputs(ready.model, lambda: sees, ready.batches, phase="observing", on_step=on_step)
        notes += asked.notes_on_fit()
    records = {name: LayerRecord(watcher.input, watcher.observers, weights[name]) for name, watcher in watchers.items()}
    found = Observations(
        records, name_of(model), asked.scheme, asked.observers, ready.num_tokens, (seed,), run_notes=tuple(notes)
    )
    if strict:
        refuse_if_strict(found.notes, strict=True)
    return found


class _Asked:
    """What a scheme does to weights and inputs, and which observers would look at each."""

    def __init__(self, scheme: str, observers: tuple[str, ...]) -> None:
        found = scheme_named(scheme)
        self.scheme = scheme.upper()
        self._args: dict[str, QuantizationArgs | None] = {"weight": found.weights, "input": found.input_activations}
        self._is_default = not observers
        names = [_known(each) for each in observers or OBSERVERS]
        self._of = {base_name: self._able(base_name, names) for base_name in self._args}
        used = {name for some in self._of.values() for name in some}
        self.observers = tuple(dict.fromkeys(name for name in names if name in used or not self._is_default))
        self._unfit: dict[str, list[str]] = {}

    def watcher(self, name: str, module: nn.Module) -> Watcher:
        """Who will look at the input of a layer."""
        args = self._fitting("input", name, module)
        if args is None:
            return Watcher(name, {}, None)
        return Watcher(name, {each: input_observer(each, args) for each in self._of["input"]}, args)

    def weight(self, name: str, module: nn.Module) -> WeightRecord:
        """What is known of the weight of a layer."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        try:
            return WeightRecord.of(weight, self._fitting("weight", name, module), self._of["weight"])
        except ScalewrightError as error:
            raise error.at(f"{name}.weight") from None

    def notes(self) -> list[str]:
        """On observers that were named, and have nothing to look at."""
        if self._is_default:
            return []
        return [self._why_idle(name) for name in self.observers if not any(name in some for some in self._of.values())]

    def notes_on_fit(self) -> list[str]:
        """On layers that the scheme does not fit."""
        return [
            f"{first_of(names)}: {self.scheme} does not fit ({why.rstrip('.')}), so no loss is told."
            for why, names in self._unfit.items()
        ]

    def _able(self, base_name: str, names: Sequence[str]) -> tuple[str, ...]:
        """The observers that are made for such tensors, under the scheme's strategy."""
        args = self._args[base_name]
        if args is None or not wants_values(args):
            return ()
        classes = ((name, Observer.get_value_from_registry(name)) for name in names)
        return tuple(
            name
            for name, cls in classes
            if _WATCHED[base_name] in cls.watches and (not cls.strategies or strategy_of(args) in cls.strategies)
        )

    def _why_idle(self, name: str) -> str:
        cls = Observer.get_value_from_registry(name)
        rounded = "; ".join(f"{_WATCHED[key]}: {in_words(args)}" for key, args in self._args.items())
        serves = f" and serves {', '.join(cls.strategies)}" if cls.strategies else ""
        watches = ", ".join(cls.watches)
        return f"{name}: watches {watches}{serves}, so {self.scheme} ({rounded}) gives it nothing to choose."

    def _fitting(self, base_name: str, name: str, module: nn.Module) -> QuantizationArgs | None:
        """How a part of a layer would be rounded; None if it stays as it is, or cannot be."""
        args, weight = self._args[base_name], module.weight
        assert isinstance(weight, Tensor)
        if args is None:
            return None
        try:
            check_strategy(base_name, args)
            check_groups(weight.shape[-1], base_name, args)
        except LayoutError as error:
            names = self._unfit.setdefault(str(error), [])
            if name not in names:
                names.append(name)
            return None
        return args


def input_observer(name: str, args: QuantizationArgs) -> Observer:
    """A new observer of a layer's input."""
    observer: Observer = Observer.load_from_registry(name, base_name="input", args=args)
    return observer


def _known(name: str) -> str:
    """The registered name."""
    return str(Observer.get_value_from_registry(name).registry_name)
