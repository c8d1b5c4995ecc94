"""Models and what belongs to them, from a folder or from the hub; and data as a model can take it."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from scalewright.calibration.data import Samples, load_samples, no_texts
from scalewright.calibration.hub import hub_asked_once
from scalewright.calibration.sources import DataOptions
from scalewright.checkpoint.classes import built_without_weights, class_for
from scalewright.checkpoint.folder import check_source
from scalewright.checkpoint.fp8 import block_of, mend, read_as_plain
from scalewright.errors import DataError, ModelError, ScalewrightError, did_you_mean

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_FEW = 3
_OWNED = re.compile(r"\w[\w.-]*/[\w.-]+")  # a name on the hub, with its owner
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@contextmanager
def without_bars() -> Iterator[None]:
    """While inside, transformers draws no progress bars: ours say more, and without a terminal none is wanted."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def in_silence() -> Iterator[None]:
    """While inside, transformers warns of nothing: what is missing is an error here, and what is not read a note."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def check_dtype(dtype: str | torch.dtype) -> None:
    """Say no to a dtype that models are not in."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype: there is no '{name}'.{did_you_mean(name, _DTYPES)} Use {', '.join(_DTYPES)}.")


def check_model(model: Any, called: str = "model") -> None:
    """Say no to what is neither a model nor the name of one; `called` is what the caller calls it."""
    if not isinstance(model, nn.Module | str | Path):
        raise ModelError(f"{called}: {type(model).__name__} is none. Give a module, a folder or a name on the hub.")


def check_device(device: str | torch.device | None) -> None:
    """Say no to a device that is not there."""
    try:
        reason = "it has no values" if torch.empty(0, device=device).is_meta else None
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")  # torch goes on about its own build
    if reason is not None:
        raise ModelError(f"device: '{device}' cannot be used here ({reason}). Use cpu, or leave it out.")


