"""What `evaluate` measures, held to plain definitions; what it leaves as it was; and what it says no to."""

from __future__ import annotations

import copy
import json
import logging
import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import torch
import transformers
from bigrams import VOCAB, Bigram, bigram, following
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from scalewright import evaluate, oneshot
from scalewright.checkpoint.reading import load_checkpoint
from scalewright.errors import DataError, ModelError
from scalewright.evaluation import generation, scoring
from scalewright.evaluation.figures import bin_edges, mean_of
from scalewright.evaluation.generation import longest_loop, repeated_share

LENGTHS = (9, 4, 17, 2, 12, 30, 5, 1)  # the last has nothing that could be predicted
STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
TEXTS = STORIES.parents[1] / "data" / "tinystories_eval.txt"


def rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def llama(seed: int = 0, **given: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 40, "initializer_range": 0.2, **given}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, bos_token_id=None, eos_token_id=None, **sizes))


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def changed(original: LlamaForCausalLM) -> LlamaForCausalLM:
    """The original, with noise."""
    other = copy.deepcopy(original)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(1 + 0.2 * torch.randn(each.shape, generator=generator))
    return other


def by_hand(model: nn.Module, original: nn.Module, data: list[list[int]]) -> dict[str, list[list[float]]]:
    """Of every sample, every predicted token: losses, KL and agreement, in float64 and one sample at a time."""
    found: dict[str, list[list[float]]] = {"loss": [], "original": [], "kl": [], "agreed": []}
    for row in data:
        with torch.no_grad():
            q, p = (each(torch.tensor([row])).logits[0].double().softmax(dim=-1).tolist() for each in (model, original))
        each = {name: [] for name in found}
        for place, target in enumerate(row[1:]):
            each["loss"].append(-math.log(q[place][target]))
            each["original"].append(-math.log(p[place][target]))
            each["kl"].append(sum(a * math.log(a / b) for a, b in zip(p[place], q[place], strict=True)))
            each["agreed"].append(float(p[place].index(max(p[place])) == q[place].index(max(q[place]))))
        for name, values in each.items():
            found[name].append(values)
    return found


def figures(found: object) -> list[float]:
    names = ("perplexity", "original_perplexity", "loss_increase", "kl", "agreement")
    both = [(getattr(found, name).value, getattr(found, name).error) for name in names]
    bins = [(each.first, each.kl.value, each.agreement.value, each.num_tokens) for each in found.positions]
    return [number for each in (*both, *bins) for number in each]


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_between_a_model_and_itself(original):
    found = evaluate(original, against=original, dataset=rows())
    assert (found.kl.value, found.agreement.value, found.loss_increase.value) == (0, 1, 0)
    assert found.perplexity == found.original_perplexity
    assert all((each.kl.value, each.agreement.value) == (0, 1) for each in found.positions)
    written = found.generation
    assert (written.babbles, written.agreement, written.quantised) == (False, 1, written.original)
    assert all(pair.diverges_at is None and pair.quantised == pair.original for pair in written.pairs)


def test_figures_are_those_of_the_definition(original, changed):
    found = evaluate(changed, against=original, dataset=rows(), generate=False)
    tokens = by_hand(changed, original, rows())
    flat = {name: [value for sample in values for value in sample] for name, values in tokens.items()}
    assert (found.num_samples, found.num_tokens) == (7, sum(LENGTHS) - len(LENGTHS)) == (7, len(flat["kl"]))
    assert found.kl.value == pytest.approx(mean(flat["kl"]), rel=1e-5)
    assert found.agreement.value == pytest.approx(mean(flat["agreed"]))
    assert found.perplexity.value == pytest.approx(math.exp(mean(flat["loss"])), rel=1e-5)
    assert found.original_perplexity.value == pytest.approx(math.exp(mean(flat["original"])), rel=1e-5)
    assert found.loss_increase.value == pytest.approx(mean(flat["loss"]) - mean(flat["original"]), rel=1e-4)
    assert found.kl.value > 0.01 and 0 < found.agreement.value < 1, "the models must differ, and not in everything"


