"""A recipe file with a format for each kind of layer: `examples/recipes/mixed.yaml`.

    python examples/mixed_recipe.py

On the command line: `scalewright quantize MODEL --recipe examples/recipes/mixed.yaml --data calib.txt --out OUT`.
"""

from collections import Counter
from pathlib import Path

from python_text import calibration_texts
from torch.nn import Linear

from scalewright import Recipe, oneshot

HERE = Path(__file__).parent

recipe = Recipe.of(HERE / "recipes" / "mixed.yaml")  # says no to what it does not know, with the line
result = oneshot(
    HERE / "demo_model", recipe=recipe, dataset=calibration_texts(), num_calibration_samples=20, max_seq_length=128
)

rows = result.to_dict()["layers"]
for (weights, observer), count in Counter((row["weights"], row["observers"]["weight"]) for row in rows).items():
    print(f"{count:3} layers: {weights}, found by {observer}")
quantised = {row["name"] for row in rows}
left = [name for name, module in result.model.named_modules() if isinstance(module, Linear) and name not in quantised]
print(f"{len(left):3} layers: as they are, from {left[0]} to {left[-1]}")
