"""Writing a quantised model as a compressed-tensors checkpoint.

It is written to a draft, which gets its name when it is complete (journal.py): a folder of that name is a whole
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationStatus
from safetensors.torch import save_file
from torch import Tensor, nn

from scalewright.calibration.loaders import settle_names
from scalewright.checkpoint.journal import partial_of
from scalewright.checkpoint.loading import without_bars
from scalewright.checkpoint.memory import in_units
from scalewright.checkpoint.parts import Part
from scalewright.checkpoint.shards import DTYPES, StoredTensor, TensorAt, TensorHere, tensors_in, write_shards
from scalewright.errors import OutputError

_SHARD_BYTES = 5 * 10**9
_STAND_IN = (1, 1, 1, 1, 1, 1)  # the shape of stand-ins, which no weight has


def disk_of(path: Path) -> Path:
    """The folder that is there already, on whose disk a path will be."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def check_output(path: Path, *, overwrite: bool, source: Any = None, num_bytes: int = 0, kept_bytes: int = 0) -> None:
    """Say no, before any work, to a place that a checkpoint of about `num_bytes` cannot be written to.

    `source` is the model as the user gave it. `kept_bytes` are those of finished layers, which are kept in
    `OUT.partial` until the checkpoint is complete.
    """
    try:
        where, _, is_there = path.resolve(), partial_of(path).exists(), path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; links that lead to each other
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{path}: cannot be a folder ({reason}). Give another name.") from None
    if is_there and not path.is_dir():
        raise OutputError(f"{path}: is a file. Give a folder.")
    if is_there and any(path.iterdir()) and not overwrite:
        raise OutputError(f"{path}: exists already and is not empty. Give another folder, or overwrite.")
    if is_there and Path.cwd().is_relative_to(where):
        raise OutputError(f"{path}: you are in it, and it would be replaced. Give another folder.")
    if isinstance(source, str | Path) and os.path.isdir(source) and Path(source).resolve().is_relative_to(where):
        raise OutputError(f"{path}: the model is in it, and would be lost. Give another folder.")
    parent = disk_of(where)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: {parent} cannot be written to. Give another folder.")
    begun = sum(file.stat().st_size for file in partial_of(path).glob("*") if file.is_file())
    free = shutil.disk_usage(parent).free + begun  # what a run has kept so far, the next one need not
    if num_bytes + kept_bytes > free:
        meanwhile = f" and finished layers {in_units(kept_bytes)} until it is complete" if kept_bytes else ""
        raise OutputError(
            f"{path}: the checkpoint takes about {in_units(num_bytes)}{meanwhile}, and {in_units(free)} are free. Make "
            "room, or give another folder."
        )


def save_checkpoint(
    model: nn.Module,
    layers: Mapping[str, Part],
    draft: Path,
    *,
    files: Mapping[str, str],
    companions: Iterable[Any] = (),
    place_of: Callable[[Tensor], TensorAt | None] = lambda tensor: None,
) -> dict[str, str]:
    """Write `model`, whose `layers` are quantised, to the empty folder `draft`; the digest of each tensor there.

    The tensors of each layer are in a file; `companions` are a tokenizer and the like, `files` are texts to write
    beside. `place_of` says of a tensor where it lies in a file, if it does; it is copied from there.
    """
    with without_bars():
        # transformers knows by which names a model is stored. It is given stand-ins for all that it need not write.
        state, stored = _with_stand_ins(model, layers, place_of)
        if isinstance(model, transformers.PreTrainedModel):
            with _settings_apart(model, draft):
                model.save_pretrained(draft, state_dict=state, max_shard_size="1000TB")
        else:
            save_file(_each_its_own(state), draft / "model.safetensors")
        whole = draft / "model.safetensors"
        rest = whole.rename(draft / "rest.safetensors")
        digests = write_shards(draft, _without_stand_ins(tensors_in(rest), stored), max_bytes=_SHARD_BYTES)
        rest.unlink()
        for each in companions:
            each.save_pretrained(draft)
        _write_config(model, draft)
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")
        return digests


@contextmanager
def _settings_apart(model: transformers.PreTrainedModel, draft: Path) -> Iterator[None]:
    """Inside a model is saved. Its settings for generation are written as they are.

    transformers reads what it would not write (a temperature without `do_sample`), and such models are many.
    """
    given = getattr(model, "generation_config", None)
    if given is None:
        yield
        return
    model.generation_config = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = given
    written = draft / "generation_config.json"
    if written.exists():
        given.to_json_file(written, keys_to_pop=["compile_config"])


def _with_stand_ins(
    model: nn.Module,
    layers: Mapping[str, Part],
    place_of: Callable[[Tensor], TensorAt | None],
) -> tuple[dict[str, Tensor], list[StoredTensor]]:
    """The state of a model, and where the tensors are that stand-ins in it stand for."""
    state: dict[str, Tensor] = dict(model.state_dict())
    stored: list[StoredTensor] = []

    def stand_in(place: StoredTensor) -> Tensor:
        stored.append(place)
        return torch.full(_STAND_IN, len(stored) - 1, dtype=torch.int64)

    called = names_of(model, layers)
    for name in [name for name in state if name.rpartition(".")[0] in called]:
        del state[name]
    for name, layer in called.items():
        for each, place in layers[layer].places.items():
            state[f"{name}.{each}"] = stand_in(place)
    tables = _tables(model)
    by_place: dict[Any, Tensor] = {}  # a tensor that is there by two names is one
    for name, tensor in state.items():
        in_file = place_of(tensor)
        if in_file is not None or tensor.data_ptr() in tables:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
            if key not in by_place:
                by_place[key] = stand_in(in_file or TensorHere(tensor))
            state[name] = by_place[key]
    return state, stored


def _each_its_own(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none of which shares memory with another: safetensors writes no others."""
    owners = Counter(each.untyped_storage().data_ptr() for each in state.values())
    return {
        name: each.clone() if owners[each.untyped_storage().data_ptr()] > 1 else each.contiguous()
        for name, each in state.items()
    }


def names_of(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The layer that each name means: a module that is there by two names is stored by both, as loaders look for it."""
    first = {id(model.get_submodule(name)): name for name in layers}
    names = {name: first.get(id(module)) for name, module in model.named_modules(remove_duplicate=False)}
    return {name: layer for name, layer in names.items() if layer is not None}


def _tables(model: nn.Module) -> set[int]:
    """Where embeddings and output heads lie that can be written from there: others may be stored in another form."""
    found: list[Any] = []
    if isinstance(model, transformers.PreTrainedModel):
        with suppress(NotImplementedError):
            found = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    weights = [getattr(each, "weight", None) for each in found]
    return {
        each.data_ptr()
        for each in weights
        if isinstance(each, Tensor)
        and each.device.type == "cpu"
        and each.is_contiguous()
        and each.dtype in DTYPES.values()
    }


def _without_stand_ins(places: Mapping[str, TensorAt], stored: Sequence[StoredTensor]) -> dict[str, StoredTensor]:
    """Where each tensor of the checkpoint is, by its name there."""
    return {
        name: stored[int.from_bytes(each.read(), "little")] if each.shape == _STAND_IN else each
        for name, each in places.items()
    }


def _write_config(model: nn.Module, draft: Path) -> None:
    compressor = ModelCompressor.from_pretrained_model(model)
    if compressor.quantization_config is not None:
        compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
        settle_names(model, compressor.quantization_config)
    config = draft / "config.json"
    if not config.exists():
        config.write_text(json.dumps({"architectures": [type(model).__name__]}), encoding="utf-8")
    compressor.update_config(str(draft))
