"""Makes the site of docs/ whole: mkdocs calls it (`hooks` in mkdocs.yml).

Pages link to files beside docs/, as a reader of the repository expects: `../examples/x.py`, `../CHANGELOG.md`. In the
site such a file is a page: text as it is, code in a block. A link to a file that does not exist stays, and mkdocs says
so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md")
CODE = {".py": "python", ".yaml": "yaml"}
OUTSIDE = re.compile(r"\]\(\.\./(?P<name>[\w/.-]+)(?P<anchor>#[\w-]*)?\)")
COMING: tuple[str, ...] = ()
"""Pages that have their place in the menu before they are written."""

INSIDE = re.compile(r"\]\(docs/")


def shown_files() -> dict[str, str]:
    """The pages that are made of files beside docs/: where they stand in the site, and their text."""
    pages = {name: INSIDE.sub("](", (ROOT / name).read_text(encoding="utf-8")) for name in TEXTS}
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in CODE:
            name = path.relative_to(ROOT).as_posix()
            code = path.read_text(encoding="utf-8").rstrip()
            pages[page_of(name)] = f"# {name}\n\n````{CODE[path.suffix]}\n{code}\n````\n"
    return pages


def page_of(name: str) -> str:
    """Where a file of the repository stands in the site."""
    return f"{name}.md" if Path(name).suffix in CODE else name


def links_into_the_site(markdown: str) -> str:
    """The text of a page of docs/, with links to files beside docs/ turned to their pages."""
    shown = shown_files()

    def turned(link: re.Match[str]) -> str:
        page = page_of(link["name"])
        return f"]({page}{link['anchor'] or ''})" if page in shown else link[0]

    return OUTSIDE.sub(turned, markdown)


# ---- what mkdocs calls ------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Leave out of the menu what is still to come."""
    for section in config.nav:
        for title, pages in section.items():
            section[title] = [each for each in pages if not _is_still_to_come(each)]
    return config


def _is_still_to_come(entry: str | dict[str, str]) -> bool:
    name = entry if isinstance(entry, str) else next(iter(entry.values()))
    return name in COMING and not (ROOT / "docs" / name).is_file()


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, text in shown_files().items():
        file = File.generated(config, name, content=text)
        if name not in TEXTS:
            file.inclusion = type(file.inclusion).NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links before mkdocs checks them."""
    return (
        links_into_the_site(markdown) if "/" not in page.file.src_uri and page.file.src_uri not in TEXTS else markdown
    )
