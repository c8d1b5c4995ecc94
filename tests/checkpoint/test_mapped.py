"""Weights stay in the files that they are in, whatever these are called: nothing is copied that need not be."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright.calibration.scratch import Scratch
from scalewright.checkpoint.loading import load_model
from scalewright.checkpoint.mapped import MappedFiles, can_map

pytestmark = pytest.mark.skipif(not can_map(), reason="the system does not tell what is mapped")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def assert_nothing_is_copied(folder, scratch, monkeypatch):
    monkeypatch.setattr(Scratch, "place", lambda *_, **__: pytest.fail("a weight was copied"))
    files = MappedFiles(Scratch(scratch))
    with files.catching():
        model = load_model(folder)
    stored = LlamaForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, each in model.named_parameters():
        place = files.place_of(each)
        assert place is not None and place.read() == stored[name].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["plain", "with a space ", "日本", "line\u2028separator", "new\nline"])
def test_whatever_the_folder_is_called(name, source, tmp_path, monkeypatch):
    assert_nothing_is_copied(shutil.copytree(source, tmp_path / name), tmp_path, monkeypatch)


def test_files_of_the_hub_have_other_names_than_the_links_to_them(source, tmp_path, monkeypatch):
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1f2e"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (folder / file.name).symlink_to(f"../../blobs/{number:064x}")
    assert_nothing_is_copied(folder, tmp_path, monkeypatch)
