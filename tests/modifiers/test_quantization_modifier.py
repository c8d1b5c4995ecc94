"""QuantizationModifier: which scheme and observer each group gets, and what it says no to."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from scalewright.errors import RecipeError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.quantization import observers_of
from scalewright.modifiers.schemes import scheme_named, scheme_names
from scalewright.observers import Observer

OBSERVERS = ", ".join(sorted(Observer.registered_names()))
MSE_KNOBS = "Knobs: averaging_constant, expand, grid, maxshrink, norm, patience."
KV = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "strategy": "channel"}
E2M1 = {"num_bits": 4, "type": "float"}


def only_scheme(**given) -> QuantizationScheme:
    (group,) = QuantizationModifier(**given).groups
    return group.scheme


def message(**given) -> str:
    with pytest.raises(RecipeError) as caught:
        QuantizationModifier(**given)
    return str(caught.value)


# ---- schemes and groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*scheme_names()} - {"UNQUANTIZED"}))
def test_a_scheme_by_name_is_given_to_the_targets(name):
    assert only_scheme(scheme=name) == scheme_named(name, ["Linear"])
    assert only_scheme(scheme=name.lower(), targets="a.b") == scheme_named(name, ["a.b"])
    assert only_scheme(scheme={name: ["a", "re:b"]}) == scheme_named(name, ["a", "re:b"])
    assert only_scheme(config_groups={name: ["a", "re:b"]}) == scheme_named(name, ["a", "re:b"])


def test_several_schemes_become_groups_in_order():
    modifier = QuantizationModifier(scheme={"W4A16": ["re:a"], "fp8": "b", "UNQUANTIZED": ["c"]})
    assert [(group.name, group.targets, group.is_left_alone) for group in modifier.groups] == [
        ("group_0", ["re:a"], False),
        ("group_1", ["b"], False),
        ("group_2", ["c"], True),
    ]
    assert modifier.groups[1].scheme == scheme_named("FP8", ["b"])


def test_config_groups_keep_their_names_and_all_their_parts():
    given = {
        "weights": {"num_bits": 8, "type": "FLOAT", "strategy": "Block", "block_structure": "128x128"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "observer": None},
        "output_activations": {"num_bits": 8},
        "format": "float-quantized",
        "targets": ["a"],
    }
    modifier = QuantizationModifier(config_groups={"mine": given, "w4a16": ["b"], "third": {"weights": INT4}})
    assert [group.name for group in modifier.groups] == ["mine", "w4a16", "third"]
    assert modifier.groups[0].scheme == QuantizationScheme(
        targets=["a"],
        weights=QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        input_activations=QuantizationArgs(num_bits=8, type="float", dynamic=True, strategy="token"),
        output_activations=QuantizationArgs(num_bits=8),
        format="float-quantized",
    )
    assert modifier.groups[1].scheme == scheme_named("W4A16", ["b"])
    assert modifier.groups[2].targets == ["Linear"]


def test_parts_may_stand_on_the_modifier():
    scheme = only_scheme(
        weights=INT4, input_activations={"num_bits": 8}, output_activations=QuantizationArgs(num_bits=6)
    )
    assert scheme == QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**INT4),
        input_activations=QuantizationArgs(num_bits=8),
        output_activations=QuantizationArgs(num_bits=6),
    )


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP6A16"])
def test_small_floats_that_are_spelled_out_have_the_scales_of_the_scheme(name):
    """Or they would be rounded under scales that are not those which are stored."""
    wanted = scheme_named(name)
    spelled_out = {
        part: {"num_bits": each.num_bits, "type": "float", "strategy": each.strategy, "group_size": each.group_size}
        | {"dynamic": each.dynamic}
        for part in ("weights", "input_activations")
        if (each := getattr(wanted, part)) is not None
    }
    for scheme in (only_scheme(**spelled_out), only_scheme(config_groups={"a": {"targets": ["b"], **spelled_out}})):
        for part in spelled_out:
            assert getattr(scheme, part).scale_dtype == getattr(wanted, part).scale_dtype


def test_the_kv_cache_may_stand_alone_or_beside_a_scheme():
    alone = QuantizationModifier(kv_cache_scheme=KV)
    assert (alone.groups, alone.kv_cache) == ((), QuantizationArgs(**KV))
    assert QuantizationModifier(kv_cache_scheme={**KV, "strategy": "attn_head"}).kv_cache.strategy == "attn_head"
    both = QuantizationModifier(scheme="W4A16", targets=["a"], kv_cache_scheme=KV)
    assert (both.groups[0].scheme, both.kv_cache) == (scheme_named("W4A16", ["a"]), QuantizationArgs(**KV))


def test_attention_states_may_have_a_scale_for_each_head():
    heads = {"num_bits": 8, "strategy": "attn_head"}
    modifier = QuantizationModifier(config_groups={"a": {"targets": ["LlamaAttention"], "input_activations": heads}})
    assert modifier.groups[0].scheme.input_activations.strategy == "attn_head"


@pytest.mark.parametrize(
    ("given", "data"),
    [
        ({"scheme": "W8A8"}, "needed"),
        ({"scheme": "NVFP4"}, "needed"),
        ({"kv_cache_scheme": KV}, "needed"),
        ({"output_activations": {"num_bits": 8}}, "needed"),
        ({"scheme": "W8A8_DYNAMIC", "kv_cache_scheme": KV}, "needed"),
        ({"scheme": {"W4A16": ["a"], "FP8": ["b"]}, "weight_observer": "minmax"}, "needed"),
        ({"scheme": "W4A16"}, "useful"),
        ({"scheme": "W4A16", "weight_observer": "imatrix_mse"}, "useful"),
        ({"config_groups": {"a": {"weights": INT4}}, "weight_observer": "mse"}, "none"),
        ({"scheme": "W8A8_DYNAMIC", "weight_observer": "minmax"}, "none"),
    ],
)
def test_a_modifier_knows_whether_it_wants_data(given, data):
    assert QuantizationModifier(**given).data == data


# ---- group size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["W4A16", "w3a16", "W4A16_ASYM", "W4A8", "W4AFP8"])
def test_a_group_size_replaces_that_of_the_scheme(name):
    expected = scheme_named(name)
    expected.weights.group_size = 32
    assert only_scheme(scheme=name, group_size=32) == expected
    assert only_scheme(config_groups={name: ["Linear"]}, group_size=32) == expected


def test_a_group_size_is_for_those_schemes_that_have_groups():
    groups = QuantizationModifier(scheme={"W4A16": ["a"], "FP8": ["b"], "NVFP4": ["c"]}, group_size=64).groups
    assert [group.scheme.weights.group_size for group in groups] == [64, None, 16]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scheme": "FP8"}, "the scheme's weights have no groups. Leave it out."),
        ({"scheme": "FP8_BLOCK"}, "the scheme's weights have no groups. Leave it out."),
        ({"scheme": "NVFP4"}, "the scheme has groups of 16 and no others. Leave it out."),
        ({"scheme": "MXFP4"}, "the scheme has groups of 32 and no others. Leave it out."),
        ({"weights": INT4}, "goes with scheme; weights say their own. Leave it out."),
        ({"config_groups": {"a": {"weights": INT4}}}, "goes with scheme; weights say their own. Leave it out."),
        ({"kv_cache_scheme": KV}, "goes with scheme; weights say their own. Leave it out."),
    ],
)
def test_a_group_size_that_changes_nothing_is_an_error(given, words):
    assert message(**given, group_size=32) == f"group_size: {words}"


@pytest.mark.parametrize("size", [0, -1, 2.5, "32", True, [32], {}])
def test_a_group_size_is_a_whole_number(size):
    assert message(scheme="W4A16", group_size=size) == f"group_size: expected a whole number from 1 on, got {size!r}."


# ---- observers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"scheme": "W4A16", "weight_observer": {"name": "mse", "norm": 3.0}},
        {"config_groups": {"W4A16": ["Linear"]}, "weight_observer": {"name": "mse", "norm": 3.0}},
        {"weights": {**INT4, "observer": "mse", "observer_kwargs": {"norm": 3.0}}},
        {"weights": {**INT4, "observer_kwargs": {"norm": 3.0}}, "weight_observer": "mse"},
        {"weights": QuantizationArgs(**INT4, observer="mse", observer_kwargs={"norm": 3.0})},
        {"config_groups": {"g": {"weights": {**INT4, "observer": "mse", "observer_kwargs": {"norm": 3.0}}}}},
    ],
)
def test_the_observer_of_weights_can_be_named_in_all_ways(given):
    scheme = only_scheme(**given)
    assert (scheme.weights.observer, scheme.weights.observer_kwargs) == ("mse", {"norm": 3.0})
    observer = observers_of(scheme)["weight"]
    assert (observer.observer_name, observer.norm) == ("mse", 3.0)


@pytest.mark.parametrize("name", ["minmax", "MinMax", "min-max"])
def test_the_observer_of_activations_can_be_named_in_all_ways(name):
    for given in (
        {"scheme": "W8A8", "activation_observer": name},
        {"scheme": "W8A8", "activation_observer": {"name": name}},
        {"weights": INT4, "input_activations": {"num_bits": 8, "observer": name}},
        {"weights": INT4, "input_activations": {"num_bits": 8}, "activation_observer": name},
    ):
        observers = observers_of(only_scheme(**given))
        assert {base: each.observer_name for base, each in observers.items()} == {
            "weight": "optimal",
            "input": "minmax",
        }


def test_the_observer_of_activations_is_for_all_static_ones_that_name_none():
    modifier = QuantizationModifier(
        config_groups={
            "a": {"input_activations": {"num_bits": 8}, "output_activations": {"num_bits": 8}},
            "b": {"input_activations": {"num_bits": 8, "observer": "minmax"}},
            "c": {"input_activations": {"num_bits": 8, "dynamic": True}, "weights": INT4},
        },
        kv_cache_scheme=KV,
        activation_observer={"name": "percentile", "percentile": 99},
    )
    a, b, c = (group.scheme for group in modifier.groups)
    parts = (a.input_activations, a.output_activations, b.input_activations, c.input_activations, c.weights)
    assert [args.observer for args in (*parts, modifier.kv_cache)] == [
        "percentile", "percentile", "minmax", None, None, "percentile"
    ]  # fmt: skip
    assert modifier.kv_cache.observer_kwargs == {"percentile": 99}
    assert sorted(observers_of(c)) == ["weight"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"scheme": "W4A16", "activation_observer": "mse"},
            "activation_observer: there are no static activations to observe. Leave it out.",
        ),
        (
            {"scheme": "W8A8_DYNAMIC", "activation_observer": "mse"},
            "activation_observer: there are no static activations to observe. Dynamic scales are found while "
            "the model runs. "
            "Leave it out.",
        ),
        (
            {"kv_cache_scheme": KV, "weight_observer": "mse"},
            "weight_observer: there are no weights to observe. Leave it out.",
        ),
        (
            {"weights": {**INT4, "observer": "mse"}, "weight_observer": "minmax"},
            "weight_observer: weights names observer 'mse' already. Keep one of them.",
        ),
        (
            {"config_groups": {"g": {"weights": {"observer": "mse"}}}, "weight_observer": "minmax"},
            "weight_observer: config_groups.g.weights names observer 'mse' already. Keep one of them.",
        ),
        (
            {"scheme": "W4A16", "weight_observer": 5},
            "weight_observer: expected a name or {name: ..., knob: ...}, got 5.",
        ),
        (
            {"scheme": "W4A16", "weight_observer": {"norm": 2}},
            "weight_observer: expected a name or {name: ..., knob: ...}, got {'norm': 2}.",
        ),
        (
            {"scheme": "W4A16", "weight_observer": ["mse"]},
            "weight_observer: expected a name or {name: ..., knob: ...}, got ['mse'].",
        ),
        (
            {"scheme": "W4A16", "weight_observer": "mes"},
            f"there is no observer 'mes'. Did you mean 'mse'? Observers: {OBSERVERS}.",
        ),
        (
            {"scheme": "W8A8", "activation_observer": {"name": "mse", "max_shrink": 1}},
            f"observer 'mse' has no knob 'max_shrink'. Did you mean 'maxshrink'? {MSE_KNOBS}",
        ),
        (
            {"scheme": "W8A8", "activation_observer": {"name": "mse", "norm": "2"}},
            "observer 'mse': norm must be a number above 0 and at most 16, got '2'.",
        ),
        (
            {"scheme": "W8A8", "activation_observer": {"name": "mse", "norm": None}},
            "observer 'mse': norm must be a number above 0 and at most 16, got None.",
        ),
        (
            {"weights": {**INT4, "observer": "mse", "observer_kwargs": {"nrom": 2}}},
            f"observer 'mse' has no knob 'nrom'. Did you mean 'norm'? {MSE_KNOBS}",
        ),
        (
            {"weights": {"num_bits": 4, "group_size": 32, "observer": "percentile"}},
            "observer 'percentile' does not serve strategy 'group'. It serves: tensor, attn_head.",
        ),
        (
            {"scheme": "NVFP4", "activation_observer": "percentile"},
            "observer 'percentile' does not serve strategy 'tensor_group'. It serves: tensor, attn_head.",
        ),
        (
            {"weights": INT4, "input_activations": {"dynamic": True, "strategy": "token", "observer": "mse"}},
            "input_activations: dynamic scales are found while the model runs, and there is nothing to "
            "observe. Leave the "
            "observer out, or set dynamic to false.",
        ),
        (
            {"input_activations": {"dynamic": True, "observer_kwargs": {"norm": 2}}},
            "input_activations: dynamic scales are found while the model runs, and there is nothing to "
            "observe. Leave the "
            "observer out, or set dynamic to false.",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_observer_that_cannot_be_meant_is_an_error(given, words):
    assert message(**given) == words


# ---- other mistakes --------------------------------------------------------------------------------------------------

ARGS_FIELDS = (
    "It has: num_bits, type, symmetric, group_size, strategy, block_structure, dynamic, actorder, "
    "scale_dtype, zp_dtype, "
    "observer, observer_kwargs."
)
NOTHING = (
    "QuantizationModifier does not say what to quantise to. Give scheme, config_groups, weights, input_activations, "
    "output_activations or kv_cache_scheme."
)
MISTAKES = [
    # nothing, or too much
    ({}, NOTHING),
    ({"targets": ["Linear"]}, NOTHING),
    ({"scheme": "UNQUANTIZED"}, NOTHING),
    ({"scheme": None, "weights": None}, NOTHING),
    ({"scheme": "W4A16", "weights": INT4}, "scheme and weights both say what to quantise to. Keep one of them."),
    (
        {"scheme": "W4A16", "config_groups": {}},
        "scheme and config_groups both say what to quantise to. Keep one of them.",
    ),
    (
        {"config_groups": {}, "output_activations": {}},
        "config_groups and output_activations both say what to quantise to. Keep one of them.",
    ),
    ({"scheme": {"W4A16": ["a"]}, "targets": ["b"]}, "targets: scheme names its targets already. Keep one of them."),
    (
        {"config_groups": {"W4A16": ["a"]}, "targets": ["b"]},
        "targets: config_groups names its targets already. Keep one of them.",
    ),
    (
        {"kv_cache_scheme": KV, "targets": ["b"]},
        "targets: a kv cache is that of all attention modules. Leave targets out, or add a scheme for them.",
    ),
    # names
    ({"scheme": "W4A16", "targets": []}, "targets: there are no targets in it. Name some, such as Linear."),
    ({"scheme": {"W4A16": []}}, "scheme.W4A16: there are no targets in it. Name some, such as Linear."),
    (
        {"config_groups": {"a": {"targets": [], "weights": INT4}}},
        "config_groups.a.targets: there are no targets in it. Name some, such as Linear.",
    ),
    ({"scheme": "W4A16", "targets": 5}, "targets: expected a name or a list of names, got 5."),
    ({"scheme": "W4A16", "targets": [["Linear"]]}, "targets: expected a name or a list of names, got [['Linear']]."),
    (
        {"scheme": "W4A16", "targets": ["Linear", None]},
        "targets: expected a name or a list of names, got ['Linear', None].",
    ),
    ({"scheme": "W4A16", "targets": ""}, "targets: expected a name or a list of names, got ''."),
    ({"scheme": "W4A16", "ignore": {"a": 1}}, "ignore: expected a name or a list of names, got {'a': 1}."),
    ({"scheme": {"W4A16": None}}, "scheme.W4A16: expected a name or a list of names, got None."),
    (
        {"scheme": "W4A16", "ignore": "re:["},
        "ignore: 're:[' is not a regular expression: unterminated character set at position 0.",
    ),
    (
        {"scheme": "W4A16", "targets": "a[z-a]"},
        "targets: 'a[z-a]' is not a wildcard: bad character range z-a at position 11.",
    ),
    # schemes
    ({"scheme": 5}, "scheme: expected a name or {name: [targets]}, got 5."),
    ({"scheme": ["W4A16"]}, "scheme: expected a name or {name: [targets]}, got ['W4A16']."),
    ({"scheme": {}}, "scheme: expected a name or {name: [targets]}, got {}."),
    ({"scheme": {"weights": INT4}}, f"there is no scheme 'weights'. Schemes: {', '.join(scheme_names())}."),
    ({"config_groups": {"mine": ["a"]}}, f"there is no scheme 'mine'. Schemes: {', '.join(scheme_names())}."),
    ({"config_groups": {}}, "config_groups: expected {name: {targets, weights, ...}}, got {}."),
    ({"config_groups": ["a"]}, "config_groups: expected {name: {targets, weights, ...}}, got ['a']."),
    ({"config_groups": {"a": 5}}, "config_groups.a: expected {targets, weights, ...} or a list of targets, got 5."),
    (
        {"config_groups": {"a": None}},
        "config_groups.a: expected {targets, weights, ...} or a list of targets, got None.",
    ),
    (
        {"config_groups": {"a": {"targets": ["b"], "weights": None}}},
        "config_groups.a: does not say what to quantise to. Give weights or input_activations or output_activations.",
    ),
    (
        {"config_groups": {"a": {"weights": INT4, "observer": "mse"}}},
        "config_groups.a has no 'observer'. It has: targets, weights, input_activations, output_activations, format.",
    ),
    (
        {"config_groups": {"a": {"weights": INT4, "format": "pack-quantised"}}},
        "config_groups.a: there is no format 'pack-quantised'. Did you mean 'pack-quantized'? Choices: {formats}.",
    ),
    (
        {"config_groups": {"a": {"weights": INT4, "format": "mixed-precision"}}},
        "config_groups.a: there is no format 'mixed-precision'. Choices: {formats}.",
    ),
    # formats
    ({"weights": 4}, "weights: expected {num_bits, type, strategy, ...}, got 4."),
    ({"weights": "int4"}, "weights: expected {num_bits, type, strategy, ...}, got 'int4'."),
    ({"kv_cache_scheme": "FP8"}, "kv_cache_scheme: expected {num_bits, type, strategy, ...}, got 'FP8'."),
    ({"weights": [INT4]}, f"weights: expected {{num_bits, type, strategy, ...}}, got [{INT4!r}]."),
    ({"weights": {"bits": 4}}, f"weights has no 'bits'. Did you mean 'num_bits'? {ARGS_FIELDS}"),
    ({"kv_cache_scheme": {"num_bit": 8}}, f"kv_cache_scheme has no 'num_bit'. Did you mean 'num_bits'? {ARGS_FIELDS}"),
    ({"weights": {"num_bits": "four"}}, "weights.num_bits: expected a whole number, got 'four'."),
    ({"weights": {"num_bits": "4"}}, "weights.num_bits: expected a whole number, got '4'."),
    ({"weights": {"num_bits": True}}, "weights.num_bits: expected a whole number, got True."),
    ({"weights": {"num_bits": 4.5}}, "weights.num_bits: expected a whole number, got 4.5."),
    ({"weights": {"group_size": "x"}}, "weights.group_size: expected a whole number, got 'x'."),
    ({"weights": {"group_size": [32]}}, "weights.group_size: expected a whole number, got [32]."),
    ({"weights": {"num_bits": 1}}, "weights: there is no integer format of 1 bits. Use 2 to 8."),
    ({"weights": {"num_bits": 40}}, "weights: there is no integer format of 40 bits. Use 2 to 8."),
    (
        {"weights": {"num_bits": 5, "type": "float"}},
        "weights: there is no float format of 5 bits. Use 4, 6 or 8 bits, or type int.",
    ),
    (
        {"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}},
        "weights: no checkpoint holds float weights of 4 bits by channel. Use strategy group with group_size 32 or "
        "strategy tensor_group with group_size 16.",
    ),
    (
        {"weights": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 64}},
        "weights: no checkpoint holds float weights of 6 bits by group with group_size 64. Use strategy group with "
        "group_size 32.",
    ),
    (
        {"config_groups": {"g": {"targets": ["a"], "weights": {"num_bits": 4, "type": "float", "symmetric": False}}}},
        "config_groups.g.weights: floats of 4 bits have no zero points. Set symmetric to true.",
    ),
    (
        {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor_group", "group_size": 16}},
        "weights: no checkpoint holds float weights of 8 bits under a global scale. Use strategy group.",
    ),
    (
        {"weights": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}},
        "weights: no checkpoint holds integer weights of 4 bits under a global scale. Use strategy group.",
    ),
    (
        {"weights": {**INT4, "scale_dtype": "torch.float8_e4m3fn"}},
        "weights: scales of such weights are stored in the dtype of the model, not in float8_e4m3fn. Leave scale_dtype "
        "out.",
    ),
    (
        {"weights": {**E2M1, "strategy": "group", "group_size": 32, "scale_dtype": "torch.float16"}},
        "weights: scales of such weights are stored in uint8, not in float16. Leave scale_dtype out.",
    ),
    (
        {"weights": {**E2M1, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.uint8"}},
        "weights: scales of such weights are stored in float8_e4m3fn, not in uint8. Leave scale_dtype out.",
    ),
    (
        {"weights": {**INT4, "symmetric": False, "zp_dtype": "torch.int32"}},
        "weights: zero points of such weights are stored in int8, not in int32. Leave zp_dtype out.",
    ),
    ({"weights": {"type": "integer"}}, "weights: there is no type 'integer'. Did you mean 'int'? Choices: int, float."),
    ({"weights": {"type": 5}}, "weights: there is no type 5. Choices: int, float."),
    (
        {"weights": {"strategy": "chanel"}},
        "weights: there is no strategy 'chanel'. Did you mean 'channel'? Choices: tensor, channel, group, "
        "tensor_group, block, "
        "token, attn_head.",
    ),
    (
        {"weights": {"dynamic": "locl"}},
        "weights: there is no dynamic 'locl'. Did you mean 'local'? Choices: true, false, local.",
    ),
    ({"weights": {"dynamic": 3}}, "weights: there is no dynamic 3. Choices: true, false, local."),
    (
        {"weights": {"symmetric": "maybe"}},
        "weights.symmetric: Input should be a valid boolean, unable to interpret input, got 'maybe'.",
    ),
    ({"weights": {"observer": 5}}, "weights.observer: Input should be a valid string, got 5."),
    ({"weights": {"observer_kwargs": [1]}}, "weights.observer_kwargs: Input should be a valid dictionary, got [1]."),
    ({"weights": {"strategy": "group"}}, "weights: strategy group requires group_size to be set to a positive value."),
    ({"weights": {"strategy": "block"}}, "weights: Block strategy requires block structure."),
    (
        {"weights": {"block_structure": 3}},
        "weights.block_structure: Invalid block_structure '3'. Must be a list of positive ints [rows, cols], got 3.",
    ),
    (
        {"weights": {"strategy": "attn_head"}},
        "weights: strategy 'attn_head' does not fit 'weight'. Strategies for 'weight': "
        "tensor, channel, group, tensor_group, block.",
    ),
    (
        {"weights": INT4, "input_activations": {"strategy": "channel"}},
        "input_activations: strategy 'channel' does not fit 'input'. Strategies for 'input': tensor, group, "
        "tensor_group, token.",
    ),
    (
        {"kv_cache_scheme": {"strategy": "group", "group_size": 32}},
        "kv_cache_scheme: strategy 'group' does not fit 'k'. Strategies for 'k': tensor, attn_head.",
    ),
    ({"weights": {"dynamic": True}}, "weights: the scales of weights are static. Set dynamic to false."),
    (
        {"kv_cache_scheme": {**KV, "dynamic": True}},
        "kv_cache_scheme: the scales of attention states are static. Set dynamic to false.",
    ),
    (
        {"weights": {**INT4, "actorder": "weight"}},
        "weights: QuantizationModifier does not order columns. Leave actorder out.",
    ),
    ({"input_activations": {"actorder": "weight"}}, "input_activations: actorder is for weights. Leave it out."),
    (
        {"input_activations": {"strategy": "channel", "dynamic": True}},
        "input_activations: One of (token, tensor, tensor_group, group) must be used for dynamic quant.",
    ),
    (
        {"weights": {**INT4, "actorder": "wieght"}},
        "weights: there is no actorder 'wieght'. Did you mean 'weight'? Choices: weight, static.",
    ),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named(given, words):
    from compressed_tensors.config import CompressionFormat

    formats = ", ".join(each.value for each in CompressionFormat if each.value != "mixed-precision")
    assert message(**given) == words.replace("{formats}", formats)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"scheme": {"W4A16": ["a"], "FP88": ["b"]}}, ("scheme", "FP88")),
        ({"config_groups": {"FP88": ["b"]}}, ("config_groups", "FP88")),
        ({"config_groups": {"a": {"weights": {"num_bits": 40}}}}, ("config_groups", "a", "weights", "num_bits")),
        ({"config_groups": {"a": {"weights": {"type": "x"}}}}, ("config_groups", "a", "weights", "type")),
        ({"config_groups": {"a": {"weights": {"symmetric": "x"}}}}, ("config_groups", "a", "weights", "symmetric")),
        ({"scheme": "W4A16", "ignore": ["a", "re:("]}, ("ignore", 1)),
        ({"scheme": "W8A8", "activation_observer": {"name": "x"}}, ("activation_observer", "name")),
        ({"scheme": "W8A8", "activation_observer": "x"}, ("activation_observer",)),
        ({"kv_cache_scheme": {**KV, "observer": "x"}}, ("kv_cache_scheme", "observer")),
        ({"weights": {"dynamic": True}}, ("weights", "dynamic")),
        ({"weights": {**INT4, "actorder": "weight"}}, ("weights", "actorder")),
        ({"weights": {**INT4, "scale_dtype": "torch.uint8"}}, ("weights", "scale_dtype")),
        ({"weights": {**INT4, "symmetric": False, "zp_dtype": "torch.int32"}}, ("weights", "zp_dtype")),
        ({"input_activations": {"dynamic": True, "observer": "mse"}}, ("input_activations", "observer")),
        ({"scheme": "W4A16", "weights": {}}, ("weights",)),
    ],
)
def test_a_mistake_knows_its_entry(given, key):
    with pytest.raises(RecipeError) as caught:
        QuantizationModifier(**given)
    assert caught.value.key == key


def test_nothing_given_is_changed():
    args = QuantizationArgs(**INT4)
    given = {"weights": args, "weight_observer": {"name": "mse", "norm": 2.0}, "ignore": ["a"]}
    modifier = QuantizationModifier(**given)
    modifier.ignore.append("b")
    assert args.observer is None
    assert given["ignore"] == ["a"]
    assert modifier.given["ignore"] == ["a"]
