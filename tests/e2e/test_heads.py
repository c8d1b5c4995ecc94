"""Models with other heads than that of a model that writes: what their configuration names is what is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from read_back import some_ids
from torch import Tensor, nn
from typer.testing import CliRunner

from scalewright import evaluate, oneshot
from scalewright.checkpoint.loading import empty_model, load_model
from scalewright.checkpoint.reading import load_checkpoint
from scalewright.checkpoint.verifying import examine
from scalewright.cli import app
from scalewright.errors import ModelError
from scalewright.planning import plan_of
from scalewright.quality import recipe_for

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
PIXELS = {"image_size": 8, "patch_size": 4}
SPOKEN = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}


def text(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(some_ids(seed=seed))}


def pixels(seed: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))}


def speech(seed: int) -> dict[str, Tensor]:
    sound = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_features": sound, "decoder_input_ids": torch.tensor(some_ids(rows=4, length=8, seed=seed))}


@dataclass(frozen=True)
class Head:
    """A class of models, how a small one is made, what it is asked, and which part of its answer counts."""

    name: str
    kind: str
    sizes: dict[str, Any]
    batch: Any = text
    answer: str = "logits"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.kind, **{**SIZES, **self.sizes})
        return getattr(transformers, self.name)(config).eval()


HEADS = {
    each.name: each
    for each in (
        Head("LlamaForSequenceClassification", "llama", {}),
        Head("LlamaForTokenClassification", "llama", {}),
        Head("LlamaForQuestionAnswering", "llama", {}, answer="start_logits"),
        Head("LlamaModel", "llama", {}, answer="last_hidden_state"),
        Head("Gemma3TextForSequenceClassification", "gemma3_text", {"head_dim": 16}),  # tied: nothing would be missed
        Head("BertForMaskedLM", "bert", {}),
        Head("BertForSequenceClassification", "bert", {}),
        Head("BertForPreTraining", "bert", {}, answer="prediction_logits"),
        Head("BertModel", "bert", {}, answer="pooler_output"),
        Head("T5ForSequenceClassification", "t5", T5, lambda seed: ending(text(seed))),
        Head("T5EncoderModel", "t5", T5, answer="last_hidden_state"),
        Head("ViTForImageClassification", "vit", PIXELS, pixels),
        Head("WhisperForConditionalGeneration", "whisper", SPOKEN, speech),
    )
}


def ending(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows, each with one end, which T5 classifies by."""
    ids = torch.where(batch["input_ids"] == 2, 3, batch["input_ids"])
    ids[:, -1] = 2
    return {"input_ids": ids}


@torch.no_grad()
def answer(model: nn.Module, head: Head) -> Tensor:
    return model(**head.batch(2))[head.answer]


@pytest.fixture(params=HEADS)
def head(request) -> Head:
    return HEADS[request.param]


@pytest.fixture
def folder(head, tmp_path) -> Path:
    head.build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_with_any_head_is_quantised_and_read_back(head, folder, tmp_path):
    """By its path it becomes what it becomes as an object, and that is what its own class reads."""
    given = {"scheme": "W8A8", "quality": "fast", "dataset": [head.batch(1)]}
    out = tmp_path / "out"
    result = oneshot(folder, output_dir=out, **given)
    assert [note for note in result.notes if "not read" in note] == []
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == [head.name]
    found = examine(out, against=folder)
    assert ([str(each) for each in found.problems], found.notes) == ([], [])
    assert type(result.model).__name__ == head.name

    in_memory = oneshot(head.build(), output_dir=tmp_path / "object", **given).model
    for file in (out / "model.safetensors", out / "recipe.yaml"):
        assert file.read_bytes() == (tmp_path / "object" / file.name).read_bytes()
    read, info = getattr(transformers, head.name).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(answer(read, head), answer(in_memory, head), rtol=0, atol=1e-3)
    assert (answer(read, head) - answer(head.build(), head)).abs().max() > 1e-3


def test_every_way_to_load_it_gives_its_class(head, folder):
    models = [load_model(folder), empty_model(folder), load_checkpoint(folder)[0]]
    assert {type(each).__name__ for each in models} == {head.name}
    names = [{name for name, _ in each.named_parameters()} for each in models]
    assert names[0] == names[1] == names[2]


def test_the_plan_is_that_of_the_run(head, folder, tmp_path):
    planned = plan_of(folder, recipe_for("fast", "W8A8_DYNAMIC"))
    run = oneshot(folder, scheme="W8A8_DYNAMIC", quality="fast", output_dir=tmp_path / "out")
    assert sum(each.count for each in planned.groups) == len(run.layers)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(planned.ignored) == sorted(ignored)


@pytest.mark.parametrize("head", sorted({*HEADS} - {"WhisperForConditionalGeneration"}), indirect=True)
def test_what_predicts_no_token_has_no_perplexity_and_that_is_said(head, folder):
    with pytest.raises(ModelError) as caught:
        evaluate(folder, dataset=[[1, 2, 3]] * 2)
    assert str(caught.value) == (
        f"{folder}: {head.name} predicts no next token, so it has neither perplexity nor KL. See what its layers keep "
        "with `scalewright report`, and compare what it answers on data of your own."
    )


