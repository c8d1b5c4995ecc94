"""The laws that hold for every registered observer, wherever it can watch: what scales, merges and knobs must do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

import observer_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observer_cases import EVERY_CASE, EVERY_OBSERVER, LAW, LAW_BRIEFLY, LAW_IN_BREADTH, Case, Scene
from torch import Tensor

from scalewright.errors import NoStatisticsError, ScalewrightError
from scalewright.numerics.grids import grid_of
from scalewright.numerics.layout import spread_columns
from scalewright.numerics.measure import summed_error
from scalewright.observers import Observer, sync_statistics
from scalewright.observers.catalog import registered_observers
from scalewright.observers.knobs import Knob

ON_ACTIVATIONS = cases.cases_where(lambda case: case.base_name != "weight")
ORDERED = cases.cases_where(lambda case: case.cls.ordered)
IN_ANY_ORDER = cases.cases_where(lambda case: not case.cls.ordered)
SEARCHES = cases.cases_where(lambda case: cases.has_knob(case.cls, "norm"))
WEIGHED = cases.cases_where(lambda case: case.base_name == "weight" and cases.collects_importance(case.cls))
NO_ZEROS = ("normal", "outliers", "positive", "negative")


# ---- what the qparams do to values -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
@LAW
@given(data=st.data())
def test_fake_quantising_twice_changes_nothing_more(case: Case, data: st.DataObject) -> None:
    scene, [value] = data.draw(cases.scenes_and_values(case))
    qparams = scene.seeing(value).get_qparams()
    once = cases.fake_quantized(value, qparams, scene)
    twice = cases.fake_quantized(once, qparams, scene)
    assert bool(torch.isfinite(once).all())
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("case", cases.cases_where(lambda case: case.strategy != "tensor_group"))
@LAW
@given(data=st.data())
def test_integers_are_off_by_half_a_step_at_most_inside_the_range(case: Case, data: st.DataObject) -> None:
    scene, [value] = data.draw(cases.scenes_and_values(case).filter(lambda drawn: drawn[0].is_integer))
    qparams = scene.seeing(value).get_qparams()
    x = cases.flat(value.float(), scene)
    error = (cases.flat(cases.fake_quantized(value, qparams, scene), scene) - x).abs()
    step = qparams["scale"].float().unsqueeze(-1)
    low, high = cases.integer_ends(scene.args)
    zero_point = qparams["zero_point"].float().unsqueeze(-1)
    # The ends reach half a step beyond their numbers. Rounding of fp32 itself may add a little.
    inside = (x >= (low - 0.5 - zero_point) * step) & (x <= (high + 0.5 - zero_point) * step)
    assert bool(inside.any())
    assert bool((error <= step * 0.5 * (1 + 1e-4))[inside].all())


@pytest.mark.parametrize("case", EVERY_CASE)
@LAW
@given(data=st.data())
def test_scaling_by_a_power_of_two_scales_the_scale(case: Case, data: st.DataObject) -> None:
    drawn = cases.scenes_and_values(case, count=2, dtypes=(torch.float32, torch.bfloat16), kinds=NO_ZEROS)
    scene, values = data.draw(drawn)
    power = data.draw(st.integers(-60, 60))
    before = scene.seeing(*values).get_qparams()
    after = scene.seeing(*(value * 2.0**power for value in values)).get_qparams()
    if before["global_scale"] is None:
        torch.testing.assert_close(after["scale"], before["scale"] * 2.0**power, rtol=0.0, atol=0.0)
    else:
        torch.testing.assert_close(after["scale"], before["scale"], rtol=0.0, atol=0.0)
        torch.testing.assert_close(after["global_scale"], before["global_scale"] * 2.0**-power, rtol=0.0, atol=0.0)
    torch.testing.assert_close(after["zero_point"].float(), before["zero_point"].float(), rtol=0.0, atol=0.0)


# ---- batches, halves and ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", IN_ANY_ORDER)
@LAW_BRIEFLY
@given(data=st.data())
def test_permuting_batches_changes_nothing_unless_the_class_is_ordered(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=3))
    if not scene.fresh().remembers:
        last = scene.seeing(values[-1])
        last.num_observed = len(values)
        cases.assert_same_state(scene.seeing(*values), last)
        return
    permuted = data.draw(st.permutations(values))
    cases.assert_same_state(scene.seeing(*permuted), scene.seeing(*values), summed=True)


@pytest.mark.parametrize("case", ORDERED)
def test_an_ordered_class_does_depend_on_the_order(case: Case) -> None:
    scene = case.scene(case.formats[0])
    values = [scene.value(seed) * size for seed, size in enumerate((1.0, 3.0, 9.0))]
    first, *others = (cases.state(scene.seeing(*some)) for some in permutations(values))
    assert any(cases.differs(other, first) for other in others), "it says ordered=True, and no order matters"


@pytest.mark.parametrize("case", IN_ANY_ORDER)
@LAW_BRIEFLY
@given(data=st.data())
def test_merging_two_halves_equals_seeing_both(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=3, with_importance=False))
    if not scene.fresh().remembers:
        # A weight is one tensor: ranks that hold the same one stay as they are.
        values = [values[0]] * 3
    cut = data.draw(st.integers(1, 2))
    one, other = scene.seeing(*values[:cut]), scene.seeing(*values[cut:])
    other_before = cases.state(other)
    assert one.merge(other) is one
    cases.assert_same_state(one, scene.seeing(*values), summed=True)
    cases.assert_equal(cases.state(other), other_before)


@pytest.mark.parametrize("case", ORDERED)
@LAW_BRIEFLY
@given(data=st.data())
def test_merging_ordered_halves_equals_seeing_one_after_the_other(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=4))
    cut = data.draw(st.integers(1, 3))
    one, other = scene.seeing(*values[:cut]), scene.seeing(*values[cut:])
    other_before = cases.state(other)
    assert one.merge(other) is one
    # Statistics alone: a merge cannot search weights again under the global scale of both.
    cases.assert_equal(cases.statistics(one), cases.statistics(scene.seeing(*values)), rtol=1.2e-7)
    cases.assert_equal(cases.state(other), other_before)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_merging_with_an_observer_that_saw_nothing_changes_nothing(case: Case) -> None:
    scene = case.scene(case.formats[0])
    value = scene.value(1, torch.bfloat16)
    seen, unseen = scene.seeing(value), scene.fresh()
    cases.assert_same_state(seen.merge(scene.fresh()), scene.seeing(value))
    cases.assert_same_state(unseen.merge(seen), scene.seeing(value))
    assert not scene.fresh().merge(scene.fresh()).has_statistics


@pytest.mark.parametrize("case", WEIGHED)
def test_importance_of_two_halves_merges_into_that_of_both(case: Case) -> None:
    for scene in case.scenes():
        weight = scene.value(1)
        inputs = [cases.make_values("outliers", (5, weight.shape[-1]), seed) for seed in (2, 3)]
        one, other, both = (replace(scene, importance_input=x).fresh() for x in (*inputs, torch.cat(inputs)))
        one.merge(other)
        cases.assert_same_state(one(weight), both(weight), summed=True)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_sync_without_a_process_group_does_nothing(case: Case) -> None:
    scene = case.scene(case.formats[0])
    seen, unseen = scene.seeing(scene.value(1)), scene.fresh()
    assert seen.sync_activation_stats() == []
    assert unseen.sync_activation_stats() == []
    sync_statistics([seen, unseen])
    cases.assert_same_state(seen, scene.seeing(scene.value(1)))
    assert not unseen.has_statistics


# ---- search and importance -------------------------------------------------------------------------------------


def _own_errors(scene: Scene, value: Tensor) -> tuple[Tensor, Tensor]:
    """What the observer and min-max lose at each position, by the observer's own measure."""
    observer = scene.seeing(value)
    plain = registered_observers()["memoryless_minmax"](scene.base_name, scene.args)(value)
    weights = None
    if scene.importance_input is not None:
        importance = scene.importance_input.square().mean(dim=0)
        weights = spread_columns(importance, tuple(value.shape), scene.args)
    x = cases.flat(value, scene)
    found, reference = (
        summed_error(
            x,
            cases.effective_scale(qparams),
            None if scene.args.symmetric else qparams["zero_point"],
            grid_of(scene.args),
            norm=cases.own_norm(scene, observer),
            weights_NQG=weights,
        ).sum(dim=0)
        for qparams in (observer.get_qparams(), plain.get_qparams())
    )
    return found, reference


