"""Where the parts of an evaluation meet: two models and data go in, an `Evaluation` comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.passes import evaluating, without_cache
from scalewright.calibration.pipelines import OnStep, silent
from scalewright.calibration.sources import DataOptions, check_file
from scalewright.checkpoint.cut_files import outliving_cuts
from scalewright.checkpoint.loading import (
    check_device,
    check_dtype,
    check_model,
    load_companions,
    positions_of,
    samples_for,
    sequence_length,
    vocabulary_of,
)
from scalewright.checkpoint.reading import load_checkpoint, without_all_bars
from scalewright.errors import DataError
from scalewright.evaluation.figures import Figure, PositionBin, curve_of, mean_of, perplexity_of
from scalewright.evaluation.generation import NUM_NEW_TOKENS, Generation, look_at, prompts_of, why_not
from scalewright.evaluation.scoring import (
    Scores,
    Subject,
    WorstSample,
    WorstToken,
    check_predicts,
    check_same_vocabulary,
    predictions_of,
    prepared,
)

_LOGITS_IN_A_BATCH = 2**26  # 256 MB in fp32
_TOKENS_IN_A_BATCH = 2048


@dataclass(frozen=True)
class Evaluation:
    """How much of a model is left, and how sure that is. Losses and KL are in nats, means over tokens.

    Without an original there are only perplexity and generation.
    """

    model: str
    against: str | None
    num_samples: int
    num_tokens: int
    """Tokens that were predicted."""
    perplexity: Figure
    original_perplexity: Figure | None
    loss_increase: Figure | None
    """Of the mean loss; its error is that of the difference, much less than that of either."""
    kl: Figure | None
    """KL(original || model)."""
    agreement: Figure | None
    """How often both find the same token likeliest."""
    positions: list[PositionBin]
    worst_samples: list[WorstSample]
    worst_tokens: list[WorstToken]
    generation: Generation | None
    notes: list[str]
    seed: int

    @property
    def babbles(self) -> bool:
        """Whether the model writes what it should not."""
        return self.generation is not None and self.generation.babbles

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


@outliving_cuts()
def evaluate(
    model: nn.Module | str | Path,
    *,
    against: nn.Module | str | Path | None = None,
    dataset: Any,
    tokenizer: Any = None,
    num_samples: int = 128,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    generate: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Evaluation:
    """Measure a model, quantised or not, on data that it has not been calibrated with, and beside the original.

    Both models are given as objects or by path or hub name. Objects are run as they are, where they are; `device` and
    `dtype` are for those that are loaded. Data options are those of `oneshot`. With `generate` the models also write
    200 tokens after each of a few prompts.
    """
    check_model(model)
    if against is not None:
        check_model(against, "against")
    check_dtype(dtype)
    check_device(device)
    if dataset is None:
        raise DataError("a model is evaluated by running data through it. Give a dataset.")
    check_file(dataset)
    given = [each for each in (model, against) if each is not None]
    subjects: list[Subject] = []
    notes: list[str] = []
    for number, each in enumerate(given):
        on_step("loading", _name_of(each), number, len(given))
        subject, of_loading = _loaded(each, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        check_predicts(subject)
        subjects.append(subject)
        notes += of_loading
    on_step("loading", subjects[-1].name, len(given), len(given))
    sizes = [size for each in subjects if (size := vocabulary_of(each.model)) is not None]
    if len(sizes) == 2:
        check_same_vocabulary(subjects[0], subjects[1], *sizes)  # before token ids of one are shown to the other
    companions = (load_companions(each, tokenizer, trust_remote_code=trust_remote_code) for each in given)
    found = next((each for each in companions if each), [])
    shortest = min(subjects, key=lambda each: positions_of(each.model) or 2**31).model
    largest = max(vocabulary_of(each.model) or 1 for each in subjects)
    options = DataOptions(
        num_samples,
        sequence_length(shortest, max_seq_length),
        batch_size,
        column,
        pack,
        split,
        seed,
        tokens_per_batch=max(1, min(_TOKENS_IN_A_BATCH, _LOGITS_IN_A_BATCH // largest)),
        is_calibration=False,
    )
    samples = samples_for(shortest, dataset, options, found)
    in_words = _words(found)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_all_bars())
        for subject in subjects:
            stack.enter_context(evaluating(subject.model))
        batches = [prepared(batch, subjects[0].model) for batch in samples.batches]
        scores = _scored(batches, subjects, on_step)
        generation = None
        if generate:
            reasons = [reason for each in subjects if (reason := why_not(each))]
            notes += reasons[:1]
            prompts = prompts_of(batches, subjects[0].model)
            if not reasons:
                generation = _generated(prompts, subjects, in_words, on_step)
    return _evaluation(subjects, scores, generation, in_words, [*notes, *samples.notes], seed)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _loaded(model: nn.Module | str | Path, **options: Any) -> tuple[Subject, list[str]]:
    if isinstance(model, nn.Module):
        return Subject(_name_of(model), model), []
    loaded, notes = load_checkpoint(model, **options)
    return Subject(_name_of(model), loaded), notes


def _name_of(model: nn.Module | str | Path) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else str(model)


def _scored(batches: Sequence[dict[str, Any]], subjects: Sequence[Subject], on_step: OnStep) -> Scores:
    """What the models say of all batches."""
    model, original = subjects[0], subjects[1] if len(subjects) > 1 else None
    predicted = [predictions_of(batch, model.model).positions_R for batch in batches]
    total = sum(map(len, predicted))
    if total == 0:
        raise DataError("data: no sample has two tokens, and the first one is not predicted. Give longer samples.")
    scores = Scores(max(int(each.max()) for each in predicted if len(each)), has_original=original is not None)
    done = 0
    on_step("evaluating", model.name, 0, total)
    with ExitStack() as stack:
        for each in subjects:
            stack.enter_context(without_cache(each.model))
        for batch, positions_R in zip(batches, predicted, strict=True):
            if len(positions_R):
                scores.add(batch, model, original)
            done += len(positions_R)
            on_step("evaluating", model.name, done, total)
    return scores


def _generated(
    prompts: Sequence[Sequence[int]], subjects: Sequence[Subject], in_words: _InWords, on_step: OnStep
) -> Generation:
    """What the models write after the prompts."""
    model, original = subjects[0], subjects[1] if len(subjects) > 1 else None
    total = NUM_NEW_TOKENS * len(subjects)

    def on_token(done: int) -> None:
        on_step("generating", subjects[done // NUM_NEW_TOKENS].name, done, total)

    on_step("generating", model.name, 0, total)
    generation = look_at(prompts, model, original, in_words=in_words, on_token=on_token)
    on_step("generating", subjects[-1].name, total, total)
    return generation


def _evaluation(
    subjects: Sequence[Subject],
    scores: Scores,
    generation: Generation | None,
    in_words: _InWords,
    notes: list[str],
    seed: int,
) -> Evaluation:
    """The figures that sums of samples give."""
    counts_SB, loss_S = torch.cat(scores.counts), torch.cat(scores.loss)
    counts_S = counts_SB.sum(dim=1)
    num_samples = int((counts_S > 0).sum())
    if num_samples < 2:
        notes.append("data: one sample has no standard error. Give more of them.")
    original_perplexity = loss_increase = kl = agreement = None
    positions: list[PositionBin] = []
    if scores.has_original:
        original_loss_S, kl_SB, agreed_SB = map(torch.cat, (scores.original_loss, scores.kl, scores.agreed))
        original_perplexity = perplexity_of(original_loss_S, counts_S)
        loss_increase = mean_of(loss_S - original_loss_S, counts_S)
        kl, agreement = mean_of(kl_SB.sum(dim=1), counts_S), mean_of(agreed_SB.sum(dim=1), counts_S)
        positions = curve_of(scores.edges, kl_SB, agreed_SB, counts_SB)
    return Evaluation(
        subjects[0].name,
        subjects[1].name if len(subjects) > 1 else None,
        num_samples,
        int(counts_S.sum()),
        perplexity_of(loss_S, counts_S),
        original_perplexity,
        loss_increase,
        kl,
        agreement,
        positions,
        [WorstSample(in_words(ids), count, kl, agreed) for kl, agreed, count, ids in scores.worst_samples],
        [
            WorstToken(in_words(before), in_words([came]), in_words([p_id]), p, in_words([q_id]), q, kl)
            for kl, before, came, p_id, p, q_id, q in scores.worst_tokens
        ],
        generation,
        notes,
        seed,
    )


_InWords = Callable[[Sequence[int]], str]


def _words(companions: Sequence[Any]) -> _InWords:
    """Token ids as a text that is safe to show; as numbers where there is no tokenizer."""
    tokenizer = getattr(companions[0], "tokenizer", companions[0]) if companions else None

    def in_words(ids: Sequence[int]) -> str:
        text = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(list(ids)))
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

    return in_words
