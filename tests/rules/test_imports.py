"""Imports inside the package go one way, without cycles, and `import scalewright` stays light.

The files are read, not run: an import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "scalewright"
DOCS = PACKAGE.parents[1] / "docs"

# A part may import those before it, never those after it. The package's own __init__ may import all of them.
ORDER = (
    "errors",
    "numerics",
    "observers",
    "modifiers",
    "calibration",
    "checkpoint",
    "recipe",
    "quality",
    "evaluation",
    "preparing",
    "observing",
    "report",
    "importance",
    "sensitivity",
    "budget",
    "oneshot",
    "costs",
    "planning",
    "cli",
    "__main__",
)
HEAVY = ("datasets", "typer", "rich", "plotly", "pandas", "matplotlib")
NOT_FOR_NUMERICS = {"io", "logging", "loguru", "os", "pathlib", "shutil", "sys", "tempfile", "warnings"}


@dataclass(frozen=True)
class Import:
    """One module that a file imports; `for_types` if only type checkers see it."""

    file: str
    line: int
    module: str
    for_types: bool


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(package: Path) -> list[Import]:
    """Every import in every file of the package; `from a import b` is a.b where that is a module, else a."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    found = []
    for name, path in files.items():
        for node, for_types in statements(ast.parse(path.read_text(encoding="utf-8")).body, for_types=False):
            modules = imported_modules(node, name, is_package=path.stem == "__init__", files=set(files))
            found += [Import(name, node.lineno, module, for_types) for module in modules]
    return found


def statements(body: list[ast.stmt], *, for_types: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements, nested ones too, and whether they stand under `if TYPE_CHECKING:`."""
    for node in body:
        yield node, for_types
        is_guard = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        yield from statements(getattr(node, "body", []), for_types=for_types or is_guard)
        for other in ("orelse", "finalbody"):
            yield from statements(getattr(node, other, []), for_types=for_types)
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from statements(part.body, for_types=for_types)


def imported_modules(node: ast.stmt, importer: str, *, is_package: bool, files: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = importer.split(".") if is_package else importer.split(".")[:-1]
        base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names]


def part_of(module: str, root: str) -> str | None:
    """The part of the package that a module belongs to; "" for the package's own __init__, None for outsiders."""
    names = module.split(".")
    if names[0] != root:
        return None
    return names[1] if len(names) > 1 else ""


def wrong_ways(package: Path) -> list[str]:
    """Imports of a part that comes later, of the package itself, and parts that have no place in the order."""
    wrong = []
    for each in imports_of(package):
        importer, imported = part_of(each.file, package.name), part_of(each.module, package.name)
        if imported is None or not importer or importer == imported:
            continue
        at = f"{each.file}:{each.line}"
        if unplaced := [part for part in (importer, imported) if part and part not in ORDER]:
            wrong.append(f"{at}: {unplaced[0]} has no place in the order")
        elif not imported:
            wrong.append(f"{at}: imports the whole package, which imports it")
        elif ORDER.index(imported) > ORDER.index(importer):
            wrong.append(f"{at}: {importer} comes before {imported}, and imports it")
    return wrong


def cycle(package: Path) -> list[str]:
    """Files that import each other in a ring when they run; empty when there is none."""
    edges: dict[str, set[str]] = {}
    for each in imports_of(package):
        if not each.for_types and part_of(each.module, package.name) is not None:
            edges.setdefault(each.file, set()).add(each.module)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for following in sorted(edges.get(module, ())):
            if ring := walk(following, [*path, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(edges) if (ring := walk(module, []))), [])


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "scalewright" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "scalewright"


def test_parts_import_only_what_comes_before_them() -> None:
    assert wrong_ways(PACKAGE) == []


def test_every_part_of_the_package_has_a_place_in_the_order() -> None:
    parts = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert parts - {"__init__", "__pycache__"} <= set(ORDER)


def test_the_docs_name_every_part_in_this_order() -> None:
    """`__main__` is the command line once more."""
    tree = (DOCS / "design.md").read_text(encoding="utf-8").split("```")[1]
    table = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE))
    assert re.findall(r"^  (\w+)(?:\.py|/)", tree, re.MULTILINE) == list(ORDER[:-1])
    assert re.findall(r"`(\w+)(?:\.py|/)`", rows) == list(ORDER[:-1])


