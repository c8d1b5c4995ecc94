"""The examples and listings of the documents that the observers are built to, run with this package.

The calls are those of the documents; where they list a name, a parameter, a default or a shape, it is checked here.
"""

import importlib
import inspect

import pytest
import torch
import yaml
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.registry import RegistryMixin
from compressed_tensors.utils import InternalModule
from torch import nn
from torch.nn import Module

from scalewright.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    QParamsDict,
    StaticMinMaxObserver,
    flatten_for_calibration,
    fuse_weight_observers,
)
from scalewright.observers.registry import NamedObservers

CHANNEL = QuantizationArgs(num_bits=4, strategy="channel")
STATIC_INT8 = QuantizationArgs(num_bits=8, strategy="tensor", observer="minmax")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
LISTED = [
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    StaticMinMaxObserver,
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# ---- the overview of observers -------------------------------------------------------------------------------------

EXAMPLE = """
from scalewright.observers import Observer
from compressed_tensors.quantization.quant_args import QuantizationArgs

args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
observer = Observer.load_from_registry("minmax", quantization_args=args)

x = torch.randn(64, 512)
scale, zero_point = observer(x)
"""


def test_the_python_example_runs_as_written():
    names = {"torch": torch}
    exec(EXAMPLE, names)
    x, scale, zero_point = names["x"], names["scale"], names["zero_point"]
    assert isinstance(names["observer"], MinMaxObserver)
    assert names["observer"].base_name == "weight"
    absmax = x.reshape(64, 4, 128).abs().amax(dim=-1)
    torch.testing.assert_close(scale, absmax / 7.5)
    assert zero_point.shape == (64, 4) and not zero_point.any()


RECIPE = """
quantization_stage:
  quantization_modifiers:
    GPTQModifier:
      weights:
        observer: mse
        observer_kwargs:
          maxshrink: 0.1
          patience: 10
          averaging_constant: 0.05
          grid: 128.0
          norm: 2.0
        num_bits: 4
        type: int
        symmetric: true
        strategy: channel
      targets:
        - Linear
"""


def test_the_weights_of_the_yaml_example_make_their_observer():
    modifiers = yaml.safe_load(RECIPE)["quantization_stage"]["quantization_modifiers"]
    args = QuantizationArgs(**modifiers["GPTQModifier"]["weights"])
    observer = Observer.load_from_registry(args.observer, base_name="weight", args=args)
    assert type(observer) is MovingAverageMSEObserver
    assert (observer.maxshrink, observer.patience, observer.grid, observer.norm) == (0.1, 10, 128.0, 2.0)
    assert observer.averaging_constant == observer.avg_constant == 0.05
    weight = torch.randn(16, 64)
    scale, zero_point = observer(weight)
    assert scale.shape == zero_point.shape == (16, 1)
    shrunk = scale / (weight.abs().amax(dim=1, keepdim=True) / 7.5)
    assert (shrunk <= 1 + 1e-6).all() and (shrunk > 0.9 - 1e-6).all() and (shrunk < 0.99).any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minmax", {"averaging_constant": 0.01}),
        ("mse", {"maxshrink": 0.20, "patience": 5, "averaging_constant": 0.01, "grid": 100.0}),
    ],
)
def test_the_documented_parameters_have_the_documented_defaults(name, expected):
    observer = Observer.load_from_registry(name, quantization_args=CHANNEL)
    assert {knob: getattr(observer, knob) for knob in expected} == expected


