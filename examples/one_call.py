"""One call: a folder with a model, the name of a scheme, some text, and a folder for the checkpoint.

python examples/one_call.py
"""

import tempfile
from pathlib import Path

from python_text import calibration_texts, held_out_texts

from scalewright import evaluate, oneshot

MODEL = Path(__file__).parent / "demo_model"  # or a name on the hub

with tempfile.TemporaryDirectory() as folder:
    result = oneshot(
        MODEL,
        scheme="W4A16",
        dataset=calibration_texts(),  # or "calib.txt", a datasets.Dataset, token ids, a DataLoader, …
        num_calibration_samples=20,
        max_seq_length=128,
        output_dir=Path(folder) / "W4A16",
    )
    found = evaluate(
        result.output_dir, against=MODEL, dataset=held_out_texts(), num_samples=8, max_seq_length=128, generate=False
    )

print(f"pipeline: {result.pipeline} ({result.why})")
print(f"layers:   {len(result.layers)}, from {result.layers[0].name} to {result.layers[-1].name}")
print(f"worst:    {min(result.layers, key=lambda layer: layer.weight_db).name}")
print(f"notes:    {result.notes or 'none'}")
before, after = found.original_perplexity.value, found.perplexity.value
print(f"result:   perplexity {before:.2f} -> {after:.2f}, KL {found.kl.value:.4f}")
