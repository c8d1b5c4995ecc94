"""What to do about a layer that keeps little: rules that look at its figures.

A rule answers with a sentence, or with nothing. Those that know a cause come first, and the next larger format last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable

from scalewright.modifiers.base import LEFT_ALONE, OUTPUT_HEAD
from scalewright.observers.fusion import FUSED_LAYER_NAMES
from scalewright.report.formats import Format, format_of
from scalewright.report.reading import Layer

_GOOD_DB = 20.0  # an output that keeps more needs no advice
_POOR_DB = 10.0  # one that keeps less had better stay as it was
_BY_INPUTS_DB = 3.0  # an output that keeps so much less than its weight loses by its inputs
_FEW_TOKENS = 128
_FAR = 0.1  # above the optimum
_EXPECTED_DB = {  # a little less than normally distributed weights keep
    ("int", 2): 7,
    ("int", 3): 12,
    ("int", 4): 17,
    ("int", 8): 35,
    ("fp", 4): 16,
    ("fp", 6): 24,
    ("fp", 8): 27,
}
_ENDS = ("embed", "wte", "lm_head", "output_layer", "embed_out")


def advice_for(layer: Layer) -> list[str]:
    """What could be done about a layer, the most promising first."""
    weights, inputs = format_of(layer.weights), format_of(layer.activations)
    said = [said for rule in _RULES if (said := rule(layer, weights, inputs)) is not None]
    quality = layer.quality_db
    if quality is not None and quality >= _GOOD_DB and not said:
        return [f"Nothing to do: it keeps {quality:.1f} dB."]
    if quality is not None and quality < _GOOD_DB:
        larger = _larger(layer, weights, inputs)
        said += [larger] if larger is not None else []
        if quality < _POOR_DB or larger is None:
            said.append("Or leave it as it was: put it into ignore.")
    return said


def flags_for(layers: Iterable[Layer]) -> str:
    """The options of `quantize` that leave some layers, and those that loaders merge with them, as they were."""
    meant = list(layers)
    words = LEFT_ALONE if any("experts." in each.name for each in meant) else (OUTPUT_HEAD,)
    patterns = dict.fromkeys([*words, *(_pattern(each.name) for each in meant)])
    return " ".join(f"--ignore {shlex.quote(each)}" for each in patterns)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _sees_too_little(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    count = layer.num_tokens
    if count is None or count >= _FEW_TOKENS:
        return None
    whom = "It was given" if layer.place.expert is None else "Its expert was chosen by"
    return f"{whom} {count:,} tokens of the data, so little is known of its inputs. Use more samples, or other ones."


def _is_badly_observed(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    observer, above = layer.observers.get("weight", ""), layer.above_optimum
    if above is None or above < _FAR or observer == "optimal":
        return None
    return f"Its weight loses {above:.0%} more than it must under {observer}. Use the observer optimal."


def _loses_by_inputs(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    output, weight = layer.output_db, layer.weight_db
    if inputs is None or output is None or weight is None or output >= _GOOD_DB or output > weight - _BY_INPUTS_DB:
        return None
    lost = f"Its output keeps {output:.1f} dB, and its weight {weight:.1f}: it loses by its inputs. "
    only = f"W{weights.bits}A16" if weights is not None and weights.is_int else "a scheme of weights alone"
    without = f"eave its inputs as they are, with {only}."
    if inputs.is_dynamic:
        return f"{lost}L{without}"
    if not inputs.is_int:
        return f"{lost}Use FP8_DYNAMIC, which has a scale for each token, or l{without}"
    if layer.dynamic_db is None:
        return f"{lost}Try W8A8_DYNAMIC, which has a scale for each token."
    if layer.dynamic_db > output + _BY_INPUTS_DB:
        return f"{lost}Use W8A8_DYNAMIC: with a scale for each token it would keep {layer.dynamic_db:.1f} dB."
    return f"{lost}A scale for each token would not help ({layer.dynamic_db:.1f} dB). L{without}"


def _is_an_end(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    last = layer.name.rpartition(".")[2]
    if weights is None or weights.bits > 4 or not last.startswith(_ENDS):
        return None
    return "Embeddings and the output head suffer more than other layers. Use 8 bits for it, or put it into ignore."


def _has_outliers(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    if weights is None or layer.weight_db is None or layer.is_compensated:
        return None
    expected = _EXPECTED_DB.get((weights.kind, weights.bits))
    if expected is None or layer.weight_db >= expected:
        return None
    few = f"Its weight keeps {layer.weight_db:.1f} dB, and {weights.kind}{weights.bits} usually more than {expected}: "
    if weights.by == "per tensor":
        return few + "a few large values decide one scale for all. Give each row its own (strategy channel)."
    if weights.by != "group":
        return few + "a few large values decide the scale of their row. Use groups (group_size 128)."
    if weights.group_size is not None and weights.group_size > 32 and weights.is_int:
        return few + f"a few large values decide the scales of their groups. Use group_size {_smaller(weights)}."
    return few + "its values are spread too widely for it."


_RULES: tuple[Callable[[Layer, Format | None, Format | None], str | None], ...] = (
    _sees_too_little,
    _is_badly_observed,
    _loses_by_inputs,
    _is_an_end,
    _has_outliers,
)


def _larger(layer: Layer, weights: Format | None, inputs: Format | None) -> str | None:
    """The next format that keeps more."""
    if weights is None or (layer.weight_db is not None and layer.weight_db >= _GOOD_DB + _BY_INPUTS_DB):
        return None
    if weights.is_int and weights.bits < 4:
        return f"Use 4 bits: {_scheme(4, inputs)} keeps some {6 * (4 - weights.bits)} dB more."
    if weights.is_int and weights.bits < 8:
        if weights.by != "group":
            return "Use groups: group_size 128 costs .13 bits for each weight."
        if weights.group_size is not None and weights.group_size > 32:
            size = _smaller(weights)
            bits = 16 / size - 16 / weights.group_size
            return f"Use group_size {size}, which costs {bits:.2f} bits for each weight, or {_scheme(8, inputs)}."
        return f"Use 8 bits: {_scheme(8, inputs)} keeps some 20 dB more."
    if not weights.is_int and weights.bits < 8:
        return "Use NVFP4 or 8 bits (FP8_DYNAMIC)." if not weights.is_global else "Use 8 bits: FP8_DYNAMIC."
    return None


def _scheme(bits: int, inputs: Format | None) -> str:
    if inputs is None:
        return f"W{bits}A16"
    return "W8A8_DYNAMIC" if bits == 8 else f"W{bits}A8"


def _smaller(weights: Format) -> int:
    return 64 if (weights.group_size or 0) > 256 else 32


def _pattern(name: str) -> str:
    """What means a layer, and its partners where loaders merge it with others: they need one scheme."""
    parent, _, last = name.rpartition(".")
    names = next((each for each in FUSED_LAYER_NAMES if last in each), None)
    return name if names is None else f"re:{re.escape(parent)}\\.({'|'.join(names)})$"
