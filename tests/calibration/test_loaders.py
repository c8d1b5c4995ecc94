"""What loaders can read is asked before any work."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from torch import nn
from zoo import ANIMALS, zoo

from scalewright.calibration.loaders import _needed_unpacked, _sets_up_its_own_way, check_zero_points
from scalewright.errors import ModelError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.layers import WatchedLayer


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


@pytest.mark.parametrize("columns", [32, 96])
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 11, 40])
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_zero_points_that_cannot_be_unpacked_are_refused_and_no_others(bits: int, rows: int, columns: int) -> None:
    """With compressed-tensors as it is, which decides: 0.20 cannot unpack a single word of 4 bits for each group."""
    weights = {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": False}
    (group,) = QuantizationModifier(weights=weights).groups
    layer = WatchedLayer("a.gate", nn.Linear(columns, rows, bias=False), group.scheme)
    compressor = BaseCompressor.get_value_from_registry(layer.format.value)
    groups = columns // 32
    state = {
        "weight": torch.zeros(rows, columns),
        "weight_scale": torch.ones(rows, groups),
        "weight_zero_point": torch.zeros(rows, groups, dtype=torch.int8),
    }
    try:
        compressor.decompress(compressor.compress(state, layer.scheme), layer.scheme)
    except RuntimeError:
        with pytest.raises(ModelError) as caught:
            check_zero_points([layer])
        assert str(caught.value) == (
            f"a.gate: compressed-tensors cannot unpack zero points of {bits} bits for {rows} "
            f"{'row' if rows == 1 else 'rows'}, but for {32 // bits + 1} and more. Give this layer a symmetric scheme, "
            "or ignore it."
        )
    else:
        check_zero_points([layer])
