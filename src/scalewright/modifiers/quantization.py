"""QuantizationModifier: which layers get which scheme, and which observers look for their scales."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import ValidationError

from scalewright.errors import KnobError, LayoutError, RecipeError, UnknownObserverError, did_you_mean
from scalewright.modifiers.base import LEFT_ALONE, Modifier, regex_of
from scalewright.modifiers.schemes import scheme_named, wants_values
from scalewright.numerics.layout import check_strategy, strategy_of
from scalewright.observers import Observer, make_observer
from scalewright.observers.importance import ImportanceObserver
from scalewright.observers.knobs import parse_knobs

_BASE_NAMES = {"weights": "weight", "input_activations": "input", "output_activations": "output"}
_PARTS = tuple(_BASE_NAMES)
_CHOICES = {
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "tensor_group", "block", "token", "attn_head"),
    "actorder": ("weight", "static"),
    "dynamic": ("local",),
    "format": tuple(each.value for each in CompressionFormat if each != CompressionFormat.mixed_precision),
}
_INT_BITS = range(2, 9)
_FP8_BITS = 8
_SMALL_FLOATS = {4: (("group", 32), ("tensor_group", 16)), 6: (("group", 32),)}
_MX_GROUP = 32
_SHORT_SCALES = {"group": torch.uint8, "tensor_group": torch.float8_e4m3fn}
"""The scales of such floats, e8m0 and e4m3, as compressed-tensors names them."""

Key = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Some targets that share a scheme, whose arguments name the observers (or none, for the defaults)."""

    name: str
    scheme: QuantizationScheme

    @property
    def targets(self) -> list[str]:
        """The targets as the recipe has them."""
        return list(self.scheme.targets)

    @property
    def is_left_alone(self) -> bool:
        """Whether the modules of the group stay as they are."""
        return all(getattr(self.scheme, part) is None for part in _PARTS)