@pytest.mark.parametrize("case", SEARCHES)
@LAW
@given(data=st.data())
def test_a_search_is_never_worse_than_min_max_by_its_own_measure(case: Case, data: st.DataObject) -> None:
    scene, [value] = data.draw(cases.scenes_and_values(case, dtypes=(torch.float32, torch.bfloat16)))
    value = value.bfloat16().to(value.dtype)  # records of bf16 codes hold such values as they are
    found, reference = _own_errors(scene, value)
    assert bool((found <= reference * (1 + 1e-5)).all()), f"{found} where min-max has {reference}"


@pytest.mark.parametrize("case", SEARCHES)
def test_a_search_finds_something_better_than_min_max(case: Case) -> None:
    scene = case.scene("nvfp4" if case.strategy == "tensor_group" else "int4", coarse=False)
    value = scene.value(7, rows=4, groups=4).bfloat16().float()
    found, reference = _own_errors(scene, value)
    assert float(found.sum()) < 0.99 * float(reference.sum())


@pytest.mark.parametrize("case", WEIGHED)
@LAW
@given(data=st.data())
def test_equal_importance_equals_no_importance(case: Case, data: st.DataObject) -> None:
    scene, [weight] = data.draw(cases.scenes_and_values(case, with_importance=False))
    size, tokens = data.draw(st.sampled_from((0.25, 1.0, 8.0))), data.draw(st.integers(1, 3))
    if cases.squares_weighed_errors(case.cls):
        scene = replace(scene, knobs={**scene.knobs, "norm": 2.0})
    equal = replace(scene, importance_input=torch.full((tokens, weight.shape[-1]), size))
    weighed, unweighed = equal.seeing(weight), scene.seeing(weight)
    assert weighed.channel_importance is not None and unweighed.channel_importance is None
    cases.assert_equal(weighed.get_qparams(), unweighed.get_qparams())


