"""Recipes: every form means what it says, nothing is passed over, and errors name file, line and nearest name."""

from __future__ import annotations

import json
import re
import string
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
import yaml
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from scalewright.errors import RecipeError
from scalewright.modifiers import Modifier, QuantizationModifier
from scalewright.modifiers.schemes import scheme_names
from scalewright.recipe import Recipe, Stage

W4 = {"scheme": "W4A16"}
FP8 = {"scheme": "FP8_DYNAMIC"}
ONE = {"QuantizationModifier": W4}
FIRST, SECOND = QuantizationModifier(**W4), QuantizationModifier(**FP8)
EXAMPLE = "{QuantizationModifier: {scheme: W4A16}}"
FIELDS = (
    "It has: targets, ignore, scheme, group_size, config_groups, weights, input_activations, output_activations, "
    "kv_cache_scheme, weight_observer, activation_observer."
)


def recipe(*stages: tuple[str, list[Modifier]]) -> Recipe:
    return Recipe(tuple(Stage(name, tuple(modifiers)) for name, modifiers in stages))


def message(given: object) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(given)
    return str(caught.value)


def in_file(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- forms -----------------------------------------------------------------------------------------------------------

ALONE = recipe(("default", [FIRST]))
FORMS = {
    "a modifier": (FIRST, ALONE),
    "a recipe": (ALONE, ALONE),
    "modifiers:": ({"modifiers": ONE}, ALONE),
    "a class": (ONE, ALONE),
    "another mapping": (MappingProxyType({"modifiers": OrderedDict(ONE)}), ALONE),
    "modifiers: a list": ({"modifiers": [ONE]}, ALONE),
    "an object in a dict": ({"modifiers": [FIRST]}, ALONE),
    "an object alone in a dict": ({"modifiers": FIRST}, ALONE),
    "one of a class as a list": ({"modifiers": {"QuantizationModifier": [W4]}}, ALONE),
    "two of a class as a list": (
        {"modifiers": {"QuantizationModifier": [W4, FP8]}},
        recipe(("default", [FIRST, SECOND])),
    ),
    "modifiers: a list of two": (
        {"modifiers": [ONE, {"QuantizationModifier": FP8}]},
        recipe(("default", [FIRST, SECOND])),
    ),
    "objects": ([FIRST, SECOND], recipe(("default", [FIRST, SECOND]))),
    "a tuple": ((FIRST, SECOND), recipe(("default", [FIRST, SECOND]))),
    "classes in a list": ([ONE, {"QuantizationModifier": FP8}], recipe(("default", [FIRST, SECOND]))),
    "an object and a class": ([SECOND, ONE], recipe(("default", [SECOND, FIRST]))),
    "a stage": ({"quant_stage": {"quant_modifiers": ONE}}, recipe(("quant", [FIRST]))),
    "a stage, modifiers by another name": ({"quant_stage": {"other_modifiers": ONE}}, recipe(("quant", [FIRST]))),
    "a stage, plain modifiers": ({"quant_stage": {"modifiers": ONE}}, recipe(("quant", [FIRST]))),
    "a stage, a class": ({"quant_stage": ONE}, recipe(("quant", [FIRST]))),
    "a stage with two lots": (
        {"quant_stage": {"a_modifiers": ONE, "b_modifiers": {"QuantizationModifier": FP8}}},
        recipe(("quant", [FIRST, SECOND])),
    ),
    "two lots without a stage": (
        {"a_modifiers": ONE, "b_modifiers": {"QuantizationModifier": FP8}},
        recipe(("default", [FIRST, SECOND])),
    ),
    "stages, in order": (
        {"z_stage": {"z_modifiers": {"QuantizationModifier": FP8}}, "a_stage": {"a_modifiers": ONE}},
        recipe(("z", [SECOND]), ("a", [FIRST])),
    ),
    "a stage before loose modifiers": (
        {"z_stage": {"z_modifiers": {"QuantizationModifier": FP8}}, "modifiers": ONE},
        recipe(("z", [SECOND]), ("default", [FIRST])),
    ),
    "recipes in a list": (
        [{"modifiers": ONE}, {"modifiers": ONE}],
        recipe(("default", [FIRST]), ("default_2", [FIRST])),
    ),
    "lists in a list": ([[FIRST, SECOND], [FIRST]], recipe(("default", [FIRST, SECOND]), ("default_2", [FIRST]))),
    "anything in a list": (
        [FIRST, ALONE, "x_stage: {QuantizationModifier: {scheme: FP8_DYNAMIC}}", SECOND, FIRST],
        recipe(("default", [FIRST]), ("default_2", [FIRST]), ("x", [SECOND]), ("default_3", [SECOND, FIRST])),
    ),
    "stages of one name in two recipes": (
        [{"a_stage": ONE, "a_2_stage": ONE}, {"a_stage": {"QuantizationModifier": FP8}}],
        recipe(("a", [FIRST]), ("a_2", [FIRST]), ("a_3", [SECOND])),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form):
    written, expected = FORMS[form]
    assert Recipe.of(written) == expected


PLAIN_FORMS = [
    form for form, (written, _) in FORMS.items() if "Modifier(" not in repr(written) and "x_stage" not in repr(written)
]


@pytest.mark.parametrize(
    "as_text", [yaml.safe_dump, json.dumps, lambda data, **kw: json.dumps(data, indent="\t", **kw)]
)
@pytest.mark.parametrize("form", PLAIN_FORMS)
def test_a_text_or_file_means_what_the_same_data_mean(form, as_text, tmp_path):
    data, expected = FORMS[form]
    if form == "another mapping":
        data = {"modifiers": dict(ONE)}
    text = as_text(data, sort_keys=False)
    assert Recipe.of(text) == expected
    for name in ("recipe.yaml", "recipe.json", "recipe.YML", "recipe"):
        path = in_file(tmp_path, text, name)
        assert Recipe.of(path) == expected
        assert Recipe.of(str(path)) == expected


def test_the_plain_forms_are_many():
    assert len(PLAIN_FORMS) > 12


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("\ufeffmodifiers: " + EXAMPLE, encoding="utf-8")
    assert Recipe.of(path) == ALONE


def test_one_long_line_is_text_and_no_name_of_a_file():
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(40)]
    text = f"modifiers: {{QuantizationModifier: {{scheme: W4A16, ignore: [{', '.join(names)}]}}}}"
    assert Recipe.of(text).modifiers[0].ignore == names


def test_an_anchor_may_be_used_again():
    text = "a_stage: {QuantizationModifier: &w4 {scheme: W4A16}}\nb_stage: {QuantizationModifier: *w4}"
    assert Recipe.of(text) == recipe(("a", [FIRST]), ("b", [FIRST]))


@pytest.mark.parametrize("number", ["0.001", "1e-3", "1E-3", "1.0e-03", ".1e-2"])
def test_numbers_are_read_as_json_has_them(number):
    text = f"QuantizationModifier: {{scheme: W8A8, activation_observer: {{name: mse, averaging_constant: {number}}}}}"
    assert Recipe.of(text).modifiers[0].groups[0].scheme.input_activations.observer_kwargs == {
        "averaging_constant": 0.001
    }


def test_a_modifier_without_a_value_has_no_keywords():
    assert message("modifiers:\n  QuantizationModifier:\n") == (
        "recipe:2: QuantizationModifier does not say what to quantise to. Give scheme, config_groups, weights, "
        "input_activations, output_activations or kv_cache_scheme."
    )


# ---- the seed documents ----------------------------------------------------------------------------------------------

OBSERVED = """\
modifiers:
  QuantizationModifier:
    targets: ["Linear"]
    scheme: W8A8 # 8-bit Weights, 8-bit (Static) Activations
    {observer}
"""


@pytest.mark.parametrize(
    ("observer", "name", "knobs"),
    [
        ("", None, {}),
        ("activation_observer: minmax", "minmax", {}),
        ("activation_observer:\n      name: mse\n      averaging_constant: 0.01", "mse", {"averaging_constant": 0.01}),
    ],
)
def test_the_example_with_static_activations(observer, name, knobs):
    (modifier,) = Recipe.of(OBSERVED.format(observer=observer)).modifiers
    (group,) = modifier.groups
    inputs = group.scheme.input_activations
    assert group.targets == ["Linear"]
    assert (inputs.num_bits, inputs.type, inputs.strategy, inputs.dynamic) == (8, "int", "tensor", False)
    assert (inputs.observer, inputs.observer_kwargs) == (name, knobs)
    assert group.scheme.weights.observer is None
    assert modifier.data == "needed"


NESTED = """\
quantization_stage:
  quantization_modifiers:
    {modifier}:
      weights:
        observer: mse
        observer_kwargs:
          maxshrink: 0.1
          patience: 10
          averaging_constant: 0.05
          grid: 128.0
          norm: 2.0
        num_bits: 4
        type: int
        symmetric: true
        strategy: channel
      targets:
        - Linear
"""


def check_nested(parsed: Recipe) -> None:
    assert [stage.name for stage in parsed.stages] == ["quantization"]
    (group,) = parsed.modifiers[0].groups
    assert group.targets == ["Linear"]
    assert group.scheme.weights == QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="channel",
        observer="mse",
        observer_kwargs={"maxshrink": 0.1, "patience": 10, "averaging_constant": 0.05, "grid": 128.0, "norm": 2.0},
    )
    assert group.scheme.input_activations is None


