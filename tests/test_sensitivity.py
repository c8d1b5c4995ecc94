"""What layers lose under schemes: it foresees KL, counts what is stored, and leaves the model as it was."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig

from scalewright import oneshot
from scalewright.errors import DataError, LayoutError, ModelError, RecipeError, StrictError
from scalewright.modifiers.schemes import scheme_names
from scalewright.quality import recipe_for
from scalewright.sensitivity import evidence, measure_sensitivity, measuring
from scalewright.sensitivity.evidence import drawn_tokens
from scalewright.sensitivity.partners import layers_together
from scalewright.sensitivity.sizes import candidate_schemes, takes_group_size

IDS = torch.randint(0, 96, (6, 24), generator=torch.Generator().manual_seed(1))
STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"
TEXT = STORIES.parents[1] / "data" / "tinystories_calib.txt"


def llama(**given: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        **given,
    )
    return AutoModelForCausalLM.from_config(config)


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config)


def measured(model, dataset=IDS, schemes=("W4A16", "W8A16"), group_size=32, **given):
    return measure_sensitivity(model, dataset, schemes=schemes, group_size=group_size, **given)


# ---- the model stays as it was ---------------------------------------------------------------------------------------


def state_of(model: torch.nn.Module) -> dict[str, object]:
    """All that could be changed of a model."""
    return {
        "tensors": {name: each.clone() for name, each in model.state_dict().items()},
        "asks": {name: each.requires_grad for name, each in model.named_parameters()},
        "gradients": [name for name, each in model.named_parameters() if each.grad is not None],
        "modules": {name: (id(each), each.training, len(vars(each))) for name, each in model.named_modules()},
        "hooks": [name for name, each in model.named_modules() if each._forward_hooks or each._forward_pre_hooks],
        "cache": model.config.use_cache,
    }


@pytest.mark.parametrize("build", [llama, mixtral])
def test_the_model_stays_as_it_was_bit_for_bit(build):
    model = build().train()
    model.lm_head.weight.requires_grad_(False)
    before = state_of(model)
    with torch.no_grad():
        found = measured(model, schemes=["W8A16", "FP8"])
    after = state_of(model)
    tensors = before.pop("tensors")
    assert tensors.keys() == after["tensors"].keys()
    for name, tensor in after.pop("tensors").items():
        assert torch.equal(tensor, tensors[name]), name
    assert before == after
    assert all(loss > 0 for group in found.groups for loss in group.losses.values())


def test_the_same_seed_finds_the_same_and_another_draws_other_tokens():
    first, again, other = (measured(llama(), seed=seed) for seed in (0, 0, 1))
    assert first.to_dict() == again.to_dict()
    assert first.to_dict() != other.to_dict()


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    model = llama()
    before = state_of(model)
    tensors = before.pop("tensors")
    monkeypatch.setattr(evidence, "_counted", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(model)
    after = state_of(model)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in after.pop("tensors").items())
    assert before == after


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_layers_that_loaders_merge_are_one_group():
    found = measured(llama())
    assert [group.name for group in found.groups][:4] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    named = [name for group in found.groups for name in group.layers]
    linear = [name for name, each in llama().named_modules() if isinstance(each, torch.nn.Linear)]
    assert sorted(named) == sorted(set(linear) - {"lm_head"})
    assert found.groups[0].num_weights == 64 * 64 + 2 * 64 * 32


def test_all_experts_of_a_layer_are_one_group():
    experts = [group for group in measured(mixtral()).groups if "experts" in group.name]
    assert [group.name.split(".")[2] for group in experts] == ["0", "1"]
    assert [len(group.layers) for group in experts] == [12, 12]
    assert all(group.name.endswith("experts (12 layers)") for group in experts)


def test_partners_are_found_where_some_are_ignored():
    names = ["a.q_proj", "a.v_proj", "a.o_proj", "b.q_proj", "w1", "w3"]
    assert layers_together(torch.nn.Module(), names) == [
        ["a.q_proj", "a.v_proj"],
        ["a.o_proj"],
        ["b.q_proj"],
        ["w1", "w3"],
    ]


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_more_bits_lose_less_in_every_group():
    found = measured(llama(), schemes=["W2A16", "W4A16", "W8A16"])
    for group in found.groups:
        assert group.losses["W2A16"] > 4 * group.losses["W4A16"] > 16 * group.losses["W8A16"] > 0, group.name
    assert found.worst_first[0].losses["W2A16"] == max(group.losses["W2A16"] for group in found.groups)


def test_quantised_inputs_cost_something_too():
    found = measured(llama(), schemes=["W4A16", "W4A8", "W4A4"], observer="optimal")  # no negative scales for any
    for group in found.groups:
        assert group.losses["W4A4"] > 2 * group.losses["W4A16"], group.name
        assert group.losses["W4A8"] == pytest.approx(group.losses["W4A16"], rel=0.5), group.name


def kl_of(model, quantised, names, ids) -> float:
    """KL for each token, where only some layers are quantised."""
    mixed = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            mixed.get_submodule(name).weight.copy_(quantised.get_submodule(name).weight)
        log_p, log_q = (each(ids).logits.double().log_softmax(dim=-1) for each in (model, mixed))
    return float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean())


@pytest.mark.real_model
@pytest.mark.skipif(not STORIES.is_dir(), reason="the trained model stories260K does not lie beside the project")
def test_it_foresees_the_kl_of_a_trained_model():
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    data = {"num_calibration_samples": 24, "max_seq_length": 128}
    chosen = {"group_size": 4, "observer": "memoryless_minmax"}
    found = measure_sensitivity(STORIES, TEXT, schemes=["W4A16"], **chosen, **data)
    quantised = copy.deepcopy(model)
    oneshot(quantised, recipe=recipe_for("balanced", "W4A16", **chosen), dataset=TEXT, tokenizer=STORIES, **data)
    ids = torch.tensor(AutoTokenizer.from_pretrained(STORIES)(TEXT.read_text()[:6000])["input_ids"])
    ids = ids[: len(ids) // 128 * 128].view(-1, 128)
    real = torch.tensor([kl_of(model, quantised, group.layers, ids) for group in found.groups])
    foreseen = torch.tensor([group.losses["W4A16"] for group in found.groups])
    assert len(real) == 20
    assert 0.3 < float(foreseen.sum() / real.sum()) < 1.5
    assert float(torch.corrcoef(torch.stack([foreseen.log(), real.log()]))[0, 1]) > 0.8


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_tokens_that_are_kept_stand_for_all_of_them(share):
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(200, generator=generator, dtype=torch.float64) ** 8
    value[3] = 50.0  # a token that counts more than all others
    size = value * (0.2 + torch.rand(200, generator=generator, dtype=torch.float64))
    sums, counts = [], []
    for _ in range(2000):
        kept, stands_for = drawn_tokens(size, share, generator)
        sums.append(float((value[kept] * stands_for).sum()))
        counts.append(len(kept))
    assert sum(sums) / len(sums) == pytest.approx(float(value.sum()), rel=0.02)
    assert sum(counts) / len(counts) <= 200 * share + 1
    if share == 1:
        assert set(counts) == {200} and max(sums) == pytest.approx(float(value.sum()))


def test_keeping_few_of_many_tokens_says_much_the_same(monkeypatch):
    every = measured(llama())
    monkeypatch.setattr(evidence, "_KEPT", 72)  # of 144
    some = measured(llama())
    for group, other in zip(every.groups, some.groups, strict=True):
        assert other.losses["W4A16"] == pytest.approx(group.losses["W4A16"], rel=0.6)
        assert other.losses["W4A16"] != group.losses["W4A16"]


# ---- bits ------------------------------------------------------------------------------------------------------------


def bits_in(folder: Path, original: torch.nn.Module) -> float:
    """Bits for each weight of the layers that are quantised, from the files alone."""
    stored = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    layers = [name for name, each in original.named_modules() if f"{name}.weight_scale" in stored]
    kinds = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
    num_bytes = sum(stored[f"{name}.{kind}"].nbytes for name in layers for kind in kinds if f"{name}.{kind}" in stored)
    return 8 * num_bytes / sum(original.get_submodule(name).weight.numel() for name in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["W3A16", "W4A16_ASYM", "W4A8", "W8A8", "FP8_DYNAMIC", "NVFP4", "MXFP4A16"])
def test_bits_are_those_of_the_files(scheme, dtype, tmp_path):
    size = 32 if takes_group_size(scheme) else None
    found = measured(llama().to(dtype), schemes=[scheme], group_size=size)
    original = llama().to(dtype)
    oneshot(
        copy.deepcopy(original),
        recipe=recipe_for("fast", scheme, group_size=size),
        dataset=IDS,
        output_dir=tmp_path / "out",
    )
    assert found.bits_of(scheme) == pytest.approx(bits_in(tmp_path / "out", original), rel=1e-12)


# ---- mistakes --------------------------------------------------------------------------------------------------------


MISTAKES = [
    ({"schemes": []}, "schemes: there is none. Name some, such as W4A16 and W8A16."),
    ({"schemes": ["W4A16", "w4a16"]}, "schemes: W4A16 is named twice. Name it once."),
    (
        {"schemes": ["W4A17"]},
        f"there is no scheme 'W4A17'. Did you mean 'W4A16'? Schemes: {', '.join(scheme_names())}.",
    ),
    (
        {"schemes": ["UNQUANTIZED"]},
        "schemes: UNQUANTIZED leaves weights as they are. Name another, or ignore layers.",
    ),
    (
        {"schemes": ["NVFP4", "FP8"]},
        "group_size: none of NVFP4, FP8 has groups of another size. Leave it out.",
    ),
    ({"quality": "bets"}, "there is no quality 'bets'. Did you mean 'best'? Use fast, balanced, best."),
    (
        {"ignore": ["Linear"]},
        "no layer of this model is meant. Name linear layers in targets, or ignore less. targets Linear: all that they "
        "mean is ignored, or belongs to other groups.",
    ),
    (
        {"bits": 4.4},
        "bits: 4.4 for each weight is less than W4A16 takes, 5.00 with its scales. Give more, or name a smaller "
        "scheme.",
    ),
    (
        {"bits": 9.2},
        "bits: 9.2 for each weight is more than W8A16 takes, 9.00 with its scales. Give less, or use scheme W8A16 for "
        "all layers.",
    ),
]


@pytest.mark.parametrize(("given", "expected"), MISTAKES)
def test_what_cannot_be_is_refused_before_anything_is_run(given, expected, monkeypatch):
    monkeypatch.setattr(measuring, "Evidence", None)
    with pytest.raises(RecipeError) as caught:
        measured(llama(), **given)
    assert str(caught.value) == expected


def test_groups_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setattr(measuring, "Evidence", None)
    with pytest.raises(LayoutError) as caught:
        measured(llama(), group_size=48)
    assert str(caught.value).startswith(
        "model.layers.0.self_attn.q_proj.weight: 64 columns do not divide into groups of 48 (remainder 16)."
    )


def test_no_data_and_no_language_model_are_refused():
    with pytest.raises(DataError) as caught:
        measured(llama(), None)
    assert str(caught.value) == ("what layers lose is measured by running data through the model. Give a dataset.")

    class Silent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, input_ids):
            return self.layer(torch.zeros(*input_ids.shape, 32))

    with pytest.raises(ModelError) as caught:
        measured(Silent(), [{"input_ids": IDS}])
    assert str(caught.value) == (
        "Silent: gives no logits of tokens that its layers have a part in, so what layers lose cannot be measured. "
        "Give a language model."
    )


def test_a_model_whose_logits_are_no_numbers_is_named():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.raises(ModelError) as caught:
        measured(model)
    assert str(caught.value) == (
        "LlamaForCausalLM: its logits of 24 of 24 tokens are not finite, so what layers lose cannot be measured. A "
        "weight in it is broken: `scalewright observe` names the layer."
    )


def test_notes_are_errors_where_they_should_be():
    with pytest.raises(StrictError, match="512 samples were asked for, and there are 6"):
        measured(llama(), strict=True)
    assert any("512 samples were asked for" in note for note in measured(llama()).notes)


def test_fast_is_measured_as_fast():
    scheme = candidate_schemes(["W4A16"], quality="fast")["W4A16"]
    assert scheme.weights.observer_kwargs == {"signed": True, "importance": "off"}
    best = candidate_schemes(["W4A16"], quality="best")
    assert best["W4A16"].weights.observer_kwargs == {"signed": True}
    assert best == candidate_schemes(["W4A16"], quality="balanced")


def test_a_batch_that_the_model_cannot_be_called_with_is_named():
    batches = [{"input_ids": IDS}, {"input_ids": IDS, "position_ids": torch.zeros(5, 3, dtype=torch.long)}]
    named = r"^data: batch 2 of 2 \(input_ids \[6, 24\], position_ids \[5, 3\]\): LlamaForCausalLM cannot be run on it"
    with pytest.raises(DataError, match=named) as caught:
        measured(llama(), dataset=batches)
    assert isinstance(caught.value.__cause__, RuntimeError)