@dataclass(frozen=True)
class _Part:
    """The format of one kind of tensor, and where in the modifier it stands."""

    args: QuantizationArgs
    base_name: str
    key: Key


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
        "weight_observer": "the observer of weights that name none: its name, or {name, knob, ...}",
        "activation_observer": "the same of static activations, and of keys and values",
    }

    orders_columns: ClassVar[bool] = False
    """Whether `actorder` means something to it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.ignore = parse_names(self.given.get("ignore", []), ("ignore",))
        self.groups = tuple(self._groups())
        kv_cache = self.given.get("kv_cache_scheme")
        self.kv_cache = None if kv_cache is None else _parse_args(kv_cache, ("kv_cache_scheme",), "k")
        if all(group.is_left_alone for group in self.groups) and self.kv_cache is None:
            raise RecipeError(
                f"{type(self).__name__} does not say what to quantise to. Give scheme, config_groups, weights, "
                "input_activations, output_activations or kv_cache_scheme."
            )
        parts = list(self._parts())
        self._give_observers("weight_observer", [part for part in parts if part.base_name == "weight"])
        self._give_observers("activation_observer", [part for part in parts if part.base_name != "weight"])
        self._give_group_size()
        for part in parts:
            self._check(part)

    # ---- what is asked for -----------------------------------------------------------------------------------------

    @property
    def data(self) -> Literal["needed", "useful", "none"]:
        """Whether calibration data is needed, makes for better scales, or has nothing to say."""
        parts = list(self._parts())
        if any(wants_values(part.args) for part in parts if part.base_name != "weight"):
            return "needed"
        observers = [make_observer("weight", part.args) for part in parts if part.base_name == "weight"]
        are_weighted = any(isinstance(each, ImportanceObserver) and each.wants_inputs for each in observers)
        return "useful" if are_weighted else "none"

    def _parts(self) -> Iterator[_Part]:
        """All formats, with the way to the entry of the modifier that says them."""
        for group in self.groups:
            for part, base_name in _BASE_NAMES.items():
                args = getattr(group.scheme, part)
                if args is not None:
                    yield _Part(args, _base_name(base_name, args), self._key_of(group, part))
        if self.kv_cache is not None:
            yield _Part(self.kv_cache, "k", ("kv_cache_scheme",))

    def _key_of(self, group: Group, part: str) -> Key:
        if "config_groups" in self.given:
            key: Key = ("config_groups", group.name)
            return (*key, part) if isinstance(self.given["config_groups"][group.name], Mapping) else key
        return ("scheme",) if "scheme" in self.given else (part,)

    # ---- groups ----------------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[Group]:
        direct = [name for name in _PARTS if name in self.given]
        ways = [name for name in ("scheme", "config_groups", *direct[:1]) if name in self.given]
        if len(ways) > 1:
            raise RecipeError(f"{' and '.join(ways)} both say what to quantise to. Keep one of them.", key=(ways[-1],))
        if "scheme" in self.given:
            yield from self._groups_by_name()
        elif "config_groups" in self.given:
            yield from self._config_groups()
        elif direct:
            yield Group("group_0", _build_scheme(self._targets(), self.given, ()))
        elif "targets" in self.given and "kv_cache_scheme" in self.given:
            raise RecipeError(
                "targets: a kv cache is that of all attention modules. Leave targets out, or add a scheme for them.",
                key=("targets",),
            )

    def _targets(self) -> list[str]:
        return parse_targets(self.given.get("targets", ["Linear"]), ("targets",))

    def _groups_by_name(self) -> Iterator[Group]:
        scheme = self.given["scheme"]
        if isinstance(scheme, str):
            yield Group("group_0", _scheme_named(scheme, self._targets(), ("scheme",)))
            return
        if not isinstance(scheme, Mapping) or not scheme:
            raise RecipeError(f"scheme: expected a name or {{name: [targets]}}, got {scheme!r}.", key=("scheme",))
        self._refuse_targets("scheme")
        for i, (name, targets) in enumerate(scheme.items()):
            yield Group(f"group_{i}", _scheme_named(name, targets, ("scheme", name)))

    def _config_groups(self) -> Iterator[Group]:
        groups = self.given["config_groups"]
        if not isinstance(groups, Mapping) or not groups:
            raise RecipeError(
                f"config_groups: expected {{name: {{targets, weights, ...}}}}, got {groups!r}.", key=("config_groups",)
            )
        self._refuse_targets("config_groups")
        for name, group in groups.items():
            key = ("config_groups", name)
            by_name = isinstance(group, list | str)  # {W4A16: [targets]}
            yield Group(name, _scheme_named(name, group, key) if by_name else _parse_scheme(group, key))

    def _refuse_targets(self, field: str) -> None:
        if "targets" in self.given:
            raise RecipeError(f"targets: {field} names its targets already. Keep one of them.", key=("targets",))

    # ---- what holds for all groups -----------------------------------------------------------------------------------

    def _give_observers(self, field: str, parts: list[_Part]) -> None:
        """Let the parts that name no observer have that which `field` names."""
        named = self.given.get(field)
        if named is None:
            return
        name, knobs = _observer_named(named, field)
        seen = [part for part in parts if wants_values(part.args)]
        silent = [part for part in seen if part.args.observer is None]
        if not seen:
            what = "weights" if field == "weight_observer" else "static activations"
            why = " Dynamic scales are found while the model runs." if parts else ""
            raise RecipeError(f"{field}: there are no {what} to observe.{why} Leave it out.", key=(field,))
        if not silent:
            raise RecipeError(
                f"{field}: {'.'.join(seen[0].key)} names observer '{seen[0].args.observer}' already. Keep one of them.",
                key=(field,),
            )
        for part in silent:
            part.args.observer = name
            part.args.observer_kwargs = {**part.args.observer_kwargs, **knobs}
            is_text = isinstance(named, str)
            _check_observer(part, (field,) if is_text else (field, "name"), (field,))

    def _give_group_size(self) -> None:
        """Let the weights of schemes that were given by name have the group size that was given."""
        group_size = self.given.get("group_size")
        if group_size is None:
            return
        if not _is_whole(group_size) or group_size < 1:
            raise RecipeError(
                f"group_size: expected a whole number from 1 on, got {group_size!r}.", key=("group_size",)
            )
        weights = [part.args for part in self._parts() if part.base_name == "weight" and part.key[-1] != "weights"]
        grouped = [args for args in weights if strategy_of(args) in ("group", "tensor_group")]
        free = [args for args in grouped if args.scale_dtype is None]
        if not free:
            why = "goes with scheme; weights say their own" if not weights else "the scheme's weights have no groups"
            if grouped:
                why = f"the scheme has groups of {grouped[0].group_size} and no others"
            raise RecipeError(f"group_size: {why}. Leave it out.", key=("group_size",))
        for args in free:
            args.group_size = group_size

    def _check(self, part: _Part) -> None:
        """Say no to formats and observers that do not exist, or do not fit what they are for."""
        args, where = part.args, ".".join(part.key)
        if args.type == "int" and args.num_bits not in _INT_BITS:
            raise RecipeError(
                f"{where}: there is no integer format of {args.num_bits} bits. Use {_INT_BITS[0]} to {_INT_BITS[-1]}.",
                key=(*part.key, "num_bits"),
            )
        if part.base_name == "weight":
            _check_can_be_stored(part)
        _settle_dtypes(part)
        if part.base_name in ("weight", "k", "q") and args.dynamic:
            what = "weights" if part.base_name == "weight" else "attention states"
            raise RecipeError(
                f"{where}: the scales of {what} are static. Set dynamic to false.", key=(*part.key, "dynamic")
            )
        if args.actorder is not None and not (self.orders_columns and part.base_name == "weight"):
            raise RecipeError(
                f"{where}: {type(self).__name__} does not order columns. Leave actorder out.",
                key=(*part.key, "actorder"),
            )
        if wants_values(args):
            _check_observer(part, (*part.key, "observer"), (*part.key, "observer_kwargs"))
        elif args.observer is not None or args.observer_kwargs:
            raise RecipeError(
                f"{where}: dynamic scales are found while the model runs, and there is nothing to observe. "
                "Leave the observer out, or set dynamic to false.",
                key=(*part.key, "observer" if args.observer is not None else "observer_kwargs"),
            )


# ---- parsing ---------------------------------------------------------------------------------------------------------


def _scheme_named(name: str, targets: Any, key: Key) -> QuantizationScheme:
    try:
        scheme = scheme_named(name)
    except RecipeError as error:
        raise error.within(*key) from None
    scheme.targets = parse_targets(targets, key)
    return scheme


def _parse_scheme(group: Any, key: Key) -> QuantizationScheme:
    """One of the config_groups."""
    where = ".".join(key)
    if not isinstance(group, Mapping):
        raise RecipeError(f"{where}: expected {{targets, weights, ...}} or a list of targets, got {group!r}.", key=key)
    _refuse_unknown(group, ("targets", *_PARTS, "format"), key)
    _refuse_other_choices(group, key)
    if all(group.get(part) is None for part in _PARTS):
        raise RecipeError(f"{where}: does not say what to quantise to. Give {' or '.join(_PARTS)}.", key=key)
    targets = parse_targets(group.get("targets", ["Linear"]), (*key, "targets"))
    return _build_scheme(targets, group, key, group.get("format"))


def _build_scheme(
    targets: list[str], given: Mapping[str, Any], key: Key, stored_as: str | None = None
) -> QuantizationScheme:
    parts = {
        part: _parse_args(given[part], (*key, part), base_name)
        for part, base_name in _BASE_NAMES.items()
        if given.get(part) is not None
    }
    odd = next((part for part, args in parts.items() if part != "weights" and args.actorder is not None), None)
    if odd is not None:
        raise RecipeError(
            f"{'.'.join((*key, odd))}: actorder is for weights. Leave it out.", key=(*key, odd, "actorder")
        )
    return QuantizationScheme(targets=targets, **parts, format=stored_as)


def _parse_args(given: Any, key: Key, base_name: str) -> QuantizationArgs:
    """QuantizationArgs from a dict, with errors that say which entry. An entry of None is one that was left out."""
    where = ".".join(key)
    if not isinstance(given, Mapping):
        raise RecipeError(f"{where}: expected {{num_bits, type, strategy, ...}}, got {given!r}.", key=key)
    _refuse_unknown(given, tuple(QuantizationArgs.model_fields), key)
    _refuse_other_choices(given, key)
    given = {
        name: value.lower() if name in _CHOICES and isinstance(value, str) else value
        for name, value in given.items()
        if value is not None
    }
    for name in ("num_bits", "group_size"):
        if name in given and not _is_whole(given[name]):
            raise RecipeError(f"{where}.{name}: expected a whole number, got {given[name]!r}.", key=(*key, name))
    try:
        args = QuantizationArgs(**given)
        check_strategy(_base_name(base_name, args), args)
    except LayoutError as error:
        raise RecipeError(f"{where}: {error}", key=(*key, "strategy")) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = next((str(part) for part in first["loc"] if part in given), None)
        reason = first["msg"].removeprefix("Value error, ").partition("\n")[0].rstrip(".")
        reason = re.sub(r"<\w+\.\w+: '([^']*)'>", r"\1", reason)  # choices as Python shows them
        if field is None:
            raise RecipeError(f"{where}: {reason}.", key=key) from None
        raise RecipeError(f"{where}.{field}: {reason}, got {given[field]!r}.", key=(*key, field)) from None
    except NotImplementedError:  # a float format that does not exist
        raise RecipeError(
            f"{where}: there is no float format of {given.get('num_bits', 8)} bits. Use 4, 6 or 8 bits, or type int.",
            key=(*key, "num_bits"),
        ) from None
    return args


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], key: Key) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise RecipeError(
            f"{'.'.join(key)} has no '{unknown}'.{did_you_mean(unknown, known)} It has: {', '.join(known)}.",
            key=(*key, unknown),
        )


def _refuse_other_choices(given: Mapping[str, Any], key: Key) -> None:
    for name, choices in _CHOICES.items():
        value = given.get(name)
        if value is None or (isinstance(value, bool) and name in ("dynamic", "actorder")):
            continue
        if not isinstance(value, str) or value.lower() not in choices:
            also = "true, false, " if name == "dynamic" else ""
            raise RecipeError(
                f"{'.'.join(key)}: there is no {name} {value!r}.{did_you_mean(str(value).lower(), choices)} "
                f"Choices: {also}{', '.join(choices)}.",
                key=(*key, name),
            )


def parse_targets(given: Any, key: Key) -> list[str]:
    """The targets that stand under `key`; one at least."""
    names = parse_names(given, key)
    if not names:
        raise RecipeError(f"{'.'.join(key)}: there are no targets in it. Name some, such as Linear.", key=key)
    word = next((name for name in names if name in LEFT_ALONE), None)
    if word is not None:  # loaders are told the targets by name, and know no such word
        raise RecipeError(
            f"{'.'.join(key)}: '{word}' is a word for ignore. Name the layers that are to be quantised.",
            key=(*key, names.index(word)),
        )
    return names


def parse_names(given: Any, key: Key) -> list[str]:
    """Names and patterns of modules that stand under `key`: a list of them, or one alone."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise RecipeError(f"{'.'.join(key)}: expected a name or a list of names, got {given!r}.", key=key)
    for place, name in enumerate(names):
        _check_pattern(name, key, place)
    return list(names)


