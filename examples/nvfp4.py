"""NVFP4: 4-bit floats in groups of 16, whose e4m3 scales stand under one global scale for each tensor.

    python examples/nvfp4.py

Layers that a loader merges (q, k and v; gate and up) share their global scale; this prints it.
"""

import tempfile
from pathlib import Path

from python_text import calibration_texts
from safetensors import safe_open

from scalewright import oneshot

MODEL = Path(__file__).parent / "demo_model"

with tempfile.TemporaryDirectory() as folder:
    result = oneshot(
        MODEL,
        scheme="NVFP4",  # NVFP4A16 leaves activations as they are, and needs no data
        dataset=calibration_texts(),
        num_calibration_samples=20,
        max_seq_length=128,
        output_dir=Path(folder) / "NVFP4",
    )
    with safe_open(result.output_dir / "model.safetensors", "pt") as file:
        for layer in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            name = f"model.layers.0.{layer}"
            packed, scale = (file.get_slice(f"{name}.{each}") for each in ("weight_packed", "weight_scale"))
            shared = file.get_tensor(f"{name}.weight_global_scale").item()
            print(
                f"{layer:17} codes {packed.get_dtype()} {packed.get_shape()}, scales {scale.get_dtype()} "
                f"{scale.get_shape()}, global scale {shared:.1f}"
            )
print(f"notes: {result.notes or 'none'}")