@pytest.mark.parametrize("case", WEIGHED)
def test_importance_that_is_not_equal_changes_the_result(case: Case) -> None:
    def changes(scene: Scene, seed: int) -> bool:
        weight = scene.value(seed, rows=4, groups=4)
        first_columns = torch.where(torch.arange(weight.shape[-1]) % 4 == 0, 100.0, 0.01)
        weighed = replace(scene, importance_input=first_columns.unsqueeze(0)).seeing(weight)
        return cases.differs(weighed.get_qparams(), scene.seeing(weight).get_qparams())

    assert any(changes(scene, seed) for scene in case.scenes(coarse=False) for seed in range(3))


# ---- knobs -----------------------------------------------------------------------------------------------------


def _outcome(scene: Scene, values: Iterable[Tensor], **knobs: object) -> dict[str, object]:
    try:
        return cases.state(scene.seeing(*values, **knobs))
    except ScalewrightError as error:
        return {"error": type(error).__name__}


@pytest.mark.parametrize(("name", "knob"), cases.knobs_where(lambda knob: knob.changes == "result"))
def test_turning_a_knob_changes_something(name: str, knob: Knob) -> None:
    def inputs() -> Iterable[tuple[Scene, list[Tensor]]]:
        for param in EVERY_CASE:
            case = param.values[0]
            for scene in case.scenes(coarse=False) if case.name == name else ():
                shape = scene.shape(rows=4, groups=4)
                values = [cases.make_values(kind, shape, 11) for kind in ("outliers", "normal")]
                yield scene, values
                if case.base_name == "weight" and cases.collects_importance(case.cls):
                    yield replace(scene, importance_input=cases.make_values("outliers", (4, shape[-1]), 12)), values

    others = cases.other_values(knob)
    assert others, f"there is no other value for {knob}"
    for scene, values in inputs():
        default = _outcome(scene, values)
        if any(cases.differs(_outcome(scene, values, **{knob.name: other}), default) for other in others):
            return
    pytest.fail(f"{knob.name} changes nothing")


