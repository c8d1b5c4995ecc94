"""A scheme for each layer within a budget of bits: the best choice, kept to the bit, and a recipe that says it."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from command_line import error_of, run
from scalewright import GPTQModifier, QuantizationModifier, Recipe, SmoothQuantModifier, oneshot
from scalewright.budget import share_out, solve
from scalewright.errors import RecipeError
from scalewright.modifiers.base import LEFT_ALONE
from scalewright.sensitivity import LayerGroup, Sensitivity, measure_sensitivity
from scalewright.sensitivity.sizes import check_bits

IDS = torch.randint(0, 96, (6, 24), generator=torch.Generator().manual_seed(1))
SCHEMES = ("W3A16", "W4A16", "W8A16")


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random model on disk."""
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Token ids, for which no tokenizer is needed."""
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": each}) for each in IDS.tolist()))
    return path


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    """What the layers of the small model lose."""
    return measure_sensitivity(llama(), IDS, schemes=SCHEMES, group_size=32)


def named(layers: list[str], losses: list[float], bits: list[int]) -> LayerGroup:
    schemes = [f"S{i}" for i in range(len(losses))]
    sizes = dict(zip(schemes, bits, strict=True))
    return LayerGroup("+".join(layers), tuple(layers), 100, dict(zip(schemes, losses, strict=True)), sizes)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_that_of_trying_all(seed):
    draw = random.Random(seed)
    num_schemes = draw.choice([2, 3, 4])
    groups = []
    for i in range(draw.randint(1, 6)):
        unit = draw.choice([1, 7, 64, 4096])
        sizes = [unit * draw.randint(1, 40) for _ in range(num_schemes)]
        losses = [draw.choice([0.0, draw.random() ** 6, 1e-7 * draw.random()]) for _ in range(num_schemes)]
        groups.append(named([f"layer{i}"], losses, sizes))
    least = sum(min(group.stored_bits.values()) for group in groups)
    most = sum(max(group.stored_bits.values()) for group in groups)
    for budget in {least, most, draw.randint(least, most), draw.randint(least, most)}:
        chosen = solve(tuple(groups), budget)
        assert sum(group.stored_bits[chosen[group.name]] for group in groups) <= budget
        tried = [
            sum(group.losses[scheme] for group, scheme in zip(groups, pick, strict=True))
            for pick in itertools.product(*(group.losses for group in groups))
            if sum(group.stored_bits[scheme] for group, scheme in zip(groups, pick, strict=True)) <= budget
        ]
        lost = sum(group.losses[chosen[group.name]] for group in groups)
        assert lost == pytest.approx(
            min(tried), rel=1e-9, abs=1e-9 * max(map(max, (g.losses.values() for g in groups)))
        )


def test_more_bits_never_seem_worse_and_no_choice_seems_worse_than_one_scheme_for_all(found):
    least, most = found.bits_of("W3A16"), found.bits_of("W8A16")
    budgets = [least + (most - least) * i / 16 for i in range(17)]
    allocations = [share_out(found, bits) for bits in budgets]
    for bits, each in zip(budgets, allocations, strict=True):
        assert each.bits <= bits + 1e-9
        assert each.bits == found.bits_per_weight(each.schemes)
    lost = [each.loss for each in allocations]
    assert lost == sorted(lost, reverse=True) and lost[0] > 10 * lost[-1]
    assert set(allocations[0].schemes.values()) == {"W3A16"} and set(allocations[-1].schemes.values()) == {"W8A16"}
    for scheme in SCHEMES:
        uniform = dict.fromkeys((group.name for group in found.groups), scheme)
        assert share_out(found, found.bits_of(scheme)).loss <= found.loss(uniform) * (1 + 1e-9)


def test_bits_go_where_they_gain_most():
    groups = [named(["calm"], [0.2, 0.1], [400, 800]), named(["wild"], [0.9, 0.1], [400, 800])]
    assert solve(tuple(groups), 1200) == {"calm": "S0", "wild": "S1"}
    assert solve(tuple(groups), 1199) == {"calm": "S0", "wild": "S0"}
    assert solve(tuple(groups), 1600) == {"calm": "S1", "wild": "S1"}


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_the_recipe_names_each_layer_once_and_partners_together(found):
    allocation = share_out(found, 5.5)
    assert len(set(allocation.schemes.values())) > 1
    (modifier,) = allocation.recipe.modifiers
    assert type(modifier) is QuantizationModifier and modifier.ignore == [*LEFT_ALONE]
    schemes = {name: scheme for scheme, names in modifier.given["scheme"].items() for name in names}
    assert len(schemes) == sum(map(len, modifier.given["scheme"].values())) == 14
    for block in ("model.layers.0", "model.layers.1"):
        for partners in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({schemes[f"{block}.{each}"] for each in partners}) == 1
    assert all(group.scheme.weights.group_size == 32 for group in modifier.groups)
    assert Recipe.of(allocation.recipe.to_yaml()).to_dict() == allocation.recipe.to_dict()


@pytest.mark.parametrize(
    ("quality", "kind", "count"),
    [("fast", QuantizationModifier, 1), ("balanced", QuantizationModifier, 1), ("best", GPTQModifier, 2)],
)
def test_each_scheme_is_rounded_as_its_quality_says(quality, kind, count):
    found = measure_sensitivity(llama(), IDS, schemes=("W4A16", "W8A16"), group_size=32, quality=quality)
    recipe = share_out(found, 6.0).recipe
    assert [type(each) for each in recipe.modifiers] == [kind] * count  # 8 bits need no refinement in best
    result = oneshot(llama(), recipe=recipe, dataset=IDS)
    assert sorted({str(row["weights"]) for row in result.to_dict()["layers"]}) == [
        "int4, groups of 32",
        "int8, groups of 32",
    ]


@pytest.mark.parametrize("quality", ["fast", "balanced", "best"])
def test_layers_with_integer_inputs_are_smoothed_as_their_quality_says(quality):
    found = measure_sensitivity(llama(), IDS, schemes=("W4A16", "W8A8"), group_size=32, quality=quality)
    recipe = share_out(found, 6.0).recipe
    quantising = [each for each in recipe.modifiers if type(each) is not SmoothQuantModifier]
    named = [name for each in quantising for name in each.given["scheme"].get("W8A8", [])]
    smoothing = [each for each in recipe.modifiers if type(each) is SmoothQuantModifier]
    assert named and [each.targets for each in smoothing] == ([] if quality == "fast" else [named])
    result = oneshot(llama(), recipe=recipe, dataset=IDS)
    assert len(result.layers) == 14 and result.smoothing.inputs.keys() <= set(named)
    assert bool(result.smoothing.inputs) or not smoothing or any("smoothed" in note for note in result.notes)


def bits_in(folder: Path, original: torch.nn.Module) -> float:
    """Bits for each weight of the layers that are quantised, from the files alone."""
    stored = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    layers = [name for name, each in original.named_modules() if f"{name}.weight_scale" in stored]
    assert len(layers) == 14
    kinds = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
    num_bytes = sum(stored[f"{name}.{kind}"].nbytes for name in layers for kind in kinds if f"{name}.{kind}" in stored)
    return 8 * num_bytes / sum(original.get_submodule(name).weight.numel() for name in layers)


# ---- on the command line ---------------------------------------------------------------------------------------------


CHOOSING = ("--bits", 5.3, "--schemes", "W3A16, w4a16,W8A16", "--group-size", 32)


def test_a_budget_is_kept_in_the_files_and_the_recipe_beside_them_gives_the_same_bytes(model, data, tmp_path):
    words = ("quantize", model, "--data", data)
    output = run(*words, *CHOOSING, "--out", tmp_path / "out")
    bits = bits_in(tmp_path / "out", llama())
    assert 5.0 < bits <= 5.3
    assert f"{bits:.3f} bits for each weight" in output
    recipe = tmp_path / "out" / "recipe.yaml"
    assert len(yaml.safe_load(recipe.read_text())) == 1
    run(*words, "--recipe", recipe, "--out", tmp_path / "again")
    for name in ("model.safetensors", "config.json", "recipe.yaml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert run(*words, *CHOOSING, "--print-recipe") == recipe.read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    quantised = oneshot(llama(), recipe=recipe, dataset=IDS).model
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, quantised(IDS).logits, rtol=1e-4, atol=1e-4)


def test_two_digits_of_the_least_scheme_are_enough():
    bits = {"NVFP4": 4.5003, "FP8": 8.0002}
    assert check_bits(4.5, bits) == 4.5003
    assert check_bits(4.51, bits) == 4.51 and check_bits(8.0, bits) == 8.0
    for far in (4.49, 8.01):
        with pytest.raises(RecipeError):
            check_bits(far, bits)


def test_other_formats_share_a_checkpoint(model, data, tmp_path):
    words = ("quantize", model, "--data", data, "--dtype", "bfloat16", "--schemes", "NVFP4,FP8", "--json")
    least = json.loads(run(*words, "--bits", 4.51, "--out", tmp_path / "least"))
    assert {row["weights"] for row in least["layers"]} == {"fp4, groups of 16, under a global scale"}
    assert 4.5 < least["bits"] < 4.51  # each layer has a global scale
    mixed = json.loads(run(*words, "--bits", 6, "--out", tmp_path / "mixed"))
    assert {row["weights"] for row in mixed["layers"]} == {
        "fp4, groups of 16, under a global scale",
        "fp8, per tensor",
    }
    assert bits_in(tmp_path / "mixed", llama()) == pytest.approx(mixed["bits"], rel=1e-12)
    assert mixed["bits"] <= 6 and 0 < mixed["expected_loss"] < least["expected_loss"]


def test_a_plan_shows_what_layers_lose_worst_first(model, data):
    words = ("plan", model, "--data", data, "--sensitivity", "--group-size", 32)
    found = json.loads(run(*words, "--json"))
    assert list(found["schemes"]) == ["W4A16", "W8A16"]
    lost = [group["loss"]["W4A16"] for group in found["groups"]]
    assert lost == sorted(lost, reverse=True) and len(lost) == 8
    table = run(*words, "--schemes", "W3A16,W4A16,W8A16", "--bits", 5.3)
    lines = [line for line in table.splitlines() if "model.layers." in line]
    assert len(lines) == 8 and all(line.count("*") == 1 for line in lines)
    assert f"{1e3 * lost[0]:.3g}" in table and "5.00" in table and "bits for each weight" in table
    planned = json.loads(run("plan", model, "--data", data, *CHOOSING, "--json"))
    assert len(planned["groups"]) > 1


MISTAKES = [
    (
        ("--bits", 4.5, "--schemes", "W4A16", "--scheme", "W4A16"),
        "--scheme: goes with neither --bits nor --schemes. Keep one way to say what to do.",
    ),
    (
        ("--bits", 4.5, "--schemes", "W4A16", "--recipe", "mine.yaml"),
        "--recipe: goes with neither --bits nor --schemes. Keep one way to say what to do.",
    ),
    (
        ("--bits", 4.5),
        "--bits: nothing says which schemes to choose from. Give --schemes, such as W4A16,W8A16.",
    ),
    (
        ("--schemes", "W4A16,W8A16"),
        "--schemes: nothing says how many bits there are to share out. Give --bits.",
    ),
    (
        ("--bits", 4.5, "--schemes", "W4A16,W8A16"),
        "what layers lose is measured by running data through the model. Give a dataset.",
    ),
    (("--bits", 4.5, "--schemes", ","), "schemes: there is none. Name some, such as W4A16 and W8A16."),
    (
        ("--bits", 4.5, "--schemes", "W4A16,W8A16", "--pipeline", "quick"),
        "there is no pipeline 'quick'. Pipelines: auto, data_free, basic, sequential.",
    ),
    (
        ("--bits", 4.5, "--schemes", "W4A16,W8A16", "--max-memory", "much"),
        "max_memory: 'much' is no size. Write it as 8GB or 512MiB.",
    ),
    (
        ("--bits", 4.5, "--schemes", "W4A16,W8A16", "--importance", "nowhere.safetensors"),
        "nowhere.safetensors: there is no such file.",
    ),
]


@pytest.mark.parametrize("more", [("quantize", "--print-recipe"), ("quantize", "--out", "out"), ("plan",)], ids=str)
@pytest.mark.parametrize(("words", "expected"), MISTAKES)
def test_mistakes_are_one_line(words, expected, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of(more[0], "MODEL", *words, *more[1:]) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--scheme", "W4A16"),
            "--scheme: what layers lose is measured for --schemes, such as W4A16,W8A16. Give those.",
        ),
        (
            ("--recipe", "a.yaml"),
            "--recipe: what layers lose is measured for --schemes, such as W4A16,W8A16. Give those.",
        ),
        (
            ("--importance", "a.safetensors"),
            "--importance: no scheme is chosen without --bits. Give those, or leave it out.",
        ),
        (
            ("--pipeline", "basic", "--batch-size", 2, "--max-memory", "8GB", "--ranks", 2),
            "--batch-size, --pipeline, --max-memory, --ranks: --sensitivity measures layers, and plans no run. "
            "Leave it out.",
        ),
    ],
)
def test_nothing_that_is_said_to_a_measurement_is_ignored(words, expected):
    assert error_of("plan", "MODEL", "--sensitivity", *words) == expected


def test_budgets_that_cannot_be_kept_are_one_line(model, data, tmp_path):
    words = ("quantize", model, "--data", data, "--group-size", 32, "--schemes", "W4A16,W8A16", "--out", tmp_path / "x")
    assert error_of(*words, "--bits", 4) == (
        "bits: 4 for each weight is less than W4A16 takes, 5.00 with its scales. Give more, or name a smaller scheme."
    )
    assert error_of(*words, "--bits", 16) == (
        "bits: 16 for each weight is more than W8A16 takes, 9.00 with its scales. Give less, or use scheme W8A16 for "
        "all layers."
    )
    assert error_of(*words, "--bits", "nan") == "bits: nan is no number. Give 5.00, which W4A16 takes, or more."
    assert error_of(*words, "--bits", "inf").startswith("bits: inf for each weight is more than W8A16 takes")
    assert error_of(*words, "--bits", "-inf").startswith("bits: -inf for each weight is less than W4A16 takes")
    assert list(tmp_path.iterdir()) == []


def test_one_scheme_leaves_nothing_to_choose(found):
    alone = Sensitivity(("W4A16",), found.groups, found.num_tokens)
    with pytest.raises(RecipeError) as caught:
        share_out(alone, 5.0)
    assert str(caught.value) == "schemes: W4A16 alone leaves nothing to choose. Name two or more."


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_positive_scales_are_measured_where_they_will_be_stored(quality):
    """An observer that is named has no signed scales, so both ways measure the same."""
    asked = {"schemes": ("W3A16", "W8A16"), "group_size": 32, "quality": quality}
    positive = measure_sensitivity(llama(), IDS, positive_scales=True, **asked)
    signed = measure_sensitivity(llama(), IDS, **asked)
    if quality == "balanced":
        named = measure_sensitivity(llama(), IDS, observer="optimal", **asked)
        assert [each.losses["W3A16"] for each in positive.groups] == [each.losses["W3A16"] for each in named.groups]
    assert all(a.losses["W3A16"] != b.losses["W3A16"] for a, b in zip(positive.groups, signed.groups, strict=True))
    assert "signed" not in share_out(positive, 6.0).recipe.to_yaml()
    assert "signed" in share_out(signed, 6.0).recipe.to_yaml()


def test_positive_scales_of_the_command_line_reach_the_measurement(model, data):
    words = ("plan", model, "--sensitivity", "--schemes", "W3A16,W8A16", "--group-size", 32, "--data", data, "--json")
    found = json.loads(run(*words, "--positive-scales"))
    expected = measure_sensitivity(model, data, schemes=("W3A16", "W8A16"), group_size=32, positive_scales=True)
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert found != json.loads(run(*words))


@pytest.mark.parametrize("quality", ["balanced", "best"])
def test_a_plan_with_bits_counts_what_is_left_as_it_is(model, data, quality):
    """The head is ignored, though layers are named one by one and no target means it."""
    words = ("plan", model, "--bits", 6, "--schemes", "W4A16,W8A16", "--group-size", 32, "--quality", quality)
    assert json.loads(run(*words, "--data", data, "--json"))["ignored"] == ["lm_head"]
    assert "bits each in these layers; 1 layer is ignored" in run(*words, "--data", data)
