"""What models write: long greedy texts from a few prompts, and whether one of them babbles.

A model may do well token by token and still fall apart when it goes on from its own words: it repeats itself, or drifts
into what the original would never say. So texts are measured for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from scalewright.calibration.sources import first_line
from scalewright.checkpoint.loading import positions_of
from scalewright.errors import ModelError
from scalewright.evaluation.scoring import (
    Subject,
    is_answering,
    logits_of,
    predictions_of,
)
from scalewright.numerics.divergence import log_probabilities, losses

NUM_PROMPTS = 8
NUM_NEW_TOKENS = 200
PROMPT_LENGTH = 16
_GRAM = 4
_ROUNDS = 3  # how often a piece must come in a row to be a loop
# Between W3A16 (KL .43 and .58) and W2A16 (2.9 and 4.7) of stories260K and stories15M. In repeats they differ from the
# originals by -.10 and +.08, and by -.38 and +.84; in perplexity by factors of 1.7 and 2.2, and of 79 and 1,500.
_MUCH_MORE = 0.25
_STRANGE = 4.0
_ALONE = 0.5


@dataclass(frozen=True)
class Text:
    """What a model wrote after a prompt."""

    text: str
    num_tokens: int
    repeated: float
    """The share of its runs of four tokens that it has already had."""
    longest_loop: int
    """Tokens of the longest stretch in which one piece comes three times in a row or more; 0 if there is none."""
    perplexity: float
    """What the original (or the model itself, if there is none) makes of it."""


@dataclass(frozen=True)
class Pair:
    """A prompt, and what both models wrote after it."""

    prompt: str
    quantised: Text
    original: Text | None
    diverges_at: int | None
    """The first token, counted from 1, at which the texts differ; None if they never do."""
    agreement: float | None
    """The share of the original's tokens which the other would have chosen, too, after the same words."""


@dataclass(frozen=True)
class Habits:
    """The texts of a model together: the mean of their repetition, the longest loop, the geometric mean perplexity."""

    repeated: float
    longest_loop: int
    perplexity: float


@dataclass(frozen=True)
class Generation:
    """What models write, and what to make of it."""

    pairs: list[Pair]
    quantised: Habits
    original: Habits | None
    agreement: float | None
    """The mean of that of the pairs."""
    babbles: bool
    verdict: str


def repeated_share(ids: Sequence[int]) -> float:
    """The share of runs of four tokens that came before in the same text; 0 for a text that has none."""
    grams = [tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def longest_loop(ids: Sequence[int]) -> int:
    """How many tokens the longest stretch has in which a piece comes three times in a row, or more; 0 without one."""
    longest = 0
    for period in range(1, len(ids) // _ROUNDS + 1):
        run = 0
        for place in range(period, len(ids)):
            run = run + 1 if ids[place] == ids[place - period] else 0
            if run >= (_ROUNDS - 1) * period:
                longest = max(longest, run + period)
    return longest


def prompts_of(batches: Sequence[Mapping[str, Any]], model: nn.Module) -> list[list[int]]:
    """The first tokens of some samples, all as many and no two the same; half of a sample that is short."""
    found: dict[tuple[int, ...], None] = {}
    for batch in batches:
        predictions = predictions_of(batch, model)
        for number in sorted(set(predictions.samples_R.tolist())):
            ids = predictions.beginning(number)
            half = (int(predictions.mask_NL[number].sum()) + 1) // 2
            found[tuple(ids[: min(half, PROMPT_LENGTH)])] = None
            if len(found) == NUM_PROMPTS:
                return _equally_long(found)
    return _equally_long(found)


def _equally_long(prompts: Mapping[tuple[int, ...], None]) -> list[list[int]]:
    length = min(map(len, prompts), default=0)
    return [list(each) for each in dict.fromkeys(each[:length] for each in prompts)]


# ---- writing ---------------------------------------------------------------------------------------------------------


def why_not(subject: Subject) -> str | None:
    """Why a model cannot go on with a text, if it cannot."""
    model = subject.model
    if is_answering(model):
        return f"{subject.name}: what it writes is not looked at, for an encoder-decoder answers and does not go on."
    if not hasattr(model, "generate") or not getattr(model, "can_generate", lambda: True)():
        return f"{subject.name}: what it writes is not looked at, for {type(model).__name__} cannot generate."
    return None


def write(subject: Subject, prompts: Sequence[Sequence[int]], on_token: Callable[[int], None]) -> list[list[int]]:
    """What a model goes on with, always taking the likeliest token, until it ends the text or has 200 of them."""
    model: Any = subject.model
    length = len(prompts[0])
    ids = torch.tensor(prompts, device=subject.device)
    ends = _ends(model)
    settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max(1, min(NUM_NEW_TOKENS, (positions_of(model) or 2**31) - length)),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )

    def count(seen: Tensor, scores: Tensor) -> Tensor:
        on_token(seen.shape[1] - length)
        return scores

    try:
        with _only_with(model, settings):
            written = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[count])
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{subject.name}: cannot go on with a text ({first_line(error)}).") from None
    return [_until_end(each, ends) for each in written[:, length:].tolist()]


