"""Importance in files: what is written is read, halves merge to the whole, and what does not fit is refused."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from scalewright.errors import DataError, ImportanceError, ModelError, OutputError, RecipeError, StrictError
from scalewright.importance import (
    Importance,
    gather_importance,
    load_importance,
    merge_files,
    merge_importance,
    save_importance,
)

GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(0, 96, (8, 24), generator=GENERATOR)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DOWN = "model.layers.1.mlp.down_proj"


def tiny(kind: Any = LlamaConfig, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, **given}), dtype=torch.float32).eval()


def some(**given: Any) -> Importance:
    keywords = {
        "sums": {"a": torch.tensor([1.0, 2.0]), "b.c": torch.tensor([3.0, 0.5, 7.0])},
        "counts": {"a": 4, "b.c": 2},
        "model": "tiny",
        "num_tokens": 4,
        "seeds": (3,),
        "origin": "one.safetensors",
    }
    return Importance(**{**keywords, **given})


def assert_same(found: Importance, expected: Importance, *, rtol: float = 0.0) -> None:
    assert found.counts == expected.counts and found.sums.keys() == expected.sums.keys()
    for name, each in found.sums.items():
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, expected.sums[name], rtol=rtol, atol=0.0)


# ---- gathering -------------------------------------------------------------------------------------------------------


def test_all_layers_but_the_head_are_gathered() -> None:
    found = gather_importance(tiny(), IDS)
    assert len(found) == 14 and set(found.counts.values()) == {IDS.numel()} and found.num_tokens == IDS.numel()
    assert found.sums[DOWN].shape == (48,) and found.seeds == (0,) and found.model == "LlamaForCausalLM"
    torch.testing.assert_close(found[DOWN], found.sums[DOWN] / IDS.numel())
    assert len(gather_importance(tiny(), IDS, ignore=[])) == 15
    assert list(gather_importance(tiny(), IDS, targets=[DOWN], ignore="lm_head").sums) == [DOWN]


def test_the_model_stays_as_it_was() -> None:
    for kind in (LlamaConfig, MixtralConfig):
        model = tiny(kind, tie_word_embeddings=True)
        parts = {name: (type(each), sorted(vars(each))) for name, each in model.named_modules()}
        parameters = {name: id(each) for name, each in model.named_parameters()}
        config = copy.deepcopy(model.config.to_dict())
        before = model(input_ids=IDS).logits
        gather_importance(model, IDS, ignore=[])
        assert {name: (type(each), sorted(vars(each))) for name, each in model.named_modules()} == parts
        assert {name: id(each) for name, each in model.named_parameters()} == parameters
        assert model.config.to_dict() == config
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_a_model_is_put_together_again_when_something_fails() -> None:
    model = tiny(MixtralConfig)
    kinds = {name: type(each) for name, each in model.named_modules()}
    with pytest.raises(DataError):
        gather_importance(model, [[5, 96]])
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("inf")
    with pytest.raises(ValueError, match="NaN or Inf"):
        gather_importance(model, [[5, 5, 5]])
    assert {name: type(each) for name, each in model.named_modules()} == kinds


def test_a_seed_and_a_number_choose_the_samples() -> None:
    every = [gather_importance(tiny(), IDS.tolist(), num_calibration_samples=2, seed=seed) for seed in range(4)]
    assert {each.num_tokens for each in every} == {48} and [each.seeds for each in every] == [(0,), (1,), (2,), (3,)]
    assert len({float(each.sums[DOWN].sum()) for each in every}) > 1
    assert_same(gather_importance(tiny(), IDS.tolist(), num_calibration_samples=2, seed=3), every[3])
    assert gather_importance(tiny(), IDS.tolist(), max_seq_length=5).num_tokens == 40
    assert gather_importance(tiny(), [{"mine": [1, 2, 3]}], column="mine").num_tokens == 3
    assert (
        gather_importance(tiny(), IDS.tolist(), max_seq_length=10, pack=True, num_calibration_samples=3).counts[DOWN]
        == 30
    )


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(torch.rand(*input_ids.shape, 4))


def test_chance_is_decided_by_the_seed() -> None:
    once, again, other = (gather_importance(Noisy(), IDS, seed=seed)["layer"] for seed in (0, 0, 1))
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_a_model_on_disk_has_the_name_of_its_folder(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "mine")
    found = gather_importance(tmp_path / "mine", IDS, output_file=tmp_path / "new" / "importance.safetensors")
    assert found.model == "mine"
    assert_same(load_importance(tmp_path / "new" / "importance.safetensors"), found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert gather_importance(loaded, IDS).model == "mine"
    half = gather_importance(tmp_path / "mine", IDS, dtype="bfloat16")
    torch.testing.assert_close(half.sums[DOWN], found.sums[DOWN], rtol=0.2, atol=1e-6)
    assert not torch.equal(half.sums[DOWN], found.sums[DOWN])


def refused(kind: type[Exception], *args: Any, **given: Any) -> str:
    with pytest.raises(kind) as caught:
        gather_importance(*args, **given)
    assert type(caught.value) is kind
    return str(caught.value)


def test_what_cannot_be_gathered_is_refused_before_any_work(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert refused(DataError, nowhere, None) == (
        "importance is found by running data through the model. Give a dataset."
    )
    assert refused(ModelError, nowhere, IDS, dtype="bfloat61").startswith("dtype: there is no 'bfloat61'.")
    assert refused(ModelError, nowhere, IDS, device="nowhere").startswith("device: 'nowhere' cannot be used here (")
    assert refused(RecipeError, nowhere, IDS, targets=[]) == (
        "targets: there are no targets in it. Name some, such as Linear."
    )
    file = tmp_path / "there.safetensors"
    file.touch()
    assert refused(OutputError, nowhere, IDS, output_file=file) == (
        f"{file}: exists already. Give another name, or overwrite."
    )
    assert refused(ModelError, str(nowhere), IDS).startswith(f"{nowhere}: there is no such folder")


def test_targets_that_mean_no_layer_are_refused() -> None:
    assert refused(RecipeError, tiny(), IDS, targets=["Embedding"]) == (
        "no layer of this model is meant. Name linear layers in targets, or ignore less. model.embed_tokens: what goes "
        "into an embedding are token ids, which have no importance."
    )


def test_notes_are_errors_if_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gather_importance(tiny(), IDS, ignore=["lm_head", "third"])
    assert found.notes[0] == "ignore: 'third' matches no module."
    assert found.notes[1].endswith("512 samples were asked for, and there are 8.")
    monkeypatch.setattr("scalewright.importance.gather_squares", None)  # that is said before any work
    assert refused(StrictError, tiny(), IDS, ignore=["lm_head", "third"], strict=True) == found.notes[0]
    assert refused(StrictError, tiny(), IDS, strict=True) == found.notes[1]


# ---- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LlamaConfig, MixtralConfig])
def test_halves_that_were_saved_merge_to_the_whole(kind: Any, tmp_path: Path) -> None:
    whole = gather_importance(tiny(kind), IDS, seed=5)
    for name, ids, seed in (("a", IDS[:3], 5), ("b", IDS[3:], 6)):
        gather_importance(tiny(kind), ids, output_file=tmp_path / name, seed=seed)
    merged = merge_files([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert_same(merged, whole, rtol=1e-5)
    assert (merged.num_tokens, merged.model, merged.seeds) == (whole.num_tokens, whole.model, (5, 6))
    assert_same(load_importance(tmp_path / "both"), merged)
    assert_same(merge_files([tmp_path / "b", tmp_path / "a"], tmp_path / "both", overwrite=True), merged)


def test_sums_and_counts_are_added() -> None:
    merged = merge_importance([some(), some(seeds=(4,)), some(notes=["a: little."])])
    assert merged.counts == {"a": 12, "b.c": 6} and merged.num_tokens == 12
    assert merged.sums["b.c"].tolist() == [9.0, 1.5, 21.0]
    assert (merged.seeds, merged.model, merged.notes) == ((3, 4), "tiny", ["a: little."])
    assert_same(merge_importance([some()]), some())


def test_small_sums_are_not_lost() -> None:
    sums = [torch.tensor([each]) for each in (2.0**24, 1.0, 1.0)]
    merged = merge_importance([some(sums={"a": each}, counts={"a": 1}) for each in sums])
    assert merged.sums["a"].tolist() == [2.0**24 + 2]


def test_another_name_of_the_model_is_a_note(tmp_path: Path) -> None:
    note = "importance of models by different names was merged: tiny, other."
    merged = merge_importance([some(), some(model="other")])
    assert merged.notes == [note] and merged.model == "tiny"
    files = [save_importance(each, tmp_path / name) for name, each in (("a", some()), ("b", some(model="other")))]
    with pytest.raises(StrictError) as caught:
        merge_files(files, tmp_path / "both", strict=True)
    assert str(caught.value) == note and not (tmp_path / "both").exists()


MORE = {"a": torch.ones(2), "b.c": torch.ones(3), "d": torch.ones(4)}


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        (
            MORE,
            "two.safetensors: has importance of 3 layers, and one.safetensors of 2: d is in two.safetensors, and not "
            "in one.safetensors. Merge importance of one model and the same layers.",
        ),
        (
            {"a": MORE["a"], "d": MORE["d"]},
            "two.safetensors: has importance of 2 layers, and one.safetensors of 2: b.c is in one.safetensors, and not "
            "in two.safetensors. Merge importance of one model and the same layers.",
        ),
        (
            {"a": MORE["a"], "b.c": torch.ones(5)},
            "two.safetensors: b.c has 5 input channels, and 3 in one.safetensors. Merge importance of one model.",
        ),
    ],
)
def test_importance_of_different_models_is_not_merged(sums: dict[str, Tensor], expected: str, tmp_path: Path) -> None:
    other = some(sums=sums, counts=dict.fromkeys(sums, 1), origin="two.safetensors")
    with pytest.raises(ImportanceError) as caught:
        merge_importance([some(), other])
    assert str(caught.value) == expected
    files = [save_importance(each, tmp_path / each.origin) for each in (some(), other)]
    with pytest.raises(ImportanceError) as caught:
        merge_files(files, tmp_path / "both")
    assert str(caught.value) == expected and not (tmp_path / "both").exists()


def test_a_file_is_not_merged_with_itself(tmp_path: Path) -> None:
    file = save_importance(some(), tmp_path / "a")
    again = tmp_path / "x" / ".." / "a"
    with pytest.raises(ImportanceError) as caught:
        merge_files([file, again], tmp_path / "both")
    assert str(caught.value) == f"{again}: is given twice. What it has must be added once."
    with pytest.raises(ImportanceError, match=r"^there is no importance to merge\. Give some\.$"):
        merge_importance([])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = some(seeds=(3, 5))
    file = save_importance(written, str(tmp_path / "one.safetensors"))
    assert file == tmp_path / "one.safetensors"
    read = load_importance(str(file))
    assert_same(read, written)
    assert (read.model, read.num_tokens, read.seeds, read.origin) == ("tiny", 4, (3, 5), "one.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["one.safetensors"]
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode, "others may read it as any other file"


def test_the_format_is_what_others_can_read(tmp_path: Path) -> None:
    file = save_importance(some(), tmp_path / "one")
    tensors = load_file(file)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == {
        "a.sum": (torch.float32, (2,)),
        "a.count": (torch.int64, ()),
        "b.c.sum": (torch.float32, (3,)),
        "b.c.count": (torch.int64, ()),
    }
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"version": "1", "model": "tiny", "num_tokens": "4", "seed": "3"}


def test_the_same_importance_is_the_same_file(tmp_path: Path) -> None:
    """A run that was stopped goes on only with the very file that it had."""
    files = {save_importance(some(), tmp_path / str(i)).read_bytes() for i in range(8)}
    assert len(files) == 1


def test_a_file_that_is_there_is_kept_unless_one_says_otherwise(tmp_path: Path) -> None:
    file = save_importance(some(), tmp_path / "one")
    before = file.read_bytes()
    with pytest.raises(OutputError) as caught:
        save_importance(some(num_tokens=5), file)
    assert str(caught.value) == f"{file}: exists already. Give another name, or overwrite."
    assert file.read_bytes() == before
    assert load_importance(save_importance(some(num_tokens=5), file, overwrite=True)).num_tokens == 5


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(path: Path) -> str:
        with pytest.raises(OutputError) as caught:
            save_importance(some(), path)
        return str(caught.value)

    assert message(tmp_path) == f"{tmp_path}: is a folder. Give the name of a file."
    file = save_importance(some(), tmp_path / "one")
    file.chmod(0o777)
    assert message(file / "two") == f"{file / 'two'}: {file} cannot be written to."
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert message(tmp_path / "new" / "two") == f"{tmp_path / 'new' / 'two'}: {tmp_path} cannot be written to."


def test_a_file_that_was_not_finished_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def half(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OutputError, match=r"one: cannot be written \(no space left\)\. Give another file\.$"):
        save_importance(some(), tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


GOOD = {"a.sum": torch.ones(2), "a.count": torch.tensor(3)}
METADATA = {"version": "1", "model": "tiny", "num_tokens": "3", "seed": "0"}
WRITTEN = "Give a file that `scalewright importance` has written."
BAD_FILES = {
    "another tensor": (
        {**GOOD, "a.weight": torch.ones(2)},
        METADATA,
        f"'a.weight' is neither a sum nor a count. {WRITTEN}",
    ),
    "no layer's name": ({**GOOD, "sum": torch.ones(2)}, METADATA, f"'sum' is neither a sum nor a count. {WRITTEN}"),
    "no count": ({**GOOD, "b.sum": torch.ones(2)}, METADATA, f"there is 'b.sum', and no 'b.count'. {WRITTEN}"),
    "no sum": ({**GOOD, "b.count": torch.tensor(1)}, METADATA, f"there is 'b.count', and no 'b.sum'. {WRITTEN}"),
    "another dtype": (
        {**GOOD, "a.sum": torch.ones(2).half()},
        METADATA,
        f"'a.sum' is torch.float16 with 1 dimensions, and should be torch.float32 with 1. {WRITTEN}",
    ),
    "another shape": (
        {**GOOD, "a.count": torch.tensor([3])},
        METADATA,
        f"'a.count' is torch.int64 with 1 dimensions, and should be torch.int64 with 0. {WRITTEN}",
    ),
    "NaN": (
        {**GOOD, "a.sum": torch.tensor([1.0, float("nan")])},
        METADATA,
        "'a.sum' has NaN, Inf or negative numbers in it. Gather it anew.",
    ),
    "a negative count": (
        {**GOOD, "a.count": torch.tensor(-1)},
        METADATA,
        "'a.count' has NaN, Inf or negative numbers in it. Gather it anew.",
    ),
    "nothing": ({}, METADATA, f"there is no layer in it. {WRITTEN}"),
    "no metadata": (GOOD, None, f"there is no 'version' in its metadata. {WRITTEN}"),
    "no seed": (
        GOOD,
        {name: each for name, each in METADATA.items() if name != "seed"},
        f"there is no 'seed' in its metadata. {WRITTEN}",
    ),
    "another version": (
        GOOD,
        {**METADATA, "version": "2"},
        "is of version 2, and version 1 can be read. Gather it anew, or use a newer Scalewright.",
    ),
    "no number": (
        GOOD,
        {**METADATA, "num_tokens": "many"},
        f"its metadata cannot be read (invalid literal for int() with base 10: 'many'). {WRITTEN}",
    ),
}


def unreadable(path: Path) -> str:
    with pytest.raises(ImportanceError) as caught:
        load_importance(path)
    return str(caught.value)


@pytest.mark.parametrize(("tensors", "metadata", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_means_nothing_is_refused(tensors: Any, metadata: Any, expected: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "bad", metadata)
    assert unreadable(tmp_path / "bad") == f"{tmp_path / 'bad'}: {expected}"


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    assert unreadable(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: there is no such file."
    assert unreadable(tmp_path) == f"{tmp_path}: there is no such file."
    (tmp_path / "text").write_text("a.sum: 1, 2, 3, and a few more words")
    (tmp_path / "empty").touch()
    header = json.dumps({"a.sum": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "cut").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    for name in ("text", "empty", "cut"):
        message = unreadable(tmp_path / name)
        assert message.startswith(f"{tmp_path / name}: is no safetensors file (") and message.endswith(f"). {WRITTEN}")


def test_plain_data_has_all_but_the_sums() -> None:
    assert json.loads(json.dumps(some(notes=["a: little."]).to_dict())) == {
        "model": "tiny",
        "num_tokens": 4,
        "seeds": [3],
        "layers": [{"name": "a", "inputs": 2, "tokens": 4}, {"name": "b.c", "inputs": 3, "tokens": 2}],
        "notes": ["a: little."],
    }


def test_importance_that_was_read_does_not_change_with_its_file(tmp_path):
    """A mapped file that is written again is other numbers, and one that is cut short ends the process."""
    file = tmp_path / "imatrix.safetensors"
    save_importance(Importance({"a": torch.ones(1024)}, {"a": 1}, "model", 1, (0,)), file)
    found = load_importance(file)
    file.write_bytes(b"\0" * file.stat().st_size)
    assert found.sums["a"].eq(1.0).all()