@pytest.mark.parametrize(
    ("strategy", "base_name", "value", "scale_shape"),
    [
        ({"strategy": "tensor"}, "weight", (6, 32), (1,)),
        ({"strategy": "channel"}, "weight", (6, 32), (6, 1)),
        ({"strategy": "group", "group_size": 16}, "weight", (6, 32), (6, 2)),
        ({"strategy": "tensor_group", "group_size": 16}, "weight", (6, 32), (6, 2)),
        ({"strategy": "block", "block_structure": [4, 16]}, "weight", (6, 40), (2, 3)),
        ({"strategy": "token", "dynamic": True}, "input", (2, 5, 32), (5,)),
        ({"strategy": "attn_head"}, "q", (2, 3, 5, 8), (3, 1, 1)),
    ],
)
@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_every_strategy_gives_qparams(name, strategy, base_name, value, scale_shape):
    args = QuantizationArgs(num_bits=8, **strategy)
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    scale, zero_point = observer(torch.randn(value))
    assert scale.shape == zero_point.shape == scale_shape
    assert (scale > 0).all()


def test_g_idx_maps_columns_to_groups():
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    x, g_idx = torch.randn(8, 32), torch.tensor([1, 0] * 16)
    observer = Observer.load_from_registry("minmax", quantization_args=args)
    scale, _ = observer(x, g_idx=g_idx)
    expected = torch.stack([x[:, g_idx == group].abs().amax(dim=1) for group in (0, 1)], dim=1) / 7.5
    torch.testing.assert_close(scale, expected)


def test_observed_tokens_are_recorded_and_reset_forgets():
    observer = Observer.load_from_registry("minmax", base_name="input", args=STATIC_INT8)
    observer(torch.randn(2, 5, 32))
    observer(torch.randn(1, 3, 32))
    assert observer.num_observed_tokens == 13
    observer.reset()
    assert observer.num_observed_tokens == 0
    assert not observer.has_statistics
    scale, _ = observer(torch.full((1, 1, 32), 12.75))
    torch.testing.assert_close(scale, torch.tensor([0.1]))


# ---- the chapter on calibration ------------------------------------------------------------------------------------


def test_the_base_class_is_found_where_the_listing_imports_it_from():
    assert importlib.import_module("scalewright.observers.base").Observer is Observer


def initialize_observer(module: Module, base_name: str) -> None:
    """Set an observer on a layer in the manner of the chapter."""
    quantization_args = getattr(module.quantization_scheme, base_name)
    if quantization_args and not quantization_args.dynamic:
        observer_name = quantization_args.observer
        observer = Observer.load_from_registry(observer_name, quantization_args=quantization_args)
        module.register_module(f"{base_name}_observer", observer)


def calibrate_input_hook(module: Module, args: tuple) -> None:
    """Observe the input of a layer and keep its qparams on the layer, in the manner of the chapter."""
    input_tensor = args[0]
    input_observer = module.input_activations_observer
    scale, zp = input_observer(input_tensor)
    module.register_buffer("input_scale", scale)
    module.register_buffer("input_zero_point", zp)


@pytest.mark.parametrize("name", ["minmax", "mse", "static_minmax"])
def test_the_calibration_hook_of_the_chapter_works(name):
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    args = QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor", observer=name)
    handles = []
    for layer in (model[0], model[2]):
        layer.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
        initialize_observer(layer, "input_activations")
        handles.append(layer.register_forward_pre_hook(calibrate_input_hook))
    inputs = [torch.randn(2, 5, 32) for _ in range(3)]
    for batch in inputs:
        model(batch)
    for handle, layer in zip(handles, (model[0], model[2]), strict=True):
        handle.remove()
        del layer.input_activations_observer
    assert set(model.state_dict()) >= {"0.input_scale", "0.input_zero_point", "2.input_scale", "2.input_zero_point"}
    assert model[2].input_zero_point.tolist() == [-128]  # nothing below zero comes out of a ReLU
    if name == "static_minmax":
        everything = torch.cat(inputs)
        torch.testing.assert_close(model[0].input_scale, ((everything.max() - everything.min()) / 255).reshape(1))


