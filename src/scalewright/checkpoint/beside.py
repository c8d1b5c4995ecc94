"""Files beside tensors and settings (a tokenizer, a processor, code of the model), by digests of their bytes.

Another vocabulary loads without a word, and the model babbles. So the record of a run keeps what was written, and a
file that has other bytes, or is gone, is a problem. What people edit on purpose is a note: a chat template, and the
settings of a tokenizer or a processor, in which a template may be, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from scalewright.checkpoint.fingerprint import digest_of_file
from scalewright.checkpoint.folder import CONFIG, GENERATION, INDEX, RECIPE, RECORD, stays_inside
from scalewright.checkpoint.problems import Problem

_TOLD_OTHERWISE = (CONFIG, GENERATION, INDEX, RECIPE, RECORD)
_OURS = "scalewright_"
_TENSORS = ".safetensors"
_EDITED = re.compile(r"\.jinja$|_config\.json$|(^|/)special_tokens_map\.json$")


def written_files(folder: Path) -> dict[str, str]:
    """What the record is to keep of a checkpoint's folder: the digest of each file that nothing else is known of."""
    files = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*") if each.is_file()}
    return {
        name: digest_of_file(files[name])
        for name in sorted(files)
        if name not in _TOLD_OTHERWISE and not name.endswith(_TENSORS) and not name.startswith(_OURS)
    }


def changed_files(folder: Path, written: Mapping[str, str]) -> tuple[list[Problem], list[str]]:
    """Files that are not what was written: problems, and notes on those that people edit."""
    problems: list[Problem] = []
    notes: list[str] = []
    for name, digest in written.items():
        if not stays_inside(name):
            continue
        file = folder / name
        try:
            if not file.exists():
                problems.append(Problem(name, f"is missing, and was written, by {RECORD}. Copy the checkpoint again."))
            elif not file.is_file():
                problems.append(Problem(name, "is no file."))
            elif digest_of_file(file) != digest:
                what = f"is not the file that was written, by {RECORD}."
                if _EDITED.search(name):
                    notes.append(str(Problem(name, f"{what} If nobody meant that, copy the checkpoint again.")))
                else:
                    todo = "Copy the checkpoint again; if that was meant, take it out of 'files' there."
                    problems.append(Problem(name, f"{what} {todo}"))
        except OSError as error:
            problems.append(Problem(name, f"cannot be read ({error.strerror})."))
    return problems, notes
