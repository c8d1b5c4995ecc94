"""Layers that a loader merges share one global scale, whatever order they are seen in."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch import nn

from scalewright.errors import NoStatisticsError
from scalewright.observers import FUSED_LAYER_NAMES, Observer, fuse_weight_observers

NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
NAMES = ["memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse", "imatrix_mse", "nvfp4_expanded_mse"]
SIZES = (1.0, 3.0, 0.5)


def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 16) * size for size in SIZES]


def make(name: str, args: QuantizationArgs = NVFP4) -> Observer:
    return Observer.load_from_registry(name, base_name="weight", args=args)


def module_with(*names: str, args: QuantizationArgs = NVFP4, observer: str = "memoryless_minmax") -> nn.Module:
    module = nn.Module()
    for name in names:
        layer = nn.Linear(16, 4, bias=False)
        layer.weight_observer = make(observer, args)
        setattr(module, name, layer)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_fused_partners_share_the_global_scale_of_the_largest_value_among_them(name):
    observers = [make(name) for _ in SIZES]
    Observer.fuse(observers)
    for observer, weight in zip(observers, weights(), strict=True):
        observer(weight)
    absmax = max(float(weight.abs().max()) for weight in weights())
    for observer in observers:
        global_scale = observer.get_qparams()["global_scale"]
        torch.testing.assert_close(global_scale, torch.tensor([448 * 6 / absmax]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_partners_seen_in_any_order_get_the_same_qparams(name):
    found = []
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        observers = [make(name) for _ in SIZES]
        Observer.fuse(observers)
        for index in order:
            observers[index](weights()[index])
        found.append([observer.get_qparams() for observer in observers])
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_fusing_after_the_weights_were_seen_is_as_good_as_before(name):
    before, after = [[make(name) for _ in SIZES] for _ in range(2)]
    Observer.fuse(before)
    for observers in (before, after):
        for observer, weight in zip(observers, weights(), strict=True):
            observer(weight)
    for observer in after:
        observer.get_qparams()
    Observer.fuse(after)
    for mine, other in zip(before, after, strict=True):
        torch.testing.assert_close(mine.get_qparams(), other.get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["memoryless_mse", "imatrix_mse", "nvfp4_expanded_mse"])
def test_the_search_is_that_of_the_shared_global_scale(name):
    small, large = weights()[2], weights()[1]
    observers = [make(name), make(name)]
    Observer.fuse(observers)
    observers[0](small)
    observers[1](large)
    # The same small weight, beside the large one in one tensor, sees the same global scale without any fusing.
    together = make(name)(torch.cat([small, large])).get_qparams()
    torch.testing.assert_close(observers[0].get_qparams()["scale"], together["scale"][:4], rtol=0, atol=0)
    alone = make(name)(small).get_qparams()
    assert (alone["scale"] / alone["global_scale"] != together["scale"][:4] / together["global_scale"]).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_partner_that_has_seen_nothing_is_an_error_with_numbers(name):
    observers = [make(name) for _ in SIZES]
    Observer.fuse(observers)
    observers[0](weights()[0])
    with pytest.raises(NoStatisticsError, match=r"All fused observers must be run.*2 of 3 have seen nothing"):
        observers[0].get_qparams()
    with pytest.raises(AssertionError, match=r"^No statistics available. Call observer\(value\) first.$"):
        observers[1].get_qparams()


def test_fusing_does_not_reach_beyond_tensor_group():
    observers = [make("memoryless_minmax", INT4) for _ in range(2)]
    Observer.fuse(observers)
    observers[0](weights()[0])
    alone = make("memoryless_minmax", INT4)(weights()[0])
    torch.testing.assert_close(observers[0].get_qparams(), alone.get_qparams())
    assert observers[0].get_qparams()["global_scale"] is None


def test_an_observer_is_not_its_own_partner():
    observers = [make("memoryless_minmax") for _ in range(3)]
    Observer.fuse(iter(observers))
    for each in observers:
        assert each._fused_observers == set(observers) - {each}


# ---- whole models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")],
)
def test_the_layers_that_loaders_merge_are_fused_wherever_they_are(names):
    assert names in FUSED_LAYER_NAMES
    model = nn.ModuleList([nn.Sequential(module_with(*names)), module_with(*names)])
    fuse_weight_observers(model)
    for parent in (model[0][0], model[1]):
        observers = {getattr(parent, name).weight_observer for name in names}
        for each in observers:
            assert each._fused_observers == observers - {each}


def test_layers_with_other_names_are_left_alone():
    model = module_with("gate_proj", "up_proj", "down_proj", "o_proj", "w2")
    fuse_weight_observers(model)
    for name in ("down_proj", "o_proj", "w2"):
        assert not getattr(model, name).weight_observer._fused_observers


def test_other_strategies_are_not_fused():
    model = module_with("gate_proj", "up_proj", args=INT4)
    fuse_weight_observers(model)
    assert not model.gate_proj.weight_observer._fused_observers


@pytest.mark.parametrize("missing", ["layer", "observer", "strategy"])
def test_a_group_that_is_not_whole_is_not_fused(missing):
    model = module_with("q_proj", "k_proj", "v_proj")
    if missing == "layer":
        del model.v_proj
    elif missing == "observer":
        del model.v_proj.weight_observer
    else:
        model.v_proj.weight_observer = make("memoryless_minmax", INT4)
    fuse_weight_observers(model)
    assert not model.q_proj.weight_observer._fused_observers


def test_fusing_twice_changes_nothing():
    model = module_with("gate_proj", "up_proj")
    fuse_weight_observers(model)
    fuse_weight_observers(model)
    assert model.gate_proj.weight_observer._fused_observers == {model.up_proj.weight_observer}


def test_one_layer_observed_per_module_gives_the_shared_scale():
    torch.manual_seed(0)
    model = module_with("gate_proj", "up_proj", observer="memoryless_mse")
    fuse_weight_observers(model)
    for layer in (model.gate_proj, model.up_proj):
        layer.weight_observer(layer.weight)
    gate, up = (layer.weight_observer.get_qparams() for layer in (model.gate_proj, model.up_proj))
    torch.testing.assert_close(gate["global_scale"], up["global_scale"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["memoryless_mse", "imatrix_mse", "nvfp4_expanded_mse", "optimal"])
def test_a_foreseen_maximum_spares_the_second_search_and_changes_nothing(name, monkeypatch):
    absmax = max(float(weight.abs().max()) for weight in weights())
    found, counts = [], []
    for foreseen in (None, absmax):
        observers = [make(name) for _ in SIZES]
        Observer.fuse(observers)
        searches = []
        search = type(observers[0]).search
        monkeypatch.setattr(
            type(observers[0]), "search", lambda *args, s=search, n=searches: (n.append(1), s(*args))[1], raising=True
        )
        for observer, weight in zip(observers, weights(), strict=True):
            observer.foreseen_absmax = foreseen
            observer(weight)
        found.append([observer.get_qparams() for observer in observers])
        counts.append(len(searches))
        monkeypatch.undo()
    for plain, foreseen in zip(*found, strict=True):
        torch.testing.assert_close(plain["scale"], foreseen["scale"], rtol=0, atol=0)
    assert counts == [5, 3]
