"""The best stored scale: not the best of some shrunken ranges, but the best of the scales that the format allows.

Which scales are worth trying depends on the format:

- Scales that are themselves numbers of a short format (e4m3 under a global scale, e8m0) are tried one by one, from the
  largest that can be best downwards, until what lies outside the range loses more than the best so far. The answer is
  that of trying all of them.
- Scales of fp32, bf16 or fp16 are tried on a ladder (ladder.py). Of a floating-point format's scale it matters where it
  lies between two powers of two: that is the ladder then.

The result is a range, so that compressed-tensors computes the chosen scale from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.blocks import BLOCK_ELEMENTS, InOrder, Positions, positions_of
from scalewright.numerics.grids import Grid, grid_of
from scalewright.numerics.judge import Judge
from scalewright.numerics.ladder import Found, Ladder
from scalewright.numerics.scales import (
    ScaleCodes,
    candidate_qparams,
    effective_scale,
    range_for,
    round_scale,
    scale_codes_of,
)

# N observations, Q qparam positions, G elements that share one scale; P positions of one block, J scales at a time.

_CODES_BELOW, _CODES_BELOW_WEIGHTED = 3, 8  # tried at once; more only where they can be better


@dataclass(frozen=True)
class OptimalRange:
    """The range of the best scale at each position, and the sign that the scale is to have."""

    lo_Q: Tensor
    hi_Q: Tensor
    sign_Q: Tensor


def optimal_range(
    x_NQG: Tensor,
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    norm: float = 2.0,
    candidates: int = 32,
    refits: int = 1,
    weights_NQG: Tensor | None = None,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    signed: bool = False,
    block_elements: int = BLOCK_ELEMENTS,
) -> OptimalRange:
    """The range whose stored scale has the least `sum of w * |dequantised - x| ** norm` at each qparam position.

    `lo_Q` and `hi_Q` are the true ranges of `x_NQG` (finite, at least one element); `weights_NQG` broadcasts against
    `x_NQG` and is not negative; `dtype` is what the scale is stored in. Of fp32, bf16 and fp16 scales about
    `candidates` are tried, and the best is refined `refits` times; it is never worse than min-max's. `signed` tries
    negative scales, too, where the format is a symmetric integer.
    """
    search = _Search(args, grid_of(args), norm, candidates, refits, global_scale, dtype)
    if weights_NQG is not None and weights_NQG.numel() == 1:
        weights_NQG = None
    signed = signed and args.symmetric and search.grid.mantissa_bits is None
    cut = positions_of(x_NQG, lo_Q, hi_Q, weights_NQG=weights_NQG, block_elements=block_elements)
    ranges = InOrder(lo_Q, hi_Q)
    for positions in cut:
        found = search.better_sign(positions) if signed else search.best_of(positions)
        ranges.put(*search.range_of(found, *ranges.next_of(len(found.scale_P))), found.scale_P.sign())
    return OptimalRange(*ranges.whole())


@dataclass(frozen=True)
class _Search:
    """What is the same for all positions of one search."""

    args: QuantizationArgs
    grid: Grid
    norm: float
    candidates: int
    refits: int
    global_scale: Tensor | None
    dtype: torch.dtype

    @property
    def judge(self) -> Judge:
        return Judge(self.grid, self.norm)

    def best_of(self, positions: Positions) -> Found:
        """The best stored scales."""
        codes = scale_codes_of(self.args)
        if codes is not None:
            return Found(codes.numbers_of(self._best_code(positions, codes)), None)
        found = self._best_on_ladder(positions)
        return replace(found, scale_P=self.in_store(found.scale_P * positions.unit_P))

    def better_sign(self, positions: Positions) -> Found:
        """The best stored scales, of both signs."""
        mirrored = replace(self, grid=self.grid.mirrored())
        both = []
        for search in (self, mirrored):
            found = search._best_on_ladder(positions)
            error_P = search.judge.errors(positions, found.scale_P, found.point_P)
            both.append(replace(found, error_P=error_P, scale_P=self.in_store(found.scale_P * positions.unit_P)))
        return both[0].or_better(replace(both[1], scale_P=-both[1].scale_P))

    def range_of(self, found: Found, lo_P: Tensor, hi_P: Tensor) -> tuple[Tensor, Tensor]:
        """The range that gives the scale and zero point that were found; `[lo, hi]` are the true ends.

        Min-max's own range is given back as it came: computed from its scale it may be off by the last bit. Nor can the
        range of a scale be given that lies beyond fp32.
        """
        args, global_scale = self.args, self.global_scale
        scale_P, point_P = found.scale_P, found.point_P
        best_lo_P, best_hi_P = range_for(scale_P.abs(), point_P, args, global_scale=global_scale)
        own_scale_P, own_point_P = candidate_qparams(lo_P, hi_P, args, global_scale=global_scale, dtype=self.dtype)
        is_own_P = (scale_P == own_scale_P) | (torch.maximum(-best_lo_P, best_hi_P) >= torch.finfo(torch.float32).max)
        if point_P is not None and own_point_P is not None:
            is_own_P &= (point_P == own_point_P) | (scale_P != own_scale_P)
        return torch.where(is_own_P, lo_P, best_lo_P), torch.where(is_own_P, hi_P, best_hi_P)

    def in_store(self, scale: Tensor) -> Tensor:
        """What is stored for a scale that codes are multiplied with."""
        return scale if self.global_scale is None else scale * self.global_scale

    def minmax(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point that min-max would store."""
        lo_P, hi_P = positions.lo_P * positions.unit_P, positions.hi_P * positions.unit_P
        return candidate_qparams(lo_P, hi_P, self.args, global_scale=self.global_scale, dtype=self.dtype)

    # ---- scales of a short format --------------------------------------------------------------------------------

    def _best_code(self, positions: Positions, codes: ScaleCodes) -> Tensor:
        """The code of the best scale; that of min-max if another is no better."""
        own_P = codes.code_of(self.minmax(positions)[0])
        below = _CODES_BELOW_WEIGHTED if positions.is_weighted else min(_CODES_BELOW, codes.above)
        offsets = [0, *range(codes.above, 0, -1), *range(-1, -below - 1, -1)]
        offset_J1 = torch.tensor(offsets, dtype=torch.int32, device=own_P.device).unsqueeze(1)
        best_P, is_open_P = self._best_of_codes(positions, codes, own_P + offset_J1, thorough=positions.is_weighted)
        odd_M = (own_P + codes.above < codes.halved_from - 1).nonzero()[:, 0]
        if len(odd_M):
            small_J1 = torch.arange(codes.first, codes.halved_from, dtype=torch.int32, device=own_P.device).unsqueeze(1)
            tried_JM = torch.cat([best_P[odd_M].unsqueeze(0), small_J1.flip(0).expand(-1, len(odd_M))])
            best_P[odd_M], is_open_P[odd_M] = self._best_of_codes(positions.at(odd_M), codes, tried_JM, thorough=True)
        lowest = below
        while bool(is_open_P.any()):
            # What is outside does not yet lose more than the best: smaller scales may be better still.
            open_M = is_open_P.nonzero()[:, 0]
            further = range(-lowest - 1, -lowest - 1 - _CODES_BELOW_WEIGHTED, -1)
            lower_J1 = torch.tensor(further, dtype=torch.int32, device=own_P.device).unsqueeze(1)
            lowest += _CODES_BELOW_WEIGHTED
            tried_JM = torch.cat([best_P[open_M].unsqueeze(0), own_P[open_M] + lower_J1])
            best_P[open_M], is_open_M = self._best_of_codes(positions.at(open_M), codes, tried_JM, thorough=True)
            is_open_P = torch.zeros_like(is_open_P).index_put((open_M,), is_open_M)
        return best_P

    def _best_of_codes(
        self, positions: Positions, codes: ScaleCodes, code_JP: Tensor, *, thorough: bool
    ) -> tuple[Tensor, Tensor]:
        """The best of some codes, the last of which are the least, and whether a lesser one may be better still."""
        code_JP = code_JP.clamp(codes.first, codes.last)
        scale_JP = effective_scale(codes.numbers_of(code_JP), self.global_scale) / positions.unit_P
        index_P, error_P = self.judge.least(positions, scale_JP)
        best_P = code_JP.gather(0, index_P.unsqueeze(0))[0]
        clipped_P = self.judge.clipped(positions, scale_JP[-1], thorough=thorough)
        return best_P, (clipped_P < error_P) & (code_JP[-1] > codes.first)

    # ---- scales that may be anything -----------------------------------------------------------------------------

    def _best_on_ladder(self, positions: Positions) -> Found:
        """The best scales, as stored, in units of their position."""
        scale_P, point_P = self.minmax(positions)

        def stored(scale: Tensor) -> Tensor:
            in_store = round_scale(self.in_store(scale * positions.unit_P), self.dtype)
            return effective_scale(in_store, self.global_scale) / positions.unit_P

        minmax = Found(effective_scale(scale_P, self.global_scale) / positions.unit_P, point_P)
        ladder = Ladder.of(
            self.judge,
            min(max(self.args.num_bits, 2), 8),
            positions,
            candidates=self.candidates,
            minmax=minmax,
            stored=stored,
        )
        return ladder.climb(self.refits)
