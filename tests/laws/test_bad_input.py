"""What every registered observer does with input that is wrong or at the edge: a clear error, or a stated outcome."""

from __future__ import annotations

import math
from typing import Any

import observer_cases as cases
import pytest
import torch
from observer_cases import EVERY_CASE, EVERY_OBSERVER, Case, Scene
from torch import Tensor

from scalewright.errors import (
    KnobError,
    LayoutError,
    MergeError,
    NonFiniteError,
    NoStatisticsError,
    ScalewrightError,
    UnknownObserverError,
)
from scalewright.observers import Observer, fuse_weight_observers
from scalewright.observers.catalog import registered_observers
from scalewright.observers.knobs import Knob

ON_ACTIVATIONS = cases.cases_where(lambda case: case.base_name != "weight")
IN_GROUPS = cases.cases_where(lambda case: case.strategy in ("group", "tensor_group"))
IN_GROUPS_OF_WEIGHTS = cases.cases_where(lambda c: c.base_name == "weight" and c.strategy in ("group", "tensor_group"))
NVFP4 = cases.cases_where(lambda case: case.strategy == "tensor_group")

NO_STATISTICS = "No statistics available. Call observer(value) first."
NAN, INF = math.nan, math.inf


# ---- NaN and Inf -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_nan_and_inf_are_counted_located_and_refused(case: Case) -> None:
    alike = cases.ALIKE[case.base_name]
    for number, bad in enumerate(((NAN,), (-INF,), (NAN, INF, NAN, -INF))):
        base_name = alike[number % len(alike)]
        scene = case.scene(case.formats[-1], base_name=base_name)
        observer = scene.seeing(scene.value(1))
        before = cases.state(observer)
        poisoned = scene.value(2)
        places = range(5, 5 + 2 * len(bad), 2)
        for place, value in zip(places, bad, strict=True):
            poisoned.view(-1)[place] = value
        num_nan = sum(math.isnan(value) for value in bad)
        first = tuple(int(i) for i in torch.unravel_index(torch.tensor(places[0]), poisoned.shape))
        message = (
            f"{base_name}: {num_nan} NaN and {len(bad) - num_nan} Inf among {poisoned.numel()} values, "
            f"the first at index {first}. "
        )
        unseen = scene.fresh()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for each in (observer, unseen):
                with pytest.raises(NonFiniteError) as caught:
                    each(poisoned.to(dtype))
                assert isinstance(caught.value, ValueError)
                assert str(caught.value).startswith(message)
        cases.assert_equal(cases.state(observer), before)
        assert not unseen.has_statistics
        cases.assert_same_state(observer(scene.value(3)), scene.seeing(scene.value(1), scene.value(3)))


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_float8_nan_and_float64_beyond_fp32_are_refused(name: str) -> None:
    scene = cases.usual_scene(name)
    value = scene.value(1)
    value.view(-1)[3] = NAN
    observer = scene.fresh()
    with pytest.raises(NonFiniteError, match=r"1 NaN and 0 Inf among \d+ values, the first at index \(.*3\)"):
        observer(value.to(torch.float8_e4m3fn))
    value = scene.value(1).double()
    value.view(-1)[3] = 1e300
    with pytest.raises(NonFiniteError, match=r"values of torch.float64 go beyond fp32, whose largest number is 3.4e38"):
        observer(value)
    assert not observer.has_statistics


@pytest.mark.parametrize("case", ON_ACTIVATIONS)
def test_nan_in_kept_tokens_is_refused_and_only_kept_ones_are_counted(case: Case) -> None:
    scene = case.scene(case.formats[0])
    value = scene.value(1, rows=1)
    value[..., 0, 0] = NAN
    value[..., 1, 0] = NAN
    mask = torch.tensor([[0, 1, 1]])
    num_nan = 2 if scene.base_name in cases.ATTENTION else 1  # one for each head
    with pytest.raises(NonFiniteError, match=f"{num_nan} NaN and 0 Inf"):
        scene.fresh()(value, mask=mask)


