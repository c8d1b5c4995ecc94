"""What a run has done so far, in a folder beside its output: a run that was stopped goes on from there.

    OUT.partial/journal.jsonl        a line that says what the run is, then a line for each finished layer
    OUT.partial/000001.safetensors   the tensors of a finished layer
    OUT.partial/checkpoint/          the checkpoint while it is put together; it becomes OUT by its last step

A line is written when the file that it speaks of is complete, and has a digest of itself. A last line that was cut off
is forgotten. Killing the process loses no finished layer; for the case that the machine stops, what is older than half
a minute is on disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from safetensors import SafetensorError
from torch import Tensor

from scalewright.checkpoint.fingerprint import digest_of_file
from scalewright.checkpoint.parts import Part
from scalewright.checkpoint.shards import TensorHere, write_tensors
from scalewright.errors import OutputError

_JOURNAL, _LOCK, _CHECKPOINT, _OLD = "journal.jsonl", "lock", "checkpoint", "old"
_DIGEST = "line"  # the last key of a line: a digest of all others
_SYNC_SECONDS = 30.0
_LINES: dict[str, dict[str, type]] = {
    "fingerprint": {"fingerprint": dict},
    "layer": {"layer": str, "file": str, "bytes": int, "digest": str, "record": dict},
    "forget": {"forget": list},
}

Fingerprint = Mapping[str, str]
"""What must be the same for a run to go on, by what it is called in messages: the model, the recipe, ..."""


@dataclass
class Journal:
    """The finished layers of a run, each with its tensors in a file and its record in a line."""

    folder: Path
    out: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The records of finished layers, by name."""

    def __post_init__(self) -> None:
        self._unsynced: list[Path] = []
        self._began = self._synced = time.monotonic()
        self._number = len(self.entries)

    def keep(self, name: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Part:
        """Write a finished layer; what stands for its tensors."""
        self._number += 1
        file = self.folder / f"{self._number:06}.safetensors"
        draft = file.with_suffix(".draft")
        with self._failing_in_words():
            with draft.open("wb") as opened:
                hashed = _Hashed(opened)
                write_tensors(hashed, {key: TensorHere(each.contiguous()) for key, each in tensors.items()})
            draft.rename(file)
            entry = {
                "layer": name,
                "file": file.name,
                "bytes": hashed.num_bytes,
                "digest": hashed.digest.hexdigest(),
                "record": dict(record),
            }
            self._append(entry)
            self.entries[name] = entry
            self._sync_now_and_then(file)
            return Part(file)

    def forget(self, names: Iterable[str]) -> None:
        """Layers that were finished are not finished after all."""
        names = [name for name in names if name in self.entries]
        with self._failing_in_words():
            self._append({"forget": names})
        for name in names:
            del self.entries[name]

    def has(self, name: str) -> bool:
        """Whether a layer was finished before."""
        return name in self.entries

    def record(self, name: str) -> dict[str, Any]:
        """What was kept with the tensors of a layer."""
        record: dict[str, Any] = self.entries[name]["record"]
        return record

    def part(self, name: str) -> Part:
        """The tensors of a layer that was finished before."""
        entry = self.entries[name]
        file = self.folder / Path(entry["file"]).name
        size = file.stat().st_size if file.exists() else 0
        again = f"Delete {self.folder} and run again, or use restart."
        if size != entry["bytes"]:
            raise OutputError(f"{file}: has {size:,} bytes, and was written with {entry['bytes']:,}. {again}")
        if digest_of_file(file) != entry["digest"]:
            raise OutputError(f"{file}: has other bytes than were written. {again}")
        return Part(file)

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """An empty folder to write the checkpoint to, which becomes `out` when all went well."""
        draft, old, out = self.folder / _CHECKPOINT, self.folder / _OLD, self.out.resolve()
        with self._failing_in_words():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            yield draft
            if time.monotonic() > self._began + _SYNC_SECONDS:
                for each in draft.iterdir():
                    _sync(each)
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            try:
                draft.rename(out)
            except OSError:
                if old.exists():
                    old.rename(out)
                raise
        with suppress(OSError):  # what cannot be taken away does no harm without the journal
            (self.folder / _JOURNAL).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _failing_in_words(self) -> Iterator[None]:
        """What cannot be written, a full disk above all, is an error that says how to go on."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]
            kept = f"Finished layers are kept in {self.folder}. " if self.entries else ""
            raise OutputError(
                f"{self.out}: cannot be written ({reason}). {kept}Mend that, and run the same again to go on."
            ) from error

    def _take(self, entry: dict[str, Any]) -> None:
        """What a line of an earlier run says."""
        if "layer" in entry:
            self.entries[entry["layer"]] = entry
        for name in entry.get("forget", []):
            self.entries.pop(name, None)

    def _append(self, entry: Mapping[str, Any]) -> None:
        with (self.folder / _JOURNAL).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({**entry, _DIGEST: _digest_of(entry)}) + "\n")

    def _sync_now_and_then(self, file: Path) -> None:
        self._unsynced.append(file)
        if time.monotonic() > self._synced + _SYNC_SECONDS:
            for each in (*self._unsynced, self.folder / _JOURNAL, self.folder):
                _sync(each)
            self._unsynced, self._synced = [], time.monotonic()


class _Hashed:
    """A file that is written, and the digest of all that was written to it: reading it again would take as long."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self._file = file

    def write(self, data: bytes | memoryview, /) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.num_bytes += len(data)


def partial_of(out: Path) -> Path:
    """The folder of a run that is to write `out`, or what that is a link to."""
    where = out.resolve()
    return where.parent / f"{where.name}.partial"


@contextmanager
def journal_for(out: Path, fingerprint: Fingerprint, *, restart: bool) -> Iterator[Journal]:
    """The journal of a run, with what an earlier run with the same fingerprint has finished.

    A folder that holds nothing yet is taken away again if nothing comes into it. Two runs never share one.
    """
    folder = partial_of(out)
    is_ours = (folder / _JOURNAL).is_file() or (folder / _LOCK).is_file()
    if folder.exists() and not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder}: is in the way, and no run of ours began it. Move it, or give another OUT.")
    with _beginning(folder):
        made = _make_parents(folder)
    with _locked(folder):
        journal = Journal(folder, out)
        with _beginning(folder):
            if restart:
                for each in [each for each in folder.iterdir() if each.name != _LOCK]:
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
            entries = _read(folder)
        if entries is not None:
            _compare(folder, entries[0]["fingerprint"], fingerprint)
            for entry in entries[1:]:
                journal._take(entry)
            journal._number = len(entries) - 1
        try:
            if entries is None:
                with _beginning(folder):
                    journal._append({"fingerprint": dict(fingerprint)})
            yield journal
        finally:
            if folder.exists() and not journal.entries:
                shutil.rmtree(folder, ignore_errors=True)
                for each in made:
                    with suppress(OSError):
                        each.rmdir()