@pytest.mark.parametrize(("name", "knob"), cases.knobs_where(lambda knob: knob.changes == "time"))
@LAW_IN_BREADTH
@given(data=st.data())
def test_a_knob_that_only_changes_time_never_changes_the_result(name: str, knob: Knob, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([param.values[0] for param in EVERY_CASE if param.values[0].name == name]))
    scene, values = data.draw(cases.scenes_and_values(case, count=2))
    scene = replace(scene, knobs={})
    value = data.draw(st.sampled_from(cases.other_values(knob)))
    cases.assert_same_state(scene.seeing(*values, **{knob.name: value}), scene.seeing(*values))


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_knobs_stand_as_attributes_and_come_from_keywords_or_from_the_args(name: str) -> None:
    cls, args = registered_observers()[name], cases.usual_scene(name).args
    for knob in cls.knobs:
        assert getattr(cls("weight", args), knob.name) == knob.default
        for value in cases.other_values(knob):
            with_kwargs = args.model_copy(update={"observer_kwargs": {knob.name: value}})
            for observer in (cls("weight", args, **{knob.name: value}), cls("weight", with_kwargs)):
                assert getattr(observer, knob.name) == value
            overruled = cls("weight", with_kwargs, **{knob.name: knob.default})
            assert getattr(overruled, knob.name) == knob.default


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_constructing_and_observing_never_change_the_args(name: str) -> None:
    case = cases.first_case(name)
    knobs = {knob.name: cases.other_values(knob)[0] for knob in case.cls.knobs if not isinstance(knob.default, bool)}
    for scene in case.scenes():
        for kwargs in ({}, dict(list(knobs.items())[:1])):
            args = scene.args.model_copy(deep=True, update={"observer_kwargs": kwargs})
            before, kwargs_before = copy.deepcopy(args.model_dump()), dict(kwargs)
            turned = case.cls(scene.base_name, args, **knobs)
            Observer.load_from_registry(name, base_name=scene.base_name, args=args, **knobs)
            turned(scene.value(1)).get_qparams()
            assert args.observer_kwargs is kwargs
            assert kwargs == kwargs_before
            assert args.model_dump() == before
            # What one observer was told does not leak into the next one.
            assert {k: getattr(case.cls(scene.base_name, args), k) for k in knobs} == {
                knob.name: kwargs.get(knob.name, knob.default) for knob in case.cls.knobs if knob.name in knobs
            }
            turned.args.observer_kwargs["later"] = 1
            assert args.observer_kwargs == kwargs_before


# ---- reading, forgetting, and what is left of a value ----------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_CASE)
@LAW_BRIEFLY
@given(data=st.data())
def test_reading_changes_nothing_and_observing_goes_on_after_it(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=2))
    observer = scene.seeing(values[0])
    first = cases.state(observer)
    for read in observer.get_qparams().values():
        if read is not None:
            read.zero_()  # what is read belongs to the reader
    cases.assert_equal(cases.state(observer), first)
    cases.assert_same_state(observer(values[1]), scene.seeing(*values))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_value_is_not_changed_and_may_be_changed_afterwards(case: Case) -> None:
    for form in case.formats[:2]:
        scene = case.scene(form)
        value = scene.value(1)
        given_value = value.clone()
        observer = scene.seeing(given_value)
        torch.testing.assert_close(given_value, value, rtol=0.0, atol=0.0)
        before = cases.state(observer)
        given_value.fill_(1000.0)
        cases.assert_equal(cases.state(observer), before)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_value_is_worked_on_where_it_is_whatever_the_default_device(case: Case) -> None:
    for form in case.formats:
        scene = case.scene(form)
        value = scene.value(1)
        expected = cases.state(scene.seeing(value))
        # Compiled loops that wrote to memory of this device would end the process.
        with torch.device("meta"):
            found = cases.state(scene.seeing(value))
        cases.assert_equal(found, expected)


