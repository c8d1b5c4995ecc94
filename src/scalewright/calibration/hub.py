"""The hub, which may be out of reach: one question finds that out, instead of minutes of retries for each file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

_SECONDS = 10.0


@contextmanager
def hub_asked_once(name: str | Path, *, file: str = "config.json", kind: str = "model") -> Iterator[str | None]:
    """While inside, a name on the hub is looked up in the cache alone if the hub is out of reach. Gives the reason.

    The libraries that load from the hub try each file six times and wait in between, half a minute for each.
    """
    switches: list[Any] = [constants]
    if "datasets" in sys.modules:
        switches.append(sys.modules["datasets"].config)
    is_asked = not os.path.exists(name) and not any(each.HF_HUB_OFFLINE for each in switches)
    reason = _out_of_reach(str(name), file, kind) if is_asked else None
    before = [each.HF_HUB_OFFLINE for each in switches]
    try:
        for each in switches if reason is not None else ():
            each.HF_HUB_OFFLINE = True
        yield reason
    finally:
        for each, was_offline in zip(switches, before, strict=True):
            each.HF_HUB_OFFLINE = was_offline


def folder_in_cache(name: str) -> Path | None:
    """The folder in the hub's cache that has the model of that name; None if there is none. The hub is not asked."""
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # it is not there; it can be no name
        return None


def _out_of_reach(name: str, file: str, kind: str) -> str | None:
    """Why the hub does not answer; None if it does, whatever it says, or if there is nothing to ask for."""
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=_SECONDS)
    except (HfHubHTTPError, ValueError):  # an answer; no name that it could have
        return None
    except Exception as error:  # each client of HTTP has its own
        return f"the hub cannot be reached: {str(error).strip() or type(error).__name__}"
    return None
