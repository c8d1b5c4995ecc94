"""The exception tree: who derives from whom, and how a short fact learns where it happened."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from scalewright import errors
from scalewright.observers import Observer

TREE = {
    "LayoutError": ValueError,
    "NonFiniteError": ValueError,
    "KnobError": ValueError,
    "ImportanceError": ValueError,
    "RegistrationError": ValueError,
    "UnknownObserverError": KeyError,
    "NoStatisticsError": AssertionError,
    "MergeError": ValueError,
}


@pytest.mark.parametrize(("name", "builtin"), TREE.items())
def test_each_error_is_ours_and_the_natural_builtin(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, errors.ScalewrightError)
    assert issubclass(error, builtin)


def test_the_tree_drawn_in_the_docstring_has_every_error_and_its_builtin():
    ours = {
        name: each
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.ScalewrightError) and each is not errors.ScalewrightError
    }
    assert set(TREE) <= set(ours)
    for name, each in ours.items():
        line = next(line for line in errors.__doc__.splitlines() if f" {name} " in line)
        assert f"({each.__mro__[2].__name__})" in line


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_told_where_it_happened_and_stays_what_it_is(name):
    error = getattr(errors, name)("7 columns, and 8 are needed. Add one.")
    placed = error.at("model.layers.3")
    assert type(placed) is type(error)
    assert str(placed) == "model.layers.3: 7 columns, and 8 are needed. Add one."
    assert str(error) == "7 columns, and 8 are needed. Add one."


def test_a_key_error_of_ours_is_not_shown_in_quotes():
    assert str(errors.UnknownObserverError("there is no 'x'.")) == "there is no 'x'."


def test_an_error_without_a_text_is_shown_as_nothing():
    assert str(errors.ScalewrightError()) == ""


INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
GROUPS_OF_96 = QuantizationArgs(num_bits=4, strategy="group", group_size=96)
TOKENS = torch.ones(2, 3, 96)


@pytest.mark.parametrize(
    ("name", "base_name", "args", "value", "options"),
    [
        ("minmax", "weight", GROUPS_OF_96, torch.ones(2, 11008), {}),
        ("minmax", "weight", GROUPS_OF_96, torch.ones(2, 7), {}),
        ("minmax", "weight", GROUPS_OF_96, torch.ones(2, 96), {"g_idx": torch.zeros(5)}),
        ("minmax", "weight", GROUPS_OF_96, torch.ones(2, 192), {"g_idx": torch.zeros(192)}),
        ("minmax", "weight", INT8, torch.ones(2, 96), {"g_idx": torch.zeros(96)}),
        ("minmax", "weight", INT8, torch.ones(2, 96), {"mask": torch.ones(2)}),
        ("minmax", "weight", INT8, torch.tensor(1.0), {}),
        ("minmax", "weight", INT8, torch.tensor([float("nan")]), {}),
        ("minmax", "weight", INT8, torch.tensor([1e300], dtype=torch.float64), {}),
        ("minmax", "bias", INT8, TOKENS, {}),
        ("minmax", "q", INT8, TOKENS, {}),
        ("minmax", "input", INT8, TOKENS, {"mask": torch.ones(2, 4)}),
        ("minmax", "input", INT8, TOKENS, {"g_idx": torch.zeros(96)}),
        ("minmax", "input", QuantizationArgs(num_bits=8, strategy="channel"), TOKENS, {}),
        ("percentile", "input", GROUPS_OF_96, TOKENS, {}),
    ],
)
def test_an_observer_says_where_what_is_wrong_and_what_to_do(name, base_name, args, value, options):
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    observer.label = "model.layers.3.mlp.down_proj"
    with pytest.raises(errors.ScalewrightError) as caught:
        observer(value, **options)
    text = str(caught.value)
    assert text.startswith("model.layers.3.mlp.down_proj: ")
    assert text.count("model.layers.3.mlp.down_proj") == 1
    assert text.count(". ") >= 1 and text.endswith(".") and not text.endswith("..")
