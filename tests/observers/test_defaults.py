"""Which observer is taken: the one that is named, to the letter, or else the best for the format."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from scalewright.errors import KnobError, UnknownObserverError
from scalewright.observers import default_observer, make_observer


def int8(**options) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, **{"strategy": "tensor", **options})


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8", "NVFP4", "MXFP4", "FP8_BLOCK"])
def test_weights_of_every_scheme_get_optimal(scheme):
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    assert default_observer("weight", args) == "optimal"


@pytest.mark.parametrize("base_name", ["input", "output", "q", "k", "v"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_static_integers_get_the_balanced_record(base_name, symmetric):
    assert default_observer(base_name, int8(symmetric=symmetric)) == "balanced_mse"


def test_heads_have_records_of_their_own():
    assert default_observer("k", int8(strategy="attn_head")) == "balanced_mse"


@pytest.mark.parametrize("args", [int8(strategy="group", group_size=16), int8(strategy="token", dynamic=True)])
def test_integers_of_strategies_without_a_record_get_the_extremes(args):
    assert default_observer("input", args) == "static_minmax"


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4"])
def test_static_floats_get_the_extremes(scheme):
    args = preset_name_to_scheme(scheme, ["Linear"]).input_activations.model_copy(update={"observer": None})
    assert default_observer("input", args) == "static_minmax"
    assert make_observer("input", args).registry_name == "static_minmax"


@pytest.mark.parametrize("base_name", ["weight", "input"])
def test_a_named_observer_is_obeyed_with_its_knobs(base_name):
    args = int8(observer="minmax", observer_kwargs={"averaging_constant": 0.5})
    observer = make_observer(base_name, args)
    assert observer.registry_name == "minmax"
    assert observer.averaging_constant == 0.5


def test_knobs_without_a_name_are_those_of_the_default():
    observer = make_observer("weight", QuantizationArgs(num_bits=4, strategy="channel", observer_kwargs={"norm": 2.0}))
    assert (observer.registry_name, observer.norm) == ("optimal", 2.0)
    with pytest.raises(KnobError, match="observer 'optimal' has no knob 'maxshrink'"):
        make_observer("weight", QuantizationArgs(num_bits=4, strategy="channel", observer_kwargs={"maxshrink": 0.2}))


def test_a_name_that_nobody_has_is_an_error():
    with pytest.raises(UnknownObserverError, match="optimal"):
        make_observer("weight", int8(observer="optimall"))


def test_the_default_observer_works():
    torch.manual_seed(0)
    for base_name in ("weight", "input"):
        scale, _ = make_observer(base_name, int8())(torch.randn(2, 4, 8))
        assert torch.isfinite(scale).all()


@pytest.mark.parametrize(("num_bits", "is_wanted"), [(4, True), (7, True), (8, False)])
def test_importance_is_not_asked_for_where_it_gains_nothing(num_bits, is_wanted):
    args = QuantizationArgs(num_bits=num_bits, strategy="channel")
    assert args.observer is None
    assert make_observer("weight", args).wants_inputs is is_wanted
    named = args.model_copy(update={"observer": "optimal"})
    assert make_observer("weight", named).wants_inputs, "a named observer is obeyed"
    asked = args.model_copy(update={"observer_kwargs": {"importance": "auto"}})
    assert make_observer("weight", asked).wants_inputs, "and so is a knob"
