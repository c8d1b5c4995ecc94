"""How a tensor is cut into the pieces that share one scale.

Everything downstream works on one shape, `(num_observations, *qparam_shape, group_size)`:

    weight [R, C]            TENSOR                (1, 1, R*C)
                             CHANNEL               (1, R, 1, C)
                             GROUP, TENSOR_GROUP   (1, R, C/g, g)
                             BLOCK h x w           (1, ceil(R/h), ceil(C/w), h*w), zero-padded
    input, output [B, S, H]  TENSOR                (B*S, 1, H)
                             GROUP, TENSOR_GROUP   (B*S, H/g, g)
                             TOKEN                 (B, S, H), as it is
    q, k, v [B, h, S, d]     TENSOR                (B*S, 1, h*d)
                             ATTN_HEAD             (B*S, h, 1, 1, d)

Every other pair is an error. Weights may have leading dimensions (stacked experts), which stay in front of R;
activations of two or four dimensions give the qparam shape that three give. Results are views wherever torch
can make one. This file looks at shapes only: dtypes, ranges and NaNs are other people's business.
"""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from scalewright.errors import LayoutError

# N observations, Q qparam positions (one or more dimensions), G elements that share one scale.

ACTIVATIONS = ("input", "output")
ATTENTION = ("q", "k", "v")
BASE_NAMES = ("weight", *ACTIVATIONS, *ATTENTION)

STRATEGIES = {
    "weight": ("tensor", "channel", "group", "tensor_group", "block"),
    **dict.fromkeys(ACTIVATIONS, ("tensor", "group", "tensor_group", "token")),
    **dict.fromkeys(ATTENTION, ("tensor", "attn_head")),
}


def flatten_for_calibration(
    value: Tensor, base_name: str, args: QuantizationArgs, *, g_idx: Tensor | None = None
) -> Tensor:
    """Reshape `value` to `(num_observations, *qparam_shape, group_size)`; the table above is the contract.

    `g_idx[c]` names the group of column c, for weights whose groups are not runs of neighbouring columns.
    """
    check_strategy(base_name, args)
    if value.ndim == 0:
        raise LayoutError("a scalar has no layout. Give a tensor of one dimension or more.")
    if base_name == "weight":
        return _flatten_weight(value, args, g_idx)
    if g_idx is not None:
        raise LayoutError(f"g_idx groups the columns of a weight, and this is '{base_name}'. Leave it out.")
    return _flatten_activation(value, args) if base_name in ACTIVATIONS else _flatten_attention(value, args)


def check_strategy(base_name: str, args: QuantizationArgs) -> None:
    """Raise LayoutError unless tensors called `base_name` can be quantised by the strategy in `args`."""
    if base_name not in STRATEGIES:
        raise LayoutError(f"unknown base name '{base_name}'. Base names: {', '.join(BASE_NAMES)}.")
    if strategy_of(args) not in STRATEGIES[base_name]:
        raise LayoutError(
            f"strategy '{strategy_of(args)}' does not fit '{base_name}'. "
            f"Strategies for '{base_name}': {', '.join(STRATEGIES[base_name])}."
        )


def strategy_of(args: QuantizationArgs) -> str:
    """The strategy as plain text; QuantizationArgs holds now a string, now an enum member, which is one, too."""
    return str.__str__(args.strategy)  # asking an enum for its value takes a microsecond


def tokens_shape(value: Tensor, base_name: str) -> tuple[int, ...]:
    """The dimensions of `value` that count tokens: [B, S] of [B, S, H], or of [B, h, S, d]."""
    if base_name in ATTENTION:
        _check_attention(value)
        return (value.shape[0], value.shape[2])
    return tuple(value.shape[:-1])


