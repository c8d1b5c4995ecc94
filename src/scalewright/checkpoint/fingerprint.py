"""What makes a run the same run: its model, recipe, data, settings and the versions of what computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PACKAGES = ("scalewright", "torch", "transformers", "compressed-tensors")


def versions() -> dict[str, str]:
    """Of the packages whose code decides what is written."""
    return {name: version(name) for name in _PACKAGES}


def fingerprint_of(
    source: nn.Module | str | Path,
    model: nn.Module,
    recipe: Any,
    batches: Sequence[Mapping[str, Any]],
    files: Mapping[Any, Any],
    settings: Sequence[Any],
) -> dict[str, str]:
    """A digest of each thing that a run depends on. `source` is what the user gave, `model` what became of it."""
    return {
        "model": _digest(_of_model(source, model)),
        "recipe": _digest([recipe.to_yaml(), *sorted(str(each) for each in files)]),
        "data": digest_of_data(batches),
        "set of options": _digest(settings),
        "set of versions": json.dumps(versions()),
    }


def digest_of_data(batches: Sequence[Mapping[str, Any]]) -> str:
    """A digest of all that is in batches."""
    return _digest([_of_value(each) for batch in batches for each in tree_leaves(dict(batch))])


def _of_model(source: nn.Module | str | Path, model: nn.Module) -> Iterable[Any]:
    if not isinstance(source, nn.Module) and Path(source).is_dir():
        for file in sorted(Path(source).iterdir()):
            if file.suffix in (".json", ".safetensors"):
                known = file.stat()
                yield file.name, known.st_size, known.st_mtime_ns
    yield str(next((each.dtype for each in model.parameters()), None))
    if isinstance(source, nn.Module) or not Path(source).is_dir():
        for name, each in model.state_dict().items():
            yield name, tuple(each.shape), _of_value(each)


def _of_value(value: Any) -> Any:
    """A number that another tensor will hardly have: the sum of its bits, in words."""
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return repr(value)
    flat = value.detach().contiguous().reshape(-1)
    words = {4: torch.int32, 2: torch.int16, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    bits = flat.view(words) if flat.numel() else flat
    weighed = bits[: len(bits) // 2].sum(dtype=torch.int64) * 3 + bits[len(bits) // 2 :].sum(dtype=torch.int64)
    ends = bits[:64].tolist() + bits[-64:].tolist()
    return str(value.dtype), tuple(value.shape), int(weighed), ends


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in values:
        digest.update(repr(each).encode() + b"\n")
    return digest.hexdigest()
