"""Means over tokens, with the standard errors that samples give them.

The tokens of a sample are not independent of each other, so samples are what is counted. Of `m` samples, of which the
i-th has `n_i` tokens with the sum `s_i`, the mean over all tokens is a ratio of two sums, and has the standard error of
one (linearised; for samples of equal length it is the usual one of a mean):

    mean = sum s_i / sum n_i
    error = sqrt(m / (m - 1) * sum (s_i - mean * n_i) ** 2) / sum n_i
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

# S samples, B bins of positions.

NUM_BINS = 32


@dataclass(frozen=True)
class Figure:
    """A number, and how far off it may be by the choice of samples."""

    value: float
    error: float | None
    """Its standard error; None where there are fewer than two samples."""


@dataclass(frozen=True)
class PositionBin:
    """Tokens that were predicted from `first` to `last` tokens before them."""

    first: int
    last: int
    num_tokens: int
    kl: Figure
    agreement: Figure


def mean_of(sums_S: Tensor, counts_S: Tensor) -> Figure:
    """The mean over all tokens, from the sum and the number of tokens of each sample, in float64."""
    sums_S, counts_S = sums_S[counts_S > 0].double(), counts_S[counts_S > 0].double()
    num_samples, num_tokens = len(counts_S), float(counts_S.sum())
    mean = float(sums_S.sum()) / num_tokens
    if num_samples < 2:
        return Figure(mean, None)
    squares = float((sums_S - mean * counts_S).square().sum())
    return Figure(mean, (num_samples / (num_samples - 1) * squares) ** 0.5 / num_tokens)


def perplexity_of(losses_S: Tensor, counts_S: Tensor) -> Figure:
    """`exp` of the mean loss; its error is that of the mean, times the perplexity (the delta method)."""
    loss = mean_of(losses_S, counts_S)
    perplexity = exp(min(loss.value, 700.0))  # beyond which it is no float
    return Figure(perplexity, None if loss.error is None else loss.error * perplexity)


def bin_edges(num_positions: int) -> list[int]:
    """Where bins end, if positions are 1 to `num_positions`: up to 32 bins, as equal as can be."""
    num_bins = min(NUM_BINS, num_positions)
    return [round(num_positions * (number + 1) / num_bins) for number in range(num_bins)]


def curve_of(edges: list[int], kl_SB: Tensor, agreed_SB: Tensor, counts_SB: Tensor) -> list[PositionBin]:
    """The bins that have tokens in them."""
    found = []
    for number, last in enumerate(edges):
        counts_S = counts_SB[:, number]
        num_tokens = int(counts_S.sum())
        if num_tokens:
            first = edges[number - 1] + 1 if number else 1
            kl, agreement = (mean_of(each[:, number], counts_S) for each in (kl_SB, agreed_SB))
            found.append(PositionBin(first, last, num_tokens, kl, agreement))
    return found


def zeros(num_samples: int, num_bins: int) -> Tensor:
    """Sums of samples by bins, before anything was seen."""
    return torch.zeros(num_samples, num_bins, dtype=torch.float64)