# ---- inside ----------------------------------------------------------------------------------------------------------


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder; the parents that had to be made for it, innermost first."""
    made = [each for each in folder.parents if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


@contextmanager
def _beginning(folder: Path) -> Iterator[None]:
    """Inside the folder is made ready; nothing is lost if that cannot be."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be written to ({error.strerror or error}). Mend that, or give another OUT."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with _beginning(folder):
        lock = (folder / _LOCK).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat())
        except OSError:
            is_there = False
        if not is_there:  # or it was, a moment ago, and has taken its folder away
            raise OutputError(f"{folder}: another run is writing there. Wait for it, or give another OUT.")
        yield


def _read(folder: Path) -> list[dict[str, Any]] | None:
    """The lines of a journal, whose last may be cut off (it is taken away); None if there is none."""
    file = folder / _JOURNAL
    if not file.exists():
        return None
    whole, entries = 0, list[dict[str, Any]]()
    raw = file.read_bytes()
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        entry = _entry(line)
        if entry is None or ("fingerprint" in entry) is bool(entries):
            number = len(entries) + 1
            raise OutputError(f"{file}:{number}: is damaged. Delete {folder} and run again, or use restart.")
        entries.append(entry)
        whole += len(line)
    if whole < len(raw):
        os.truncate(file, whole)
    return entries or None


def _digest_of(entry: Mapping[str, Any]) -> str:
    """What tells a line from one that was changed."""
    return str(xxhash.xxh3_64_hexdigest(json.dumps(entry).encode()))


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is none of ours, or not as it was written."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or found.pop(_DIGEST, None) != _digest_of(found):
            return None
    except (ValueError, RecursionError):
        return None
    known = next((kinds for key, kinds in _LINES.items() if key in found), None)
    if known is None or not all(isinstance(found.get(key), kind) for key, kind in known.items()):
        return None
    return found if all(isinstance(name, str) for name in found.get("forget", ())) else None


def _compare(folder: Path, before: Fingerprint, now: Fingerprint) -> None:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        raise OutputError(
            f"{folder}: was begun with another {' and another '.join(changed)}. Run it as before to go on, or use "
            "restart to begin anew."
        )


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