def test_a_forward_hook_may_observe_outputs():
    layer = nn.Linear(32, 8)
    observer = Observer.load_from_registry("static_minmax", base_name="output", args=STATIC_INT8)
    layer.register_module("output_observer", observer)

    def observe_output(module: Module, args: tuple, output: torch.Tensor) -> None:
        module.output_observer(output)

    handle = layer.register_forward_hook(observe_output)
    outputs = [layer(torch.randn(2, 5, 32)) for _ in range(2)]
    handle.remove()
    absmax = torch.cat(outputs).detach().abs().max()
    torch.testing.assert_close(layer.output_observer.get_qparams()["scale"], (absmax / 127.5).reshape(1))


def test_an_observer_on_a_module_adds_nothing_to_its_state():
    layer = nn.Linear(32, 8)
    layer.register_module("weight_observer", Observer.load_from_registry("mse", quantization_args=CHANNEL))
    layer.weight_observer(layer.weight)
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}


def test_the_scheme_of_the_recipe_snippet_makes_observers():
    snippet = """
    modifiers:
      QuantizationModifier:
        targets: ["Linear"]
        scheme: W8A8
        activation_observer:
          name: mse
          averaging_constant: 0.01
    """
    modifier = yaml.safe_load(snippet)["modifiers"]["QuantizationModifier"]
    scheme = preset_name_to_scheme(modifier["scheme"], modifier["targets"])
    weight = torch.randn(16, 64)
    scale, _ = Observer.load_from_registry("minmax", quantization_args=scheme.weights)(weight)
    torch.testing.assert_close(scale, weight.abs().amax(dim=1, keepdim=True) / 127.5)
    knobs = modifier["activation_observer"]
    observer = Observer.load_from_registry(
        knobs.pop("name"),
        base_name="input",
        args=scheme.input_activations.model_copy(update={"strategy": "tensor", "dynamic": False}),
        **knobs,
    )
    assert isinstance(observer, MovingAverageMSEObserver)
    scale, _ = observer(torch.randn(2, 5, 64))
    assert scale.shape == (1,)


def test_an_observer_of_ones_own_is_registered_by_a_decorator(monkeypatch):
    for table in ("_names", "_classes"):  # what is registered here is forgotten after the test
        monkeypatch.setattr(NamedObservers, table, dict(getattr(NamedObservers, table)))

    @Observer.register("doubled_minmax")
    class DoubledObserver(StaticMinMaxObserver):
        """Twice the range, for a test."""

        def update_statistics_from_observed(self, observed):
            super().update_statistics_from_observed(observed * 2)

    observer = Observer.load_from_registry("doubled_minmax", quantization_args=CHANNEL)
    assert type(observer) is DoubledObserver
    scale, _ = observer(torch.full((2, 4), 3.0))
    torch.testing.assert_close(scale, torch.full((2, 1), 6 / 7.5))


def test_the_observer_keeps_its_quantization_args_under_both_names():
    observer = Observer.load_from_registry("minmax", quantization_args=CHANNEL)
    assert observer.quantization_args is observer.args
    assert observer.args.num_bits == 4


# ---- the reference of the classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minmax", "MinMax", "min_max", "min-max", "MIN_MAX"])
def test_names_ignore_case_hyphens_and_underscores(name):
    assert Observer.get_value_from_registry(name) is MinMaxObserver


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("memoryless_minmax", MemorylessMinMaxObserver),
        ("static_minmax", StaticMinMaxObserver),
        ("minmax", MinMaxObserver),
        ("mse", MovingAverageMSEObserver),
        ("imatrix_mse", IMatrixMSEObserver),
    ],
)
def test_registry_names_lead_to_the_listed_classes(name, cls):
    assert type(Observer.load_from_registry(name, base_name="weight", args=CHANNEL)) is cls


def test_the_class_hierarchy_is_the_listed_one():
    assert issubclass(Observer, InternalModule)
    assert issubclass(Observer, RegistryMixin)
    assert issubclass(Observer, Module)
    assert issubclass(StaticMinMaxObserver, MemorylessMinMaxObserver)
    for cls in LISTED:
        assert issubclass(cls, Observer)
    assert not issubclass(MinMaxObserver, MemorylessMinMaxObserver)


