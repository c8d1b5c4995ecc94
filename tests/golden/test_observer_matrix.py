"""Every observer under every strategy, format, dtype and base name finds what the float64 reference finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from float64_reference import (
    FITTING,
    STRATEGIES,
    Array,
    Format,
    candidate_errors,
    divergence_of_cuts,
    error,
    evening_weights,
    global_scale,
    least_error_by_turns,
    least_error_of_codes,
    least_error_of_scan,
    percentile_range,
    qparams_bounds,
    round_to_float,
    shrink_factors,
)
from golden_matrix import (
    ANYWHERE,
    BASE_NAMES,
    DTYPES,
    KNOBS_FOR_EVERY_CELL,
    MXFP4,
    NVFP4,
    OBSERVERS,
    ON_COUNTS,
    PAIRS,
    SHAPES,
    SOME_FORMATS,
    args_for,
    cut_for,
    exact,
    formats_for,
    observer_for,
    serves,
    values_for,
)
from numpy.typing import NDArray

from scalewright.observers import Observer

# Observers that weigh errors by the input's strength, where there is any.
WEIGHED = ("imatrix_mse", "optimal")

# A search in fp32 may prefer a candidate whose error differs only by what fp32 cannot tell.
WORSE_BY = 1e-5


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix; shows as the words that name it."""

    observer: str
    base_name: str
    strategy: str
    fmt: Format
    dtype: str
    knobs: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        knobs = "".join(f" {name}={value:g}" for name, value in self.knobs)
        return f"{self.observer}{knobs}, {self.strategy}, {self.fmt.name}, {self.dtype}, {self.base_name}"

    def make(self) -> Observer:
        args = args_for(self.fmt, self.strategy)
        return observer_for(self.observer, self.base_name, args, **dict(self.knobs))

    def values(self, batch: int = 0) -> torch.Tensor:
        return values_for(self.base_name, self.dtype, batch)

    def cut(self, value: torch.Tensor) -> Array:
        return cut_for(value, self.base_name, self.strategy, self.fmt)


@dataclass(frozen=True)
class Searching:
    """The knobs of a search as the documents give them; not read from the classes, so that they are tested, too."""

    maxshrink: float
    grid: float
    norm: float
    expand: float = 1.0

    @property
    def factors(self) -> Array:
        return shrink_factors(maxshrink=self.maxshrink, grid=self.grid, expand=self.expand)


