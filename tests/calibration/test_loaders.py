"""What loaders can read is asked before any work."""

from __future__ import annotations

import pytest
from torch import nn
from zoo import ANIMALS, zoo

from scalewright.calibration.loaders import _needed_unpacked, _sets_up_its_own_way


@pytest.mark.parametrize("name", ANIMALS)
def test_only_models_that_set_up_their_own_way_ask_linears_for_weights(name: str) -> None:
    """So that others need not be built to find out."""
    model = zoo(name).model
    linears = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert _sets_up_its_own_way(model) or _needed_unpacked(model, linears) == []


def test_a_model_that_asks_for_them_is_known_to_set_up_its_own_way() -> None:
    model = zoo("t5").model
    wi = next(each for each, _ in model.named_modules() if each.endswith("DenseReluDense.wi"))
    assert _needed_unpacked(model, [wi]) == [wi]
    assert _sets_up_its_own_way(model)