def test_samples_are_the_unit_of_standard_errors(original, changed):
    found = evaluate(changed, against=original, dataset=rows(), generate=False)
    tokens = by_hand(changed, original, rows())
    samples = [each for each in range(len(LENGTHS)) if LENGTHS[each] > 1]

    def error_of(values: list[list[float]]) -> float:
        """The standard error of a ratio of sums, from its influence values (n_i / n)(mean_i - mean)."""
        total = sum(map(sum, values)) / sum(map(len, values))
        share = [len(values[each]) / sum(map(len, values)) for each in samples]
        influence = [weight * (mean(values[each]) - total) for weight, each in zip(share, samples, strict=True)]
        return math.sqrt(len(samples) * sum(each * each for each in influence) / (len(samples) - 1))

    assert found.kl.error == pytest.approx(error_of(tokens["kl"]), rel=1e-4)
    assert found.agreement.error == pytest.approx(error_of(tokens["agreed"]), rel=1e-4)
    assert found.perplexity.error == pytest.approx(error_of(tokens["loss"]) * found.perplexity.value, rel=1e-4)
    paired = [
        [a - b for a, b in zip(*each, strict=True)] for each in zip(tokens["loss"], tokens["original"], strict=True)
    ]
    assert found.loss_increase.error == pytest.approx(error_of(paired), rel=1e-4)


def test_samples_of_equal_length_have_the_usual_standard_error():
    sums = [3.0, 5.0, 4.5, 9.25, 0.5]
    figure = mean_of(torch.tensor(sums), torch.full((5,), 8))
    assert figure.value == pytest.approx(mean(sums) / 8)
    assert figure.error == pytest.approx(stdev(sums) / math.sqrt(5) / 8)


def test_errors_tell_how_far_off_other_samples_would_be():
    """Over many draws of samples, means lie about one standard error from the truth."""
    generator = torch.Generator().manual_seed(0)
    off = []
    for _ in range(300):
        counts_S = torch.randint(1, 50, (40,), generator=generator)
        levels_S = torch.randn(40, generator=generator, dtype=torch.float64)  # what the tokens of a sample share
        noise_S = torch.randn(40, generator=generator, dtype=torch.float64) * counts_S.sqrt()
        figure = mean_of((1 + levels_S) * counts_S + noise_S, counts_S)
        off.append((figure.value - 1) / figure.error)
    assert abs(mean(off)) < 0.2 and stdev(off) == pytest.approx(1, abs=0.15)


def test_order_and_batches_do_not_matter(original, changed):
    whole = evaluate(changed, against=original, dataset=rows(), generate=False)
    for data, size in ((rows(), 1), (rows(), 3), (rows()[::-1], None), (rows()[3:] + rows()[:3], 2)):
        other = evaluate(changed, against=original, dataset=data, batch_size=size, generate=False)
        torch.testing.assert_close(figures(other), figures(whole), rtol=1e-5, atol=1e-9)
        assert [each.text for each in other.worst_samples] == [each.text for each in whole.worst_samples]
        assert [each.before for each in other.worst_tokens] == [each.before for each in whole.worst_tokens]


def test_pieces_of_logits_do_not_matter(original, changed, monkeypatch):
    whole = evaluate(changed, against=original, dataset=rows(), generate=False)
    monkeypatch.setattr(scoring, "_PIECE", 2 * VOCAB)
    assert evaluate(changed, against=original, dataset=rows(), generate=False) == whole


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side, original, changed):
    data = [each for each in rows() if len(each) > 1]
    ids, mask = torch.full((len(data), 37), 7), torch.zeros(len(data), 37, dtype=torch.long)
    for number, row in enumerate(data):
        where = slice(-len(row), None) if side == "left" else slice(0, len(row))
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    padded = evaluate(changed, against=original, dataset=[{"input_ids": ids, "attention_mask": mask}], generate=False)
    alone = evaluate(changed, against=original, dataset=data, batch_size=1, generate=False)
    torch.testing.assert_close(figures(padded), figures(alone), rtol=1e-4, atol=1e-7)
    assert padded.num_tokens == sum(map(len, data)) - len(data)


