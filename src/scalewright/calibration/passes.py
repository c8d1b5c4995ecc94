"""How passes are run: as far as they are needed, without dropout, without a kv cache, and by the quickest kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from scalewright.calibration import taps
from scalewright.calibration.lockstep import Enough
from scalewright.calibration.sources import first_line, listed
from scalewright.calibration.steps import Unit
from scalewright.errors import DataError, ScalewrightError
from scalewright.numerics.products import quick_linears

# What models raise that are called with what they are not made for.
_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


class Route:
    """Where passes go, so that they can end early.

    The first pass that comes to all units shows in which order they are entered and left. Passes that go the same way
    end where it was last in a unit. No pass goes into the output head, unless its output is to be seen, or there are
    units behind it in the model: one that has two heads runs the second after the first.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        head = last_head(model, [unit.module for unit in units])
        is_needed = any(unit.module is head and not unit.is_seen_by_its_input for unit in units)
        self._head = None if is_needed else head
        self._units = units
        self._now: list[tuple[int, str]] = []
        self._first: list[tuple[int, str]] | None = None
        self._may_end = True

    @contextmanager
    def known(self) -> Iterator[Route]:
        """While inside, passes are watched. Hooks that show values must be there already."""
        with ExitStack() as stack:
            for number, unit in enumerate(self._units):
                stack.callback(unit.module.register_forward_pre_hook(self._at((number, "in"))).remove)
                if not unit.is_seen_by_its_input:
                    stack.callback(unit.module.register_forward_hook(self._at((number, "out"))).remove)
            stack.enter_context(ending_at(self._head))
            yield self

    @contextmanager
    def travelled(self, *, to_its_end: bool = False) -> Iterator[None]:
        """Inside a pass is run, as far as it is needed, or to its end."""
        self._now, self._may_end = [], not to_its_end
        with suppress(Enough):
            yield
        if self._first is None and {number for number, _ in self._now} == set(range(len(self._units))):
            self._first = self._now

    def _at(self, place: tuple[int, str]) -> Callable[..., None]:
        def pass_by(*_: Any) -> None:
            self._now.append(place)
            if self._may_end and self._now == self._first:
                raise Enough

        return pass_by


def last_head(model: nn.Module, modules: Sequence[nn.Module]) -> nn.Module | None:
    """The output head of a model, unless some of its modules stand behind it."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    return head if isinstance(head, nn.Module) and not _is_behind(model, head, modules) else None


def _is_behind(model: nn.Module, module: nn.Module, others: Sequence[nn.Module]) -> bool:
    """Whether one of the others stands behind a module, in the order of the model."""
    order = list(model.modules())
    behind = order[order.index(module) + 1 :] if module in order else []
    return any(each is other for each in behind for other in others)


@contextmanager
def ending_at(module: nn.Module | None) -> Iterator[None]:
    """While inside, what comes to this module's input ends there. Hooks that show it must be there already."""
    if module is None:
        yield
        return

    def end(*_: Any) -> None:
        raise Enough

    hook = module.register_forward_pre_hook(end)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off while inside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def quickly(model: nn.Module) -> AbstractContextManager[object]:
    """While inside, a model's large products are by whatever is quickest on this processor.

    All passes of a run go so, or their numbers would depend on the way that they took. Nothing else should be done
    inside: every call of torch costs 2 us more.
    """
    return quick_linears(model.parameters())


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """A kv cache would only cost memory, and a block that is run twice would fill it twice."""
    configs = {id(config): config for config in _configs(model)}.values()
    with ExitStack() as stack:
        for config in configs:
            if "use_cache" in vars(config):
                stack.callback(setattr, config, "use_cache", config.use_cache)
            elif hasattr(config, "use_cache"):
                stack.callback(delattr, config, "use_cache")
            else:
                continue
            config.use_cache = False
        yield


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations of a model and its parts, and those within them."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            yield config
            yield from (each for each in vars(config).values() if hasattr(each, "use_cache"))


@contextmanager
def calling(model: nn.Module, batch: Mapping[str, Any], number: int, count: int) -> Iterator[None]:
    """Inside a model is called with a batch, the one of that `number` of `count`. An error of its own says which.

    What observers raise that look at the batch is their own affair, and stays as it is.
    """
    try:
        yield
    except ScalewrightError:
        raise
    except _ERRORS as error:
        if any(frame.f_globals is vars(taps) for frame, _ in walk_tb(error.__traceback__)):
            raise
        shapes = (f"{name} {list(each.shape)}" for name, each in batch.items() if isinstance(each, Tensor))
        raise DataError(
            f"data: batch {number + 1} of {count} ({listed(shapes)}): {type(model).__name__} cannot be run on it "
            f"({type(error).__name__}: {first_line(error).rstrip('.')}). Give batches that it can be called with, as "
            "in model(**batch); or fewer samples in each, if memory is short."
        ) from error