PICTURES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, **PIXELS}
CLIP = Head("CLIPModel", "clip", {"text_config": {**SIZES, "num_hidden_layers": 1}, "vision_config": PICTURES})


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (HEADS["ViTForImageClassification"], "pixel_values"),
        (HEADS["WhisperForConditionalGeneration"], "input_features"),
        (CLIP, "pixel_values"),
    ],
    ids=["pictures", "sound", "both"],
)
def test_texts_for_a_model_of_pictures_or_sound_are_refused_in_words(shown, name, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [3, 4, 5]}\n' * 4)
    shown.build().save_pretrained(tmp_path / "model")
    words = ["--data", tmp_path / "ids.jsonl", "--out", tmp_path / "out.safetensors"]
    for command in (["quantize", tmp_path / "model", "--scheme", "W8A8"], ["importance", tmp_path / "model"]):
        result = CliRunner().invoke(app, [str(each) for each in (*command, *words)])
        assert result.exit_code == 2, result.output
        assert " ".join(result.output.split()).endswith(
            f"error data: {shown.name} is shown {name}, and there are none in it, but input_ids. Give batches with "
            f"{name}, in Python; or a scheme that needs no data."
        )


# ---- classes that cannot be loaded -----------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path) -> Path:
    HEADS["LlamaForSequenceClassification"].build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def say(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"architectures": ["LlamaForReward"]},
            f"is a LlamaForReward by its config.json, and transformers {transformers.__version__} has no such class. "
            "Use a version that has it, or give the model as an object in Python.",
        ),
        (
            {"architectures": ["InternLM2ForRewardModel"]},
            f"is a InternLM2ForRewardModel by its config.json, and transformers {transformers.__version__} has no such "
            "class. Use a version that has it, or give the model as an object in Python.",
        ),
        (
            {"architectures": ["MyReward"], "auto_map": {"AutoModel": "modeling_mine.MyReward"}},
            "is a MyReward by its config.json, whose code came with it. Allow remote code if you trust it, or give "
            "the model as an object in Python.",
        ),
        (
            {"architectures": ["BertForSequenceClassification"]},
            "is a BertForSequenceClassification by its config.json, and that is no model of the type 'llama', which "
            "it is, too. Correct one of the two.",
        ),
        (
            {"architectures": ["PreTrainedModel"]},
            f"is a PreTrainedModel by its config.json, and transformers {transformers.__version__} has no such class. "
            "Use a version that has it, or give the model as an object in Python.",
        ),
        (
            {"architectures": ["\x1b[2J[bold]x"]},
            f"is a \\x1b[2J[bold]x by its config.json, and transformers {transformers.__version__} has no such class. "
            "Use a version that has it, or give the model as an object in Python.",
        ),
    ],
    ids=["unknown", "a language model by its name", "remote", "another type", "no model", "a trick"],
)
def test_a_class_that_is_not_there_is_named(llama, entries, words, tmp_path):
    say(llama, **entries)
    for command in (
        ["quantize", llama, "--scheme", "W8A8_DYNAMIC", "--out", tmp_path / "out"],
        ["plan", llama, "--scheme", "W8A8_DYNAMIC"],
        ["eval", llama, "--data", __file__],
        ["observe", llama, "--data", __file__],
    ):
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exit_code == 2, result.output
        assert " ".join(result.output.split()) == f"error {llama}: {words}"


@pytest.mark.parametrize("names", [None, [], ["LLaMAForCausalLM"], ["RWForCausalLM"], ["MistralForCausalLM"]])
def test_without_a_name_or_by_an_earlier_one_it_is_a_model_that_writes(names, tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    say(tmp_path, architectures=names)
    assert type(load_model(tmp_path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], {}, 3.5, [None], [["x"]]])
def test_names_that_are_none_are_refused_in_words_or_passed_over(names, llama):
    say(llama, architectures=names)
    with pytest.raises(ModelError) as caught:
        load_model(llama)
    assert str(caught.value).startswith(f"{llama}: ")


def test_a_model_that_may_be_shown_pictures_is_calibrated_with_texts_alone():
    torch.manual_seed(0)
    texts = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
    seen = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, **PIXELS}
    config = transformers.Gemma3Config(text_config=texts, vision_config=seen, mm_tokens_per_image=4)
    model = transformers.Gemma3ForSequenceClassification(config).eval()
    ignore = ["score", "re:.*vision_tower.*", "re:.*multi_modal.*"]
    recipe = {"QuantizationModifier": {"scheme": "W8A8", "targets": ["Linear"], "ignore": ignore}}
    assert len(oneshot(model, recipe=recipe, dataset=[text(1)]).layers) == 14


def test_a_class_of_transformers_is_taken_where_the_code_that_came_with_it_is_another(llama):
    say(llama, auto_map={"AutoModel": "modeling_mine.Mine"})
    assert type(empty_model(llama, trust_remote_code=True)).__name__ == "LlamaForSequenceClassification"


def test_code_that_came_with_a_model_is_run_only_if_that_is_allowed(llama, tmp_path, monkeypatch):
    (llama / "modeling_mine.py").write_text(
        "from transformers import LlamaForSequenceClassification\n\n\nclass MyReward(LlamaForSequenceClassification):\n"
        "    is_mine = True\n"
    )
    say(llama, architectures=["MyReward"], auto_map={"AutoModelForSequenceClassification": "modeling_mine.MyReward"})
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ModelError, match="whose code came with it"):
        load_model(llama)
    for load in (load_model, empty_model):
        assert load(llama, trust_remote_code=True).is_mine