@pytest.mark.parametrize("cls", LISTED)
def test_the_constructor_takes_a_base_name_and_args_by_place_or_by_name(cls):
    for observer in (cls("weight", CHANNEL), cls(base_name="weight", args=CHANNEL)):
        assert observer.base_name == "weight"
        assert observer.args.strategy == "channel"
        assert observer._fused_observers == set()


def test_the_constructor_has_the_listed_parameters():
    parameters = inspect.signature(Observer.__init__).parameters
    assert list(parameters)[:3] == ["self", "base_name", "args"]
    assert parameters["observer_kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_keywords_become_observer_kwargs_of_the_observers_own_args():
    observer = MovingAverageMSEObserver("weight", CHANNEL, maxshrink=0.3)
    assert observer.args.observer_kwargs == {"maxshrink": 0.3}


@pytest.mark.parametrize(
    ("cls", "defaults"),
    [
        (MinMaxObserver, {"avg_constant": 0.01}),
        (
            MovingAverageMSEObserver,
            {"avg_constant": 0.01, "maxshrink": 0.20, "patience": 5, "grid": 100.0, "norm": 2.4},
        ),
        (IMatrixMSEObserver, {"maxshrink": 0.95, "patience": 5, "grid": 20, "norm": 3.0, "strict": False}),
    ],
)
def test_attributes_have_the_listed_names_and_defaults(cls, defaults):
    observer = cls("weight", CHANNEL)
    assert {name: getattr(observer, name) for name in defaults} == defaults
    changed = cls("weight", CHANNEL, **{"averaging_constant": 0.5} if cls is MinMaxObserver else {"norm": 2.0})
    assert (changed.avg_constant if cls is MinMaxObserver else changed.norm) in (0.5, 2.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("grid", 0), ("grid", -1), ("patience", -1), ("maxshrink", -0.1), ("maxshrink", 1.1), ("norm", 0), ("norm", "3")],
)
def test_the_listed_values_out_of_range_are_value_errors(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        IMatrixMSEObserver("weight", CHANNEL, **{name: value})


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("attach", ["self", "module"]),
        ("detach", ["self", "module"]),
        ("forward", ["self", "observed"]),
        ("fuse", ["observers"]),
        ("get_qparams", ["self"]),
        ("sync_activation_stats", ["self"]),
        ("update_statistics_from_observed", ["self", "observed"]),
    ],
)
def test_methods_have_the_listed_parameters(method, parameters):
    found = inspect.signature(getattr(Observer, method)).parameters
    assert list(found)[: len(parameters)] == parameters
    assert all(each.default is not inspect.Parameter.empty for each in list(found.values())[len(parameters) :])


def test_fuse_is_static_and_update_is_for_the_child_to_write():
    assert isinstance(inspect.getattr_static(Observer, "fuse"), staticmethod)
    assert Observer.update_statistics_from_observed.__isabstractmethod__
    with pytest.raises(TypeError, match="load_from_registry"):
        Observer("weight", CHANNEL)


def test_a_child_that_was_written_to_an_older_interface_is_told_what_to_write():
    class Old(Observer):
        def calculate_qparams(self, observed):
            return observed.amax(), observed.amin()

    with pytest.raises(NotImplementedError) as caught:
        Old("weight", CHANNEL)(torch.randn(4, 8))
    assert str(caught.value) == (
        "Old: has no update_statistics_from_observed, which sets min_vals and max_vals from values of shape "
        "(num_observations, *qparam_shape, group_size). Write it in place of calculate_qparams."
    )


def test_functions_have_the_listed_parameters():
    assert list(inspect.signature(flatten_for_calibration).parameters)[:3] == ["value", "base_name", "args"]
    assert list(inspect.signature(fuse_weight_observers).parameters) == ["model"]


