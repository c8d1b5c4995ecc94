"""Observers on every Linear weight of a small trained model, where one lies beside the project."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from safetensors.torch import load_file

from scalewright.observers import Observer

MODEL = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K" / "model.safetensors"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL.is_file(), reason="the trained model stories260K does not lie beside the project"),
]
FORMATS = {
    "int4": QuantizationArgs(num_bits=4, strategy="group", group_size=4),
    "int3 affine": QuantizationArgs(num_bits=3, strategy="channel", symmetric=False),
    "nvfp4": preset_name_to_scheme("NVFP4", ["Linear"]).weights,
}


def weights() -> dict[str, torch.Tensor]:
    tensors = load_file(MODEL)
    return {name: value.float() for name, value in tensors.items() if "proj" in name and value.shape[1] % 16 == 0}


def lost(weight: torch.Tensor, name: str, args: QuantizationArgs, norm: float) -> float:
    qparams = Observer.load_from_registry(name, base_name="weight", args=args)(weight).get_qparams()
    return float((fake_quantize(weight, args=args, **qparams) - weight).double().abs().pow(norm).sum())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_search_loses_less_than_min_max_on_every_layer(fmt):
    found = weights()
    assert len(found) >= 20
    for layer, weight in found.items():
        plain = lost(weight, "memoryless_minmax", FORMATS[fmt], 2.4)
        assert lost(weight, "memoryless_mse", FORMATS[fmt], 2.4) < plain, layer
