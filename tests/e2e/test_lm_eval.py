"""lm-eval reads our checkpoints without a network, by the task that the docs show, and measures what we measure."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scalewright import evaluate, oneshot

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
TEXTS = STORIES.parents[1] / "data" / "tinystories_eval.txt"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not STORIES.is_dir(), reason="the trained model stories260K does not lie beside the project"),
    pytest.mark.skipif(
        not (find_spec("lm_eval") and find_spec("accelerate")),
        reason="lm-eval is not installed: it brings forty packages that nothing else needs. pip install 'lm-eval[hf]'",
    ),
]


def test_lm_eval_measures_what_evaluate_does(tmp_path):
    oneshot(STORIES, scheme="FP8_DYNAMIC", output_dir=tmp_path / "out")
    texts = [each.strip()[:200] for each in TEXTS.read_text(encoding="utf-8").split("<|endoftext|>")[:4]]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts), "utf-8")
    page = (ROOT / "docs" / "evaluating.md").read_text(encoding="utf-8")
    (task,) = re.findall(r"^```yaml\n(task: local_ppl\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"lm_eval (--model hf .*?)\n```", page, re.DOTALL)
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "local_ppl.yaml").write_text(task, "utf-8")
    words = [sys.executable, "-m", "lm_eval", *command.replace("\\\n", " ").replace("=OUT", "=out").split()]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [*words, "--output_path", "results.json"],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (results,) = tmp_path.rglob("results*.json")
    theirs = json.loads(results.read_text(encoding="utf-8"))["results"]["local_ppl"]["bits_per_byte,none"]
    ours = evaluate(tmp_path / "out", dataset=texts, generate=False)
    bits = math.log2(ours.perplexity.value) * ours.num_tokens / sum(len(each.encode()) for each in texts)
    assert theirs == pytest.approx(bits, rel=1e-4)