@pytest.mark.parametrize("modifier", ["QuantizationModifier", "GPTQModifier"])
def test_the_example_with_weights_on_the_modifier(modifier):
    check_nested(Recipe.of(NESTED.format(modifier=modifier)))


# ---- writing ---------------------------------------------------------------------------------------------------------

_texts = st.text(string.printable + "äß漢\x85\u2028", min_size=1, max_size=12).filter(
    lambda text: not text.startswith("re:")
)
_targets = st.one_of(
    st.sampled_from(
        ["Linear", "re:.*mlp.*", "layers.1.*", "1e-3", "null", "on", "0x1F", "~", "2020-01-01", "'", "a: b"]
    ),
    _texts,
)
_names = st.lists(_targets.filter(lambda text: "[" not in text), min_size=1, max_size=3)
_knobs = st.fixed_dictionaries(
    {}, optional={"maxshrink": st.floats(1e-9, 0.9), "grid": st.floats(1.0, 1e9), "norm": st.floats(0.1, 5.0)}
)
_observers = st.one_of(st.sampled_from(["mse", "minmax"]), _knobs.map(lambda knobs: {"name": "mse", **knobs}))
_args = st.one_of(
    st.builds(
        lambda bits, knobs: {"num_bits": bits, "strategy": "channel", "observer": "mse", "observer_kwargs": knobs},
        st.integers(2, 8),
        _knobs,
    ),
    st.builds(
        lambda bits, size: {
            "num_bits": bits,
            "type": "INT",
            "strategy": "group",
            "group_size": size,
            "symmetric": False,
        },
        st.integers(2, 8),
        st.integers(1, 512),
    ),
    st.just({"num_bits": 8, "type": "float", "dynamic": False, "block_structure": None}),
    st.just(
        QuantizationArgs(
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            scale_dtype=torch.float8_e4m3fn,
            zp_dtype=torch.float8_e4m3fn,
        )
    ),
)
_stage_names = st.text(string.ascii_lowercase + "_ é1", max_size=6)
_what = st.one_of(
    st.fixed_dictionaries({"scheme": st.sampled_from(sorted({*scheme_names()} - {"UNQUANTIZED"})), "targets": _names}),
    st.fixed_dictionaries({"scheme": st.dictionaries(st.sampled_from(["w4a16", "FP8", "W8A8"]), _names, min_size=1)}),
    st.fixed_dictionaries(
        {"scheme": st.just("W4A16"), "group_size": st.integers(1, 99), "weight_observer": _observers}
    ),
    st.fixed_dictionaries({"scheme": st.just("W8A8"), "activation_observer": _observers}),
    st.fixed_dictionaries({"weights": _args, "targets": st.none() | _names}),
    st.fixed_dictionaries(
        {
            "config_groups": st.dictionaries(
                _texts, st.fixed_dictionaries({"targets": _names, "weights": _args}), min_size=1
            )
        }
    ),
    st.fixed_dictionaries({"kv_cache_scheme": st.just({"num_bits": 8, "type": "float"})}),
)
_modifiers = st.builds(lambda what, ignore: QuantizationModifier(**what, ignore=ignore), _what, st.none() | _names)
_recipes = st.lists(
    st.tuples(_stage_names, st.lists(_modifiers, min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=lambda stage: stage[0],
).map(lambda stages: recipe(*stages))


@settings(max_examples=60, deadline=None, phases=[Phase.generate])  # shrinking such recipes takes minutes
@given(_recipes)
def test_a_recipe_that_is_written_out_is_read_back_as_the_same(written):
    for back in (written.to_dict(), written.to_yaml(), written.to_json(), json.loads(written.to_json())):
        read = Recipe.of(back)
        assert read == written
        assert read.to_yaml() == written.to_yaml()
        for ours, theirs in zip(written.modifiers, read.modifiers, strict=True):
            assert (ours.groups, ours.ignore, ours.kv_cache) == (theirs.groups, theirs.ignore, theirs.kv_cache)


def test_a_written_recipe_reads_well():
    twice = {"scheme": "W4A16", "ignore": ["lm_head"]}
    modifier = QuantizationModifier(**twice)
    assert recipe(("quant", [modifier, modifier])).to_yaml() == (
        "quant_stage:\n"
        "  quant_modifiers:\n"
        "  - QuantizationModifier:\n"
        "      scheme: W4A16\n"
        "      ignore:\n"
        "      - lm_head\n"
        "  - QuantizationModifier:\n"
        "      scheme: W4A16\n"
        "      ignore:\n"
        "      - lm_head\n"
    )


def test_changing_what_was_written_out_does_not_change_the_recipe():
    written = Recipe.of({"modifiers": {"QuantizationModifier": {"scheme": "W4A16", "ignore": ["a"]}}})
    written.to_dict()["default_stage"]["default_modifiers"][0]["QuantizationModifier"]["ignore"].append("b")
    assert written.modifiers[0].given["ignore"] == ["a"]


def test_objects_of_compressed_tensors_become_plain_data():
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy=QuantizationStrategy.GROUP, group_size=32)
    )
    modifier = QuantizationModifier(
        config_groups={"g": scheme},
        kv_cache_scheme={
            "num_bits": np.int64(8),
            "strategy": QuantizationStrategy.TENSOR,
            "scale_dtype": torch.bfloat16,
        }
        | {"num_bits": 8},
        ignore=frozenset({"b", "a"}),
        activation_observer={"name": "percentile", "percentile": np.float64(99.5)},
    )
    assert modifier.given == {
        "config_groups": {
            "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
        },
        "kv_cache_scheme": {"num_bits": 8, "strategy": "tensor", "scale_dtype": "torch.bfloat16"},
        "ignore": ["a", "b"],
        "activation_observer": {"name": "percentile", "percentile": 99.5},
    }
    assert modifier.groups[0].scheme == scheme
    assert Recipe.of(Recipe.of(modifier).to_yaml()).modifiers == (modifier,)


