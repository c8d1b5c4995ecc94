"""A layer whose weight is rounded with its inputs in mind: it collects their Hessian, and rounds column by column."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor, nn
from typing_extensions import override

from scalewright.errors import CalibrationError, NonFiniteError
from scalewright.modifiers.gptq import Rounding
from scalewright.modifiers.layers import WatchedLayer
from scalewright.modifiers.shown import See, Shown
from scalewright.numerics.apart import zeros_apart
from scalewright.numerics.gptq import Codebook, corrected, descend, refit, round_columns
from scalewright.numerics.grids import grid_of
from scalewright.numerics.hessian import Factor, add_outer_, damped, factor, symmetrize_
from scalewright.numerics.layout import strategy_of
from scalewright.numerics.scales import effective_scale, scale_codes_of
from scalewright.observers.base import QParamsDict

_FEW_TOKENS = 32  # from which nothing can be learnt
_BY_ROW = ("channel", "group", "tensor_group")  # each row has scales of its own


SharedRounding = Callable[[QParamsDict], tuple[Tensor, Tensor]]


class Hessian:
    """The sum of x xT over the tokens that some layers are shown, all of them the same ones.

    Where it is known what they should have been shown, x', the sum of x (x' - x)T, too. It is lost, `cross_CC` is None,
    if this is not known of an input, or is of another number of tokens: then tokens go their own ways in both streams,
    as those of experts do, and nobody knows which belong together. Where it is known of a layer what its output, of
    `rows`, is added to, r, and should have been, r', there is the sum of x (r' - r)T, `beside_CR`, which is lost alike.
    """

    def __init__(self, columns: int, device: torch.device, *, with_cross: bool, rows: int = 0) -> None:
        self.num_tokens = 0
        self.num_shown = 0
        self.roundings: set[Rounding] = set()
        """How the layers that have it are rounded."""
        self.is_of_all_ranks = False
        """Whether it is the sum of those of all ranks. Layers that come later may share it."""
        self._columns = columns
        self.cross_CC = _zeros(columns, columns, device) if with_cross else None
        self.beside_CR = _zeros(columns, rows, device) if rows else None
        self._sum_CC: Tensor | None = _zeros(columns, columns, device)
        self._strengths: Tensor | None = None
        self._is_symmetric = True
        self._factors: dict[tuple[float, bool], Factor] = {}

    def add(self, shown: Shown, unquantised: Tensor | None, beside: Tensor | None = None) -> None:
        """Add the tokens that count; `unquantised` and `beside` are x' and r'."""
        x_TC = _tokens(shown)
        add_outer_(self._whole, x_TC)
        if unquantised is None or unquantised.shape != x_TC.shape:
            self.cross_CC = None
        elif self.cross_CC is not None:
            add_outer_(self.cross_CC, x_TC, unquantised - x_TC)
        if self.beside_CR is not None:
            lost_TR = None if beside is None or shown.beside is None else _lost(beside, _counting(shown.beside, shown))
            if lost_TR is None or lost_TR.shape != (len(x_TC), self.beside_CR.shape[1]):
                self.beside_CR = None
            else:
                add_outer_(self.beside_CR, x_TC, lost_TR)
        self._is_symmetric = False
        self._factors.clear()
        self.num_tokens += len(x_TC)
        self.num_shown += 1

    @property
    def matrix(self) -> Tensor:
        """All of it."""
        if not self._is_symmetric:
            symmetrize_(self._whole)
            self._is_symmetric = True
        return self._whole

    @property
    def strengths(self) -> Tensor:
        """Its diagonal."""
        return self._whole.diagonal() if self._strengths is None else self._strengths

    @property
    def _whole(self) -> Tensor:
        assert self._sum_CC is not None, "it was let go of when its factor was made"
        return self._sum_CC

    def told(self) -> list[int]:
        """What other ranks must know of it."""
        has_cross, rows = self.cross_CC is not None, 0 if self.beside_CR is None else self.beside_CR.shape[1]
        return [self._columns, self.num_tokens, self.num_shown, int(has_cross), rows, int(self.is_of_all_ranks)]

    @classmethod
    def merged(cls, own: Hessian | None, told: Sequence[Sequence[int]], device: torch.device) -> Hessian:
        """That of the ranks which have `told` of theirs, once all `strips` of it are added up. `own` becomes it."""
        has_cross, rows = all(each[3] for each in told), min(each[4] for each in told)
        merged = own if own is not None else cls(told[0][0], device, with_cross=has_cross, rows=rows)
        merged.num_tokens, merged.num_shown = sum(each[1] for each in told), sum(each[2] for each in told)
        merged.cross_CC = merged.cross_CC if has_cross else None
        merged.beside_CR = merged.beside_CR if rows else None
        merged._is_symmetric = False
        merged.is_of_all_ranks = True
        return merged

    def copy_matrices(self, other: Hessian) -> None:
        """Take over the matrices of another."""
        self._whole.copy_(other._whole)
        for own, its in ((self.cross_CC, other.cross_CC), (self.beside_CR, other.beside_CR)):
            if own is not None and its is not None:
                own.copy_(its)

    def strips(self, rows: int) -> Iterator[Tensor]:
        """Its matrices in pieces of some rows, without the part that is a mirror."""
        for start in range(0, self._columns, rows):
            yield self._whole[start : start + rows, start:]
        for each in (self.cross_CC, self.beside_CR):
            if each is not None:
                yield from torch.split(each, rows)

    def factor(self, rounding: Rounding) -> Factor:
        """Its factor, computed once. If nobody will ask for more, the matrix goes: there may be nothing larger."""
        key = (rounding.damping, rounding.is_ordered)
        if key not in self._factors:
            damping, is_ordered = key
            self._factors[key] = factor(self._whole, damping=damping, is_ordered=is_ordered, num_tokens=self.num_tokens)
            if not (self._is_wanted_whole or self.is_of_all_ranks):
                self._strengths, self._sum_CC = self.strengths.clone(), None
        return self._factors[key]

    @property
    def _is_wanted_whole(self) -> bool:
        """Whether somebody wants more of it than one factor."""
        kinds = {(each.damping, each.is_ordered) for each in self.roundings}
        return len(kinds) > 1 or any(each.refinements for each in self.roundings)


class GPTQLayer(WatchedLayer):
    """A linear layer that is rounded by GPTQ. Layers that are shown the same inputs share their Hessian."""

    goes_in_steps: ClassVar[bool] = True

    def __init__(self, name: str, module: nn.Module, scheme: QuantizationScheme, rounding: Rounding) -> None:
        super().__init__(name, module, scheme)
        self.rounding = rounding
        self._forget()

    def _forget(self) -> None:
        self._hessian: Hessian | None = None
        self._num_shown = 0
        self._unquantised: deque[tuple[Tensor, Tensor | None]] = deque()
        self._has_unmatched = False
        self.shared_rounding: SharedRounding | None = None
        """Does what `round_rows` does, with others."""
        self._target: Tensor | None = None
        self._failure: str | None = None

    @override
    def stop(self) -> None:
        super().stop()
        self._forget()

    # ---- watching ----------------------------------------------------------------------------------------------------

    @property
    @override
    def wants_data(self) -> bool:
        return True

    @property
    @override
    def wants_unquantised(self) -> bool:
        return self.rounding.correction > 0

    @property
    @override
    def wants_stream(self) -> bool:
        # Static scales of inputs cut off the loudest tokens, which may be a hundred times as loud as others. To make up
        # for what the stream has lost there spoils all others (SmolLM2-135M, W8A8: KL .87 instead of .22).
        return self.wants_unquantised and self.scheme.input_activations is None

    @override
    def sees_unquantised(self) -> Iterator[tuple[str, See]]:
        if self.wants_unquantised:
            yield "input", self._keep_unquantised

    @override
    def _sees_for_weights(self) -> Iterator[tuple[str, See]]:
        yield "input", self._add

    def _keep_unquantised(self, shown: Shown) -> None:
        beside = None if shown.beside is None else _counting(shown.beside, shown).clone()
        self._unquantised.append((_tokens(shown).clone(), beside))  # what follows may change them in place

    def _add(self, shown: Shown) -> None:
        if self._hessian is None:
            columns, device = shown.value.shape[-1], shown.value.device
            rows = len(self.weight) if self.wants_stream and self.stream is not None else 0
            # What it is given later, and what its output is added to, is not for others to see.
            owner = self.name if self.is_called_again or rows else None
            self._hessian = shown.once(
                ("hessian", self.wants_unquantised, owner),
                lambda: Hessian(columns, device, with_cross=self.wants_unquantised, rows=rows),
            )
        self._hessian.roundings.add(self.rounding)
        hessian, unquantised = self._hessian, self._unquantised.popleft() if self._unquantised else (None, None)
        shown.once(("added", hessian), lambda: hessian.add(shown, *unquantised))
        self._num_shown += 1

    # ---- on several ranks --------------------------------------------------------------------------------------------

    @property
    @override
    def cost(self) -> float:
        columns = self.weight.shape[-1]
        return super().cost * (1 + columns / 1000) + columns**3 / 6000

    @property
    @override
    def room(self) -> int:
        columns = self.weight.shape[-1]
        return 4 * (
            columns**2 + 3 * self.weight.numel()
        )  # a factor; the weight in fp32, what is left of it, what becomes of it

    @property
    def inputs(self) -> Hessian | None:
        """What it has seen of its inputs."""
        return self._hessian

    @inputs.setter
    def inputs(self, hessian: Hessian | None) -> None:
        """Let it have seen what others have seen, too."""
        self._hessian = hessian

    @override
    def told(self) -> dict[str, Any]:
        return super().told() | {"shown": self._num_shown, "unmatched": len(self._unquantised)}

    @override
    def heard(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        super().heard(everyone)
        self._num_shown = sum(each["shown"] for each in everyone)
        self._has_unmatched = any(each["unmatched"] for each in everyone)

    # ---- quantising --------------------------------------------------------------------------------------------------

    @property
    @override
    def target(self) -> Tensor:
        if self._target is None:
            self._target = self.weight.detach()
            found, cross_CC = self._factor(), self._cross
            is_sound = bool(torch.isfinite(self._target).all())  # or its observer says where it is not
            if found is not None and cross_CC is not None and is_sound:
                weight_CR = self._target.float().T.contiguous()
                share, beside_CR = self.rounding.correction, None if self._hessian is None else self._hessian.beside_CR
                target_CR = corrected(weight_CR, cross_CC, found, share=share, beside_CR=beside_CR)
                self._target = target_CR.T.contiguous()
        return self._target

    @property
    def _cross(self) -> Tensor | None:
        """What its inputs have lost, if it is to make up for that, and it is known of all of them."""
        has_unmatched = bool(self._unquantised) or self._has_unmatched
        is_known = self._hessian is not None and self.wants_unquantised and not has_unmatched
        return self._hessian.cross_CC if is_known and self._hessian is not None else None

    @property
    @override
    def factor(self) -> Factor | None:
        return self._factor()

    @override
    def observe_weight(self, *, foreseen_absmax: float | None = None) -> None:
        hessian, importance = self._hessian, self.importance
        if hessian is not None and hessian.num_shown != self._num_shown:
            raise CalibrationError(
                f"{self.name}: was shown {self._num_shown} inputs, of which some but not all were those of another "
                f"layer ({hessian.num_shown} in all). Their Hessian cannot be shared. Use QuantizationModifier for one "
                "of them, or ignore it."
            )
        if hessian is not None and not bool(torch.isfinite(hessian.strengths).all()):
            raise NonFiniteError(
                f"{self.name}: its input has NaN or Inf in it, or numbers too large to be squared in fp32. Mend the "
                "data."
            )
        if hessian is not None and importance is not None and hessian.num_tokens:
            importance.add_squares(hessian.strengths.clone(), hessian.num_tokens)
        super().observe_weight(foreseen_absmax=foreseen_absmax)

    @override
    def _rounded(self, qparams: QParamsDict, notes: list[str]) -> Tensor | None:
        found, hessian, args = self._factor(), self._hessian, self.scheme.weights
        if found is None or hessian is None or args is None:
            notes.append(f"{self.name}: {self._failure} It was rounded to the nearest.")
            return None
        if found.damping > self.rounding.damping:
            notes.append(
                f"{self.name}: its Hessian was not positive definite with dampening_frac {self.rounding.damping:g}, "
                f"and got {found.damping:g}."
            )
        if self.wants_unquantised and self._cross is None:
            notes.append(
                f"{self.name}: what it would be given by the model as it was is not known, so it does not make up for "
                "what earlier layers lost."
            )
        round_them = self.round_rows if self.shared_rounding is None else self.shared_rounding
        rounded_CR, scale_GR = round_them(qparams)
        if strategy_of(args) in _BY_ROW:
            qparams["scale"] = _stored(scale_GR.T.contiguous(), args, qparams).reshape(qparams["scale"].shape)
        return rounded_CR.T.contiguous()

    def round_rows(self, qparams: QParamsDict, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Some rows of the weight, rounded, [C, R], and the scales that they were given, [G, R].

        Rows do not know of each other. There must be a Hessian.
        """
        found, hessian, args = self._factor(), self._hessian, self.scheme.weights
        assert found is not None and hessian is not None and args is not None
        weight_CR = self.target[rows].float().T.clone(memory_format=torch.contiguous_format)  # it is written to
        size = self.rounding.block_size
        book = codebook(args, qparams, tuple(self.weight.shape)).of_rows(rows)
        refinements = self.rounding.refinements
        rounded_CR = round_columns(weight_CR, found, book, block_size=size, is_spent=not refinements)
        if not refinements:
            return rounded_CR, book.scale_GR
        with damped(hessian.matrix, found) as hessian_CC:
            for _ in range(refinements):
                if strategy_of(args) in _BY_ROW:
                    rounded_CR, book = refit(weight_CR, rounded_CR, hessian_CC, book, storable=_storable(args, qparams))
                rounded_CR = descend(weight_CR, rounded_CR, hessian_CC, book, block_size=size)
        return rounded_CR, book.scale_GR

    def _factor(self) -> Factor | None:
        """The Hessian's factor; None, with `_failure` saying why, if there is none."""
        hessian = self._hessian
        if hessian is None or hessian.num_tokens < _FEW_TOKENS:
            count = 0 if hessian is None else hessian.num_tokens
            self._failure = f"saw {count} tokens, and GPTQ needs {_FEW_TOKENS} or more."
            return None
        try:
            return hessian.factor(self.rounding)
        except ArithmeticError as error:
            self._failure = f"{error}. Give more, or other, samples."
            return None


