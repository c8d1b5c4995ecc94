"""Models that are published in FP8, with a scale for each block of a weight: they are originals, read as plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from scalewright.errors import ModelError

_SCALE = "_scale_inv"


def block_of(config: Any) -> tuple[int, int] | None:
    """The rows and columns that share a scale, if a configuration is that of such a model."""
    known = getattr(config, "quantization_config", None)
    known = known if known is None or isinstance(known, dict) else vars(known)
    block = None if known is None or known.get("quant_method") != "fp8" else known.get("weight_block_size")
    return None if block is None else (int(block[0]), int(block[1]))


def read_as_plain() -> dict[str, Any]:
    """What transformers is asked for to get plain weights."""
    return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}


def mend(model: nn.Module, source: str | Path, block: tuple[int, int]) -> None:
    """Make a model that was read so what its files say.

    transformers (5.22) spreads the scales evenly, which is wrong where the last block is not a whole one. And it still
    takes the model for a quantised one, and would not save it.
    """
    vars(model)["hf_quantizer"] = None
    config = cached_file(source, "config.json")
    assert config is not None
    for file in sorted(Path(config).parent.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            for name in sorted(each for each in names if f"{each}{_SCALE}" in names):
                rows, columns = opened.get_slice(name).get_shape()
                if rows % block[0] or columns % block[1]:
                    _replace(model, name, _plain(opened.get_tensor(name), opened.get_tensor(f"{name}{_SCALE}"), block))


def _plain(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = codes.shape
    spread = scale.float().repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return codes.float() * spread[:rows, :columns]


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    home, _, last = name.rpartition(".")
    modules = dict(model.named_modules())
    before = getattr(modules.get(home), last, None)
    if not isinstance(before, nn.Parameter) or before.shape != value.shape:
        raise ModelError(f"{name}: its last block of FP8 numbers is not a whole one, and cannot be read here.")
    setattr(modules[home], last, nn.Parameter(value.to(before.dtype), requires_grad=before.requires_grad))
