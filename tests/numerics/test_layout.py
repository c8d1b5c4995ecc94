"""How tensors are cut into the pieces that share a scale: the table of `numerics/layout.py`, its errors, its masks."""

import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright.errors import LayoutError
from scalewright.numerics.layout import (
    BASE_NAMES,
    align_mask,
    drop_masked_tokens,
    flatten_for_calibration,
    num_columns,
    spread_columns,
    strategy_of,
    tokens_shape,
)

TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
CHANNEL = QuantizationArgs(num_bits=8, strategy="channel")
GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=4)
TENSOR_GROUP = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=4)
BLOCK = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[4, 8])
TOKEN = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
ATTN_HEAD = QuantizationArgs(num_bits=8, type="float", strategy="attn_head")
ALL = (TENSOR, CHANNEL, GROUP, TENSOR_GROUP, BLOCK, TOKEN, ATTN_HEAD)

SHAPES = [
    # base name, args, shape given, shape expected
    ("weight", TENSOR, (6, 8), (1, 1, 48)),
    ("weight", CHANNEL, (6, 8), (1, 6, 1, 8)),
    ("weight", GROUP, (6, 8), (1, 6, 2, 4)),
    ("weight", TENSOR_GROUP, (6, 8), (1, 6, 2, 4)),
    ("weight", BLOCK, (8, 16), (1, 2, 2, 32)),
    ("weight", BLOCK, (6, 9), (1, 2, 2, 32)),
    ("weight", BLOCK, (1, 1), (1, 1, 1, 32)),
    ("weight", TENSOR, (8,), (1, 1, 8)),
    ("weight", CHANNEL, (8,), (1, 1, 1, 8)),
    ("weight", GROUP, (8,), (1, 1, 2, 4)),
    ("weight", TENSOR, (3, 6, 8), (1, 1, 144)),
    ("weight", CHANNEL, (3, 6, 8), (1, 3, 6, 1, 8)),
    ("weight", GROUP, (3, 6, 8), (1, 3, 6, 2, 4)),
    ("weight", BLOCK, (3, 6, 9), (1, 3, 2, 2, 32)),
    ("input", TENSOR, (2, 3, 8), (6, 1, 8)),
    ("input", GROUP, (2, 3, 8), (6, 2, 4)),
    ("input", TENSOR_GROUP, (2, 3, 8), (6, 2, 4)),
    ("input", TOKEN, (2, 3, 8), (2, 3, 8)),
    ("input", TENSOR, (6, 8), (6, 1, 8)),
    ("input", TENSOR, (2, 5, 3, 8), (30, 1, 8)),
    ("input", TENSOR, (8,), (1, 1, 8)),
    ("input", GROUP, (6, 8), (6, 2, 4)),
    ("input", GROUP, (2, 5, 3, 8), (30, 2, 4)),
    ("input", TOKEN, (3, 8), (1, 3, 8)),
    ("input", TOKEN, (2, 5, 3, 8), (10, 3, 8)),
    ("input", TOKEN, (8,), (1, 1, 8)),
    ("output", TENSOR, (2, 3, 8), (6, 1, 8)),
    ("output", TOKEN, (2, 3, 8), (2, 3, 8)),
    ("q", TENSOR, (2, 5, 3, 4), (6, 1, 20)),
    ("q", ATTN_HEAD, (2, 5, 3, 4), (6, 5, 1, 1, 4)),
    ("k", ATTN_HEAD, (2, 5, 3, 4), (6, 5, 1, 1, 4)),
    ("v", TENSOR, (2, 5, 3, 4), (6, 1, 20)),
]

FITTING = {
    "weight": {"tensor", "channel", "group", "tensor_group", "block"},
    "input": {"tensor", "group", "tensor_group", "token"},
    "output": {"tensor", "group", "tensor_group", "token"},
    "q": {"tensor", "attn_head"},
    "k": {"tensor", "attn_head"},
    "v": {"tensor", "attn_head"},
}


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


