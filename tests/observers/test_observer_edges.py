"""What happens at the edges of an observer's life: changed weights, partners that come and go, odd calls, odd masks."""

import copy

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch import nn

from scalewright.errors import (
    KnobError,
    LayoutError,
    MergeError,
    NonFiniteError,
    RegistrationError,
    StaleWeightError,
)
from scalewright.observers import MinMaxObserver, Observer, merging
from scalewright.observers.catalog import observer_rows

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT4 = QuantizationArgs(num_bits=4, strategy="channel")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
SEARCHES = ("memoryless_mse", "mse", "nvfp4_expanded_mse", "imatrix_mse")


def make(name: str, base_name: str = "weight", args: QuantizationArgs = INT8, **knobs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **knobs)


def fused(name: str) -> tuple[Observer, Observer, torch.Tensor]:
    """Two partners, the second seen after the first and far larger, and the first one's weight."""
    torch.manual_seed(0)
    one, other, weight = make(name, args=NVFP4), make(name, args=NVFP4), torch.randn(16, 64)
    Observer.fuse([one, other])
    one(weight)
    other(torch.randn(16, 64) * 37)
    return one, other, weight


# ---- weights that change, and observers that let go of them ----------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_detaching_a_fused_observer_changes_no_qparam(name):
    one, _, weight = fused(name)
    before = one.get_qparams()
    one.detach(nn.Linear(64, 16))
    weight.zero_()
    torch.testing.assert_close(one.get_qparams(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", SEARCHES)
def test_detaching_before_anything_was_read_changes_no_qparam_either(name):
    one, _, _ = fused(name)
    twin, _, _ = fused(name)
    one.detach(nn.Linear(64, 16))
    torch.testing.assert_close(one.get_qparams(), twin.get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_partner_that_is_seen_after_detaching_is_reckoned_with(name):
    one, other, weight = fused(name)
    expected = one.get_qparams()
    again = make(name, args=NVFP4)
    partner = make(name, args=NVFP4)
    Observer.fuse([again, partner])
    again(weight)
    again.detach(nn.Linear(64, 16))
    partner.min_vals, partner.max_vals, partner.true_absmax = other.min_vals, other.max_vals, other.true_absmax
    torch.testing.assert_close(again.get_qparams(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", SEARCHES)
def test_changing_a_fused_weight_after_reading_changes_nothing_that_was_read(name):
    one, _, weight = fused(name)
    before = one.get_qparams()
    weight.zero_()
    torch.testing.assert_close(one.get_qparams(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", SEARCHES)
def test_changing_a_fused_weight_before_reading_is_an_error_that_says_what_to_do(name):
    one, _, weight = fused(name)
    one.label = "layers.0.gate_proj"
    weight.mul_(2)
    with pytest.raises(
        StaleWeightError, match=r"^layers\.0\.gate_proj: the weight was changed .* observe it once more"
    ):
        one.get_qparams()


def test_weights_of_inference_mode_can_be_searched_again():
    with torch.inference_mode():
        one, other = make("memoryless_mse", args=NVFP4), make("memoryless_mse", args=NVFP4)
        Observer.fuse([one, other])
        one(torch.randn(4, 32)), other(torch.randn(4, 32) * 9)
        assert bool(torch.isfinite(one.get_qparams()["scale"]).all())


# ---- partners ----------------------------------------------------------------------------------------------------


def test_fusing_groups_that_overlap_makes_one_group():
    observers = [make("memoryless_minmax", args=NVFP4)(torch.randn(4, 32) * size) for size in (1, 2, 5)]
    Observer.fuse(observers[:2])
    Observer.fuse(observers[1:])
    expected = (448 * 6 / torch.stack([each.absmax() for each in observers]).max()).reshape(1)
    for each in observers:
        torch.testing.assert_close(each.get_qparams()["global_scale"], expected)


def test_notes_say_that_a_partner_has_seen_nothing_and_no_more():
    one, other = make("memoryless_minmax", args=NVFP4), make("memoryless_minmax", args=NVFP4)
    Observer.fuse([one, other])
    one(torch.randn(4, 32) * 1e-4)
    assert one.notes() == ["weight: a fused partner has seen nothing, so there is no global scale."]
    other(torch.randn(4, 32) * 1e-4)
    assert one.notes() == []


def test_notes_count_groups_that_are_lost_beside_a_huge_one():
    weight = torch.full((1, 32), 1e-9)
    weight[0, 0] = 1e4
    assert make("memoryless_minmax", args=NVFP4)(weight).notes() == [
        "weight: 1 of 2 qparam positions are too small for any scale of this format and round to zero."
    ]


# ---- dtypes ------------------------------------------------------------------------------------------------------


def scale_dtype_after(*dtypes: torch.dtype) -> torch.dtype:
    observer = make("static_minmax", "input")
    for dtype in dtypes:
        observer(torch.ones(1, 2, 4, dtype=dtype))
    return observer.get_qparams()["scale"].dtype


def test_the_dtype_of_the_scale_does_not_depend_on_the_order_of_batches():
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    assert scale_dtype_after(bf16, bf16) == bf16
    assert scale_dtype_after(f32, bf16) == scale_dtype_after(bf16, f32) == f32
    assert scale_dtype_after(f16, bf16) == scale_dtype_after(bf16, f16) == f32
    assert scale_dtype_after(torch.int64, bf16) == scale_dtype_after(bf16, torch.int64) == f32


def test_merging_either_way_gives_one_dtype():
    def seen(dtype):
        return make("static_minmax", "input")(torch.ones(1, 2, 4, dtype=dtype))

    for one, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        assert seen(one).merge(seen(other)).scale_dtype == seen(other).merge(seen(one)).scale_dtype == torch.float32
    assert seen(torch.bfloat16).merge(make("static_minmax", "input")).scale_dtype == torch.bfloat16


# ---- importance --------------------------------------------------------------------------------------------------


def test_no_hook_stays_on_a_compiled_module():
    linear = nn.Linear(8, 4)
    compiled = torch.compile(linear, backend="eager")
    observer = make("imatrix_mse")
    observer.attach(compiled)
    linear(torch.randn(3, 8))
    observer.detach(compiled)
    linear(torch.randn(3, 8))
    assert int(observer._imatrix_count) == 3
    assert not linear._forward_pre_hooks and not compiled._forward_pre_hooks


def test_an_observer_that_collected_nothing_does_not_blind_the_next():
    linear, first, second = nn.Linear(8, 4), make("imatrix_mse"), make("imatrix_mse")
    first.attach(linear)
    first.detach(linear)
    assert not hasattr(linear, "_imatrix_sum")
    second.attach(linear)
    linear(torch.randn(3, 8))
    assert int(second._imatrix_count) == 3


def test_zeros_without_a_count_on_a_module_are_not_taken_over():
    linear, observer = nn.Linear(8, 4), make("imatrix_mse")
    linear._imatrix_sum, linear._imatrix_count = torch.zeros(8), torch.tensor(0)
    observer.attach(linear)
    linear(torch.randn(3, 8))
    assert int(observer._imatrix_count) == 3


def test_the_hook_leaves_out_what_the_input_mask_leaves_out():
    linear, observer, x = nn.Linear(8, 4), make("imatrix_mse"), torch.randn(2, 5, 8)
    observer.attach(linear)
    observer.input_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    linear(x)
    assert int(observer._imatrix_count) == 5
    torch.testing.assert_close(observer._imatrix_sum, x[observer.input_mask.bool()].square().sum(dim=0))


def test_a_sum_that_was_set_without_a_count_is_importance():
    weight, importance = torch.randn(8, 32), torch.linspace(0.01, 9, 32)
    bare, counted = make("imatrix_mse", args=INT4), make("imatrix_mse", args=INT4)
    bare._imatrix_sum = importance
    counted._imatrix_sum, counted._imatrix_count = importance, torch.tensor(7)
    torch.testing.assert_close(bare(weight).get_qparams(), counted(weight).get_qparams(), rtol=0, atol=0)
    assert bare.notes() == []


# ---- statistics set by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["percentile", "entropy", "histogram_mse"])
def test_ranges_set_by_hand_overrule_a_record(name):
    observer = make(name, "input")(torch.randn(1, 8, 16))
    observer.min_vals, observer.max_vals = torch.tensor([-100.0]), torch.tensor([100.0])
    torch.testing.assert_close(observer.get_qparams()["scale"], torch.tensor([100 / 127.5]))


def test_plain_numbers_serve_as_statistics():
    observer = make("static_minmax", "input")
    observer.min_vals, observer.max_vals = -1.0, 2
    torch.testing.assert_close(observer.get_qparams()["scale"].flatten(), torch.tensor([2 / 127.5]))


def test_nan_set_by_hand_is_an_error():
    observer = make("static_minmax", "input")
    observer.min_vals, observer.max_vals = torch.tensor([float("nan")]), torch.tensor([1.0])
    with pytest.raises(NonFiniteError, match="min_vals or max_vals were set to NaN or Inf"):
        observer.get_qparams()


# ---- percentile of sparse values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_percentile_of_zeros_takes_the_whole_range_and_says_so(symmetric):
    x = torch.zeros(1, 1000, 100)
    x[0, :9, 0] = 4.0
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=symmetric)
    observer = make("percentile", "input", args)(x)
    plain = make("static_minmax", "input", args)(x)
    torch.testing.assert_close(observer.get_qparams(), plain.get_qparams())
    assert observer.notes() == [
        "input: at 1 of 1 qparam positions 99.99 percent of all values are zeros, so the whole range is taken."
    ]
    assert make("percentile", "input", args)(torch.randn(1, 8, 8)).notes() == []


# ---- odd calls ---------------------------------------------------------------------------------------------------


def test_an_observer_is_not_merged_into_itself():
    observer = make("percentile", "input")(torch.randn(1, 8, 8))
    with pytest.raises(MergeError, match="cannot be merged into itself"):
        observer.merge(observer)


def test_the_base_class_makes_no_observer():
    with pytest.raises(TypeError, match="load_from_registry"):
        Observer("weight", INT8)


def test_a_base_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match=r"got base_name=\['weight'\]"):
        make("minmax", ["weight"])


@pytest.mark.parametrize("value", [torch.eye(4).to_sparse(), torch.ones(2, 2, dtype=torch.complex64)])
def test_tensors_without_plain_numbers_are_refused_in_words(value):
    with pytest.raises(TypeError, match="only dense real tensors"):
        make("minmax")(value)


def test_lists_and_arrays_serve_as_masks_and_group_maps():
    x = torch.randn(1, 3, 4)
    observer = make("static_minmax", "input")
    assert observer(x, mask=[[1, 0, 1]])(x, mask=np.array([[1, 1, 0]])).num_observed_tokens == 4
    group = QuantizationArgs(num_bits=4, strategy="group", group_size=2)
    weight = torch.randn(3, 4)
    mapped = make("static_minmax", args=group)(weight, g_idx=[0, 1, 0, 1])
    torch.testing.assert_close(mapped.max_vals, weight.reshape(3, 2, 2).amax(dim=1))


def test_a_batch_mask_fits_activations_with_dimensions_between_batch_and_sequence():
    x = torch.zeros(2, 2, 4, 3)
    x[1, :, 3] = 9.0
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    observer = make("static_minmax", "input")(x, mask=mask)
    assert observer.num_observed_tokens == 14
    assert float(observer.max_vals) == 0.0


def test_a_mask_of_the_batch_alone_is_refused():
    with pytest.raises(LayoutError, match=r"mask of shape \(2,\) does not fit tokens of shape \(2, 3\)"):
        make("static_minmax", "input")(torch.ones(2, 3, 4), mask=torch.ones(2))


def test_numbers_of_numpy_turn_knobs():
    observer = make("memoryless_mse", patience=np.int64(3), norm=np.float32(2.0))
    assert (observer.patience, observer.norm) == (3, 2.0)
    with pytest.raises(KnobError, match="whole number"):
        make("memoryless_mse", patience=np.float64(3.5))


def test_registering_without_parentheses_is_told_so():
    with pytest.raises(RegistrationError, match="with parentheses"):

        @Observer.register
        class Bare(MinMaxObserver):
            pass


def test_a_class_that_is_not_registered_goes_by_its_own_name():
    class Quiet(MinMaxObserver):
        pass

    with pytest.raises(KnobError, match="observer 'Quiet' has no knob 'speed'"):
        Quiet("weight", INT8, speed=1)


def test_a_class_without_docstring_has_its_row(monkeypatch):
    monkeypatch.setattr(Observer, "_classes", dict(Observer._classes))
    monkeypatch.setattr(Observer, "_names", dict(Observer._names))

    @Observer.register("undocumented")
    class Undocumented(MinMaxObserver):
        pass

    Undocumented.__doc__ = None
    assert ("undocumented", "") in {row[:2] for row in observer_rows()}


def test_an_observer_shows_what_it_is():
    shown = repr(make("minmax", "input", averaging_constant=0.5))
    assert shown == "MinMaxObserver('input', tensor int8, averaging_constant=0.5)"


def test_a_copy_goes_its_own_way():
    observer = make("percentile", "input")(torch.ones(1, 2, 4))
    twin = copy.deepcopy(observer)
    twin(torch.full((1, 2, 4), 9.0))
    assert (float(observer.max_vals), float(twin.max_vals)) == (1.0, 9.0)


# ---- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "accelerator", "device"),
    [("gloo", "cuda", "cpu"), ("nccl", "cuda", "cuda:1"), ("xccl", "xpu", "xpu:1"), ("mpi", None, "cpu")],
)
def test_collectives_run_where_the_backend_wants_them(monkeypatch, backend, accelerator, device):
    monkeypatch.setattr(merging.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert merging.collective_device(None) == torch.device(device)


def test_counts_that_were_set_by_hand_after_a_sync_are_all_new():
    observer = make("percentile", "input")(torch.randn(1, 8, 8))
    observer._synced["counts"] = observer.counts.clone()
    slot = merging._Slot(observer, "counts", "sum", shape=tuple(observer.counts.shape), is_whole=True)
    assert int(slot.contribution().sum()) == 0
    observer(torch.randn(1, 8, 8))
    assert int(slot.contribution().sum()) == 64
    observer.counts = make("percentile", "input")(torch.full((1, 8, 8), 9.0)).counts
    assert int(slot.contribution().sum()) == 64 and int(slot.contribution().min()) == 0


def test_a_view_whose_numbers_are_to_be_negated_is_read_as_it_reads():
    torch.manual_seed(0)
    weight = torch.rand(4, 32)
    observer = make("memoryless_minmax", args=INT4)(torch._neg_view(weight))  # the imaginary part of a conjugate is one
    torch.testing.assert_close(observer.min_vals, -weight.amax(dim=1, keepdim=True), rtol=0, atol=0)