def align_mask(mask: Tensor, value: Tensor, base_name: str) -> Tensor:
    """`mask` as a boolean tensor of the tokens' shape: True where a token counts."""
    if base_name not in ACTIVATIONS + ATTENTION:
        raise LayoutError(f"a mask leaves tokens out, and '{base_name}' has none. Leave the mask out.")
    tokens = tokens_shape(value, base_name)
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise LayoutError(
            "a mask with negative entries looks like one that is added to attention scores. "
            "Give 1 for tokens that count and 0 for those that do not."
        )
    keep = (mask != 0).to(value.device)
    if keep.ndim != len(tokens) and keep.numel() == math.prod(tokens):
        return keep.reshape(tokens)
    if keep.ndim == 2 and len(tokens) > 2:  # [batch, sequence], for [batch, ..., sequence]
        keep = keep.reshape(len(keep), *[1] * (len(tokens) - 2), -1)
    if keep.ndim == 1 and len(keep) == tokens[-1]:  # one for each place in the sequence
        keep = keep.reshape(*[1] * (len(tokens) - 1), -1)
    if keep.ndim == len(tokens) and all(have in (1, want) for have, want in zip(keep.shape, tokens, strict=True)):
        return keep.expand(tokens)
    raise LayoutError(
        f"a mask of shape {tuple(mask.shape)} does not fit tokens of shape {tokens}. "
        "Give one entry for each token, as an attention mask [batch, sequence] does."
    )


def drop_masked_tokens(value: Tensor, base_name: str, args: QuantizationArgs, keep: Tensor) -> Tensor:
    """`value` without the tokens where `keep`, as `align_mask` gives it, is False.

    Under TOKEN a token's place is its qparam, so nothing can be dropped: left-out tokens become zeros, which
    every range contains and every grid holds exactly.
    """
    if strategy_of(args) == "token":
        return value.masked_fill(~keep.unsqueeze(-1), 0)
    if base_name in ATTENTION:
        kept = value.transpose(1, 2)[keep]  # [tokens, h, d]
        return kept.transpose(0, 1).unsqueeze(0)
    return value[keep]


def spread_columns(
    per_column_C: Tensor, shape: tuple[int, ...], args: QuantizationArgs, *, g_idx: Tensor | None = None
) -> Tensor:
    """One number for each column of a weight of `shape` [..., R, C], broadcasting against the flattened weight.

    Every row of blocks has the same numbers, unless the last is padded. TENSOR has rows and columns in one dimension,
    so they take as much memory there as the weight in fp32.
    """
    height = args.block_structure[0] if args.block_structure is not None else None
    if height is not None and len(shape) > 1 and shape[-2] % height == 0:
        return flatten_for_calibration(per_column_C.expand(height, -1), "weight", args)
    if strategy_of(args) in ("tensor", "block"):
        return flatten_for_calibration(per_column_C.expand(shape), "weight", args)
    return flatten_for_calibration(per_column_C.unsqueeze(0), "weight", args, g_idx=g_idx)


def num_columns(x_NQG: Tensor, args: QuantizationArgs) -> int | None:
    """How many columns the weight had that `x_NQG` was made from; None where the flattened shape no longer tells."""
    if strategy_of(args) == "channel":
        return x_NQG.shape[-1]
    return math.prod(x_NQG.shape[-2:]) if strategy_of(args) in ("group", "tensor_group") else None


def _flatten_weight(value: Tensor, args: QuantizationArgs, g_idx: Tensor | None) -> Tensor:
    strategy = strategy_of(args)
    if g_idx is not None and strategy not in ("group", "tensor_group"):
        raise LayoutError(f"g_idx names groups, and strategy '{strategy}' has none. Leave it out.")
    if strategy == "tensor":
        return value.reshape(1, 1, -1)
    if value.ndim == 1:
        value = value.unsqueeze(0)
    if strategy == "channel":
        return value.unsqueeze(-2).unsqueeze(0)
    if strategy == "block":
        return _into_blocks(value, args)
    assert args.group_size is not None  # QuantizationArgs demands it for these strategies
    if g_idx is not None:
        value = value.index_select(-1, _group_order(g_idx, value.shape[-1], args.group_size))
    return _into_groups(value, args.group_size).unsqueeze(0)