# ---- nothing to see --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_an_empty_tensor_changes_nothing(case: Case) -> None:
    scene = case.scene(case.formats[0])
    full = scene.value(1)
    shapes = [tuple(0 if i == dim else size for i, size in enumerate(full.shape)) for dim in range(full.ndim)]
    unseen, seen = scene.fresh(), scene.seeing(full)
    before = cases.state(seen)
    for shape in shapes:
        assert unseen(torch.empty(shape)) is unseen
        assert not unseen.has_statistics
        cases.assert_equal(cases.state(seen(torch.empty(shape, dtype=torch.bfloat16))), before)
        assert seen.scale_dtype == torch.float32
    assert unseen.num_observed_tokens == 0
    with pytest.raises(NoStatisticsError):
        unseen.get_qparams()


@pytest.mark.parametrize("case", EVERY_CASE)
def test_reading_before_anything_was_seen_says_what_to_do(case: Case) -> None:
    observer = case.scene(case.formats[0]).fresh()
    for read in (observer.get_qparams, lambda: tuple(observer)):
        with pytest.raises(NoStatisticsError) as caught:
            read()
        assert str(caught.value) == NO_STATISTICS
        assert isinstance(caught.value, AssertionError)
        assert isinstance(caught.value, ScalewrightError)
    observer.label = "model.layers.3.mlp.down_proj.weight"
    with pytest.raises(NoStatisticsError) as caught:
        observer.get_qparams()
    assert str(caught.value) == f"model.layers.3.mlp.down_proj.weight: {NO_STATISTICS}"
    [note] = observer.notes()[:1]
    assert note.startswith("model.layers.3.mlp.down_proj.weight: nothing was observed")


@pytest.mark.parametrize("case", cases.cases_where(lambda c: c.base_name == "weight" and c.strategy == "tensor_group"))
def test_fused_observers_of_which_one_saw_nothing_are_refused(case: Case) -> None:
    scene = case.scene("nvfp4")
    block = torch.nn.Module()
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        layer = torch.nn.Module()
        layer.weight_observer = scene.fresh()
        setattr(block, name, layer)
        if number < 2:
            layer.weight_observer(scene.value(number))
    fuse_weight_observers(block)
    for layer in (block.q_proj, block.k_proj):
        with pytest.raises(NoStatisticsError) as caught:
            layer.weight_observer.get_qparams()
        assert "All fused observers must be run before get_qparams" in str(caught.value)
        assert "1 of 3 have seen nothing" in str(caught.value)
        assert isinstance(caught.value, AssertionError)
    with pytest.raises(NoStatisticsError, match="No statistics available"):
        block.v_proj.weight_observer.get_qparams()
    block.v_proj.weight_observer(scene.value(2) * 4)
    shared = {float(getattr(block, name).weight_observer.get_qparams()["global_scale"]) for name in block._modules}
    assert len(shared) == 1


