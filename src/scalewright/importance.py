"""Importance for its own sake: gathered from data, kept in files, merged, and read again.

A file is safetensors: `<layer>.sum` (fp32, [in_features]) is the sum of x^2 of each input channel, `<layer>.count`
(int64) the number of tokens. Its metadata are version, model, num_tokens and seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from scalewright.calibration.distributed import Ranks, with_ranks
from scalewright.calibration.experts import showing_all_tokens
from scalewright.calibration.gathering import Importance, gather_squares, layers_meant, note_unseen
from scalewright.calibration.pipelines import OnStep, silent
from scalewright.calibration.sources import DataOptions
from scalewright.checkpoint.cut_files import outliving_cuts
from scalewright.checkpoint.fingerprint import digest_of_data
from scalewright.checkpoint.outputs import check_output_file, write_file
from scalewright.checkpoint.shards import TensorHere, write_tensors
from scalewright.errors import DataError, ImportanceError
from scalewright.modifiers import IMatrixGatherer, Modifier
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.preparing import layers_and_data, name_of, refuse_if_strict

__all__ = ["Importance", "gather_importance", "load_importance", "merge_importance", "save_importance"]

_VERSION = "1"
_METADATA = ("version", "model", "num_tokens", "seed")
_WRITTEN = "Give a file that `scalewright importance` has written."


@with_ranks
@outliving_cuts()
def gather_importance(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    targets: str | Sequence[str] = "Linear",
    ignore: str | Sequence[str] = LEFT_ALONE,
    output_file: str | Path | None = None,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    moe_calibrate_all_experts: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    seed: int = 0,
    on_step: OnStep = silent,
    ranks: Ranks | None = None,
) -> Importance:
    """Run data through a model, and give the importance of the input channels of its layers.

    The model, given as an object or by its path or hub name, stays as it is. With `output_file` the importance is
    written there. Data options, and ranks, are those of `oneshot`.
    """
    ranks = ranks or Ranks()
    on_step = on_step if ranks.is_first else silent
    gatherer = IMatrixGatherer(targets=targets, ignore=ignore)
    if dataset is None:
        raise DataError("importance is found by running data through the model. Give a dataset.")
    if output_file is not None:
        ranks.on_first(partial(check_output_file, Path(output_file), overwrite=overwrite))
    with (
        layers_and_data(
            model,
            dataset,
            lambda loaded: layers_meant(loaded, gatherer),
            DataOptions(
                num_calibration_samples, batch_size=batch_size, column=column, pack=pack, split=split, seed=seed
            ),
            max_seq_length=max_seq_length,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            strict=strict,
            on_step=on_step,
        ) as ready,
        showing_all_tokens(ready.model, on=moe_calibrate_all_experts),
    ):
        ranks.check_same({"data": digest_of_data(ready.batches)})
        found = gather_squares(ready.model, ready.layers, ready.batches, on_step=on_step, ranks=ranks)
    notes = ready.notes
    notes += note_unseen({name: count for name, (_, count) in found.items()})
    refuse_if_strict(notes, strict=strict)
    importance = Importance(
        {name: sum_C.cpu() for name, (sum_C, _) in found.items()},
        {name: count for name, (_, count) in found.items()},
        name_of(model),
        ready.num_tokens,
        (seed,),
        notes=notes,
    )
    if output_file is not None:
        ranks.on_first(partial(save_importance, importance, output_file, overwrite=overwrite))
    return importance


# ---- several ---------------------------------------------------------------------------------------------------------


def merge_importance(several: Sequence[Importance]) -> Importance:
    """The importance of several sets of data as one: sums and counts are added. All must be of the same layers."""
    if not several:
        raise ImportanceError("there is no importance to merge. Give some.")
    first, *others = several
    for each in others:
        _check_same_layers(first, each)
    sums = {name: torch.stack([each.sums[name].double() for each in several]).sum(dim=0).float() for name in first.sums}
    counts = {name: sum(each.counts[name] for each in several) for name in first.sums}
    models = list(dict.fromkeys(each.model for each in several))
    notes = [note for each in several for note in each.notes]
    if len(models) > 1:
        notes.append(f"importance of models by different names was merged: {', '.join(models)}.")
    seeds = tuple(dict.fromkeys(seed for each in several for seed in each.seeds))
    return Importance(sums, counts, models[0], sum(each.num_tokens for each in several), seeds, notes=notes)


def merge_files(
    files: Sequence[str | Path], output_file: str | Path, *, strict: bool = False, overwrite: bool = False
) -> Importance:
    """Merge files with importance into one."""
    twice = next((each for i, each in enumerate(files) if Path(each).resolve() in _resolved(files[:i])), None)
    if twice is not None:
        raise ImportanceError(f"{twice}: is given twice. What it has must be added once.")
    merged = merge_importance([load_importance(each) for each in files])
    refuse_if_strict(merged.notes, strict=strict)
    save_importance(merged, output_file, overwrite=overwrite)
    return merged


def _resolved(files: Sequence[str | Path]) -> list[Path]:
    return [Path(each).resolve() for each in files]


def _check_same_layers(one: Importance, other: Importance) -> None:
    alone = next((name for name in (*one.sums, *other.sums) if (name in one.sums) != (name in other.sums)), None)
    if alone is not None:
        has, has_not = (one, other) if alone in one.sums else (other, one)
        raise ImportanceError(
            f"{other.origin}: has importance of {len(other)} layers, and {one.origin} of {len(one)}: {alone} is in "
            f"{has.origin}, and not in {has_not.origin}. Merge importance of one model and the same layers."
        )
    for name, sum_C in one.sums.items():
        if len(sum_C) != len(other.sums[name]):
            raise ImportanceError(
                f"{other.origin}: {name} has {len(other.sums[name])} input channels, and {len(sum_C)} in "
                f"{one.origin}. Merge importance of one model."
            )


# ---- files -----------------------------------------------------------------------------------------------------------


def save_importance(importance: Importance, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write importance to a file, under a temporary name until it is complete."""
    tensors: dict[str, Tensor] = {}
    for name, sum_C in importance.sums.items():
        tensors[f"{name}.sum"] = sum_C.detach().float().cpu().contiguous()
        tensors[f"{name}.count"] = torch.tensor(importance.counts[name], dtype=torch.int64)
    seeds = ", ".join(map(str, importance.seeds))
    metadata = dict(zip(_METADATA, (_VERSION, importance.model, str(importance.num_tokens), seeds), strict=True))
    content = BytesIO()
    # safetensors' own writer has metadata in an order of chance, and equal importance is to be an equal file.
    write_tensors(content, {key: TensorHere(each) for key, each in tensors.items()}, metadata=metadata)
    return write_file(Path(path), content.getvalue(), overwrite=overwrite)


