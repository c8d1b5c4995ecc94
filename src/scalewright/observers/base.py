"""What all observers share: how a value becomes statistics, and statistics become qparams.

An observer watches one tensor of one module: a weight, an activation or an attention state. `observer(value)` folds
a value into statistics, which are plain attributes; `get_qparams()` turns them into scale, zero point and global
scale, and changes nothing. A child class says how statistics are updated; everything else is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils import InternalModule
from torch import Tensor
from typing_extensions import override

from scalewright.errors import (
    LayoutError,
    MergeError,
    NonFiniteError,
    NoStatisticsError,
    ScalewrightError,
)
from scalewright.numerics import layout
from scalewright.numerics.extremes import are_finite_ends, is_finite, min_max
from scalewright.numerics.grids import grid_of
from scalewright.numerics.scales import effective_scale, global_scale_of, stored_dtype, stored_qparams
from scalewright.observers.knobs import Knob, parse_knobs
from scalewright.observers.merging import Rule, as_tensor, join_dtypes, merge_statistics, sync_statistics
from scalewright.observers.registry import NamedObservers


class QParamsDict(TypedDict):
    """What an observer finds: everything that is stored for one quantised tensor."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


Range = tuple[Tensor, Tensor]
"""The least and the largest value at each qparam position."""


@dataclass(frozen=True)
class Observed:
    """The value that an observer is looking at just now: flattened, and what is known of it."""

    x_NQG: Tensor
    range: Range
    shape: tuple[int, ...]
    g_idx: Tensor | None


