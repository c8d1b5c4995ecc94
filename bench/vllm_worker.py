"""Runs in vLLM's environment: prompts in, log-probabilities and greedy continuations out.

    python bench/vllm_worker.py CHECKPOINT PROMPTS.json ANSWERS.json

PROMPTS is a list of lists of token ids. ANSWERS has, for each, the log-probability of every token after the first, and
the ids of a greedy continuation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

NUM_GREEDY = 60


def main() -> None:
    """Ask vLLM."""
    checkpoint, prompts_file, answers_file = sys.argv[1:]
    prompts = json.loads(Path(prompts_file).read_text(encoding="utf-8"))
    longest = max(len(each) for each in prompts)
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=longest + NUM_GREEDY,
        max_num_seqs=4,
        max_num_batched_tokens=max(256, longest + NUM_GREEDY),
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    inputs = [{"prompt_token_ids": each} for each in prompts]
    scored = llm.generate(inputs, SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False))
    greedy = llm.generate(
        inputs, SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, detokenize=False)
    )
    answers = [
        {
            "log_probs": [
                place[token].logprob
                for place, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)
            ],
            "greedy": list(two.outputs[0].token_ids),
        }
        for one, two in zip(scored, greedy, strict=True)
    ]
    Path(answers_file).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
