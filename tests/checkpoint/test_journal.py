"""What was finished before a stop is there after it, whole or not at all."""

import fcntl
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch

from scalewright.checkpoint.journal import journal_for, partial_of
from scalewright.errors import OutputError

PRINT = {"model": "a", "recipe": "b"}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)), "scale": torch.ones(4, 1)}


def begin(out: Path, *names: str) -> None:
    """A run that stops after some layers."""
    with journal_for(out, PRINT, restart=False) as journal:
        for number, name in enumerate(names):
            journal.keep(name, tensors(number), {"db": number})


def refused(out: Path, fingerprint: dict[str, str] | None = None) -> str:
    with pytest.raises(OutputError) as caught, journal_for(out, fingerprint or PRINT, restart=False):
        pass
    return str(caught.value)


def test_a_run_goes_on_from_what_was_finished(tmp_path):
    out = tmp_path / "out"
    begin(out, "a", "b")
    with journal_for(out, PRINT, restart=False) as journal:
        assert list(journal.entries) == ["a", "b"] and journal.record("b") == {"db": 1}
        assert torch.equal(journal.part("b")["weight"], tensors(1)["weight"])
        journal.keep("c", tensors(2), {})
    with journal_for(out, PRINT, restart=False) as journal:
        assert list(journal.entries) == ["a", "b", "c"]
        assert len({entry["file"] for entry in journal.entries.values()}) == 3


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_was_cut_off_is_forgotten_with_its_layer(tmp_path, cut):
    out = tmp_path / "out"
    begin(out, "a", "b")
    file = partial_of(out) / "journal.jsonl"
    os.truncate(file, file.stat().st_size - cut)
    with journal_for(out, PRINT, restart=False) as journal:
        assert list(journal.entries) == ["a"]
        journal.keep("b", tensors(7), {})
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("layer") for line in lines] == [None, "a", "b"]


def test_what_has_changed_is_named_and_restart_begins_anew(tmp_path):
    out = tmp_path / "out"
    begin(out, "a")
    folder = partial_of(out)
    assert refused(out, {"model": "a", "recipe": "c"}) == (
        f"{folder}: was begun with another recipe. Run it as before to go on, or use restart to begin anew."
    )
    assert "another model and another recipe" in refused(out, {"model": "x", "recipe": "c"})
    with journal_for(out, {"model": "x"}, restart=True) as journal:
        assert journal.entries == {}


def test_a_damaged_part_or_line_is_named(tmp_path):
    out = tmp_path / "out"
    begin(out, "a", "b")
    part = partial_of(out) / "000001.safetensors"
    size = part.stat().st_size
    os.truncate(part, size - 3)
    with journal_for(out, PRINT, restart=False) as journal, pytest.raises(OutputError) as caught:
        journal.part("a")
    assert f"{part}: has {size - 3:,} bytes, and was written with {size:,}." in str(caught.value)
    file = partial_of(out) / "journal.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace('"layer": "a"', '"layer": '), encoding="utf-8")
    assert f"{file}:2: is damaged." in refused(out)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"layer": "a"', '"layer": "b"'),
        ('"db": 0', '"db": 9'),
        ('{"db": 0}', "{}"),
        ("000001", "000002"),
        ("line", "lime"),
    ],
)
def test_a_line_that_was_changed_is_named(tmp_path, before, after):
    """It may well be a line that makes sense, and gives a layer what belongs to another."""
    out = tmp_path / "out"
    begin(out, "a", "b")
    file = partial_of(out) / "journal.jsonl"
    first, second, *others = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert before in second
    file.write_text("".join([first, second.replace(before, after), *others]), encoding="utf-8")
    assert f"{file}:2: is damaged." in refused(out)


@pytest.mark.parametrize("place", ["its beginning", "its end", "all of it"])
def test_a_part_of_the_same_size_with_other_bytes_is_named(tmp_path, place):
    """A machine that stopped may have left zeros where bytes were to come."""
    out = tmp_path / "out"
    begin(out, "a", "b")
    part = partial_of(out) / "000001.safetensors"
    whole = part.read_bytes()
    zeros = bytes(16)
    ruined = {"its beginning": zeros + whole[16:], "its end": whole[:-16] + zeros, "all of it": bytes(len(whole))}
    part.write_bytes(ruined[place])
    with journal_for(out, PRINT, restart=False) as journal, pytest.raises(OutputError) as caught:
        journal.part("a")
    folder = partial_of(out)
    assert str(caught.value) == (
        f"{part}: has other bytes than were written. Delete {folder} and run again, or use restart."
    )


