"""Hooks in, hooks out: tensors of a running model are shown to whoever asked for them, with the mask of their tokens.

`tapped` is a context manager; no hook survives it, whatever happens inside. It changes nothing that flows through the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from compressed_tensors.modeling import register_key_hook, register_query_hook, register_value_hook
from torch import Tensor, nn

from scalewright.calibration.experts import Expert
from scalewright.modifiers.shown import Gallery, See

_OTHER_MODALITIES = ("image", "audio")
_DECODER_INPUTS = ("decoder_attention_mask", "decoder_input_ids", "labels")  # [batch, sequence], if they are there


@dataclass(frozen=True)
class Tap:
    """Who wants to see what of a module: its "input", its "output", or an attention module's "q", "k" or "v"."""

    module: nn.Module
    where: str
    see: See


class Masks:
    """Which tokens of the batch that is running count, for any tensor of the model.

    The masks of a batch are `attention_mask` and, in an encoder-decoder, `decoder_attention_mask`, [batch, sequence].
    A tensor whose tokens cannot be told has no mask.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
        self._batches = batches
        self._masks: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._number = 0
        self._expert_of = {
            id(layer): each for each in model.modules() if isinstance(each, Expert) for layer in each.children()
        }
        self._encoder = _encoder_of(model) if getattr(_config(model), "is_encoder_decoder", False) else None
        self._in_encoder = {id(each) for each in self._encoder.modules()} if self._encoder is not None else set()
        others = [_encoder_of(model, modality) for modality in _OTHER_MODALITIES]
        self._not_text = {id(each) for other in others if other is not None for each in other.modules()}
        self._encoded: dict[int, ref[Tensor]] = {}

    def enter(self, number: int) -> None:
        """From now on tensors are those of this pass. Where batches are run twice, numbers go on after the last."""
        self._number = number

    @contextmanager
    def following(self) -> Iterator[None]:
        """While inside, what the encoder gives to the decoder is recognised."""
        if self._encoder is None:
            yield
            return

        def remember(module: nn.Module, args: Any, output: Any) -> None:
            found = first_tensor(output)
            if found is not None and self._current() != (None, None):
                self._encoded[self._number] = ref(found)

        hook = self._encoder.register_forward_hook(remember)
        try:
            yield
        finally:
            hook.remove()
            self._encoded.clear()

    def of(self, value: Tensor, module: nn.Module, where: str) -> Tensor | None:
        """The mask of a tensor that is seen at a module, of the shape of its tokens."""
        if self._current() == (None, None) or id(module) in self._not_text:
            return None
        tokens = (value.shape[0], value.shape[2]) if where in "qkv" and value.ndim == 4 else tuple(value.shape[:-1])
        expert = self._expert_of.get(id(module))
        if expert is not None and expert.tokens is not None:
            mask = self._of_tokens(value, module, (self._num_tokens(module),))
            return None if mask is None else mask[expert.tokens.to(mask.device)]
        return self._of_tokens(value, module, tokens)

    def are_chosen(self, module: nn.Module) -> bool:
        """Whether a module is just now given those tokens alone that have chosen its expert."""
        expert = self._expert_of.get(id(module))
        return expert is not None and expert.tokens is not None

    def chosen_of(self, module: nn.Module) -> Tensor | None:
        """Which of the tokens that a module is given just now have chosen its expert; None for all of them."""
        expert = self._expert_of.get(id(module))
        return None if expert is None else expert.chosen_by

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _current(self) -> tuple[Tensor | None, Tensor | None]:
        """The masks of the encoder's and the decoder's tokens; a model that is only one of them has the decoder's."""
        place = self._number % len(self._batches)
        if place not in self._masks:
            batch = self._batches[place]
            given, of_decoder = (_mask(batch.get(name)) for name in ("attention_mask", "decoder_attention_mask"))
            self._masks[place] = (None, given) if self._encoder is None else (given, of_decoder)
        return self._masks[place]

    def _num_tokens(self, module: nn.Module) -> int:
        of_encoder, of_decoder = self._current()
        mask = of_encoder if id(module) in self._in_encoder else of_decoder
        return 0 if mask is None else mask.numel()

    def _of_tokens(self, value: Tensor, module: nn.Module, tokens: tuple[int, ...]) -> Tensor | None:
        of_encoder, of_decoder = self._current()
        if id(module) in self._in_encoder:
            return _fitting(of_encoder, tokens, value)
        is_encoded = self._encoder is not None and (self._is_encoded(value) or self._is_no_decoder_shape(tokens))
        return _fitting(of_encoder if is_encoded else of_decoder, tokens, value)

    def _is_encoded(self, value: Tensor) -> bool:
        """Whether a tensor in the decoder is what the encoder made: its tokens are the encoder's."""
        encoded = self._encoded.get(self._number, lambda: None)()
        if encoded is None or encoded.shape != value.shape or encoded.dtype != value.dtype:
            return False
        return encoded is value or torch.equal(encoded, value)

    def _is_no_decoder_shape(self, tokens: tuple[int, ...]) -> bool:
        batch = self._batches[self._number % len(self._batches)]
        given = (batch.get(name) for name in _DECODER_INPUTS)
        return any(isinstance(each, Tensor) and tuple(each.shape) != tokens for each in given)


@contextmanager
def tapped(taps: Iterable[Tap], masks: Masks) -> Iterator[None]:
    """While inside, tensors of the tapped modules are shown."""
    gallery = Gallery()
    with ExitStack() as stack:
        for tap in taps:
            stack.callback(_register(tap, masks, gallery).remove)
        yield


def first_tensor(value: Any) -> Tensor | None:
    """What a module was given or gave back, where that is a tensor or begins with one."""
    while isinstance(value, Mapping | tuple | list) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    return value if isinstance(value, Tensor) else None


def _register(tap: Tap, masks: Masks, gallery: Gallery) -> Any:
    def show(value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            tap.see(gallery.show(tensor, lambda: masks.of(tensor, tap.module, tap.where)))

    if tap.where == "input":

        def before(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            show((*args, *keywords.values()))

        return tap.module.register_forward_pre_hook(before, with_kwargs=True)
    if tap.where == "output":
        return tap.module.register_forward_hook(lambda module, args, output: show(output))
    register = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}[tap.where]
    return register(tap.module, lambda module, value: show(value))


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _encoder_of(model: nn.Module, modality: str | None = None) -> nn.Module | None:
    """The encoder of a transformers model for some kind of data, if it has one."""
    find = getattr(model, "get_encoder", None)
    if not callable(find) or _config(model) is None:
        return None
    try:
        found = find() if modality is None else find(modality=modality)
    except (TypeError, AttributeError, ValueError):  # of an older interface
        return None
    is_part = isinstance(found, nn.Module) and found is not model and found is not getattr(model, "base_model", None)
    return found if is_part else None


def _mask(given: Any) -> Tensor | None:
    """A mask that leaves something out, or None."""
    is_mask = isinstance(given, Tensor) and given.ndim == 2 and not bool(given.all())
    return given if is_mask else None


def _fitting(mask: Tensor | None, tokens: tuple[int, ...], value: Tensor) -> Tensor | None:
    """The mask for tokens [batch, sequence], or for the same in a row; None if it is of other tokens."""
    if mask is None or (tuple(mask.shape) != tokens and tokens != (mask.numel(),)):
        return None
    return mask.reshape(tokens).to(value.device)
