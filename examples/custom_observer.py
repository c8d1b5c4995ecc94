"""An observer of your own: one class with one decorator, and its name works in recipes.

    python examples/custom_observer.py

docs/extending.md explains what each part is for.
"""

from pathlib import Path

import torch
from python_text import calibration_texts
from torch import Tensor

from scalewright import Observer, QuantizationModifier, oneshot
from scalewright.observers import Knob

MODEL = Path(__file__).parent / "demo_model"


@Observer.register("rms_clip")
class RmsClipObserver(Observer):
    """The range that was seen, clipped at `factor` times the root mean square."""

    knobs = (Knob("factor", 8.0, "root mean squares that the range may reach", low=1),)
    merge_rules = {**Observer.merge_rules, "square_sum": "sum", "count": "sum"}  # noqa: RUF012

    factor: float

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self.square_sum: Tensor | None = None
        self.count: Tensor | None = None

    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Add what was seen: [observations, *qparam_shape, elements that share a scale]."""
        low, high = self.range_of(observed)
        square_sum = observed.double().square().sum(dim=(0, -1))
        count = torch.tensor(observed.shape[0] * observed.shape[-1])
        before = self.current_range()
        if before is not None and self.square_sum is not None and self.count is not None:
            low, high = torch.minimum(before[0], low), torch.maximum(before[1], high)
            square_sum, count = self.square_sum + square_sum, self.count + count
        self.min_vals, self.max_vals, self.square_sum, self.count = low, high, square_sum, count

    def chosen_range(self, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The range that the scale is computed from."""
        low, high = super().chosen_range(global_scale)
        if self.square_sum is None or self.count is None:
            return low, high
        reach = (self.factor * (self.square_sum / self.count).sqrt()).float()
        return torch.maximum(low, -reach), torch.minimum(high, reach)


for observer in ("static_minmax", {"name": "rms_clip", "factor": 6}):
    recipe = QuantizationModifier(scheme="W8A8", ignore=["lm_head"], activation_observer=observer)
    result = oneshot(MODEL, recipe=recipe, dataset=calibration_texts(), num_calibration_samples=20, max_seq_length=128)
    scale = result.model.model.layers[0].mlp.down_proj.input_scale.item()
    print(f"{result.layers[0].observers['input']:13}  input scale of layer 0's down_proj {scale:.4f}")