def test_labels_say_what_counts():
    model, ids = bigram(), torch.tensor(rows((12, 12)))
    labels = ids.clone()
    labels[:, :8] = -100
    found = evaluate(model, dataset=[{"input_ids": ids, "labels": labels}], generate=False)
    alone = evaluate(model, dataset=ids[:, 7:].tolist(), generate=False)
    assert found.num_tokens == alone.num_tokens == 8
    assert found.perplexity.value == pytest.approx(alone.perplexity.value)


def test_positions_are_those_of_samples_in_up_to_32_bins():
    """Only a token of the vocabulary is known otherwise, and it always stands at the same place."""
    table = bigram().table.weight
    other = table.clone()
    other[0] = other[0].flip(0)
    data = [[each or 1 for each in row] for row in rows((40,) * 6)]
    for row in data:
        row[9] = 0
    found = evaluate(Bigram(other), against=Bigram(table), dataset=data, generate=False)
    assert [each.first for each in found.positions if each.kl.value > 0] == [10]
    assert sum(each.num_tokens for each in found.positions) == found.num_tokens == 6 * 39
    whole = sum(each.kl.value * each.num_tokens for each in found.positions) / found.num_tokens
    assert whole == pytest.approx(found.kl.value)


@pytest.mark.parametrize("num_positions", [1, 2, 31, 32, 33, 100, 2047])
def test_bins_cover_all_positions(num_positions):
    edges = bin_edges(num_positions)
    sizes = [last - first for first, last in zip([0, *edges], edges, strict=False)]
    assert edges[-1] == num_positions and len(edges) == min(32, num_positions)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_worst_tokens_and_samples_are_named():
    table = bigram().table.weight
    other = table.clone()
    other[5] = -other[5]
    data = rows((20, 20, 20))
    data = [[6 if each == 5 else each for each in row] for row in data]
    data[1][10] = 5
    found = evaluate(Bigram(other), against=Bigram(table), dataset=data, generate=False)
    worst, token = found.worst_samples[0], found.worst_tokens[0]
    assert worst.text == " ".join(map(str, data[1][:16])) and worst.kl == pytest.approx(token.kl / 19)
    assert worst.agreement == pytest.approx(18 / 19)
    assert (token.before, token.came) == (" ".join(map(str, data[1][:11])), str(data[1][11]))
    assert (token.original, token.quantised) == (str(int(table[5].argmax())), str(int(other[5].argmax())))
    assert token.original_probability == pytest.approx(float(table[5].softmax(dim=0).max()))


def test_text_is_shown_without_what_a_terminal_would_obey():
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join("\x1b[31m\u202e\n" if each == 0 else "[red]" for each in ids)

    data = [[0, 1, 0, 2, 3]] * 2
    found = evaluate(bigram(1), against=bigram(), dataset=data, tokenizer=Tokenizer())
    texts = [found.worst_samples[0].text, found.worst_tokens[0].before, found.generation.pairs[0].prompt]
    assert texts[0] == r"\x1b[31m\u202e\n[red]\x1b[31m\u202e\n[red][red]"
    assert all(text.isprintable() for text in texts)


def test_the_result_is_plain_data(original, changed):
    found = evaluate(changed, against=original, dataset=rows())
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert {"value", "error"} == set(found.to_dict()["kl"])


def test_one_sample_has_no_standard_error():
    found = evaluate(bigram(), against=bigram(1), dataset=rows((9,)), generate=False)
    assert found.kl.error is None and found.positions[0].kl.error is None
    assert found.notes[-1] == "data: one sample has no standard error. Give more of them."


