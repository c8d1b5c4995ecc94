"""Which modules a recipe means, what loaders make of it, and the blocks that models are made of."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from zoo import ANIMALS, zoo

from scalewright.calibration.targets import (
    QUANTIZABLE,
    Pattern,
    Target,
    Targets,
    check_layers,
    join_targets,
    largest_blocks,
    loader_targets,
    output_heads,
    resolve_targets,
    routers,
)
from scalewright.errors import LayoutError, ModelError, RecipeError
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.base import OUTPUT_HEAD, ROUTERS
from scalewright.modifiers.schemes import scheme_named

KV = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8}


class Special(nn.Linear):
    """A linear layer by another name."""


class Marked:
    """No module, but a base of one."""


class Tagged(nn.Linear, Marked):
    """A linear layer with a second base."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Special(8, 8))
        self.norm = nn.LayerNorm(8)


class Toy(nn.Module):
    """Twelve blocks, so that there is a layers.1 and a layers.10."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.tagged = Tagged(8, 8)
        self.head = nn.Linear(8, 8)


TOY = Toy()
LLAMA = zoo("llama").model
LAYERS = [name for name, module in LLAMA.named_modules() if isinstance(module, QUANTIZABLE)]


def resolved(model: nn.Module = LLAMA, **given) -> Targets:
    return resolve_targets(model, QuantizationModifier(**given))


def names(targets: Targets) -> list[str]:
    return [layer.name for layer in targets.layers]


def meant(pattern: str, model: nn.Module = TOY) -> list[str]:
    return names(resolved(model, scheme="W8A16", targets=[pattern]))


# ---- patterns --------------------------------------------------------------------------------------------------------


def linears_of(*numbers: int) -> list[str]:
    return [f"layers.{number}.mlp.{place}" for number in numbers for place in (0, 2)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("Special", [f"layers.{i}.mlp.2" for i in range(12)]),
        ("Linear", [*linears_of(*range(12)), "tagged", "head"]),
        ("Tagged", ["tagged"]),
        ("Embedding", ["embed"]),
        ("head", ["head"]),
        ("layers.1.mlp.0", ["layers.1.mlp.0"]),
        ("layers.1.*", linears_of(1)),
        ("layers.1*", linears_of(1, 10, 11)),
        ("layers.1?.*", linears_of(10, 11)),
        ("layers.[13].*", linears_of(1, 3)),
        ("layers.[!0-8].*", linears_of(9)),
        ("mlp.0*", [f"layers.{i}.mlp.0" for i in range(12)]),
        ("*.mlp.0", [f"layers.{i}.mlp.0" for i in range(12)]),
        ("10.*", linears_of(10)),
        ("*", ["embed", *linears_of(*range(12)), "tagged", "head"]),
        ("re:layers.1.mlp", linears_of(1)),
        ("re:.*1.mlp", linears_of(1, 11)),
        ("re:.*head$", ["head"]),
        ("re:mlp", []),
        ("layers.1", []),
        ("linear", []),
        ("Module", []),
        ("Marked", []),
        ("mlp.0", []),
        ("ayers.1.*", []),
        ("layers.1.", []),
        ("LAYERS.1.*", []),
    ],
)
def test_a_pattern_means_these_layers(pattern, expected):
    assert meant(pattern) == expected
    everything = resolved(TOY, scheme="W8A16", targets=["*"], ignore=[pattern])
    assert everything.ignored == expected
    assert set(names(everything)) == set(meant("*")) - set(expected)


_NAMES = [name for name, _ in TOY.named_modules() if name]


@given(st.sampled_from(_NAMES), st.text("layersmp.0123[]!*?^\\-", max_size=6))
def test_a_wildcard_is_matched_after_any_dot_and_to_the_end(name, extra):
    module = TOY.get_submodule(name)
    ends = [".".join(name.split(".")[i:]) for i in range(name.count(".") + 1)]
    for end in ends:
        assert Pattern.of(f"{end}*").means(name, module)
        assert Pattern.of(f"*{end}").means(f"x{name}", module)
        assert Pattern.of(f"{end[:-1]}?").means(name, module)
        assert not Pattern.of(f"{end}?").means(name, module)
        assert not Pattern.of(f"?{name}").means(name, module)
    with suppress(RecipeError):  # and nothing else, whatever is written
        Pattern.of(f"{extra}*").means(name, module)


@pytest.mark.parametrize("text", ["Linear", "head", "layers.1.*", "*[!a]?", "re:.*mlp.*"])
def test_loaders_match_as_we_do(text):
    from compressed_tensors.utils import match_targets

    pattern = Pattern.of(text)
    for name, module in TOY.named_modules():
        assert bool(match_targets(name, module, [pattern.for_loaders])) == pattern.means(name, module)


def test_a_bad_pattern_is_an_error():
    with pytest.raises(RecipeError, match=r"^'re:\(' is not a regular expression: missing \), unterminated"):
        Pattern.of("re:(")


# ---- notes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({}, []),
        ({"ignore": ["lm_head", "re:.*mlp.*"]}, []),
        ({"ignore": ["nothing"]}, ["ignore: 'nothing' matches no module."]),
        ({"targets": ["Linear", "linear"]}, ["targets: 'linear' matches no module. Did you mean 'Linear'?"]),
        (
            {"ignore": ["re:nothing", "layers.7.*"]},
            ["ignore: 're:nothing' matches no module.", "ignore: 'layers.7.*' matches no module."],
        ),
        ({"ignore": ["q_proj"]}, ["ignore: 'q_proj' matches no module. Write '*.q_proj' for names that end so."]),
        (
            {"ignore": ["model.layers.0"]},
            [
                "ignore: 'model.layers.0' matches no module that could be quantised, only such as hold "
                "others. For the layers "
                "inside of it write 'model.layers.0.*'."
            ],
        ),
        (
            {"targets": ["Linear", "LlamaMLP"]},
            ["targets: 'LlamaMLP' matches no module that could be quantised, only such as hold others."],
        ),
        (
            {"targets": ["Linear", "re:.*norm"]},
            ["targets: 're:.*norm' matches no module that could be quantised, only such as hold others."],
        ),
        (
            {"targets": ["lm_head"], "ignore": ["lm_head"]},
            ["targets lm_head: all that they mean is ignored, or belongs to other groups."],
        ),
    ],
)
def test_what_changes_nothing_is_a_note(given, notes):
    assert resolved(scheme="W8A16", **given).notes == notes


def test_a_group_that_gets_nothing_is_a_note():
    found = resolved(scheme={"W8A16": ["Linear"], "W4A16": ["Linear"], "FP8": ["re:.*"]}, ignore=["Embedding"])
    assert {layer.group for layer in found.layers} == {"group_2"}
    assert found.notes == ["targets Linear: all that they mean is ignored, or belongs to other groups."] * 2


class Positions(nn.Embedding):
    def forward(self, mask, offset=0):
        return super().forward(mask.cumsum(dim=1) + offset)


def test_embeddings_that_loaders_could_not_call_are_named():
    """compressed-tensors replaces `forward` by one of a single input."""
    model = nn.ModuleDict({"words": nn.Embedding(8, 64), "places": Positions(8, 64), "head": nn.Linear(64, 8)})
    found = resolved(model, scheme="W8A16", targets=["Embedding", "Linear"])
    assert names(found) == ["words", "head"]
    assert found.notes == [
        "places: compressed-tensors gives quantised layers one input, and Positions takes more, so it stays as it is."
    ]
    assert resolved(model, scheme="W8A16", targets=["Embedding"], ignore=["places"]).notes == []


def test_matrices_that_have_no_format_are_named():
    found = resolved(zoo("gpt2").model, scheme="W8A16")
    assert names(found) == ["lm_head"]
    assert found.notes == [
        "transformer.h.0.attn.c_attn and 7 more: compressed-tensors has no format for Conv1D, so it stays as it is."
    ]
    assert resolved(zoo("gpt2").model, scheme="W8A16", ignore=["Conv1D"]).notes == []


# ---- groups ----------------------------------------------------------------------------------------------------------


def group_of(name: str, scheme: dict[str, list[str]], **given) -> str | None:
    found = resolved(scheme=scheme, **given)
    return next((layer.group for layer in found.layers if layer.name == name), None)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("scheme", "group"),
    [
        ({"W8A16": ["Linear"], "W4A16": ["re:.*q_proj"], "FP8": [Q]}, "group_2"),
        ({"W8A16": [Q], "W4A16": ["re:.*q_proj"], "FP8": ["Linear"]}, "group_0"),
        ({"W8A16": ["Linear"], "W4A16": ["*q_proj"]}, "group_1"),
        ({"W8A16": ["re:.*proj"], "W4A16": ["re:.*a.*"]}, "group_0"),
        ({"W8A16": ["re:.*z"], "W4A16": ["re:.*a.*"], "FP8": ["re:.*_proj"]}, "group_1"),
        ({"W8A16": ["Linear"], "W4A16": ["Linear"]}, "group_0"),
        ({"W8A16": ["Linear", Q], "W4A16": ["*q_proj"]}, "group_0"),
        ({"W8A16": ["lm_head"]}, None),
        ({"W8A16": ["Linear"], "UNQUANTIZED": ["*q_proj"]}, None),
    ],
)
def test_names_go_before_patterns_and_patterns_before_classes_then_the_first(scheme, group):
    assert group_of(Q, scheme) == group


def test_what_is_ignored_is_in_no_group():
    assert group_of(Q, {"W8A16": [Q]}, ignore=["Linear"]) is None


def test_layers_have_the_scheme_of_their_group():
    found = resolved(scheme={"W4A16": ["*mlp.*"], "FP8": ["Linear"]}, ignore=["lm_head"])
    assert found.ignored == ["lm_head"]
    assert [name for name, _ in found.spared] == ["lm_head"]
    for layer in found.layers:
        expected = scheme_named("W4A16", ["*mlp.*"]) if "mlp" in layer.name else scheme_named("FP8", ["Linear"])
        assert layer.scheme == expected
        assert layer.module is LLAMA.get_submodule(layer.name)


# ---- the output head -------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 1, "n_heads": 4}


def built(kind: str, auto: type = AutoModelForCausalLM, **more) -> nn.Module:
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(kind, **{**SIZES, **more}))


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (built("llama"), {"lm_head"}),
        (built("gpt_neox"), {"lm_head"}),
        (built("bert", is_decoder=True), {"cls.predictions.decoder"}),
        (built("roberta", is_decoder=True), {"lm_head.dense", "lm_head.decoder"}),
        (built("llama", AutoModelForSequenceClassification), {"score"}),
        (built("roberta", AutoModelForSequenceClassification), {"classifier.dense", "classifier.out_proj"}),
        (built("distilbert", AutoModelForSequenceClassification, **DISTILBERT), {"pre_classifier", "classifier"}),
        (
            built("t5", AutoModelForSequenceClassification),
            {"classification_head.dense", "classification_head.out_proj"},
        ),
        (built("bert", AutoModel), set()),
        (nn.ModuleDict({"layers": Block(), "embed_out": nn.Linear(8, 8)}), {"embed_out"}),
        (nn.ModuleDict({"layers": nn.ModuleDict({"output": nn.Linear(8, 8)}), "score": nn.ReLU()}), set()),
        (nn.ModuleDict({"model": nn.ModuleDict({"lm_head": nn.Linear(8, 8)})}), {"model.lm_head"}),
    ],
    ids=[
        "llama",
        "neox",
        "bert",
        "roberta",
        "score",
        "classifier",
        "two",
        "within",
        "none",
        "by name",
        "inside",
        "deep",
    ],
)
def test_the_output_head_is_what_the_model_calls_so_or_what_has_the_name_of_one(model, heads):
    assert output_heads(model) == heads
    spared = resolved(model, scheme="W8A16", ignore=[OUTPUT_HEAD])
    everything = resolved(model, scheme="W8A16")
    assert set(names(everything)) - set(names(spared)) == heads
    assert set(spared.ignored) == heads
    assert not any(OUTPUT_HEAD in note for note in spared.notes)


class Mixture(nn.Module):
    """Experts with a router beside them, one inside of another part, a gate of one row, and what is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared_gate, self.latent = nn.Linear(32, 4), nn.Linear(32, 1), nn.Linear(32, 32)
        self.choice = nn.ModuleDict({"gate": nn.Linear(32, 4)})
        self.experts = nn.ModuleList(nn.Linear(32, rows) for rows in (4, 1, 32, 32))