def test_modifiers_are_compared_and_shown_by_what_they_were_made_from():
    assert QuantizationModifier(scheme="W4A16") == QuantizationModifier(scheme="W4A16", ignore=None)
    assert hash(QuantizationModifier(scheme="W4A16")) == hash(QuantizationModifier(scheme="W4A16", ignore=None))
    assert QuantizationModifier(scheme="W4A16") != QuantizationModifier(scheme="W4A16", ignore=[])
    assert FIRST != W4
    assert repr(FIRST) == "QuantizationModifier(scheme='W4A16')"


# ---- errors ----------------------------------------------------------------------------------------------------------

NOTHING = f"there is nothing in it. Name a modifier, such as {EXAMPLE}."


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("", "recipe"),
        ("  \n", "recipe"),
        ("# nothing\n", "recipe"),
        ("null", "recipe:1"),
        ("\n{}", "recipe:2"),
        ("[]", "recipe:1"),
        ("- {}", "recipe:1"),
        ({}, "recipe"),
        ([], "recipe"),
        ((), "recipe"),
        ([[]], "recipe[0]"),
        ([FIRST, {}], "recipe[1]"),
        ([FIRST, ""], "recipe[1]"),
    ],
)
def test_an_empty_recipe_is_an_error(given, where):
    assert message(given) == f"{where}: {NOTHING}"


