"""The best that a format can give: GPTQ that makes up for what earlier layers lost, beside plain rounding.

    python examples/gptq_best.py

`quality="best"` stands for a recipe, which is printed; copy it and turn its knobs.
"""

import logging
from pathlib import Path

from python_text import calibration_texts, held_out_texts

from scalewright import evaluate, oneshot
from scalewright.quality import recipe_for

MODEL = Path(__file__).parent / "demo_model"
logging.disable(logging.WARNING)

judged = {"dataset": held_out_texts(), "num_samples": 16, "max_seq_length": 128, "generate": False}
recipe = recipe_for("best", "W4A16", group_size=32)
print(recipe.to_yaml())

for name, asked in {"fast": recipe_for("fast", "W4A16", group_size=32), "best": recipe}.items():
    result = oneshot(MODEL, recipe=asked, dataset=calibration_texts(), num_calibration_samples=20, max_seq_length=128)
    found = evaluate(result.model, against=MODEL, tokenizer=MODEL, **judged)
    print(f"{name}: KL {found.kl.value:.4f} ± {found.kl.error:.4f}, perplexity {found.perplexity.value:.2f}")
