"""Which class of transformers a model is one of, by its configuration: the one that it was saved from.

The type of a configuration tells the layers of a model and not what is on top of them: a classifier and a model that
writes have the same. `architectures` names the class. transformers' own `AutoModelForCausalLM` does not look at it, and
would give a classifier a head of random numbers.
"""

from __future__ import annotations

import re
from typing import Any

import transformers

from scalewright.errors import ModelError

_LOADED = (
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
_LONGEST = 100  # characters of a name that are shown
_WRITING = re.compile(r"(CausalLM|LMHead\w*|ConditionalGeneration)$")  # classes that write, earlier spellings included


def class_for(model: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """What loads a model of a configuration: its class, or the auto class that has the code that came with it.

    Where none is named, or one by an earlier name, it is the auto class of models that write.
    """
    name = _first(getattr(config, "architectures", None))
    places = _places_of_code(config) if trust_remote_code else {}
    named = next((key for key, place in places.items() if name and place.rpartition(".")[2] == name), None)
    if named is not None:
        return getattr(transformers, named, None)
    found = class_called(name)
    if found is not None and is_model_of(found, config):
        return found
    if name is not None and not places and not _WRITING.search(name):
        raise ModelError(f"{model}: {_why_not(config, _printable(name), found, trust_remote_code)}")
    return _auto_of_writers(config)


def class_called(name: Any) -> type[transformers.PreTrainedModel] | None:
    """The class of transformers' models that has a name, if there is one."""
    found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and isinstance(found.config_class, type) else None


def is_model_of(build: Any, config: Any) -> bool:
    """Whether a class is one that transformers would load for a configuration, which it tells by its type."""
    if isinstance(config, build.config_class):
        return True
    loaded = (mapping.get(type(config), ()) for mapping in _LOADED)
    return any(build is each or (isinstance(each, tuple) and build in each) for each in loaded)


def built_without_weights(build: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """A model of a class, or of an auto class, as its configuration has it."""
    if hasattr(build, "from_config"):
        return build.from_config(config, trust_remote_code=trust_remote_code)
    return build._from_config(config)  # as the auto classes do, in the dtype of the configuration


def _places_of_code(config: Any) -> dict[str, str]:
    """Where the code that came with a model is, by the auto classes that find it."""
    places = getattr(config, "auto_map", None)
    found = places.items() if isinstance(places, dict) else ()
    return {key: str(place) for key, place in found if key.startswith("AutoModel")}


def _auto_of_writers(config: Any) -> Any:
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _why_not(config: Any, name: str, found: Any, trust_remote_code: bool) -> str:
    if found is not None:
        return (
            f"is a {name} by its config.json, and that is no model of the type '{config.model_type}', which it is, "
            "too. Correct one of the two."
        )
    if getattr(config, "auto_map", None) and not trust_remote_code:
        return (
            f"is a {name} by its config.json, whose code came with it. Allow remote code if you trust it, or give "
            "the model as an object in Python."
        )
    return (
        f"is a {name} by its config.json, and transformers {transformers.__version__} has no such class. Use a version "
        "that has it, or give the model as an object in Python."
    )


def _printable(name: str) -> str:
    """A name from a file, which may be anything, as a terminal can show it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name[:_LONGEST])


def _first(names: Any) -> str | None:
    return names[0] if isinstance(names, list | tuple) and names and isinstance(names[0], str) else None
