"""The best that a format can give: GPTQ that makes up for what earlier layers lost, beside plain rounding.

    python examples/gptq_best.py

`quality="best"` stands for a recipe, which is printed; copy it and turn its knobs.
"""

import logging
from pathlib import Path

from comparing import compare, load, log_probs, rows_of
from python_text import calibration_texts, held_out_texts

from scalewright import oneshot
from scalewright.quality import recipe_for

MODEL = Path(__file__).parent / "demo_model"
logging.disable(logging.WARNING)

rows = rows_of(held_out_texts(), MODEL, length=128, most=16)
before = log_probs(load(MODEL), rows)
recipe = recipe_for("best", "W4A16", group_size=32)
print(recipe.to_yaml())

for name, asked in {"fast": recipe_for("fast", "W4A16", group_size=32), "best": recipe}.items():
    result = oneshot(MODEL, recipe=asked, dataset=calibration_texts(), num_calibration_samples=20, max_seq_length=128)
    print(f"{name}: {compare(before, log_probs(result.model, rows), rows)}")
