"""Curves stay within the tolerance that they state."""

import pytest
import torch

from scalewright.numerics.curves import power_curve

CASES = [
    *((norm, largest, 0.5) for norm in (1.5, 2.2, 2.4, 2.7, 3.5, 5, 5.001) for largest in (0.5, 0.78125, 1.9, 12.0)),
    (2.4, 1.0, 0.25),  # e2m1
    (2.4, 2.0, 2.0**-3),
    (2.4, 0.1, 0.5),
]


@pytest.mark.parametrize(("norm", "largest", "typical"), CASES)
def test_a_curve_is_off_by_its_tolerance_at_most(norm, largest, typical):
    curve = power_curve(norm, largest=largest, typical=typical)
    torch.manual_seed(0)
    u = torch.cat([torch.rand(100_000) * largest, torch.rand(100_000) * min(typical, largest)])
    u[:4] = torch.tensor([0.0, largest, min(typical, largest), largest / 2])
    exact = u.double().pow(norm)
    found = curve.evaluate_(u.clone(), torch.empty_like(u)).double()
    allowed = curve.tolerance * (exact + curve.floor)
    assert ((found - exact).abs() <= allowed).all()


@pytest.mark.parametrize("norm", [2.2, 2.4, 2.7])
def test_a_curve_that_covers_integers_is_tight(norm):
    assert power_curve(norm, largest=0.5, typical=0.5).tolerance < 1e-3
    assert power_curve(norm, largest=1.0, typical=0.5).tolerance < 1e-2


@pytest.mark.parametrize("typical", [0.5, 0.25, 2.0**-10])
@pytest.mark.parametrize("largest", [0.5, 1.0, 60.0])
@pytest.mark.parametrize("norm", [5, 5.0])
def test_a_power_that_a_curve_has_a_term_for_is_found_exactly(norm, largest, typical):
    assert power_curve(norm, largest=largest, typical=typical).tolerance < 2e-5


def test_the_tolerance_is_no_larger_than_it_has_to_be():
    curve = power_curve(2.4, largest=1.0, typical=0.5)
    u = torch.linspace(0, 1, 100_001)
    exact = u.double().pow(2.4)
    off = (curve.evaluate_(u.clone(), torch.empty_like(u)).double() - exact).abs() / (exact + curve.floor)
    assert off.max() > 0.8 * curve.tolerance


def test_signs_do_not_matter_and_zero_stays_zero():
    curve = power_curve(2.4, largest=1.0, typical=0.5)
    u = torch.tensor([-0.7, 0.7, 0.0])
    found = curve.evaluate_(u, torch.empty_like(u))
    assert found is u
    assert found[0] == found[1] > 0 and found[2] == 0


def test_a_curve_is_fitted_once():
    assert power_curve(2.4, largest=2.0, typical=0.5) is power_curve(2.4, largest=2.0, typical=0.5)
    assert power_curve(2.4, largest=2.0, typical=0.5) is not power_curve(2.5, largest=2.0, typical=0.5)


def test_the_floor_is_the_mean_of_the_power_where_values_are_typical():
    u = torch.linspace(0, 0.5, 100_001, dtype=torch.float64)
    assert power_curve(2.4, largest=2.0, typical=0.5).floor == pytest.approx(float(u.pow(2.4).mean()), rel=1e-3)
