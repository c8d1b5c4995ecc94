"""QuantizationModifier: which layers get which scheme, and which observers look for their scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import ValidationError

from scalewright.errors import KnobError, RecipeError, ScalewrightError, UnknownObserverError, did_you_mean
from scalewright.modifiers.base import Modifier
from scalewright.modifiers.schemes import scheme_named, wants_values
from scalewright.observers import Observer, make_observer
from scalewright.observers.importance import ImportanceObserver

_PARTS = ("weights", "input_activations", "output_activations")
_BASE_NAMES = {"weights": "weight", "input_activations": "input", "output_activations": "output"}


@dataclass(frozen=True)
class Group:
    """Some targets that share a scheme, whose arguments name the observers (or none, for the defaults)."""

    name: str
    scheme: QuantizationScheme

    @property
    def targets(self) -> list[str]:
        return list(self.scheme.targets)


class QuantizationModifier(Modifier):
    """Quantise weights, activations and the kv cache of the modules that `targets` name.

    What to quantise to is said by one of: `scheme`, `config_groups`, or `weights` and activations directly.
    """

    fields: ClassVar[Mapping[str, str]] = {
        "targets": "class names, module names, wildcards or re: patterns of the modules to quantise (Linear)",
        "ignore": "the same, of modules to leave as they are",
        "scheme": "the name of a scheme, or {name: [targets]}",
        "group_size": "elements that share a scale, instead of the scheme's own number",
        "config_groups": "{name: {targets, weights, input_activations, output_activations}}",
        "weights": "arguments of the weights' format: num_bits, type, strategy, group_size, symmetric, observer, ...",
        "input_activations": "the same of inputs",
        "output_activations": "the same of outputs",
        "kv_cache_scheme": "the same of keys and values",
        "weight_observer": "the observer of weights: its name, or {name, knob, ...}",
        "activation_observer": "the observer of static activations, and of keys and values",
    }

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.ignore = _names(self.given.get("ignore", []), "ignore")
        self.groups = tuple(self._groups())
        kv_cache = self.given.get("kv_cache_scheme")
        self.kv_cache = None if kv_cache is None else self._args_of(kv_cache, "kv_cache_scheme", "k")
        if self.kv_cache is not None and not wants_values(self.kv_cache):
            raise RecipeError("a kv cache has static scales: set dynamic to false.", key=("kv_cache_scheme", "dynamic"))
        if not self.groups and self.kv_cache is None:
            raise RecipeError(
                f"{type(self).__name__} does not say what to quantise to. Give scheme, config_groups, weights, "
                "input_activations or kv_cache_scheme."
            )

    # ---- what is asked for -----------------------------------------------------------------------------------------

    @property
    def data(self) -> Literal["needed", "useful", "none"]:
        """Whether calibration data is needed, makes for better scales, or has nothing to say."""
        parts = [
            args for group in self.groups for args in (group.scheme.input_activations, group.scheme.output_activations)
        ]
        if self.kv_cache is not None or any(wants_values(args) for args in parts):
            return "needed"
        weights = [group.scheme.weights for group in self.groups if group.scheme.weights is not None]
        observers = [make_observer("weight", args) for args in weights]
        are_weighted = any(isinstance(each, ImportanceObserver) and each.wants_inputs for each in observers)
        return "useful" if are_weighted else "none"

    def _groups(self) -> Iterable[Group]:
        ways = [name for name in ("scheme", "config_groups") if name in self.given]
        direct = [name for name in _PARTS if name in self.given]
        if len(ways) + bool(direct) > 1:
            names = [*ways, *direct[:1]]
            raise RecipeError(
                f"{' and '.join(names)} both say what to quantise to. Keep one of them.", key=(names[-1],)
            )
        if "scheme" in self.given:
            schemes = self._schemes_by_name()
        elif "config_groups" in self.given:
            schemes = self._schemes_of_groups()
        elif direct:
            parts = {name: self._args_of(self.given[name], name, _BASE_NAMES[name]) for name in direct}
            schemes = {"group_0": _scheme(self._targets(), parts)}
        else:
            schemes = {}
        for name, scheme in schemes.items():
            yield Group(name, self._with_group_size(self._with_observers(scheme)))

    def _targets(self) -> list[str]:
        return _names(self.given.get("targets", ["Linear"]), "targets")

    def _schemes_by_name(self) -> dict[str, QuantizationScheme]:
        scheme = self.given["scheme"]
        if isinstance(scheme, str):
            named = {scheme: self._targets()}
        elif isinstance(scheme, Mapping):
            if "targets" in self.given:
                raise RecipeError("the scheme names its targets already.", key=("targets",))
            named = {name: _names(targets, "scheme", name) for name, targets in scheme.items()}
        else:
            raise RecipeError(f"a scheme is a name or {{name: [targets]}}, got {scheme!r}.", key=("scheme",))
        if not named:
            raise RecipeError("there is no scheme in it.", key=("scheme",))
        schemes = {}
        for i, (name, targets) in enumerate(named.items()):
            try:
                schemes[f"group_{i}"] = scheme_named(name, targets)
            except RecipeError as error:
                raise error.within("scheme", *([name] if isinstance(scheme, Mapping) else [])) from None
        return schemes

    def _schemes_of_groups(self) -> dict[str, QuantizationScheme]:
        groups = self.given["config_groups"]
        if not isinstance(groups, Mapping) or not groups:
            raise RecipeError("config_groups is {name: {targets, weights, ...}}.", key=("config_groups",))
        if "targets" in self.given:
            raise RecipeError("each of the config_groups names its own targets.", key=("targets",))
        return {name: self._scheme_of(name, group) for name, group in groups.items()}

    def _scheme_of(self, name: str, group: Any) -> QuantizationScheme:
        if isinstance(group, list):  # {W4A16: [targets]}
            try:
                return scheme_named(name, _names(group, "config_groups", name))
            except RecipeError as error:
                raise error if error.key else error.within("config_groups", name) from None
        if not isinstance(group, Mapping):
            raise RecipeError(
                f"a group is {{targets, weights, ...}} or a list of targets, got {group!r}.",
                key=("config_groups", name),
            )
        known = ("targets", *_PARTS, "format")
        unknown = next((key for key in group if key not in known), None)
        if unknown is not None:
            raise RecipeError(
                f"a group has no '{unknown}'.{did_you_mean(unknown, known)} It has: {', '.join(known)}.",
                key=("config_groups", name, unknown),
            )
        parts = {
            part: self._args_of(group[part], "config_groups", _BASE_NAMES[part], name, part)
            for part in _PARTS
            if group.get(part) is not None
        }
        if not parts:
            raise RecipeError(
                f"the group does not say what to quantise to. Give {', '.join(_PARTS)}.", key=("config_groups", name)
            )
        targets = _names(group.get("targets", ["Linear"]), "config_groups", name, "targets")
        scheme = _scheme(targets, parts)
        if group.get("format") is not None:
            scheme.format = group["format"]
        return scheme

    def _args_of(self, given: Any, field: str, base_name: str, *more: str) -> QuantizationArgs:
        """QuantizationArgs from a dict, with errors that say which key."""
        key = (field, *more)
        if not isinstance(given, Mapping):
            raise RecipeError(f"expected {{num_bits, type, ...}}, got {given!r}.", key=key)
        known = QuantizationArgs.model_fields
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise RecipeError(
                f"'{field}' has no '{unknown}'.{did_you_mean(unknown, known)} It has: {', '.join(known)}.",
                key=(*key, unknown),
            )
        try:
            args = QuantizationArgs(**given)
        except ValidationError as error:
            first = error.errors()[0]
            where = [part for part in first["loc"] if part in given]
            raise RecipeError(
                f"{first['msg'].removeprefix('Value error, ')}.".replace("..", "."), key=(*key, *where)
            ) from None
        except (ValueError, NotImplementedError) as error:
            raise RecipeError(str(error), key=key) from None
        _check_observer(base_name, args, key)
        return args

    def _with_observers(self, scheme: QuantizationScheme) -> QuantizationScheme:
        scheme = scheme.model_copy(deep=True)
        for part in _PARTS:
            args = getattr(scheme, part)
            field = "weight_observer" if part == "weights" else "activation_observer"
            named = self.given.get(field)
            if args is None or named is None:
                continue
            if args.dynamic is True:
                raise RecipeError(
                    "activations of this scheme are dynamic: their scales are found while the model runs, and there is "
                    "nothing to observe. Leave it out, or use a scheme with static activations.",
                    key=(field,),
                )
            args.observer, args.observer_kwargs = _observer_named(named, field)
            _check_observer(_BASE_NAMES[part], args, (field,))
        return scheme

    def _with_group_size(self, scheme: QuantizationScheme) -> QuantizationScheme:
        group_size = self.given.get("group_size")
        if group_size is None:
            return scheme
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise RecipeError(f"group_size is a whole number from 1 on, got {group_size!r}.", key=("group_size",))
        if scheme.weights is None or scheme.weights.strategy != "group":
            raise RecipeError("this scheme's weights have no groups. Leave group_size out.", key=("group_size",))
        if scheme.weights.scale_dtype is not None:
            raise RecipeError(
                f"this format has groups of {scheme.weights.group_size} and no others. Leave group_size out.",
                key=("group_size",),
            )
        scheme.weights.group_size = group_size
        return scheme


def _scheme(targets: list[str], parts: Mapping[str, QuantizationArgs]) -> QuantizationScheme:
    try:
        return QuantizationScheme(targets=targets, **parts)
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(str(error), key=(next(iter(parts)),)) from None


def _names(given: Any, *key: str) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise RecipeError(f"expected a name or a list of names, got {given!r}.", key=key)
    return list(names)


def _observer_named(named: Any, field: str) -> tuple[str, dict[str, Any]]:
    """Name and knobs of `minmax` or `{name: minmax, averaging_constant: .01}`."""
    if isinstance(named, str):
        return named, {}
    if isinstance(named, Mapping) and isinstance(named.get("name"), str):
        return named["name"], {knob: value for knob, value in named.items() if knob != "name"}
    raise RecipeError(f"an observer is a name or {{name: ..., knob: ...}}, got {named!r}.", key=(field,))


def _check_observer(base_name: str, args: QuantizationArgs, key: tuple[str, ...]) -> None:
    """Say no to observers and knobs that do not exist, and to those that do not fit the strategy."""
    if args.dynamic is True:
        return
    try:
        make_observer(base_name, args)
    except UnknownObserverError as error:
        raise RecipeError(str(error), key=(*key, "observer") if "observer" in key or len(key) > 0 else key) from None
    except KnobError as error:
        knob = next((name for name in args.observer_kwargs or {} if f"'{name}'" in str(error)), None)
        raise RecipeError(str(error), key=(*key, *([knob] if knob else []))) from None
    except ScalewrightError as error:
        raise RecipeError(str(error), key=key) from None


def observers_of(scheme: QuantizationScheme) -> dict[str, Observer]:
    """New observers for the parts of a scheme that are to be watched, by base name."""
    return {
        base_name: make_observer(base_name, args)
        for part, base_name in _BASE_NAMES.items()
        if (args := getattr(scheme, part)) is not None and wants_values(args)
    }
