"""Rewrites the generated parts of the docs: `make docs-tables`.

A generated part stands between two marker lines, which stay. A page without them, or with them twice, is an error:
nothing is written then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `bench`, however this is started

from bench import tables

from scalewright.modifiers.schemes import scheme_rows
from scalewright.observers.catalog import observers_markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DEMO_MODEL = ROOT / "examples" / "demo_model"
BEGIN, END = "<!-- begin: generated -->", "<!-- end: generated -->"
QUALITIES = ("fast", "balanced", "best")


def schemes_markdown() -> str:
    """The table of schemes."""
    rows = [
        (f"`{row.name}`", row.weights, row.activations, f"{row.bits:.2f}", "yes" if row.needs_data else "")
        for row in scheme_rows()
    ]
    return _table(("scheme", "weights", "activations", "bits", "needs data"), rows)


def choosing_markdown() -> str:
    """What qualities and schemes lose, from the results of the benchmarks."""
    return f"{_qualities()}\n\n{_formats()}"


def readme_markdown() -> str:
    """The same, as far as a reader of the README wants it."""
    return _qualities()


def demo_model_markdown() -> str:
    """What the demo model is, and has learned."""
    learned = json.loads((DEMO_MODEL / "training.json").read_text(encoding="utf-8"))
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    size = sum(each.stat().st_size for each in DEMO_MODEL.iterdir())
    perplexity = learned["perplexity"]
    return (
        f"A Llama of {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}, "
        f"{learned['parameters']:,} parameters in {config['dtype']}, with a byte-level BPE of {config['vocab_size']} "
        f"tokens: {size / 1e6:.1f} MB in all. It was trained for {learned['steps']} steps on "
        f"{learned['training_tokens']:,} tokens of Python's help and docstrings (Python {learned['python']}). On the "
        f"{learned['held_out_tokens']:,} tokens of help that were held out, its "
        f"perplexity is **{perplexity['trained']:.1f}**; it was "
        f"{perplexity['untrained']:,.0f} before the training, and guessing by the frequency of tokens reaches "
        f"{perplexity['frequencies']:.0f}."
    )


def _qualities() -> str:
    """KL by scheme and quality, beside the best recipe of the peer."""
    results = _results("accuracy")
    lines = []
    models = _in_order(row["weights"] for row in results["rows"])
    for model in models:
        for scheme in _in_order(row["scheme"] for row in results["rows"] if row["weights"] == model):
            rows = [row for row in results["rows"] if (row["weights"], row["scheme"]) == (model, scheme)]
            peer = min((row for row in rows if row["side"] == "peer"), key=lambda row: row["kl"], default=None)
            ours = {row["contestant"]: row for row in rows if row["side"] == "ours"}
            if ours:
                cells = [_kl(ours.get(quality)) for quality in QUALITIES]
                told = "" if peer is None else f"{_kl(peer)}, `{peer['contestant']}`"
                lines.append((model, f"`{scheme}`", f"{rows[0]['bits']:.2f}", *cells, told))
    used = [i for i in range(7) if any(line[i] for line in lines)]
    head = ("model", "scheme", "bits", *(f"`{quality}`" for quality in QUALITIES), "llm-compressor's best recipe")
    peer_version = results["machine"]["peer"]["llmcompressor"]
    days = sorted(row["date"] for row in results["rows"])
    told = ", ".join(f"{name} with {_threads(results['rows'], name)}" for name in models)
    terms = (
        f"KL divergence from the unquantised model, and seconds of the whole run ({told}); beside llm-compressor "
        f"{peer_version}, on the same data. Less is better; ≈ where other work ran beside, ‡ seconds "
        f"of the processor then, † on another machine. Measured {_span(days)}."
    )
    return f"{terms}\n\n" + _table([head[i] for i in used], [[line[i] for i in used] for line in lines])


def _threads(rows: Sequence[dict[str, Any]], model: str) -> str:
    """How many threads the rows of a model were measured with."""
    counts = sorted({row["threads"] for row in rows if row["weights"] == model})
    return f"{' or '.join(map(str, counts))} thread{'s' * (counts[-1] > 1)}"


def _formats() -> str:
    """What each format loses as it comes, on the smallest real model."""
    results = _results("runs")
    rows = [row for row in results["rows"] if row["loss_before"] is not None and ", `" not in row["case"]]
    rows.sort(key=lambda row: row["ours"]["loss"])
    lines = [
        (
            row["case"],
            *(f"{row[side]['loss'] - row['loss_before']:+.4f}" for side in ("ours", "peer")),
            *(f"{row[side]['seconds']:.1f} s" for side in ("ours", "peer")),
        )
        for row in rows
    ]
    days = sorted(row["date"] for row in rows)
    terms = (
        f"What formats cost on {rows[0]['weights']} when a recipe names nothing but the format (our defaults, and "
        f"llm-compressor's): growth of the loss, whose "
        f"value was {rows[0]['loss_before']:.4f}. Measured {_span(days)}."
    )
    return f"{terms}\n\n" + _table(("format", "loss, ours", "loss, llm-compressor", "time, ours", "its time"), lines)


def _results(topic: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{topic}.json").read_text(encoding="utf-8"))
    return {**results, "rows": [row for row in results["rows"] if "problem" not in row and not row["quick"]]}


def _kl(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    seconds = f" ({tables.marks(row)}{row['seconds']:.0f} s)" if "seconds" in row else ""
    return f"{row['kl']:.3g}{seconds}"


def _span(days: Sequence[str]) -> str:
    return f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"


def _in_order(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme_markdown,
    "docs/choosing.md": choosing_markdown,
    "docs/examples.md": demo_model_markdown,
    "docs/observers.md": observers_markdown,
    "docs/schemes.md": schemes_markdown,
}
"""Which page has a generated part, and what writes it."""


def with_generated_part(page: str, generated: str) -> str:
    """The text of `page` with `generated` between its markers, an empty line on either side."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the markers {BEGIN} and {END} must stand in it once each, in this order")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{generated.strip()}\n\n{END}{after}"


def main() -> int:
    """Rewrite every page that is not up to date, and say which."""
    for name, generate in PAGES.items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        try:
            rewritten = with_generated_part(page, generate())
        except ValueError as error:
            print(f"{name}: {error}.", file=sys.stderr)
            return 2
        if rewritten != page:
            path.write_text(rewritten, encoding="utf-8")
        print(f"{name}: {'rewritten' if rewritten != page else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