def test_routers_are_what_stands_beside_experts_with_an_output_for_each():
    model = nn.ModuleDict({"mlp": Mixture(), "head": nn.Linear(32, 4)})
    assert routers(model) == {"mlp.router", "mlp.shared_gate", "mlp.choice.gate"}
    spared = resolved(model, scheme="W8A16", ignore=[ROUTERS])
    assert set(spared.ignored) == routers(model) and "mlp.experts.1" in names(spared)
    plain = resolved(nn.ModuleDict({"gate": nn.Linear(32, 4)}), scheme="W8A16", ignore=[ROUTERS])
    assert names(plain) == ["gate"] and not plain.notes


@pytest.mark.parametrize("word", [OUTPUT_HEAD, ROUTERS])
def test_what_is_left_alone_by_a_word_is_no_target(word):
    with pytest.raises(RecipeError) as caught:
        QuantizationModifier(targets=["Linear", word], scheme="W8A16")
    assert str(caught.value) == f"targets: '{word}' is a word for ignore. Name the layers that are to be quantised."


# ---- loaders ---------------------------------------------------------------------------------------------------------


def by_loader(model: nn.Module, found: Targets) -> dict[str, str]:
    """The group that compressed-tensors gives to each layer, when it is told what a checkpoint tells."""
    with torch.device("meta"):
        copy = type(model)(model.config)
    lists = loader_targets(found)
    by_targets = {}
    for layer in found.layers:
        scheme = layer.scheme.model_copy(update={"targets": lists[layer.group]})
        module = copy.get_submodule(layer.name)
        module.quantization_scheme, module.quantization_status = scheme, QuantizationStatus.FROZEN
        by_targets[tuple(lists[layer.group])] = layer.group
    config = QuantizationConfig.from_pretrained(copy)
    with torch.device("meta"):
        fresh = type(model)(model.config)
    apply_quantization_config(fresh, config, show_progress=False)
    return {
        name: by_targets[tuple(module.quantization_scheme.targets)]
        for name, module in fresh.named_modules()
        if hasattr(module, "quantization_scheme")
    }


