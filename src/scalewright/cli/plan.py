"""`scalewright plan`: what `quantize` would do."""

from __future__ import annotations

import json

from scalewright.cli.app import app
from scalewright.cli.options import AsJson, Job, with_job
from scalewright.cli.shown import failing_politely, new_table, out_console, say, tell


@app.command()
@with_job
def plan(job: Job, as_json: AsJson = False) -> None:
    """Say what `quantize` would do: layers, observers, bits, size, memory, time. Writes nothing."""
    from scalewright.planning import plan_of

    with failing_politely():
        found = plan_of(
            job.model,
            job.parsed_recipe(),
            has_data=job.data is not None,
            num_samples=job.samples,
            max_seq_length=job.seq_len,
            batch_size=job.batch_size,
            pipeline=job.pipeline,
            sequential_targets=job.sequential_targets or None,
            dtype=job.dtype,
            trust_remote_code=job.trust_remote_code,
            strict=job.strict,
        )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    table = new_table(f"{job.model}: the plan", "such as", "layers", "weights", "activations", "observers", "bits")
    for row in found.groups:
        table.add_row(row.example, str(row.count), row.weights, row.activations, row.observers, f"{row.bits:.2f}")
    out_console.print(table)
    tell(found.notes)
    for line in found.summary():
        say(line)