def test_without_an_original_there_is_perplexity_alone(original):
    found = evaluate(original, dataset=rows())
    assert found.perplexity == evaluate(original, against=original, dataset=rows(), generate=False).perplexity
    assert (found.against, found.kl, found.agreement, found.positions, found.worst_tokens) == (None, None, None, [], [])
    assert found.generation.original is None and found.generation.pairs[0].agreement is None


def test_models_are_left_as_they_were(original, changed):
    changed.train()
    for each in changed.model.layers:
        each.self_attn.attention_dropout = 0.5  # of which nothing must be seen
    changed.config.use_cache = True
    changed.generation_config.repetition_penalty = 1.5
    before = copy.deepcopy((changed.config.to_dict(), changed.generation_config.to_dict(), changed.state_dict()))
    found = evaluate(changed, against=original, dataset=rows())
    after = (changed.config.to_dict(), changed.generation_config.to_dict(), changed.state_dict())
    assert changed.training and after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert not any(each.grad is not None for each in changed.parameters())
    changed.eval()
    changed.generation_config.repetition_penalty = 1.0
    assert evaluate(changed, against=original, dataset=rows()) == found, "penalties are none of the model"


def test_steps_are_told(original):
    steps = []
    evaluate(original, against=original, dataset=rows(), batch_size=4, on_step=lambda *step: steps.append(step))
    phases = list(dict.fromkeys(step[0] for step in steps))
    assert phases == ["loading", "evaluating", "generating"]
    for phase in phases:
        done = [step[2] for step in steps if step[0] == phase]
        assert done == sorted(done) and done[0] == 0
        assert done[-1] == next(step[3] for step in steps if step[0] == phase), phase


# ---- what models write -----------------------------------------------------------------------------------------------

COUNTING = [(each + 1) % VOCAB for each in range(VOCAB)]


def test_a_model_that_repeats_itself_babbles():
    """The original would not be surprised by repeats: the tokens are nearly as likely as those which it takes."""
    table = torch.eye(VOCAB)[COUNTING] * 10 + torch.eye(VOCAB) * 9.5
    stuck = following(list(range(VOCAB)))
    found = evaluate(stuck, against=Bigram(table), dataset=rows((24,) * 8)).generation
    assert found.babbles
    assert found.verdict == (
        "babbles: 98% of its runs of four tokens are repeats (of the original's 0%), and to the original its text has "
        "a perplexity of 2.65 (the original's own 1.61)."
    )
    assert (found.quantised.longest_loop, found.original.longest_loop, found.agreement) == (52, 0, 0)
    assert [pair.diverges_at for pair in found.pairs] == [1] * 8


def test_a_model_that_writes_what_the_original_would_never_say_babbles():
    counting, backwards = following(COUNTING), following([(each - 1) % VOCAB for each in range(VOCAB)])
    found = evaluate(backwards, against=counting, dataset=rows((24,) * 8)).generation
    assert found.babbles and found.quantised.repeated == 0
    assert found.verdict == (
        "babbles: 0% of its runs of four tokens are repeats (of the original's 0%), and to the original its text has a "
        "perplexity of 2.21e+04 (the original's own 1)."
    )


def test_a_model_that_repeats_no_more_than_the_original_does_not_babble():
    stuck = following(list(range(VOCAB)))
    found = evaluate(stuck, against=stuck, dataset=rows((24,) * 8)).generation
    assert found.quantised.repeated > 0.9 and not found.babbles
    alone = evaluate(stuck, dataset=rows((24,) * 8))
    assert alone.babbles and alone.generation.verdict == (
        "babbles: 98% of its runs of four tokens are repeats. Small models may do so by nature: evaluate it against "
        "the original."
    )


def test_texts_differ_from_where_the_models_do():
    other = list(COUNTING)
    other[50] = 3
    data = [[0, *([each] * 7)] for each in range(1, 5)]
    found = evaluate(following(other), against=following(COUNTING), dataset=data).generation
    differing = {pair.prompt: pair.diverges_at for pair in found.pairs}
    assert differing == {f"0 {each} {each} {each}": 51 - each for each in range(1, 5)}  # what comes after 50
    assert all(pair.agreement == pytest.approx(59 / 60) for pair in found.pairs)


