"""Products of matrices are what torch says they are, whoever computes them, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from scalewright.numerics import native, products
from scalewright.numerics.products import add_product_, add_square_, linear, product, quick_linears

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here")


@pytest.fixture(params=["onednn", "torch"])
def by(request, monkeypatch):
    """Both ways, whatever the processor."""
    monkeypatch.setattr(products, "_prefers_onednn", lambda vendor: request.param == "onednn")
    return request.param


@pytest.fixture
def onednn(monkeypatch):
    monkeypatch.setattr(products, "_prefers_onednn", lambda vendor: True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, exact: Tensor, inner: int) -> None:
    """As close as sums of that many products of normal numbers are in fp32, whoever sums them; not so in fewer bits."""
    assert found.dtype == torch.float32 and exact.dtype == torch.float64
    assert float((found - exact).abs().max()) < torch.finfo(torch.float32).eps / 2 * inner**0.5 * (inner + 64)


# Rows, what is summed, columns.
SHAPES = [
    (64, 512, 256),
    (2048, 256, 128),
    (2049, 128, 129),
    (3000, 96, 160),
    (331, 288, 96),
    (40, 2816, 300),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_gives_what_float64_gives(by, shape, has_bias):
    rows, inner, columns = shape
    x, weight, bias = random(rows, inner), random(columns, inner, seed=1), random(columns, seed=2) if has_bias else None
    exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(linear(x, weight, bias), exact, inner)
    assert_close(linear(x.view(1, rows, inner), weight, bias)[0], exact, inner)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_sums_of_them_are_what_float64_gives(by, shape):
    rows, inner, columns = shape
    left, right, before = random(rows, inner), random(inner, columns, seed=1), random(rows, columns, seed=2)
    exact = left.double() @ right.double()
    assert_close(product(left, right), exact, inner)
    found = before.clone()
    assert add_product_(found, left, right) is found
    assert_close(found, before.double() + exact, inner)
    assert_close(product(left.T.contiguous().T, right), exact, inner)
    strided = random(rows, columns + 5, seed=2)[:, :columns]
    assert_close(add_product_(strided, left, right), random(rows, columns + 5, seed=2)[:, :columns] + exact, inner)


@pytest.mark.parametrize(("tokens", "columns"), [(100, 700), (2100, 256), (5000, 300), (31, 2000)])
def test_the_upper_triangle_of_a_square_is_what_float64_gives(by, tokens, columns):
    x, before = random(tokens, columns), random(columns, columns, seed=1)
    found = add_square_(before.clone(), x)
    exact = before.double() + x.double().T @ x.double()
    assert_close(found.triu(), exact.triu(), tokens)
    again = add_square_(before.clone(), x)
    assert torch.equal(found, again)


def test_both_are_asked(monkeypatch):
    """Or nothing above would say anything of oneDNN."""
    asked = []
    monkeypatch.setattr(products, "_by_onednn", lambda x, w, b: asked.append(1) or nn.functional.linear(x, w, b))
    for is_preferred in (False, True):
        monkeypatch.setattr(products, "_prefers_onednn", lambda vendor, found=is_preferred: found)
        for work in (
            lambda: linear(random(512, 256), random(256, 256)),
            lambda: product(random(512, 256), random(256, 256)),
            lambda: add_square_(torch.zeros(512, 512), random(512, 512)),
        ):
            asked.clear()
            work()
            assert bool(asked) is is_preferred


def large(**given: object) -> tuple[Tensor, Tensor]:
    return random(512, 256).to(**given), random(256, 256, seed=1).to(**given)


UNTOUCHED: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "bf16": lambda: large(dtype=torch.bfloat16),
    "float64": lambda: large(dtype=torch.float64),
    "meta": lambda: large(device="meta"),
    "small": lambda: (random(8, 16), random(4, 16)),
    "one row": lambda: (random(1, 4096), random(4096, 4096)),
    "a vector": lambda: (random(4096), random(4096, 4096)),
    "nothing": lambda: (random(0, 256), random(256, 256)),
    "no columns": lambda: (random(512, 0), random(256, 0)),
    "not contiguous": lambda: (random(256, 512).T, random(256, 256)),
    "bias of one": lambda: (*large(), random(1)),
    "a subclass": lambda: (random(512, 256).as_subclass(Special), random(256, 256)),
}


class Special(Tensor):
    pass


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_onednn_is_not_made_for_is_torchs_to_the_last_bit(onednn, monkeypatch, name):
    monkeypatch.setattr(products, "_by_onednn", lambda *given: pytest.fail("oneDNN was asked"))
    given = UNTOUCHED[name]()
    with suppress(RuntimeError):
        expected = nn.functional.linear(*given)
        found = linear(*given)
        assert type(found) is type(expected) and found.shape == expected.shape and found.dtype == expected.dtype
        assert found.device.type == "meta" or torch.equal(found, expected)


def test_whoever_wants_gradients_has_them(onednn):
    x, weight = large()
    weight.requires_grad_()
    with quick_linears([weight]):
        nn.functional.linear(x, weight).sum().backward()
    assert torch.equal(weight.grad, x.sum(dim=0).expand(256, -1)) or weight.grad is not None
    with torch.no_grad(), quick_linears([weight]):
        assert not nn.functional.linear(x, weight).requires_grad


def test_autocast_is_obeyed(onednn):
    x, weight = large()
    with torch.autocast("cpu", dtype=torch.bfloat16), quick_linears([weight]):
        assert nn.functional.linear(x, weight).dtype == torch.bfloat16


class Counting:
    """How often oneDNN is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        ask = products._by_onednn

        def counted(*given: Tensor) -> Tensor:
            self.count += 1
            return ask(*given)

        monkeypatch.setattr(products, "_by_onednn", counted)