MIXED = [
    {"scheme": {"W8A16": ["Linear"]}, "ignore": ["lm_head"]},
    {"scheme": {"W8A16": ["layers.1.*"]}},
    {"scheme": {"W8A16": ["*q_proj", "layers.[!0].*"], "FP8_DYNAMIC": ["re:.*mlp.*"]}, "ignore": ["*down_proj"]},
    {"scheme": {"W8A16": ["re:.*q_proj"], "FP8_DYNAMIC": ["re:.*_proj"]}},
    {"scheme": {"W8A16": ["re:.*z_proj", "re:.*q_proj"], "FP8_DYNAMIC": ["re:.*_proj"]}},
    {"scheme": {"W8A16": ["Linear"], "FP8_DYNAMIC": ["Linear"]}},
    {"scheme": {"W8A16": ["re:.*q_proj", "Linear"], "FP8_DYNAMIC": ["Linear", "re:.*q.*"]}},
    {"scheme": {"W8A16": ["re:.*"]}, "ignore": ["Embedding"]},
    {"scheme": {"W8A16": ["re:.*"]}, "ignore": ["Linear"]},
    {"scheme": {"W8A16": ["Linear", "Embedding"], "UNQUANTIZED": ["re:.*k_proj"]}},
]


@pytest.mark.parametrize("given", MIXED, ids=lambda given: str(given)[:60])
def test_a_loader_gives_each_layer_the_same_scheme(given):
    found = resolved(**given)
    assert by_loader(LLAMA, found) == {layer.name: layer.group for layer in found.layers}