def _flatten_activation(value: Tensor, args: QuantizationArgs) -> Tensor:
    strategy = strategy_of(args)
    if strategy == "token":
        return value.reshape(-1, *value.shape[-2:]) if value.ndim > 1 else value.reshape(1, 1, -1)
    value = value.reshape(-1, value.shape[-1])
    if strategy == "tensor":
        return value.unsqueeze(-2)
    assert args.group_size is not None
    return _into_groups(value, args.group_size)


def _flatten_attention(value: Tensor, args: QuantizationArgs) -> Tensor:
    _check_attention(value)
    by_token = value.transpose(1, 2).flatten(0, 1)  # [B*S, h, d]
    if strategy_of(args) == "tensor":
        return by_token.flatten(1, 2).unsqueeze(-2)
    return by_token.unsqueeze(-2).unsqueeze(-2)


def _check_attention(value: Tensor) -> None:
    if value.ndim != 4:
        raise LayoutError(
            f"attention states have 4 dimensions [batch, heads, sequence, head_dim], and this has {value.ndim}: "
            f"{tuple(value.shape)}. Reshape it, or observe it as 'input' or 'output'."
        )


def _into_groups(value: Tensor, group_size: int) -> Tensor:
    check_divides(value.shape[-1], group_size)
    return value.reshape(*value.shape[:-1], -1, group_size)


def check_groups(columns: int, base_name: str, args: QuantizationArgs) -> None:
    """Raise LayoutError unless so many columns make whole groups, if the strategy has groups."""
    if strategy_of(args) in ("group", "tensor_group") and args.group_size is not None:
        # Short scales come with groups of one size, and users choose those of weights alone.
        is_fixed = args.scale_dtype is not None or base_name != "weight"
        check_divides(columns, int(args.group_size), is_fixed=is_fixed)


def check_divides(columns: int, group_size: int, *, is_fixed: bool = False, kind: str = "groups") -> None:
    """Raise LayoutError unless so many columns make whole groups; `is_fixed` if the format knows no others."""
    if columns % group_size == 0:
        return
    fitting = [size for size in (16, 32, 64, 128, 256, 512, 1024) if columns % size == 0]
    nearest = [*[s for s in fitting if s < group_size][-1:], *[s for s in fitting if s > group_size][:1]]
    use = "Use another scheme for this layer, or ignore it"
    if nearest and not is_fixed:
        use = f"Use group_size {' or '.join(map(str, nearest))}, or ignore this layer"
    raise LayoutError(
        f"{columns} columns do not divide into {kind} of {group_size} (remainder {columns % group_size}). {use}."
    )


def _into_blocks(value: Tensor, args: QuantizationArgs) -> Tensor:
    assert args.block_structure is not None
    height, width = args.block_structure
    rows, columns = value.shape[-2:]
    padding = (0, -columns % width, 0, -rows % height)
    if any(padding):
        value = torch.nn.functional.pad(value, padding)
    rows, columns = value.shape[-2:]
    blocks = value.reshape(*value.shape[:-2], rows // height, height, columns // width, width)
    return blocks.transpose(-2, -3).flatten(-2).unsqueeze(0)


def _group_order(g_idx: Tensor, columns: int, group_size: int) -> Tensor:
    """The permutation that brings each group's columns together, groups in order, columns in theirs."""
    check_divides(columns, group_size)
    if g_idx.ndim != 1 or g_idx.numel() != columns:
        raise LayoutError(
            f"g_idx has shape {tuple(g_idx.shape)}, and there are {columns} columns. Give one group for each column."
        )
    num_groups = columns // group_size
    groups, counts = torch.unique(g_idx, return_counts=True)
    if groups.tolist() != list(range(num_groups)) or bool((counts != group_size).any()):
        found = ", ".join(f"{int(g)} ({int(n)} columns)" for g, n in list(zip(groups, counts, strict=True))[:4])
        raise LayoutError(
            f"g_idx must name the groups 0 to {num_groups - 1} with {group_size} columns each; "
            f"it names {len(groups)} groups: {found}{', ...' if len(groups) > 4 else ''}. "
            "Make it anew for this group_size."
        )
    return torch.argsort(g_idx, stable=True)