def test_a_text_ends_where_the_model_ends_it():
    counting = following(COUNTING)
    counting.generation_config.eos_token_id = [20, 9]
    found = evaluate(counting, against=following(COUNTING), dataset=[[0, 5, 5, 5], [0, 12, 1, 1]]).generation
    assert {pair.quantised.text: pair.diverges_at for pair in found.pairs} == {
        "6 7 8 9": 5,
        "13 14 15 16 17 18 19 20": 9,
    }
    assert found.pairs[0].original.num_tokens == 62


@pytest.mark.parametrize(
    ("ids", "share", "loop"),
    [
        ([], 0, 0),
        ([1, 2, 3], 0, 0),
        (list(range(20)), 0, 0),
        ([7] * 20, 16 / 17, 20),
        ([1, 2] * 10, 15 / 17, 20),
        ([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 5], 4 / 10, 10),  # three rounds, and a bit more
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1 / 6, 0),  # a repeat, and no loop
    ],
)
def test_repetition_is_counted(ids, share, loop):
    assert (repeated_share(ids), longest_loop(ids)) == (pytest.approx(share), loop)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(original, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("original")
    original.save_pretrained(path)
    return path


def recipe(scheme: str) -> dict[str, object]:
    return {"QuantizationModifier": {"scheme": scheme, "targets": ["Linear"], "ignore": ["lm_head"]}}


@pytest.mark.parametrize(("scheme", "least", "most"), [("FP8_DYNAMIC", 0, 0), ("NVFP4A16", 1e-7, 1e-3)])
def test_a_checkpoint_is_the_model_that_was_quantised(scheme, least, most, original, folder, tmp_path, capfd):
    result = oneshot(copy.deepcopy(original), recipe=recipe(scheme), output_dir=tmp_path / "out")
    found = evaluate(tmp_path / "out", against=result.model, dataset=rows(), generate=False)
    lost = evaluate(tmp_path / "out", against=folder, dataset=rows(), generate=False)
    assert least <= found.kl.value <= most
    assert found.kl.value < lost.kl.value / 10
    assert (lost.model, lost.against) == (str(tmp_path / "out"), str(folder))
    assert capfd.readouterr() == ("", ""), "others draw progress bars"


def test_what_is_read_as_bf16_is_run_so(folder, tmp_path):
    oneshot(folder, recipe=recipe("NVFP4A16"), output_dir=tmp_path / "out")
    found = evaluate(tmp_path / "out", dataset=rows(), dtype="float32", generate=False)
    assert found.notes[0] == f"{tmp_path / 'out'}: its format is read as bfloat16, so it is not run in float32."
    assert found.perplexity == evaluate(tmp_path / "out", dataset=rows(), generate=False).perplexity
    model, notes = load_checkpoint(tmp_path / "out", dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and notes == []
    assert load_checkpoint(folder)[0].dtype == torch.float32
    assert load_checkpoint(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder, tmp_path, monkeypatch):
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [listening := logging.Handler()])
    monkeypatch.setattr(listening, "emit", told.append)
    oneshot(folder, scheme="FP8_DYNAMIC", output_dir=tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.0.mlp.up_proj.weight_scale"
    save_file({name: each for name, each in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        evaluate(tmp_path / "out", dataset=rows())
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: lacks 1 of its tensors ({lost}), and would have random numbers instead. Give a whole "
        "model."
    )
    save_file({**tensors, "odd": torch.zeros(1)}, file, {"format": "pt"})
    notes = evaluate(tmp_path / "out", dataset=rows(), generate=False).notes
    assert f"{tmp_path / 'out'}: 1 of its tensors are not read (odd)." in notes
    assert told == []  # it is said once, and by us


@pytest.mark.real_model
@pytest.mark.skipif(not STORIES.is_dir(), reason="the trained model stories260K does not lie beside the project")
def test_fewer_bits_lose_more(monkeypatch):
    monkeypatch.setattr(generation, "NUM_NEW_TOKENS", 60)
    lost = []
    for bits in (8, 4, 3, 2):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
        group = {"targets": ["Linear"], "weights": weights}
        modifier = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        model = oneshot(STORIES, recipe={"QuantizationModifier": modifier}).model
        lost.append(
            evaluate(model, against=STORIES, dataset=TEXTS, num_samples=8, max_seq_length=96, generate=bits in (8, 2))
        )
    assert lost[0].original_perplexity.value < 8, "it is trained"
    for better, worse in pairwise(lost):
        assert better.kl.value + 2 * better.kl.error < worse.kl.value - 2 * worse.kl.error
        assert better.agreement.value > worse.agreement.value
        assert better.perplexity.value < worse.perplexity.value
    assert [each.babbles for each in lost if each.generation] == [False, True]


# ---- kinds of models -------------------------------------------------------------------------------------------------


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes)).eval()


def test_an_encoder_decoder_is_judged_by_its_answers():
    model, ids = t5(), torch.tensor(rows((10, 10, 10)))
    labels = torch.tensor(rows((6, 6, 6), seed=1))
    labels[0, 4:] = -100
    found = evaluate(model, dataset=[{"input_ids": ids, "labels": labels}])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).loss
    assert found.num_tokens == 16 and found.perplexity.value == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found.generation is None
    assert "T5ForConditionalGeneration: what it writes is not looked at" in found.notes[0]
    shifted = [{"input_ids": ids, "decoder_input_ids": labels.clamp(min=0)}]
    assert evaluate(model, dataset=shifted, generate=False).num_tokens == 15
    with pytest.raises(DataError) as caught:
        evaluate(model, dataset=rows())
    assert str(caught.value) == (
        "data: T5ForConditionalGeneration is judged by its answers, and there are none in it. Give batches with "
        "input_ids and decoder_input_ids."
    )