@pytest.mark.parametrize(("base_name", "args", "given", "expected"), SHAPES)
def test_shapes_are_those_of_the_table(base_name, args, given, expected):
    value = counting(*given)
    flat = flatten_for_calibration(value, base_name, args)
    assert tuple(flat.shape) == expected
    # No element is lost and none is invented, but for the zeros that pad blocks.
    torch.testing.assert_close(flat[flat != 0].sort().values, value.flatten())


@pytest.mark.parametrize("args", ALL, ids=strategy_of)
@pytest.mark.parametrize("base_name", BASE_NAMES)
def test_a_strategy_fits_a_base_name_or_the_error_names_those_that_do(base_name, args):
    value = counting(2, 4, 4, 8)
    if strategy_of(args) in FITTING[base_name]:
        assert flatten_for_calibration(value, base_name, args).numel() == value.numel()
        return
    with pytest.raises(LayoutError, match=f"strategy '{strategy_of(args)}' does not fit '{base_name}'") as caught:
        flatten_for_calibration(value, base_name, args)
    assert isinstance(caught.value, ValueError)
    assert set(re.split(r"[,\s.]+", str(caught.value).rsplit(":", 1)[1].strip(" ."))) == FITTING[base_name]


def test_each_channel_is_a_row_and_each_group_a_run_of_columns():
    weight = counting(6, 8)
    channel = flatten_for_calibration(weight, "weight", CHANNEL)
    group = flatten_for_calibration(weight, "weight", GROUP)
    torch.testing.assert_close(channel[0, 3, 0], weight[3])
    torch.testing.assert_close(group[0, 3, 1], weight[3, 4:])


def test_each_block_is_a_tile_and_its_padding_is_zero():
    weight = counting(6, 9)
    blocks = flatten_for_calibration(weight, "weight", BLOCK)
    torch.testing.assert_close(blocks[0, 0, 0], weight[:4, :8].flatten())
    corner = torch.zeros(4, 8)
    corner[:2, :1] = weight[4:, 8:]
    torch.testing.assert_close(blocks[0, 1, 1], corner.flatten())


def test_the_blocks_of_stacked_experts_do_not_mix():
    weight = counting(3, 6, 9)
    blocks = flatten_for_calibration(weight, "weight", BLOCK)
    for expert in range(3):
        torch.testing.assert_close(blocks[:, expert], flatten_for_calibration(weight[expert], "weight", BLOCK))


def test_each_head_keeps_its_own_values():
    states = counting(2, 5, 3, 4)
    heads = flatten_for_calibration(states, "k", ATTN_HEAD)
    torch.testing.assert_close(heads[1 * 3 + 2, 4, 0, 0], states[1, 4, 2])
    whole = flatten_for_calibration(states, "k", TENSOR)
    torch.testing.assert_close(whole[1 * 3 + 2, 0], states[1, :, 2].flatten())


def test_each_observation_of_an_activation_is_a_token():
    value = counting(2, 3, 8)
    torch.testing.assert_close(flatten_for_calibration(value, "input", TENSOR)[4, 0], value[1, 1])
    torch.testing.assert_close(flatten_for_calibration(value, "input", GROUP)[4, 1], value[1, 1, 4:])


@pytest.mark.parametrize(
    ("base_name", "args"),
    [("weight", CHANNEL), ("weight", GROUP), ("weight", TENSOR), ("input", TENSOR), ("input", TOKEN)],
)
def test_flattening_makes_no_copy(base_name, args):
    value = counting(4, 8)
    assert flatten_for_calibration(value, base_name, args).data_ptr() == value.data_ptr()


def test_a_transposed_tensor_is_flattened_like_its_copy():
    value = counting(8, 6).t()
    for args in (TENSOR, CHANNEL, GROUP, BLOCK):
        torch.testing.assert_close(
            flatten_for_calibration(value, "weight", args), flatten_for_calibration(value.contiguous(), "weight", args)
        )


def test_columns_that_do_not_divide_are_an_error_with_both_numbers_and_a_way_out():
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=96)
    message = "11008 columns do not divide into groups of 96 (remainder 64). Use group_size 64 or 128"
    with pytest.raises(LayoutError, match=re.escape(message)):
        flatten_for_calibration(torch.ones(2, 11008), "weight", args)
    with pytest.raises(LayoutError, match=re.escape(message)):
        flatten_for_calibration(torch.ones(2, 11008), "input", args)