_PATTERNS = [
    "Linear",
    "Embedding",
    "re:.*",
    "re:.*_proj",
    "re:.*layers.1.*",
    "*q_proj",
    "layers.0.*",
    Q,
    "lm_head",
    "*mlp*",
]
_LISTS = st.lists(st.sampled_from(_PATTERNS), min_size=1, max_size=3, unique=True)


@settings(max_examples=30, deadline=None)
@given(_LISTS, _LISTS, st.none() | _LISTS)
def test_a_loader_gives_each_layer_the_same_scheme_whatever_overlaps(first, second, ignore):
    found = resolved(scheme={"W8A16": first, "W4A16": second}, ignore=ignore)
    if found.layers:
        assert by_loader(LLAMA, found) == {layer.name: layer.group for layer in found.layers}


def test_loaders_get_the_targets_of_the_recipe_where_they_would_choose_alike():
    found = resolved(scheme={"W8A16": ["Linear"], "W4A16": ["layers.1.*"]}, ignore=["lm_head"])
    assert loader_targets(found) == {"group_0": ["Linear"], "group_1": [r"re:(?:.*\.)?layers\.1\..*$"]}


def test_loaders_get_names_where_they_would_choose_otherwise():
    found = resolved(scheme={"W8A16": ["re:.*q_proj"], "W4A16": ["re:.*_proj"]})
    assert loader_targets(found)["group_0"] == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


