"""The docs are true: their Python runs, their recipes are read, their commands exist, their links lead somewhere.

What is generated in them is up to date, and the site can be built.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from scalewright import Recipe, ScalewrightError
from scalewright.cli import app
from scalewright.observers import Observer
from scalewright.observers.catalog import registered_observers

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # pages are read from the root of the repository
    monkeypatch.chdir(tmp_path)
    run_page(path.read_text(encoding="utf-8"), str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["examples"], "a page left files behind"


def test_the_pages_that_teach_by_code_have_code() -> None:
    for name in ("README.md", *(f"docs/{each}.md" for each in ("quickstart", "concepts", "observers", "extending"))):
        assert python_blocks((ROOT / name).read_text(encoding="utf-8")), name


def test_blocks_share_a_namespace_and_fail_loudly() -> None:
    page = "# Page\n\n```python\nx = 1\n```\n\n```text\nnot python\n```\n\n```python\nassert x == 1\ny = x\n```\n"
    assert run_page(page, "page.md")["y"] == 1
    with pytest.raises(ZeroDivisionError):
        run_page(page + "```python\nx / 0\n```\n", "page.md")
    for excused in ("```python\n# not run: too slow\nx\n```\n", "```py\nx = 1\n```\n"):
        with pytest.raises(AssertionError):
            run_page(excused, "page.md")


# ---- recipes and commands --------------------------------------------------------------------------------------


def blocks(page: str, *languages: str) -> list[str]:
    return [fence["code"] for fence in FENCE.finditer(page) if fence["language"].strip() in languages]


def check_yaml_blocks(page: str) -> int:
    """Read the recipes of a page, and return how many there are; a task of lm-eval begins with `task:`."""
    recipes = [block for block in blocks(page, "yaml") if not block.startswith("task:")]
    for block in recipes:
        Recipe.of(block)
    return len(recipes)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_yaml_block_is_a_recipe(path: Path) -> None:
    num_recipes = check_yaml_blocks(path.read_text(encoding="utf-8"))
    assert num_recipes > 10 or path.name != "recipes.md"


def test_a_yaml_block_that_is_no_recipe_is_found() -> None:
    for wrong in ("modifiers: {QuantizationModifier: {shceme: W4A16}}", "modifeirs: {}"):
        with pytest.raises(ScalewrightError):
            check_yaml_blocks(f"```yaml\n{wrong}\n```\n")


def command_lines(page: str) -> Iterator[list[str]]:
    """The words of each line of a shell block, brackets left out; one that ends in a backslash goes on in the next."""
    for block in blocks(page, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"[\w./-]+=?", line):
                yield shlex.split(re.sub(r"[\[\]…]", " ", line), comments=True)


def wrong_commands(page: str) -> list[str]:
    """Lines whose scalewright command, make target or script does not exist, or does not take these options."""
    wrong = []
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in command_lines(page):
        if words[0] == "scalewright" or "-m scalewright" in " ".join(words):
            arguments = words[words.index("scalewright") + 1 :]
            if CliRunner().invoke(app, [*arguments, "--help"]).exit_code != 0:  # options are read before help is shown
                wrong.append(" ".join(words))
        elif (words[0] == "make" and words[1:2] and words[1] not in targets) or (
            words[0] == "python" and words[1].endswith(".py") and not (ROOT / words[1]).is_file()
        ):
            wrong.append(" ".join(words))
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_command_exists_and_takes_its_options(path: Path) -> None:
    assert wrong_commands(path.read_text(encoding="utf-8")) == []


def test_a_wrong_command_is_found() -> None:
    page = (
        "```sh\nscalewright quantize M --sheme W4A16\nscalewright quantise M\nmake dmeo\npython examples/gone.py\n"
        "scalewright plan M \\\n  --scheme W4A16  # good\nmake demo\npython -m scalewright plan M --shceme W4A16\n```\n"
    )
    wrong = wrong_commands(page)
    assert [line.split()[:2] for line in wrong[:4]] == [
        *(["scalewright", "quantize"], ["scalewright", "quantise"], ["make", "dmeo"], ["python", "examples/gone.py"])
    ]
    assert len(wrong) == 5


def test_the_quickstart_works_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    typed = [words for words in command_lines(page) if words[0] != "make"]
    assert [words[:2] for words in typed[:4]] == [
        *(["python", "examples/python_text.py"], ["python", "examples/python_text.py"]),
        *(["scalewright", "plan"], ["scalewright", "quantize"]),
    ]
    for words in typed:
        if words[0] == "python":
            text = subprocess.run([sys.executable, *words[1 : words.index(">")]], capture_output=True, check=True)
            (tmp_path / words[words.index(">") + 1]).write_bytes(text.stdout)
        else:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, words
            assert not re.search("^note ", result.output, re.MULTILINE), f"{words}: a newcomer is told off"
    for folder in ("OUT", "BEST"):
        assert (tmp_path / folder / "model.safetensors").is_file()


# ---- what is generated -----------------------------------------------------------------------------------------


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", tool("write_docs_tables").PAGES)
def test_a_generated_table_is_true(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    generated = page.split("<!-- begin: generated -->")[1].split("<!-- end: generated -->")[0]
    assert generated.strip() == tool("write_docs_tables").PAGES[name]().strip(), "run `make docs-tables`"


@pytest.mark.parametrize("name", tool("draw_pictures").PICTURES)
def test_a_picture_is_up_to_date(name: str) -> None:
    drawn = str(tool("draw_pictures").PICTURES[name]())
    assert drawn == (ROOT / "docs" / name).read_text(encoding="utf-8"), "run `make docs-tables`"
    assert re.search(rf"\({name}\)|/{name}\)", "".join(page.read_text(encoding="utf-8") for page in PAGES)), "not shown"


def test_the_site_can_be_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "CONTRIBUTING.html", "examples/one_call.py.html"):
        assert (tmp_path / "site" / page).is_file()
    home = (tmp_path / "site" / "examples.html").read_text(encoding="utf-8")
    assert 'href="examples/one_call.py.html"' in home
    fetched = re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]+)"', home)
    assert fetched == []  # it works without a network


def test_links_that_leave_the_docs_become_links_into_the_site() -> None:
    turned = tool("docs_site").links_into_the_site
    assert turned("[a](../examples/demo.py) [b](../CHANGELOG.md#x)") == "[a](examples/demo.py.md) [b](CHANGELOG.md#x)"
    assert turned("[a](../gone.md) [b](recipes.md)") == "[a](../gone.md) [b](recipes.md)"


def test_how_fast_the_readme_says_the_best_scale_is_found_was_measured() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "search.json").read_text(encoding="utf-8"))["rows"]
    ratios, above = [], []
    for row in rows:
        if row["case"] in ("optimal int4", "optimal int4, norm 2") and row["group_size"] == 128:
            ours, peers = row["ours"], row["peer"]["seconds"]
            ratios += [peers[threads] / seconds for threads, seconds in ours["seconds"].items()]
            above += [ours["above_optimum"] or 0]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times as fast" in page
    assert "within .1 % of the exact optimum at int4" in page and max(above) <= 0.001


def test_only_the_generated_part_is_rewritten() -> None:
    with_generated_part = tool("write_docs_tables").with_generated_part
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
