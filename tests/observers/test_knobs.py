"""Knobs: one declaration gives the check, the error text and the default."""

import pytest
from compressed_tensors.quantization import QuantizationArgs

from scalewright.errors import KnobError
from scalewright.observers import Knob, Observer
from scalewright.observers.knobs import parse_knobs, with_defaults

SHARE = Knob("share", 0.5, "a share", low=0, high=1)
COUNT = Knob("count", 3, "how many", low=0)
POWER = Knob("power", 2.0, "a power", above=0)
FLAG = Knob("flag", False, "on or off")
KIND = Knob("kind", "soft", "which kind", choices=("soft", "hard"))
TEXT = Knob("text", "abc", "any text")
KNOBS = (SHARE, COUNT, POWER, FLAG, KIND, TEXT)

GOOD = [
    (SHARE, 0, 0.0),
    (SHARE, 1, 1.0),
    (SHARE, 0.25, 0.25),
    (COUNT, 0, 0),
    (COUNT, 7.0, 7),
    (POWER, 1e-9, 1e-9),
    (POWER, 3, 3.0),
    (FLAG, True, True),
    (KIND, "hard", "hard"),
    (TEXT, "", ""),
]
BAD = [
    (SHARE, -0.01, "share must be a number at least 0 and at most 1, got -0.01"),
    (SHARE, 1.01, "share must be a number at least 0 and at most 1, got 1.01"),
    (SHARE, True, "share must be a number at least 0 and at most 1, got True"),
    (SHARE, "0.5", "share must be a number at least 0 and at most 1, got '0.5'"),
    (SHARE, None, "share must be a number at least 0 and at most 1, got None"),
    (SHARE, float("nan"), "share must be a number at least 0 and at most 1, got nan"),
    (COUNT, 2.5, "count must be a whole number at least 0, got 2.5"),
    (COUNT, -1, "count must be a whole number at least 0, got -1"),
    (COUNT, float("inf"), "count must be a whole number at least 0, got inf"),
    (POWER, 0, "power must be a number above 0, got 0"),
    (POWER, float("inf"), "power must be a number above 0, got inf"),
    (POWER, [2], r"power must be a number above 0, got \[2\]"),
    (FLAG, 1, "flag must be true or false, got 1"),
    (FLAG, "true", "flag must be true or false, got 'true'"),
    (KIND, "medium", "kind must be soft or hard, got 'medium'"),
    (TEXT, 5, "text must be text, got 5"),
]


@pytest.mark.parametrize(("knob", "given", "expected"), GOOD)
def test_a_value_inside_the_bounds_becomes_the_type_of_the_default(knob, given, expected):
    found = knob.parse(given)
    assert found == expected
    assert type(found) is type(knob.default)


@pytest.mark.parametrize(("knob", "given", "message"), BAD)
def test_a_value_outside_the_bounds_is_an_error_that_says_what_the_knob_takes(knob, given, message):
    with pytest.raises(KnobError, match=message):
        knob.parse(given)


def test_every_knob_gets_a_value():
    assert parse_knobs("some", KNOBS, {"count": 4}) == {
        "share": 0.5,
        "count": 4,
        "power": 2.0,
        "flag": False,
        "kind": "soft",
        "text": "abc",
    }


def test_a_bad_value_is_an_error_that_names_the_observer():
    with pytest.raises(KnobError, match=r"^observer 'some': share must be a number at least 0 and at most 1, got 2\.$"):
        parse_knobs("some", KNOBS, {"share": 2})


def test_an_unknown_knob_is_an_error_that_names_the_nearest_and_all():
    with pytest.raises(KnobError) as caught:
        parse_knobs("some", KNOBS, {"shares": 1})
    assert str(caught.value) == (
        "observer 'some' has no knob 'shares'. Did you mean 'share'? Knobs: count, flag, kind, power, share, text."
    )


def test_an_unknown_knob_that_is_near_to_none_gets_no_suggestion():
    with pytest.raises(KnobError) as caught:
        parse_knobs("some", (SHARE,), {"zzz": 1})
    assert str(caught.value) == "observer 'some' has no knob 'zzz'. Knobs: share."


def test_an_observer_without_knobs_says_so():
    with pytest.raises(KnobError, match=r"observer 'static_minmax' has no knob 'grid'\. It has none\."):
        Observer.load_from_registry("static_minmax", args=QuantizationArgs(num_bits=8), grid=5)


def test_other_defaults_leave_bounds_and_help_alone():
    (changed, same) = with_defaults((SHARE, COUNT), share=0.75)
    assert (changed.default, changed.low, changed.high, changed.help) == (0.75, 0, 1, "a share")
    assert same == COUNT
    assert SHARE.default == 0.5


def test_a_default_for_a_knob_that_is_not_there_is_a_mistake_of_ours():
    with pytest.raises(AssertionError):
        with_defaults((SHARE,), shares=0.75)


@pytest.mark.parametrize(
    ("knob", "bounds"),
    [
        (SHARE, "a number at least 0 and at most 1"),
        (COUNT, "a whole number at least 0"),
        (POWER, "a number above 0"),
        (FLAG, "true or false"),
        (KIND, "soft or hard"),
        (TEXT, "text"),
        (Knob("free", 1.0, "any number"), "a number"),
    ],
)
def test_the_bounds_are_said_in_words(knob, bounds):
    assert knob.bounds == bounds


# ---- the knobs of the observers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knob", "value"),
    [
        ("minmax", "averaging_constant", 0),
        ("minmax", "averaging_constant", 1.5),
        ("mse", "maxshrink", 1.1),
        ("mse", "maxshrink", -0.1),
        ("mse", "grid", 0),
        ("mse", "patience", -1),
        ("mse", "norm", 0),
        ("mse", "norm", float("inf")),
        ("memoryless_mse", "expand", 0.99),
        ("imatrix_mse", "strict", "yes"),
        ("imatrix_mse", "grid", -5),
        ("percentile", "percentile", 0),
        ("percentile", "percentile", 100.1),
        ("entropy", "bins", 100),
    ],
)
def test_a_knob_out_of_range_is_refused_when_the_observer_is_made(name, knob, value):
    with pytest.raises(KnobError, match=f"^observer '{name}': {knob} must be ") as caught:
        Observer.load_from_registry(name, args=QuantizationArgs(num_bits=8, strategy="tensor"), **{knob: value})
    assert isinstance(caught.value, ValueError)


def test_a_knob_may_stand_in_the_args_and_a_keyword_goes_before_it():
    args = QuantizationArgs(num_bits=8, observer_kwargs={"maxshrink": 0.3, "grid": 50})
    observer = Observer.load_from_registry("mse", args=args, grid=25)
    assert (observer.maxshrink, observer.grid) == (0.3, 25.0)
    assert observer.args.observer_kwargs == {"maxshrink": 0.3, "grid": 25}
    assert args.observer_kwargs == {"maxshrink": 0.3, "grid": 50}