MSE = Searching(maxshrink=0.20, grid=100, norm=2.4)
IMATRIX_MSE = Searching(maxshrink=0.95, grid=20, norm=3.0)
NVFP4_EXPANDED_MSE = Searching(maxshrink=1 - 0.8 / 1.8, grid=200, norm=2.4, expand=1.8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors as small as these lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- what is true of all of them ------------------------------------------------------------------------------------


def assert_between(got: torch.Tensor, bounds: tuple[Array, Array], combination: Combination, what: str) -> None:
    low, high = bounds
    assert tuple(got.shape) == low.shape, f"{combination}: {what} has shape {tuple(got.shape)}, not {low.shape}"
    seen = exact(got)
    nearest = np.clip(seen, low, high)
    torch.testing.assert_close(
        torch.from_numpy(seen),
        torch.from_numpy(nearest),
        rtol=0,
        atol=0,
        msg=lambda text: f"{combination}: {what} is not what the reference has.\n{text}",
    )


def assert_qparams_of(
    observer: Observer, lo: Array, hi: Array, combination: Combination, absmax: float
) -> tuple[Array, Array, float | None]:
    """The observer's qparams are those of the range `[lo, hi]`, in shape, dtype and number; returns them in float64."""
    fmt, found = combination.fmt, observer.get_qparams()
    divisor = None
    if combination.strategy == "tensor_group":
        divisor = global_scale(absmax)
        torch.testing.assert_close(
            found["global_scale"],
            torch.tensor([divisor], dtype=torch.float32),
            rtol=1e-6,
            atol=0,
            msg=lambda text: f"{combination}: global scale. {text}",
        )
        divisor = float(found["global_scale"])
    else:
        assert found["global_scale"] is None, f"{combination}: a global scale where there is none to be"
    scales, zero_points = qparams_bounds(lo, hi, fmt, combination.dtype, divisor)
    assert_between(found["scale"], scales, combination, "scale")
    assert_between(found["zero_point"], zero_points, combination, "zero point")
    own = DTYPES[combination.dtype] if fmt.scales == "own" else torch.float32
    assert found["scale"].dtype == own, f"{combination}: scale is {found['scale'].dtype}"
    coded = torch.int8 if fmt.grid == "int" else torch.uint8 if fmt == MXFP4 else torch.float8_e4m3fn
    assert found["zero_point"].dtype == coded, f"{combination}: zero point is {found['zero_point'].dtype}"
    return exact(found["scale"]), exact(found["zero_point"]), divisor


# ---- one rule for each family ---------------------------------------------------------------------------------------


def check_extremes(
    observer: Observer, value: torch.Tensor, combination: Combination, absmax: float | None = None
) -> None:
    x = combination.cut(value)
    lo, hi = x.min(axis=-1), x.max(axis=-1)
    np.testing.assert_array_equal(exact(observer.min_vals), lo, err_msg=str(combination))
    np.testing.assert_array_equal(exact(observer.max_vals), hi, err_msg=str(combination))
    assert_qparams_of(observer, lo, hi, combination, float(np.abs(x).max()) if absmax is None else absmax)


def check_search(
    observer: Observer,
    value: torch.Tensor,
    combination: Combination,
    absmax: float | None = None,
    *,
    search: Searching,
    importance: Array | None = None,
) -> None:
    """The range is a candidate, what is stored is that range's, and no candidate loses less."""
    fmt, x = combination.fmt, combination.cut(value)
    search = replace(search, **dict(combination.knobs))
    absmax = float(np.abs(x).max()) if absmax is None else absmax
    lo, hi = x.min(axis=-1), x.max(axis=-1)
    chosen_lo, chosen_hi = map(exact, observer.chosen_range(observer.get_global_scale()))
    chosen_K = nearest_candidate(chosen_lo, chosen_hi, lo, hi, search.factors)
    factor = search.factors[chosen_K]
    np.testing.assert_allclose(chosen_lo, lo * factor, rtol=1e-6, err_msg=f"{combination}: no candidate")
    np.testing.assert_allclose(chosen_hi, hi * factor, rtol=1e-6, err_msg=f"{combination}: no candidate")
    scale, zero_point, divisor = assert_qparams_of(observer, chosen_lo, chosen_hi, combination, absmax)
    weights: Array | float = 1.0
    if importance is not None:
        spread = torch.from_numpy(np.broadcast_to(importance, value.shape).copy())
        weights = combination.cut(spread)
    measure = {"norm": search.norm, "weights": weights}
    factors_K2 = np.stack([search.factors, search.factors], axis=1)
    every = candidate_errors(x, lo, hi, factors_K2, fmt, combination.dtype, divisor, **measure)
    # The stored scale is the candidate's but for fp32 noise. At 8 bits noise alone may cost more than the margin, so
    # the candidate may stand for it.
    nominal = np.take_along_axis(every, chosen_K[None], axis=0)[0]
    found = np.minimum(nominal, error(x, scale, zero_point, fmt, divisor, **measure))
    assert_no_worse(found, every.min(axis=0), combination)


def nearest_candidate(chosen_lo: Array, chosen_hi: Array, lo: Array, hi: Array, factors: Array) -> NDArray[np.int64]:
    """The candidate whose factor comes nearest to what the range was multiplied with, at each position."""
    is_high = hi > -lo
    ratio = np.where(is_high, chosen_hi, chosen_lo) / np.where(is_high, hi, lo)
    return np.abs(factors - ratio[..., None]).argmin(axis=-1)


def assert_no_worse(found: Array, best: Array, combination: Combination, by: float = WORSE_BY) -> None:
    ratio = found / np.maximum(best, 1e-300)
    worst = np.unravel_index(ratio.argmax(), ratio.shape)
    assert ratio.max() <= 1 + by, (
        f"{combination}: position {tuple(map(int, worst))} loses {found[worst]:.9g}, "
        f"and {best[worst]:.9g} can be had ({ratio.max():.7f} times)"
    )


def check_recorded(
    observer: Observer,
    value: torch.Tensor,
    combination: Combination,
    check_range: Callable[[Array, float, float, Combination], None],
) -> None:
    """For observers that keep a record of all values, as bf16: each position's range by the rule of `check_range`."""
    x = round_to_float(combination.cut(value), "bf16")
    lo, hi = map(exact, observer.chosen_range(None))
    assert_qparams_of(observer, lo, hi, combination, float(np.abs(x).max()))
    for position in np.ndindex(lo.shape):
        check_range(x[position], float(lo[position]), float(hi[position]), combination)


def check_percentile(x: Array, lo: float, hi: float, combination: Combination) -> None:
    percent = dict(combination.knobs).get("percentile", 99.99)
    expected = percentile_range(x, percent, symmetric=combination.fmt.symmetric)
    assert (lo, hi) == expected, f"{combination}: range {(lo, hi)}, and the reference has {expected}"


def check_entropy(x: Array, lo: float, hi: float, combination: Combination) -> None:
    num_bins = int(dict(combination.knobs).get("bins", 2048))
    absmax = np.abs(x).max()
    threshold = max(-lo, hi)
    assert (lo, hi) == (max(x.min(), -threshold), min(x.max(), threshold)), f"{combination}: {(lo, hi)}"
    num_kept = round(threshold / absmax * num_bins)
    np.testing.assert_allclose(threshold, absmax * num_kept / num_bins, rtol=1e-6, err_msg=str(combination))
    divergence = divergence_of_cuts(x, combination.fmt, num_bins)
    assert divergence[num_kept] <= min(divergence.values()) + 1e-9, (
        f"{combination}: keeping {num_kept} bins diverges by {divergence[num_kept]:.9g}, "
        f"keeping {min(divergence, key=divergence.__getitem__)} by {min(divergence.values()):.9g}"
    )


def check_histogram_mse(x: Array, lo: float, hi: float, combination: Combination, weights: Array | float = 1.0) -> None:
    knobs = {"maxshrink": 0.95, "grid": 200.0, "norm": 2.0, **dict(combination.knobs)}
    factors = shrink_factors(maxshrink=knobs["maxshrink"], grid=knobs["grid"])
    for end, whole in ((lo, x.min()), (hi, x.max())):
        assert np.abs(factors - end / whole).min() < 1e-6, f"{combination}: {end} is {end / whole} of {whole}"
    if combination.fmt.symmetric:
        np.testing.assert_allclose(lo / x.min(), hi / x.max(), rtol=1e-6, err_msg=str(combination))
    # What is stored for a range has been checked already, so the range stands for it.
    as_chosen = np.array([[lo / x.min(), hi / x.max()]])
    measure = {"norm": knobs["norm"], "weights": weights}
    found = candidate_errors(x, x.min(), x.max(), as_chosen, combination.fmt, combination.dtype, **measure)
    best = least_error_by_turns(x, combination.fmt, combination.dtype, factors, **measure)
    assert_no_worse(found, np.array([best]), combination)


def check_balanced_mse(observer: Observer, value: torch.Tensor, combination: Combination) -> None:
    batches = torch.split(value, SHAPES[combination.base_name][0])
    weights = [evening_weights(exact(each), combination.base_name, combination.strategy) for each in batches]
    weights_PE = combination.cut(torch.from_numpy(np.concatenate(weights)))
    weights_of = iter(weights_PE.reshape(-1, weights_PE.shape[-1]))

    def check_range(x: Array, lo: float, hi: float, combination: Combination) -> None:
        check_histogram_mse(x, lo, hi, combination, next(weights_of))

    check_recorded(observer, value, combination, check_range)


def check_weighted_search(
    observer: Observer, value: torch.Tensor, combination: Combination, absmax: float | None = None
) -> None:
    importance = importance_of(combination)
    check_search(observer, value, combination, absmax, search=IMATRIX_MSE, importance=importance)


def check_optimal(
    observer: Observer, value: torch.Tensor, combination: Combination, absmax: float | None = None
) -> None:
    """What is stored is the chosen range's, loses no more than min-max, and is the best there is, or near it."""
    fmt, x = combination.fmt, combination.cut(value)
    absmax = float(np.abs(x).max()) if absmax is None else absmax
    lo, hi = map(exact, observer.chosen_range(observer.get_global_scale()))
    scale, zero_point, divisor = assert_qparams_of(observer, lo, hi, combination, absmax)
    importance, weights = importance_of(combination), 1.0
    if importance is not None:
        weights = combination.cut(torch.from_numpy(np.broadcast_to(importance, value.shape).copy()))
    measure = {"norm": 2.0 if importance is not None and fmt.bits > 2 else 2.4, "weights": weights}
    found = error(x, scale, zero_point, fmt, divisor, **measure)
    lo, hi, itself = x.min(axis=-1), x.max(axis=-1), np.ones((1, 2))
    plain = candidate_errors(x, lo, hi, itself, fmt, combination.dtype, divisor, **measure)[0]
    # A range gives back the scale that it was made from up to its last bit, and at 8 bits that shows.
    assert_no_worse(found, plain, combination, by=1e-4)
    if fmt.scales != "own":
        assert_no_worse(found, least_error_of_codes(x, fmt, divisor, **measure), combination)
    elif fmt.bits <= 4:
        # Of more bits a dozen scales cannot try all that matters in groups as small as these.
        scanned = least_error_of_scan(x, fmt, combination.dtype, divisor, **measure)
        assert_no_worse(found.sum(keepdims=True), scanned.sum(keepdims=True), combination, by=0.06)


# Observer, value, combination, and the largest magnitude for the global scale where it is not that of the value.
RULES: dict[str, Callable[..., None]] = {
    "memoryless_minmax": check_extremes,
    "static_minmax": check_extremes,
    "minmax": check_extremes,
    "memoryless_mse": partial(check_search, search=MSE),
    "mse": partial(check_search, search=MSE),
    "nvfp4_expanded_mse": partial(check_search, search=NVFP4_EXPANDED_MSE),
    "imatrix_mse": check_weighted_search,
    "optimal": check_optimal,
    "percentile": partial(check_recorded, check_range=check_percentile),
    "entropy": partial(check_recorded, check_range=check_entropy),
    "histogram_mse": partial(check_recorded, check_range=check_histogram_mse),
    "balanced_mse": check_balanced_mse,
}


def layer_input(batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 + batch)
    return torch.randn(3, 5, 64, generator=generator) * torch.logspace(-1, 1, 64)


def importance_of(combination: Combination) -> Array | None:
    """E[x^2] of each input channel, which only weights have."""
    if combination.base_name != "weight":
        return None
    return (exact(layer_input()).reshape(-1, 64) ** 2).mean(axis=0)


def observe(combination: Combination, *batches: int) -> Observer:
    observer = combination.make()
    if combination.observer in WEIGHED and combination.base_name == "weight":
        observer.observe_input(layer_input())
    for batch in batches:
        observer(combination.values(batch))
    return observer


# ---- the tests ------------------------------------------------------------------------------------------------------


def test_every_observer_has_a_reference_rule():
    assert sorted(RULES) == OBSERVERS


@pytest.mark.parametrize(("base_name", "strategy"), PAIRS)
@pytest.mark.parametrize("name", OBSERVERS)
def test_one_value_gives_the_qparams_of_the_reference(name: str, base_name: str, strategy: str):
    if not serves(name, strategy):
        args = args_for(formats_for(strategy)[0], strategy)
        with pytest.raises(ValueError, match=f"observer '{name}' does not serve strategy '{strategy}'"):
            observer_for(name, base_name, args)(values_for(base_name, "fp32"))
        return
    for fmt in formats_for(strategy):
        for dtype in DTYPES:
            combination = Combination(name, base_name, strategy, fmt, dtype, KNOBS_FOR_EVERY_CELL.get(name, ()))
            RULES[name](observe(combination, 0), combination.values(), combination)


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_strategy_that_does_not_fit_the_base_name_is_an_error(name: str):
    num_refused = 0
    for base_name in BASE_NAMES:
        for strategy in set(STRATEGIES) - FITTING[base_name]:
            for fmt in formats_for(strategy):
                observer = observer_for(name, base_name, args_for(fmt, strategy))
                for dtype in DTYPES:
                    with pytest.raises(ValueError, match=f"'{strategy}' does not fit '{base_name}'"):
                        observer(values_for(base_name, dtype))
                assert not observer.has_statistics, f"{name}, {strategy}, {fmt.name}, {base_name}"
                num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize("name", KNOBS_FOR_EVERY_CELL)
def test_defaults_give_the_qparams_of_the_reference(name: str):
    cells = [("input", "tensor", fmt) for fmt in SOME_FORMATS]
    if serves(name, "tensor_group"):
        cells += [("weight", "tensor_group", NVFP4), ("input", "tensor_group", NVFP4)]
    for base_name, strategy, fmt in cells:
        combination = Combination(name, base_name, strategy, fmt, "fp32")
        RULES[name](observe(combination, 0), combination.values(), combination)


@pytest.mark.parametrize("name", OBSERVERS)
def test_two_batches_join_by_the_rule_of_the_observer(name: str):
    for base_name, strategy in PAIRS:
        if not serves(name, strategy):
            continue
        for fmt in SOME_FORMATS + formats_for(strategy)[len(ANYWHERE) :]:
            combination = Combination(name, base_name, strategy, fmt, "bf16", KNOBS_FOR_EVERY_CELL.get(name, ()))
            both = observe(combination, 0, 1)
            if name in ON_COUNTS:  # as if all values had come at once
                RULES[name](both, torch.cat([combination.values(0), combination.values(1)]), combination)
            else:
                check_joined(both, combination)


def check_joined(both: Observer, combination: Combination) -> None:
    """After two batches the range is that of each alone, joined by the rule, and the qparams are those of the range."""
    # The second batch has the larger maximum, so it alone is searched under the global scale that both have.
    first, second = observe(combination, 0), observe(combination, 1)
    absmaxes = [float(combination.values(batch).abs().max()) for batch in (0, 1)]
    assert absmaxes[0] < absmaxes[1]
    pairs = [
        (exact(first.min_vals), exact(second.min_vals), np.minimum),
        (exact(first.max_vals), exact(second.max_vals), np.maximum),
    ]
    if combination.observer in ("minmax", "mse"):
        lo, hi = (0.99 * old + 0.01 * new for old, new, _ in pairs)
    elif combination.base_name == "weight" and combination.observer != "static_minmax":
        lo, hi = (new for _, new, _ in pairs)
    else:
        lo, hi = (join(old, new) for old, new, join in pairs)
    np.testing.assert_allclose(exact(both.min_vals), lo, rtol=1e-6, err_msg=str(combination))
    np.testing.assert_allclose(exact(both.max_vals), hi, rtol=1e-6, err_msg=str(combination))
    # An average has no other maximum than its own; a search makes the global scale from the true one.
    absmax = float(max(-lo.min(), hi.max())) if combination.observer == "minmax" else absmaxes[1]
    assert_qparams_of(both, exact(both.min_vals), exact(both.max_vals), combination, absmax)


@pytest.mark.parametrize("name", [name for name in OBSERVERS if serves(name, "tensor_group")])
def test_fused_weights_are_searched_under_the_global_scale_of_the_larger(name: str):
    for dtype in DTYPES:
        combination = Combination(name, "weight", "tensor_group", NVFP4, dtype)
        smaller, larger = observe(combination, 0), observe(combination, 1)
        Observer.fuse([smaller, larger])
        absmax = float(combination.values(1).abs().max())
        for batch, observer in enumerate((smaller, larger)):
            RULES[name](observer, combination.values(batch), combination, absmax)
