"""What the law tests run on: every registered observer, each place that it can watch, formats, dtypes and values.

Observers come from the registry alone, so that a new one is covered the day it is registered. What a base name allows
is written out here a second time: it is the contract, and a test must not ask the code what the code should do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from scalewright.observers import Observer, flatten_for_calibration
from scalewright.observers.catalog import registered_observers
from scalewright.observers.knobs import Knob, KnobValue

# Seeded, and without a clock: a law that holds today holds tomorrow, on a slow machine too.
LAW = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LAW_BRIEFLY = settings(LAW, max_examples=5)  # for laws that make several observers at each try
LAW_IN_BREADTH = settings(LAW, max_examples=25)

ALLOWED = {
    "weight": ("tensor", "channel", "group", "tensor_group", "block"),
    "input": ("tensor", "group", "tensor_group", "token"),
    "output": ("tensor", "group", "tensor_group", "token"),
    "q": ("tensor", "attn_head"),
    "k": ("tensor", "attn_head"),
    "v": ("tensor", "attn_head"),
}
ALL_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block", "token", "attn_head")
ACTIVATIONS = ("input", "output")
ATTENTION = ("q", "k", "v")
# Base names that are treated alike share the test cases of the first.
ALIKE = {"weight": ("weight",), "input": ACTIVATIONS, "q": ATTENTION}

INTEGERS: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "symmetric": True},
    "int4_asym": {"num_bits": 4, "symmetric": False},
    "int8": {"num_bits": 8, "symmetric": True},
    "int8_asym": {"num_bits": 8, "symmetric": False},
    "int2": {"num_bits": 2, "symmetric": True},
    "int2_asym": {"num_bits": 2, "symmetric": False},
}
PLAIN: dict[str, dict[str, Any]] = {**INTEGERS, "fp8": {"num_bits": 8, "type": "float", "symmetric": True}}

GROUP_SIZE = 16
BLOCK = [4, 8]
SEQUENCE = 3  # under TOKEN all batches must have the same number of tokens
HEADS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Knobs, by name, that only make a search finer: turned down where many values are tried and the law is about the rest.
COARSE: dict[str, KnobValue] = {"bins": 256, "grid": 10.0}


@dataclass(frozen=True)
class Case:
    """An observer and a place where it can watch."""

    name: str
    base_name: str
    strategy: str

    @property
    def cls(self) -> type[Observer]:
        return registered_observers()[self.name]

    @property
    def formats(self) -> tuple[str, ...]:
        if self.strategy == "tensor_group":
            return ("nvfp4",)
        return (*PLAIN, "mxfp4") if self.strategy == "group" else tuple(PLAIN)

    def scene(self, form: str, *, base_name: str | None = None, coarse: bool = True, **knobs: KnobValue) -> Scene:
        """The case with its arguments: what is needed to make observers."""
        turned = {k.name: COARSE[k.name] for k in self.cls.knobs if coarse and k.name in COARSE}
        return Scene(self, base_name or self.base_name, form, make_args(form, self.strategy), {**turned, **knobs})

    def scenes(self, **options: Any) -> Iterator[Scene]:
        """The case in each format."""
        return (self.scene(form, **options) for form in self.formats)

    def __str__(self) -> str:
        return f"{self.name}-{self.base_name}-{self.strategy}"


@dataclass(frozen=True)
class Scene:
    """A case with a format, arguments and knobs; `importance_input` is what a weight's module is fed, if anything."""

    case: Case
    base_name: str
    form: str
    args: QuantizationArgs
    knobs: dict[str, KnobValue]
    importance_input: Tensor | None = None

    def fresh(self, **knobs: KnobValue) -> Observer:
        """An observer that has seen no value yet."""
        observer = self.case.cls(self.base_name, self.args, **{**self.knobs, **knobs})
        self.feed_importance(observer)
        return observer

    def feed_importance(self, observer: Observer) -> None:
        if self.importance_input is not None:
            observer.observe_input(self.importance_input)

    def seeing(self, *values: Tensor, **knobs: KnobValue) -> Observer:
        """An observer that has seen these values, in this order."""
        observer = self.fresh(**knobs)
        for value in values:
            observer(value)
        return observer

    @property
    def is_integer(self) -> bool:
        return self.form in INTEGERS

    @property
    def columns_step(self) -> int:
        """What the number of columns must be a multiple of."""
        return self.args.group_size or 1

    def shape(self, *, rows: int = 2, groups: int = 2, tokens: int = SEQUENCE) -> tuple[int, ...]:
        """The shape of a value: `rows` rows or batches; the last dimension grows with `groups`."""
        columns = groups * (self.columns_step if self.columns_step > 1 else 4)
        if self.base_name == "weight":
            return (rows, columns)
        if self.base_name in ACTIVATIONS:
            return (rows, SEQUENCE if self.case.strategy == "token" else tokens, columns)
        return (rows, HEADS, tokens, columns)

    def value(self, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> Tensor:
        return normal(self.shape(**sizes), seed).to(dtype)


def make_args(form: str, strategy: str) -> QuantizationArgs:
    """Arguments of a format under a strategy; the presets of compressed-tensors for the 4-bit floats."""
    if form == "nvfp4":
        return preset("NVFP4A16")
    if form == "mxfp4":
        return preset("MXFP4A16")
    extra: dict[str, Any] = {}
    if strategy == "group":
        extra = {"group_size": GROUP_SIZE}
    elif strategy == "block":
        extra = {"block_structure": BLOCK}
    elif strategy == "token":
        extra = {"dynamic": True}  # compressed-tensors knows no static token scales
    return QuantizationArgs(**PLAIN[form], strategy=strategy, **extra)


def preset(name: str) -> QuantizationArgs:
    weights = preset_name_to_scheme(name, ["Linear"]).weights
    assert weights is not None
    return weights


def _cases() -> Iterator[Case]:
    for name, cls in registered_observers().items():
        for base_name in ALIKE:
            for strategy in ALLOWED[base_name]:
                if not cls.strategies or strategy in cls.strategies:
                    yield Case(name, base_name, strategy)


EVERY_OBSERVER = list(registered_observers())
EVERY_CASE = [pytest.param(case, id=str(case)) for case in _cases()]
EVERY_KNOB = [
    pytest.param(name, knob, id=f"{name}-{knob.name}")
    for name, cls in registered_observers().items()
    for knob in cls.knobs
]


def cases_where(holds: Callable[[Case], bool]) -> list[Any]:
    """The cases, as parameters, for which something holds."""
    return [param for param in EVERY_CASE if holds(param.values[0])]


def knobs_where(holds: Callable[[Knob], bool]) -> list[Any]:
    """The pairs of observer and knob, as parameters, for which something holds of the knob."""
    return [param for param in EVERY_KNOB if holds(param.values[1])]


def first_case(name: str) -> Case:
    """Some place where the observer can watch."""
    return next(case for case in _cases() if case.name == name)


def usual_scene(name: str) -> Scene:
    """Some place where the observer can watch, in int8 if it can be."""
    case = first_case(name)
    return case.scene("int8" if "int8" in case.formats else case.formats[0])


def has_knob(cls: type[Observer], name: str) -> bool:
    return any(knob.name == name for knob in cls.knobs)


def collects_importance(cls: type[Observer]) -> bool:
    return hasattr(cls, "observe_input")


def squares_weighed_errors(cls: type[Observer]) -> bool:
    """Whether the norm is 2 where there is importance, and the knob is for where there is none."""
    return has_knob(cls, "importance")


def own_norm(scene: Scene, observer: Any) -> float:
    """The power of the error that the observer's search adds up in this scene."""
    is_squared = squares_weighed_errors(type(observer)) and scene.importance_input is not None
    return 2.0 if is_squared and scene.args.num_bits > 2 else float(observer.norm)


# ---- values ----------------------------------------------------------------------------------------------------


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KINDS = ("normal", "outliers", "positive", "negative", "ties", "sparse")


def make_values(kind: str, shape: tuple[int, ...], seed: int, exponent: int = 0) -> Tensor:
    """fp32 values of a kind; none is denormal."""
    x = normal(shape, seed)
    if kind == "outliers":
        x = torch.where(normal(shape, seed + 1) > 1.5, x * 30, x)
    elif kind == "positive":
        x = x.abs() + 0.5
    elif kind == "negative":
        x = -x.abs() - 0.5
    elif kind == "ties":
        x = (x * 2).round()
    elif kind == "sparse":
        x = torch.where(normal(shape, seed + 1) > 0, x, torch.zeros(()))
    return torch.ldexp(x, torch.tensor(exponent))


@st.composite
def scenes(draw: st.DrawFn, case: Case, *, with_importance: bool = True) -> Scene:
    """The case in some format, under one of the base names that are treated alike."""
    scene = case.scene(draw(st.sampled_from(case.formats)), base_name=draw(st.sampled_from(ALIKE[case.base_name])))
    if with_importance and collects_importance(case.cls) and case.base_name == "weight" and draw(st.booleans()):
        scene = replace(scene, importance_input=torch.empty(0))  # to be filled when the width is known
    return scene


@st.composite
def scenes_and_values(
    draw: st.DrawFn,
    case: Case,
    *,
    count: int = 1,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    kinds: tuple[str, ...] = KINDS,
    with_importance: bool = True,
) -> tuple[Scene, list[Tensor]]:
    """A scene and `count` values for one observer of it: batches of activations may differ in length."""
    scene = draw(scenes(case, with_importance=with_importance))
    dtype = draw(st.sampled_from(dtypes))
    groups, rows = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    exponent = draw(st.integers(-6, 5))
    values = []
    for _ in range(count):
        batch = rows if case.base_name == "weight" else draw(st.integers(1, 3))
        shape = scene.shape(rows=batch, groups=groups, tokens=draw(st.integers(1, 4)))
        kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 10_000))
        values.append(make_values(kind, shape, seed, exponent).to(dtype))
    if scene.importance_input is not None:
        columns = values[0].shape[-1]
        scene = replace(scene, importance_input=make_values("outliers", (4, columns), draw(st.integers(0, 10_000))))
    return scene, values


