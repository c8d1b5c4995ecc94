"""How data reaches observers, and when layers are rounded: data-free, basic, sequential.

- `data_free`: weights are all there is to see. No forward pass is run.
- `basic`: one forward pass for each batch through the whole model as it is; then every layer is quantised.
- `sequential`: unit by unit in lock step. A unit is calibrated and quantised, and the next one sees what it will really
  get. Units are the blocks that the model is made of, and each layer that is in none of them. Blocks whose layers are
  rounded with their inputs in mind go in steps: a step is the layers that are given the same input. Where layers make
  up for what others lost, the same data flows through the model as it was, always a step ahead.

Passes end after the last unit that is to be quantised: what comes behind is not computed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scalewright.calibration.data import no_texts, size_of
from scalewright.calibration.distributed import Ranks, Share
from scalewright.calibration.lockstep import LockStep, copied
from scalewright.calibration.passes import Route, calling, evaluating, quickly, without_cache
from scalewright.calibration.scratch import Thrift, WaitingRoom, give_back_freed, keep_freed, with_pages_of_their_own
from scalewright.calibration.steps import (
    StepsInWords,
    Unit,
    is_within,
    steps_from_words,
    steps_in_words,
    steps_of,
    units_of,
)
from scalewright.calibration.streams import Streams
from scalewright.calibration.taps import Masks, Tap, first_tensor, tapped
from scalewright.errors import DataError, RecipeError, ScalewrightError, did_you_mean
from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer
from scalewright.modifiers.shown import Gallery, See
from scalewright.numerics.extremes import absmax_of
from scalewright.observers.fusion import fuse_weight_observers

PIPELINES = ("auto", "data_free", "basic", "sequential")

Batch = Mapping[str, Any]
Visit = Callable[[Unit, Callable[[int], None], Sequence[int], Callable[[], None]], None]
OnStep = Callable[[str, str, int, int], None]
"""What is being done, to what, how many of how many are done. Calibrating counts tokens, quantising counts layers."""


def silent(phase: str, what: str, done: int, total: int) -> None:
    """Shows nothing."""


def check_pipeline(name: str) -> None:
    """Say no to a pipeline that there is not."""
    if name not in PIPELINES:
        raise RecipeError(
            f"there is no pipeline '{name}'.{did_you_mean(name, PIPELINES)} Pipelines: {', '.join(PIPELINES)}."
        )


class Keeper(Protocol):
    """Who keeps finished layers: `checkpoint.journal.Journal`."""

    def has(self, name: str) -> bool:
        """Whether a layer was finished before."""

    def record(self, name: str) -> dict[str, Any]:
        """What was kept with its tensors."""

    def part(self, name: str) -> Mapping[str, Tensor]:
        """Its tensors."""

    def keep(self, name: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Put the tensors of a finished layer away, and give what stands for them."""

    def forget(self, names: Iterable[str]) -> None:
        """Layers that were finished are not finished after all."""


class Weights(Protocol):
    """Who has the weights of a model that is not in memory: `checkpoint.shelf.Shelf`."""

    def names_away(self) -> list[str]:
        """Finished layers that were given up."""

    def fetch(self, module: nn.Module) -> None:
        """Make a module ready to run: finished layers in it get their numbers again."""

    def finished(self, layer: WatchedLayer, tensors: Mapping[str, Tensor]) -> None:
        """A layer has been finished, and its tensors are kept."""

    def undone(self, layer: WatchedLayer) -> None:
        """A layer that was finished and given up is not finished after all."""

    def moved(self, module: nn.Module) -> None:
        """A module has been given another weight."""

    def give_up(self) -> None:
        """Nothing is needed in memory for now."""

    def check_source(self) -> None:
        """Say no if the files that the weights are read from have changed."""