def load_all(
    model: nn.Module | str | Path,
    tokenizer: Any,
    on_step: Callable[[str, str, int, int], None],
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, list[Any], list[str]]:
    """A model, its companions, and what the user should know of how they were read."""
    notes: list[str] = []
    check_model(model)
    on_step("loading", type(model).__name__ if isinstance(model, nn.Module) else str(model), 0, 1)
    loaded = load_model(model, trust_remote_code=trust_remote_code, notes=notes, **options)
    empty = next((name for name, each in loaded.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise ModelError(f"{empty}: is on the device meta, and has no values. Load the model with its weights.")
    companions = load_companions(model, tokenizer, trust_remote_code=trust_remote_code)
    on_step("loading", type(loaded).__name__, 1, 1)
    return loaded, companions, [*notes, *_unread_tokenizer(model, tokenizer, companions)]


def load_model(
    model: nn.Module | str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    notes: list[str] | None = None,
) -> nn.Module:
    """The model itself, or the one that a path or hub name stands for, in its own dtype unless another is asked for.

    What the user should know is added to `notes`.
    """
    if isinstance(model, nn.Module):
        if dtype != "auto":
            _convert_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model if device is None else model.to(device)
    with loading(model):
        config, auto = _config_of(model, trust_remote_code)
        block = block_of(config)
        more = {} if block is None else read_as_plain()
        with without_bars():
            loaded, unread = read_weights(auto, model, dtype=dtype, trust_remote_code=trust_remote_code, **more)
    if unread and notes is not None:
        notes.append(not_read(model, unread))
    if block is not None:
        mend(loaded, model, block)
    return loaded if device is None else loaded.to(device)


def read_weights(auto: Any, model: str | Path, **options: Any) -> tuple[nn.Module, list[str]]:
    """A model by transformers, whole, and the tensors of its files that it has no use for.

    transformers fills what is lacking with random numbers, and says so in a warning at most. Here it is an error.
    """
    with in_silence():
        loaded, info = auto.from_pretrained(model, output_loading_info=True, use_safetensors=True, **options)
    missing, unexpected = (sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys"))
    if missing:
        raise ModelError(
            f"{model}: lacks {len(missing)} of its tensors ({some_of(missing)}), and would have random numbers "
            "instead. Give a whole model."
        )
    return loaded, unexpected


def not_read(model: str | Path, names: Sequence[str]) -> str:
    """A note on tensors that a model has no use for."""
    return f"{model}: {len(names)} of its tensors are not read ({some_of(names)})."


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {rest} more" if rest > 0 else "")


def _convert_(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring what is stored of a model to a dtype; what it computes for itself, such as angles, stays as it is."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)


def empty_model(model: str | Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model that a path or hub name stands for, without its weights."""
    with loading(model):
        config, auto = _config_of(model, trust_remote_code)
        if block_of(config) is not None:
            del config.quantization_config
        with torch.device("meta"):
            built: nn.Module = built_without_weights(auto, config, trust_remote_code=trust_remote_code)
    return built


def load_companions(model: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> list[Any]:
    """The processor or tokenizer that belongs to a model, or the one that is given; none if there is none."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return [tokenizer]
    name = tokenizer if tokenizer is not None else model
    if isinstance(name, nn.Module):
        name = getattr(getattr(name, "config", None), "_name_or_path", None)
    if not name:
        return []
    if tokenizer is not None and os.path.isfile(tokenizer):
        raise ModelError(f"{tokenizer}: is a file. Give the folder of a tokenizer, or its name on the hub.")
    with hub_asked_once(name) as reason:
        for auto in (transformers.AutoProcessor, transformers.AutoTokenizer):
            with suppress(Exception):  # files of strangers make each reader fail in its own way
                return [auto.from_pretrained(name, trust_remote_code=trust_remote_code)]
    if tokenizer is not None:
        why = "" if reason is None else f" ({reason})"
        raise ModelError(
            f"{tokenizer}: there is no tokenizer that could be loaded{why}.{_nearest_folder(tokenizer)} Give the "
            "folder of a tokenizer, or its name on the hub."
        )
    return []


def _unread_tokenizer(model: Any, tokenizer: Any, companions: Sequence[Any]) -> list[str]:
    """A note where a folder has a tokenizer, no other was given, and it could not be loaded."""
    if companions or tokenizer is not None or not isinstance(model, str | Path):
        return []
    file = next((each for name in _TOKENIZERS if (each := Path(model) / name).is_file()), None)
    return [] if file is None else [f"{file}: cannot be loaded, so the checkpoint has no tokenizer."]


def samples_for(model: nn.Module, dataset: Any, options: DataOptions, companions: Sequence[Any]) -> Samples:
    """Samples of a dataset for a model, made with the first of its companions; batches are on the model's device."""

    def tokenizer() -> Any:
        if not companions:
            raise DataError("data: there is text in it, and no tokenizer. Give a tokenizer, or token ids.")
        return getattr(companions[0], "tokenizer", companions[0])

    samples = load_samples(
        dataset,
        options,
        tokenizer=tokenizer,
        vocab_size=vocabulary_of(model),
        max_positions=positions_of(model),
    )
    _check_inputs(model, samples.batches)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    samples.batches = [
        {name: each.to(device) if isinstance(each, Tensor) else each for name, each in batch.items()}
        for batch in samples.batches
    ]
    return samples


def _check_inputs(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
    """Say no to texts for a model of transformers' that takes none, before it stumbles over them."""
    if not isinstance(model, transformers.PreTrainedModel) or model.main_input_name == "input_ids":
        return
    takes_texts = "input_ids" in inspect.signature(model.forward).parameters
    if not takes_texts and any("input_ids" in each for each in batches):
        raise no_texts(model, str(model.main_input_name))


def sequence_length(model: nn.Module, asked: int | None) -> int:
    """How long samples are at the most: as asked, or 2048, or as many positions as the model has if these are fewer."""
    return min(2048, positions_of(model) or 2048) if asked is None else asked


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model knows, if it says so."""
    return _from_config(model, "vocab_size")


def positions_of(model: nn.Module) -> int | None:
    """How many tokens a model can see at once, if it says so."""
    return _from_config(model, "max_position_embeddings") or _from_config(model, "n_positions")


def _from_config(model: nn.Module, name: str) -> int | None:
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        number = getattr(each, name, None)
        if isinstance(number, int):
            return number
    return None


def _config_of(model: str | Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The configuration of a model that is not quantised yet, and the class that loads such models."""
    config, auto = config_and_class(model, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None and block_of(config) is None:
        raise ModelError(f"{model}: is quantised already. Give the original.")
    return config, auto


def config_and_class(model: str | Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The configuration of a model, and the class that loads such models."""
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return config, class_for(model, config, trust_remote_code=trust_remote_code)


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Inside a model is loaded. Whatever its files are made of, transformers stumbles over it in its own way."""
    with hub_asked_once(model) as unreachable:
        try:
            if Path(model).is_dir():
                check_source(Path(model))
            yield
        except ScalewrightError:
            raise
        except Exception as error:
            raise _cannot_load(model, error, unreachable) from error


def _cannot_load(model: str | Path, error: Exception, unreachable: str | None) -> ModelError:
    """Why a model cannot be loaded, in words."""
    lines = [each.strip().rstrip(".") for each in str(error).strip().splitlines()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if not os.path.exists(model):  # unlike Path, it bears a name that is too long
        is_owned = isinstance(model, str) and _OWNED.fullmatch(model)
        why = f" ({unreachable or reason})" if unreachable or is_owned else ""
        return ModelError(
            f"{str(model) or repr('')}: there is no such folder, and no model of that name could be loaded{why}."
            f"{_nearest_folder(model)} Give the folder of a Hugging Face model, or its name on the hub."
        )
    path = Path(model)
    if path.is_file():
        return ModelError(f"{model}: is a file. Give the folder of a Hugging Face model.")
    if not (path / "config.json").exists():
        return ModelError(f"{model}: there is no config.json in it. Give the folder of a Hugging Face model.")
    return ModelError(f"{model}: cannot be loaded ({reason}).")


def _nearest_folder(name: str | Path) -> str:
    """A sentence that names the folder beside it whose name is nearest, if one is near."""
    path = Path(name)
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    return did_you_mean(path.name, beside)