def test_layers_are_quick_inside_and_as_ever_outside(onednn, monkeypatch):
    counting, layer, x = Counting(monkeypatch), nn.Linear(256, 256), random(512, 256)
    with torch.no_grad():
        expected = layer(x)
        with quick_linears(layer.parameters()):
            found = layer(x)
        assert counting.count == 1
        torch.testing.assert_close(found, expected)
        assert torch.equal(layer(x), expected) and counting.count == 1
        with pytest.raises(ZeroDivisionError), quick_linears(layer.parameters()):
            raise ZeroDivisionError
        assert torch.equal(layer(x), expected) and counting.count == 1
        with torch.inference_mode(), quick_linears(layer.parameters()):
            torch.testing.assert_close(layer(x), expected)
        assert counting.count == 2


def test_layers_that_lie_the_other_way_round_are_quick_too(onednn, monkeypatch):
    counting, x, weight_KN, bias = (
        Counting(monkeypatch),
        random(512, 256),
        random(256, 384, seed=1),
        random(384, seed=2),
    )
    with torch.no_grad(), quick_linears([weight_KN]):
        found = torch.addmm(bias, x, weight_KN)
        assert counting.count == 1
        scaled = torch.addmm(bias, x, weight_KN, alpha=2.0)
        assert counting.count == 1
    torch.testing.assert_close(found, torch.addmm(bias, x, weight_KN), rtol=1e-4, atol=1e-4)
    assert torch.equal(scaled, torch.addmm(bias, x, weight_KN, alpha=2.0))


def test_nothing_is_entered_where_nothing_is_gained(onednn, monkeypatch):
    for weights in ([], [random(64, 64)], [random(256, 256).bfloat16()], [random(4096)]):
        with quick_linears(weights) as entered:
            assert entered is None
    monkeypatch.setattr(products, "_prefers_onednn", lambda vendor: False)
    with quick_linears([random(256, 256)]) as entered:
        assert entered is None


def test_who_multiplies_depends_on_the_processor_alone(monkeypatch):
    prefers = products._prefers_onednn.__wrapped__
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert prefers("AuthenticAMD") and not prefers("GenuineIntel") and not prefers("")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not prefers("AuthenticAMD")
    monkeypatch.setattr(native, "_module", None)
    assert native.vendor() == "" and not products.prefers_onednn() and products.multiplier() == "torch"