def test_loaders_of_what_two_modifiers_mean_are_told_it_together():
    first = resolved(scheme="W8A16", targets=["re:.*mlp.*"], ignore=["*down_proj"])
    second = resolved(scheme="FP8_DYNAMIC", targets=["Linear"], ignore=["*gate_proj", "*up_proj", "lm_head"])
    found = join_targets([first, second])
    assert len(found.layers) == len(first.layers) + len(second.layers)
    assert found.ignored == ["lm_head"]
    assert by_loader(LLAMA, found) == {layer.name: layer.group for layer in found.layers}


def test_two_modifiers_cannot_mean_one_layer():
    first, second = resolved(scheme="W8A16", targets=[Q]), resolved(scheme="FP8")
    with pytest.raises(RecipeError) as caught:
        join_targets([first, second])
    assert str(caught.value) == f"{Q}: two modifiers of one stage mean it. Use ignore, or narrower targets."


# ---- attention -------------------------------------------------------------------------------------------------------

ATTENTION = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def attention_group(targets: list[str], **args) -> dict[str, object]:
    return {"targets": targets, "input_activations": {**KV, **args}}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe"])
def test_a_kv_cache_is_that_of_all_attention_modules(kind):
    found = resolved(zoo(kind).model, kv_cache_scheme=KV)
    assert [(name, args.num_bits, queries) for name, _, args, queries in found.attention] == [
        (name, 8, False) for name in ATTENTION
    ]
    assert (found.layers, found.notes) == ([], [])


@pytest.mark.parametrize("kind", ["gpt2", "t5", "odd"])
def test_a_model_without_a_kv_cache_that_can_be_quantised_is_named(kind):
    notes = resolved(zoo(kind).model, kv_cache_scheme=KV).notes
    assert "kv_cache_scheme: no attention module with a kv cache was found in this model." in notes


def test_a_kv_cache_cannot_be_ignored_in_part():
    found = resolved(scheme="W8A16", kv_cache_scheme=KV, ignore=["layers.0.*"])
    assert [name for name, *_ in found.attention] == ATTENTION
    assert found.notes == [
        "model.layers.0.self_attn: ignored, but a checkpoint has one kv_cache_scheme for all, so keys and values are "
        "quantised here, too."
    ]


