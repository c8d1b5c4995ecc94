"""Large products are the same by either library, as exact, and nobody else's business is touched."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from scalewright.numerics import native, products
from scalewright.numerics.gptq import corrected, output_error, round_columns
from scalewright.numerics.hessian import Factor, add_outer_, factor, symmetrize_
from scalewright.numerics.products import add_product_, add_square_, linear, product, quick_linears

IS_HERE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not IS_HERE, reason="this torch is built without oneDNN")
WAYS = ["torch", pytest.param("onednn", marks=needs_onednn)]
PLAIN: Callable[..., Tensor] = products._by_onednn


@pytest.fixture
def kernels() -> None:
    """Instead of both: the compiled loops have no part in it, but for the name of the processor."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN is asked for: columns of the result, and what it is given."""
    found: list[tuple[int, ...]] = []

    def noting(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append((len(weight), *x.shape))
        return PLAIN(x, weight, bias)

    monkeypatch.setattr(products, "_by_onednn", noting)
    return found


@pytest.fixture
def way(request: pytest.FixtureRequest, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who multiplies, whatever this machine is. It did so if anybody had to."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param == "onednn")
    yield request.param
    assert bool(asked) == (request.param == "onednn")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(found: Tensor, expected: Tensor, num_summed: int) -> None:
    """Sums of so many products of normal numbers, as near to those of float64 as fp32 gets."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=3e-7 * max(num_summed, 64))


# ---- as exact, both ways ---------------------------------------------------------------------------------------------

SHAPES = [(2048, 64, 64), (64, 288, 288), (301, 300, 77), (3, 100, 96, 200), (2300, 130, 33), (33, 4300, 40)]


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_linear_is_that_of_float64(way, shape, has_bias):
    *rows, inner, columns = shape
    x, weight = random(*rows, inner), random(columns, inner, seed=1)
    bias = random(columns, seed=2) if has_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = linear(x, weight, bias)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert_exact(found, expected, inner)
    assert torch.equal(found, linear(x, weight, bias))
    assert_exact(linear(x, weight.T.contiguous().T, bias), expected, inner)


@pytest.mark.parametrize("alpha", [1, -1])
@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(300, 70, 300), (64, 2200, 64), (513, 513, 33), (128, 128, 400)], ids=str)
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_products_are_those_of_float64(way, shape, is_turned, alpha):
    rows, inner, columns = shape
    left = random(inner, rows + 3)[:, 3:].T if is_turned else random(rows, inner + 3)[:, 3:]
    right, before = random(inner, columns, seed=1), random(rows + 1, columns + 2, seed=2)
    expected = left.double() @ right.double()
    assert_exact(product(left, right), expected, inner)
    whole = before.clone()
    part = whole[1:, 2:]
    assert add_product_(part, left, right, alpha=alpha) is part
    assert_exact(part, before[1:, 2:].double() + alpha * expected, inner)
    assert torch.equal(whole[0], before[0])
    assert torch.equal(whole[:, :2], before[:, :2])


@pytest.mark.parametrize(("tokens", "columns"), [(64, 300), (2500, 64), (100, 257), (33, 1500)])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_squares_are_those_of_float64_above_the_diagonal(way, tokens, columns):
    x, before = random(tokens, columns), random(columns, columns, seed=1)
    found = add_square_(before.clone(), x)
    assert_exact(found.triu(), (before.double() + x.double().T @ x.double()).triu(), tokens)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_what_gptq_makes_of_them(way):
    x = random(900, 300) * torch.logspace(0, -1, 300)
    hessian = symmetrize_(add_outer_(torch.zeros(300, 300), x))
    torch.testing.assert_close(hessian.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    found = factor(hessian, damping=0.01, is_ordered=True)
    error, weight = random(70, 300, seed=1), random(300, 70, seed=2)
    exact = ((error.double() @ hessian.double()) * error.double()).sum(dim=1)
    torch.testing.assert_close(found.costs(error).double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(output_error(error.T, torch.zeros(300, 70), hessian).double(), exact, rtol=1e-4, atol=0)
    cross, beside = random(300, 300, seed=3), random(300, 70, seed=4)
    damped = hessian.double() + torch.diag(found.added_C).double()
    for extra in (None, beside):
        pull = cross.double() @ weight.double() + (0 if extra is None else extra.double())
        moved = corrected(weight, cross, found, share=0.5, beside_CR=extra)
        expected = weight.double() + 0.5 * torch.linalg.solve(damped, pull)
        torch.testing.assert_close(moved.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [128, 300, 513])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_what_is_solved_is_solved(way, columns):
    upper = (random(columns, columns) / columns**0.5).triu() + 2 * torch.eye(columns)
    for laid in (upper, upper.T.contiguous().T):
        found = Factor(laid, None, 0.0, torch.zeros(columns))
        expected = torch.linalg.solve(upper.double() @ upper.double().T, random(columns, 300).double())
        torch.testing.assert_close(found.solved(random(columns, 300)).double(), expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("block_size", [40, 128])
def test_weights_are_rounded_as_well(block_size, monkeypatch):
    from test_gptq import INT4, Codebook

    hessian = symmetrize_(add_outer_(torch.zeros(384, 384), random(1500, 384) @ random(384, 384, seed=1) / 20))
    weight, found = random(384, 512, seed=2), factor(hessian, damping=0.01, is_ordered=False)
    book = Codebook(INT4, torch.full((3, 512), 0.4), None, [column // 128 for column in range(384)])
    lost = {}
    for is_preferred in (False, True):
        monkeypatch.setattr(products, "prefers_onednn", lambda it=is_preferred: it)
        rounded = round_columns(weight, found, book, block_size=block_size)
        lost[is_preferred] = float(output_error(weight, rounded, hessian).sum())
    assert lost[True] == pytest.approx(lost[False], rel=1e-3)


# ---- how it is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [32, 256, 2048])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 255, 300, 2047, 2048, 5000])
def test_pieces_are_of_few_sizes_and_leave_nothing_out(size, most):
    pieces = list(products._pieces(size, most))
    assert [each for piece in pieces for each in range(size)[piece]] == list(range(size))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert sorted(lengths, reverse=True) == lengths
    assert {each for each in lengths if each >= 32} <= {32 << i for i in range(7)}
    assert sum(each < 32 for each in lengths) <= 1


@needs_onednn
def test_any_number_of_tokens_asks_for_few_shapes(asked, forced):
    """Code is kept for each."""
    weight = random(300, 300)
    for tokens in range(64, 700, 7):
        linear(random(tokens, 300), weight)
    assert {shape[-2] for shape in asked} == {64, 128, 256, 512}
    asked.clear()
    for tokens in range(64, 700, 7):
        add_square_(torch.zeros(300, 300), random(tokens, 300))
    assert len(set(asked)) <= 2 * 5


@needs_onednn
def test_results_of_strips_are_all_that_is_made(asked, forced):
    """A whole one would be another Hessian, where memory is at its peak."""
    add_square_(torch.zeros(1100, 1100), random(64, 1100))
    add_product_(torch.zeros(1100, 300), random(1100, 300), random(300, 300))
    assert max(shape[-2] for shape in asked) <= 256


# ---- what is not touched ---------------------------------------------------------------------------------------------


class Marked(Tensor):
    """A class of its own."""


def marked(x: Tensor) -> Tensor:
    return x.as_subclass(Marked)


X, WEIGHT, BIAS = random(128, 256), random(256, 256, seed=1), random(256, seed=2)

UNTOUCHED: dict[str, Callable[[], Tensor]] = {
    "bf16": lambda: functional.linear(X.bfloat16(), WEIGHT.bfloat16(), BIAS.bfloat16()),
    "float64": lambda: functional.linear(X.double(), WEIGHT.double()),
    "a weight with a gradient": lambda: functional.linear(X, nn.Parameter(WEIGHT)),
    "an input with a gradient": lambda: functional.linear(X.clone().requires_grad_(), WEIGHT, BIAS),
    "a bias with a gradient": lambda: functional.linear(X, WEIGHT, bias=nn.Parameter(BIAS)),
    "an input with gaps": lambda: functional.linear(random(128, 300)[:, :256], WEIGHT),
    "an input that is turned": lambda: functional.linear(X.T.contiguous().T, WEIGHT),
    "a weight with gaps": lambda: functional.linear(X, random(256, 300)[:, :256]),
    "a bias with gaps": lambda: functional.linear(X, WEIGHT, random(512)[::2]),
    "a bias of one number": lambda: functional.linear(X, WEIGHT, random(1)),
    "one token": lambda: functional.linear(X[0], WEIGHT),
    "few tokens": lambda: functional.linear(X[:31], WEIGHT),
    "no token": lambda: functional.linear(X[:0], WEIGHT),
    "no channel": lambda: functional.linear(X[:, :0].contiguous(), WEIGHT[:, :0].contiguous()),
    "one output": lambda: functional.linear(X, WEIGHT[0]),
    "another class": lambda: functional.linear(marked(X), WEIGHT),
    "a weight of another class": lambda: functional.linear(X, marked(WEIGHT)),
    "another product": lambda: X @ WEIGHT,
    "addmm with a factor": lambda: torch.addmm(BIAS, X, WEIGHT, alpha=2),
    "addmm into something": lambda: torch.addmm(BIAS, X, WEIGHT, out=torch.empty(128, 256)),
    "addmm of a matrix": lambda: torch.addmm(random(128, 256), X, WEIGHT),
    "what is on no device": lambda: functional.linear(X.to("meta"), WEIGHT.to("meta")),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_all_else_is_as_it_was(name, asked, forced):
    expected = UNTOUCHED[name]()
    with quick_linears([WEIGHT]):
        found = UNTOUCHED[name]()
    assert not asked
    assert type(found) is type(expected)
    assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
    assert found.is_meta or torch.equal(found, expected)


def test_autocast_is_as_it_was(asked, forced):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = functional.linear(X, WEIGHT)
        with quick_linears([WEIGHT]):
            found = functional.linear(X, WEIGHT)
    assert not asked
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_gradients_are_as_they_were(asked, forced):
    weight = nn.Parameter(WEIGHT.clone())
    with quick_linears([weight]):
        functional.linear(X, weight).sum().backward()
    torch.testing.assert_close(weight.grad, X.sum(dim=0).expand_as(weight))
    assert not asked


@pytest.mark.parametrize("wrong", [(X, WEIGHT[:, 1:]), (X,), (X, WEIGHT, BIAS[1:]), ([1.0], WEIGHT), (X, None)])
def test_errors_are_those_of_torch(wrong, forced):
    messages = []
    for context in (nullcontext(), quick_linears([WEIGHT])):
        with pytest.raises((RuntimeError, TypeError)) as caught, context:
            functional.linear(*wrong)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# ---- what is ---------------------------------------------------------------------------------------------------------

TOUCHED: dict[str, Callable[[], Tensor]] = {
    "a bias": lambda: functional.linear(X, WEIGHT, BIAS),
    "a bias by name": lambda: functional.linear(X, WEIGHT, bias=BIAS),
    "no bias": lambda: functional.linear(X, WEIGHT),
    "samples": lambda: functional.linear(X.view(2, 64, 256), WEIGHT),
    "addmm": lambda: torch.addmm(BIAS, X, WEIGHT.T.contiguous()),
}


@needs_onednn
@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", TOUCHED)
def test_linear_layers_are_quick_inside(name, outside, asked, forced):
    bias = 0 if name in {"no bias", "samples"} else BIAS.double()
    exact = (X.double() @ WEIGHT.double().T + bias).view(TOUCHED[name]().shape)
    with outside(), quick_linears([WEIGHT]):
        found = TOUCHED[name]()
        assert found.is_inference() == torch.is_inference_mode_enabled()
    assert len(asked) == 1
    assert_exact(found, exact, 256)
    assert torch.equal(found.view(128, 256), linear(X, WEIGHT, None if isinstance(bias, int) else BIAS))


@needs_onednn
def test_modules_with_parameters_are_quick_where_no_gradient_is_wanted(asked, forced):
    module = nn.Linear(256, 256)
    with quick_linears(module.parameters()):
        module(X)
        assert not asked
        with torch.no_grad():
            found = module(X)
    assert len(asked) == 1
    torch.testing.assert_close(found, functional.linear(X, module.weight, module.bias).detach())


def test_nothing_stays_after_an_error(forced):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), quick_linears([WEIGHT]):
        functional.linear(X, WEIGHT[:, 1:])
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize(
    ("is_preferred", "weights", "is_entered"),
    [
        (True, [WEIGHT], True),
        (True, [BIAS, random(3, 128, 200)], True),
        (False, [WEIGHT], False),
        (True, [], False),
        (True, [WEIGHT.bfloat16(), BIAS], False),
        (True, [random(4000, 64)], False),
    ],
)
def test_nothing_is_entered_where_there_is_nothing_to_gain(is_preferred, weights, is_entered, monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: is_preferred)
    with quick_linears(weights):
        assert len(_get_current_function_mode_stack()) == is_entered


# ---- which machine this is -------------------------------------------------------------------------------------------


@needs_onednn
@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("AuthenticAMD", "DEFAULT", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_the_processor_decides(vendor, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products._prefers_onednn.__wrapped__(vendor) is expected


@pytest.mark.parametrize("missing", ["mkl", "mkldnn"])
def test_both_must_be_there(missing, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(getattr(torch.backends, missing), "is_available", lambda: False)
    assert not products._prefers_onednn.__wrapped__("AuthenticAMD")


def test_without_the_compiled_loops_nobody_knows_the_processor(monkeypatch):
    monkeypatch.setattr(native, "_module", None)
    assert (native.vendor(), products.multiplier()) == ("", "torch")


@pytest.mark.skipif(native.kernels() == "torch", reason="needs the compiled loops")
def test_the_processor_says_who_made_it():
    if platform.machine() not in {"x86_64", "AMD64"}:
        assert native.vendor() == ""
        return
    assert re.fullmatch(r"[ -~]{12}", native.vendor())
    told = Path("/proc/cpuinfo")
    if told.exists():
        assert f": {native.vendor()}\n" in told.read_text()
