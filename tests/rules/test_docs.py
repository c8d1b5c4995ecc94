"""The docs are true: their Python runs, their generated tables are up to date, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scalewright.observers import Observer
from scalewright.observers.catalog import observers_markdown, registered_observers

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED_PAGES = [*PAGES, ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only our own observers are registered, and what a page registers is forgotten after it."""
    ours = {name: cls for name, cls in registered_observers().items() if cls.__module__.startswith("scalewright.")}
    monkeypatch.setattr(Observer, "_classes", ours)
    monkeypatch.setattr(Observer, "_names", {known: name for known, name in Observer._names.items() if name in ours})


def python_blocks(page: str) -> list[tuple[int, str]]:
    """Line number and text of each Python block, in order; a block that says it is not run is an error."""
    blocks = []
    for fence in FENCE.finditer(page):
        language = fence["language"].strip()
        assert language == "python" or not language.lower().startswith("py"), f"```{language} is not run. Say python."
        if language != "python":
            continue
        line = page.count("\n", 0, fence.start("code"))
        assert not fence["code"].lstrip().startswith("# not run"), f"line {line + 1}: every Python block is run."
        blocks.append((line, fence["code"]))
    return blocks


def run_page(page: str, name: str) -> dict[str, object]:
    """Run the blocks of one page in a namespace of their own, in order; errors show the page's line numbers."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in python_blocks(page):
        exec(compile("\n" * line + code, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_python_block_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(path.read_text(encoding="utf-8"), str(path))
    assert list(tmp_path.iterdir()) == [], "a page left files behind"


def test_the_pages_that_teach_by_code_have_code() -> None:
    for name in ("README.md", "docs/observers.md", "docs/extending.md"):
        assert python_blocks((ROOT / name).read_text(encoding="utf-8")), name


def test_blocks_share_a_namespace_and_fail_loudly() -> None:
    page = "# Page\n\n```python\nx = 1\n```\n\n```text\nnot python\n```\n\n```python\nassert x == 1\ny = x\n```\n"
    assert run_page(page, "page.md")["y"] == 1
    with pytest.raises(ZeroDivisionError):
        run_page(page + "```python\nx / 0\n```\n", "page.md")
    for excused in ("```python\n# not run: too slow\nx\n```\n", "```py\nx = 1\n```\n"):
        with pytest.raises(AssertionError):
            run_page(excused, "page.md")


def test_the_table_of_observers_is_true() -> None:
    page = (ROOT / "docs" / "observers.md").read_text(encoding="utf-8")
    generated = page.split("<!-- begin: generated -->")[1].split("<!-- end: generated -->")[0]
    assert generated.strip() == observers_markdown().strip(), "run `make docs-tables`"


def load_with_generated_part() -> Callable[[str, str], str]:
    spec = importlib.util.spec_from_file_location("write_docs_tables", ROOT / "tools" / "write_docs_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.with_generated_part


def test_only_the_generated_part_is_rewritten() -> None:
    with_generated_part = load_with_generated_part()
    page = "before\n<!-- begin: generated -->\nold\n<!-- end: generated -->\nafter\n"
    once = with_generated_part(page, "| new |\n")
    assert once == "before\n<!-- begin: generated -->\n\n| new |\n\n<!-- end: generated -->\nafter\n"
    assert with_generated_part(once, "| new |\n") == once
    for broken in ("no markers", page + page, "<!-- end: generated --> <!-- begin: generated -->"):
        with pytest.raises(ValueError, match="must stand in it once each"):
            with_generated_part(broken, "| new |\n")


# ---- links -----------------------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """The anchors that the headings of a page have on GitHub."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    """Relative links of a page whose file, or whose heading in it, does not exist."""
    dead = []
    for link in LINK.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link["target"]):
            continue
        name, _, anchor = link["target"].partition("#")
        target = path.parent / name if name else path
        is_there = target.exists() and target.resolve().is_relative_to(ROOT if path.is_relative_to(ROOT) else "/")
        if not is_there or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link["target"])
    return dead


@pytest.mark.parametrize("path", LINKED_PAGES, ids=page_id)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert dead_links(path) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](page.md) [b](gone.md) [c](#one-two) [d](#three) [e](https://example.org/x)\n"
        "```\n[f](in/code.md)\n```\n[g](../gone/g.md#x)\n",
        encoding="utf-8",
    )
    assert dead_links(page) == ["gone.md", "#three", "../gone/g.md#x"]