def test_an_empty_file_is_an_error(tmp_path):
    assert message(in_file(tmp_path, "")) == f"recipe.yaml: {NOTHING}"


def test_a_recipe_without_a_modifier_cannot_be_made():
    for stages in ((), (Stage("a", ()),)):
        with pytest.raises(RecipeError, match=r"^there is no modifier in the recipe\.$"):
            Recipe(stages)


def test_two_stages_of_one_name_cannot_be_made():
    with pytest.raises(RecipeError, match=r"^2 stages of the recipe are called 'a'. Give each a name of its own\.$"):
        recipe(("a", [FIRST]), ("b", [FIRST]), ("a", [SECOND]))


DATA_ERRORS = [
    # what a recipe can be
    (5, "recipe: expected a file, text, a dict, modifiers or a list of them, got 5."),
    (None, "recipe: expected a file, text, a dict, modifiers or a list of them, got None."),
    (b"a: b", "recipe: expected a file, text, a dict, modifiers or a list of them, got bytes."),
    ([FIRST, 2.5], "recipe[1]: expected a file, text, a dict, modifiers or a list of them, got 2.5."),
    ({FIRST}, "recipe: expected a file, text, a dict, modifiers or a list of them, got set."),
    (
        QuantizationModifier,
        "recipe: expected a file, text, a dict, modifiers or a list of them, got the class QuantizationModifier, "
        "not one "
        "that was made of it.",
    ),
    ("W4A16", f"recipe:1: expected {{modifiers: {EXAMPLE}}}, or the name of a file that exists, got 'W4A16'."),
    ("false", f"recipe:1: expected {{modifiers: {EXAMPLE}}}, or the name of a file that exists, got False."),
    ("- 5\n- 6", f"recipe:1: expected {{modifiers: {EXAMPLE}}}, or the name of a file that exists, got 5."),
    ("x" * 99, f"recipe:1: expected {{modifiers: {EXAMPLE}}}, or the name of a file that exists, got '{'x' * 59}...."),
    # names
    ({1: ONE}, "recipe: 1 is no name. Use text for the names of entries."),
    ({"a_stage": {1: ONE}}, "recipe.a_stage: 1 is no name. Use text for the names of entries."),
    ({"modifiers": {1: W4}}, "recipe.modifiers: 1 is no name. Use text for the names of entries."),
    ({"QuantizationModifier": {1: 2}}, "recipe.QuantizationModifier: 1 is no name. Use text for the names of entries."),
    (
        {"QuantizationModifier": {"scheme": {8: ["Linear"]}}},
        "recipe.QuantizationModifier: scheme: 8 is no name. Use text for the names of entries.",
    ),
    # unknown entries
    (
        {"modifers": ONE},
        "recipe.modifers: a recipe has no 'modifers'. Did you mean 'modifiers'? It has: modifiers, <name>_stage.",
    ),
    (
        {"quant_stge": ONE},
        "recipe.quant_stge: a recipe has no 'quant_stge'. Did you mean 'quant_stage'? It has: modifiers, <name>_stage.",
    ),
    (
        {"QuantisationModifer": W4},
        "recipe.QuantisationModifer: a recipe has no 'QuantisationModifer'. Did you mean "
        "'QuantizationModifier'? It has: modifiers, <name>_stage.",
    ),
    ({"xyz": 5}, "recipe.xyz: a recipe has no 'xyz'. It has: modifiers, <name>_stage."),
    (
        {"a_stage": {"a_modifers": ONE}},
        "recipe.a_stage.a_modifers: a stage has no 'a_modifers'. Did you mean 'a_modifiers'? It has: a_modifiers.",
    ),
    ({"a_stage": {"run_type": "oneshot"}}, "recipe.a_stage.run_type: a stage has no 'run_type'. It has: a_modifiers."),
    (
        {"modifiers": {"QuantisationModifier": W4}},
        "recipe.modifiers.QuantisationModifier: there is no modifier 'QuantisationModifier'. Did you mean "
        "'QuantizationModifier'? Modifiers: {modifiers}.",
    ),
    (
        {"AwqModifier": W4},
        "recipe.AwqModifier: there is no modifier 'AwqModifier'. Did you mean 'GPTQModifier'? Modifiers: {modifiers}.",
    ),
    # wrong nesting
    (
        W4,
        "recipe.scheme: a recipe has no 'scheme'. It has: modifiers, <name>_stage. 'scheme' belongs to a modifier: "
        "{QuantizationModifier: {scheme: ...}}.",
    ),
    (
        {"a_stage": {"ignore": []}},
        "recipe.a_stage.ignore: a stage has no 'ignore'. It has: a_modifiers. 'ignore' belongs "
        "to a modifier: {QuantizationModifier: {ignore: ...}}.",
    ),
    (
        {"modifiers": W4},
        "recipe.modifiers.scheme: there is no modifier 'scheme'. Modifiers: {modifiers}. 'scheme' belongs "
        "to a modifier: {QuantizationModifier: {scheme: ...}}.",
    ),
    ({"a_stage": {"b_stage": ONE}}, "recipe.a_stage.b_stage: a stage has no 'b_stage'. It has: a_modifiers."),
    # wrong types
    ({"a_stage": None}, f"recipe.a_stage: a stage is {{a_modifiers: {EXAMPLE}}}, got None."),
    ({"a_stage": [ONE]}, f"recipe.a_stage: a stage is {{a_modifiers: {EXAMPLE}}}, got [{ONE!r}]."),
    ({"a_stage": {}}, f"recipe.a_stage: a stage is {{a_modifiers: {EXAMPLE}}}, got {{}}."),
    ({"modifiers": None}, f"recipe.modifiers: expected modifiers, such as {EXAMPLE}, got None."),
    ({"modifiers": 5}, f"recipe.modifiers: expected modifiers, such as {EXAMPLE}, got 5."),
    ({"modifiers": {}}, f"recipe.modifiers: expected modifiers, such as {EXAMPLE}, got {{}}."),
    ({"modifiers": []}, f"recipe.modifiers: expected modifiers, such as {EXAMPLE}, got []."),
    ({"modifiers": [[ONE], []]}, f"recipe.modifiers[1]: expected modifiers, such as {EXAMPLE}, got []."),
    (
        {"modifiers": "QuantizationModifier"},
        f"recipe.modifiers: expected modifiers, such as {EXAMPLE}, got 'QuantizationModifier'.",
    ),
    ({"QuantizationModifier": 5}, "recipe.QuantizationModifier: QuantizationModifier takes {keyword: value}, got 5."),
    (
        {"QuantizationModifier": "W4A16"},
        "recipe.QuantizationModifier: QuantizationModifier takes {keyword: value}, got 'W4A16'.",
    ),
    ({"QuantizationModifier": []}, "recipe.QuantizationModifier: there is no QuantizationModifier in the list."),
    (
        {"QuantizationModifier": [W4, [W4]]},
        "recipe.QuantizationModifier[1]: QuantizationModifier takes {keyword: value}, got [{'scheme': 'W4A16'}].",
    ),
    (
        {"QuantizationModifier": {"scheme": object}},
        "recipe.QuantizationModifier: scheme: <class 'object'> (type) has no place in a recipe. Use plain values.",
    ),
    # what the modifier says
    (
        {"modifiers": {"QuantizationModifier": [W4, {"shceme": "W4A16"}]}},
        f"recipe.modifiers.QuantizationModifier[1]: QuantizationModifier has no 'shceme'. "
        f"Did you mean 'scheme'? {FIELDS}",
    ),
    (
        {"QuantizationModifier": {**W4, "ignore": 5}},
        "recipe.QuantizationModifier: ignore: expected a name or a list of names, got 5.",
    ),
]


