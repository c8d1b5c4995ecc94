"""What others may rely on: the public names, their docstrings, no hidden state; and tidy file names and texts."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import scalewright
import scalewright.observers

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "scalewright").rglob("*.py"))

PUBLIC_NAMES = {
    scalewright: [
        "GPTQModifier",
        "IMatrixGatherer",
        "Observer",
        "QuantizationModifier",
        "Recipe",
        "Result",
        "ScalewrightError",
        "SmoothQuantModifier",
        "__version__",
        "evaluate",
        "observe",
        "oneshot",
    ],
    scalewright.observers: [
        "FUSED_LAYER_NAMES",
        "BalancedMSEObserver",
        "EntropyObserver",
        "HistogramMSEObserver",
        "IMatrixMSEObserver",
        "Knob",
        "MemorylessMSEObserver",
        "MemorylessMinMaxObserver",
        "MinMaxObserver",
        "MovingAverageMSEObserver",
        "NVFP4ExpandedMSEObserver",
        "Observer",
        "OptimalObserver",
        "PercentileObserver",
        "QParamsDict",
        "StaticMinMaxObserver",
        "default_observer",
        "flatten_for_calibration",
        "fuse_weight_observers",
        "make_observer",
        "sync_statistics",
    ],
}

# The registry is the one thing that grows: importing a file with an observer in it registers the class.
STATE_THAT_MAY_CHANGE = {"_names", "_classes"}

MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort", "reverse"),
    *("add", "discard", "update", "setdefault", "appendleft", "popleft", "__setitem__"),
}
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users|tmp|mnt|scratch|data)/\w|\b[A-Z]:\\+Users\b")
VAGUE_NAME = re.compile(r"(^|_)(utils?|helpers?|common|misc)(_|$)")


@pytest.mark.parametrize("module", PUBLIC_NAMES, ids=lambda module: module.__name__)
def test_public_names_are_exactly_these(module: ModuleType) -> None:
    assert sorted(module.__all__) == sorted(PUBLIC_NAMES[module])
    leaked = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in module.__all__
    }
    assert leaked == set()
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


# ---- docstrings ------------------------------------------------------------------------------------------------


def without_docstring(tree: ast.Module) -> list[str]:
    """Public classes, functions and methods that have no docstring; a method marked @override has its parent's."""
    missing = [] if ast.get_docstring(tree) else ["the module"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            is_override = any(ast.unparse(each).endswith("override") for each in node.decorator_list)
            if not ast.get_docstring(node) and not is_override:
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


def test_everything_public_has_a_docstring() -> None:
    missing = {path.name: without_docstring(parse(path)) for path in SOURCES}
    assert {name: names for name, names in missing.items() if names} == {}


def test_a_missing_docstring_is_found() -> None:
    source = (
        "class A:\n  'doc'\n  def f(self): pass\n  @override\n  def g(self): pass\n  def _h(self): pass\ndef k(): 0"
    )
    assert without_docstring(ast.parse(source)) == ["the module", "A.f", "k"]


# ---- no hidden state -------------------------------------------------------------------------------------------


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def shared_containers(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module, or a class in it, binds to a list, dict, set or the like."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from shared_containers(node.body)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rsplit(".", 1)[-1] in MUTABLE_CALLS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def changed_names(tree: ast.Module) -> Iterator[str]:
    """Names of containers that some statement changes in place, and names declared global inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from (f"global {name}" for name in node.names)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield last_name(node.value)
        elif isinstance(node, ast.AugAssign):
            yield last_name(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield last_name(node.func.value)


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def changing_state(trees: list[ast.Module]) -> set[str]:
    shared = {name for tree in trees for name in shared_containers(tree.body)}
    changed = {name for tree in trees for name in changed_names(tree)}
    return (shared & changed) | {name for name in changed if name.startswith("global ")}


def test_nothing_shared_ever_changes_but_the_registry() -> None:
    assert changing_state([parse(path) for path in SOURCES]) <= STATE_THAT_MAY_CHANGE


def test_shared_state_that_changes_is_found() -> None:
    constant = "TABLE = {1: 2}\ndef f():\n  table = {}\n  table[1] = TABLE[1]\n  return table\n"
    assert changing_state([ast.parse(constant)]) == set()
    for change in ("SEEN.append(1)", "SEEN[0] = 1", "del SEEN[0]", "SEEN += [1]", "other.SEEN.clear()"):
        assert changing_state([ast.parse(f"SEEN: list[int] = []\ndef f():\n  {change}\n")]) == {"SEEN"}, change
    in_class = "class A:\n  cache = dict()\n  def f(self):\n    self.cache[1] = 2\n"
    assert changing_state([ast.parse(in_class)]) == {"cache"}
    assert changing_state([ast.parse("n = 0\ndef f():\n  global n\n  n = 1\n")]) == {"global n"}


# ---- files -----------------------------------------------------------------------------------------------------


def project_files() -> list[Path]:
    """The files that are, or are about to be, under version control; without git, all outside hidden folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        inside = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        paths = [ROOT / path for path in inside if not any(p.startswith(".") or p == "__pycache__" for p in path.parts)]
    return sorted(path for path in paths if path.is_file())


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits = (number for number, line in enumerate(text.splitlines(), start=1) if pattern.search(line))
        found += [f"{path.relative_to(ROOT)}:{number}" for number in hits]
    return found


def test_the_project_was_found() -> None:
    assert {ROOT / "README.md", ROOT / "pyproject.toml", *SOURCES, Path(__file__).resolve()} <= set(project_files())


def test_no_file_has_a_name_that_says_nothing() -> None:
    named = [path.relative_to(ROOT) for path in project_files()]
    assert [str(path) for path in named if any(VAGUE_NAME.search(Path(part).stem) for part in path.parts)] == []


def test_nothing_is_marked_as_unfinished() -> None:
    assert lines_matching(UNFINISHED) == []


def test_no_text_holds_a_path_of_one_machine() -> None:
    assert lines_matching(MACHINE_PATH) == []


@pytest.mark.parametrize(
    ("pattern", "caught", "passed"),
    [
        (UNFINISHED, "# TO" + "DO: later", "a TODOS list; hackney; todo"),
        (MACHINE_PATH, 'open("/ho' + 'me/me/x")', "https://example.org/home/x, ../work/x, n /work, docs/data/x"),
        (MACHINE_PATH, "C:\\Us" + "ers\\me", "a:\\n"),
        (VAGUE_NAME, "tensor_utils", "utility"),
        (VAGUE_NAME, "helpers", "commonplace"),
    ],
)
def test_the_patterns_catch_what_they_should(pattern: re.Pattern[str], caught: str, passed: str) -> None:
    assert pattern.search(caught)
    assert not pattern.search(passed)
