"""What the table says of weights: fair to min-max, in every format and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalewright import QuantizationModifier, oneshot


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scheme", ["W8A16", "W4A16_ASYM", "W4A16", "W8A8_DYNAMIC", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"]
)
def test_minmax_gains_nothing_over_minmax(scheme, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64)).to(dtype)
    (layer,) = oneshot(model, recipe=QuantizationModifier(scheme=scheme, weight_observer="memoryless_minmax")).layers
    assert layer.gain_db == pytest.approx(0, abs=0.02)