@pytest.mark.parametrize("target", ["LlamaAttention", "re:.*self_attn$", "*.self_attn", "*self_att?"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("linear", [["Linear"], ["re:.*self_attn.*"]])
def test_queries_keys_and_values_are_quantised_where_attention_itself_is_a_target(target, strategy, linear):
    groups = {"qkv": attention_group([target], strategy=strategy), "rest": {"targets": linear, "weights": INT8}}
    found = resolved(config_groups=groups)
    assert [(name, args.strategy, queries) for name, _, args, queries in found.attention] == [
        (name, strategy, True) for name in ATTENTION
    ]
    assert names(found) == [
        name for name in LAYERS if "self_attn" in name or (linear == ["Linear"] and "embed" not in name)
    ]
    assert found.notes == []
    assert (loader_targets(found)["rest"] == linear) == (linear == ["Linear"])
    lists = {**loader_targets(found), "attention": ["LlamaAttention"]}
    schemes = {layer.group: layer.scheme for layer in found.layers} | {"attention": found_attention_scheme(found)}
    config = QuantizationConfig(
        config_groups={name: schemes[name].model_copy(update={"targets": listed}) for name, listed in lists.items()}
    )
    model = zoo("llama").model
    apply_quantization_config(model, config, show_progress=False)
    given = {name for name, module in model.named_modules() if getattr(module, "quantization_scheme", None)}
    assert given == {*names(found), *ATTENTION}


def found_attention_scheme(found: Targets):
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(targets=["LlamaAttention"], input_activations=found.attention[0][2])


def test_a_pattern_for_what_is_in_attention_does_not_mean_attention():
    found = resolved(config_groups={"a": attention_group(["re:.*self_attn.*"])})
    assert found.attention == []
    assert names(found) == [name for name in LAYERS if "self_attn" in name]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (
            {"scheme": "W8A16", "targets": ["LlamaAttention"]},
            RecipeError,
            "model.layers.0.self_attn: an attention module has queries, keys and values, and no weights. Give "
            "it a group of "
            "input_activations alone.",
        ),
        (
            {"config_groups": {"a": {"targets": ["LlamaAttention"], "output_activations": INT8}}},
            RecipeError,
            "model.layers.0.self_attn: an attention module has queries, keys and values, and no weights. Give "
            "it a group of "
            "input_activations alone.",
        ),
        (
            {"config_groups": {"a": attention_group(["LlamaAttention"], symmetric=False)}},
            RecipeError,
            "model.layers.0.self_attn: transformers makes the scales of queries that have zero points float16, and "
            "then stops at others. Set symmetric to true.",
        ),
        (
            {"config_groups": {"a": attention_group(["LlamaAttention"], dynamic=True)}},
            RecipeError,
            "model.layers.0.self_attn: the scales of attention states are static. Set dynamic to false.",
        ),
        (
            {"config_groups": {"a": attention_group(["LlamaAttention"], group_size=8)}},
            RecipeError,
            "model.layers.0.self_attn: strategy 'group' does not fit 'q'. Strategies for 'q': tensor, attn_head.",
        ),
        (
            {"config_groups": {"a": attention_group(["model.layers.0.self_attn"])}},
            ModelError,
            "model.layers.1.self_attn: loaders expect scales of keys and values in all attention modules or "
            "in none, and this "
            "one would have none. Widen the targets, or ignore less.",
        ),
        (
            {"config_groups": {"a": attention_group(["LlamaAttention"])}, "ignore": ["layers.0.*"]},
            ModelError,
            "model.layers.0.self_attn: loaders expect scales of keys and values in all attention modules or "
            "in none, and this "
            "one would have none. Widen the targets, or ignore less.",
        ),
        (
            {
                "config_groups": {"a": attention_group(["model.layers.0.self_attn"], num_bits=4)},
                "kv_cache_scheme": INT8,
            },
            ModelError,
            "model.layers.1.self_attn: its keys and values have another format than those of "
            "model.layers.0.self_attn, and a checkpoint has one for all. Use one format.",
        ),
    ],
)
def test_attention_that_cannot_be_quantised_so_is_an_error(given, kind, words):
    with pytest.raises(kind) as caught:
        resolved(**given)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("kind", "targets", "left"),
    [
        ("llama", ["model.layers.0.self_attn"], "model.layers.1.self_attn"),
        ("llava", ["LlamaAttention"], "model.vision_tower.encoder.layers.0.self_attn"),
    ],
    ids=["some have a kv cache alone", "some have no kv cache"],
)
def test_queries_are_quantised_in_all_attention_modules_or_in_none(kind, targets, left):
    modifier = QuantizationModifier(config_groups={"a": attention_group(targets)}, kv_cache_scheme=KV)
    model = zoo(kind).model
    with pytest.raises(ModelError) as caught:
        resolve_targets(model, modifier)
    first = next(name for name, module in model.named_modules() if is_cached_attention_module(module))
    assert str(caught.value) == (
        f"{left}: its queries would stay as they are and those of {first} would not, and a model that quantises "
        "queries in one attention module must do so in all. Widen the targets, ignore less, or quantise keys and "
        "values alone with kv_cache_scheme."
    )


