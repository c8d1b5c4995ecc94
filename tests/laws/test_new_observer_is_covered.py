"""An observer that is registered outside the package is covered by the laws at once, and a broken one breaks them.

The observers here live in a plugin that is loaded before the law tests are collected, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import observer_cases as cases
import pytest
import test_bad_input
import test_laws

LAWS = (test_laws, test_bad_input)

PLUGIN = '''
import torch
from scalewright.observers import Knob, MemorylessMinMaxObserver, Observer, StaticMinMaxObserver


@Observer.register("covered_margin")
class Margin(StaticMinMaxObserver):
    """The range of all values, made wider or narrower."""

    knobs = (Knob("margin", 1.25, "factor on the range", low=0.5, high=2),)

    def chosen_range(self, global_scale):
        lo, hi = super().chosen_range(global_scale)
        largest = torch.finfo(torch.float32).max
        return tuple((end.double() * self.margin).clamp(-largest, largest).float() for end in (lo, hi))


@Observer.register("broken_by_changing_args")
class ChangesArgs(StaticMinMaxObserver):
    knobs = (Knob("unused", 1.0, "nothing"),)

    def __init__(self, base_name="weight", args=None, **kwargs):
        super().__init__(base_name, args, **kwargs)
        given = args if args is not None else kwargs["quantization_args"]
        given.observer_kwargs.update({k: v for k, v in kwargs.items() if k != "quantization_args"})


@Observer.register("broken_by_order")
class LastBatchOnly(MemorylessMinMaxObserver):
    def fold(self, before, lo, hi):
        return {"min_vals": lo, "max_vals": hi}


@Observer.register("broken_by_claiming_order")
class ClaimsOrder(StaticMinMaxObserver):
    ordered = True


@Observer.register("broken_by_merge_rule")
class MergesWrongly(StaticMinMaxObserver):
    merge_rules = {"min_vals": "max", "max_vals": "max"}


@Observer.register("broken_by_absolute_margin")
class AbsoluteMargin(StaticMinMaxObserver):
    def chosen_range(self, global_scale):
        return self.min_vals - 0.01, self.max_vals + 0.01


@Observer.register("broken_by_reading")
class ChangesWhenRead(StaticMinMaxObserver):
    def chosen_range(self, global_scale):
        self.max_vals = self.max_vals * 2
        return super().chosen_range(global_scale)


@Observer.register("broken_by_remembering")
class SurvivesReset(StaticMinMaxObserver):
    def fold(self, before, lo, hi):
        self.hidden = max(getattr(self, "hidden", 0.0), float(hi.max()))
        return super().fold(before, lo, hi.clamp(min=self.hidden))


@Observer.register("broken_by_a_dead_knob")
class DeadKnob(StaticMinMaxObserver):
    knobs = (Knob("strength", 1.0, "nothing"),)


@Observer.register("broken_by_a_false_time_knob")
class FalseTimeKnob(Margin):
    knobs = (Knob("margin", 1.25, "factor on the range", low=0.5, high=2, changes="time"),)


@Observer.register("broken_by_a_bad_search")
class BadSearch(StaticMinMaxObserver):
    knobs = (Knob("norm", 2.0, "power of the error", above=0),)

    def chosen_range(self, global_scale):
        return self.min_vals * 0.1, self.max_vals * 0.1


@Observer.register("broken_by_mending_nan")
class MendsNaN(StaticMinMaxObserver):
    def forward(self, observed, g_idx=None, *, mask=None):
        return super().forward(torch.nan_to_num(observed), g_idx, mask=mask)


@Observer.register("broken_by_ignoring_masks")
class IgnoresMasks(StaticMinMaxObserver):
    def forward(self, observed, g_idx=None, *, mask=None):
        return super().forward(torch.nan_to_num(observed), g_idx)


@Observer.register("broken_by_changing_values")
class ChangesValues(StaticMinMaxObserver):
    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        observed.mul_(0.5)


@Observer.register("broken_by_infinite_scales")
class InfiniteScales(StaticMinMaxObserver):
    def get_qparams(self):
        qparams = super().get_qparams()
        huge = self.max_vals > 1e4
        return {**qparams, "scale": qparams["scale"].masked_fill(huge, torch.inf)}
'''

BREAKS = {
    "broken_by_changing_args": "test_constructing_and_observing_never_change_the_args",
    "broken_by_order": "test_permuting_batches_changes_nothing_unless_the_class_is_ordered",
    "broken_by_claiming_order": "test_an_ordered_class_does_depend_on_the_order",
    "broken_by_merge_rule": "test_merging_two_halves_equals_seeing_both",
    "broken_by_absolute_margin": "test_scaling_by_a_power_of_two_scales_the_scale",
    "broken_by_reading": "test_reading_changes_nothing_and_observing_goes_on_after_it",
    "broken_by_remembering": "test_reset_forgets_everything",
    "broken_by_a_dead_knob": "test_turning_a_knob_changes_something",
    "broken_by_a_false_time_knob": "test_a_knob_that_only_changes_time_never_changes_the_result",
    "broken_by_a_bad_search": "test_a_search_is_never_worse_than_min_max_by_its_own_measure",
    "broken_by_mending_nan": "test_nan_and_inf_are_counted_located_and_refused",
    "broken_by_ignoring_masks": "test_a_mask_equals_observing_only_the_kept_tokens",
    "broken_by_changing_values": "test_a_value_is_not_changed_and_may_be_changed_afterwards",
    "broken_by_infinite_scales": "test_huge_values_keep_finite_positive_scales",
}
# One place is enough to see that an observer is broken, and keeps the run short.
PLACES = {
    "broken_by_changing_args": "",
    "broken_by_a_dead_knob": "",
    "broken_by_a_false_time_knob": "",
    "broken_by_changing_values": "-weight-channel",
}
SOME_PLACE = "-input-token"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What became of each test, by its function and its parameters: "passed", or the first line of what went wrong."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "observers_of_a_stranger.py").write_text(PLUGIN)
    here = Path(__file__).parent
    broken = " or ".join(f"({law} and {name}{PLACES.get(name, SOME_PLACE)})" for name, law in BREAKS.items())
    report = folder / "report.xml"
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-p", "observers_of_a_stranger", *options, f"--junitxml={report}"]
    run = subprocess.run(
        [*command, "-k", f"covered_margin or {broken}", *(str(Path(law.__file__ or "")) for law in LAWS)],
        cwd=here.parent.parent,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    return {
        (function, parameters): "passed" if len(test) == 0 else test[0].attrib["message"].splitlines()[0]
        for test in ElementTree.parse(report).iter("testcase")
        for function, _, parameters in [test.attrib["name"].partition("[")]
    }


def _laws_of_every_observer(module: ModuleType) -> Iterator[str]:
    for name, function in vars(module).items():
        for mark in getattr(function, "pytestmark", []):
            if mark.name == "parametrize" and (
                mark.args[1] is cases.EVERY_CASE or mark.args[1] is cases.EVERY_OBSERVER
            ):
                yield name


def test_every_law_runs_on_a_newly_registered_observer(outcomes: dict[tuple[str, str], str]) -> None:
    expected = {name for module in LAWS for name in _laws_of_every_observer(module)}
    assert len(expected) > 30
    ran = {function for function, parameters in outcomes if "covered_margin" in parameters}
    assert expected <= ran, f"these do not cover a new observer: {expected - ran}"
    # Laws of knobs, masks, group maps and order take their observers from the registry as well.
    further = {
        law for law in BREAKS.values() if "search" not in law and "time" not in law and "ordered_class" not in law
    }
    assert further <= ran


def test_a_new_observer_that_is_right_keeps_every_law(outcomes: dict[tuple[str, str], str]) -> None:
    broken = [key for key, outcome in outcomes.items() if "covered_margin" in key[1] and outcome != "passed"]
    assert broken == []


@pytest.mark.parametrize(("name", "law"), BREAKS.items(), ids=BREAKS)
def test_a_broken_observer_breaks_its_law(outcomes: dict[tuple[str, str], str], name: str, law: str) -> None:
    found = [outcome for (function, parameters), outcome in outcomes.items() if function == law and name in parameters]
    # An assertion must have failed; any other error would only say that the broken observer is badly written.
    assert any(outcome.startswith(("AssertionError", "assert", "Failed")) for outcome in found), found