@pytest.mark.parametrize("case", EVERY_CASE)
@LAW_BRIEFLY
@given(data=st.data())
def test_reset_forgets_everything(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=3))
    observer = scene.seeing(*values[:2])
    observer.get_qparams()
    observer.reset()
    assert not observer.has_statistics
    assert observer.num_observed_tokens == 0
    cases.assert_equal(cases.statistics(observer), cases.statistics(replace(scene, importance_input=None).fresh()))
    with pytest.raises(NoStatisticsError):
        observer.get_qparams()
    scene.feed_importance(observer)
    cases.assert_same_state(observer(values[2]), scene.seeing(values[2]))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_reset_observer_takes_values_of_another_shape_and_dtype(case: Case) -> None:
    scene = case.scene(case.formats[0])
    observer = scene.seeing(scene.value(1, torch.bfloat16, groups=3))
    observer.reset()
    value = scene.value(2, groups=1, rows=1)
    cases.assert_same_state(observer(value), scene.seeing(value))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_the_result_unpacks_into_scale_and_zero_point(case: Case) -> None:
    for scene in case.scenes():
        observer, value = scene.fresh(), scene.value(1)
        assert observer(value) is observer
        scale, zero_point = observer
        qparams = observer.get_qparams()
        assert qparams.keys() == {"scale", "zero_point", "global_scale"}
        assert (qparams["global_scale"] is None) == (case.strategy != "tensor_group")
        unpacked = {"scale": scale, "zero_point": zero_point, "global_scale": qparams["global_scale"]}
        cases.assert_equal(unpacked, dict(qparams))
        cases.assert_sound(qparams, scene)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_statistics_are_fp32_or_counts_whatever_the_dtype(case: Case) -> None:
    scene = case.scene(case.formats[0])
    positions = cases.flat(scene.value(1), scene).shape[1:-1]
    for dtype in cases.DTYPES:
        observer = scene.seeing(scene.value(1, dtype), scene.value(2, dtype))
        found = {name: getattr(observer, name) for name in case.cls.merge_rules}
        kinds = {name: value.dtype for name, value in found.items() if value is not None}
        assert set(kinds.values()) <= {torch.float32, torch.float64, torch.int64}, kinds
        assert observer.min_vals.shape == observer.max_vals.shape == positions
        scale, zero_point = observer
        assert scale.shape == zero_point.shape == positions


# ---- tokens, masks and shapes ----------------------------------------------------------------------------------


def _kept_tokens(value: Tensor, keep: Tensor, scene: Scene) -> Tensor:
    """The value with only the tokens that count; under TOKEN, where places are positions, the others are zero."""
    if scene.case.strategy == "token":
        return value * keep.unsqueeze(-1)
    if scene.base_name in cases.ATTENTION:
        return value.transpose(1, 2)[keep].transpose(0, 1).unsqueeze(0)
    return value[keep]


@pytest.mark.parametrize("case", ON_ACTIVATIONS)
@LAW_BRIEFLY
@given(data=st.data())
def test_a_mask_equals_observing_only_the_kept_tokens(case: Case, data: st.DataObject) -> None:
    scene, values = data.draw(cases.scenes_and_values(case, count=2))
    value = values[0]
    batch, tokens = value.shape[0], value.shape[-2]
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * tokens, max_size=batch * tokens)))
    keep[data.draw(st.integers(0, batch * tokens - 1))] = True
    keep = keep.reshape(batch, tokens)
    mask = keep.to(data.draw(st.sampled_from((torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16))))
    spread = keep.unsqueeze(1) if scene.base_name in cases.ATTENTION else keep
    garbage = data.draw(st.sampled_from((1e4, float("nan"), float("inf"))))
    padded = value.masked_fill(~spread.unsqueeze(-1), garbage)

    masked = scene.fresh()(padded, mask=mask)
    assert masked.num_observed_tokens == int(keep.sum())
    expected = scene.seeing(_kept_tokens(value, keep, scene))
    expected.num_observed = int(keep.sum())
    cases.assert_same_state(masked, expected)

    before = cases.state(masked)
    cases.assert_equal(cases.state(masked(padded, mask=torch.zeros_like(mask))), before)
    cases.assert_equal(
        cases.state(masked(values[1], mask=torch.ones(values[1].shape[0], values[1].shape[-2]))),
        cases.state(expected(values[1])),
    )


