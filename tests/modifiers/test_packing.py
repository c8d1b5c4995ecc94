"""Packed words are those of compressed-tensors, bit for bit, and so is what is read from them."""

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st

from scalewright.modifiers.packing import FP8Packer, Packer, can_pack, packed, unpacked


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_words_and_codes_are_theirs(num_bits: int, rows: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (num_bits - 1)
    codes = torch.randint(-half, half, (rows, 32 * words), generator=generator).to(torch.int8)
    expected = pack_to_int32(codes, num_bits)
    found = packed(codes, num_bits)
    assert found.dtype == torch.int32 and torch.equal(found, expected) and found.is_contiguous()
    assert torch.equal(unpacked(expected, num_bits), unpack_from_int32(expected, num_bits, codes.shape))


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_the_least_and_the_largest_code_come_back(num_bits: int) -> None:
    half = 1 << (num_bits - 1)
    codes = torch.tensor([-half, half - 1], dtype=torch.int8).repeat(16).repeat(3, 1)
    assert torch.equal(unpacked(packed(codes, num_bits), num_bits), codes)
    assert torch.equal(packed(codes, num_bits), pack_to_int32(codes, num_bits))


CASES = [
    (args, columns, dtype)
    for args in (
        {"num_bits": 4, "strategy": "group", "group_size": 32},
        {"num_bits": 3, "strategy": "channel"},
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    )
    for columns in (64, 96, 40)
    for dtype in (torch.float32, torch.bfloat16)
    if columns % args.get("group_size", 1) == 0
]


@pytest.mark.parametrize(("args", "columns", "dtype"), CASES, ids=str)
def test_states_are_theirs(args: dict, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    groups = columns // args.get("group_size", columns)
    state = {
        "weight": torch.randn(16, columns, dtype=dtype),
        "weight_scale": torch.rand(16, groups, dtype=dtype) / 4 + 0.01,
        "weight_zero_point": torch.randint(-3, 3, (16, groups), dtype=torch.int8)
        if not weights.symmetric
        else torch.zeros(16, groups, dtype=torch.int8),
        "bias": torch.ones(16),
    }
    stored, expected = Packer.compress(dict(state), scheme), PackedQuantizationCompressor.compress(dict(state), scheme)
    assert set(stored) == set(expected)
    for name, each in expected.items():
        assert stored[name].dtype == each.dtype and torch.equal(stored[name], each), name
    read, meant = Packer.decompress(stored, scheme), PackedQuantizationCompressor.decompress(dict(expected), scheme)
    assert set(read) == set(meant) and read["weight"].dtype == dtype and torch.equal(read["weight"], meant["weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("args", "shape"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (48, 1)),
        ({"strategy": "block", "block_structure": [32, 32]}, (2, 3)),
    ],
)
def test_fp8_is_read_as_theirs(args: dict, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = QuantizationArgs(num_bits=8, type="float", **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    scale = torch.rand(shape, dtype=dtype) / 64 + 0.01
    stored = FP8Packer.compress({"weight": torch.randn(48, 80, dtype=dtype), "weight_scale": scale}, scheme)
    assert stored["weight"].dtype == torch.float8_e4m3fn
    read, meant = FP8Packer.decompress(stored, scheme), FloatQuantizationCompressor.decompress(dict(stored), scheme)
    assert set(read) == set(meant) and read["weight"].dtype == dtype and torch.equal(read["weight"], meant["weight"])
    assert stored["weight"].dtype == torch.float8_e4m3fn, "what is stored was changed"


def test_what_is_not_ours_to_pack() -> None:
    assert can_pack(torch.zeros(3, 64)) and can_pack(torch.zeros(0, 64))
    for shape in ((3, 40), (2, 3, 64), (64,), (3, 0)):
        assert not can_pack(torch.zeros(shape))
    assert not can_pack(torch.zeros(3, 64, device="meta"))