@pytest.mark.parametrize(("given", "expected"), DATA_ERRORS, ids=lambda value: str(value)[:40])
def test_a_wrong_recipe_is_an_error_that_says_where(given, expected):
    assert message(given) == expected.replace("{modifiers}", ", ".join(sorted(Modifier.classes())))


HEAD = "modifiers:\n  QuantizationModifier:\n"
NO_OBSERVER = "there is no observer 'msee'. Did you mean 'mse'? Observers: {observers}."
TEXT_ERRORS = [
    # words of the style guide
    (
        HEAD
        + "    targets: [Linear]\n    scheme: W8A8\n    activation_observer:\n      name: mse\n      max_shrink: 0.2\n",
        "7: observer 'mse' has no knob 'max_shrink'. Did you mean 'maxshrink'? "
        "Knobs: averaging_constant, expand, grid, maxshrink, norm, patience.",
    ),
    (
        HEAD + "    weights:\n      num_bits: 4\n      observer: mse\n      observer_kwargs:\n        norm: 2\n"
        "        max_shrink: 1\n",
        "8: observer 'mse' has no knob 'max_shrink'. Did you mean 'maxshrink'? "
        "Knobs: averaging_constant, expand, grid, maxshrink, norm, patience.",
    ),
    (
        HEAD + "    weights:\n      observer: mse\n      observer_kwargs:\n        grid: 5\n        norm: -1\n",
        "7: observer 'mse': norm must be a number above 0 and at most 16, got -1.",
    ),
    (
        HEAD + "    config_groups:\n      a:\n        weights:\n          observer_kwargs:\n            q: 1\n",
        "7: observer 'optimal' has no knob 'q'. Knobs: candidates, importance, norm, refits, signed.",
    ),
    (HEAD + "    scheme: W4A16\n    weight_observer:\n\n      name: msee\n", f"6: {NO_OBSERVER}"),
    (HEAD + "    scheme: W4A16\n    weight_observer: msee\n", f"4: {NO_OBSERVER}"),
    (HEAD + "    weights:\n      num_bits: 4\n      observer: msee\n", f"5: {NO_OBSERVER}"),
    (HEAD + "    kv_cache_scheme:\n      num_bits: 8\n      observer: msee\n", f"5: {NO_OBSERVER}"),
    (
        HEAD + "    ignore: []\n    scheme: w4a61\n",
        "4: there is no scheme 'w4a61'. Did you mean 'W4A16'? Schemes: {schemes}.",
    ),
    (
        HEAD + "    scheme:\n      W4A16: [a]\n      FP88: [b]\n",
        "5: there is no scheme 'FP88'. Did you mean 'FP8'? Schemes: {schemes}.",
    ),
    (
        HEAD + "    config_groups:\n      W4A16: [a]\n      FP88: [b]\n",
        "5: there is no scheme 'FP88'. Did you mean 'FP8'? Schemes: {schemes}.",
    ),
    (
        HEAD + "    scheme: W4A16\n    ignored: [a]\n",
        f"4: QuantizationModifier has no 'ignored'. Did you mean 'ignore'? {FIELDS}",
    ),
    (
        HEAD + "    config_groups:\n      a:\n        target: [a]\n",
        "5: config_groups.a has no 'target'. Did you mean 'targets'? It has: targets, weights, input_activations, "
        "output_activations, format.",
    ),
    (
        HEAD + "    config_groups:\n      a:\n        weights:\n          numbits: 4\n",
        "6: config_groups.a.weights has no 'numbits'. Did you mean 'num_bits'? It has: num_bits, type, symmetric, "
        "group_size, "
        "strategy, block_structure, dynamic, actorder, scale_dtype, zp_dtype, observer, observer_kwargs.",
    ),
    (
        HEAD + "    scheme: W4A16\n    ignore:\n    - lm_head\n    - 're:('\n",
        "6: ignore: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0.",
    ),
    (
        HEAD + "    scheme: W4A16\n    ignore:\n    - lm_head\n    - 2020-01-01\n",
        "6: ignore.1: datetime.date(2020, 1, 1) (date) has no place in a recipe. Use plain values.",
    ),
    (
        "modifiers:\n  QuantizationModifier:\n  - scheme: W4A16\n  - scheme: W4A16\n    group_size: x\n",
        "5: group_size: expected a whole number from 1 on, got 'x'.",
    ),
    (
        "a_stage:\n  a_modifiers:\n    QuantizationModifier: {scheme: W4A16}\nb_stage:\n\n"
        "  b_modifiers:\n    GptModifier: {}\n",
        "7: there is no modifier 'GptModifier'. Did you mean 'GPTQModifier'? Modifiers: {modifiers}.",
    ),
    (
        "modifiers:\n  QuantizationModifer:\n    scheme: W4A16\n",
        "2: there is no modifier 'QuantizationModifer'. Did you mean 'QuantizationModifier'? Modifiers: {modifiers}.",
    ),
    (
        "a_stage:\n  a_modifiers: {QuantizationModifier: {scheme: W4A16}}\n  a_modifers: {}\n",
        "3: a stage has no 'a_modifers'. Did you mean 'a_modifiers'? It has: a_modifiers.",
    ),
    (
        HEAD + "    scheme: W8A8\n    activation_observer: minmx\n",
        "4: there is no observer 'minmx'. Did you mean 'minmax'? Observers: {observers}.",
    ),
    (
        HEAD + "    weights: {num_bits: 4, strategy: grup}\n",
        "3: weights: there is no strategy 'grup'. Did you mean 'group'? Choices: tensor, channel, group, tensor_group, "
        "block, token, attn_head.",
    ),
    (
        "- QuantizationModifier: {scheme: W4A16}\n- modifers: {}\n",
        "2: a recipe has no 'modifers'. Did you mean 'modifiers'? It has: modifiers, <name>_stage.",
    ),
    # duplicates
    (
        HEAD + "    scheme: W4A16\n    ignore: []\n    scheme: FP8\n",
        "5: 'scheme' is there twice, first in line 3. Make its entry a list to have both.",
    ),
    (
        HEAD + "    scheme: W4A16\n  QuantizationModifier:\n    scheme: FP8\n",
        "4: 'QuantizationModifier' is there twice, first in line 2. Make its entry a list to have both.",
    ),
    ("8: a\n'8': b\n", "2: '8' is there twice, first in line 1. Make its entry a list to have both."),
    (
        '{"modifiers": 1,\n "modifiers": 2}',
        "2: 'modifiers' is there twice, first in line 1. Make its entry a list to have both.",
    ),
    # what YAML has and recipes have not
    ("a: [b\n", "2: neither YAML nor JSON: expected ',' or ']', but got '<stream end>'."),
    (
        "a:\n\tb: c\n",
        r"2: neither YAML nor JSON: found character '\t' that cannot start any token. Indent with spaces.",
    ),
    ("a: 1\n---\nb: 2\n", "2: neither YAML nor JSON: but found another document."),
    ("a: *b\n", "1: neither YAML nor JSON: found undefined alias 'b'."),
    ("a: !thing b\n", "1: neither YAML nor JSON: could not determine a constructor for the tag '!thing'."),
    (
        "a:\n  !!python/object/apply:os.getcwd []\n",
        "2: the tag tag:yaml.org,2002:python/object/apply:os.getcwd has no place in a recipe.",
    ),
    ("a: !!set {b}\n", "1: the tag tag:yaml.org,2002:set has no place in a recipe."),
    ("a:\n- &a [1, *a]\n", "2: an anchor stands inside of itself."),
    ("a: 1\n? [a, b]\n: c\n", "2: the name of an entry must be plain text."),
    ("a: &a {b: c}\nd:\n  <<: *a\n", "3: '<<' has no place in a recipe. Write its entries out."),
    ("a: 2020-99-99\n", "1: '2020-99-99' cannot be read: month must be in 1..12."),
]