@pytest.mark.parametrize("case", EVERY_CASE)
def test_tokens_are_counted_for_activations_only(case: Case) -> None:
    for base_name in cases.ALIKE[case.base_name]:
        scene = case.scene(case.formats[0], base_name=base_name)
        values = [scene.value(1), scene.value(2, rows=1, tokens=5)]
        expected = 0 if base_name == "weight" else sum(value.shape[0] * value.shape[-2] for value in values)
        assert scene.seeing(*values[:1] * 2 if base_name == "weight" else values).num_observed_tokens == expected
        assert scene.fresh().num_observed_tokens == 0


@pytest.mark.parametrize("case", cases.cases_where(lambda case: case.base_name == "input"))
@LAW_BRIEFLY
@given(data=st.data())
def test_activations_of_two_and_four_dimensions_are_observed_like_those_of_three(
    case: Case, data: st.DataObject
) -> None:
    scene, [value] = data.draw(cases.scenes_and_values(case))
    stacked = torch.stack([value, value * 0.5])
    if case.strategy == "token":  # the last dimension but one counts positions
        cases.assert_same_state(scene.seeing(value[0]), scene.seeing(value[:1]))
    else:
        cases.assert_same_state(scene.seeing(value.flatten(0, 1)), scene.seeing(value))
    cases.assert_same_state(scene.seeing(stacked), scene.seeing(stacked.flatten(0, 1)))


@pytest.mark.parametrize(
    "case", cases.cases_where(lambda c: c.strategy in ("group", "tensor_group") and c.base_name == "weight")
)
@LAW
@given(data=st.data())
def test_a_group_map_equals_observing_the_permuted_weight(case: Case, data: st.DataObject) -> None:
    scene, [weight] = data.draw(cases.scenes_and_values(case))
    columns = weight.shape[-1]
    shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    g_idx = (torch.arange(columns) // scene.columns_step)[shuffled]
    order = torch.argsort(g_idx, stable=True)
    permuted = scene
    if scene.importance_input is not None:
        permuted = replace(scene, importance_input=scene.importance_input[:, order])
    mapped = scene.fresh()(weight, g_idx=g_idx.to(data.draw(st.sampled_from((torch.int64, torch.int32)))))
    expected = permuted.seeing(weight[:, order])
    cases.assert_equal(mapped.get_qparams(), expected.get_qparams())
    torch.testing.assert_close(mapped.min_vals, expected.min_vals, rtol=0.0, atol=0.0)
    torch.testing.assert_close(mapped.max_vals, expected.max_vals, rtol=0.0, atol=0.0)


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_names_ignore_case_hyphens_and_underscores(name: str) -> None:
    case = cases.first_case(name)
    spellings = {
        name,
        name.upper(),
        name.title(),
        name.replace("_", "-"),
        name.replace("_", ""),
        "_".join(name.replace("_", "")),
        "-".join(name.upper()),
    }
    for spelling in spellings:
        assert Observer.get_value_from_registry(spelling) is case.cls
        observer = Observer.load_from_registry(spelling, base_name="input", args=cases.usual_scene(name).args)
        assert type(observer) is case.cls
        assert observer.base_name == "input"


@pytest.mark.parametrize("name", EVERY_OBSERVER)
def test_without_a_base_name_a_weight_is_meant(name: str) -> None:
    args = cases.usual_scene(name).args
    assert Observer.load_from_registry(name, quantization_args=args).base_name == "weight"
