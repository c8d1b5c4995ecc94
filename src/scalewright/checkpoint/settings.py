"""What `config.json` and `generation_config.json` said when a checkpoint was written, and what they say now.

An angle, an epsilon or the id of an end can be changed so that every shape still fits: such a model loads, and writes
something else. So the record of a run keeps what was written, and each key that has another value, or is gone, is a
problem. What was added is a note: it may be a setting that only another program knows. So is how text is drawn (a
temperature), which is for users to say. What says nothing of the model,
such as the version of the program that saved it, is passed over, and the order and the look of a file do not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalewright.checkpoint.folder import CONFIG, GENERATION, RECORD
from scalewright.checkpoint.problems import Problem

_OF_NO_ACCOUNT = {"transformers_version", "_name_or_path", "_from_model_config", "quantization_config.version"}
_EARLIER = {"torch_dtype": "dtype"}
_LONGEST = 60  # characters of a value that are shown
_MOST = 10  # new keys that are named
_NONE = object()

_Values = Mapping[str, Any]


def written_settings(folder: Path) -> dict[str, Any]:
    """What the record is to keep of the files in a folder."""
    files = (folder / name for name in (CONFIG, GENERATION))
    return {each.name: json.loads(each.read_text(encoding="utf-8")) for each in files if each.is_file()}


def changed_settings(file: str, now: _Values, written: _Values) -> Iterator[Problem]:
    """A problem for each key whose value is not the one that was written."""
    for key, value, before in _differences(now, written):
        if before is not _NONE and not _is_choice(file, key):
            yield Problem(
                file,
                f"{key} {_is_now(value)}, and was written as {_shown(before)}, by {RECORD}. Put it back; if that was "
                "meant, take it out of 'settings' there.",
            )


def notes_on_settings(file: str, now: _Values, written: _Values) -> list[str]:
    """What a file says otherwise that is for users to say, and what it has besides what was written."""
    return [
        *(
            str(Problem(file, f"{key} {_is_now(value)}, and was written as {_shown(before)}."))
            for key, value, before in _differences(now, written)
            if before is not _NONE and _is_choice(file, key)
        ),
        *_added(file, now, written),
    ]


def _is_choice(file: str, key: str) -> bool:
    """Whether it is how text is drawn, and not which tokens begin and end it."""
    return file == GENERATION and "token" not in key


def _is_now(value: Any) -> str:
    return "is gone" if value is _NONE else f"is {_shown(value)}"


def _added(file: str, now: _Values, written: _Values) -> list[str]:
    new = [key for key, _, before in _differences(now, written) if before is _NONE]
    if not new:
        return []
    shown = ", ".join(each if len(each) <= _LONGEST else f"{each[:_LONGEST]}..." for each in new[:_MOST])
    more = f" and {len(new) - _MOST} more" if len(new) > _MOST else ""
    return [str(Problem(file, f"has {shown}{more} besides what was written; what that does is not verified."))]


def _differences(now: _Values, written: _Values) -> Iterator[tuple[str, Any, Any]]:
    """Keys, with their places, whose values differ: what they are, and what they were."""
    waiting = [("", now, written)]
    while waiting:
        place, mine, theirs = waiting.pop()
        mine, theirs = _by_todays_names(mine), _by_todays_names(theirs)
        for name in dict.fromkeys([*theirs, *mine]):
            key = f"{place}{name}"
            value, before = mine.get(name, _NONE), theirs.get(name, _NONE)
            if key in _OF_NO_ACCOUNT:
                continue
            if isinstance(value, dict) and isinstance(before, dict):
                waiting.append((f"{key}.", value, before))
            elif value is _NONE or before is _NONE or not _is_same(value, before):
                yield key, value, before


def _by_todays_names(values: _Values) -> _Values:
    return {_EARLIER[key] if _EARLIER.get(key, key) not in values else key: each for key, each in values.items()}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, int | float):
        return _text(one) == _text(other)
    return bool(one == other) or _text(one) == _text(other)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:
        return "something of too many levels"
