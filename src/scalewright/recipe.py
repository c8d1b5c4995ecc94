"""Recipes: YAML, JSON, dicts or objects become stages of modifiers; nothing that is not understood is passed over.

A recipe in full:

    first_stage:
      first_modifiers:
        QuantizationModifier: {scheme: W4A16, ignore: [lm_head]}

Shorter ones leave the stage out (`modifiers: {...}`), or name a modifier straight away. Where a class is needed more
than once, its entry, or all of `modifiers`, is a list. Stages run one after the other; the modifiers of a stage share
its passes over the data. A list of recipes is one recipe; modifiers that stand side by side in it share a stage.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from scalewright.errors import RecipeError, did_you_mean
from scalewright.modifiers import Modifier
from scalewright.modifiers.base import as_plain_data

Key = tuple[str | int, ...]
_MOST_ENTRIES = 100_000
_EXAMPLE = "{QuantizationModifier: {scheme: W4A16}}"


@dataclass(frozen=True)
class Stage:
    """Modifiers that are applied together."""

    name: str
    modifiers: tuple[Modifier, ...]


@dataclass(frozen=True)
class Recipe:
    """What is to be done to a model, in order. No two stages have the same name."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.modifiers:
            raise RecipeError("there is no modifier in the recipe.")
        name, count = Counter(stage.name for stage in self.stages).most_common(1)[0]
        if count > 1:
            raise RecipeError(f"{count} stages of the recipe are called '{name}'. Give each a name of its own.")

    @classmethod
    def of(cls, given: Any) -> Recipe:
        """A recipe from a file, YAML or JSON text, a dict, a modifier, a recipe, or a list of any of these."""
        return cls(_distinctly_named(_read(given, "recipe")))

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The modifiers of all stages."""
        return tuple(each for stage in self.stages for each in stage.modifiers)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, which `Recipe.of` reads back to the same thing."""
        return {
            f"{stage.name}_stage": {
                f"{stage.name}_modifiers": [
                    {type(each).__name__: as_plain_data(each.given)} for each in stage.modifiers
                ]
            }
            for stage in self.stages
        }

    def to_yaml(self) -> str:
        """The same as YAML."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False)

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def _read(given: Any, name: str) -> Iterable[Stage]:
    """The stages of whatever a recipe may be; error texts call it `name`."""
    if isinstance(given, Recipe):
        return given.stages
    if isinstance(given, Modifier):
        return [Stage("default", (given,))]
    if isinstance(given, Mapping):
        return _gathered(_parts(given, (), _Source(name, {})))
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_path(given)):
        path = Path(given)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise RecipeError(
                f"{path}: cannot be read ({error.strerror or error}). Give the path of a recipe."
            ) from None
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: is not text in UTF-8. Give a recipe in YAML or JSON.") from None
        return _stages_of_text(text, path.name)
    if isinstance(given, str):
        return _stages_of_text(given, name)
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        return _gathered(_parts_of_list(given, name))
    raise RecipeError(f"{name}: expected a file, text, a dict, modifiers or a list of them, got {_shown(given)}.")


def _parts_of_list(given: Sequence[Any], name: str) -> Iterator[Modifier | Stage]:
    if not given:
        raise _Source(name, {}).nothing()
    for i, each in enumerate(given):
        if isinstance(each, Modifier):
            yield each
        elif isinstance(each, Mapping):
            yield from _parts_of_item(each, (), _Source(f"{name}[{i}]", {}))
        else:
            yield from _read(each, f"{name}[{i}]")


def _gathered(parts: Iterable[Modifier | Stage]) -> Iterator[Stage]:
    """The stages; modifiers outside of them that follow each other share one."""
    for is_loose, some in groupby(parts, lambda part: isinstance(part, Modifier)):
        if is_loose:
            yield Stage("default", tuple(each for each in some if isinstance(each, Modifier)))
        else:
            yield from (each for each in some if isinstance(each, Stage))


def _distinctly_named(stages: Iterable[Stage]) -> tuple[Stage, ...]:
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


# ---- text ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as it is in JSON."""