# ---- looking at observers --------------------------------------------------------------------------------------


def statistics(observer: Observer) -> dict[str, Tensor | int | None]:
    """A copy of every statistic that the class declares, and the amount that was seen."""
    found: dict[str, Tensor | int | None] = {"num_observed": observer.num_observed}
    for name in observer.merge_rules:
        value = getattr(observer, name)
        found[name] = value.clone() if isinstance(value, Tensor) else value
    return found


def state(observer: Observer) -> dict[str, Any]:
    """Statistics and, when there are any, the qparams that they give."""
    qparams: dict[str, Any] = {}
    if observer.has_statistics:
        qparams = {f"qparams {name}": value for name, value in observer.get_qparams().items()}
    return {**statistics(observer), **qparams}


def assert_same_state(actual: Observer, expected: Observer, *, summed: bool = False) -> None:
    """Equal statistics and qparams, bit for bit; `summed` lets fp32 sums, and what hangs on them, differ a little."""
    rules = type(expected).merge_rules
    floating_sum = any(rule == "sum" and _is_float(expected, name) for name, rule in rules.items())
    assert_equal(state(actual), state(expected), rtol=2e-6 if summed and floating_sum else 0.0)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], *, rtol: float = 0.0) -> None:
    """Two records with the same names, dtypes, shapes and values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert actual[name] == value, name
            continue
        found = actual[name]
        assert isinstance(found, Tensor), f"{name} is {found!r}"
        assert found.dtype == value.dtype, name
        torch.testing.assert_close(
            found.double(), value.double(), rtol=rtol, atol=0.0, msg=lambda text, name=name: f"{name}: {text}"
        )


def differs(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    try:
        assert_equal(actual, expected)
    except AssertionError:
        return True
    return False


def _is_float(observer: Observer, name: str) -> bool:
    value = getattr(observer, name)
    return isinstance(value, Tensor) and value.is_floating_point()


# ---- what compressed-tensors makes of the qparams --------------------------------------------------------------


def effective_scale(qparams: Any) -> Tensor:
    """What a code is multiplied with, fp32, in the shape of the qparams."""
    scale = qparams["scale"].float()
    return scale if qparams["global_scale"] is None else scale / qparams["global_scale"]


def fake_quantized(x: Tensor, qparams: Any, scene: Scene) -> Tensor:
    """fp32 `x` as it is read back, by compressed-tensors alone."""
    scale, zero_point = qparams["scale"].float(), qparams["zero_point"]
    if scene.base_name in ACTIVATIONS:
        # One scale for each token stands in a column, one for each group of columns in a row.
        dim = {"token": -1, "group": 0, "tensor_group": 0}.get(scene.case.strategy)
        if dim is not None:
            scale, zero_point = scale.unsqueeze(dim), zero_point.unsqueeze(dim)
    return fake_quantize(x.float(), scale, zero_point, scene.args, global_scale=qparams["global_scale"])


def flat(x: Tensor, scene: Scene) -> Tensor:
    return flatten_for_calibration(x, scene.base_name, scene.args)


def integer_ends(args: QuantizationArgs) -> tuple[int, int]:
    return -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1


def assert_sound(qparams: Any, scene: Scene) -> None:
    """Scales are finite and positive, and zero points are codes of the format."""
    for name in ("scale", "global_scale"):
        if qparams[name] is not None:
            values = qparams[name].float()
            assert bool(torch.isfinite(values).all()), f"{scene.form}: {name} is not finite: {values}"
            assert bool((values > 0).all()), f"{scene.form}: {name} is not positive: {values}"
    zero_point = qparams["zero_point"].double()
    assert bool(torch.isfinite(zero_point).all()), f"{scene.form}: zero point {zero_point}"
    if scene.args.symmetric:
        assert bool((zero_point == 0).all()), f"{scene.form}: zero point {zero_point}"
    else:
        low, high = integer_ends(scene.args)
        assert bool(((zero_point >= low) & (zero_point <= high)).all()), f"{scene.form}: zero point {zero_point}"


def other_values(knob: Knob) -> list[KnobValue]:
    """Values that the knob takes and that are not its default."""
    if isinstance(knob.default, bool):
        return [not knob.default]
    if knob.choices:
        return [choice for choice in knob.choices if choice != knob.default]
    if isinstance(knob.default, str):
        return [f"{knob.default}_other"]
    near = [knob.default * factor for factor in (0.5, 2, 0.9, 1.1)] + [knob.default + 1, knob.default - 1, 0.5]
    # The upper end comes last: there a search may be very long.
    candidates = [*([] if knob.low is None else [knob.low]), *near, *([] if knob.high is None else [knob.high])]
    candidates = [int(value) if isinstance(knob.default, int) else float(value) for value in candidates]
    return [value for value in dict.fromkeys(candidates) if value != knob.default and _takes(knob, value)]


def _takes(knob: Knob, value: float) -> bool:
    return (
        (knob.low is None or value >= knob.low)
        and (knob.high is None or value <= knob.high)
        and (knob.above is None or value > knob.above)
    )