@pytest.mark.parametrize("cls", LISTED)
def test_forward_returns_the_observer_and_get_qparams_the_listed_keys(cls):
    observer = cls("weight", CHANNEL)
    assert not observer.has_statistics
    assert observer(torch.randn(4, 16)) is observer
    assert observer.has_statistics
    assert observer.min_vals.shape == observer.max_vals.shape == (4, 1)
    qparams = observer.get_qparams()
    assert set(qparams) == set(QParamsDict.__annotations__) == {"scale", "zero_point", "global_scale"}
    assert qparams["global_scale"] is None
    assert observer.sync_activation_stats() == []


@pytest.mark.parametrize("cls", LISTED)
def test_reading_before_anything_was_seen_is_the_listed_assertion(cls):
    observer = cls("weight", CHANNEL)
    assert observer(torch.empty(0, 16)) is observer
    with pytest.raises(AssertionError, match=r"^No statistics available\. Call observer\(value\) first\.$"):
        observer.get_qparams()


@pytest.mark.parametrize("cls", LISTED)
def test_a_child_sees_the_flattened_value(cls):
    seen = []

    class Watching(cls):
        """Writes down the shapes that it is given."""

        def update_statistics_from_observed(self, observed):
            seen.append(tuple(observed.shape))
            super().update_statistics_from_observed(observed)

    Watching("weight", QuantizationArgs(num_bits=4, strategy="group", group_size=16))(torch.randn(4, 32))
    assert seen == [(1, 4, 2, 16)]


@pytest.mark.parametrize("cls", LISTED)
def test_statistics_may_be_updated_from_a_flattened_value_directly(cls):
    weight = torch.randn(4, 16)
    direct, called = cls("weight", CHANNEL), cls("weight", CHANNEL)
    direct.update_statistics_from_observed(flatten_for_calibration(weight, "weight", CHANNEL))
    torch.testing.assert_close(direct.get_qparams(), called(weight).get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("base_name", "strategy", "value", "expected"),
    [
        ("weight", {"strategy": "tensor"}, (6, 8), (1, 1, 48)),
        ("weight", {"strategy": "channel"}, (6, 8), (1, 6, 1, 8)),
        ("weight", {"strategy": "group", "group_size": 4}, (6, 8), (1, 6, 2, 4)),
        ("weight", {"strategy": "block", "block_structure": [4, 4]}, (6, 9), (1, 2, 3, 16)),
        ("input", {"strategy": "tensor"}, (2, 3, 8), (6, 1, 8)),
        ("output", {"strategy": "group", "group_size": 4}, (2, 3, 8), (6, 2, 4)),
        ("k", {"strategy": "attn_head"}, (2, 5, 3, 8), (6, 5, 1, 1, 8)),
        ("v", {"strategy": "tensor"}, (2, 5, 3, 8), (6, 1, 40)),
    ],
)
def test_flattening_gives_observations_qparam_shape_and_group(base_name, strategy, value, expected):
    args = QuantizationArgs(num_bits=8, **strategy)
    assert tuple(flatten_for_calibration(torch.randn(value), base_name, args).shape) == expected


def test_padding_of_blocks_does_not_distort_the_qparams():
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[4, 4])
    weight = torch.randn(6, 9)
    scale, _ = MemorylessMinMaxObserver("weight", args)(weight)
    torch.testing.assert_close(scale[1, 2], weight[4:, 8:].abs().max() / 448)


def test_an_unknown_base_name_is_a_value_error():
    with pytest.raises(ValueError, match="base name"):
        flatten_for_calibration(torch.randn(2, 4), "bias", CHANNEL)
    with pytest.raises(ValueError, match="base name"):
        MinMaxObserver("bias", CHANNEL)(torch.randn(2, 4))


# ---- importance ----------------------------------------------------------------------------------------------------


