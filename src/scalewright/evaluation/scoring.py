"""Two models on the same batches: what each says of every token, summed up by samples.

A batch goes through both models and is forgotten: no more than its logits are ever in memory, and what is computed from
them is in pieces of some rows. Padding does not count, nor does the first token of a sample, which nobody predicts, nor
what stands for an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scalewright.calibration.passes import quickly
from scalewright.calibration.sources import first_line
from scalewright.errors import DataError, ModelError
from scalewright.evaluation.figures import bin_edges, zeros
from scalewright.numerics.divergence import agreements, divergences, log_probabilities, losses

# N samples of a batch, L tokens of each with padding, R tokens that are predicted, V entries of the vocabulary.

NUM_WORST_SAMPLES = 5
NUM_WORST_TOKENS = 10
_CONTEXT = 16
_PIECE = 2**21  # logits that are looked at together: 16 MB in float64
_NOT_A_TARGET = -100  # what labels have where nothing is to be predicted
_NO_TEXT = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


@dataclass(frozen=True)
class WorstSample:
    """A sample on which the models are far apart; `text` is how it begins."""

    text: str
    num_tokens: int
    kl: float
    agreement: float


@dataclass(frozen=True)
class WorstToken:
    """A token about which the models are far apart: what stands before it, what came, and what each expected."""

    before: str
    came: str
    original: str
    original_probability: float
    quantised: str
    quantised_probability: float
    kl: float


@dataclass(frozen=True)
class Subject:
    """A model, and what it is called in messages."""

    name: str
    model: nn.Module

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True)
class Predictions:
    """What is predicted in a batch, and by which rows of its logits, seen as [N * L, V]."""

    ids_NL: Tensor
    mask_NL: Tensor
    samples_R: Tensor
    rows_R: Tensor
    targets_R: Tensor
    positions_R: Tensor
    """How many tokens stand before each, in its sample."""

    def before(self, number: int) -> list[int]:
        """The last few token ids before the token of that number."""
        sample, place = divmod(int(self.rows_R[number]), self.ids_NL.shape[1])
        return self._kept(sample, place + 1)[-_CONTEXT:]

    def beginning(self, sample: int) -> list[int]:
        """The first few token ids of a sample."""
        return self._kept(sample, self.ids_NL.shape[1])[:_CONTEXT]

    def _kept(self, sample: int, end: int) -> list[int]:
        found: list[int] = self.ids_NL[sample, :end][self.mask_NL[sample, :end]].tolist()
        return found


def prepared(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A batch that has the tokens to be predicted in it; those of an encoder-decoder come from its labels."""
    given = dict(batch)
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if is_answering(model) and "decoder_input_ids" not in given:
        if not isinstance(given.get("labels"), Tensor) or not callable(make):
            raise DataError(
                f"data: {type(model).__name__} is judged by its answers, and there are none in it. Give batches with "
                "input_ids and decoder_input_ids."
            )
        given["decoder_input_ids"] = make(labels=given["labels"])
    name = "decoder_input_ids" if is_answering(model) else "input_ids"
    if not isinstance(given.get(name), Tensor) or given[name].ndim != 2:
        raise DataError(f"data: its batches have no {name} [samples, tokens], so there is nothing to predict.")
    return given


