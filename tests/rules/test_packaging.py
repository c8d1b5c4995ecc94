"""What is installed and what is run: ranges for users, pins for `make`, and the same commands for people and CI."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scalewright.numerics import native

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [Requirement(text) for some in PROJECT["optional-dependencies"].values() for text in some]
DEPENDENCIES = [
    each
    for each in [*map(Requirement, PROJECT["dependencies"]), *EXTRAS]
    if canonicalize_name(each.name) != canonicalize_name(PROJECT["name"])
]
CONSTRAINTS = [
    line.strip()
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.lstrip().startswith("#")
]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def is_pinned(requirement: Requirement) -> bool:
    return any(each.operator in ("==", "===") for each in requirement.specifier)


def has_upper_bound(requirement: Requirement) -> bool:
    return any(each.operator in ("<", "<=", "~=", "==", "===") for each in requirement.specifier)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_the_loops_are_compiled_where_there_is_a_compiler() -> None:
    """Without them everything works, and their tests skip: a fault that keeps them from being built would not show."""
    assert native._compiled() is not None, "`make setup` has not built them from the sources as they are"


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=str)
def test_a_dependency_is_a_range_and_not_a_pin(requirement: Requirement) -> None:
    assert any(each.operator in (">=", ">", "~=") for each in requirement.specifier), "it has no lower bound"
    assert not is_pinned(requirement)
    assert requirement.url is None


@pytest.mark.parametrize("name", ["torch", "transformers", "compressed-tensors"])
def test_what_vllm_pins_has_no_upper_bound_here(name: str) -> None:
    (requirement,) = (each for each in DEPENDENCIES if canonicalize_name(each.name) == name)
    assert not has_upper_bound(requirement)


def test_pins_and_upper_bounds_are_recognised() -> None:
    assert [is_pinned(Requirement(f"a{text}")) for text in ("==1", "===1", ">=1", ">=1,<2")] == [1, 1, 0, 0]
    assert [has_upper_bound(Requirement(f"a{text}")) for text in ("<2", "~=1.0", ">=1,!=1.5")] == [1, 1, 0]


def test_the_direct_dependencies_are_named() -> None:
    names = {canonicalize_name(each.name) for each in DEPENDENCIES}
    assert names >= {
        *("torch", "compressed-tensors", "transformers", "safetensors", "pydantic"),
        *("pyyaml", "typer", "rich", "greenlet", "datasets"),
    }


def test_python_310_is_enough() -> None:
    assert PROJECT["requires-python"] == ">=3.10"


# ---- constraints -----------------------------------------------------------------------------------------------


def test_every_constraint_is_an_exact_version() -> None:
    form = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_]+( *; *.+)?$")
    assert [line for line in CONSTRAINTS if not form.match(line)] == []


def test_torch_is_pinned_for_every_python() -> None:
    assert [line for line in CONSTRAINTS if line.startswith("torch=")] == ["torch==2.13.0"]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_direct_dependency_is_pinned_once_within_its_range(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pins: dict[str, list[str]] = {}
    for requirement in map(Requirement, CONSTRAINTS):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            pins.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier)[2:])
    for requirement in DEPENDENCIES:
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert len(versions) == 1, f"{requirement.name} has the pins {versions} for Python {python}"
        assert requirement.specifier.contains(versions[0], prereleases=True), f"{requirement}, pinned to {versions[0]}"
    assert [name for name, versions in pins.items() if len(versions) > 1] == []


# ---- make and CI -----------------------------------------------------------------------------------------------


def make_rules(text: str) -> dict[str, tuple[list[str], list[str]]]:
    """Each target's prerequisites and commands, with variables filled in."""
    variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*?) *$", text, re.MULTILINE))
    for _ in variables:  # a variable may be made of others
        text = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
    rules: dict[str, tuple[list[str], list[str]]] = {}
    target = ""
    for line in text.splitlines():
        if line.startswith("\t"):
            rules[target][1].append(line.strip())
        elif rule := re.match(r"([^\s#:=]+) *:(?!=) *([^#]*)", line):
            target = rule[1]
            rules[target] = (rule[2].split(), [])
    return rules


def commands_of(target: str, rules: dict[str, tuple[list[str], list[str]]]) -> list[str]:
    """What `make target` runs, prerequisites first, each once."""
    commands: list[str] = []
    before, own = rules.get(target, ([], []))
    for command in [*(each for name in before for each in commands_of(name, rules)), *own]:
        if command not in commands:
            commands.append(command)
    return commands


MAKE_RULES = make_rules((ROOT / "Makefile").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check .", "mypy", "pytest"])
def test_make_test_runs_every_check_in_our_own_environment(command: str) -> None:
    runs = [each for each in commands_of("test", MAKE_RULES) if re.search(rf"(^|[ /]){re.escape(command)}( |$)", each)]
    assert len(runs) == 1
    assert runs[0].startswith(".venv/bin/")


def test_make_test_does_not_forgive_failures() -> None:
    for command in commands_of("test", MAKE_RULES):
        # Only the making of the environment may ask whether it is there already.
        assert not command.startswith("-"), command
        assert "||" not in command or command.endswith("-m venv .venv"), command
        assert "; true" not in command, command


@pytest.mark.parametrize("target", ["test", "demo", "docs-tables", "setup"])
def test_make_installs_under_the_constraints_first(target: str) -> None:
    commands = commands_of(target, MAKE_RULES)
    installs = [index for index, each in enumerate(commands) if "-c constraints.txt" in each and " -e " in each]
    assert len(installs) == 1
    own = MAKE_RULES[target][1]
    assert all(commands.index(each) > installs[0] for each in own)


def test_make_demo_and_docs_tables_run_files_that_exist() -> None:
    for target in ("demo", "docs-tables"):
        scripts = re.findall(r"\S+\.py\b", " ".join(MAKE_RULES[target][1]))
        assert scripts and all((ROOT / script).is_file() for script in scripts), target


def test_targets_that_are_not_files_are_phony() -> None:
    targets = {name for name in MAKE_RULES if re.fullmatch(r"[\w-]+", name)}
    assert targets <= set(MAKE_RULES[".PHONY"][0])


def test_ci_calls_make_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#!")
    commands = [line.strip() for line in lines[1:] if line.strip() and not line.strip().startswith("#")]
    assert [line for line in commands if not line.startswith("set -")] == ["make test"]
    assert any("e" in line.split()[1] for line in commands if line.startswith("set -")) or commands == ["make test"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
