"""What a model says of its layers: their inputs, and how log p would change with their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalewright.calibration.passes import calling, evaluating, without_cache
from scalewright.calibration.pipelines import OnStep
from scalewright.calibration.taps import Masks, first_tensor
from scalewright.errors import ModelError
from scalewright.observers.importance import leave_importance, sum_squares
from scalewright.sensitivity.partners import given_one_input

# B samples of a batch, T tokens, V entries of the vocabulary, I inputs and O outputs of a layer.

_TOKENS = 16384  # that flow through the model, at the most
_KEPT = 1024  # of these, about, that each layer keeps


@dataclass(frozen=True)
class Piece:
    """Some tokens that came to layers with one input, and how many of all tokens each stands for."""

    x_TI: Tensor
    gradients: dict[str, Tensor]
    """Of log p at the outputs [T, O], by layer."""
    stands_for_T: Tensor


class Evidence:
    """Inputs of layers, and the gradients of log p at their outputs, for some of the tokens that the model was run on.

    A few tokens in a thousand may cost more than all others together, and which those are depends on the layer. So many
    tokens are run, and each layer keeps those that may matter to it: with a chance that grows with |x| |g|.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        batches: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        on_step: OnStep,
    ) -> None:
        self._model = model
        self._layers = layers
        self._set_of = {name: names[0] for names in given_one_input(list(layers)) for name in names}
        self._pieces: dict[str, list[Piece]] = {}
        self._squares: dict[str, tuple[Tensor, int]] = {}
        used = _some_of(batches)
        total = sum(_tokens_of(batch) for batch in used)
        self._share = min(1.0, _KEPT / total)
        self._masks = Masks(model, used)
        self._of_words, self._of_tokens = (torch.Generator().manual_seed(seed) for _ in range(2))
        self.num_tokens = 0
        shown = 0
        with evaluating(model), without_cache(model), _without_gradients(model), self._masks.following():
            for number, batch in enumerate(used):
                on_step("gathering", f"batch {number + 1} of {len(used)}", shown, total)
                self._masks.enter(number)
                self._run(batch, number, len(used))
                shown += _tokens_of(batch)
                on_step("gathering", f"batch {number + 1} of {len(used)}", shown, total)

    def has_seen(self, name: str) -> bool:
        """Whether any token came to a layer."""
        return name in self._squares

    def pieces_of(self, names: Sequence[str]) -> list[Piece]:
        """What is known of partners."""
        return self._pieces.get(self._set_of[names[0]], [])

    def input_of(self, name: str) -> Tensor:
        """Inputs of a layer [T, I]; zeros if no token came to it."""
        found = [piece.x_TI for piece in self.pieces_of([name]) if name in piece.gradients and len(piece.x_TI)]
        return (
            torch.cat(found) if found else self._layers[name].weight.detach().new_zeros(1, _width(self._layers[name]))
        )

    def leave_importance(self, name: str, module: nn.Module) -> None:
        """Leave what is known of all inputs of a layer on a copy of it."""
        if name in self._squares:
            sum_C, count = self._squares[name]
            leave_importance(module, sum_C, torch.tensor(count, device=sum_C.device))

    def forget(self, names: Sequence[str]) -> None:
        """Let go of what is known of some layers."""
        for name in names:
            self._pieces.pop(self._set_of[name], None)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _run(self, batch: Mapping[str, Any], number: int, count: int) -> None:
        """One batch, of that number among so many, forwards and backwards."""
        calls: list[tuple[str, Tensor, Tensor]] = []  # layer, its input, its output
        with ExitStack() as stack, torch.enable_grad():
            for name, module in self._layers.items():
                stack.callback(module.register_forward_hook(_noting(name, calls), with_kwargs=True).remove)
            with calling(self._model, batch, number, count):
                logits_BTV = getattr(self._model(**batch), "logits", None)
            if not isinstance(logits_BTV, Tensor) or logits_BTV.ndim != 3 or not logits_BTV.requires_grad:
                raise ModelError(
                    f"{type(self._model).__name__}: gives no logits of tokens that its layers have a part in, so what "
                    "layers lose cannot be measured. Give a language model."
                )
            log_p_TV = logits_BTV[_counted(batch, logits_BTV)].float().log_softmax(dim=-1)
            num_broken = int(log_p_TV.detach().isnan().any(dim=-1).sum())
            if num_broken:
                raise ModelError(
                    f"{type(self._model).__name__}: its logits of {num_broken} of {len(log_p_TV)} tokens are not "
                    "finite, so what layers lose cannot be measured. A weight in it is broken: `scalewright observe` "
                    "names the layer."
                )
            drawn_T = torch.multinomial(log_p_TV.detach().exp().cpu(), 1, generator=self._of_words)
            log_p = log_p_TV.gather(1, drawn_T.to(log_p_TV.device)).sum()
            gradients = torch.autograd.grad(log_p, [output for *_, output in calls], allow_unused=True)
        self.num_tokens += len(log_p_TV)
        together: dict[tuple[str, int], tuple[Tensor, dict[str, Tensor]]] = {}
        for (name, value, output), gradient in zip(calls, gradients, strict=True):
            rows = self._rows(value, self._layers[name])
            x_TI = value.detach().reshape(-1, value.shape[-1])[rows]
            if len(x_TI):
                self._add_squares(name, x_TI)
                given = torch.zeros_like(output) if gradient is None else gradient
                _, by_layer = together.setdefault((self._set_of[name], id(value)), (x_TI, {}))
                by_layer[name] = given.reshape(-1, given.shape[-1])[rows].float()
        for (first, _), (x_TI, by_layer) in together.items():
            self._pieces.setdefault(first, []).append(self._some_tokens(x_TI, by_layer))

    def _some_tokens(self, x_TI: Tensor, gradients: dict[str, Tensor]) -> Piece:
        size_T = x_TI.float().square().sum(dim=-1) * sum(each.square().sum(dim=-1) for each in gradients.values())
        kept, stands_for_T = drawn_tokens(size_T.sqrt(), self._share, self._of_tokens)
        return Piece(x_TI[kept], {name: each[kept] for name, each in gradients.items()}, stands_for_T)

    def _add_squares(self, name: str, x_TI: Tensor) -> None:
        sum_C, count = sum_squares(x_TI)
        known = self._squares.get(name)
        self._squares[name] = (sum_C, count) if known is None else (known[0] + sum_C, known[1] + count)

    def _rows(self, value: Tensor, module: nn.Module) -> Tensor:
        """Which of the tokens of a layer's input count."""
        mask = self._masks.of(value, module, "input")
        num_rows = value.numel() // value.shape[-1]
        return torch.arange(num_rows, device=value.device) if mask is None else mask.reshape(-1).nonzero()[:, 0]


