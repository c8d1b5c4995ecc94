"""What all modifiers share: they are made from keywords, know which they have, and can be written out again.

A modifier says what is to be done to a model. It is plain data: it holds no model, and making one changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import BaseModel

from scalewright.errors import RecipeError, did_you_mean


class Modifier:
    """A named change to a model. `given` is what it was made from, as plain data."""

    fields: ClassVar[Mapping[str, str]] = {}
    """The keywords that a modifier takes, with a line of help each."""

    _known: ClassVar[dict[str, type[Modifier]]] = {}

    def __init__(self, **given: Any) -> None:
        unknown = next((name for name in given if name not in self.fields), None)
        if unknown is not None:
            raise RecipeError(
                f"{type(self).__name__} has no '{unknown}'.{did_you_mean(unknown, self.fields)} "
                f"It has: {', '.join(self.fields)}.",
                key=(unknown,),
            )
        self.given: dict[str, Any] = {name: as_plain_data(value) for name, value in given.items() if value is not None}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Modifier._known[cls.__name__] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Modifier) and other.given == self.given

    def __hash__(self) -> int:
        return hash((type(self), repr(self.given)))

    @staticmethod
    def class_named(name: str) -> type[Modifier]:
        """The modifier class of that name."""
        if name not in Modifier._known:
            raise RecipeError(
                f"there is no modifier '{name}'.{did_you_mean(name, Modifier._known)} "
                f"Modifiers: {', '.join(sorted(Modifier._known))}."
            )
        return Modifier._known[name]


def as_plain_data(value: Any) -> Any:
    """`value` in lists, dicts, strings, numbers and booleans: what YAML and JSON can hold."""
    if isinstance(value, QuantizationArgs | QuantizationScheme):
        return as_plain_data(value.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    if isinstance(value, BaseModel):
        return as_plain_data(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): as_plain_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_plain_data(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RecipeError(f"{value!r} ({type(value).__name__}) has no place in a recipe. Use plain values.")
