"""FP8 weights and activations, and keys and values in FP8, too: half the memory for long contexts.

python examples/fp8_kv_cache.py
"""

import json
import tempfile
from pathlib import Path

from python_text import calibration_texts
from safetensors import safe_open

from scalewright import QuantizationModifier, oneshot

MODEL = Path(__file__).parent / "demo_model"
recipe = QuantizationModifier(
    scheme="FP8",  # static scales, one for each tensor; FP8_DYNAMIC finds those of inputs while the model runs
    ignore=["lm_head"],
    kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
)

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "FP8"
    oneshot(
        MODEL,
        recipe=recipe,
        dataset=calibration_texts(),
        num_calibration_samples=20,
        max_seq_length=128,
        output_dir=out,
    )
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    with safe_open(out / "model.safetensors", "pt") as file:
        names = sorted(name for name in file.keys() if name.endswith(("k_scale", "v_scale")))  # noqa: SIM118
        scales = {name: file.get_tensor(name).item() for name in names}

print(f"in config.json: kv_cache_scheme of {config['kv_cache_scheme']['num_bits']} bits")
for name, scale in list(scales.items())[:4]:
    print(f"{name}: {scale:.5f}")