def test_columns_that_no_group_size_divides_can_only_be_ignored():
    with pytest.raises(
        LayoutError, match=re.escape("7 columns do not divide into groups of 4 (remainder 3). Use another scheme")
    ):
        flatten_for_calibration(torch.ones(2, 7), "weight", GROUP)


def test_an_unknown_base_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(LayoutError, match=r"unknown base name 'bias'.*weight, input, output, q, k, v"):
        flatten_for_calibration(torch.ones(2, 8), "bias", TENSOR)


@pytest.mark.parametrize("base_name", BASE_NAMES)
def test_a_scalar_has_no_layout(base_name):
    with pytest.raises(LayoutError, match="scalar"):
        flatten_for_calibration(torch.tensor(1.0), base_name, TENSOR)


def test_attention_states_need_four_dimensions():
    with pytest.raises(LayoutError, match=r"4 dimensions.*this has 3: \(2, 3, 8\)"):
        flatten_for_calibration(torch.ones(2, 3, 8), "q", TENSOR)


# ---- g_idx -------------------------------------------------------------------------------------------------------


def test_g_idx_brings_the_columns_of_a_group_together():
    weight = counting(2, 8)
    g_idx = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0])
    flat = flatten_for_calibration(weight, "weight", GROUP, g_idx=g_idx)
    torch.testing.assert_close(flat[0, :, 0], weight[:, g_idx == 0])
    torch.testing.assert_close(flat[0, :, 1], weight[:, g_idx == 1])


def test_a_g_idx_of_neighbouring_columns_changes_nothing():
    weight = counting(2, 8)
    g_idx = torch.arange(8) // 4
    torch.testing.assert_close(
        flatten_for_calibration(weight, "weight", GROUP, g_idx=g_idx), flatten_for_calibration(weight, "weight", GROUP)
    )


@pytest.mark.parametrize(
    ("base_name", "args", "g_idx", "message"),
    [
        ("weight", GROUP, [0, 0, 0, 0, 1, 1, 1], r"g_idx has shape \(7,\), and there are 8 columns"),
        ("weight", GROUP, [0, 0, 0, 0, 0, 1, 1, 1], r"4 columns each; it names 2 groups: 0 \(5 columns\), 1 \(3"),
        ("weight", GROUP, [0, 0, 0, 0, 2, 2, 2, 2], r"groups 0 to 1 .*2 \(4 columns\)"),
        ("weight", GROUP, [-1, -1, -1, -1, 0, 0, 0, 0], r"-1 \(4 columns\)"),
        ("weight", CHANNEL, [0, 0, 0, 0, 1, 1, 1, 1], "g_idx names groups, and strategy 'channel' has none"),
        ("input", GROUP, [0, 0, 0, 0, 1, 1, 1, 1], "g_idx groups the columns of a weight, and this is 'input'"),
    ],
)
def test_a_g_idx_that_does_not_fit_is_an_error(base_name, args, g_idx, message):
    with pytest.raises(LayoutError, match=message):
        flatten_for_calibration(torch.ones(2, 8), base_name, args, g_idx=torch.tensor(g_idx))


# ---- tokens and masks --------------------------------------------------------------------------------------------