def _ends(model: Any) -> list[int]:
    """Token ids that end a text."""
    for config in (getattr(model, "generation_config", None), model.config, getattr(model.config, "text_config", None)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return [int(each) for each in found] if isinstance(found, list | tuple) else [int(found)]
    return []


@contextmanager
def _only_with(model: Any, settings: Any) -> Iterator[None]:
    """While inside, the model generates as the settings say; penalties and samplers of its own are put aside."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return ids[: next((place + 1 for place, each in enumerate(ids) if each in ends), len(ids))]


# ---- judging ---------------------------------------------------------------------------------------------------------


def look_at(
    prompts: Sequence[Sequence[int]],
    model: Subject,
    original: Subject | None,
    *,
    in_words: Callable[[Sequence[int]], str],
    on_token: Callable[[int], None] = lambda done: None,
) -> Generation:
    """Let the models write, and measure what they have written."""
    written = write(model, prompts, on_token)
    texts = _texts(written, _judged(original or model, prompts, written), in_words)
    if original is None:
        return _summed_up(
            [Pair(in_words(prompt), text, None, None, None) for prompt, text in zip(prompts, texts, strict=True)]
        )
    wanted = write(original, prompts, lambda done: on_token(NUM_NEW_TOKENS + done))
    expected, chosen = (_judged(each, prompts, wanted) for each in (original, model))
    originals = _texts(wanted, expected, in_words)
    pairs = []
    for number, prompt in enumerate(prompts):
        agreed_T = expected[number].choices_T == chosen[number].choices_T
        differs_at = _diverges_at(written[number], wanted[number])
        agreement = float(agreed_T.double().mean())
        pairs.append(Pair(in_words(prompt), texts[number], originals[number], differs_at, agreement))
    return _summed_up(pairs)


@dataclass(frozen=True)
class _Judged:
    """What a model makes of a text: its mean loss, and what it would have written in place of each token."""

    loss: float
    choices_T: Tensor


def _judged(subject: Subject, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[_Judged]:
    """What a model makes of texts that follow prompts, one by one: so no padding can matter."""
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        logits_TV = logits_of(subject, {"input_ids": torch.tensor([[*prompt, *text]])})[len(prompt) - 1 : -1]
        log_p_TV = log_probabilities(logits_TV)
        loss = float(losses(log_p_TV, torch.tensor(text, device=log_p_TV.device)).mean())
        found.append(_Judged(loss, log_p_TV.argmax(dim=-1).cpu()))
    return found


def _texts(
    texts: Sequence[Sequence[int]], judged: Sequence[_Judged], in_words: Callable[[Sequence[int]], str]
) -> list[Text]:
    return [
        Text(in_words(ids), len(ids), repeated_share(ids), longest_loop(ids), exp(min(each.loss, 700.0)))
        for ids, each in zip(texts, judged, strict=True)
    ]


def _diverges_at(one: Sequence[int], other: Sequence[int]) -> int | None:
    if list(one) == list(other):
        return None
    same = (place for place, (a, b) in enumerate(zip(one, other, strict=False), start=1) if a != b)
    return next(same, min(len(one), len(other)) + 1)


def _summed_up(pairs: list[Pair]) -> Generation:
    """Means over the prompts, and a verdict.

    By chance alone a good model may repeat more than the original from one prompt and less from another, so a
    difference must be large, and also twice its standard error over the prompts.
    """
    own = _habits([each.quantised for each in pairs])
    texts = [each.original for each in pairs if each.original is not None]
    if not texts:
        babbles = own.repeated > _ALONE
        verdict = f"{_does(babbles)}: {own.repeated:.0%} of its runs of four tokens are repeats."
        verdict += " Small models may do so by nature: evaluate it against the original." if babbles else ""
        return Generation(pairs, own, None, None, babbles, verdict)
    original = _habits(texts)
    more = own.repeated - original.repeated
    squares = sum(
        (pair.quantised.repeated - text.repeated - more) ** 2 for pair, text in zip(pairs, texts, strict=True)
    )
    error = (squares / (len(pairs) - 1) / len(pairs)) ** 0.5 if len(pairs) > 1 else 0.0
    babbles = more > max(_MUCH_MORE, 2 * error) or own.perplexity > original.perplexity * _STRANGE
    verdict = (
        f"{_does(babbles)}: {own.repeated:.0%} of its runs of four tokens are repeats (of the original's "
        f"{original.repeated:.0%}), and to the original its text has a perplexity of {own.perplexity:.3g} (the "
        f"original's own {original.perplexity:.3g})."
    )
    agreement = sum(each.agreement or 0.0 for each in pairs) / len(pairs)
    return Generation(pairs, own, original, agreement, babbles, verdict)


def _does(babbles: bool) -> str:
    return "babbles" if babbles else "does not babble"


def _habits(texts: Sequence[Text]) -> Habits:
    return Habits(
        sum(each.repeated for each in texts) / len(texts),
        max(each.longest_loop for each in texts),
        exp(sum(log(each.perplexity) for each in texts) / len(texts)),
    )
