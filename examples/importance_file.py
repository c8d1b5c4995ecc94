"""Importance in a file: gathered once, merged with that of other texts, used for every scheme without another pass.

    python examples/importance_file.py

On the command line: `scalewright importance MODEL --data calib.txt --out imatrix.safetensors`, then
`scalewright quantize MODEL --scheme W4A16 --importance imatrix.safetensors --out OUT`.
"""

import tempfile
from pathlib import Path

from python_text import calibration_texts

from scalewright import IMatrixGatherer, QuantizationModifier, oneshot
from scalewright.importance import gather_importance, merge_importance, save_importance

MODEL = Path(__file__).parent / "demo_model"
few = {"num_calibration_samples": 16, "max_seq_length": 128}
texts = calibration_texts()

importance = merge_importance([gather_importance(MODEL, some, **few) for some in (texts[::2], texts[1::2])])
strength = importance["model.layers.0.mlp.down_proj"]
print(f"{importance.num_tokens} tokens")
print(f"inputs of layer 0's down_proj: E[x²] from {strength.min():.2g} to {strength.max():.2g}")

with tempfile.TemporaryDirectory() as folder:
    file = save_importance(importance, Path(folder) / "imatrix.safetensors")
    print(f"{file.name}: {file.stat().st_size} bytes")
    for scheme in ("W4A16", "NVFP4A16"):
        recipe = [IMatrixGatherer(file=file), QuantizationModifier(scheme=scheme, ignore=["lm_head"])]
        result = oneshot(MODEL, recipe=recipe)
        print(f"{scheme}: {result.pipeline}, {len(result.layers)} layers")