def test_tokens_are_counted_by_batch_and_sequence():
    assert tokens_shape(torch.ones(2, 3, 8), "input") == (2, 3)
    assert tokens_shape(torch.ones(6, 8), "output") == (6,)
    assert tokens_shape(torch.ones(2, 5, 3, 4), "v") == (2, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_any_dtype_says_which_tokens_count(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    keep = align_mask(mask.to(dtype), torch.ones(2, 3, 8), "input")
    torch.testing.assert_close(keep, mask.bool())
    torch.testing.assert_close(align_mask(mask.to(dtype), torch.ones(2, 5, 3, 4), "k"), mask.bool())


def test_a_mask_follows_an_activation_whose_tokens_were_flattened():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    torch.testing.assert_close(align_mask(mask, torch.ones(6, 8), "input"), mask.bool().flatten())


def test_one_mask_serves_all_samples_of_a_batch():
    keep = align_mask(torch.tensor([1, 1, 0]), torch.ones(2, 3, 8), "input")
    torch.testing.assert_close(keep, torch.tensor([[True, True, False]] * 2))


def test_a_mask_of_another_size_is_an_error_with_both_shapes():
    with pytest.raises(LayoutError, match=r"mask of shape \(2, 4\) does not fit tokens of shape \(2, 3\)"):
        align_mask(torch.ones(2, 4), torch.ones(2, 3, 8), "input")


def test_a_weight_takes_no_mask():
    with pytest.raises(LayoutError, match="'weight' has none"):
        align_mask(torch.ones(6), torch.ones(6, 8), "weight")


def test_masked_tokens_are_gone_and_the_others_stay_in_order():
    keep = torch.tensor([[True, True, False], [True, False, False]])
    value = counting(2, 3, 8)
    kept = drop_masked_tokens(value, "input", TENSOR, keep)
    torch.testing.assert_close(kept, torch.stack([value[0, 0], value[0, 1], value[1, 0]]))


@pytest.mark.parametrize("args", [TENSOR, ATTN_HEAD], ids=strategy_of)
def test_masked_tokens_of_attention_states_are_gone_in_every_head(args):
    keep = torch.tensor([[True, True, False], [True, False, False]])
    states = counting(2, 5, 3, 4)
    flat = flatten_for_calibration(drop_masked_tokens(states, "k", args, keep), "k", args)
    torch.testing.assert_close(flat, flatten_for_calibration(states, "k", args)[keep.flatten()])


def test_under_token_a_masked_token_keeps_its_place_as_zeros():
    keep = torch.tensor([[True, True, False], [True, False, False]])
    value = counting(2, 3, 8)
    kept = drop_masked_tokens(value, "input", TOKEN, keep)
    assert kept.shape == value.shape
    torch.testing.assert_close(kept[keep], value[keep])
    assert not kept[~keep].any()


# ---- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [TENSOR, CHANNEL, GROUP, TENSOR_GROUP, BLOCK], ids=strategy_of)
@pytest.mark.parametrize("shape", [(6, 16), (3, 6, 16)])
def test_a_number_for_each_column_meets_that_column_in_every_layout(args, shape):
    per_column = counting(16)
    spread = spread_columns(per_column, shape, args)
    expected = flatten_for_calibration(per_column.expand(shape), "weight", args)
    torch.testing.assert_close(spread.expand(expected.shape), expected)


@pytest.mark.parametrize("rows", [4, 4000])
def test_a_number_for_each_column_takes_one_row_of_blocks(rows):
    per_column, weight = torch.rand(19), torch.rand(2, rows, 19)
    spread = spread_columns(per_column, tuple(weight.shape), BLOCK)
    assert spread.numel() == 3 * 4 * 8  # three blocks of 4 x 8
    flat = flatten_for_calibration(weight, "weight", BLOCK)
    torch.testing.assert_close(flat * spread, flatten_for_calibration(weight * per_column, "weight", BLOCK))


def test_a_number_for_each_column_follows_g_idx():
    per_column, g_idx = counting(8), torch.tensor([1, 0, 1, 0, 0, 1, 1, 0])
    spread = spread_columns(per_column, (2, 8), GROUP, g_idx=g_idx)
    expected = flatten_for_calibration(per_column.expand(2, 8), "weight", GROUP, g_idx=g_idx)
    torch.testing.assert_close(spread.expand(expected.shape), expected)


@pytest.mark.parametrize(
    ("args", "columns"), [(CHANNEL, 16), (GROUP, 16), (TENSOR_GROUP, 16), (TENSOR, None), (BLOCK, None)]
)
def test_the_number_of_columns_is_told_where_the_shape_still_shows_it(args, columns):
    assert num_columns(flatten_for_calibration(torch.ones(6, 16), "weight", args), args) == columns