def test_two_modifiers_of_one_stage_do_not_mean_the_same_attention():
    several = [resolved(kv_cache_scheme=KV), resolved(config_groups={"a": attention_group(["LlamaAttention"])})]
    with pytest.raises(RecipeError) as caught:
        join_targets(several)
    assert str(caught.value) == f"{ATTENTION[0]}: two modifiers of one stage mean it. Use ignore, or narrower targets."


def test_what_is_attention_is_what_loaders_take_for_it():
    assert [name for name, module in LLAMA.named_modules() if is_cached_attention_module(module)] == ATTENTION


# ---- do the layers fit? ----------------------------------------------------------------------------------------------


def check(module: nn.Module, **given) -> None:
    check_layers(
        [Target("a.layer", module, group.name, group.scheme) for group in QuantizationModifier(**given).groups]
    )


@pytest.mark.parametrize(
    ("module", "given", "kind", "words"),
    [
        (
            nn.Linear(288, 96),
            {"scheme": "W4A16"},
            LayoutError,
            "a.layer.weight: 288 columns do not divide into groups of 128 (remainder 32). Use group_size 32, "
            "or ignore this "
            "layer.",
        ),
        (
            nn.Linear(40, 96),
            {"scheme": "NVFP4"},
            LayoutError,
            "a.layer.weight: 40 columns do not divide into groups of 16 (remainder 8). Use another scheme "
            "for this layer, or ignore it.",
        ),
        (
            nn.Linear(192, 96),
            {"scheme": "FP8_BLOCK"},
            LayoutError,
            "a.layer.weight: 192 columns do not divide into blocks of 128 (remainder 64). Use another "
            "scheme for this layer, or ignore it.",
        ),
        (
            nn.Linear(96, 40),
            {"output_activations": {"num_bits": 8, "group_size": 32, "dynamic": True}},
            LayoutError,
            "a.layer.output: 40 columns do not divide into groups of 32 (remainder 8). Use another scheme "
            "for this layer, or ignore it.",
        ),
        (
            nn.Linear(96, 40),
            {"input_activations": {"num_bits": 8, "strategy": "attn_head"}},
            LayoutError,
            "a.layer.input: strategy 'attn_head' does not fit 'input'. Strategies for 'input': tensor, group, "
            "tensor_group, "
            "token.",
        ),
        (
            nn.Linear(96, 40),
            {"input_activations": {"num_bits": 8, "strategy": "group", "group_size": 32}},
            RecipeError,
            "a.layer.input: no loader applies static scales of groups to activations. Set dynamic to true, or to local "
            "under a global scale (strategy tensor_group), or use strategy tensor.",
        ),
        (
            nn.Linear(40, 96),
            {"output_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}},
            RecipeError,
            "a.layer.output: no loader applies static scales of groups to activations. Set dynamic to true, or to "
            "local under a global scale (strategy tensor_group), or use strategy tensor.",
        ),
        (
            nn.Embedding(8, 128),
            {"scheme": "W8A8"},
            ModelError,
            "a.layer: what goes into an embedding are token ids, which have no scale. Give it a scheme of "
            "weights alone, such "
            "as W8A16, or ignore it.",
        ),
    ],
)
def test_a_layer_that_its_scheme_does_not_fit_is_named(module, given, kind, words):
    with pytest.raises(kind) as caught:
        check(module, **given)
    assert str(caught.value) == words


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_BLOCK", "NVFP4", "MXFP4"])
def test_layers_that_fit_pass(scheme):
    check(nn.Linear(256, 40), scheme=scheme)
    check(nn.Embedding(40, 256), scheme="W4A16")


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ANIMALS)
def test_the_blocks_of_a_model_are_found(kind):
    animal = zoo(kind)
    everything = [name for name, _ in animal.model.named_modules()]
    assert largest_blocks(animal.model, everything) == animal.blocks


