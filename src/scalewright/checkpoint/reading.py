"""Any checkpoint that transformers loads, quantised ones included, as a model that can be run: whole, or refused.

transformers fills what a checkpoint lacks with random numbers, and says so in a warning at most. Here it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm.std import tqdm

from scalewright.checkpoint.loading import cannot_load, config_and_class, without_bars
from scalewright.errors import ModelError

# compressed-tensors decompresses these formats to bf16, whatever dtype the model is in, and layers must fit together.
_READ_AS_BF16 = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")
_LOADING_ERRORS = (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError, ImportError, SafetensorError)
_FEW = 3


def load_checkpoint(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, list[str]]:
    """The model that a path or hub name stands for, quantised or not, and notes; an error if a part of it is missing.

    It is in the dtype that is asked for (`auto`: its own), or in bf16 where its format is read as that alone.
    """
    notes = []
    try:
        config, auto = config_and_class(model, trust_remote_code)
        if _is_read_as_bf16(config):
            if dtype not in ("auto", "bfloat16", torch.bfloat16):
                asked = str(dtype).removeprefix("torch.")
                notes.append(f"{model}: its format is read as bfloat16, so it is not run in {asked}.")
            dtype = torch.bfloat16
        with without_all_bars():
            loaded, info = auto.from_pretrained(
                model, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    except _LOADING_ERRORS as error:
        raise cannot_load(model, error) from None
    missing, unexpected = (sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys"))
    if missing:
        raise ModelError(
            f"{model}: lacks {len(missing)} of its tensors ({_some(missing)}), and would be run with random numbers "
            "instead. Make the checkpoint anew."
        )
    if unexpected:
        notes.append(f"{model}: {len(unexpected)} of its tensors are not read ({_some(unexpected)}).")
    whole: nn.Module = loaded
    return (whole if device is None else whole.to(device)), notes


@contextmanager
def without_all_bars() -> Iterator[None]:
    """While inside, nobody draws progress bars: compressed-tensors does on loading and on the first forward pass."""
    drawing = tqdm.__init__

    def disabled(bar: Any, *given: Any, **options: Any) -> None:
        drawing(bar, *given, **{**options, "disable": True})

    tqdm.__init__ = disabled
    try:
        with without_bars():
            yield
    finally:
        tqdm.__init__ = drawing


def _is_read_as_bf16(config: Any) -> bool:
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict):
        return False
    groups = quantization.get("config_groups") or {}
    formats = [quantization.get("format"), *(each.get("format") for each in groups.values() if isinstance(each, dict))]
    return any(str(each).startswith(_READ_AS_BF16) for each in formats)


def _some(names: list[str]) -> str:
    rest = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {rest} more" if rest > 0 else "")