# ---- zeros, constants, the tiny and the huge -------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_zeros_give_a_usable_scale_and_stay_zeros(case: Case) -> None:
    for scene in case.scenes():
        for dtype in cases.DTYPES:
            zeros = torch.zeros(scene.shape(), dtype=dtype)
            observer = scene.seeing(zeros)
            qparams = observer.get_qparams()
            cases.assert_sound(qparams, scene)
            assert bool((qparams["zero_point"].float() == 0).all()), scene.form
            assert bool((cases.fake_quantized(zeros, qparams, scene) == 0).all()), scene.form
        positions = qparams["scale"].numel()
        assert any(f"{positions} of {positions} qparam positions saw nothing but zeros" in n for n in observer.notes())


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_dead_position_beside_live_ones_harms_neither(case: Case) -> None:
    for scene in case.scenes():
        value = scene.value(3, rows=8, groups=4)
        x = cases.flat(value.clone(), scene)
        if x[0, ..., 0].numel() == 1:
            continue  # one position alone cannot be both
        dead = value.clone()
        _first_position(dead, scene).zero_()
        qparams, alive = scene.seeing(dead).get_qparams(), scene.seeing(value).get_qparams()
        cases.assert_sound(qparams, scene)
        assert bool((_first_position(cases.fake_quantized(dead, qparams, scene), scene) == 0).all())
        if case.strategy != "tensor_group":  # there the largest value, which may be dead now, is everyone's affair
            torch.testing.assert_close(qparams["scale"].flatten()[1:], alive["scale"].flatten()[1:], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_constant_values_come_back_within_half_a_step(case: Case) -> None:
    for scene in case.scenes():
        for constant in (1.0, -0.3):
            value = torch.full(scene.shape(), constant)
            qparams = scene.seeing(value).get_qparams()
            cases.assert_sound(qparams, scene)
            back = cases.fake_quantized(value, qparams, scene)
            if scene.is_integer:
                # A record of bf16 codes is half a bf16 step off.
                limit = qparams["scale"].float().max() / 2 * (1 + 1e-4) + abs(constant) * 2**-8
                assert float((back - value).abs().max()) <= limit, scene.form
            else:
                torch.testing.assert_close(back, value, rtol=0.26, atol=0.0)  # e2m1's gaps are wide, and MXFP4 clips


@pytest.mark.parametrize("case", EVERY_CASE)
def test_tiny_values_keep_finite_positive_scales_and_are_not_flushed(case: Case) -> None:
    for scene in case.scenes():
        for size in (1e-12, 1e-30):
            for dtype in (torch.float32, torch.bfloat16):
                value = (scene.value(4).sign() * size).to(dtype)
                qparams = scene.seeing(value).get_qparams()
                cases.assert_sound(qparams, scene)
                back = cases.fake_quantized(value, qparams, scene)
                assert bool((back != 0).any()), f"{scene.form}: {size} in {dtype} became nothing"
                assert float((back - value.float()).abs().max()) < size, scene.form
        smallest = torch.full(scene.shape(), torch.finfo(torch.float16).tiny, dtype=torch.float16)
        cases.assert_sound(scene.seeing(smallest).get_qparams(), scene)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_tiny_position_beside_a_normal_one_has_a_sound_scale(case: Case) -> None:
    for scene in case.scenes():
        for dtype, size in ((torch.float32, 1e-30), (torch.bfloat16, 1e-30), (torch.float16, 6e-8)):
            value = scene.value(5, rows=8, groups=4)
            _first_position(value, scene).fill_(size)
            value = value.to(dtype)
            qparams = scene.seeing(value).get_qparams()
            cases.assert_sound(qparams, scene)
            several = qparams["scale"].numel() > 1
            if several and case.strategy != "tensor_group" and dtype != torch.float16:
                back = _first_position(cases.fake_quantized(value, qparams, scene), scene)
                assert bool((back != 0).all()), f"{scene.form}: the tiny position was flushed to zero"


@pytest.mark.parametrize("case", EVERY_CASE)
def test_huge_values_keep_finite_positive_scales(case: Case) -> None:
    for scene in case.scenes():
        for dtype, size in ((torch.float16, 65504.0), (torch.float32, 3e38), (torch.bfloat16, 3e38)):
            signs = scene.value(6).sign()
            _check_huge(scene, [(signs * size).to(dtype)] * 2, size)
            if not scene.args.symmetric:
                _check_huge(scene, [(signs.abs() * size).to(dtype)], size)
                _check_huge(scene, [(-signs.abs() * size).to(dtype)], size)


def _check_huge(scene: Scene, values: list[Tensor], size: float) -> None:
    observer = scene.seeing(*values)
    qparams = observer.get_qparams()
    cases.assert_sound(qparams, scene)
    where = f"{scene.form}, {values[0].dtype}"
    for name in ("min_vals", "max_vals"):
        assert bool(torch.isfinite(getattr(observer, name)).all()), f"{where}: {name} is {getattr(observer, name)}"
    # The scale is of the order that the value needs: neither saturated nor lost.
    steps = {"int2": 1.5, "int4": 7.5, "int8": 127.5, "fp8": 448, "nvfp4": 6, "mxfp4": 6}
    needed = size / steps[scene.form.removesuffix("_asym")]
    scale = cases.effective_scale(qparams).double()
    assert bool(((scale > needed / 3) & (scale < needed * 3)).all()), f"{where}: {scale} where {needed} is needed"


@pytest.mark.parametrize("case", NVFP4)
@pytest.mark.parametrize("size", [1e-2, 1e-4, 3e-6, 1e-6, 2.5e-7])
def test_nvfp4_does_not_flush_a_tiny_group_that_e4m3_can_hold(case: Case, size: float) -> None:
    # Beside a group of ones the smallest e4m3 scale means steps of 2^-9 / 2688 * 0.5 = 3.6e-7.
    scene = case.scene("nvfp4")
    value = torch.ones(scene.shape(rows=2, groups=2))
    _first_position(value, scene).fill_(size)
    qparams = scene.seeing(value).get_qparams()
    cases.assert_sound(qparams, scene)
    back = _first_position(cases.fake_quantized(value, qparams, scene), scene)
    assert bool((back != 0).all()), f"a group of {size} was flushed to zero"
    assert float((back - size).abs().max()) <= max(size / 4, 0.5 * 2.0**-9 / 2688 / 2 * 1.01)


def _first_position(value: Tensor, scene: Scene) -> Tensor:
    """A view of the part of `value` that the first scale is for."""
    strategy, step = scene.case.strategy, scene.columns_step
    if strategy == "tensor":
        return value
    if scene.base_name == "weight":
        if strategy == "channel":
            return value[0]
        return value[: cases.BLOCK[0], : cases.BLOCK[1]] if strategy == "block" else value[0, :step]
    if strategy == "token":
        return value[:, 0]
    return value[:, 0] if strategy == "attn_head" else value[..., :step]


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_one_element_for_each_scale_is_enough(case: Case) -> None:
    for form in ("int4", "int8_asym", "fp8") if case.strategy != "tensor_group" else ("nvfp4",):
        scene = case.scene(form)
        changed: dict[str, Any] = {}
        if case.strategy in ("group", "tensor_group"):
            changed = {"group_size": 1}
        elif case.strategy == "block":
            changed = {"block_structure": [1, 1]}
        args = scene.args.model_copy(update=changed)
        width = 3 if changed else 1
        shape = {"weight": (2, width), "input": (1, 2, width), "q": (1, 2, 1, 1)}[case.base_name]
        if case.strategy == "tensor":
            shape = (1,) * len(shape)
        value = cases.normal(shape, 8)
        observer = case.cls(case.base_name, args, **scene.knobs)(value)
        qparams = observer.get_qparams()
        cases.assert_sound(qparams, scene)
        assert qparams["scale"].numel() == (width if case.base_name == "input" and changed else value.numel())
        if form != "nvfp4":
            assert bool((cases.effective_scale(qparams) < 2 * value.abs().max()).all())


@pytest.mark.parametrize("case", IN_GROUPS)
def test_columns_that_do_not_divide_into_groups_are_refused_with_both_numbers(case: Case) -> None:
    for scene in case.scenes():
        size = scene.columns_step
        for columns in (size + 3, 2 * size - 1, 1):
            shape = (*scene.shape()[:-1], columns)
            observer = scene.fresh()
            observer.label = "mlp.down_proj"
            with pytest.raises(LayoutError) as caught:
                observer(torch.ones(shape))
            assert isinstance(caught.value, ValueError)
            assert str(caught.value).startswith(
                f"mlp.down_proj: {columns} columns do not divide into groups of {size} (remainder {columns % size}). "
            )
            assert not observer.has_statistics


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_a_strategy_that_does_not_fit_the_base_name_is_refused(name: str) -> None:
    cls = registered_observers()[name]
    for base_name, allowed in cases.ALLOWED.items():
        for strategy in cases.ALL_STRATEGIES:
            args = cases.make_args("nvfp4" if strategy == "tensor_group" else "int8", strategy)
            observer = cls(base_name, args)
            if strategy not in allowed:
                message = (
                    f"{base_name}: strategy '{strategy}' does not fit '{base_name}'. "
                    f"Strategies for '{base_name}': {', '.join(allowed)}"
                )
            elif cls.strategies and strategy not in cls.strategies:
                message = (
                    f"{base_name}: observer '{name}' does not serve strategy '{strategy}'. "
                    f"It serves: {', '.join(cls.strategies)}"
                )
            else:
                continue
            for value in (torch.ones(2, 2, 32, 32), torch.ones(32, 32)):
                with pytest.raises(LayoutError) as caught:
                    observer(value)
                assert str(caught.value).startswith(message)
            assert not observer.has_statistics


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_an_unknown_base_name_and_a_scalar_are_refused(name: str) -> None:
    args, cls = cases.make_args("int8", "tensor"), registered_observers()[name]
    with pytest.raises(LayoutError, match=r"unknown base name 'bias'. Base names: weight, input, output, q, k, v"):
        cls("bias", args)(torch.ones(2, 2))
    for base_name in ("weight", "input"):
        with pytest.raises(LayoutError, match="a scalar has no layout"):
            cls(base_name, args)(torch.tensor(1.0))
    with pytest.raises(LayoutError, match=r"attention states have 4 dimensions .* this has 3: \(2, 3, 4\)"):
        cls("q", args)(torch.ones(2, 3, 4))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_value_whose_qparams_have_another_shape_is_refused_or_takes_over(case: Case) -> None:
    scene = case.scene(case.formats[0])
    first = scene.value(1, rows=2, groups=2)
    other = scene.value(2, rows=9, groups=3)
    if case.strategy in ("token", "attn_head"):
        other = torch.cat([other, other], dim=1)
    shapes = [tuple(cases.flat(value, scene).shape[1:-1]) for value in (first, other)]
    observer = scene.seeing(first)
    if shapes[0] == shapes[1]:
        observer(other)
    elif not observer.remembers:
        cases.assert_equal(observer(other).get_qparams(), scene.seeing(other).get_qparams())
    else:
        before = cases.state(observer)
        with pytest.raises(LayoutError) as caught:
            observer(other)
        assert f"this value has qparams of shape {shapes[1]}" in str(caught.value)
        assert f"those seen before have {shapes[0]}" in str(caught.value)
        cases.assert_equal(cases.state(observer), before)


# ---- dtypes and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
def test_other_dtypes_are_observed_like_their_fp32_twins(case: Case) -> None:
    scene = case.scene(case.formats[0])
    small = (scene.value(9) * 3).round() + 0.0  # integers have no -0.0
    twins = {
        torch.int8: small,
        torch.int32: small * 1000,
        torch.int64: small * 1000,
        torch.uint8: small.abs(),
        torch.bool: (small > 0).float(),
        torch.float64: scene.value(9),
        torch.float8_e4m3fn: small,
        torch.float8_e5m2: scene.value(9).to(torch.float8_e5m2).float(),
    }
    for dtype, twin in twins.items():
        observer, expected = scene.seeing(twin.to(dtype)), scene.seeing(twin)
        assert observer.get_qparams()["scale"].dtype == torch.float32, dtype
        cases.assert_same_state(observer, expected)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_tensors_that_are_not_contiguous_are_observed_like_their_contiguous_twins(case: Case) -> None:
    scene = case.scene(case.formats[0])
    for dtype in cases.DTYPES:
        value = scene.value(10, dtype)
        strided = torch.stack([value, value + 7], dim=-1)[..., 0]
        transposed = value.transpose(0, -1).contiguous().transpose(0, -1)
        flipped = torch.cat([value + 7, value], dim=0)[value.shape[0] :]
        expanded = value[..., :1].expand(value.shape)
        assert not strided.is_contiguous() and not transposed.is_contiguous()
        for twin in (strided, transposed, flipped, expanded):
            cases.assert_same_state(scene.seeing(twin), scene.seeing(twin.contiguous().clone()))


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_parameters_that_need_gradients_are_observed(name: str) -> None:
    scene = cases.usual_scene(name)
    parameter = torch.nn.Parameter(scene.value(1))
    observer = scene.seeing(parameter)
    cases.assert_same_state(observer, scene.seeing(parameter.detach()))
    assert not observer.min_vals.requires_grad
    assert not observer.get_qparams()["scale"].requires_grad


@pytest.mark.parametrize("name", EVERY_OBSERVER)
@pytest.mark.parametrize("value", [[1.0, 2.0], None, 3.5, "weight"], ids=repr)
def test_what_is_not_a_tensor_is_refused(name: str, value: object) -> None:
    observer = cases.usual_scene(name).fresh()
    with pytest.raises(TypeError, match=f"an observer watches tensors, got {type(value).__name__}"):
        observer(value)
    assert not observer.has_statistics


# ---- masks and group maps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ON_ACTIVATIONS)
def test_a_mask_of_a_wrong_shape_is_refused(case: Case) -> None:
    for base_name in cases.ALIKE[case.base_name]:
        scene = case.scene(case.formats[0], base_name=base_name)
        value = scene.value(1, rows=2)
        observer = scene.seeing(value)
        before = cases.state(observer)
        for shape in ((2, 4), (3, 3), (2, 2), (4,), (2, 3, 2), (2, 1, 3, 3), (3, 2), value.shape):
            with pytest.raises(LayoutError) as caught:
                observer(value, mask=torch.ones(shape))
            assert isinstance(caught.value, ValueError)
            assert f"a mask of shape {tuple(shape)} does not fit tokens of shape (2, 3)" in str(caught.value)
        cases.assert_equal(cases.state(observer), before)


@pytest.mark.parametrize("case", ON_ACTIVATIONS)
def test_a_mask_that_is_meant_to_be_added_to_scores_is_refused(case: Case) -> None:
    scene = case.scene(case.formats[0])
    observer, value = scene.fresh(), scene.value(1, rows=2)
    for low in (-INF, torch.finfo(torch.float32).min):
        with pytest.raises(LayoutError, match=r"negative entries .*Give 1 for tokens that count and 0 for those"):
            observer(value, mask=torch.tensor([[0.0, 0.0, low], [0.0, low, low]]))
    assert not observer.has_statistics


@pytest.mark.parametrize("case", cases.cases_where(lambda c: c.base_name == "input" and c.strategy != "token"))
def test_a_mask_fits_tokens_that_were_flattened(case: Case) -> None:
    scene = case.scene(case.formats[0])
    value = scene.value(1, rows=2)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    expected = scene.fresh()(value, mask=mask)
    cases.assert_same_state(scene.fresh()(value.flatten(0, 1), mask=mask), expected)
    cases.assert_same_state(scene.fresh()(value.flatten(0, 1), mask=mask.flatten()), expected)
    cases.assert_same_state(scene.fresh()(value, mask=mask.flatten()), expected)


@pytest.mark.parametrize("case", cases.cases_where(lambda case: case.base_name == "weight"))
def test_a_mask_on_a_weight_is_refused(case: Case) -> None:
    scene = case.scene(case.formats[0])
    observer, value = scene.fresh(), scene.value(1)
    with pytest.raises(LayoutError, match="a mask leaves tokens out, and 'weight' has none"):
        observer(value, mask=torch.ones(value.shape[0]))
    assert not observer.has_statistics


@pytest.mark.parametrize("case", IN_GROUPS_OF_WEIGHTS)
def test_a_group_map_of_a_wrong_length_or_with_uneven_groups_is_refused(case: Case) -> None:
    for scene in case.scenes():
        size = scene.columns_step
        value = scene.value(1)
        good = torch.arange(2 * size) // size
        observer = scene.fresh()
        for g_idx in (good[:-1], torch.cat([good, good]), good.unsqueeze(0)):
            with pytest.raises(LayoutError) as caught:
                observer(value, g_idx=g_idx)
            assert f"g_idx has shape {tuple(g_idx.shape)}, and there are {2 * size} columns" in str(caught.value)
        uneven, negative, beyond = good.clone(), good.clone(), good * 5
        uneven[0] = 1
        negative[0] = -1
        for g_idx in (uneven, negative, beyond, torch.zeros_like(good)):
            with pytest.raises(LayoutError) as caught:
                observer(value, g_idx=g_idx)
            assert f"g_idx must name the groups 0 to 1 with {size} columns each" in str(caught.value)
            assert f"it names {len(g_idx.unique())} groups" in str(caught.value)
        assert f"0 ({2 * size} columns)" in str(caught.value)
        assert not observer.has_statistics


@pytest.mark.parametrize("case", cases.cases_where(lambda case: case.strategy not in ("group", "tensor_group")))
def test_a_group_map_where_there_are_no_groups_is_refused(case: Case) -> None:
    scene = case.scene(case.formats[0])
    value = scene.value(1)
    words = "g_idx names groups" if case.base_name == "weight" else "g_idx groups the columns of a weight"
    with pytest.raises(LayoutError, match=words):
        scene.fresh()(value, g_idx=torch.zeros(value.shape[-1], dtype=torch.int64))


# ---- knobs, names and arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_an_unknown_knob_is_refused_and_the_nearest_name_suggested(name: str) -> None:
    cls, args = registered_observers()[name], cases.make_args("int8", "tensor")
    names = [knob.name for knob in cls.knobs]
    listed = f"Knobs: {', '.join(sorted(names))}." if names else "It has none."
    for knob in names:
        for wrong in (f"{knob}_", knob[:-1], knob[:2] + "_" + knob[2:]):
            for given, kwargs in ((args, {wrong: 1}), (args.model_copy(update={"observer_kwargs": {wrong: 1}}), {})):
                with pytest.raises(KnobError) as caught:
                    cls("weight", given, **kwargs)
                assert isinstance(caught.value, ValueError)
                expected = f"observer '{name}' has no knob '{wrong}'. Did you mean '{knob}'? {listed}"
                assert str(caught.value) == expected
    with pytest.raises(KnobError) as caught:
        cls("weight", args, zzzzzzzzzz=1)
    assert str(caught.value) == f"observer '{name}' has no knob 'zzzzzzzzzz'. {listed}"


def _wrong_values(knob: Knob) -> list[object]:
    wrong: list[object] = [None, [1], "a lot"] if not isinstance(knob.default, str) else [None, 1]
    if isinstance(knob.default, bool):
        return [*wrong, 1, 0.5]
    if isinstance(knob.default, (int, float)):
        wrong += [True, NAN, INF, -INF]
        wrong += [knob.low - 1, knob.low - 0.001] if knob.low is not None else []
        wrong += [knob.high + 1, knob.high + 0.001] if knob.high is not None else []
        wrong += [knob.above, knob.above - 1] if knob.above is not None else []
        wrong += [knob.default + 0.5] if isinstance(knob.default, int) else []
    return wrong


@pytest.mark.parametrize(("name", "knob"), cases.EVERY_KNOB)
def test_a_knob_out_of_range_is_refused_and_the_bounds_named(name: str, knob: Knob) -> None:
    cls, args = registered_observers()[name], cases.make_args("int8", "tensor")
    for wrong in _wrong_values(knob):
        with pytest.raises(KnobError) as caught:
            cls("weight", args, **{knob.name: wrong})
        message = str(caught.value)
        assert message == f"observer '{name}': {knob.name} must be {knob.bounds}, got {wrong!r}."
        for words, bound in (("at least", knob.low), ("at most", knob.high), ("above", knob.above)):
            assert bound is None or f"{words} {bound:g}" in message
    for bound in (knob.low, knob.high):
        if bound is not None:
            assert getattr(cls("weight", args, **{knob.name: bound}), knob.name) == bound


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_an_unknown_observer_is_refused_and_the_nearest_name_suggested(name: str) -> None:
    args = cases.make_args("int8", "tensor")
    for wrong in (f"{name}x", f"{name[:3]}q{name[3:]}", f"{name}s".upper()):
        with pytest.raises(UnknownObserverError) as caught:
            Observer.load_from_registry(wrong, base_name="weight", args=args)
        message = str(caught.value)
        assert message.startswith(f"there is no observer '{wrong}'. Did you mean '{name}'? Observers: ")
        assert all(each in message for each in EVERY_OBSERVER)
        assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("wrong", ["", "zzzzzzzzzzzzzz", "somewhere.py:SomeClass", None, 3])
def test_a_name_that_is_near_nothing_is_refused_with_the_list(wrong: object) -> None:
    with pytest.raises(UnknownObserverError) as caught:
        Observer.load_from_registry(wrong, base_name="weight", args=cases.make_args("int8", "tensor"))
    assert str(caught.value).startswith(f"there is no observer {wrong!r}. Observers: ")


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_missing_or_wrong_arguments_are_refused(name: str) -> None:
    cls, args = registered_observers()[name], cases.make_args("int8", "tensor")
    for positional, keywords in (
        ((), {}),
        (("weight",), {}),
        (("weight", "int8"), {}),
        (("weight", {"num_bits": 8}), {}),
        ((args,), {}),
        (("weight", args), {"quantization_args": args}),
    ):
        with pytest.raises(TypeError) as caught:
            cls(*positional, **keywords)
        assert str(caught.value).startswith(
            f"{cls.__name__} takes a base name and QuantizationArgs, as args= or quantization_args=; got "
        )
    with pytest.raises(TypeError, match="takes a base name and QuantizationArgs"):
        Observer.load_from_registry(name)


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_observers_that_do_not_belong_together_do_not_merge(name: str) -> None:
    scene = cases.usual_scene(name)
    case, base_name = scene.case, scene.base_name
    observer = scene.seeing(scene.value(1))
    before = cases.state(observer)
    stranger_class = next(cls for cls in registered_observers().values() if cls is not case.cls)
    strangers = {
        f"{stranger_class.__name__} cannot be merged into {case.cls.__name__}": (stranger_class, base_name, scene.args),
        f"'output' cannot be merged into '{base_name}'": (case.cls, "output", scene.args),
        f"num_bits ({scene.args.num_bits} here, 3 there)": (
            case.cls,
            base_name,
            scene.args.model_copy(update={"num_bits": 3}),
        ),
    }
    for words, (cls, their_base_name, args) in strangers.items():
        with pytest.raises(MergeError) as caught:
            observer.merge(cls(their_base_name, args, **scene.knobs if cls is case.cls else {}))
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).startswith(f"{base_name}: ")
        assert words in str(caught.value)
    for knob in case.cls.knobs:
        if knob.name not in scene.knobs:
            with pytest.raises(MergeError, match=f"{knob.name} .*here, .*there"):
                observer.merge(scene.fresh(**{knob.name: cases.other_values(knob)[0]}))
    cases.assert_equal(cases.state(observer), before)


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_observers_merge_however_their_equal_knobs_were_given(name: str) -> None:
    scene = cases.usual_scene(name)
    defaults = {knob.name: knob.default for knob in scene.case.cls.knobs}
    spelled_out = scene.args.model_copy(update={"observer_kwargs": {**defaults, **scene.knobs}})
    other = scene.case.cls(scene.base_name, spelled_out)(scene.value(1))
    cases.assert_same_state(scene.fresh().merge(other), scene.seeing(scene.value(1)))