def test_two_parts_that_changed_places_are_named(tmp_path):
    out = tmp_path / "out"
    begin(out, "a", "b")
    one, other = (partial_of(out) / f"00000{number}.safetensors" for number in (1, 2))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with journal_for(out, PRINT, restart=False) as journal:
        for name in ("a", "b"):
            with pytest.raises(OutputError, match="has other bytes than were written"):
                journal.part(name)


@pytest.mark.parametrize(
    "line",
    [
        *("123", "null", "[]", '"a"', "[" * 100_000, '{"forget": 5}', '{"forget": [[]]}', '{"layer": ["a"]}'),
        *('{"layer": "a"}', '{"layer": "a", "file": 3, "bytes": 1, "digest": "x", "record": {}}'),
        '{"layer": "a", "file": "000001.safetensors", "bytes": 1, "digest": "x", "record": null}',
    ],
)
def test_a_line_that_is_none_of_ours_is_named(tmp_path, line):
    out = tmp_path / "out"
    begin(out, "a")
    file = partial_of(out) / "journal.jsonl"
    whole = file.read_text(encoding="utf-8")
    for number, text in ((3, f"{whole}{line}\n"), (1, f"{line}\n{whole}")):
        file.write_text(text, encoding="utf-8")
        assert refused(out) == f"{file}:{number}: is damaged. Delete {file.parent} and run again, or use restart."


def test_what_is_in_the_way_inside_of_the_folder_is_said(tmp_path):
    out = tmp_path / "out"
    begin(out, "a")
    (partial_of(out) / "lock").unlink()
    (partial_of(out) / "lock").mkdir()
    assert refused(out).startswith(f"{partial_of(out)}: cannot be written to (Is a directory).")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    out = tmp_path / "out"
    partial_of(out).mkdir()
    (partial_of(out) / "mine.txt").write_text("x", encoding="utf-8")
    assert "is in the way, and no run of ours began it" in refused(out)
    assert (partial_of(out) / "mine.txt").exists()


def test_nothing_is_left_of_a_run_that_finished_no_layer(tmp_path):
    out = tmp_path / "new" / "deep" / "out"
    with pytest.raises(ZeroDivisionError), journal_for(out, PRINT, restart=False):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def hold(out: Path, ready, done) -> None:
    with journal_for(out, PRINT, restart=False):
        ready.set()
        done.wait(30)


def test_a_second_run_is_refused_while_the_first_goes_on(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", ready, done))
    other.start()
    assert ready.wait(60)
    message = refused(tmp_path / "out")
    done.set()
    other.join(30)
    assert "another run is writing there" in message
    begin(tmp_path / "out", "a")


def test_a_run_that_comes_while_another_takes_its_folder_away_is_refused(tmp_path, monkeypatch):
    """What it has locked then is a file that others no longer see."""
    lock = fcntl.flock

    def lock_too_late(file, flags):
        shutil.rmtree(partial_of(tmp_path / "out"))
        lock(file, flags)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    assert "another run is writing there" in refused(tmp_path / "out")


@pytest.mark.parametrize("exists", [False, True])
def test_the_checkpoint_appears_whole(tmp_path, exists):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
        (out / "old").write_text("old", encoding="utf-8")
    with journal_for(out, PRINT, restart=False) as journal:
        journal.keep("a", tensors(0), {})
        with pytest.raises(OutputError, match="No such file or directory"), journal.checkpoint() as draft:
            (draft / "no folder" / "x").write_text("half", encoding="utf-8")
        assert out.exists() == exists
        with journal.checkpoint() as draft:
            assert list(draft.iterdir()) == []
            (draft / "x").write_text("whole", encoding="utf-8")
    assert [each.name for each in out.iterdir()] == ["x"]
    assert list(tmp_path.iterdir()) == [out]