def _check_pattern(name: str, key: Key, place: int) -> None:
    try:
        regex_of(name)
    except RecipeError as error:
        raise RecipeError(f"{'.'.join(key)}: {error}", key=(*key, place)) from None


def _observer_named(named: Any, field: str) -> tuple[str, dict[str, Any]]:
    """Name and knobs of `minmax` or `{name: minmax, averaging_constant: .01}`."""
    if isinstance(named, str):
        return named, {}
    if isinstance(named, Mapping) and isinstance(named.get("name"), str):
        return named["name"], {knob: value for knob, value in named.items() if knob != "name"}
    raise RecipeError(f"{field}: expected a name or {{name: ..., knob: ...}}, got {named!r}.", key=(field,))


def _check_observer(part: _Part, name_key: Key, knobs_key: Key) -> None:
    """Say no to observers and knobs that do not exist, and to those that do not serve the strategy."""
    try:
        if part.args.observer is not None:
            Observer.get_value_from_registry(part.args.observer)
    except UnknownObserverError as error:
        raise RecipeError(str(error), key=name_key) from None
    observer = make_observer(part.base_name, part.args.model_copy(update={"observer_kwargs": {}}))
    knob = ""
    try:
        for knob, value in part.args.observer_kwargs.items():
            parse_knobs(observer.observer_name, observer.knobs, {knob: value})
    except KnobError as error:
        raise RecipeError(str(error), key=(*knobs_key, knob)) from None
    if observer.strategies and strategy_of(part.args) not in observer.strategies:
        raise RecipeError(
            f"observer '{observer.observer_name}' does not serve strategy '{strategy_of(part.args)}'. "
            f"It serves: {', '.join(observer.strategies)}.",
            key=name_key,
        )


