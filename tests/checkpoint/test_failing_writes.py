"""Every file operation of a run fails once: no half checkpoint is seen, and the same run then ends as it should."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from scalewright import oneshot
from scalewright.checkpoint import journal as journal_module
from scalewright.checkpoint import saving as saving_module
from scalewright.checkpoint.outputs import check_output_file, write_file
from scalewright.errors import OutputError

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.copytree"}


class FailingDisk:
    """Counts what is done to files under a folder, and fails one of these operations."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        self.fails_at: int | None = None

    def look(self, event: str, args: tuple[object, ...]) -> None:
        if self.folder is None or not args or not isinstance(args[0], str | Path):
            return
        is_writing = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if (event in CHANGES or is_writing) and str(args[0]).startswith(str(self.folder)):
            self.count(f"{event} {Path(str(args[0])).name}")

    def count(self, what: str) -> None:
        self.seen.append(what)
        if len(self.seen) - 1 == self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def watching(self, folder: Path, fails_at: int | None = None) -> Iterator[None]:
        self.folder, self.seen, self.fails_at = folder, [], fails_at
        try:
            yield
        finally:
            self.folder = None


DISK = FailingDisk()
sys.addaudithook(DISK.look)  # there is no way to take it off again; without a folder it does nothing


@pytest.fixture(autouse=True)
def counted_safetensors(monkeypatch):
    """What safetensors writes goes past Python."""
    save = saving_module.save_file

    def counted(tensors, file, *rest, **more):
        if DISK.folder is not None and str(file).startswith(str(DISK.folder)):
            DISK.count(f"save_file {Path(file).name}")
        save(tensors, file, *rest, **more)

    monkeypatch.setattr(saving_module, "save_file", counted)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


MODELS = {"plain": (plain, 1), "llama": (llama, 5)}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("is_there", [False, True], ids=["anew", "overwriting"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_operation_that_fails_loses_nothing(kind, is_there, tmp_path):
    make, step = MODELS[kind]
    given = {"scheme": "W8A8_DYNAMIC", "overwrite": is_there}
    oneshot(make(), output_dir=tmp_path / "reference", scheme="W8A8_DYNAMIC")
    expected = contents(tmp_path / "reference")
    place = tmp_path / "count"
    if is_there:
        oneshot(make(), output_dir=place / "out", scheme="FP8_DYNAMIC")
    with DISK.watching(place):
        oneshot(make(), output_dir=place / "out", **given)
    operations = list(DISK.seen)
    assert any("journal.jsonl" in each for each in operations) and any("checkpoint" in each for each in operations)
    failed = 0
    for number in range(0, len(operations), step):
        place = tmp_path / f"{number}"
        if is_there:
            oneshot(make(), output_dir=place / "out", scheme="FP8_DYNAMIC")
            before = contents(place / "out")
        error = None
        try:
            with DISK.watching(place, fails_at=number):
                oneshot(make(), output_dir=place / "out", **given)
        except OutputError as caught:
            error = caught
        if error is not None:
            failed += 1
            assert "No space left on device" in str(error), operations[number]
            if is_there:
                assert contents(place / "out") in (before, expected), operations[number]
            else:
                assert not (place / "out").exists(), operations[number]
            if not (is_there and contents(place / "out") == expected):
                oneshot(make(), output_dir=place / "out", **given)
        assert contents(place / "out") == expected, operations[number]
        if (place / "out.partial").exists():  # what could not be taken away is no harm to the next run
            assert error is None and operations[number].startswith(("os.rm", "os.remove"))
            oneshot(make(), output_dir=place / "out", **given | {"overwrite": True})
            assert contents(place / "out") == expected, operations[number]
        assert [each.name for each in place.iterdir()] == ["out"], operations[number]
    assert failed > 5


def test_a_full_disk_is_said_with_what_to_do(tmp_path):
    with DISK.watching(tmp_path):
        oneshot(plain(), output_dir=tmp_path / "count", scheme="W8A8_DYNAMIC")
    second = DISK.seen.index("open 000002.draft")
    out = tmp_path / "out"
    with pytest.raises(OutputError) as caught, DISK.watching(tmp_path, fails_at=second):
        oneshot(plain(), output_dir=out, scheme="W8A8_DYNAMIC")
    assert str(caught.value) == (
        f"{out}: cannot be written (No space left on device). Finished layers are kept in {out}.partial. Mend that, "
        "and run the same again to go on."
    )


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_a_disk_that_is_full_within_a_layer_loses_no_other(tmp_path, monkeypatch, fails_at):
    out, expected = tmp_path / "out", tmp_path / "expected"
    oneshot(plain(), output_dir=expected, scheme="W8A8_DYNAMIC")
    write, calls = journal_module._Hashed.write, []

    def full(self, data):
        calls.append(len(data))
        if len(calls) == 5 + fails_at:  # the first layer took four: its header, and three tensors
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(journal_module._Hashed, "write", full)
    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        oneshot(plain(), output_dir=out, scheme="W8A8_DYNAMIC")
    monkeypatch.undo()
    lines = (tmp_path / "out.partial" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("layer") for line in lines] == [None, "0"]
    oneshot(plain(), output_dir=out, scheme="W8A8_DYNAMIC")
    assert contents(out) == contents(expected)


def test_what_waits_in_files_needs_room_too(tmp_path, monkeypatch):
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    llama().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("scalewright.calibration.scratch.tempfile.TemporaryFile", full)
    data = {"input_ids": torch.arange(2048).remainder(64).reshape(32, 64)}
    given = {"scheme": "W8A8", "dataset": data, "pipeline": "sequential", "max_memory": 0}
    with pytest.raises(OutputError) as caught:
        oneshot(tmp_path / "model", output_dir=tmp_path / "out", batch_size=32, **given)
    assert str(caught.value) == (
        f"{tmp_path}: what waits in files there cannot be written (No space left on device). Make room, give more "
        "memory, or another OUT."
    )
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_single_file_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path):
    for fails_at in (1, 2):  # opening and renaming; the folder is there
        with pytest.raises(OutputError) as caught, DISK.watching(tmp_path, fails_at=fails_at):
            write_file(tmp_path / "a.json", b"{}")
        assert str(caught.value) == (
            f"{tmp_path / 'a.json'}: cannot be written (No space left on device). Give another file."
        )
        assert not any(tmp_path.iterdir())
    for length in (241, 300):
        with pytest.raises(OutputError, match="has a name that is too long"):
            check_output_file(tmp_path / ("a" * length), overwrite=False)
    assert write_file(tmp_path / ("a" * 240), b"{}").exists()