class Observer(InternalModule, NamedObservers):  # type: ignore[misc]
    """Watches the values of one tensor and finds the qparams that lose least.

    `base_name` is what is watched: "weight", "input", "output", "q", "k" or "v". Further keywords are the knobs of
    the class, which may also stand in `args.observer_kwargs`; `args` itself is never changed.

    A child implements `update_statistics_from_observed`, which sets `min_vals` and `max_vals` (fp32, qparam_shape),
    and declares its `knobs`, how its statistics merge, and whether the order of batches matters to it.
    """

    knobs: ClassVar[tuple[Knob, ...]] = ()
    """What a user may turn; each becomes an attribute of the same name."""

    merge_rules: ClassVar[Mapping[str, Rule]] = {"min_vals": "min", "max_vals": "max"}
    """How two observers' statistics become one, for each attribute that is a statistic."""

    ordered: ClassVar[bool] = False
    """Whether seeing the same batches in another order gives other statistics."""

    watches: ClassVar[tuple[str, ...]] = ("weights", "activations", "attention states")
    """What the class is made for, in words for the docs; other tensors are not refused."""

    strategies: ClassVar[tuple[str, ...]] = ()
    """The strategies that the class can serve; empty for all that the base name allows."""

    min_vals: Tensor | None
    max_vals: Tensor | None

    def __init__(
        self,
        base_name: str = "weight",
        args: QuantizationArgs | None = None,
        *,
        quantization_args: QuantizationArgs | None = None,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        if type(self) is Observer:
            raise TypeError(
                "Observer is the base of all observers. Make one with Observer.load_from_registry(name, ...)."
            )
        given = args if args is not None else quantization_args
        are_both_given = args is not None and quantization_args is not None
        if not isinstance(base_name, str) or not isinstance(given, QuantizationArgs) or are_both_given:
            raise TypeError(
                f"{type(self).__name__} takes a base name and QuantizationArgs, as args= or quantization_args=; "
                f"got base_name={base_name!r}, args={args!r}, quantization_args={quantization_args!r}."
            )
        knob_values = {**(given.observer_kwargs or {}), **observer_kwargs}
        self.base_name = base_name
        self.args = given.model_copy(deep=True, update={"observer_kwargs": knob_values})
        self.label: str | None = None
        """Where the observed tensor lives, such as a module's name: error texts and notes begin with it."""
        self._fused_observers: set[Observer] = set()
        self._current: Observed | None = None
        for name, value in parse_knobs(self.observer_name, self.knobs, knob_values).items():
            setattr(self, name, value)
        self.reset()

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # A module looks at each value that is set, in case it is a parameter: 2 us, eight times in an observation.
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @override
    def extra_repr(self) -> str:
        """What `print(observer)` says of it."""
        knobs = "".join(f", {knob.name}={getattr(self, knob.name)!r}" for knob in self.knobs)
        return f"{self.base_name!r}, {layout.strategy_of(self.args)} {grid_of(self.args).name}{knobs}"

    # ---- a module's observer -----------------------------------------------------------------------------------

    def attach(self, module: torch.nn.Module) -> None:
        """Called when the observer begins to watch `module`; a child may register hooks here."""

    def detach(self, module: torch.nn.Module) -> None:
        """Called when the observer stops watching `module`; whatever `attach` left there is taken away."""

    # ---- statistics --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything that was seen; knobs and fused partners stay."""
        self.min_vals = None
        self.max_vals = None
        self.num_observed = 0
        self._observed_dtype: torch.dtype | None = None
        self._own_range: tuple[Tensor | None, Tensor | None] = (None, None)
        self._synced: dict[str, Tensor] = {}

    @property
    def has_statistics(self) -> bool:
        """Whether qparams can be computed."""
        return self.min_vals is not None and self.max_vals is not None

    @property
    def remembers(self) -> bool:
        """Whether a value joins what was seen before, or takes its place."""
        return True

    @property
    def num_observed_tokens(self) -> int:
        """How many tokens were seen, masked ones not counted; 0 for a weight."""
        return 0 if self.base_name == "weight" else self.num_observed

    @property
    def quantization_args(self) -> QuantizationArgs:
        """Another name for `args`."""
        return self.args

    @torch.no_grad()
    def forward(self, observed: Tensor, g_idx: Tensor | None = None, *, mask: Tensor | None = None) -> Observer:
        """Fold `observed` into the statistics and return self; unpacking the result gives scale and zero point.

        `mask` is zero for tokens to leave out ([batch, sequence], as an attention mask); `g_idx` names the group of
        each column of a weight. A tensor without elements, or without tokens that count, changes nothing.
        """
        if not isinstance(observed, Tensor):
            raise TypeError(f"{self._where}: an observer watches tensors, got {type(observed).__name__}.")
        if observed.is_complex() or observed.is_meta or observed.layout != torch.strided or observed.is_quantized:
            raise TypeError(
                f"{self._where}: only dense real tensors with values can be observed; this one has dtype "
                f"{observed.dtype}, layout {observed.layout} and device {observed.device}."
            )
        try:
            g_idx, mask = (None if each is None else as_tensor(each) for each in (g_idx, mask))
            self._observe(observed.detach().resolve_neg(), g_idx, mask)
        except ScalewrightError as error:
            raise error.at(self._where) from None
        return self

    def _observe(self, observed: Tensor, g_idx: Tensor | None, mask: Tensor | None) -> None:
        self._check_strategy()
        if observed.numel() == 0:
            return
        values = observed if observed.dtype in _NATIVE_DTYPES else observed.float()
        keep = None if mask is None else layout.align_mask(mask, observed, self.base_name)
        if keep is not None:
            if not bool(keep.any()):
                return
            if not bool(keep.all()):
                values = layout.drop_masked_tokens(values, self.base_name, self.args, keep)
        x_NQG = layout.flatten_for_calibration(values, self.base_name, self.args, g_idx=g_idx)
        lo_Q, hi_Q = min_max(x_NQG)
        if not are_finite_ends(lo_Q, hi_Q):
            raise _non_finite(observed, keep, self.base_name)
        self._check_same_shape(lo_Q.shape)
        self._current = Observed(x_NQG, (lo_Q, hi_Q), tuple(observed.shape), g_idx)
        try:
            self.update_statistics_from_observed(x_NQG)
        finally:
            self._current = None
        self._own_range = (self.min_vals, self.max_vals)
        self._observed_dtype = join_dtypes(self._observed_dtype if self.remembers else None, observed.dtype)
        self.num_observed += 1 if self.base_name == "weight" else self._count_tokens(observed, keep)

    @abstractmethod
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Fold `observed`, of shape (num_observations, *qparam_shape, group_size), into the statistics.

        It has an element at least, and no NaN or Inf. Statistics are fp32 (or counts) whatever its dtype.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: has no update_statistics_from_observed, which sets min_vals and max_vals from "
            "values of shape (num_observations, *qparam_shape, group_size). Write it in place of calculate_qparams."
        )

    def range_of(self, observed: Tensor) -> Range:
        """Least and largest value of `observed` at each qparam position, fp32; `forward` knows them already."""
        if self._current is not None and self._current.x_NQG is observed:
            return self._current.range
        return min_max(observed)

    def current_range(self) -> Range | None:
        """`min_vals` and `max_vals` in fp32, also where a user has set plain numbers; None when nothing was seen."""
        if self.min_vals is None or self.max_vals is None:
            return None
        return as_tensor(self.min_vals).float(), as_tensor(self.max_vals).float()

    @property
    def has_own_range(self) -> bool:
        """Whether `min_vals` and `max_vals` are as this class or a merge put them, and not such as a user has set."""
        return self._own_range[0] is self.min_vals and self._own_range[1] is self.max_vals

    # ---- qparams -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_qparams(self) -> QParamsDict:
        """Scale, zero point and (TENSOR_GROUP only) global scale from the statistics, which do not change.

        Fused partners share one global scale, so all of them must have seen something.
        """
        self._check_has_statistics()
        global_scale = self.get_global_scale()
        lo_Q, hi_Q = self.chosen_range(global_scale)
        # A user may have set ends that are in no order.
        is_fine = are_finite_ends(lo_Q, hi_Q) and (self.has_own_range or (is_finite(lo_Q) and is_finite(hi_Q)))
        if not is_fine:
            raise NonFiniteError(f"{self._where}: min_vals or max_vals were set to NaN or Inf. Set finite numbers.")
        scale, zero_point = stored_qparams(lo_Q, hi_Q, self.args, global_scale=global_scale, dtype=self.scale_dtype)
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    def __iter__(self) -> Iterator[Tensor]:
        """Scale and zero point: `scale, zero_point = observer(value)`."""
        qparams = self.get_qparams()
        return iter((qparams["scale"], qparams["zero_point"]))

    def chosen_range(self, global_scale: Tensor | None) -> Range:
        """The range that the qparams are computed from, given the global scale; statistics are there."""
        current = self.current_range()
        assert current is not None
        return current

    def absmax(self) -> Tensor:
        """The largest magnitude that was seen, which the global scale is made from; statistics are there."""
        current = self.current_range()
        assert current is not None
        return torch.maximum(-current[0].min(), current[1].max())

    def get_global_scale(self) -> Tensor | None:
        """The global scale of this observer and its fused partners, shape (1,); None unless TENSOR_GROUP."""
        if layout.strategy_of(self.args) != "tensor_group":
            return None
        self._check_has_statistics()
        unseen = sum(not each.has_statistics for each in self._fused_observers)
        if unseen:
            unseen_labels = sorted(
                each.label for each in self._fused_observers if each.label and not each.has_statistics
            )
            raise NoStatisticsError(
                "All fused observers must be run before get_qparams: "
                f"{unseen} of {len(self._fused_observers) + 1} have seen nothing"
                f"{' (' + ', '.join(unseen_labels) + ')' if unseen_labels else ''}."
            )
        absmax = self.absmax()
        for each in self._fused_observers:
            absmax = torch.maximum(absmax, each.absmax().to(absmax.device))
        return global_scale_of(absmax)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the scale: that of the observed tensor if it is bf16 or fp16, else fp32."""
        return stored_dtype(self._observed_dtype or torch.float32, self.args)

    def notes(self) -> list[str]:
        """What a user should know: nothing seen, dead positions, fall-backs. Empty when all is well."""
        current = self.current_range()
        if current is None:
            return [f"{self._where}: nothing was observed, so there are no qparams."]
        if not all(each.has_statistics for each in self._fused_observers):
            return [f"{self._where}: a fused partner has seen nothing, so there is no global scale."]
        lo_Q, hi_Q = current
        is_dead_Q = (lo_Q >= 0) & (hi_Q <= 0)
        counts = {
            "saw nothing but zeros; their scale is a stand-in": is_dead_Q,
            "are too small for any scale of this format and round to zero": self._rounds_to_nothing(lo_Q, hi_Q)
            & ~is_dead_Q,
        }
        return [
            f"{self._where}: {int(is_so.sum())} of {lo_Q.numel()} qparam positions {what}."
            for what, is_so in counts.items()
            if bool(is_so.any())
        ]

    def _rounds_to_nothing(self, lo_Q: Tensor, hi_Q: Tensor) -> Tensor:
        """Where even the largest value is less than half of the smallest code."""
        global_scale = self.get_global_scale()
        scale, _ = stored_qparams(lo_Q, hi_Q, self.args, global_scale=global_scale, dtype=self.scale_dtype)
        step_Q = (effective_scale(scale, global_scale) * grid_of(self.args).smallest).reshape(lo_Q.shape)
        return torch.maximum(-lo_Q, hi_Q) <= step_Q / 2

    # ---- more than one observer --------------------------------------------------------------------------------

    @staticmethod
    def fuse(observers: Iterable[Observer]) -> None:
        """Link observers whose tensors a loader merges into one, and all that these are linked to: one global scale."""
        linked = list(observers)
        group = set(linked).union(*(each._fused_observers for each in linked))
        for each in group:
            each._fused_observers = group - {each}

    @property
    def fused_partners(self) -> frozenset[Observer]:
        """The observers that share their global scale with this one."""
        return frozenset(self._fused_observers)

    @torch.no_grad()
    def merge(self, other: Observer) -> Observer:
        """Fold what `other` saw into this observer, as if this one had seen it, too, afterwards; returns self."""
        try:
            self._check_mergeable(other)
            merge_statistics(self, other)
        except MergeError as error:
            raise error.at(self._where) from None
        return self

    def sync_activation_stats(self) -> list[torch.distributed.Work]:
        """Make the statistics of all ranks one, on every rank; a no-op without a process group.

        Every rank calls it for the same observers in the same order, whether it has seen anything or not. The work
        is done on return, so the list of pending handles is empty. Calling it twice changes nothing more.
        """
        sync_statistics([self])
        return []

    def settle(self) -> None:
        """Called before statistics are merged, synced or stored; a child may bring in line what a user has set."""

    def decay_by(self, statistics: Mapping[str, Tensor]) -> float:
        """What the values that `statistics` are of leave of "decayed" statistics before them: a share, 1 for all."""
        return 1.0

    def derived(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The statistics whose rule is "derived", from all others; none, if what they are derived from is not there."""
        return {}

    def statistics_replaced(self, *, unchanged: bool) -> None:
        """Called after a merge or a sync has put statistics in place; what was derived from the old ones is stale.

        `unchanged` says that the range is, on this and every other rank, what it was before.
        """
        self._own_range = (self.min_vals, self.max_vals)

    # ---- checks ------------------------------------------------------------------------------------------------

    @property
    def observer_name(self) -> str:
        """The name in the registry, or that of the class if it has none."""
        return str(vars(type(self)).get("registry_name", type(self).__name__))

    @property
    def _where(self) -> str:
        return self.label or self.base_name

    def _check_strategy(self) -> None:
        layout.check_strategy(self.base_name, self.args)
        if self.strategies and layout.strategy_of(self.args) not in self.strategies:
            raise LayoutError(
                f"observer '{self.observer_name}' does not serve strategy '{layout.strategy_of(self.args)}'. "
                f"It serves: {', '.join(self.strategies)}."
            )

    def _check_mergeable(self, other: Observer) -> None:
        if other is self:
            raise MergeError("an observer cannot be merged into itself: it would count everything twice.")
        if type(other) is not type(self):
            raise MergeError(
                f"{type(other).__name__} cannot be merged into {type(self).__name__}. Merge like with like."
            )
        if other.base_name != self.base_name:
            raise MergeError(f"'{other.base_name}' cannot be merged into '{self.base_name}'. Merge like with like.")
        mine, theirs = self.args.model_dump(), other.args.model_dump()
        for knob in self.knobs:
            mine[knob.name], theirs[knob.name] = getattr(self, knob.name), getattr(other, knob.name)
        names = [
            name for name in {**mine, **theirs} if name != "observer_kwargs" and mine.get(name) != theirs.get(name)
        ]
        if names:
            shown = ", ".join(f"{name} ({mine.get(name)!r} here, {theirs.get(name)!r} there)" for name in names)
            raise MergeError(f"the observers differ in {shown}. Merge observers with equal arguments.")

    def _check_has_statistics(self) -> None:
        if not self.has_statistics:
            error = NoStatisticsError("No statistics available. Call observer(value) first.")
            raise error.at(self.label) if self.label else error

    def _check_same_shape(self, shape: Sequence[int]) -> None:
        before = self.current_range() if self.remembers else None
        if before is not None and tuple(before[0].shape) != tuple(shape):
            raise LayoutError(
                f"this value has qparams of shape {tuple(shape)}, and those seen before have {tuple(before[0].shape)}. "
                "Give values of one shape, or reset() in between."
            )

    def _count_tokens(self, observed: Tensor, keep: Tensor | None) -> int:
        return (
            int(keep.sum())
            if keep is not None
            else int(torch.Size(layout.tokens_shape(observed, self.base_name)).numel())
        )


_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _non_finite(observed: Tensor, keep: Tensor | None, base_name: str) -> NonFiniteError:
    """The error for a tensor with NaN or Inf in it: how many, and where the first is."""
    values = observed if observed.dtype in (*_NATIVE_DTYPES, torch.float64) else observed.float()
    counted = torch.ones_like(values, dtype=torch.bool)
    if keep is not None:
        counted &= (keep.unsqueeze(1) if base_name in layout.ATTENTION else keep).unsqueeze(-1)
    num_nan, num_inf = int((values.isnan() & counted).sum()), int((values.isinf() & counted).sum())
    bad = (values.isnan() | values.isinf()) & counted
    if not bool(bad.any()):
        return NonFiniteError(
            f"values of {values.dtype} go beyond fp32, whose largest number is 3.4e38. Scale them down."
        )
    first = tuple(int(i) for i in bad.nonzero()[0])
    return NonFiniteError(
        f"{num_nan} NaN and {num_inf} Inf among {int(counted.sum())} values, the first at index {first}. "
        "No scale can be computed from them: mend the tensor, or leave this layer out."
    )