def drawn_tokens(size_T: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which tokens are kept, and how many each of them stands for, so that sums over tokens are right on average.

    Half of the chances go by size, and half are equal, for who is wrong about sizes. With a share of 1 all are kept.
    """
    sizes_T = size_T.double().cpu()
    by_size_T = sizes_T / sizes_T.sum().clamp_min(1e-300)
    chance_T = (share * len(sizes_T) * (by_size_T + 1 / len(sizes_T)) / 2).clamp_max(1)
    chance_T = chance_T if share < 1 else torch.ones_like(chance_T)
    kept = (torch.rand(len(sizes_T), generator=generator, dtype=torch.float64) < chance_T).nonzero()[:, 0]
    return kept.to(size_T.device), (1 / chance_T[kept]).float().to(size_T.device)


def _noting(name: str, calls: list[tuple[str, Tensor, Tensor]]) -> Callable[..., Tensor | None]:
    """A hook that notes the input and the output of a layer, and makes the output one that has a gradient."""

    def note(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> Tensor | None:
        value = first_tensor((*args, *keywords.values()))
        assert value is not None
        is_first = not output.requires_grad
        output = output.detach().requires_grad_() if is_first else output
        calls.append((name, value, output))
        return output.clone() if is_first else None  # a copy, for who works in place on what it is given

    return note


def _width(module: nn.Linear) -> int:
    return int(module.weight.shape[1])


def _some_of(batches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first batches, of as many tokens as are needed."""
    used: list[Mapping[str, Any]] = []
    total = 0
    for batch in batches:
        if used and total + _tokens_of(batch) > _TOKENS:
            break
        used.append(batch)
        total += _tokens_of(batch)
    return used


def _tokens_of(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return max(1, int(mask.sum()))
    return max(1, ids.numel()) if isinstance(ids, Tensor) else 1


def _counted(batch: Mapping[str, Any], logits_BTV: Tensor) -> Tensor:
    """Which predictions count [B, T]: those at padding do not."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.shape == logits_BTV.shape[:2]:
            return mask.bool().to(logits_BTV.device)
    return torch.ones(logits_BTV.shape[:2], dtype=torch.bool, device=logits_BTV.device)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """While inside, no parameter asks for a gradient: those of activations are all that is wanted."""
    asking = [each for each in model.parameters() if each.requires_grad]
    for each in asking:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in asking:
            each.requires_grad_(True)
