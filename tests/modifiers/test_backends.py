"""What we do in the place of compressed-tensors gives the bits that it gives itself."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.utils.impl_backend import ImplBackend
from hypothesis import given
from hypothesis import strategies as st

from scalewright.modifiers import backends, storing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = [0.0, -0.0, 1e-40, -1e-40, 6.0, -6.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan")]
EDGES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def theirs(name: str, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ImplBackend.call(name, x.clone())
    return found


def values(dtype: torch.dtype) -> torch.Tensor:
    near = [edge * (1 + sign * step) for edge in EDGES for sign in (-1, 1) for step in (0, 1e-7, 1e-3, 1e-2)]
    torch.manual_seed(0)
    return torch.cat([torch.tensor(ODD + near + [-each for each in near]), 4 * torch.randn(5000)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_nearest_number_is_theirs(dtype: torch.dtype) -> None:
    x = values(dtype)
    assert backends.can_round(x)
    ours, expected = backends.rounded_to_fp4(x), theirs("cast_to_fp4", x)
    is_number = ~expected.isnan()
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours[is_number].view(BITS[dtype]), expected[is_number].view(BITS[dtype]))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_the_nearest_number_is_theirs_whatever_is_rounded(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    assert torch.equal(backends.rounded_to_fp4(x).nan_to_num(9), theirs("cast_to_fp4", x).nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_theirs(dtype: torch.dtype) -> None:
    x = theirs("cast_to_fp4", values(dtype).nan_to_num(0))[:5000].view(-1, 50)
    assert backends.can_pack(x)
    assert torch.equal(backends.packed_fp4(x), theirs("pack_fp4_to_uint8", x))
    assert torch.equal(backends.packed_fp4(x.T[:, :40]), theirs("pack_fp4_to_uint8", x.T[:, :40]))  # not contiguous


FORMATS = {
    "int4": QuantizationArgs(num_bits=4, strategy="group", group_size=16),
    "int8": QuantizationArgs(num_bits=8, strategy="group", group_size=16),
    "int4 asymmetric": QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False),
    "fp8": QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=16),
}


@pytest.mark.parametrize("into", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_theirs(name: str, dtype: torch.dtype, into: torch.dtype | None) -> None:
    args, x = FORMATS[name], values(dtype).nan_to_num(0, 100, -100)[:4992].view(-1, 2, 16)
    q_min, q_max = calculate_range(args, x.device)
    given = {
        "x": x,
        "scale": x.abs().amax(dim=-1, keepdim=True) / 7.3 + 1e-3,
        "zero_point": None if args.symmetric else torch.randint(-8, 8, (len(x), 2, 1), dtype=torch.int8),
        "q_min": q_min,
        "q_max": q_max,
        "args": args,
        "dtype": into,
        "global_scale": None,
    }
    assert backends.can_compute_codes(**given)
    before = x.clone()
    ours, expected = backends.codes_in_place(**given), ImplBackend.call("_quantize", **given)
    assert ours.dtype == expected.dtype and torch.equal(ours.float(), expected.float()) and torch.equal(x, before)


def test_codes_under_a_global_scale_are_left_to_them() -> None:
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    assert not backends.can_compute_codes(torch.ones(4, 16), args=args, global_scale=None)
    assert not backends.can_compute_codes(torch.ones(4, 16), args=FORMATS["fp8"], global_scale=torch.ones(1))


def test_they_are_taken_once_and_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storing.backends is backends
    before = {name: list(each) for name, each in ImplBackend._backends.items()}
    backends.register()
    assert before == ImplBackend._backends
    calls = []
    for name, entry in (("cast_to_fp4", cast_to_fp4), ("pack_fp4_to_uint8", pack_fp4_to_uint8)):
        ways = [(lambda x, name=name: calls.append(name) or x, *way[1:]) for way in ImplBackend._backends[name]]
        monkeypatch.setitem(ImplBackend._backends, name, ways)
        entry(torch.zeros(2, 4))
        entry(torch.zeros(2, 4, dtype=torch.float64))
    assert calls == ["cast_to_fp4", "pack_fp4_to_uint8"]
    with pytest.raises(ValueError, match="even number of columns"):
        pack_fp4_to_uint8(torch.zeros(2, 3))


def test_a_version_without_a_registry_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_REGISTRY", "compressed_tensors.nothing")
    backends.register()
