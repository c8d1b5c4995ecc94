"""What loaders can read: which weights may be packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from scalewright.calibration.plan import make_plans
from scalewright.errors import ModelError
from scalewright.modifiers import QuantizationModifier


class Config(PretrainedConfig):
    model_type = "looks_at_one"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)


class LooksAtOne(PreTrainedModel):
    """While it is set up, it asks the first layer of each block for its weight."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Block):
            module.first.weight.data.normal_()


def formats(model: nn.Module, scheme: str) -> dict[str, str]:
    modifier = QuantizationModifier(scheme=scheme, targets=["Linear"], group_size=32)
    [plan] = make_plans(model, [[modifier]])
    return {layer.name: layer.format.value for layer in plan.layers}


def test_only_what_is_asked_for_while_a_model_is_set_up_stays_unpacked() -> None:
    kinds = {"first": "int-quantized", "second": "pack-quantized"}
    assert formats(LooksAtOne(Config()), "W8A16") == {
        f"blocks.{i}.{name}": kind for i in range(2) for name, kind in kinds.items()
    }


def test_asking_changes_no_weight() -> None:
    model = LooksAtOne(Config())
    before = {name: each.clone() for name, each in model.state_dict().items()}
    formats(model, "W8A16")
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_four_bits_are_refused_where_they_cannot_be_loaded() -> None:
    with pytest.raises(
        ModelError, match=r"^blocks\.0\.first: transformers cannot load packed weights here, because Loo"
    ):
        formats(LooksAtOne(Config()), "W4A16")


def test_a_model_that_is_none_of_transformers_is_packed() -> None:
    assert set(formats(nn.Sequential(nn.Linear(32, 32)), "W4A16").values()) == {"pack-quantized"}