def test_importance_accumulates_on_the_module_and_the_second_pass_picks_it_up():
    layer, x = nn.Linear(32, 8), torch.randn(2, 5, 32)
    gatherer = IMatrixMSEObserver("weight", CHANNEL)
    assert gatherer._imatrix_sum is None
    assert gatherer._imatrix_count.dtype == torch.int64 and gatherer._imatrix_count == 0
    gatherer.attach(layer)
    assert hasattr(layer, "_imatrix_hook")
    layer(x)
    torch.testing.assert_close(layer._imatrix_sum, x.square().sum(dim=(0, 1)))
    assert layer._imatrix_count == 10
    gatherer.detach(layer)
    assert not hasattr(layer, "_imatrix_hook") and not layer._forward_pre_hooks
    assert hasattr(layer, "_imatrix_sum")

    second = IMatrixMSEObserver("weight", CHANNEL)
    second.attach(layer)
    assert not hasattr(layer, "_imatrix_sum") and not hasattr(layer, "_imatrix_count")
    assert not layer._forward_pre_hooks
    torch.testing.assert_close(second._imatrix_sum, x.square().sum(dim=(0, 1)))
    assert second._imatrix_count == 10
    second(layer.weight)
    assert second.has_statistics and second.notes() == []
    second.detach(layer)


def test_sums_put_on_a_module_by_hand_are_picked_up_too():
    layer = nn.Linear(32, 8)
    layer._imatrix_sum, layer._imatrix_count = torch.rand(32), torch.tensor(4)
    expected = layer._imatrix_sum / 4
    observer = IMatrixMSEObserver("weight", CHANNEL)
    observer.attach(layer)
    torch.testing.assert_close(observer.channel_importance, expected)


@pytest.mark.parametrize("args", [CHANNEL, NVFP4, QuantizationArgs(num_bits=4, strategy="group", group_size=16)])
def test_importance_serves_channel_group_and_tensor_group(args):
    layer = nn.Linear(32, 8)
    observer = IMatrixMSEObserver("weight", args)
    observer.attach(layer)
    layer(torch.randn(4, 32) * torch.linspace(0.01, 3, 32))
    observer(layer.weight)
    plain = IMatrixMSEObserver("weight", args)(layer.weight)
    assert (observer.max_vals != plain.max_vals).any()


@pytest.mark.parametrize("cls", [MinMaxObserver, MovingAverageMSEObserver, StaticMinMaxObserver])
def test_attaching_other_observers_leaves_the_module_alone(cls):
    layer = nn.Linear(32, 8)
    before = set(vars(layer))
    observer = cls("weight", CHANNEL)
    observer.attach(layer)
    observer.detach(layer)
    assert set(vars(layer)) == before and not layer._forward_pre_hooks


# ---- fused layers --------------------------------------------------------------------------------------------------


def test_fuse_links_all_with_each_other():
    observers = [MemorylessMinMaxObserver("weight", NVFP4) for _ in range(3)]
    Observer.fuse(observers)
    for each in observers:
        assert each._fused_observers == set(observers) - {each}


def test_fused_layers_of_a_model_share_a_global_scale():
    attention = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer = nn.Linear(32, 16, bias=False)
        layer.register_module("weight_observer", MemorylessMinMaxObserver("weight", NVFP4))
        setattr(attention, name, layer)
    model = nn.Sequential(attention)
    fuse_weight_observers(model)
    for layer in attention.children():
        layer.weight_observer(layer.weight)
    found = {name: layer.weight_observer.get_qparams()["global_scale"] for name, layer in attention.named_children()}
    absmax = torch.stack([getattr(attention, name).weight.abs().max() for name in ("q_proj", "k_proj", "v_proj")]).max()
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(found[name], (448 * 6 / absmax).detach().reshape(1))
    assert found["o_proj"] != found["q_proj"] or attention.o_proj.weight.abs().max() == absmax


def test_a_fused_observer_that_was_not_run_is_the_listed_assertion():
    observers = [MemorylessMinMaxObserver("weight", NVFP4) for _ in range(2)]
    Observer.fuse(observers)
    observers[0](torch.randn(4, 32))
    with pytest.raises(AssertionError, match=r"All fused observers must be run before get_qparams"):
        observers[0].get_qparams()