class _Dumper(yaml.SafeDumper):
    """Its counterpart, which writes out what stands there twice."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


@dataclass(frozen=True)
class _Source:
    """Where a recipe came from, and the line of each of its entries, if it has lines."""

    name: str
    lines: Mapping[Key, int]

    def error(self, message: str, key: Key = (), *, inner: Key = ()) -> RecipeError:
        """An error that says where: the line of the entry or of the nearest one above it; without lines, the way to it.

        `inner` is the rest of the way, where the message tells it already.
        """
        if not self.lines:
            way = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in key)
            return RecipeError(f"{self.name}{way}: {message}", key=(*key, *inner))
        key = (*key, *inner)
        line = next(self.lines[key[:end]] for end in range(len(key), -1, -1) if key[:end] in self.lines)
        return RecipeError(f"{self.name}:{line}: {message}", key=key)

    def nothing(self, key: Key = ()) -> RecipeError:
        """An error for an empty recipe."""
        return self.error(f"there is nothing in it. Name a modifier, such as {_EXAMPLE}.", key)


def _is_path(text: str) -> bool:
    if "\n" in text or text.lstrip()[:1] in ("{", "["):
        return False
    return Path(text).suffix.lower() in (".yaml", ".yml", ".json") or os.path.isfile(text)


def _stages_of_text(text: str, name: str) -> Iterable[Stage]:
    if text.lstrip()[:1] in ("{", "["):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not
    reading = _Reading(name, {})
    try:
        node = yaml.compose(text, Loader=_Loader)
        data = None if node is None else reading.plain(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        advice = " Indent with spaces." if "'\\t'" in problem else ""
        raise RecipeError(f"{where}: neither YAML nor JSON: {problem}.{advice}") from None
    except RecursionError:
        raise RecipeError(f"{name}: entries stand inside of each other, too deep for a recipe.") from None
    return _gathered(_parts(data, (), _Source(name, reading.lines)))


@dataclass(frozen=True)
class _Reading:
    """Turns YAML's nodes into plain data, and notes the line of each entry."""

    name: str
    lines: dict[Key, int]

    def plain(self, node: yaml.Node, key: Key, above: tuple[yaml.Node, ...] = ()) -> Any:
        """What a node, which stands under `key`, stands for."""
        self.lines[key] = self._line(node)
        if node in above:
            raise self._error(node, "an anchor stands inside of itself.", key)
        if len(self.lines) > _MOST_ENTRIES:
            raise self._error(node, f"the recipe has more than {_MOST_ENTRIES} entries.", key)
        if isinstance(node, yaml.ScalarNode):
            try:
                return _Loader("").construct_object(node)
            except ValueError as error:
                raise self._error(node, f"'{node.value}' cannot be read: {error}.", key) from None
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise self._error(node, f"the tag {node.tag} has no place in a recipe.", key)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, (*above, node))
        return [self.plain(each, (*key, i), (*above, node)) for i, each in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, key: Key, above: tuple[yaml.Node, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "the name of an entry must be plain text.", key)
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise self._error(key_node, "'<<' has no place in a recipe. Write its entries out.", key)
            entry = str(key_node.value)
            at = (*key, entry)
            if entry in found:
                raise self._error(
                    key_node,
                    f"'{entry}' is there twice, first in line {self.lines[at]}. Make its entry a list to have both.",
                    at,
                )
            found[entry] = self.plain(value_node, at, above)
            self.lines[at] = self._line(key_node)
        return found

    def _error(self, node: yaml.Node, message: str, key: Key) -> RecipeError:
        return RecipeError(f"{self.name}:{self._line(node)}: {message}", key=key)

    @staticmethod
    def _line(node: yaml.Node) -> int:
        return int(node.start_mark.line) + 1


# ---- meaning ---------------------------------------------------------------------------------------------------------


def _parts(data: Any, key: Key, source: _Source) -> Iterator[Modifier | Stage]:
    """The stages, and modifiers outside of stages, of a recipe that is plain data, but for modifiers in it."""
    if data is None or data in ({}, []):
        raise source.nothing(key)
    if isinstance(data, list):
        for i, each in enumerate(data):
            yield from _parts_of_item(each, (*key, i), source)
        return
    if not isinstance(data, Mapping):
        raise source.error(
            f"expected {{modifiers: {_EXAMPLE}}}, or the name of a file that exists, got {_shown(data)}.", key
        )
    for entry, value in _entries(data, key, source):
        at = (*key, entry)
        if entry.endswith("_stage"):
            name = entry.removesuffix("_stage")
            yield Stage(name, tuple(_stage(value, at, source, name)))
        elif _holds_modifiers(entry):
            yield from _modifiers(value, at, source)
        elif _is_modifier(entry):
            yield from _modifiers({entry: value}, key, source)
        else:
            known = ["modifiers", f"{entry.rpartition('_')[0] or 'default'}_stage", *Modifier.classes()]
            raise source.error(
                f"a recipe has no '{entry}'.{did_you_mean(entry, known)} It has: modifiers, <name>_stage."
                f"{_hint(entry)}",
                at,
            )


def _parts_of_item(data: Any, key: Key, source: _Source) -> Iterable[Modifier | Stage]:
    """Of a recipe in a list: `{Class: ...}` may share a stage with its neighbours, anything longer has its own."""
    parts = _parts(data, key, source)
    is_short = isinstance(data, Mapping) and all(_is_modifier(str(entry)) for entry in data)
    return parts if is_short else _gathered(parts)


def _stage(value: Any, key: Key, source: _Source, name: str) -> Iterator[Modifier]:
    if not isinstance(value, Mapping) or not value:
        raise source.error(f"a stage is {{{name}_modifiers: {_EXAMPLE}}}, got {_shown(value)}.", key)
    for entry, modifiers in _entries(value, key, source):
        if _holds_modifiers(entry):
            yield from _modifiers(modifiers, (*key, entry), source)
        elif _is_modifier(entry):
            yield from _modifiers({entry: modifiers}, key, source)
        else:
            known = [f"{name}_modifiers", "modifiers", *Modifier.classes()]
            raise source.error(
                f"a stage has no '{entry}'.{did_you_mean(entry, known)} It has: {name}_modifiers.{_hint(entry)}",
                (*key, entry),
            )


def _modifiers(value: Any, key: Key, source: _Source) -> list[Modifier]:
    """The modifiers of `{Class: {...}}`, of `{Class: [{...}, ...]}`, or of a list of such."""
    if isinstance(value, Modifier):
        return [value]
    if isinstance(value, list | tuple) and value:
        return [found for i, each in enumerate(value) for found in _modifiers(each, (*key, i), source)]
    if not isinstance(value, Mapping) or not value:
        raise source.error(f"expected modifiers, such as {_EXAMPLE}, got {_shown(value)}.", key)
    found: list[Modifier] = []
    for name, given in _entries(value, key, source):
        at = (*key, name)
        try:
            made = Modifier.class_named(name)
        except RecipeError as error:
            raise source.error(f"{error}{_hint(name)}", at) from None
        if isinstance(given, list | tuple):
            if not given:
                raise source.error(f"there is no {name} in the list.", at)
            found += [_modifier(made, each, (*at, i), source) for i, each in enumerate(given)]
        else:
            found.append(_modifier(made, given, at, source))
    return found


def _modifier(made: type[Modifier], given: Any, key: Key, source: _Source) -> Modifier:
    if given is not None and not isinstance(given, Mapping):
        raise source.error(f"{made.__name__} takes {{keyword: value}}, got {_shown(given)}.", key)
    keywords = dict(_entries(given or {}, key, source))
    try:
        return made(**keywords)
    except RecipeError as error:
        raise source.error(str(error), key, inner=error.key) from None


def _entries(mapping: Mapping[Any, Any], key: Key, source: _Source) -> Iterator[tuple[str, Any]]:
    for entry, value in mapping.items():
        if not isinstance(entry, str):
            raise source.error(f"{entry!r} is no name. Use text for the names of entries.", key)
        yield entry, value


def _holds_modifiers(entry: str) -> bool:
    return entry == "modifiers" or entry.endswith("_modifiers")


def _is_modifier(entry: str) -> bool:
    return entry.endswith("Modifier") or entry in Modifier.classes()


def _hint(entry: str) -> str:
    """Where an entry that is in the wrong place belongs."""
    owner = next((name for name, made in Modifier.classes().items() if entry in made.fields), None)
    return "" if owner is None else f" '{entry}' belongs to a modifier: {{{owner}: {{{entry}: ...}}}}."


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, not one that was made of it"
    if value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping):
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
    return f"{type(value).__name__}"
