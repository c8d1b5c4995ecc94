"""What some tests of this folder share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalewright.numerics import products


@pytest.fixture
def products_by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All products that can be are by oneDNN, small ones too, whatever this machine is. It is told how many were."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch is built without oneDNN")
    multiply, count = products._by_onednn, [0]

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        count[0] += 1
        return multiply(x, weight, bias)

    monkeypatch.setattr(products, "_by_onednn", counting)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    for name in ("_WORTH_IT", "_LEAST", "_SIDE"):
        monkeypatch.setattr(products, name, 1)
    return count
