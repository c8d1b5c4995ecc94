"""Schemes by name: compressed-tensors' presets to the letter, W8A8 as its users mean it, and what each takes."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, initialize_module_for_quantization, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.utils import get_direct_state_dict
from torch import nn

from scalewright.errors import RecipeError
from scalewright.modifiers.schemes import (
    bits_per_weight,
    in_words,
    scheme_named,
    scheme_names,
    scheme_rows,
    wants_values,
)

ROWS, COLUMNS = 256, 512


def without_observers(scheme):
    for args in (scheme.weights, scheme.input_activations, scheme.output_activations):
        if args is not None:
            args.observer = None
    return scheme


@pytest.mark.parametrize("name", sorted({*PRESET_SCHEMES} - {"W8A8"}))
def test_every_preset_is_that_of_compressed_tensors(name):
    expected = without_observers(preset_name_to_scheme(name, ["a", "re:b"]))
    assert scheme_named(name, ["a", "re:b"]) == expected
    assert scheme_named(name.lower(), ["a", "re:b"]) == expected
    assert scheme_named(name.capitalize(), ["a", "re:b"]) == expected


def test_the_names_are_those_of_the_presets_and_one_more():
    assert scheme_names() == sorted({*PRESET_SCHEMES, "W8A8_DYNAMIC"})


def test_w8a8_has_static_scales_and_its_dynamic_brother_those_of_int8():
    static, dynamic = scheme_named("w8a8"), scheme_named("W8A8_dynamic")
    assert dynamic == scheme_named("INT8")
    assert (dynamic.input_activations.strategy, dynamic.input_activations.dynamic) == ("token", True)
    assert static.weights == dynamic.weights
    assert static.input_activations == QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy="tensor", dynamic=False
    )
    assert wants_values(static.input_activations)
    assert not wants_values(dynamic.input_activations)
    assert not wants_values(None)


@pytest.mark.parametrize("name", scheme_names())
def test_a_scheme_can_be_changed_without_changing_the_next(name):
    first = scheme_named(name)
    before = scheme_named(name).model_copy(deep=True)
    first.targets.append("other")
    for args in (first.weights, first.input_activations):
        if args is not None:
            args.num_bits, args.observer, args.observer_kwargs["x"] = 2, "mse", 1
    assert scheme_named(name) == before


@pytest.mark.parametrize("name", scheme_names())
def test_schemes_name_no_observer(name):
    scheme = scheme_named(name)
    assert [
        args.observer for args in (scheme.weights, scheme.input_activations) if args is not None and args.observer
    ] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("W4A61", " Did you mean 'W4A16'?"), ("fp8_dynamc", " Did you mean 'FP8_DYNAMIC'?"), ("", ""), ("zzz", "")],
)
def test_an_unknown_scheme_is_an_error_with_the_nearest_name(name, hint):
    with pytest.raises(RecipeError) as caught:
        scheme_named(name)
    assert str(caught.value) == f"there is no scheme '{name}'.{hint} Schemes: {', '.join(scheme_names())}."


def stored_bits(scheme, dtype) -> float:
    """What compressed-tensors really writes for a weight, without the global scale and the record of its shape."""
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
    initialize_module_for_quantization(layer, scheme, force_zero_point=False)
    for name, parameter in layer.named_parameters():
        if name != "weight":
            parameter.data.fill_(1)
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(nn.Linear, scheme).value)
    stored = compressor.compress(get_direct_state_dict(layer), scheme)
    kept = [
        each
        for name, each in stored.items()
        if name in ("weight", "weight_packed", "weight_scale", "weight_zero_point")
    ]
    return sum(8 * each.numel() * each.element_size() for each in kept) / (ROWS * COLUMNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted({*scheme_names()} - {"UNQUANTIZED"}))
def test_bits_per_weight_are_what_is_written(name, dtype):
    scheme = scheme_named(name)
    found = bits_per_weight(scheme.weights, (ROWS, COLUMNS), scheme.input_activations, dtype=dtype)
    assert found == stored_bits(scheme, dtype)


def test_a_weight_that_stays_as_it_is_takes_the_bits_of_its_dtype():
    assert bits_per_weight(None, (ROWS, COLUMNS)) == 16.0
    assert bits_per_weight(None, (ROWS, COLUMNS), dtype=torch.float32) == 32.0


@pytest.mark.parametrize(
    ("name", "weights", "activations"),
    [
        ("W4A16_ASYM", "int4, groups of 128, asymmetric", "as they are"),
        ("W8A8", "int8, per channel", "int8, per tensor"),
        ("W8A8_DYNAMIC", "int8, per channel", "int8, per token, dynamic"),
        ("FP8_BLOCK", "fp8, blocks of 128x128", "fp8, groups of 128, dynamic"),
        (
            "NVFP4",
            "fp4, groups of 16, under a global scale",
            "fp4, groups of 16, under a global scale, dynamic group scales",
        ),
        ("UNQUANTIZED", "as they are", "as they are"),
    ],
)
def test_schemes_in_words(name, weights, activations):
    scheme = scheme_named(name)
    assert in_words(scheme.weights) == weights
    assert in_words(scheme.input_activations) == activations


def test_the_table_has_a_row_for_each_scheme():
    rows = {row.name: row for row in scheme_rows()}
    assert list(rows) == scheme_names()
    assert {name for name, row in rows.items() if row.needs_data} == {"W8A8", "FP8", "NVFP4"}
    assert (rows["W4A16"].bits, rows["W4A8"].bits, rows["UNQUANTIZED"].bits) == (4.125, 8.125, 16.0)