def test_the_design_names_every_file() -> None:
    """Commands are named as one: each has a file."""
    named, part = set(), ""
    for line in (DOCS / "design.md").read_text(encoding="utf-8").split("```")[1].splitlines()[2:]:
        if line.startswith("  ") and line[2] != " ":
            part = line[2:].split("/")[0] if "/" in line.split()[0] else ""
        named |= {f"{part}/{name}".lstrip("/") for name in re.findall(r"\w+\.(?:py|cpp|h|html|css|js)\b", line)}
    suffixes = (".py", ".cpp", ".h", ".html", ".css", ".js")
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.suffix in suffixes}
    commands = {
        "__main__.py",
        *(f"cli/{path.name}" for path in PACKAGE.glob("cli/*.py") if "@app.command" in path.read_text("utf-8")),
    }
    files = {file for file in files if not file.endswith("__init__.py")} - commands
    assert (files - named, named - files) == (set(), {"report/plotly.js"})  # which plotly brings along


def test_no_files_import_each_other_in_a_ring() -> None:
    assert cycle(PACKAGE) == []


def test_imports_were_found_at_all() -> None:
    known = {(each.file, each.module) for each in imports_of(PACKAGE)}
    assert ("scalewright.observers.base", "scalewright.numerics.layout") in known
    assert ("scalewright", "scalewright.observers") in known


def test_numerics_has_no_files_and_no_logging() -> None:
    used = {each.module.split(".")[0] for each in imports_of(PACKAGE) if part_of(each.file, PACKAGE.name) == "numerics"}
    assert "torch" in used
    assert not used & NOT_FOR_NUMERICS


def test_an_import_of_a_later_part_is_found_wherever_it_hides(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "__init__.py": "from scalewright.observers import base\n",
            "errors.py": "",
            "numerics/__init__.py": "",
            "numerics/grids.py": "def late():\n    from ..observers import base\n",
            "observers/__init__.py": "",
            "observers/base.py": "from scalewright import errors\nfrom scalewright.numerics.grids import late\n",
            "recipe.py": "import scalewright\ntry:\n    import scalewright.cli\nexcept ImportError:\n    pass\n",
            "cli.py": "",
            "shed.py": "import scalewright.errors\n",
        },
    )
    assert wrong_ways(package) == [
        "scalewright.numerics.grids:2: numerics comes before observers, and imports it",
        "scalewright.recipe:1: imports the whole package, which imports it",
        "scalewright.recipe:3: recipe comes before cli, and imports it",
        "scalewright.shed:1: shed has no place in the order",
    ]


def test_a_ring_is_found_unless_it_is_for_types_only(tmp_path: Path) -> None:
    ring = {"observers/a.py": "from . import b\n", "observers/b.py": "def f():\n    from .a import x\n"}
    package = write_package(tmp_path / "ring", ring)
    assert cycle(package) == ["scalewright.observers.a", "scalewright.observers.b", "scalewright.observers.a"]
    ring["observers/b.py"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"
    assert cycle(write_package(tmp_path / "types", ring)) == []


def test_importing_the_package_brings_in_nothing_heavy() -> None:
    program = f"import sys, scalewright; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_command_line_is_there_before_torch() -> None:
    """`--help` comes at once, and whoever stops a command while torch is imported sees no traceback."""
    program = "import sys, scalewright.cli; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_public_name_means_the_same_whichever_module_comes_first() -> None:
    program = """
import scalewright.oneshot, scalewright.observing
from scalewright import oneshot, observe
from scalewright.oneshot import oneshot as first
assert oneshot is first is scalewright.oneshot and callable(observe)
assert set(scalewright.__all__) <= set(dir(scalewright))
try:
    scalewright.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "module 'scalewright' has no attribute 'nothing'"), done.stderr