@dataclass
class Calibration:
    """A model, the layers of it that are to be quantised, and the data to see them at work."""

    model: nn.Module
    layers: list[WatchedLayer]
    batches: Sequence[Batch] = ()
    blocks: list[str] = field(default_factory=list)
    on_step: OnStep = silent
    journal: Keeper | None = None
    """Keeps finished layers, and has those that an earlier run has finished."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the work. Each is given all batches, and runs its share of them."""
    weights: Weights | None = None
    """Has the weights, if they are not in memory. Blocks are run one after the other then, and given up when done."""
    waiting_room: WaitingRoom | None = None
    """Where passes leave what they need later, if that is not to be in memory."""

    def __post_init__(self) -> None:
        num_tokens = [max(1, size_of(batch)[1]) for batch in self.batches]
        own = self.ranks.share_of(num_tokens)
        self.batches = self.batches[own]
        self._first, self._count = own.start, len(num_tokens)
        self._masks = Masks(self.model, self.batches)
        self._gallery = Gallery()
        self._streams = Streams(self.model)
        self._is_unquantised = False
        self._thrift = Thrift()
        # What a rank shows stands for what all of them do.
        times = sum(num_tokens) / max(1, sum(num_tokens[own]))
        self._tokens = [each * times for each in num_tokens[own]]
        self._num_shown = 0.0
        self._num_quantised = 0
        owners = Counter(each.data_ptr() for _, each in self.model.named_parameters(remove_duplicate=False))
        for layer in self.layers:
            weight = getattr(layer.module, "weight", None)
            is_alone = isinstance(weight, Tensor) and owners[weight.data_ptr()] == 1
            layer.has_weight_alone = is_alone and self.weights is None  # a file has it, too
            layer.chosen_tokens = partial(self._masks.chosen_of, layer.module)
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_pictures = "pixel_values" in parameters
        self._takes_masks = "attention_mask" in parameters or any(
            each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters.values()
        )

    def run(self, pipeline: str) -> list[QuantizedLayer]:
        """Quantise all layers. No hook and no observer stays behind, whatever happens."""
        run = {"data_free": self._data_free, "basic": self._basic, "sequential": self._sequential}[pipeline]
        for layer in self.layers:
            layer.keeps_weight = self.weights is None or pipeline == "sequential"
        keep_freed()
        with torch.no_grad(), evaluating(self.model), without_cache(self.model), self._masks.following():
            done = {layer.name: layer for layer in run()}
        give_back_freed()
        return [done[layer.name] for layer in self.layers]

    # ---- the three of them -------------------------------------------------------------------------------------------

    def _data_free(self) -> list[QuantizedLayer]:
        return [layer for unit in units_of(self.model, self.layers, self.blocks) for layer in self._alone(unit)]

    def _alone(self, unit: Unit) -> list[QuantizedLayer]:
        """Quantise a unit that nobody will look at again."""
        with self._watched(unit.layers, unit.module):
            return self._finish(unit.layers)

    def _basic(self) -> list[QuantizedLayer]:
        if self.weights is not None:
            try:
                return self._basic_by_units()
            except MetAgainError:  # only when all passes have ended is all known that there is to see
                self._num_shown = self._num_quantised = 0
            self.weights.fetch(self.model)
        with self._watched(self.layers, self.model):
            groups = [group for group in _sharing_a_scale(self.layers) if not self._is_done(group)]
            todo = [layer for group in groups for layer in group]
            alone = [Unit(layer.name, layer.module, [layer]) for layer in todo]
            with self._tapped(todo), Route(self.model, alone).known() as route:
                for i in range(len(self.batches) if todo else 0):
                    with self._showing(i, f"batch {i + 1} of {len(self.batches)}"), route.travelled():
                        self._pass(i)
            return self._finish(self.layers)

    def _basic_by_units(self) -> list[QuantizedLayer]:
        """The same, with all batches brought through a unit before the next: each is read once, and given up."""
        units = self._with_finished(units_of(self.model, self.layers, self.blocks))
        done: list[QuantizedLayer] = []
        now: list[WatchedLayer] = []

        def visit(unit: Unit, run: Callable[[int], None], batches: Sequence[int], settle: Callable[[], None]) -> None:
            todo = [] if self._is_done(unit.layers) else unit.layers
            now.extend(layer for layer in todo if not self._is_done([layer]))
            with self._watched(unit.layers, unit.module):
                with self._tapped(todo):
                    for batch in batches:
                        with self._showing(batch, unit.name, passes=len(units)):
                            run(batch)
                settle()
                done.extend(self._finish(unit.layers))

        last = max((place for place, unit in enumerate(units) if not self._is_done(unit.layers)), default=-1)
        try:
            unseen = self._walk(units[: last + 1], visit)
        except MetAgainError:
            assert self.journal is not None and self.weights is not None
            self.journal.forget(layer.name for layer in now)
            self.weights.give_up()
            for layer in (layer for layer in self.layers if layer.name in {each.name for each in done}):
                self.weights.undone(layer)
                layer.undo()
            raise
        return done + [layer for unit in (*unseen, *units[last + 1 :]) for layer in self._alone(unit)]

    def _with_finished(self, units: Sequence[Unit]) -> list[Unit]:
        """The units, and those that an earlier stage has finished: passes stop there, so that they can be fetched."""
        away = [] if self.weights is None else self.weights.names_away()
        homes = {next((block for block in self.blocks if is_within(name, block)), name) for name in away}
        own = {unit.name: unit for unit in units}
        homes = {home for home in homes if not any(is_within(home, name) for name in own)}
        order = [name for name, _ in self.model.named_modules() if name in homes or name in own]
        return [own[name] if name in own else Unit(name, self.model.get_submodule(name), []) for name in order]

    def _walk(self, units: Sequence[Unit], visit: Visit) -> list[Unit]:
        """Bring all batches through the units, one unit after the other; the units that no batch came to.

        `visit` is given a unit, what runs it on a batch, the batches that wait for it, all of which it has to run, and
        what it must call when it has.
        """
        left = {unit.name: unit for unit in units}
        modules = {unit.name: unit.module for unit in units}
        lockstep = self._lockstep(modules, self._forward, len(self.batches))
        met: dict[int, list[str]] = {batch: [] for batch in range(len(self.batches))}
        with lockstep.running():
            for name, batches in lockstep.steps() if units else ():
                unit = left.pop(name, None)
                if unit is None:
                    raise MetAgainError
                if self.weights is not None:
                    self.weights.fetch(unit.module)
                for batch in batches:
                    met[batch].append(name)
                if left:
                    visit(unit, lockstep.go_on, batches, lambda: None)
                    self._give_up()
                    continue
                with ExitStack() as stack:
                    alike = [batch for batch in batches if met[batch] == met[batches[0]]]
                    run = self._run_of_last(unit, lockstep, stack, alike)
                    visit(unit, run, batches, partial(self._check_met_once, lockstep, alike[1:]))
                break
        self._give_up()
        return list(left.values())

    def _run_of_last(
        self, unit: Unit, lockstep: LockStep, stack: ExitStack, alike: Sequence[int]
    ) -> Callable[[int], None]:
        """What runs the last unit on a batch.

        The first one that is run goes on to its end, which shows whether a unit is met again. Those that went the same
        way so far (`alike`) go as far as they are needed.
        """
        alone = [Unit(layer.name, layer.module, [layer]) for layer in unit.layers]
        routes: list[Route] = []

        def run(batch: int) -> None:
            goes_on = not routes or batch not in alike
            if not routes:  # by now the hooks are there that show values
                routes.append(stack.enter_context(Route(self.model, alone).known()))
            with routes[0].travelled(to_its_end=goes_on):
                (lockstep.go_on if goes_on else lockstep.rehearse)(batch)

        return run

    def _check_met_once(self, lockstep: LockStep, rehearsed: Sequence[int]) -> None:
        """Say that a unit is met again if a batch that went on to its end waits once more, on whatever rank."""
        waiting = [batch for batch in range(len(self.batches)) if lockstep.is_waiting(batch) and batch not in rehearsed]
        if any(self.ranks.gather(bool(waiting))):
            raise MetAgainError

    def _sequential(self) -> list[QuantizedLayer]:
        whole = self._with_finished(units_of(self.model, self.layers, self.blocks))
        left = {unit.name: unit for unit in whole}
        units: dict[str, Unit] = {}
        done: dict[str, list[QuantizedLayer]] = {}
        count = len(self.batches)
        streams = 2 if any(layer.wants_unquantised for layer in self.layers) else 1
        modules = {unit.name: unit.module for unit in whole}
        lockstep = self._lockstep(
            modules, lambda number: self._forward(number % count, is_copied=streams > 1), streams * count
        )

        def calibrated(unit: Unit, batches: Sequence[int]) -> None:
            units[unit.name] = unit
            done[unit.name] = self._calibrated(unit, lockstep, batches, passes=len(whole), is_last=not left)
            # Batches that went another way are done, too.
            self._num_shown = sum(each.share for each in units.values()) * sum(self._tokens)
            self._streams.forget(unit.layers)
            self._gallery.forget()

        with lockstep.running(), self._streams.running(), with_pages_of_their_own():
            for name, batches in lockstep.steps():
                unit, waiting = left.pop(name, None), batches
                if name in modules:  # a block, and no step of one
                    self._give_up()
                    if self.weights is not None:
                        self.weights.fetch(modules[name])
                steps = [] if unit is None else self._steps_of(unit, lockstep, batches)
                if unit is None:
                    if name in units:
                        _note_again(name, units[name].layers, done[name], is_made_up_for=streams > 1)
                elif steps:
                    lockstep.pause_within(name, {step.name: step.module for step in steps})
                    self._streams.watch(layer for step in steps for layer in step.layers)
                    left = {step.name: step for step in steps} | left
                else:
                    calibrated(unit, batches)
                    waiting = [batch for batch in batches if batch < count]
                if not left:
                    break
                self._thrift.look()
                for batch in waiting:
                    lockstep.go_on(batch)
        self._give_up()
        for unit in list(left.values()):  # no batch came by
            calibrated(unit, ())
            self._give_up()
        _note_shared(self.model, units, done, is_made_up_for=streams > 1)
        return [layer for layers in done.values() for layer in layers]

    def _steps_of(self, unit: Unit, lockstep: LockStep, batches: Sequence[int]) -> list[Unit]:
        """The steps of a unit, which the first batch that waits for it shows to all ranks."""
        found: list[Unit] = []

        def find() -> StepsInWords:
            found.extend(steps_of(self.model, unit, partial(lockstep.rehearse, batches[0])))
            return steps_in_words(unit, found)

        who = self.ranks.first_with(bool(batches))
        words = self.ranks.told_by(who, find)
        return found if who == self.ranks.rank else steps_from_words(self.model, unit, words)

    def _calibrated(
        self, unit: Unit, lockstep: LockStep, batches: Sequence[int], *, passes: int, is_last: bool
    ) -> list[QuantizedLayer]:
        """Show a unit the batches that wait for it, and quantise it.

        Those that flow through the model as it was go on before it is quantised, and the others not.
        """
        count = len(self.batches)
        unquantised = [batch for batch in batches if batch >= count]
        is_done = self._is_done(unit.layers)
        self._thrift.make_room(max((layer.room for layer in unit.layers), default=0))
        wants_both = any(layer.wants_unquantised for layer in unit.layers)
        with self._watched(unit.layers, unit.step_of or unit.module):
            if not is_done and any(layer.wants_data for layer in unit.layers):
                look = self._show_input if unit.is_seen_by_its_input else self._rehearse
                with nullcontext() if unit.is_seen_by_its_input else self._tapped(unit.layers):
                    for batch in (each for each in batches if each < count):
                        with self._showing(batch, unit.name, passes=passes, share=unit.share):
                            if batch + count in unquantised and wants_both:
                                self._is_unquantised = True
                                look(unit, lockstep, batch + count)
                                self._is_unquantised = False
                            look(unit, lockstep, batch)
            if not is_last:
                for batch in unquantised:
                    lockstep.go_on(batch)
            return self._finish(unit.layers)

    def _rehearse(self, unit: Unit, lockstep: LockStep, batch: int) -> None:
        lockstep.rehearse(batch)

    def _show_input(self, unit: Unit, lockstep: LockStep, batch: int) -> None:
        self._masks.enter(batch)
        args, keywords = lockstep.arguments(batch)
        value = first_tensor((*args, *keywords.values()))
        if value is None:
            return
        for layer in unit.layers:
            mask = partial(self._masks.of, value, layer.module, "input")
            for _, see in layer.sees_unquantised() if self._is_unquantised else layer.sees():
                see(self._gallery.show(value, mask, beside=self._streams.of(layer, batch)))

    # ---- parts -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, layers: Sequence[WatchedLayer], within: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.stop)
                layer.start()
            fuse_weight_observers(within)
            yield

    @contextmanager
    def _tapped(self, layers: Iterable[WatchedLayer]) -> Iterator[None]:
        def quantised(see: See) -> See:
            return lambda shown: None if self._is_unquantised else see(shown)

        def unquantised(see: See, module: nn.Module) -> See:
            # The tokens that choose an expert there are others than those that choose it here.
            return lambda shown: see(shown) if self._is_unquantised and not self._masks.are_chosen(module) else None

        taps = [Tap(layer.module, where, quantised(see)) for layer in layers for where, see in layer.sees()]
        taps += [
            Tap(layer.module, where, unquantised(see, layer.module))
            for layer in layers
            for where, see in layer.sees_unquantised()
        ]
        with tapped(taps, self._masks):
            yield

    @contextmanager
    def _showing(self, batch: int, what: str, *, passes: int = 1, share: float = 1.0) -> Iterator[None]:
        """Tells of a batch when it begins and when it is done."""
        total = round(passes * sum(self._tokens))
        self.on_step("calibrating", what, round(self._num_shown), total)
        yield
        self._num_shown += share * self._tokens[batch]
        self.on_step("calibrating", what, round(self._num_shown), total)

    def _lockstep(self, modules: Mapping[str, nn.Module], forward: Callable[[int], Any], count: int) -> LockStep:
        room = self.waiting_room
        leaving = {} if room is None else {"leaving": room.take}
        return LockStep(
            modules,
            forward,
            count,
            within=partial(quickly, self.model),
            entering=self._enter,
            agree=self.ranks.earliest,
            **leaving,
        )

    def _enter(self, number: int) -> None:
        self._masks.enter(number)
        self._streams.enter(number)

    def _give_up(self) -> None:
        if self.weights is not None:
            self.weights.give_up()

    def _pass(self, batch: int) -> None:
        """A pass that does not wait."""
        self._masks.enter(batch)
        with quickly(self.model):
            self._forward(batch)

    def _forward(self, batch: int, *, is_copied: bool = False) -> None:
        inputs: dict[str, Any] = dict(self.batches[batch])
        if is_copied:  # a batch that is run twice must not be changed in place the first time
            inputs = copied(inputs)
        if not self._takes_masks:  # what is masked is known to observers all the same
            inputs.pop("attention_mask", None)
        with calling(self.model, inputs, self._first + batch, self._count):
            self._call(inputs)

    def _call(self, inputs: dict[str, Any]) -> None:
        try:
            self.model(**inputs)
        except (ValueError, AttributeError, TypeError) as error:
            if isinstance(error, ScalewrightError):
                raise
            if self._takes_pictures and "pixel_values" not in inputs:  # nothing was amiss, if it can do without
                raise no_texts(self.model, "pixel_values") from error
            if not isinstance(error, ValueError) or not self._lacks_answers(inputs):
                raise
            raise DataError(
                f"data: {type(self.model).__name__} writes answers, and there are none in it. Give batches with "
                "input_ids and decoder_input_ids."
            ) from error

    def _lacks_answers(self, inputs: Batch) -> bool:
        """Whether a model has a decoder that is given nothing; some make do with what the encoder is given."""
        is_answering = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        return bool(is_answering) and not any(name == "labels" or name.startswith("decoder_") for name in inputs)

    def _finish(self, layers: Sequence[WatchedLayer]) -> list[QuantizedLayer]:
        done: dict[str, QuantizedLayer] = {}
        groups = _sharing_a_scale(layers)
        for group in groups:
            if self.journal is not None and self._is_done(group):
                done |= {layer.name: self._restored(layer, self.journal) for layer in group}
        for shares in self.ranks.rounds([group for group in groups if not self._is_done(group)]):
            self.ranks.merge(shares)
            for share in shares:
                if share.owner == self.ranks.rank:
                    done |= {each.name: each for each in self._quantised(share)}
                else:
                    self.ranks.help(share)
            for share in shares:
                for layer in share.layers:
                    finished = done.get(layer.name)
                    done[layer.name] = self.ranks.pass_on(layer, share.owner, finished)
                    if finished is None or not self.ranks.is_first:
                        self._keep(layer, done[layer.name])
            if layers and not layers[0].keeps_weight:
                self._give_up()
        return [done[layer.name] for layer in layers]

    def _quantised(self, share: Share) -> Iterator[QuantizedLayer]:
        """Quantise layers that share a scale."""
        group = share.layers
        # Of what observers are shown: another global scale than foreseen would have them search again.
        seen = (layer.target.to(layer.weight.dtype) for layer in (group if len(group) > 1 else []))
        absmax = max((absmax_of(each) for each in seen), default=None)
        for layer in group:
            layer.observe_weight(foreseen_absmax=absmax)
        for layer in group:
            self.on_step("quantising", layer.name, self._num_quantised, len(self.layers))
            with self.ranks.helped(share, layer):
                finished = layer.finish()
            if self.ranks.is_first:
                self._keep(layer, finished)
            yield finished

    def _keep(self, layer: WatchedLayer, finished: QuantizedLayer) -> None:
        tensors = finished.compressed
        if self.weights is not None:
            self.weights.check_source()  # before anything is kept that was computed from another one
        if self.journal is not None:
            finished.compressed = self.journal.keep(finished.name, finished.compressed, finished.record())
        if self.weights is not None:
            self.weights.finished(layer, finished.compressed or tensors)
        self._num_quantised += 1
        self.on_step("quantising", finished.name, self._num_quantised, len(self.layers))

    def _is_done(self, layers: Iterable[WatchedLayer]) -> bool:
        """Whether an earlier run has finished all of some layers."""
        journal = self.journal
        return journal is not None and all(journal.has(layer.name) for layer in layers)

    def _restored(self, layer: WatchedLayer, journal: Keeper) -> QuantizedLayer:
        self._num_quantised += 1
        restored = layer.restore(journal.part(layer.name), journal.record(layer.name))
        if self.weights is not None:
            self.weights.finished(layer, restored.compressed)
        self.on_step("quantising", layer.name, self._num_quantised, len(self.layers))
        return restored