def test_what_stands_for_an_image_is_not_predicted():
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=llama().config,
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=32),
        image_token_index=VOCAB - 1,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor(rows((12, 12))).clamp(max=VOCAB - 2)
    assert evaluate(model, against=model, dataset=ids.tolist()).num_tokens == 22
    ids[:, 1:5] = VOCAB - 1
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    assert evaluate(model, dataset=[batch], generate=False).num_tokens == 2 * (11 - 4)


class Plain(nn.Module):
    """A model that takes ids, gives a tensor, and is none of transformers'."""

    def __init__(self, output: object = None) -> None:
        super().__init__()
        self.table, self.output = bigram().table, output

    def forward(self, input_ids: Tensor) -> object:
        return self.table(input_ids) if self.output is None else self.output


def test_any_module_that_gives_logits_can_be_measured():
    found = evaluate(Plain(), against=bigram(), dataset=rows())
    assert found.kl.value == 0
    assert "Plain: what it writes is not looked at, for Plain cannot generate." in found.notes


def test_what_is_ruled_out_by_both_does_not_count():
    table = bigram().table.weight.clone()
    table[:, VOCAB // 2 :] = -math.inf
    data = torch.tensor(rows()[5]).remainder(VOCAB // 2).tolist()
    assert evaluate(Bigram(table), against=Bigram(table.clone()), dataset=[data], generate=False).kl.value == 0


# ---- what cannot be done ---------------------------------------------------------------------------------------------


def with_one(value: float) -> Bigram:
    table = bigram().table.weight.clone()
    table[rows()[0][0], 3] = value
    return Bigram(table)


class OwnModel(LlamaModel):
    """One of somebody's own, of which only its answer tells what it is."""


NOT_FINITE = (
    "Bigram: its logits of 1 of 72 tokens are not finite, or rule out what can come. A weight or a scale in it is "
    "broken."
)
MISTAKES = {
    "no data": (
        lambda: (bigram(), {"dataset": None}),
        "a model is evaluated by running data through it. Give a dataset.",
    ),
    "no model": (lambda: (None, {}), "model: NoneType is none. Give a module, a folder or a name on the hub."),
    "no logits": (
        lambda: (OwnModel(llama().config), {}),
        "OwnModel: OwnModel gives BaseModelOutputWithPast, and no logits [samples, tokens, vocabulary]. Give a model "
        "that predicts tokens.",
    ),
    "no next token": (
        lambda: (LlamaModel(llama().config), {}),
        "LlamaModel: LlamaModel predicts no next token, so it has neither perplexity nor KL. See what its layers keep "
        "with `scalewright report`, and compare what it answers on data of your own.",
    ),
    "another tensor": (
        lambda: (Plain(torch.zeros(3, 5)), {}),
        "Plain: Plain gives a tensor [3, 5], and no logits [samples, tokens, vocabulary]. Give a model that predicts "
        "tokens.",
    ),
    "vocabularies": (
        lambda: (bigram(vocab=70), {"against": bigram()}),
        "Bigram: has 70 logits for each token, and Bigram has 64. Compare models of one vocabulary.",
    ),
    "short samples": (
        lambda: (bigram(), {"dataset": [[3], [4]]}),
        "data: no sample has two tokens, and the first one is not predicted. Give longer samples.",
    ),
    "no ids": (
        lambda: (bigram(), {"dataset": [{"pixel_values": torch.zeros(1, 3, 8, 8)}]}),
        "data: its batches have no input_ids [samples, tokens], so there is nothing to predict.",
    ),
    "not finite": (lambda: (with_one(math.nan), {"against": bigram()}), NOT_FINITE),
    "nothing left": (lambda: (with_one(-math.inf), {"against": bigram()}), NOT_FINITE),
    "text without a tokenizer": (
        lambda: (bigram(), {"dataset": ["a text"]}),
        "data: there is text in it, and no tokenizer. Give a tokenizer, or token ids.",
    ),
    "dtype": (
        lambda: (bigram(), {"dtype": "float33"}),
        "dtype: there is no 'float33'. Did you mean 'float32'? Use auto, float32, bfloat16, float16.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    given, message = MISTAKES[mistake]
    model, options = given()
    with pytest.raises((DataError, ModelError)) as caught:
        evaluate(model, **{"dataset": rows(), "generate": False, **options})
    assert str(caught.value) == message


def test_a_model_that_breaks_on_the_data_is_named():
    class Breaks(Bigram):
        def forward(self, **_: object) -> SimpleNamespace:
            raise RuntimeError("shapes do not fit\nat all")

    with pytest.raises(ModelError) as caught:
        evaluate(Breaks(bigram().table.weight), dataset=rows())
    assert str(caught.value) == "Breaks: cannot be run on this data (shapes do not fit)."


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ModelError) as caught:
        evaluate(tmp_path, dataset=rows())
    assert str(caught.value) == f"{tmp_path}: there is no config.json in it. Give the folder of a Hugging Face model."
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        evaluate(tmp_path, dataset=rows())


def test_the_shorter_of_two_contexts_counts():
    short = bigram(1)
    short.config.max_position_embeddings = 6
    for pair in ((short, bigram()), (bigram(), short)):
        found = evaluate(pair[0], against=pair[1], dataset=rows((20, 20)))
        assert (found.num_tokens, found.positions[-1].last) == (10, 5)


def test_data_that_is_not_there_is_said_before_a_model_is_read():
    with pytest.raises(DataError, match=r"^nowhere\.txt: there is no such file\.$"):
        evaluate("a model that is not there", dataset="nowhere.txt")


def test_an_original_that_is_no_model_is_said(changed: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match=r"^against: int is none\. Give a module, a folder or a name on the hub\.$"):
        evaluate(changed, against=3, dataset=rows())
