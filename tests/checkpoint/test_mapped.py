"""Weights stay in the files that they are in, whatever these are called: nothing is copied that need not be."""

import gc
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def test_what_others_have_mapped_is_theirs(source, tmp_path):
    """Memory that is given back is that of the model's own files, whatever is mapped, or no longer mapped, beside."""
    files = MappedFiles(Scratch(tmp_path))
    with files.catching():
        model = load_model(source)
    save_file({"weight": torch.zeros(1 << 16)}, tmp_path / "other.safetensors")
    other = load_file(tmp_path / "other.safetensors")["weight"].add_(1.0)  # mapped, and changed in memory alone
    assert not files.has(torch.ones(1 << 16))
    files.give_back([other, torch.ones(1 << 16)])
    files.give_back_all()
    assert other.eq(1.0).all()
    assert all(files.place_of(each) is not None for each in model.parameters())


def test_a_file_stays_mapped_as_long_as_its_memory_is_given_back(source, tmp_path):
    """Otherwise something else could come to lie there, and would be wiped out."""
    files = MappedFiles(Scratch(tmp_path))
    with files.catching():
        model = load_model(source)
    place = next(model.parameters()).data_ptr()
    del model
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        bounds = [[int(each, 16) for each in line.split()[0].split("-")] for line in maps if str(source) in line]
    assert any(start <= place < end for start, end in bounds)


def test_catching_again_forgets_nothing(source, tmp_path):
    files = MappedFiles(Scratch(tmp_path))
    with files.catching():
        model = load_model(source)
    with files.catching():
        computed = torch.nn.Linear(256, 256)
    assert all(files.place_of(each) is not None for each in model.parameters())
    assert files.has(computed.weight) and files.place_of(computed.weight) is None
