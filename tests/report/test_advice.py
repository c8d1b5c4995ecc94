"""What is advised for a layer follows from its figures."""

import itertools
import shlex

import pytest

from scalewright.modifiers.schemes import in_words, scheme_named, scheme_names
from scalewright.numerics.layout import strategy_of
from scalewright.report.advice import advice_for, flags_for
from scalewright.report.formats import format_of
from scalewright.report.places import Place, places_of
from scalewright.report.reading import Layer

BLOCK = "model.layers.3"


def layer(name: str = f"{BLOCK}.mlp.down_proj", **given) -> Layer:
    figures = {"weights": "int4, groups of 128", "activations": "as they are", "observers": {"weight": "optimal"}}
    return Layer(**({"name": name, "place": places_of([name])[name], "shape": (8, 128), "bits": 4.1} | figures | given))


STATIC = {"weights": "int8, per channel", "activations": "int8, per tensor", "weight_db": 42.3, "output_db": 5.3}
LOSES = "Its output keeps 5.3 dB, and its weight 42.3: it loses by its inputs. "
IGNORE = "Or leave it as it was: put it into ignore."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight_db": 20.5, "output_db": 23.4}, ["Nothing to do: it keeps 23.4 dB."]),
        (
            {"weight_db": 20.5, "output_db": 15.0},
            ["Use group_size 32, which costs 0.38 bits for each weight, or W8A16."],
        ),
        (
            {"weights": "int4, groups of 32", "weight_db": 20.5, "output_db": 19.0},
            ["Use 8 bits: W8A16 keeps some 20 dB more."],
        ),
        (
            {"weights": "int4, per channel", "weight_db": 17.5},
            ["Use groups: group_size 128 costs .13 bits for each weight."],
        ),
        ({"weights": "int2, groups of 32", "weight_db": 9.0}, ["Use 4 bits: W4A16 keeps some 12 dB more.", IGNORE]),
        (
            {"weight_db": 14.0},
            [
                "Its weight keeps 14.0 dB, and int4 usually more than 17: a few large values decide the scales of "
                "their groups. Use group_size 32.",
                "Use group_size 32, which costs 0.38 bits for each weight, or W8A16.",
            ],
        ),
        ({"weight_db": 14.0, "output_db": 26.0, "is_compensated": True}, ["Nothing to do: it keeps 26.0 dB."]),
        (
            {"weights": "int8, per channel", "weight_db": 30.0},
            [
                "Its weight keeps 30.0 dB, and int8 usually more than 35: a few large values decide the scale of their "
                "row. Use groups (group_size 128)."
            ],
        ),
        (
            {"weights": "fp8, per tensor", "weight_db": 22.0},
            [
                "Its weight keeps 22.0 dB, and fp8 usually more than 27: a few large values decide one scale for all. "
                "Give each row its own (strategy channel)."
            ],
        ),
        (
            {"weights": "fp4, groups of 16, under a global scale", "weight_db": 18.0},
            ["Use 8 bits: FP8_DYNAMIC."],
        ),
        ({"weights": "fp4, groups of 32", "weight_db": 17.0}, ["Use NVFP4 or 8 bits (FP8_DYNAMIC)."]),
        (
            STATIC | {"dynamic_db": 31.4},
            [f"{LOSES}Use W8A8_DYNAMIC: with a scale for each token it would keep 31.4 dB.", IGNORE],
        ),
        (
            STATIC | {"dynamic_db": 5.5},
            [
                f"{LOSES}A scale for each token would not help (5.5 dB). Leave its inputs as they are, with W8A16.",
                IGNORE,
            ],
        ),
        (STATIC, [f"{LOSES}Try W8A8_DYNAMIC, which has a scale for each token.", IGNORE]),
        (
            STATIC | {"activations": "int8, per token, dynamic"},
            [f"{LOSES}Leave its inputs as they are, with W8A16.", IGNORE],
        ),
        (
            STATIC | {"weights": "fp8, per tensor", "activations": "fp8, per tensor"},
            [
                f"{LOSES}Use FP8_DYNAMIC, which has a scale for each token, or leave its inputs as they are, with a "
                "scheme of weights alone.",
                IGNORE,
            ],
        ),
        (
            {"weight_db": 21.0, "above_optimum": 0.35, "observers": {"weight": "memoryless_minmax"}},
            ["Its weight loses 35% more than it must under memoryless_minmax. Use the observer optimal."],
        ),
        (
            {"name": "lm_head", "weight_db": 21.0},
            ["Embeddings and the output head suffer more than other layers. Use 8 bits for it, or put it into ignore."],
        ),
        (
            {"name": f"{BLOCK}.mlp.experts.7.up_proj", "weight_db": 21.0, "num_tokens": 12},
            [
                "Its expert was chosen by 12 tokens of the data, so little is known of its inputs. Use more samples, "
                "or other ones."
            ],
        ),
        ({}, []),
    ],
)
def test_advice_follows_from_figures(given, said):
    assert advice_for(layer(**given)) == said