@pytest.mark.parametrize(("text", "expected"), TEXT_ERRORS, ids=lambda value: str(value)[-40:])
def test_an_error_in_a_file_says_the_line(text, expected, tmp_path):
    from scalewright.observers import Observer

    expected = (
        expected.replace("{observers}", ", ".join(sorted(Observer.registered_names())))
        .replace("{schemes}", ", ".join(scheme_names()))
        .replace("{modifiers}", ", ".join(sorted(Modifier.classes())))
    )
    assert message(in_file(tmp_path, text)) == f"recipe.yaml:{expected}"
    assert message(text) == f"recipe:{expected}"
    if text.startswith(HEAD + "    ") and "twice" not in expected and "2020" not in text:
        words = expected.partition(": ")[2]
        assert message(yaml.safe_load(text)) == f"recipe.modifiers.QuantizationModifier: {words}"


@pytest.mark.parametrize("indent", ["  ", "\t"])
def test_an_error_in_a_json_file_says_the_line(indent, tmp_path):
    given = {"modifiers": {"QuantizationModifier": {"scheme": "W4A16", "weight_observer": {"name": "mse", "gird": 5}}}}
    text = json.dumps(given, indent=indent)
    line = next(i for i, each in enumerate(text.splitlines(), start=1) if "gird" in each)
    assert message(in_file(tmp_path, text, "mine.json")) == (
        f"mine.json:{line}: observer 'mse' has no knob 'gird'. Did you mean 'grid'? "
        "Knobs: averaging_constant, expand, grid, maxshrink, norm, patience."
    )
    assert message(in_file(tmp_path, "{}", "mine.json")) == f"mine.json:1: {NOTHING}"
    assert message(in_file(tmp_path, '{"modifiers":\n [}', "mine.json")).startswith(
        "mine.json:2: neither YAML nor JSON"
    )


