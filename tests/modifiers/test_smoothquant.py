"""SmoothQuantModifier: what it takes, what it refuses, and how it stands in a recipe."""

import pytest

from scalewright import QuantizationModifier, Recipe, SmoothQuantModifier
from scalewright.errors import RecipeError
from scalewright.modifiers import Modifier

PAIRS = [[["re:.*q_proj", "re:.*k_proj"], "re:.*input_layernorm"]]


def test_what_it_is_made_from_is_what_it_says():
    smoother = SmoothQuantModifier()
    assert (smoother.strength, smoother.targets, smoother.ignore, smoother.mappings) == (0.8, ["Linear"], [], [])
    given = {"smoothing_strength": 0.5, "targets": ["*.up_proj"], "ignore": "lm_head", "mappings": PAIRS}
    smoother = SmoothQuantModifier(**given)
    assert (smoother.strength, smoother.targets, smoother.ignore) == (0.5, ["*.up_proj"], ["lm_head"])
    assert smoother.mappings == [(["re:.*q_proj", "re:.*k_proj"], ["re:.*input_layernorm"])]
    assert Modifier.class_named("SmoothQuantModifier") is SmoothQuantModifier


@pytest.mark.parametrize(
    "text",
    [
        "SmoothQuantModifier: {smoothing_strength: 0.8}\nQuantizationModifier: {scheme: W8A8}",
        "q_stage:\n  q_modifiers:\n    SmoothQuantModifier: {smoothing_strength: 0.8}\n    QuantizationModifier:\n"
        "      {scheme: W8A8}",
        "modifiers:\n- SmoothQuantModifier: {smoothing_strength: 0.8}\n- QuantizationModifier: {scheme: W8A8}",
    ],
)
def test_it_stands_beside_who_quantises(text):
    recipe = Recipe.of(text)
    assert recipe.modifiers == (SmoothQuantModifier(smoothing_strength=0.8), QuantizationModifier(scheme="W8A8"))
    assert Recipe.of(recipe.to_yaml()).to_dict() == recipe.to_dict()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"smoothing_strength": 1.5}, "smoothing_strength: expected a number from 0 to 1, got 1.5."),
        ({"smoothing_strength": True}, "smoothing_strength: expected a number from 0 to 1, got True."),
        ({"smoothing_strength": "x"}, "smoothing_strength: expected a number from 0 to 1, got 'x'."),
        ({"mappings": []}, "mappings: expected a list of [[layers], module in front of them], got []."),
        ({"mappings": ["a"]}, "mappings[0]: expected [[layers], module in front of them], got 'a'."),
        ({"mappings": [[["a"], "b", "c"]]}, "mappings[0]: expected [[layers], module in front of them], got "),
        (
            {"strength": 0.5},
            "SmoothQuantModifier has no 'strength'. Did you mean 'smoothing_strength'? It has: smoothing_strength, "
            "targets, ignore, mappings.",
        ),
        ({"targets": []}, "targets: there are no targets in it. Name some, such as Linear."),
    ],
)
def test_what_cannot_be_is_refused(given, words):
    with pytest.raises(RecipeError) as caught:
        SmoothQuantModifier(**given)
    assert str(caught.value).startswith(words)


def test_a_recipe_says_in_which_line_it_is_wrong():
    with pytest.raises(RecipeError, match=r"^recipe:2: smoothing_strength: expected a number from 0 to 1, got 2\.$"):
        Recipe.of("SmoothQuantModifier:\n  smoothing_strength: 2\n")
