"""What is special about balanced_mse: a token's error counts relative to the token's strength, and still adds up."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright.numerics.histogram import code_values, count_codes, evening_weights
from scalewright.observers import Observer

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")


def make(name="balanced_mse", args=INT8, base_name="input", **knobs):
    return Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)


def batch_with_a_loud_token(seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(2, 256, 64)
    hidden[:, 0] *= 40
    return hidden


def test_a_token_of_twice_the_strength_weighs_half():
    x = torch.tensor([[1.0, -1.0], [2.0, -2.0], [4.0, 4.0]]).reshape(3, 1, 2)
    assert evening_weights(x).flatten().tolist() == [1.0, 0.5, 0.25]


def test_weights_are_short_numbers_so_that_they_add_up_exactly():
    torch.manual_seed(0)
    weights = evening_weights(torch.randn(100, 1, 8) * torch.logspace(-4, 4, 100).reshape(-1, 1, 1))
    mantissa, _ = torch.frexp(weights)
    assert weights.dtype == torch.float64
    assert torch.equal(mantissa * 4096, (mantissa * 4096).round())


def test_the_strength_of_extreme_values_neither_overflows_nor_vanishes():
    for value, dtype in ((60000.0, torch.float16), (3e38, torch.float32), (1e-38, torch.float32)):
        weight = evening_weights(torch.full((1, 1, 4096), value, dtype=dtype)).item()
        assert weight == pytest.approx(1 / value, rel=1e-3)


def test_a_token_of_zeros_has_a_weight():
    assert evening_weights(torch.zeros(1, 1, 4)).item() == 1


def test_a_value_counts_as_often_as_its_weight_says():
    x = torch.tensor([[1.0, 2.0], [2.0, 3.0]]).reshape(2, 1, 2)
    counts = count_codes(x, torch.tensor([[5.0], [7.0]], dtype=torch.float64))[0]
    values = code_values()
    assert {float(values[i]): int(counts[i]) for i in counts.nonzero().flatten()} == {1.0: 5, 2.0: 12, 3.0: 7}


def test_each_head_has_tokens_of_its_own_strength():
    args = QuantizationArgs(num_bits=8, strategy="attn_head")
    torch.manual_seed(0)
    state = torch.randn(1, 2, 64, 16)
    loud = state.clone()
    loud[:, 0, 0] *= 300
    plain, with_loud = make(args=args, base_name="k")(state), make(args=args, base_name="k")(loud)
    assert torch.equal(plain.counts[1], with_loud.counts[1])
    assert not torch.equal(plain.counts[0], with_loud.counts[0])


def test_a_loud_token_does_not_drown_the_others():
    hidden = batch_with_a_loud_token()
    quiet = hidden[:, 1:]

    def error_of_quiet_tokens(name):
        scale = make(name)(hidden).get_qparams()["scale"]
        return ((quiet / scale).round().clamp(-128, 127) * scale - quiet).square().sum()

    assert error_of_quiet_tokens("balanced_mse") < 0.5 * error_of_quiet_tokens("histogram_mse")


def test_tokens_of_one_strength_are_judged_as_by_histogram_mse():
    torch.manual_seed(0)
    signs = torch.randn(4, 8, 32).sign()
    hidden = signs * torch.linspace(0.1, 2, 32)[torch.randperm(32)]
    torch.testing.assert_close(
        make()(hidden).get_qparams()["scale"], make("histogram_mse")(hidden).get_qparams()["scale"], rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_record_is_the_same_in_any_order_and_in_parts(dtype):
    batches = [batch_with_a_loud_token(seed).to(dtype) for seed in range(4)]
    forwards, backwards, one, other = make(), make(), make(), make()
    for batch in batches:
        forwards(batch)
    for batch in reversed(batches):
        backwards(batch)
    one(batches[0])(batches[2])
    other(batches[3])(batches[1])
    assert torch.equal(forwards.counts, backwards.counts)
    assert torch.equal(forwards.counts, one.merge(other).counts)
    assert forwards.counts.dtype == torch.float64


@pytest.mark.parametrize("faint", [1e-20, 1e-38, 1e-40])
def test_a_token_that_is_as_good_as_zero_changes_nothing(faint):
    hidden = torch.cat([batch_with_a_loud_token(), torch.zeros(2, 1, 64)], dim=1)
    expected = make()(hidden).get_qparams()["scale"]
    hidden[:, -1, :3] = faint
    torch.testing.assert_close(make()(hidden).get_qparams()["scale"], expected, rtol=0, atol=0)
    assert expected < 0.9 * make("static_minmax")(hidden).get_qparams()["scale"]


@pytest.mark.parametrize("exponent", [-110, -30, 30, 110])
def test_scaling_by_a_power_of_two_scales_the_scale(exponent):
    hidden = batch_with_a_loud_token()
    scale, scaled = (make()(each).get_qparams()["scale"] for each in (hidden, hidden * 2.0**exponent))
    torch.testing.assert_close(scaled, scale * 2.0**exponent, rtol=0, atol=0)
