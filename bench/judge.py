"""What qparams lose, in float64 and from the definition alone: it shares no code with either contestant.

A code is `q = clamp(round(x / step + zero_point))`, and is read back as `(q - zero_point) * step`, where `step` is the
stored scale, divided by the global scale if there is one. How ties are rounded does not matter: both sides are as far.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

# P positions that have a scale of their own, G elements that share one, C columns.

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def groups_of(matrix: Tensor, args: QuantizationArgs) -> Tensor:
    """`matrix` [R, C] as [P, G]."""
    strategy = getattr(args.strategy, "value", args.strategy)
    size = {"tensor": matrix.numel(), "channel": matrix.shape[1]}.get(strategy, args.group_size)
    return matrix.reshape(-1, size)


def errors(
    x_PG: Tensor,
    qparams: Mapping[str, Tensor],
    args: QuantizationArgs,
    *,
    norm: float,
    weights_PG: Tensor | None = None,
) -> Tensor:
    """`sum over G of w * |d| ** norm`, float64 [P]."""
    step_P1 = qparams["scale"].double().reshape(-1, 1)
    if "global_scale" in qparams:
        step_P1 = step_P1 / qparams["global_scale"].double()
    zero_P1 = qparams["zero_point"].double().reshape(-1, 1)
    x_PG = x_PG.double()
    q_PG = x_PG / step_P1 + zero_P1
    if getattr(args.type, "value", args.type) == "float":
        middles = (E2M1[1:] + E2M1[:-1]) / 2
        q_PG = E2M1[torch.bucketize(q_PG.abs(), middles)].copysign(q_PG)
    else:
        q_PG = q_PG.round().clamp(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1)
    d_PG = ((q_PG - zero_P1) * step_P1 - x_PG).abs().pow(norm)
    return (d_PG if weights_PG is None else d_PG * weights_PG).sum(dim=1)


def importance_of(inputs: Tensor, rows: int) -> Tensor:
    """E[x^2] of each input channel, the same for every row of the weight: [rows, C]."""
    return inputs.double().square().mean(dim=0).expand(rows, -1)