def test_whatever_is_known_and_whatever_is_not_there_is_no_advice_that_breaks():
    numbers = (None, -5.0, 12.0, 50.0, 1e9)
    words = [in_words(scheme_named(name).weights) for name in scheme_names()]
    for weights, weight_db, output_db in itertools.product((*words, "", "klingon7, per moon"), numbers, numbers):
        said = advice_for(layer(weights=weights, activations=weights, weight_db=weight_db, output_db=output_db))
        assert all(each.endswith(".") for each in said)
        assert said or weight_db is output_db is None


def test_layers_that_loaders_merge_are_left_alone_together():
    found = flags_for(
        [layer(f"{BLOCK}.self_attn.v_proj"), layer(f"{BLOCK}.self_attn.q_proj"), layer("a b'; rm -rf $x")]
    )
    assert shlex.split(found) == [
        *("--ignore", "model:output_head"),
        *("--ignore", r"re:model\.layers\.3\.self_attn\.(q_proj|k_proj|v_proj)$"),
        *("--ignore", "a b'; rm -rf $x"),
    ]


# ---- words and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.parametrize("part", ["weights", "input_activations"])
def test_formats_are_read_as_they_are_written(name, part):
    args = getattr(scheme_named(name), part)
    found = format_of(in_words(args))
    if args is None:
        assert found is None
        return
    strategy = strategy_of(args)
    assert (found.bits, found.is_int, found.is_dynamic) == (args.num_bits, args.type == "int", bool(args.dynamic))
    assert (found.by == "group", found.is_global) == ("group" in strategy, strategy == "tensor_group")
    assert found.group_size == (args.group_size if "group" in strategy else None)


def test_places_are_read_from_names():
    assert places_of(["model.layers.3.self_attn.q_proj", "lm_head", "model.layers.3.mlp.experts.7.up_proj"]) == {
        "model.layers.3.self_attn.q_proj": Place("model.layers", 3, "q_proj", None),
        "lm_head": Place("", None, "lm_head", None),
        "model.layers.3.mlp.experts.7.up_proj": Place("model.layers", 3, "experts.up_proj", 7),
    }


def test_kinds_are_as_long_as_they_must_be_to_differ_and_the_same_in_all_blocks():
    blocks = [f"decoder.block.{number}.layer" for number in range(2)]
    names = [f"{block}.{part}" for block in blocks for part in ("0.Self.q", "0.Self.o", "1.Cross.q")]
    kinds = [each.kind for each in places_of([*names, "encoder.block.0.layer.0.Self.q"]).values()]
    assert kinds[:3] == kinds[3:6] == ["Self.q", "o", "Cross.q"]
    strange = ["", ".", "1.2.3", "a.99999999999999.b", "a.1", "x.1.y.1.z", "layers.²."]
    assert list(places_of(strange)) == strange
