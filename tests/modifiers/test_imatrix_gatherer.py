"""IMatrixGatherer: what it takes, what it refuses, and how it stands in a recipe."""

from pathlib import Path

import pytest

from scalewright import IMatrixGatherer, QuantizationModifier, Recipe
from scalewright.errors import RecipeError
from scalewright.modifiers import Modifier

FIELDS = "It has: targets, ignore, file."


def test_it_means_all_linear_layers_unless_one_says_otherwise():
    gatherer = IMatrixGatherer()
    assert (gatherer.targets, gatherer.ignore, gatherer.file, gatherer.given) == (["Linear"], [], None, {})
    gatherer = IMatrixGatherer(targets="*.up_proj", ignore="lm_head", file=Path("some") / "file")
    assert (gatherer.targets, gatherer.ignore, gatherer.file) == (["*.up_proj"], ["lm_head"], "some/file")
    assert Modifier.class_named("IMatrixGatherer") is IMatrixGatherer


@pytest.mark.parametrize(
    ("given", "words", "key"),
    [
        ({"target": ["Linear"]}, f"IMatrixGatherer has no 'target'. Did you mean 'targets'? {FIELDS}", ("target",)),
        ({"scheme": "W4A16"}, f"IMatrixGatherer has no 'scheme'. {FIELDS}", ("scheme",)),
        ({"targets": []}, "targets: there are no targets in it. Name some, such as Linear.", ("targets",)),
        ({"targets": 3}, "targets: expected a name or a list of names, got 3.", ("targets",)),
        ({"ignore": [""]}, "ignore: expected a name or a list of names, got [''].", ("ignore",)),
        (
            {"ignore": ["re:("]},
            "ignore: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0.",
            ("ignore", 0),
        ),
        ({"file": 3}, "file: expected the name of a file, got 3.", ("file",)),
        ({"file": ""}, "file: expected the name of a file, got ''.", ("file",)),
    ],
)
def test_a_mistake_is_named(given, words, key):
    with pytest.raises(RecipeError) as caught:
        IMatrixGatherer(**given)
    assert (str(caught.value), caught.value.key) == (words, key)


GATHERER, MODIFIER = IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(scheme="W4A16")
G, M = {"IMatrixGatherer": {"ignore": ["lm_head"]}}, {"QuantizationModifier": {"scheme": "W4A16"}}
TOGETHER, APART = [(GATHERER, MODIFIER)], [(GATHERER,), (MODIFIER,)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"modifiers": {**G, **M}}, TOGETHER),
        ({**G, **M}, TOGETHER),
        ([G, M], TOGETHER),
        ([GATHERER, MODIFIER], TOGETHER),
        ({"a_stage": {"a_modifiers": {**G, **M}}}, TOGETHER),
        ({"a_stage": {**G, **M}}, TOGETHER),
        ({"a_stage": G, "b_stage": M}, APART),
        ("IMatrixGatherer:\n  ignore: [lm_head]\nQuantizationModifier: {scheme: W4A16}\n", TOGETHER),
    ],
)
def test_it_stands_in_a_recipe_as_all_modifiers_do(given, expected):
    recipe = Recipe.of(given)
    assert [stage.modifiers for stage in recipe.stages] == expected
    assert Recipe.of(recipe.to_yaml()) == Recipe.of(recipe.to_json()) == recipe


def test_it_needs_no_keywords():
    assert Recipe.of("modifiers:\n  IMatrixGatherer:\n") == Recipe.of(IMatrixGatherer())


def test_a_mistake_in_a_recipe_has_its_line():
    with pytest.raises(RecipeError) as caught:
        Recipe.of("modifiers:\n  IMatrixGatherer:\n    ignored: [lm_head]\n")
    assert str(caught.value) == f"recipe:3: IMatrixGatherer has no 'ignored'. Did you mean 'ignore'? {FIELDS}"
    with pytest.raises(RecipeError) as caught:
        Recipe.of({"IMatrixGather": {}})
    assert str(caught.value) == (
        "recipe.IMatrixGather: a recipe has no 'IMatrixGather'. Did you mean 'IMatrixGatherer'? It has: modifiers, "
        "<name>_stage."
    )
