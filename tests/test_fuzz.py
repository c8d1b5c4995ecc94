"""Whatever is written in recipes, data files, models and statistics: an error of ours in words, or it is taken.

No other error, no hang, and nothing is written anywhere.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalewright.calibration.data import load_samples
from scalewright.calibration.sources import DataOptions
from scalewright.calibration.targets import Pattern
from scalewright.checkpoint.loading import empty_model, load_model
from scalewright.errors import RecipeError, ScalewrightError
from scalewright.importance import gather_importance, load_importance
from scalewright.observing import Observations, observe
from scalewright.recipe import Recipe

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
WAYS = st.lists(st.integers(0, 50), min_size=1, max_size=5)
PLACES = st.tuples(st.integers(0, 4000), st.integers(0, 40), st.binary(max_size=40))
LONG = 5000
SLOWLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

RECIPE = """
first_stage:
  first_modifiers:
    GPTQModifier:
      ignore: [lm_head, "re:.*gate$"]
      actorder: static
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 32, observer: mse}
          input_activations: {num_bits: 8, dynamic: true, strategy: token}
second_stage:
  second_modifiers:
    - QuantizationModifier:
        scheme: {W8A8: ["model.layers.1.*"]}
        kv_cache_scheme: {num_bits: 8, type: float, dynamic: false}
        weight_observer: {name: imatrix_mse, maxshrink: 0.5}
"""


def replaced(found: Any, ways: list[int], value: Any) -> Any:
    """`value` in the place of an entry of nested data, which `ways` lead to."""
    keys = list(found) if isinstance(found, dict) else list(range(len(found))) if isinstance(found, list) else []
    if not keys:
        return value
    key = keys[ways[0] % len(keys)]
    if len(ways) > 1:
        found[key] = replaced(found[key], ways[1:], value)
    elif isinstance(found, dict) and ways[0] % 3 == 0:  # another name for it
        found[value if isinstance(value, str) else repr(value)] = found.pop(key)
    else:
        found[key] = value
    return found


def mangled(whole: bytes, change: tuple[int, int, bytes]) -> bytes:
    place, length, noise = change
    place %= max(1, len(whole))
    return whole[:place] + noise + whole[place + length :]


def read(what: Any, *args: Any, **options: Any) -> None:
    """No error but one of ours, and that not too long to be read."""
    said = "nothing is wrong"
    try:
        what(*args, **options)
    except ScalewrightError as error:
        said = str(error)
    assert 0 < len(said) < LONG


# ---- recipes ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_as_a_recipe(text):
    read(Recipe.of, text)


@settings(max_examples=200, deadline=None)
@given(PLACES)
def test_a_recipe_with_some_characters_changed(change):
    read(Recipe.of, mangled(RECIPE.encode(), change).decode("utf-8", errors="replace"))


@settings(max_examples=200, deadline=None)
@given(WAYS, JSON)
def test_a_recipe_with_an_entry_changed(ways, value):
    read(Recipe.of, replaced(Recipe.of(RECIPE).to_dict(), ways, value))


@settings(deadline=None)
@given(JSON)
def test_any_data_as_a_recipe(value):
    read(Recipe.of, value)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "QuantizationModifier: !!python/name:os.system",
        "a: &a [*a, *a]",
        "\n".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "a0: &a0 [x, x, x, x, x, x, x, x, x]"
            for i in range(12)
        ),
        "QuantizationModifier: &m {scheme: W8A8, ignore: *m}",
        "[" * 3000,
        "{" * 3000,
        "QuantizationModifier:\n" + "".join("  " * i + "a:\n" for i in range(1, 700)),
        "\0",
        "\ud800",
        "%YAML 9.9\n---\na",
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_recipes_that_play_tricks(text):
    read(Recipe.of, text)


def test_a_recipe_that_is_too_deep_is_said_to_be():
    for text in ("[" * 3000, "a: " + "{a: " * 3000):
        with pytest.raises(RecipeError, match=r"^recipe: entries stand inside of each other, too deep for a recipe\.$"):
            Recipe.of(text)


def test_a_pattern_that_would_take_for_ever_is_named():
    pattern = Pattern.of("re:(.*)*x$")
    with pytest.raises(RecipeError) as caught:
        pattern.means("model.layers.0.self_attn.q_proj.and.some.more.names", nn.Linear(1, 1))
    assert str(caught.value) == (
        "'re:(.*)*x$' takes longer than 1 s to compare with 'model.layers.0.self_attn.q_proj.and.some.more.names'. "
        "Write it without repeats inside of repeats."
    )


# ---- data files ------------------------------------------------------------------------------------------------------

WELL = {
    "txt": b"one story<|endoftext|>another\n",
    "jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "json": b'[{"text": "one"}, {"text": "two"}]',
    "csv": b"text,other\none,1\ntwo,2\n",
    "parquet": b"PAR1nonsensePAR1",
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"nothing": 0, "one": 1, "two": 2}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="nothing")))


@pytest.mark.parametrize("kind", WELL)
@SLOWLY
@given(change=PLACES, is_all_noise=st.booleans())
def test_any_bytes_in_a_data_file(kind, change, is_all_noise, tmp_path):
    file = tmp_path / f"data.{kind}"
    file.write_bytes(change[2] if is_all_noise else mangled(WELL[kind], change))
    options = DataOptions(4, 16, None, None, None, "train", 0)
    read(load_samples, str(file), options, tokenizer=tokenizer, vocab_size=3)


@SLOWLY
@given(st.lists(JSON, max_size=3))
def test_any_data_in_a_list(rows):
    options = DataOptions(4, 16, None, None, None, "train", 0)
    read(load_samples, rows, options, tokenizer=tokenizer, vocab_size=3)


# ---- models, and statistics ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    gather_importance(str(folder), [[1, 2, 3, 4]], output_file=folder.parent / "imatrix.safetensors")
    observe(str(folder), [[1, 2, 3, 4]]).save(folder.parent / "stats.json")
    return folder


@SLOWLY
@given(ways=WAYS, value=JSON)
def test_a_configuration_with_an_entry_changed(source, ways, value, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = replaced(json.loads((source / "config.json").read_text()), ways, value)
    (folder / "config.json").write_text(json.dumps(config))
    for load in (empty_model, load_model):
        read(load, folder)


@SLOWLY
@given(change=PLACES)
def test_weights_with_some_bytes_changed(source, change, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(mangled((source / "model.safetensors").read_bytes(), change))
    read(load_model, folder)


@SLOWLY
@given(change=PLACES)
def test_importance_with_some_bytes_changed(source, change, tmp_path):
    file = tmp_path / "imatrix.safetensors"
    file.write_bytes(mangled((source.parent / "imatrix.safetensors").read_bytes(), change))
    read(load_importance, file)


@SLOWLY
@given(change=PLACES)
def test_statistics_with_some_bytes_changed(source, change, tmp_path):
    file = tmp_path / "stats.json"
    file.write_bytes(mangled((source.parent / "stats.json").read_bytes(), change))
    read(Observations.load, file)


@SLOWLY
@given(ways=WAYS, value=JSON)
def test_statistics_with_an_entry_changed(source, ways, value, tmp_path):
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(replaced(json.loads((source.parent / "stats.json").read_text()), ways, value)))
    read(Observations.load, file)
