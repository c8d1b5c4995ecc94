"""One call: a folder with a model, the name of a scheme, some text, and a folder for the checkpoint.

python examples/one_call.py
"""

import tempfile
from pathlib import Path

from comparing import compare, load, log_probs, rows_of
from python_text import calibration_texts, held_out_texts

from scalewright import oneshot

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
    rows = rows_of(held_out_texts(), MODEL, length=128, most=8)
    found = compare(log_probs(load(MODEL), rows), log_probs(load(result.output_dir), rows), rows)

print(f"pipeline: {result.pipeline} ({result.why})")
print(f"layers:   {len(result.layers)}, from {result.layers[0].name} to {result.layers[-1].name}")
print(f"worst:    {min(result.layers, key=lambda layer: layer.weight_db).name}")
print(f"notes:    {result.notes or 'none'}")
print(f"result:   {found}")
