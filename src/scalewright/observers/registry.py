"""Observers by name.

compressed-tensors' `RegistryMixin` gives the interface. Its storage is replaced for three reasons: hyphens and
underscores are to make no difference even where one is left out; a name such as "file.py:Class", which it would import
and run, is only a name here, for recipes come from strangers; and running the cell of a notebook again, which defines
the same class anew, is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from compressed_tensors.registry import RegistryMixin
from typing_extensions import override

from scalewright.errors import RegistrationError, UnknownObserverError, did_you_mean

_Class = TypeVar("_Class", bound=type)


class NamedObservers(RegistryMixin):  # type: ignore[misc]
    """The class side of `Observer`: `register`, `load_from_registry` and what they look up."""

    registry_name: ClassVar[str] = ""
    """The name that the class is registered under."""

    _names: ClassVar[dict[str, str]] = {}  # squeezed name or alias -> name
    _classes: ClassVar[dict[str, type]] = {}  # name -> class

    @classmethod
    @override
    def register(cls, name: str | None = None, alias: list[str] | str | None = None) -> Callable[[_Class], _Class]:
        """Decorator that makes a class known as `name`, and as its aliases."""
        if isinstance(name, type):
            raise RegistrationError(f'{name.__name__}: write @{cls.__name__}.register("a_name"), with parentheses.')

        def decorator(value: _Class) -> _Class:
            cls.register_value(value, name=name or value.__name__, alias=alias)
            return value

        return decorator

    @classmethod
    @override
    def register_value(cls, value: type, name: str, alias: str | list[str] | None = None) -> None:
        """Make the class `value` known as `name`, and as its aliases."""
        if not (isinstance(value, type) and issubclass(value, cls)):
            raise RegistrationError(f"'{name}': {value!r} is not a subclass of {cls.__name__}. Derive it from there.")
        known_as = [name, *([alias] if isinstance(alias, str) else alias or [])]
        for each in known_as:
            holder = cls._classes.get(cls._names.get(_squeeze(each), ""))
            if holder is not None and (holder.__module__, holder.__qualname__) != (
                value.__module__,
                value.__qualname__,
            ):
                raise RegistrationError(
                    f"the name '{each}' belongs to {holder.__module__}.{holder.__qualname__} already. Choose another."
                )
        cls._classes[name] = value
        cls._names.update({_squeeze(each): name for each in known_as})
        value.registry_name = name

    @classmethod
    @override
    def get_value_from_registry(cls, name: str) -> Any:
        """The class that is known as `name`; case, hyphens, underscores and spaces do not matter."""
        found = cls._names.get(_squeeze(name)) if isinstance(name, str) else None
        if found is None:
            names = sorted(cls._classes)
            raise UnknownObserverError(
                f"there is no observer {name!r}.{did_you_mean(str(name).lower(), names)} Observers: {', '.join(names)}."
            )
        return cls._classes[found]

    @classmethod
    @override
    def registered_names(cls) -> list[str]:
        """The names of all observers, in the order of their registration."""
        return list(cls._classes)

    @classmethod
    @override
    def registered_aliases(cls) -> list[str]:
        """Further names that observers answer to, without hyphens and underscores."""
        return sorted(set(cls._names) - {_squeeze(name) for name in cls._classes})


def _squeeze(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
