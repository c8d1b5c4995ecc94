"""A model object in memory, of any class: nothing has to come from a folder, and nothing has to be a transformer.

    python examples/own_module.py

The module is quantised in place; data is whatever it takes, batch by batch.
"""

import torch
from torch import Tensor, nn

from scalewright import QuantizationModifier, oneshot


class Mixer(nn.Module):
    """Some blocks over a sequence of vectors."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> [batch, 10]."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
model = Mixer().eval()
batches = [{"x": torch.randn(8, 16, 128)} for _ in range(4)]
with torch.no_grad():
    before = model(batches[0]["x"])

recipe = QuantizationModifier(scheme="W4A16", group_size=64, ignore=["head"])
result = oneshot(model, recipe=recipe, dataset=batches, pipeline="sequential")

with torch.no_grad():
    after = result.model(batches[0]["x"])
for layer in result.layers:
    print(f"{layer.name}: {layer.weight_db:.1f} dB")
print(f"the model is the same object: {result.model is model}")
print(f"output: {float((after - before).norm() / before.norm()):.1%} off")
