"""What makes a run the same run, and what happens when that changes under it."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright import QuantizationModifier, oneshot
from scalewright.checkpoint.fingerprint import SourceFiles, digest_of_data, fingerprint_of
from scalewright.checkpoint.journal import partial_of
from scalewright.errors import ModelError, OutputError
from scalewright.numerics import products
from scalewright.recipe import Recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "model")


def new_bytes(folder):
    """The same weights, written again a moment later."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole)


CHANGES = {
    "has changed": ("model.safetensors", new_bytes),
    "is gone": ("generation_config.json", lambda folder: (folder / "generation_config.json").unlink()),
    "is new": (
        "more.safetensors",
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_source_that_changes_under_a_run_is_named_and_nothing_is_written(what, folder, tmp_path):
    out, recipe = tmp_path / "out", QuantizationModifier(scheme="W8A16", group_size=32)
    name, change = CHANGES[what]
    changed = []

    def on_step(phase, *_):
        if phase == "writing" and not changed:
            changed.append(change(folder))

    with pytest.raises(ModelError) as caught:
        oneshot(folder, recipe=recipe, output_dir=out, on_step=on_step)
    assert str(caught.value) == (
        f"{folder / name}: {what} since the run began, so nobody knows which weights were read. Nothing was written. "
        "Run again with restart, when the model stays as it is."
    )
    assert not out.exists()
    with pytest.raises(OutputError, match=r"another model"):
        oneshot(folder, recipe=recipe, output_dir=out)
    if what != "is new":
        oneshot(folder, recipe=recipe, output_dir=out, restart=True)
        assert out.is_dir() and not partial_of(out).exists()


def test_a_source_that_changes_is_named_when_the_next_layer_is_done(folder, tmp_path):
    """And not at the end of a run of hours."""
    finished = []

    def on_step(phase, what, done, _):
        if phase == "quantising" and done and what not in finished:
            finished.append(what)
            new_bytes(folder)

    with pytest.raises(ModelError, match="has changed since the run began"):
        oneshot(folder, scheme="FP8_DYNAMIC", output_dir=tmp_path / "out", on_step=on_step)
    assert len(finished) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (shutil.rmtree, "config.json"),
    ],
    ids=["one file", "all of it"],
)
def test_a_source_that_is_lost_before_its_weights_are_copied_is_named(change, name, folder, tmp_path):
    def on_step(phase, *_):
        if phase == "writing":
            change(folder)

    with pytest.raises(ModelError) as caught:
        oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=tmp_path / "out", on_step=on_step)
    assert str(caught.value).startswith(f"{folder / name}: is gone since the run began")


def test_what_somebody_puts_in_the_place_of_the_output_meanwhile_is_left_alone(folder, tmp_path):
    out = tmp_path / "out"

    def on_step(phase, *_):
        if phase == "writing":
            out.mkdir(exist_ok=True)
            (out / "mine.txt").write_text("precious")

    with pytest.raises(OutputError, match="exists already and is not empty"):
        oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=out, on_step=on_step)
    assert [each.name for each in out.iterdir()] == ["mine.txt"]
    oneshot(folder, scheme="W8A8_DYNAMIC", output_dir=out, overwrite=True)
    assert (out / "config.json").exists() and not partial_of(out).exists()


def test_the_same_tokens_in_another_order_are_other_data():
    ids = torch.arange(4096).view(2, 2048)
    other = ids.clone()
    other[0, 700], other[0, 800] = ids[0, 800], ids[0, 700]
    assert digest_of_data([{"input_ids": ids}]) == digest_of_data([{"input_ids": ids.clone()}])
    assert digest_of_data([{"input_ids": ids}]) != digest_of_data([{"input_ids": other}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_every_byte_of_a_model_object_counts(dtype):
    model = torch.nn.Module()
    model.register_buffer("numbers", torch.zeros(3, 5).to(dtype))
    prints = []
    for place in (None, (0, 0), (2, 4)):
        with torch.no_grad():
            model.numbers.fill_(0)
            if place is not None:
                model.numbers[place] = 1
        prints.append(fingerprint_of(SourceFiles.of(model), model, RECIPE, [], [], []))
    assert len({each["model"] for each in prints}) == len(prints)
    assert len({each["recipe"] for each in prints}) == 1


def test_who_multiplies_counts(monkeypatch):
    """A run goes on only with sums in the order that it began with."""
    model, prints = torch.nn.Module(), []
    for is_preferred in (False, True):
        monkeypatch.setattr(products, "prefers_onednn", lambda it=is_preferred: it)
        prints.append(fingerprint_of(SourceFiles.of(model), model, RECIPE, [], [], []))
    assert {name for name in prints[0] if prints[0][name] != prints[1][name]} == {"set of versions"}


def test_the_contents_of_a_file_that_the_recipe_names_count(tmp_path):
    file, model = tmp_path / "imatrix.safetensors", torch.nn.Module()
    prints = []
    for contents in (b"one", b"two"):
        file.write_bytes(contents)
        prints.append(fingerprint_of(SourceFiles.of(model), model, RECIPE, [], [str(file)], [])["recipe"])
    assert prints[0] != prints[1]


RECIPE = Recipe.of(QuantizationModifier(scheme="W8A16"))