class MetAgainError(Exception):
    """A unit was met again after all batches had been brought through it."""


def _sharing_a_scale(layers: Sequence[WatchedLayer]) -> list[list[WatchedLayer]]:
    """The layers in groups that share one global scale; most are alone."""
    left = list(layers)
    groups = []
    while left:
        partners = left[0].observers["weight"].fused_partners if "weight" in left[0].observers else frozenset()
        group = [left[0], *(each for each in left[1:] if each.observers.get("weight") in partners)]
        groups.append(group)
        left = [each for each in left if each not in group]
    return groups


_AGAIN = "is used again after it was quantised"


def _note_again(
    name: str, layers: Sequence[WatchedLayer], done: Sequence[QuantizedLayer], *, is_made_up_for: bool
) -> None:
    """Say once what is amiss with something that was used again after it was quantised."""
    amiss = {
        "its static scales come from its first use alone": any(each.observers.keys() - {"weight"} for each in done),
        "it was rounded for its first use alone": any(layer.goes_in_steps for layer in layers),
        "later layers do not make up for what that loses": is_made_up_for,
    }
    for what in (each for each, is_so in amiss.items() if is_so):
        note = f"{name}: {_AGAIN}, and {what}."
        if note not in done[0].notes:
            done[0].notes.append(note)


def _note_shared(
    model: nn.Module, units: Mapping[str, Unit], done: Mapping[str, list[QuantizedLayer]], *, is_made_up_for: bool
) -> None:
    """Say which layers are in more than one unit, or in more than one place of a list, of which passes see the first.

    Those of a unit that a pass has come to again are known: it has a note.
    """
    owners: dict[int, set[str]] = {}
    for name, unit in units.items():
        for module in {*unit.module.modules(), *(layer.module for layer in unit.layers)}:
            owners.setdefault(id(module), set()).add(name)
    listed = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    places = Counter((id(each), id(module)) for each in listed for item in each for module in item.modules())
    repeated = {module for (_, module), count in places.items() if count > 1}
    for name, unit in units.items():
        is_known = any(note.startswith(f"{name}: {_AGAIN}") for note in done[name][0].notes) if done[name] else True
        for layer, result in zip(unit.layers, done[name], strict=True):
            is_shared = any(not is_within(name, other) for other in owners[id(layer.module)])
            if is_shared or (id(layer.module) in repeated and not is_known):
                _note_again(layer.name, [layer], [result], is_made_up_for=is_made_up_for)
