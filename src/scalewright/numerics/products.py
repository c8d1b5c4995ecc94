"""Large products of matrices, by whichever of two libraries in torch is quicker on this processor.

torch multiplies fp32 matrices by MKL, which takes its AVX-512 kernels on Intel's processors alone. On others oneDNN,
which torch has for other things, takes half the time. It sums in another order, and as exactly. Which of them is taken
depends on the processor and on shapes, never on a clock: equal runs give equal files.

oneDNN compiles code for each shape that it meets, and keeps half a megabyte of it. So many rows are cut into pieces of
a few sizes, and what is left is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from scalewright.numerics import native

# M rows, K columns of the left matrix, which are the rows of the right one, N columns of that; E of the K together.

_MOST, _LEAST = 2048, 32  # rows of a piece, or what is summed at a time; powers of two, and so are all between
_WORTH_IT = 1 << 22  # multiplications: with a quarter of them MKL is as quick
_STRIP, _TILE = 256, 1024  # rows and columns of a sum that are computed at a time: oneDNN cannot add to what is there
_STRIP_OF_TORCH = 512
_PLAIN = {Tensor, nn.Parameter}
_SIDE = 128  # of the smallest matrix for which a mode is worth 2 us for every call of torch


def prefers_onednn() -> bool:
    """Whether oneDNN is quicker than MKL with fp32: where AVX-512 is, but not Intel. With AVX2 it gains a tenth."""
    return _prefers_onednn(native.vendor())


@cache
def _prefers_onednn(vendor: str) -> bool:
    backends: Any = torch.backends
    return (
        vendor not in {"", "GenuineIntel"}
        and backends.cpu.get_cpu_capability().startswith("AVX512")
        and backends.mkl.is_available()
        and backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def multiplier() -> str:
    """Who multiplies large matrices on CPUs: "onednn" or "torch"."""
    return "onednn" if prefers_onednn() else "torch"


# ---- products --------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight_NK: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    if not _takes_linear(x, weight_NK, bias):
        return nn.functional.linear(x, weight_NK, bias)
    x_MK = x.view(-1, x.shape[-1])
    pieces = list(_pieces(len(x_MK), _MOST))
    if len(pieces) == 1:
        return _by_onednn(x, weight_NK, bias)
    result_MN = x.new_empty(len(x_MK), len(weight_NK))
    for rows in pieces:
        few_MK = x_MK[rows]
        multiply = _by_onednn if _is_worth_it(few_MK.shape, len(weight_NK)) else nn.functional.linear
        result_MN[rows] = multiply(few_MK, weight_NK, bias)
    return result_MN.view(*x.shape[:-1], -1)


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """`left @ right`."""
    if not is_quick(left_MK, right_KN):
        return left_MK @ right_KN
    return add_product_(left_MK.new_zeros(len(left_MK), right_KN.shape[1]), left_MK, right_KN)


def add_product_(sum_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, alpha: float = 1.0) -> Tensor:
    """`sum += alpha * left @ right`."""
    if not is_quick(left_MK, right_KN, sum_MN):
        return sum_MN.addmm_(left_MK, right_KN, alpha=alpha)
    for inner in _pieces(len(right_KN), _MOST):
        for rows in _pieces(len(sum_MN), _STRIP):
            _add_(sum_MN[rows], left_MK[rows, inner], right_KN[inner], alpha)
    return sum_MN


def add_square_(sum_CC: Tensor, x_TC: Tensor) -> Tensor:
    """Add the upper triangle of xT x; some of what is below is touched, too."""
    columns = x_TC.shape[1]
    if not is_quick(x_TC.T, x_TC, sum_CC):
        for start in range(0, columns, _STRIP_OF_TORCH):
            rows = slice(start, start + _STRIP_OF_TORCH)
            sum_CC[rows, start:].addmm_(x_TC[:, rows].T, x_TC[:, start:])
        return sum_CC
    for some in _pieces(len(x_TC), _MOST):
        turned_CE = x_TC[some].T.contiguous()
        for start in range(0, columns, _STRIP):
            rows = slice(start, start + _STRIP)
            for first in range(start, columns, _TILE):
                few = slice(first, first + _TILE)
                _add_(sum_CC[rows, few], turned_CE[rows], turned_CE[few].T)
    return sum_CC


def _add_(sum_MN: Tensor, left_ME: Tensor, right_EN: Tensor, alpha: float = 1.0) -> None:
    if _is_worth_it(left_ME.shape, right_EN.shape[1]):
        sum_MN.add_(_by_onednn(_in_rows(left_ME), right_EN.T, None), alpha=alpha)
    else:
        sum_MN.addmm_(left_ME, right_EN, alpha=alpha)


def _in_rows(x: Tensor) -> Tensor:
    """`x.contiguous()`. torch turns a matrix in a tenth of the time if there is nothing between its columns."""
    return x.contiguous() if x.stride(1) == 1 else x.T.contiguous().T.contiguous()


def _by_onednn(x: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias, "none", [], "")
    return result


def _pieces(size: int, most: int) -> Iterator[slice]:
    """What a size is the sum of: as many of the `most` as there are, halves of it, and so on, and what is left."""
    start, length = 0, most
    while length >= _LEAST:
        while size - start >= length:
            yield slice(start, start + length)
            start += length
        length //= 2
    if start < size:
        yield slice(start, size)


# ---- who is asked ----------------------------------------------------------------------------------------------------


def _is_worth_it(shape: Sequence[int], num_columns: int) -> bool:
    """Whether oneDNN is quicker with a product, of which `shape` is that of the left side."""
    num_rows, inner = shape
    return min(num_rows, inner) >= _LEAST and num_rows * inner * num_columns >= _WORTH_IT


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether they are numbers in fp32, in memory, of which nobody wants a gradient."""
    given = [each for each in tensors if each is not None]
    return (
        all(type(each) in _PLAIN for each in given)
        and all(each.dtype == torch.float32 and each.device.type == "cpu" for each in given)
        and all(each.layout == torch.strided for each in given)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
        and not torch.is_autocast_enabled("cpu")
    )


