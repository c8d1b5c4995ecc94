"""Recipes: YAML, JSON, dicts or objects become stages of modifiers; nothing that is not understood is passed over.

A recipe in full:

    first_stage:
      first_modifiers:
        QuantizationModifier: {scheme: W4A16, ignore: [lm_head]}

Shorter ones leave the stage out (`modifiers: {...}`), or name a modifier straight away. Where a class is needed more
than once, its entry, or all of `modifiers`, is a list. Stages run one after the other; the modifiers of a stage share
its passes over the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scalewright.errors import RecipeError, did_you_mean
from scalewright.modifiers import Modifier

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Stage:
    """Modifiers that are applied together."""

    name: str
    modifiers: tuple[Modifier, ...]


@dataclass(frozen=True)
class Recipe:
    """What is to be done to a model, in order."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, given: Any) -> Recipe:
        """A recipe from a file, YAML or JSON text, a dict, a modifier, a recipe, or a list of any of these."""
        if isinstance(given, Recipe):
            return given
        if isinstance(given, Modifier):
            return cls((Stage("default", (given,)),))
        if isinstance(given, Sequence) and not isinstance(given, str):
            parts = [cls.of(each) for each in given]
            if not parts:
                raise RecipeError("the recipe is empty.")
            if all(isinstance(each, Modifier) for each in given):
                return cls((Stage("default", tuple(given)),))
            return cls(_distinctly_named([stage for part in parts for stage in part.stages]))
        if isinstance(given, Mapping):
            return _parse(given, _Source("recipe", {}))
        if isinstance(given, Path) or (isinstance(given, str) and _is_path(given)):
            path = Path(given)
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise RecipeError(f"{path}: cannot be read ({error.strerror or error}).") from None
            return _parse(*_load(text, path.name))
        if isinstance(given, str):
            return _parse(*_load(given, "recipe"))
        raise RecipeError(f"a recipe is a file, text, a dict or modifiers, got {type(given).__name__}.")

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The modifiers of all stages."""
        return tuple(each for stage in self.stages for each in stage.modifiers)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, which `Recipe.of` reads back to the same thing."""
        return {
            f"{stage.name}_stage": {
                f"{stage.name}_modifiers": [{type(each).__name__: each.given} for each in stage.modifiers]
            }
            for stage in self.stages
        }

    def to_yaml(self) -> str:
        """The same as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


# ---- reading text ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where a recipe came from, and the line of each of its entries."""

    name: str
    lines: Mapping[Key, int]

    def error(self, message: str, key: Key = ()) -> RecipeError:
        """An error that says where: the line of the entry, or of the nearest one above it."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.lines:
                return RecipeError(f"{self.name}:{self.lines[key[:end]]}: {message}", key=key)
        return RecipeError(f"{self.name}: {message}", key=key)


def _load(text: str, name: str) -> tuple[Any, _Source]:
    lines: dict[Key, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = None if node is None else _plain(node, (), lines, name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise RecipeError(f"{where}: neither YAML nor JSON: {getattr(error, 'problem', None) or error}.") from None
    return data, _Source(name, lines)


def _plain(node: yaml.Node, key: Key, lines: dict[Key, int], name: str) -> Any:
    lines[key] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            entry = str(key_node.value)
            if entry in found:
                raise RecipeError(
                    f"{name}:{key_node.start_mark.line + 1}: '{entry}' is there twice, first in line "
                    f"{lines[(*key, entry)]}. Make its entry a list to have both.",
                    key=(*key, entry),
                )
            found[entry] = _plain(value_node, (*key, entry), lines, name)
            lines[(*key, entry)] = key_node.start_mark.line + 1
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(each, (*key, i), lines, name) for i, each in enumerate(node.value)]
    return yaml.SafeLoader("").construct_object(node)  # type: ignore[no-untyped-call]


def _is_path(text: str) -> bool:
    if "\n" in text or text.lstrip().startswith("{"):
        return False
    return Path(text).suffix.lower() in (".yaml", ".yml", ".json") or Path(text).is_file()


# ---- meaning ---------------------------------------------------------------------------------------------------------


def _parse(data: Any, source: _Source) -> Recipe:
    if not data:
        raise source.error("the recipe is empty.")
    if isinstance(data, list):
        return Recipe((Stage("default", tuple(_modifiers(data, (), source))),))
    if not isinstance(data, Mapping):
        raise source.error(f"a recipe is a mapping such as {{modifiers: ...}}, got {data!r}.")
    stages: list[Stage] = []
    loose: list[Modifier] = []
    for entry, value in data.items():
        if entry.endswith("_stage"):
            stages.append(Stage(entry.removesuffix("_stage"), tuple(_stage(value, (entry,), source))))
        elif entry == "modifiers" or entry.endswith("_modifiers"):
            loose += _modifiers(value, (entry,), source)
        elif entry.endswith("Modifier"):
            loose += _modifiers({entry: value}, (), source)
        else:
            known = ["modifiers", "<name>_stage"]
            raise source.error(
                f"a recipe has no '{entry}'.{did_you_mean(entry, ['modifiers', 'default_stage'])} "
                f"It has: {', '.join(known)}.",
                (entry,),
            )
    if loose:
        stages.insert(0, Stage("default", tuple(loose)))
    if not any(stage.modifiers for stage in stages):
        raise source.error("there is no modifier in the recipe.")
    return Recipe(_distinctly_named(stages))


def _stage(value: Any, key: Key, source: _Source) -> Iterator[Modifier]:
    if not isinstance(value, Mapping) or not value:
        raise source.error("a stage is {<name>_modifiers: {...}}.", key)
    for entry, modifiers in value.items():
        if entry == "modifiers" or entry.endswith("_modifiers"):
            yield from _modifiers(modifiers, (*key, entry), source)
        elif entry.endswith("Modifier"):
            yield from _modifiers({entry: modifiers}, key, source)
        else:
            raise source.error(
                f"a stage has no '{entry}'. It has entries that end in '_modifiers', with the modifiers in them.",
                (*key, entry),
            )


def _modifiers(value: Any, key: Key, source: _Source) -> list[Modifier]:
    found: list[Modifier] = []
    if isinstance(value, Modifier):
        return [value]
    if isinstance(value, list):
        for i, each in enumerate(value):
            found += _modifiers(each, (*key, i), source)
    elif isinstance(value, Mapping) and value:
        for name, given in value.items():
            several = given if isinstance(given, list) else [given]
            for i, each in enumerate(several):
                at = (*key, name, i) if isinstance(given, list) else (*key, name)
                found.append(_modifier(name, each, at, source))
    if not found:
        raise source.error("expected modifiers, such as {QuantizationModifier: {scheme: W4A16}}.", key)
    return found


def _modifier(name: str, given: Any, key: Key, source: _Source) -> Modifier:
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise source.error(f"{name} takes {{keyword: value}}, got {given!r}.", key)
    try:
        return Modifier.class_named(name)(**given)
    except RecipeError as error:
        raise source.error(str(error), (*key, *error.key)) from None


def _distinctly_named(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same stages; those whose name is taken already get a number."""
    taken: set[str] = set()
    named = []
    for stage in stages:
        name, number = stage.name, 2
        while name in taken:
            name, number = f"{stage.name}_{number}", number + 1
        taken.add(name)
        named.append(Stage(name, stage.modifiers))
    return tuple(named)


def to_json(recipe: Recipe) -> str:
    """The recipe as JSON."""
    return json.dumps(recipe.to_dict(), indent=2)