def codebook(args: QuantizationArgs, qparams: QParamsDict, shape: tuple[int, ...]) -> Codebook:
    """What the elements of a weight [R, C] may become under these qparams."""
    rows, columns = shape
    strategy = strategy_of(args)
    scale = effective_scale(qparams["scale"], qparams["global_scale"])
    zero_point = None if args.symmetric else qparams["zero_point"].float()
    if strategy == "block":
        assert args.block_structure is not None
        height, width = args.block_structure
        parts = [
            None if each is None else each.repeat_interleave(height, dim=0)[:rows].T.contiguous()
            for each in (scale, zero_point)
        ]
    else:
        width = int(args.group_size) if strategy in ("group", "tensor_group") and args.group_size else columns
        parts = [
            None if each is None else each.reshape(-1, columns // width).expand(rows, -1).T.contiguous()
            for each in (scale, zero_point)
        ]
    assert parts[0] is not None
    return Codebook(grid_of(args), parts[0].float(), parts[1], [column // width for column in range(columns)])


def _stored(scale: Tensor, args: QuantizationArgs, qparams: QParamsDict) -> Tensor:
    """What is stored for the nearest scale that can be: in the format that scales have, under the global scale."""
    codes, global_scale = scale_codes_of(args), qparams["global_scale"]
    whole = scale if global_scale is None else scale * global_scale
    return (whole if codes is None else codes.nearest(whole)).to(qparams["scale"].dtype)


def _storable(args: QuantizationArgs, qparams: QParamsDict) -> Callable[[Tensor], Tensor]:
    """The nearest scale that can be stored beside those of `qparams`."""
    return lambda scale: effective_scale(_stored(scale, args, qparams), qparams["global_scale"])


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    return zeros_apart((rows, columns), dtype=torch.float32, device=device)


def _tokens(shown: Shown) -> Tensor:
    """The tokens that count, [T, C]."""
    return _counting(shown.value, shown)


def _counting(x: Tensor, shown: Shown) -> Tensor:
    """Those of a tensor of the same tokens as are shown."""
    return (x.reshape(-1, x.shape[-1]) if shown.mask is None else x[shown.mask.bool()]).float()


def _lost(should_TR: Tensor, is_TR: Tensor) -> Tensor | None:
    return should_TR - is_TR if should_TR.shape == is_TR.shape else None