def _base_name(base_name: str, args: QuantizationArgs) -> str:
    """What the format is of: inputs with a scale for each head are attention states."""
    return "q" if base_name == "input" and strategy_of(args) == "attn_head" else base_name


def _check_can_be_stored(part: _Part) -> None:
    """Say no to weights that no format of compressed-tensors holds."""
    args, where, strategy = part.args, ".".join(part.key), strategy_of(part.args)
    is_float = args.type == "float"
    if is_float and args.num_bits < _FP8_BITS:
        known = _SMALL_FLOATS[args.num_bits]
        if not args.symmetric:
            raise RecipeError(
                f"{where}: floats of {args.num_bits} bits have no zero points. Set symmetric to true.",
                key=(*part.key, "symmetric"),
            )
        if (strategy, args.group_size) not in known:
            ways = " or ".join(f"strategy {name} with group_size {size}" for name, size in known)
            size = "" if args.group_size is None else f" with group_size {args.group_size}"
            raise RecipeError(
                f"{where}: no checkpoint holds float weights of {args.num_bits} bits by {strategy}{size}. Use {ways}.",
                key=(*part.key, "strategy"),
            )
    elif strategy == "tensor_group":
        kind = "float" if is_float else "integer"
        raise RecipeError(
            f"{where}: no checkpoint holds {kind} weights of {args.num_bits} bits under a global scale. Use strategy "
            "group.",
            key=(*part.key, "strategy"),
        )


