"""The stages of a recipe on a model: what is smoothed, what is gathered, and what is quantised, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from scalewright.calibration.gathering import Gathering, Importance, plan_gatherings, that_quantise
from scalewright.calibration.plan import Plan, make_plans
from scalewright.calibration.smoothing import plan_smoothings
from scalewright.modifiers import Modifier, SmoothQuantModifier


@dataclass(frozen=True)
class Stage:
    """What is done to a model at one time, and what comes before it."""

    plan: Plan
    gathering: Gathering
    smoothers: list[SmoothQuantModifier]

    @property
    def runs_data(self) -> bool:
        """Whether data flows through the model."""
        return bool(self.smoothers or self.gathering.modules) or self.plan.pipeline != "data_free"

    @property
    def passes_before(self) -> int:
        """How often data flows through the model before anything is quantised."""
        return len(self.smoothers) + bool(self.gathering.modules)


def plan_stages(
    model: nn.Module,
    stages: Sequence[Sequence[Modifier]],
    *,
    files: Mapping[str, Importance],
    making: AbstractContextManager[Any],
    blocks: str | Sequence[str] | None = None,
    **asked: Any,
) -> list[Stage]:
    """The stages that quantise. `asked` are the pipeline, and whether there is data; plans are made inside `making`."""
    with making:
        plans = make_plans(model, that_quantise(stages), blocks=blocks, **asked)
    gatherings = plan_gatherings(model, stages, plans, files=files, **asked)
    smoothings = plan_smoothings(stages, plans, **asked)
    return [Stage(*each) for each in zip(plans, gatherings, smoothings, strict=True)]


def notes_on(
    stages: Sequence[Stage],
    *,
    has_data: bool,
    blocks: str | Sequence[str] | None = None,
    for_data: Mapping[str, Any] | None = None,
) -> list[str]:
    """What is to be said of stages, and of data and options that they have no use for."""
    told = [note for stage in stages for note in (*stage.gathering.notes, *stage.plan.notes)]
    runs = any(stage.runs_data for stage in stages)
    plans = [stage.plan for stage in stages]
    return told + _idle(plans, runs_data=runs, has_data=has_data, blocks=blocks, for_data=for_data)


def _idle(
    plans: Sequence[Plan],
    *,
    runs_data: bool,
    has_data: bool,
    blocks: str | Sequence[str] | None = None,
    for_data: Mapping[str, Any] | None = None,
) -> list[str]:
    """What a run was given and has no use for: data, blocks (`sequential_targets`), and options `for_data`."""
    notes = []
    if has_data and not runs_data:
        how = f"{plans[-1].pipeline}: {plans[-1].why}"
        notes.append(f"data: nothing is calibrated with it ({how}). Leave it out, or use a recipe that looks at it.")
    idle = [name for name, value in (for_data or {}).items() if value is not None]
    if idle and not has_data:
        notes.append(f"{', '.join(idle)}: there is no data to use it for. Give some, or leave it out.")
    pipelines = list(dict.fromkeys(plan.pipeline for plan in plans))
    if blocks is not None and "sequential" not in pipelines:
        notes.append(
            f"sequential_targets: the pipeline is {' and '.join(pipelines)}, and goes through no blocks. Ask for "
            "sequential, or leave them out."
        )
    return notes