def load_importance(path: str | Path) -> Importance:
    """Importance from a file that `save_importance` has written."""
    file = Path(path)
    if not file.is_file():
        raise ImportanceError(f"{file}: there is no such file.")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as error:
        raise ImportanceError(f"{file}: is no safetensors file ({error}). {_WRITTEN}") from None
    try:
        return _read(tensors, metadata, origin=file.name)
    except ImportanceError as error:
        raise error.at(str(file)) from None


def _read(tensors: dict[str, Tensor], metadata: dict[str, str], *, origin: str) -> Importance:
    """What the tensors and the metadata of a file mean."""
    lacking = next((key for key in _METADATA if key not in metadata), None)
    if lacking is not None:
        raise ImportanceError(f"there is no '{lacking}' in its metadata. {_WRITTEN}")
    if metadata["version"] != _VERSION:
        raise ImportanceError(
            f"is of version {metadata['version']}, and version {_VERSION} can be read. Gather it anew, or use a newer "
            "Scalewright."
        )
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if kind not in ("sum", "count") or not name:
            raise ImportanceError(f"'{key}' is neither a sum nor a count. {_WRITTEN}")
        partner = f"{name}.{'count' if kind == 'sum' else 'sum'}"
        if partner not in tensors:
            raise ImportanceError(f"there is '{key}', and no '{partner}'. {_WRITTEN}")
        if kind == "sum":
            sums[name] = _checked(key, tensor, torch.float32, ndim=1)
        else:
            counts[name] = int(_checked(key, tensor, torch.int64, ndim=0))
    if not sums:
        raise ImportanceError(f"there is no layer in it. {_WRITTEN}")
    try:
        num_tokens = int(metadata["num_tokens"])
        seeds = tuple(int(each) for each in metadata["seed"].split(",") if each.strip())
    except ValueError as error:
        raise ImportanceError(f"its metadata cannot be read ({error}). {_WRITTEN}") from None
    return Importance(sums, counts, metadata["model"], num_tokens, seeds, origin)


def _checked(key: str, tensor: Tensor, dtype: torch.dtype, *, ndim: int) -> Tensor:
    if tensor.dtype != dtype or tensor.ndim != ndim:
        raise ImportanceError(
            f"'{key}' is {tensor.dtype} with {tensor.ndim} dimensions, and should be {dtype} with {ndim}. {_WRITTEN}"
        )
    if not bool(torch.isfinite(tensor).all()) or bool((tensor < 0).any()):
        raise ImportanceError(f"'{key}' has NaN, Inf or negative numbers in it. Gather it anew.")
    return tensor.clone()  # it lies in the file, which may be written again while a run is under way


def files_of(modifiers: Iterable[Modifier]) -> dict[str, Importance]:
    """What the files of gatherers say, by their names."""
    gatherers = (each for each in modifiers if isinstance(each, IMatrixGatherer))
    return {each.file: load_importance(each.file) for each in gatherers if each.file is not None}