@pytest.mark.parametrize("case", cases.cases_where(lambda c: c.strategy in ("channel", "group", "tensor_group")))
def test_statistics_of_different_shapes_do_not_merge(case: Case) -> None:
    scene = case.scene(case.formats[0])
    one, other = scene.seeing(scene.value(1, rows=2, groups=2)), scene.seeing(scene.value(1, rows=3, groups=3))
    before = cases.state(one)
    with pytest.raises(MergeError, match=r"min_vals has shape \(.*\) here and \(.*\) there"):
        one.merge(other)
    cases.assert_equal(cases.state(one), before)


def _provoke(kind: str, observer: Observer, value: Tensor) -> None:
    if kind == "columns":
        observer(value[:, :-1])
    elif kind == "nan":
        observer(torch.full_like(value, NAN))
    elif kind == "mask":
        observer(value, mask=torch.ones(2))
    elif kind == "g_idx":
        observer(value, g_idx=torch.zeros(3))
    elif kind == "shape":
        observer(value)
        observer(value[:, : value.shape[1] // 2])
    elif kind == "list":
        observer([1.0])
    else:
        observer.get_qparams()


@pytest.mark.parametrize("kind", ["columns", "nan", "mask", "g_idx", "shape", "list", "nothing seen"])
def test_errors_begin_with_the_place_and_end_with_a_full_stop(kind: str) -> None:
    observer = Observer.load_from_registry("static_minmax", args=cases.make_args("int4", "group"))
    observer.label = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises((ScalewrightError, TypeError)) as caught:
        _provoke(kind, observer, cases.normal((2, 2 * cases.GROUP_SIZE), 1))
    message = str(caught.value)
    assert message.startswith("model.layers.0.mlp.up_proj.weight: ")
    assert message.count("model.layers.0") == 1
    assert message.endswith(".")
