"""`scalewright plan`: what `quantize` would do, and what layers would lose."""

from __future__ import annotations

import json
from typing import Annotated, Any

from scalewright.cli.app import app
from scalewright.cli.options import (
    AsJson,
    Job,
    Reading,
    recipe_option,
    run_option,
    with_options,
)
from scalewright.cli.progress import progress_shown
from scalewright.cli.shown import failing_politely, say, tell
from scalewright.cli.tables import new_table, sensitivity_table, show_table
from scalewright.errors import RecipeError


@app.command()
@with_options
def plan(
    job: Job,
    reading: Reading,
    sensitivity: Annotated[
        bool, recipe_option("--sensitivity", help="Measure what each layer loses under each of --schemes, on --data.")
    ] = False,
    ranks: Annotated[int, run_option(min=1, help="Reckon with so many ranks, each as fast as this process.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Say what `quantize` would do: layers, observers, bits, size, memory, time. Writes nothing."""
    from scalewright.calibration.sources import check_file
    from scalewright.checkpoint.loading import check_device
    from scalewright.planning import plan_of

    found = allocation = None
    with failing_politely(), progress_shown(quiet=as_json) as on_step:
        if sensitivity:
            _refuse_idle(job, reading, ranks)
        if sensitivity or job.bits is not None:
            found = job.sensitivity(reading, on_step)
            allocation = None if job.bits is None else job.shared_out(found)
    if sensitivity:
        _show(found, allocation, as_json=as_json)
        return
    with failing_politely():
        check_file(reading.data)
        check_device(reading.device)
        asked = reading.keywords()
        del asked["device"]
        planned = plan_of(
            job.model,
            job.parsed_recipe() if allocation is None else allocation.recipe,
            dataset=reading.data,
            num_samples=job.samples,
            pipeline=job.pipeline,
            sequential_targets=job.sequential_targets or None,
            strict=job.strict,
            max_memory=job.max_memory,
            num_ranks=ranks,
            **asked,
        )
    if as_json:
        print(json.dumps({**planned.to_dict(), **({} if allocation is None else {"chosen": allocation.to_dict()})}))
        return
    table = new_table(f"{job.model}: the plan", "such as", "layers", "weights", "activations", "observers", "bits")
    for row in planned.groups:
        table.add_row(row.example, str(row.count), row.weights, row.activations, row.observers, f"{row.bits:.2f}")
    show_table(table)
    tell(planned.notes)
    if allocation is not None:
        say(allocation.summary())
    for line in planned.summary():
        say(line)


def _refuse_idle(job: Job, reading: Reading, ranks: int) -> None:
    """Say no to options of a run that is not planned."""
    names = ("pipeline", "sequential_targets", "max_memory")
    given = ["--batch-size"] if reading.batch_size is not None else []
    given += [f"--{name.replace('_', '-')}" for name in names if getattr(job, name) not in (None, [], "auto")]
    given += ["--ranks"] if ranks > 1 else []
    if given:
        raise RecipeError(f"{', '.join(given)}: --sensitivity measures layers, and plans no run. Leave it out.")


def _show(found: Any, allocation: Any, *, as_json: bool) -> None:
    """What layers lose, and the schemes that a budget is best spent on, if there is one."""
    if as_json:
        print(json.dumps({**found.to_dict(), **({} if allocation is None else {"chosen": allocation.to_dict()})}))
        return
    show_table(sensitivity_table(found, {} if allocation is None else allocation.schemes))
    tell(found.notes)
    if allocation is not None:
        say(allocation.summary())
