"""Files that are put together from others: readers find every tensor as it was."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scalewright.checkpoint.parts import Part
from scalewright.checkpoint.shards import TensorHere, tensors_in, write_shards

TENSORS = {
    "a.bytes": torch.arange(7, dtype=torch.uint8),
    "a.half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "b.scalar": torch.tensor(3, dtype=torch.int64),
    "b.none": torch.empty(0, 4),
    "c.float8": torch.randn(2, 2, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
    "ü.names": torch.ones(2, 3, dtype=torch.int32),
}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape), name
        assert torch.equal(found[name].view(torch.uint8) if each.ndim else found[name], _bytes(each)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.ndim else tensor


@pytest.fixture
def places(tmp_path):
    names = list(TENSORS)
    for file, some in (("one", names[:3]), ("two", names[3:])):
        save_file({name: TENSORS[name] for name in some}, tmp_path / f"{file}.safetensors")
    return tensors_in(tmp_path / "one.safetensors") | tensors_in(tmp_path / "two.safetensors")


def test_one_file_holds_all_of_several(places, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_shards(out, places, max_bytes=10**6)
    assert [each.name for each in out.iterdir()] == ["model.safetensors"]
    assert_same(load_file(out / "model.safetensors"), TENSORS)
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("max_bytes", [1, 30, 50])
def test_shards_hold_all_and_the_index_says_where(places, tmp_path, max_bytes):
    out = tmp_path / "out"
    out.mkdir()
    write_shards(out, places, max_bytes=max_bytes)
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 and {each.name for each in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in TENSORS.values())
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, TENSORS)
    for file in files:
        sizes = [each.num_bytes for each in tensors_in(file).values()]
        assert sum(sizes) <= max_bytes or len([size for size in sizes if size]) == 1


def test_elements_are_aligned_so_that_a_file_can_be_mapped(places, tmp_path):
    write_shards(tmp_path, places, max_bytes=10**6)
    for name, place in tensors_in(tmp_path / "model.safetensors").items():
        assert not place.num_bytes or place.start % TENSORS[name].element_size() == 0, name


def test_a_file_that_was_cut_is_no_source(places, tmp_path):
    cut = tmp_path / "two.safetensors"
    cut.write_bytes(cut.read_bytes()[:-3])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OSError, match=r"two\.safetensors: ends before its last tensor does"):
        write_shards(out, places, max_bytes=10**6)


def test_a_part_stands_for_the_tensors_of_its_file(tmp_path):
    save_file(TENSORS, tmp_path / "part.safetensors")
    part = Part(tmp_path / "part.safetensors")
    assert_same(dict(part), TENSORS)
    with pytest.raises(KeyError):
        part["d"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int32).as_strided((1, 1), (6, 6)),
        torch.arange(6.0)[::2],
        torch.arange(6.0).view(2, 3).T,
    ],
    ids=["one number", "every other one", "columns"],
)
def test_tensors_are_written_however_they_lie_in_memory(tensor, tmp_path):
    write_shards(tmp_path, {"a": TensorHere(tensor)}, max_bytes=10**6)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor)
