"""What all modifiers share: they are made from keywords, know which they have, and can be written out again.

A modifier says what is to be done to a model. It is plain data: it holds no model, and making one changes nothing.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from scalewright.errors import RecipeError, did_you_mean

_PATIENCE = 1.0  # seconds for one name


class Modifier:
    """A named change to a model. `given` is what it was made from, as plain data."""

    fields: ClassVar[Mapping[str, str]] = {}
    """The keywords that a modifier takes, with a line of help each."""

    def __init__(self, **given: Any) -> None:
        unknown = next((name for name in given if name not in self.fields), None)
        if unknown is not None:
            raise RecipeError(
                f"{type(self).__name__} has no '{unknown}'.{did_you_mean(unknown, self.fields)} "
                f"It has: {', '.join(self.fields)}.",
                key=(unknown,),
            )
        self.given: dict[str, Any] = {
            name: as_plain_data(value, name) for name, value in given.items() if value is not None
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Modifier) and other.given == self.given

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self.given)))

    @staticmethod
    def class_named(name: str) -> type[Modifier]:
        """The modifier class of that name."""
        known = Modifier.classes()
        if name not in known:
            raise RecipeError(
                f"there is no modifier '{name}'.{did_you_mean(name, known)} Modifiers: {', '.join(sorted(known))}."
            )
        return known[name]

    @classmethod
    def classes(cls) -> dict[str, type[Modifier]]:
        """All modifier classes that have been imported, by name."""
        found: dict[str, type[Modifier]] = {}
        for child in cls.__subclasses__():
            found |= {child.__name__: child, **child.classes()}
        return found


def as_plain_data(value: Any, *key: str | int) -> Any:
    """`value`, which stands under `key`, in lists, dicts, strings, numbers and booleans: what YAML and JSON can hold.

    Of pydantic models it has the fields that were set.
    """
    if isinstance(value, BaseModel):
        fields = [name for name in type(value).model_fields if name in value.model_fields_set]
        value = {name: getattr(value, name) for name in fields if getattr(value, name) is not None}
    if isinstance(value, Mapping):
        odd = next((each for each in value if not isinstance(each, str)), None)
        if odd is not None:
            raise RecipeError(f"{_shown(key)}: {odd!r} is no name. Use text for the names of entries.", key=key)
        return {str(name): as_plain_data(each, *key, name) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [as_plain_data(each, *key, i) for i, each in enumerate(value)]
    if isinstance(value, Enum):
        return as_plain_data(value.value, *key)
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # numpy's numbers are some of these, and YAML does not know them
        if isinstance(value, kind):
            return kind(value)
    raise RecipeError(
        f"{_shown(key)}: {value!r} ({type(value).__name__}) has no place in a recipe. Use plain values.", key=key
    )


OUTPUT_HEAD, ROUTERS = "model:output_head", "model:routers"
LEFT_ALONE = (OUTPUT_HEAD, ROUTERS)
"""What a scheme alone leaves as it is: few loaders can do otherwise. Which layers these are the model says."""


def regex_of(target: str) -> re.Pattern[str] | None:
    """What a module's name must match from its beginning, for `re:` patterns and shell wildcards; None for plain names.

    A wildcard is compared with the whole name, or with all that follows one of its dots. Loaders read the pattern from
    the checkpoint, so it keeps to what every Python knows (fnmatch's own does not).
    """
    if target.startswith("re:"):
        try:
            return re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise RecipeError(f"'{target}' is not a regular expression: {error}.") from None
    parts = re.split(r"(\*|\?|\[!?[^\]]+\])", target)
    if len(parts) == 1:
        return None
    wild = {"*": ".*", "?": "."}
    parts = [
        wild.get(part) or f"[{'^' if part[1] == '!' else ''}{_members(part)}]" if i % 2 else re.escape(part)
        for i, part in enumerate(parts)
    ]
    try:
        return re.compile(rf"(?:.*\.)?{''.join(parts)}$")
    except re.error as error:
        raise RecipeError(f"'{target}' is not a wildcard: {error}.") from None


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a name matches from its beginning. A pattern that would take for ever is an error."""
    try:
        with _within(_PATIENCE):
            return pattern.match(name) is not None
    except TimeoutError:
        raise RecipeError(
            f"'re:{pattern.pattern}' takes longer than {_PATIENCE:g} s to compare with '{name}'. Write it without "
            "repeats inside of repeats."
        ) from None


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """What takes longer inside is a TimeoutError, in the main thread, if nobody else has set the alarm."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _members(brackets: str) -> str:
    """The inside of `[abc]` or `[!a-c]`, for a regular expression."""
    return re.sub(r"([\\^\[&~|])", r"\\\1", brackets[1:-1].removeprefix("!"))


def _shown(key: tuple[str | int, ...]) -> str:
    return ".".join(map(str, key))
