"""Any checkpoint that transformers loads, quantised ones included, as a model that can be run: whole, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.std import tqdm

from scalewright.checkpoint.loading import config_and_class, loading, not_read, read_weights, without_bars

# compressed-tensors decompresses these formats to bf16, whatever dtype the model is in, and layers must fit together.
_READ_AS_BF16 = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")


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
    with loading(model):
        config, auto = config_and_class(model, trust_remote_code)
        if _is_read_as_bf16(config):
            if dtype not in ("auto", "bfloat16", torch.bfloat16):
                asked = str(dtype).removeprefix("torch.")
                notes.append(f"{model}: its format is read as bfloat16, so it is not run in {asked}.")
            dtype = torch.bfloat16
        with without_all_bars():
            loaded, unexpected = read_weights(auto, model, dtype=dtype, trust_remote_code=trust_remote_code)
    if unexpected:
        notes.append(not_read(model, unexpected))
    return (loaded if device is None else loaded.to(device)), notes


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
