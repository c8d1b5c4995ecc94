"""THE range search: every observer that shrinks or widens a range calls it.

A candidate is a pair of factors on the least and the largest value. It is judged by the error of what would really be
stored: the scale as compressed-tensors computes it, rounded to the dtype that carries it, under the real global scale,
with the integer zero point. Work is done in blocks that stay in cache (blocks.py), so memory does not grow with the
tensor or with the number of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.numerics.blocks import BLOCK_ELEMENTS, InOrder, Positions, positions_of
from scalewright.numerics.charts import error_chart
from scalewright.numerics.grids import grid_of
from scalewright.numerics.judge import BATCH, Judge, Judged
from scalewright.numerics.measure import is_quick_norm
from scalewright.numerics.scales import E4M3_SCALES, candidate_qparams, effective_scale

# N observations, Q qparam positions, G elements that share one scale, K candidates (J in a batch); P positions.

_CHARTED = 20  # candidates in one chart: a row should not be much longer than two lines of the cache
_WORTH_A_CHART = 6
_MANY = 64  # elements of a group: bounds for many candidates cost more than they save in smaller ones
_CHARTED_BITS = 4  # more steps would need more bins than fit into the cache
_BINS = 8192
_LEAST_RATIO = 0.02
_WOBBLE = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # what rounding does to a scale
_CODE_RATIO = 1.06  # neighbouring candidates that are closer than this pass over no code of e4m3


@dataclass(frozen=True)
class RangeSearch:
    """The best range at each position, the candidate that gave it, and after how many candidates it was settled."""

    lo_Q: Tensor
    hi_Q: Tensor
    best_Q: Tensor
    num_tried_Q: Tensor


def shrink_candidates(*, maxshrink: float, grid: float, expand: float = 1.0) -> Tensor:
    """`expand * (1 - i / grid)` for i below `maxshrink * grid`, for both ends alike; 1 (min-max itself) comes first.

    [K, 2] factors, descending after the first. Min-max is always among them: a search is never worse than none.
    """
    steps = torch.arange(max(1, int(maxshrink * grid + 1e-9)), dtype=torch.float64, device="cpu")
    factors = expand * (1 - steps / grid)
    factors = torch.cat([factors.new_ones(1), factors[factors != 1]])
    return factors.float().unsqueeze(1).expand(-1, 2)


def search_range(
    x_NQG: Tensor,
    lo_Q: Tensor,
    hi_Q: Tensor,
    args: QuantizationArgs,
    *,
    candidates_K2: Tensor,
    norm: float,
    weights_NQG: Tensor | None = None,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    patience: int = 0,
    block_elements: int = BLOCK_ELEMENTS,
) -> RangeSearch:
    """The candidate range with the least error at each qparam position; the first of equals.

    `lo_Q` and `hi_Q` are the true ranges of `x_NQG` (finite, at least one element); `weights_NQG` broadcasts against
    `x_NQG` and is not negative; `dtype` is what the scale is stored in. After `patience` candidates in a row that
    were no better (0: never) a position is settled, provided that what lies outside its range alone loses more than
    its best, which can only grow as ranges shrink: the answer is that of the full search, in less time. With
    `patience`, candidates must shrink from the second on.
    """
    search = _Search(Judge(grid_of(args), norm), args, candidates_K2.to(x_NQG.device), global_scale, dtype, patience)
    if not search._covers_all_codes:
        # What is known of each candidate at each position of a block must not take more memory than its elements.
        most_positions = max(1, BLOCK_ELEMENTS // len(candidates_K2))
        block_elements = min(block_elements, most_positions * x_NQG.shape[0] * x_NQG.shape[-1])
    cut = positions_of(x_NQG, lo_Q, hi_Q, weights_NQG=weights_NQG, block_elements=block_elements)
    found = InOrder(lo_Q, hi_Q)
    for positions in cut:
        best_P, num_tried_P = search.best_of(positions)
        (lo_P, hi_P), factors_P2 = found.next_of(len(best_P)), search.candidates_K2[best_P]
        ends = (_times(end_P, factors_P2[:, end]) for end, end_P in enumerate((lo_P, hi_P)))
        found.put(*ends, best_P.int(), num_tried_P.int())
    return RangeSearch(*found.whole())


@dataclass(frozen=True)
class _Search:
    """What is the same for all positions of one search."""

    judge: Judge
    args: QuantizationArgs
    candidates_K2: Tensor
    global_scale: Tensor | None
    dtype: torch.dtype
    patience: int

    def best_of(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Index of the best candidate and the number of candidates tried, at each of the positions."""
        if self._covers_all_codes:
            return self._best_code(positions)
        if self._is_charted(positions.group_size):
            return self._best_charted(positions)
        judged: Judged | None = None
        tried_P = torch.full_like(positions.unit_P, len(self.candidates_K2), dtype=torch.int64)
        for factors_J2 in torch.split(self.candidates_K2, BATCH):
            batch = self.judge.judge(positions, *self._stored(positions, *factors_J2.T.unsqueeze(-1)))
            judged = batch if judged is None else Judged.joined([judged, batch])
            num_judged = len(judged.scale_KP)
            may_stop = self.args.symmetric and (is_quick_norm(self.judge.norm) or not positions.is_weighted)
            if may_stop and 0 < self.patience < num_judged < len(self.candidates_K2):
                tried_P = torch.where(self._is_settled(positions, judged), tried_P.clamp(max=num_judged), tried_P)
                if bool((tried_P <= num_judged).all()):
                    break
        assert judged is not None
        return self.judge.best(positions, judged), tried_P

    def _is_settled(self, positions: Positions, judged: Judged) -> Tensor:
        """Where no later candidate can be better, and the last `patience` were not."""
        clipped_P = self.judge.clipped(positions, judged.scale_KP[-1], thorough=positions.is_weighted)
        last = len(judged.scale_KP) - self.patience
        before_P, after_P = judged.most_KP[:last].amin(dim=0), judged.most_KP[last:].amin(dim=0)
        return (clipped_P > before_P) & (after_P >= before_P)

    def _stored(self, positions: Positions, factor_lo: Tensor, factor_hi: Tensor) -> tuple[Tensor, Tensor | None]:
        """The qparams of some candidates as they would be stored, the scales in units of their position: [J, P]."""
        lo_JP = _times(positions.lo_P * positions.unit_P, factor_lo)
        hi_JP = _times(positions.hi_P * positions.unit_P, factor_hi)
        scale_JP, zero_point_JP = candidate_qparams(
            lo_JP, hi_JP, self.args, global_scale=self.global_scale, dtype=self.dtype
        )
        return effective_scale(scale_JP, self.global_scale) / positions.unit_P, zero_point_JP

    # ---- all candidates at once -----------------------------------------------------------------------------------

    def _is_charted(self, group_size: int) -> bool:
        """Whether the scales of candidates are in the same ratios to min-max's everywhere, and a chart is quicker."""
        num_candidates = len(self.candidates_K2)
        return (
            self.args.symmetric
            and self.args.scale_dtype is None
            and self.global_scale is None
            and self.judge.grid.mantissa_bits is None
            and self.args.num_bits <= _CHARTED_BITS
            and self.judge.norm >= 1
            and self.dtype in _WOBBLE
            and float(self.candidates_K2.min()) >= _LEAST_RATIO
            and num_candidates >= _WORTH_A_CHART
            and (num_candidates <= _CHARTED or group_size >= _MANY)
            and bool((self.candidates_K2[:, 0] == self.candidates_K2[:, 1]).all())
        )

    def _best_charted(self, positions: Positions) -> tuple[Tensor, Tensor]:
        grid = self.judge.grid
        absmax_P = torch.maximum(-positions.lo_P, positions.hi_P)
        base_P = torch.where(absmax_P > 0, absmax_P / ((grid.high - grid.low) / 2), 1.0)
        surveyed = []
        for factors_J2 in torch.split(self.candidates_K2, _CHARTED):
            chart = error_chart(
                grid,
                self.judge.norm,
                tuple(factors_J2[:, 0].tolist()),
                wobble=_WOBBLE[self.dtype],
                bins=_BINS,
                device=str(base_P.device),
            )
            scale_JP, _ = self._stored(positions, *factors_J2.T.unsqueeze(-1))
            surveyed.append(self.judge.survey(positions, base_P, chart, scale_JP))
        best_P = self.judge.best(positions, Judged.joined(surveyed))
        return best_P, torch.full_like(best_P, len(self.candidates_K2))

    # ---- many candidates, few scales -----------------------------------------------------------------------------
    #
    # A hundred factors on a range give a dozen scales when these are e4m3. The scales are judged, and the candidate
    # that gives the best of them is found by bisection.

    @property
    def _covers_all_codes(self) -> bool:
        """Whether the candidates, after the first, give each code between their ends."""
        factors_K = self.candidates_K2[1:, 0]
        return (
            self.args.scale_dtype == torch.float8_e4m3fn
            and len(factors_K) > 1
            and bool((self.candidates_K2[:, 0] == self.candidates_K2[:, 1]).all())
            and bool((factors_K[:-1] >= factors_K[1:]).all())
            and bool((factors_K[:-1] <= factors_K[1:] * _CODE_RATIO).all())
        )

    def _best_code(self, positions: Positions) -> tuple[Tensor, Tensor]:
        num_candidates = len(self.candidates_K2)
        code_3P = torch.stack(
            [
                self._code(positions, torch.full_like(positions.unit_P, k, dtype=torch.int64))
                for k in (0, 1, num_candidates - 1)
            ]
        )
        num_steps = int((code_3P[1] - code_3P[2]).max()) + 1
        steps_J1 = torch.arange(num_steps, dtype=torch.int32, device=code_3P.device).unsqueeze(1)
        code_KP = torch.cat([code_3P[:1], torch.maximum(code_3P[1] - steps_J1, code_3P[2])])
        scale_KP = effective_scale(E4M3_SCALES.numbers_of(code_KP), self.global_scale) / positions.unit_P
        slot_P, _ = self.judge.least(positions, scale_KP)
        best_code_P = code_KP.gather(0, slot_P.unsqueeze(0))[0]
        low_P, high_P = torch.ones_like(slot_P), torch.full_like(slot_P, num_candidates - 1)
        for _ in range(num_candidates.bit_length()):
            middle_P = (low_P + high_P) // 2
            is_reached_P = self._code(positions, middle_P) <= best_code_P
            high_P = torch.where(is_reached_P, middle_P, high_P)
            low_P = torch.where(is_reached_P, low_P, middle_P + 1).clamp_(max=num_candidates - 1)
        return torch.where(slot_P == 0, 0, high_P), torch.full_like(slot_P, num_candidates)

    def _code(self, positions: Positions, candidate_P: Tensor) -> Tensor:
        """The code of e4m3 that a candidate's scale is stored as."""
        factors_P = self.candidates_K2[candidate_P, 0]
        lo_P, hi_P = (_times(end_P * positions.unit_P, factors_P) for end_P in (positions.lo_P, positions.hi_P))
        scale_P, _ = candidate_qparams(lo_P, hi_P, self.args, global_scale=self.global_scale, dtype=self.dtype)
        return E4M3_SCALES.code_of(scale_P)


def _times(end: Tensor, factor: Tensor) -> Tensor:
    """`end * factor`, saturating: factors above 1 could leave fp32."""
    largest = torch.finfo(torch.float32).max
    return (end * factor).clamp(-largest, largest)