def predictions_of(batch: Mapping[str, Any], model: nn.Module) -> Predictions:
    """What is predicted in a batch: the next token, or `labels` where the batch has them."""
    prefix = "decoder_" if is_answering(model) else ""
    ids_NL: Tensor = batch[f"{prefix}input_ids"]
    mask_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    given, labels_NL = batch.get(f"{prefix}attention_mask"), batch.get("labels")
    if isinstance(given, Tensor) and given.shape == ids_NL.shape:
        mask_NL = given != 0
    targets_NL = ids_NL.roll(-1, dims=1)
    counts_NL = mask_NL & mask_NL.roll(-1, dims=1)
    counts_NL[:, -1] = False  # what comes after the end is not known
    if isinstance(labels_NL, Tensor):  # an encoder-decoder's stand where they are predicted
        targets_NL = labels_NL if prefix else labels_NL.roll(-1, dims=1)
        counts_NL = mask_NL & (targets_NL != _NOT_A_TARGET) if prefix else counts_NL & (targets_NL != _NOT_A_TARGET)
    for placeholder in _placeholders(model):
        counts_NL &= targets_NL != placeholder
    rows_R = counts_NL.flatten().nonzero()[:, 0]
    targets_R, positions_R = (each.flatten()[rows_R] for each in (targets_NL, mask_NL.cumsum(dim=1)))
    return Predictions(ids_NL, mask_NL, rows_R // ids_NL.shape[1], rows_R, targets_R, positions_R)


def is_answering(model: nn.Module) -> bool:
    """Whether the model is an encoder-decoder: one that reads a text and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _placeholders(model: nn.Module) -> set[int]:
    """Token ids that stand for something other than text."""
    config = getattr(model, "config", None)
    found = (getattr(each, name, None) for each in (config, getattr(config, "text_config", None)) for name in _NO_TEXT)
    return {each for each in found if isinstance(each, int)}


# ---- logits ----------------------------------------------------------------------------------------------------------


def logits_of(subject: Subject, batch: Mapping[str, Any]) -> Tensor:
    """The logits of a batch as [N * L, V], in the model's own dtype."""
    model = subject.model
    inputs = {key: each.to(subject.device) if isinstance(each, Tensor) else each for key, each in batch.items()}
    inputs.pop("labels", None)  # a loss would be computed from them, with all logits in fp32
    if not _takes(model, "attention_mask"):
        inputs.pop("attention_mask", None)
    try:
        with quickly(model):
            output = model(**inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{subject.name}: cannot be run on this data ({first_line(error)}).") from error
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    decoded = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if not isinstance(logits, Tensor) or logits.ndim != 3 or decoded is None or logits.shape[:2] != decoded.shape:
        what = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(
            f"{subject.name}: {type(model).__name__} gives {what}, and no logits [samples, tokens, vocabulary]. Give a "
            "model that predicts tokens."
        )
    return logits.flatten(0, 1)


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def check_predicts(subject: Subject) -> None:
    """Say no to a model of transformers' that is known to predict no next token, before any data is run.

    Classifiers and the like have other answers; a masked model sees what it is asked for. Of other modules only their
    answers tell.
    """
    model: Any = subject.model
    is_known = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    if is_known and not model.can_generate():
        raise ModelError(
            f"{subject.name}: {type(model).__name__} predicts no next token, so it has neither perplexity nor KL. See "
            "what its layers keep with `scalewright report`, and compare what it answers on data of your own."
        )


def check_same_vocabulary(model: Subject, original: Subject, size: int, original_size: int) -> None:
    """Say no to models whose logits cannot be compared."""
    if size != original_size:
        raise ModelError(
            f"{model.name}: has {size} logits for each token, and {original.name} has {original_size}. Compare models "
            "of one vocabulary."
        )


def pieces_of(predictions: Predictions, vocabulary: int) -> Iterator[slice]:
    """Slices of R that are small enough to be looked at together."""
    step = max(1, _PIECE // vocabulary)
    num_rows = len(predictions.rows_R)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


# ---- sums ------------------------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Sums of each sample, float64: of the losses of both models, of KL, and how often they agree; and the worst."""

    num_positions: int
    has_original: bool
    loss: list[Tensor] = field(default_factory=list)
    original_loss: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    """Tokens by bins of positions, as the following are."""
    kl: list[Tensor] = field(default_factory=list)
    agreed: list[Tensor] = field(default_factory=list)
    worst_samples: list[tuple[float, float, int, list[int]]] = field(default_factory=list)
    """KL, agreement, number of tokens, token ids."""
    worst_tokens: list[tuple[float, list[int], int, int, float, int, float]] = field(default_factory=list)
    """KL, ids before it, what came, what the original expected and how much, and what the other did."""

    def __post_init__(self) -> None:
        self.edges = bin_edges(self.num_positions)

    def add(self, batch: Mapping[str, Any], model: Subject, original: Subject | None) -> None:
        """Run a batch through both models, and add what they say."""
        predictions = predictions_of(batch, model.model)
        logits = logits_of(model, batch)
        original_logits = None if original is None else logits_of(original, batch)
        if original is not None and original_logits is not None:
            check_same_vocabulary(model, original, logits.shape[-1], original_logits.shape[-1])
        tally = _Tally(len(predictions.rows_R))
        for piece in pieces_of(predictions, logits.shape[-1]):
            rows_T, targets_T = predictions.rows_R[piece], predictions.targets_R[piece]
            tally.score(piece, _rows(logits, rows_T), _rows(original_logits, rows_T), targets_T)
        tally.check(model, original)
        self._sum_up(predictions, tally)
        if original is not None:
            self._remember_worst(predictions, tally)

    def _sum_up(self, predictions: Predictions, tally: _Tally) -> None:
        num_samples = len(predictions.ids_NL)
        samples_R = predictions.samples_R.cpu()
        bins_R = torch.bucketize(predictions.positions_R.cpu(), torch.tensor(self.edges))

        def by_bins(values_R: Tensor) -> Tensor:
            return zeros(num_samples, len(self.edges)).index_put_((samples_R, bins_R), values_R, accumulate=True)

        def by_samples(values_R: Tensor) -> Tensor:
            return zeros(num_samples, 1)[:, 0].index_add_(0, samples_R, values_R)

        self.counts.append(by_bins(torch.ones_like(tally.loss_R)))
        self.loss.append(by_samples(tally.loss_R))
        if self.has_original:
            self.original_loss.append(by_samples(tally.original_loss_R))
            self.kl.append(by_bins(tally.kl_R))
            self.agreed.append(by_bins(tally.agreed_R))

    def _remember_worst(self, predictions: Predictions, tally: _Tally) -> None:
        counts_N, kl_N, agreed_N = (each[-1].sum(dim=1).tolist() for each in (self.counts, self.kl, self.agreed))
        for number, (count, kl, agreed) in enumerate(zip(counts_N, kl_N, agreed_N, strict=True)):
            if count:
                self.worst_samples.append((kl / count, agreed / count, int(count), predictions.beginning(number)))
        self.worst_samples = sorted(self.worst_samples, key=lambda each: (-each[0], each[3]))[:NUM_WORST_SAMPLES]
        for at in tally.kl_R.topk(min(NUM_WORST_TOKENS, len(tally.kl_R))).indices.tolist():
            expected = [(int(ids_R[at]), float(p_R[at])) for ids_R, p_R in (tally.original_choice, tally.choice)]
            came = int(predictions.targets_R[at])
            self.worst_tokens.append((float(tally.kl_R[at]), predictions.before(at), came, *expected[0], *expected[1]))
        self.worst_tokens = sorted(self.worst_tokens, key=lambda each: (-each[0], each[1]))[:NUM_WORST_TOKENS]


class _Tally:
    """What is known of the tokens of one batch, on the CPU."""

    def __init__(self, num_rows: int) -> None:
        self.loss_R, self.original_loss_R, self.kl_R, self.agreed_R = (
            torch.zeros(num_rows, dtype=torch.float64) for _ in range(4)
        )
        self.choice, self.original_choice = (
            (torch.zeros(num_rows, dtype=torch.long), torch.zeros(num_rows, dtype=torch.float64)) for _ in range(2)
        )

    def score(self, piece: slice, logits_TV: Tensor, original_TV: Tensor | None, targets_T: Tensor) -> None:
        """Fill in some of the tokens."""
        log_q_TV = log_probabilities(logits_TV)
        self.loss_R[piece] = losses(log_q_TV, targets_T.to(log_q_TV.device)).cpu().double()
        if original_TV is None:
            return
        log_p_TV = log_probabilities(original_TV.to(logits_TV.device))
        self.original_loss_R[piece] = losses(log_p_TV, targets_T.to(log_p_TV.device)).cpu().double()
        self.agreed_R[piece] = agreements(log_p_TV, log_q_TV).cpu().double()
        for (expected_R, probability_R), log_TV in ((self.original_choice, log_p_TV), (self.choice, log_q_TV)):
            largest = log_TV.max(dim=-1)
            expected_R[piece], probability_R[piece] = largest.indices.cpu(), largest.values.exp().cpu().double()
        self.kl_R[piece] = divergences(log_p_TV, log_q_TV).cpu().double()

    def check(self, model: Subject, original: Subject | None) -> None:
        """Say no to a model that is broken."""
        checked = [(self.loss_R, model)]
        if original is not None:
            checked = [(self.original_loss_R, original), *checked, (self.kl_R, model)]
        for found_R, subject in checked:
            num_broken = int((~found_R.isfinite()).sum())
            if num_broken:
                raise ModelError(
                    f"{subject.name}: its logits of {num_broken} of {len(found_R)} tokens are not finite, or rule out "
                    "what can come. A weight or a scale in it is broken."
                )


def _rows(logits: Tensor | None, rows_T: Tensor) -> Any:
    return None if logits is None else logits[rows_T.to(logits.device)]