def test_a_small_text_that_unfolds_to_a_huge_one_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert re.fullmatch(r"recipe:\d+: the recipe has more than 100000 entries\.", message("\n".join(lines)))


def test_characters_that_are_no_text_are_refused():
    assert message("a: \x00") == (
        "recipe: neither YAML nor JSON: unacceptable character #x0000: special characters are not allowed."
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert (
        message(tmp_path / "none.yaml")
        == f"{tmp_path / 'none.yaml'}: cannot be read (No such file or directory). Give the path of a recipe."
    )
    assert (
        message("no_such_folder/none.json")
        == "no_such_folder/none.json: cannot be read (No such file or directory). Give the path of a recipe."
    )
    assert message(tmp_path) == f"{tmp_path}: cannot be read (Is a directory). Give the path of a recipe."
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert message(binary) == f"{binary}: is not text in UTF-8. Give a recipe in YAML or JSON."


def test_an_error_of_a_text_in_a_list_says_which():
    assert message([ONE, "a: 1\nb: 2"]) == "recipe[1]:1: a recipe has no 'a'. It has: modifiers, <name>_stage."


def test_an_error_knows_the_way_to_the_entry():
    with pytest.raises(RecipeError) as caught:
        Recipe.of(HEAD + "    weights: {observer: mse, observer_kwargs: {max_shrink: 2}}")
    assert caught.value.key == ("modifiers", "QuantizationModifier", "weights", "observer_kwargs", "max_shrink")
