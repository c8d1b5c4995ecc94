"""Rewrites the generated parts of the docs: `make docs-tables`.

A generated part stands between two marker lines, which stay. A page without them, or with them twice, is an error:
nothing is written then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from scalewright.observers.catalog import observers_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- begin: generated -->", "<!-- end: generated -->"

PAGES: dict[str, Callable[[], str]] = {"observers.md": observers_markdown}
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
        path = DOCS / name
        page = path.read_text(encoding="utf-8")
        try:
            rewritten = with_generated_part(page, generate())
        except ValueError as error:
            print(f"docs/{name}: {error}.", file=sys.stderr)
            return 2
        if rewritten != page:
            path.write_text(rewritten, encoding="utf-8")
        print(f"docs/{name}: {'rewritten' if rewritten != page else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