def _settle_dtypes(part: _Part) -> None:
    """Give floats of 4 and 6 bits the scales that their formats have, where that is left out, so that scales are judged
    as they will be stored. Say no to other dtypes of what is stored of weights.
    """
    args, where, strategy = part.args, ".".join(part.key), strategy_of(part.args)
    is_float = args.type == "float"
    short = _SHORT_SCALES.get(strategy) if is_float else None
    if is_float and (strategy, args.group_size) in _SMALL_FLOATS.get(args.num_bits, ()):
        args.scale_dtype = args.scale_dtype or short
    if part.base_name != "weight":
        return
    may_be_plain = not (is_float and args.num_bits < _FP8_BITS)
    is_mx = short == torch.uint8 and args.group_size == _MX_GROUP
    known = [*([None] if may_be_plain else []), *([short] if is_mx or not may_be_plain else [])]
    if args.scale_dtype not in known:
        kept = "the dtype of the model" if may_be_plain else _plain(short)
        raise RecipeError(
            f"{where}: scales of such weights are stored in {kept}, not in {_plain(args.scale_dtype)}. Leave "
            "scale_dtype out.",
            key=(*part.key, "scale_dtype"),
        )
    code = torch.float8_e4m3fn if is_float else torch.int8
    if not args.symmetric and args.zp_dtype != code:
        raise RecipeError(
            f"{where}: zero points of such weights are stored in {_plain(code)}, not in {_plain(args.zp_dtype)}. Leave "
            "zp_dtype out.",
            key=(*part.key, "zp_dtype"),
        )


def _plain(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def observers_of(scheme: QuantizationScheme) -> dict[str, Observer]:
    """New observers for the parts of a scheme that are to be watched, by base name."""
    return {
        base_name: make_observer(base_name, args)
        for part, base_name in _BASE_NAMES.items()
        if (args := getattr(scheme, part)) is not None and wants_values(args)
    }