def test_blocks_without_a_layer_that_is_meant_do_not_count():
    llava = zoo("llava")
    text = [name for name, _ in llava.model.named_modules() if "language_model" in name]
    assert largest_blocks(llava.model, text) == [name for name in llava.blocks if "language_model" in name]
    assert largest_blocks(llava.model, ["lm_head"]) == []


class Pair(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2) if inner is None else inner


class Other(Pair):
    """A block of another kind."""


def tree(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


SHARED = Pair()
HAND_WRITTEN = {
    "a list": (tree(a=nn.ModuleList([Pair(), Pair()])), ["a.0", "a.1"]),
    "a chain": (tree(a=nn.Sequential(Pair(), Pair())), ["a.0", "a.1"]),
    "the model is a chain": (nn.Sequential(Pair(), Pair()), ["0", "1"]),
    "the model is a chain with lists in it": (
        nn.Sequential(*(Pair(nn.ModuleList([Pair(), Pair()])) for _ in range(2))),
        ["0", "1"],
    ),
    "lists in lists": (
        tree(a=nn.ModuleList([Pair(nn.ModuleList([Pair(), Pair()])), Pair(nn.ModuleList([Pair(), Pair()]))])),
        ["a.0", "a.1"],
    ),
    "two lists whose names begin alike": (
        tree(a=nn.ModuleList([Pair(), Pair()]), ab=nn.ModuleList([Pair(), Pair()])),
        ["a.0", "a.1", "ab.0", "ab.1"],
    ),
    "blocks of two kinds": (tree(a=nn.ModuleList([Pair(), Other(), Pair()])), ["a.0", "a.1", "a.2"]),
    "parts that are all different hold the blocks": (
        tree(parts=nn.ModuleList([Pair(), Other(nn.ModuleList([Pair(), Pair()]))])),
        ["parts.1.inner.0", "parts.1.inner.1"],
    ),
    "one block": (tree(a=nn.ModuleList([Pair()])), ["a.0"]),
    "one block beside many": (tree(a=nn.ModuleList([Pair()]), b=nn.ModuleList([Pair(), Pair()])), ["b.0", "b.1"]),
    "a block that is used twice": (tree(a=nn.ModuleList([SHARED, Pair(), SHARED])), ["a.0", "a.1"]),
    "a block that is in two lists": (
        tree(a=nn.ModuleList([SHARED, Pair()]), b=nn.ModuleList([SHARED, Pair()])),
        ["a.0", "a.1", "b.1"],
    ),
    "single operations are no blocks": (tree(a=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), []),
    "nothing": (tree(a=nn.Linear(2, 2), b=nn.ModuleList()), []),
}


@pytest.mark.parametrize("kind", HAND_WRITTEN)
def test_the_blocks_of_modules_written_by_hand_are_found(kind):
    model, expected = HAND_WRITTEN[kind]
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert largest_blocks(model, layers) == expected


def test_a_layer_of_a_namesake_does_not_make_a_list_count():
    model = tree(a=nn.ModuleList([Pair(), Pair()]), ab=nn.ModuleList([Pair(), Pair()]))
    assert largest_blocks(model, ["ab.0.inner"]) == ["ab.0", "ab.1"]