def _takes_linear(x: Tensor, weight_NK: Tensor, bias: Tensor | None) -> bool:
    is_plain = type(x) in _PLAIN and type(weight_NK) in _PLAIN
    if not is_plain or x.dim() < 2 or weight_NK.dim() != 2 or x.shape[-1] != weight_NK.shape[1]:
        return False
    num_columns, inner = weight_NK.shape
    return (
        _is_worth_it((x.numel() // max(1, inner), inner), num_columns)
        and prefers_onednn()
        and _are_plain(x, weight_NK, bias)
        and x.is_contiguous()
        and (weight_NK.is_contiguous() or weight_NK.T.is_contiguous())
        and (bias is None or (bias.shape == (num_columns,) and bias.is_contiguous()))
    )


def is_quick(left_MK: Tensor, right_KN: Tensor, sum_MN: Tensor | None = None) -> bool:
    """Whether a product of these, or of pieces of them, is not torch's own."""
    return (
        _is_worth_it(left_MK.shape, right_KN.shape[1])
        and prefers_onednn()
        and _are_plain(left_MK, right_KN, sum_MN)
        and right_KN.is_contiguous()
    )


# ---- forward passes --------------------------------------------------------------------------------------------------


def quick_linears(weights: Iterable[Tensor]) -> AbstractContextManager[object]:
    """While inside, `torch.nn.functional.linear`, and `torch.addmm` of a bias, are quick; `weights` are what they get.

    Nothing is entered where there is nothing to be gained.
    """
    is_worth_it = prefers_onednn() and any(
        each.dim() > 1 and each.dtype == torch.float32 and min(each.shape[-2:]) >= _SIDE for each in weights
    )
    return _QuickLinears() if is_worth_it else nullcontext()


class _QuickLinears(TorchFunctionMode):
    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is nn.functional.linear and len(args) > 1 and named.keys() <= {"bias"}:
            return linear(*args, **named)
        if func is torch.addmm and len(args) == 3 and not named and _takes_linear(args[1], args[2].T, args[0]):
            return linear(args[1], args[2].T, args[0])
        return func(*args, **named)
