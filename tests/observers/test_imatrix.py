"""Importance-weighted search: how importance is collected, handed on and used, and what is said where it is missing."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch import nn

from scalewright.errors import ImportanceError, LayoutError, NonFiniteError
from scalewright.numerics.extremes import min_max
from scalewright.numerics.layout import flatten_for_calibration
from scalewright.numerics.search import search_range, shrink_candidates
from scalewright.observers import IMatrixMSEObserver

CHANNEL = QuantizationArgs(num_bits=4, strategy="channel")
GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
TENSOR = QuantizationArgs(num_bits=4, strategy="tensor")
BLOCK = QuantizationArgs(num_bits=4, strategy="block", block_structure=[4, 16])
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
STRATEGIES = {"channel": CHANNEL, "group": GROUP, "tensor": TENSOR, "block": BLOCK, "tensor_group": NVFP4}


def make(args: QuantizationArgs = GROUP, base_name: str = "weight", **knobs) -> IMatrixMSEObserver:
    return IMatrixMSEObserver(base_name, args, **knobs)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape)


def uneven(columns: int = 32) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.rand(columns) ** 6 * 10


def with_importance(importance: torch.Tensor, args: QuantizationArgs = GROUP, **knobs) -> IMatrixMSEObserver:
    observer = make(args, **knobs)
    observer._imatrix_sum, observer._imatrix_count = importance * 5, torch.tensor(5)
    return observer


# ---- collecting --------------------------------------------------------------------------------------------------


def test_an_attached_observer_sums_squares_and_counts_tokens():
    layer, observer = nn.Linear(32, 8), make()
    observer.attach(layer)
    assert layer._imatrix_sum.tolist() == [0.0] * 32 and layer._imatrix_count == 0
    first, second = gaussian(2, 5, 32), gaussian(3, 32, seed=1)
    layer(first)
    layer(second)
    expected = first.square().sum(dim=(0, 1)) + second.square().sum(dim=0)
    for holder in (observer, layer):
        torch.testing.assert_close(holder._imatrix_sum, expected)
        assert holder._imatrix_sum.dtype == torch.float32
        assert holder._imatrix_count == 13 and holder._imatrix_count.dtype == torch.int64
    torch.testing.assert_close(observer.channel_importance, expected / 13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_of_few_bits_are_summed_in_fp32(dtype):
    layer, observer = nn.Linear(4, 2).to(dtype), make()
    observer.attach(layer)
    x = torch.full((300, 4), 30.0, dtype=dtype)
    for _ in range(10):
        layer(x)
    torch.testing.assert_close(observer._imatrix_sum, torch.full((4,), 3000 * 900.0), rtol=1e-6, atol=0)


def test_the_module_computes_what_it_did_before():
    layer, observer, x = nn.Linear(32, 8), make(), gaussian(3, 32)
    before = layer(x)
    observer.attach(layer)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)
    assert layer(x).requires_grad
    assert not observer._imatrix_sum.requires_grad


def test_importance_is_no_part_of_the_modules_state():
    layer = nn.Linear(32, 8)
    make().attach(layer)
    layer(gaussian(3, 32))
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_detaching_takes_the_hook_away_and_leaves_what_was_collected():
    layer, observer = nn.Linear(32, 8), make()
    observer.attach(layer)
    layer(gaussian(3, 32))
    observer.detach(layer)
    assert not layer._forward_pre_hooks
    assert not hasattr(layer, "_imatrix_hook")
    collected = layer._imatrix_sum.clone()
    layer(gaussian(3, 32))
    torch.testing.assert_close(layer._imatrix_sum, collected)
    assert layer._imatrix_count == 3


def test_the_next_observer_picks_up_what_the_module_has_and_collects_no_more():
    layer, first, second = nn.Linear(32, 8), make(), make()
    first.attach(layer)
    layer(gaussian(3, 32))
    first.detach(layer)
    second.attach(layer)
    assert not layer._forward_pre_hooks
    assert not hasattr(layer, "_imatrix_sum") and not hasattr(layer, "_imatrix_count")
    torch.testing.assert_close(second.channel_importance, first.channel_importance)
    layer(gaussian(3, 32))
    assert second._imatrix_count == 3
    second.detach(layer)  # nothing is left to clean up, and that is no error
    assert not hasattr(layer, "_imatrix_sum")


def test_what_was_picked_up_is_complete():
    layer, first, second = nn.Linear(32, 8), make(), make()
    first.attach(layer)
    layer(gaussian(3, 32))
    first.detach(layer)
    second.attach(layer)
    assert (first.is_given, second.is_given) == (False, True)
    second.observe_input(7 * gaussian(5, 32, seed=1))
    assert second._imatrix_count == 3
    torch.testing.assert_close(second.channel_importance, first.channel_importance, rtol=0, atol=0)
    second.reset()
    second.observe_input(gaussian(5, 32, seed=1))
    assert second._imatrix_count == 5 and not second.is_given


def test_an_observer_that_was_reset_before_it_was_detached_does_not_blind_the_next():
    layer, first, second = nn.Linear(32, 8), make(), make()
    first.attach(layer)
    layer(gaussian(3, 32))
    first.reset()
    first.detach(layer)
    second.attach(layer)
    layer(gaussian(4, 32))
    assert second.channel_importance is not None
    assert second._imatrix_count == 4


def test_a_reset_observer_goes_on_collecting_from_nothing():
    layer, observer = nn.Linear(32, 8), make()
    observer.attach(layer)
    layer(gaussian(3, 32))
    observer.reset()
    assert observer.channel_importance is None
    layer(gaussian(4, 32))
    torch.testing.assert_close(observer.channel_importance, gaussian(4, 32).square().mean(dim=0))


def test_detaching_from_a_module_that_was_never_attached_is_no_error():
    layer = nn.Linear(32, 8)
    make().detach(layer)
    assert not hasattr(layer, "_imatrix_sum")


@pytest.mark.parametrize("base_name", ["input", "output"])
def test_activations_collect_no_importance(base_name):
    layer = nn.Linear(32, 8)
    make(QuantizationArgs(num_bits=8, strategy="tensor"), base_name).attach(layer)
    assert not layer._forward_pre_hooks and not hasattr(layer, "_imatrix_sum")


def test_a_module_without_in_features_is_left_alone():
    module = nn.Embedding(10, 32)
    observer = make()
    observer.attach(module)
    assert not module._forward_pre_hooks and not hasattr(module, "_imatrix_sum")
    assert observer.channel_importance is None


def test_masked_tokens_do_not_count():
    observer, x = make(), gaussian(2, 3, 32)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    x[~mask.bool()] = float("nan")
    observer.observe_input(x, mask=mask)
    torch.testing.assert_close(observer.channel_importance, x[mask.bool()].square().mean(dim=0))
    assert observer._imatrix_count == 3


def test_an_input_with_nan_is_an_error_that_leaves_the_sums_alone():
    observer, x = make(), gaussian(3, 32)
    observer.observe_input(x)
    observer.label = "model.layers.0.mlp.up_proj.weight"
    before = observer._imatrix_sum.clone()
    x[1, 4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight: .*NaN or Inf"):
        observer.observe_input(x)
    torch.testing.assert_close(observer._imatrix_sum, before)
    assert observer._imatrix_count == 3


def test_an_input_of_other_channels_is_an_error_with_both_numbers():
    observer = make()
    observer.observe_input(gaussian(3, 32))
    with pytest.raises(LayoutError, match="an input of 16 channels, and importance has 32"):
        observer.observe_input(gaussian(3, 16))
    assert observer._imatrix_count == 3


def test_merging_adds_sums_and_counts():
    one, other, both = make(), make(), make()
    first, second = gaussian(3, 32), gaussian(5, 32, seed=1)
    one.observe_input(first)
    other.observe_input(second)
    both.observe_input(torch.cat([first, second]))
    one.merge(other)
    torch.testing.assert_close(one.channel_importance, both.channel_importance)
    assert one._imatrix_count == 8


def test_merging_with_an_observer_that_collected_nothing_changes_nothing():
    one = make()
    one.observe_input(gaussian(3, 32))
    before = one.channel_importance
    torch.testing.assert_close(one.merge(make()).channel_importance, before)
    torch.testing.assert_close(make().merge(one).channel_importance, before)


# ---- using -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(8, 32), (2, 8, 32)])
def test_errors_weigh_as_much_as_their_input_channel(strategy, shape):
    args, weight, importance = STRATEGIES[strategy], gaussian(*shape), uneven()
    importance[weight.flatten(0, -2).abs().amax(dim=0).argmax()] = 0
    observer = with_importance(importance, args, grid=100)(weight)
    flat = flatten_for_calibration(weight, "weight", args)
    found = search_range(
        flat,
        *min_max(flat),
        args,
        candidates_K2=shrink_candidates(maxshrink=0.95, grid=100),
        norm=3.0,
        weights_NQG=flatten_for_calibration(importance.expand(shape), "weight", args),
        global_scale=observer.get_global_scale(),
    )
    torch.testing.assert_close(observer.max_vals, found.hi_Q, rtol=0, atol=0)
    assert (observer.max_vals != make(args, grid=100)(weight).max_vals).any()
    assert observer.notes() == []


def test_the_weighted_output_error_is_less_than_without_importance():
    x, weight = gaussian(500, 32) * uneven().sqrt(), gaussian(16, 32, seed=1)

    def output_error(observer) -> torch.Tensor:
        scale, _ = observer(weight)
        s = scale.repeat_interleave(16, dim=1)
        return ((weight / s).round().clamp(-8, 7) * s - weight).matmul(x.t()).square().sum()

    weighted = make(norm=2.0)
    weighted.observe_input(x)
    assert output_error(weighted) < 0.8 * output_error(make(norm=2.0))


def test_importance_follows_g_idx():
    weight, importance = gaussian(8, 32), uneven()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    g_idx = (torch.arange(32) // 16)[order]
    shuffled = with_importance(importance[order])(weight[:, order], g_idx)
    plain = with_importance(importance)(weight)
    torch.testing.assert_close(shuffled.max_vals, plain.max_vals)


def test_equal_importance_is_no_importance():
    weight = gaussian(8, 32)
    torch.testing.assert_close(with_importance(torch.full((32,), 3.0))(weight).max_vals, make()(weight).max_vals)


@pytest.mark.parametrize("exponent", [-60, 60])
def test_the_size_of_the_activations_does_not_matter(exponent):
    weight = gaussian(8, 32)
    scaled = with_importance(uneven() * 2.0**exponent)(weight)
    torch.testing.assert_close(scaled.max_vals, with_importance(uneven())(weight).max_vals)


def test_only_the_observed_channels_count_when_the_others_were_silent():
    weight = gaussian(8, 32).clamp(-2, 2)
    weight[:, 0] = 20.0
    importance = torch.ones(32)
    importance[0] = 0
    observer = with_importance(importance, CHANNEL)(weight)
    assert (observer.max_vals < 4).all()
    assert (make(CHANNEL)(weight).max_vals > 10).all()


# ---- where there is none -----------------------------------------------------------------------------------------

PROBLEMS = {
    "no importance was collected": None,
    "importance has 16 channels, and the weight has 32 columns": torch.ones(16),
    "importance is zero for every channel": torch.zeros(32),
    "importance has NaN, Inf or negative numbers in it": torch.full((32,), float("nan")),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_unusable_importance_falls_back_to_equal_weights_with_a_note(problem):
    importance, weight = PROBLEMS[problem], gaussian(8, 32)
    observer = make() if importance is None else with_importance(importance)
    observer.label = "model.layers.0.mlp.up_proj.weight"
    observer(weight)
    torch.testing.assert_close(observer.max_vals, with_importance(torch.ones(32))(weight).max_vals)
    assert observer.notes() == [f"model.layers.0.mlp.up_proj.weight: {problem}, so all errors weigh the same."]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_unusable_importance_is_an_error_when_strict(problem):
    importance = PROBLEMS[problem]
    observer = make(strict=True) if importance is None else with_importance(importance, strict=True)
    with pytest.raises(ImportanceError, match=f"^weight: {problem}. Calibrate with data, or set strict to false"):
        observer(gaussian(8, 32))
    assert not observer.has_statistics


def test_an_infinite_or_negative_importance_is_unusable():
    for bad in (float("inf"), -1.0):
        importance = torch.ones(32)
        importance[3] = bad
        with pytest.raises(ImportanceError, match="NaN, Inf or negative"):
            with_importance(importance, strict=True)(gaussian(8, 32))


def test_strict_is_content_with_good_importance():
    assert with_importance(uneven(), strict=True)(gaussian(8, 32)).has_statistics


def test_importance_does_not_serve_activations():
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    observer = make(args, "input")(gaussian(8, 32))
    assert observer.notes() == ["input: importance is for weights, and this is 'input', so all errors weigh the same."]
    with pytest.raises(ImportanceError, match="importance is for weights, and this is 'input'"):
        make(args, "input", strict=True)(gaussian(8, 32))


def test_an_attached_module_that_was_never_called_has_no_importance():
    layer, observer = nn.Linear(32, 8), make()
    observer.attach(layer)
    observer(layer.weight)
    assert "no importance was collected" in observer.notes()[0]


def test_a_note_goes_away_when_importance_comes():
    observer, weight = make(), gaussian(8, 32)
    observer(weight)
    assert observer.notes()
    observer.observe_input(gaussian(5, 32))
    observer(weight)
    assert observer.notes() == []
