"""Observing: figures are those of the values themselves, records add up exactly, and the model stays as it was."""

from __future__ import annotations

import copy
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from scalewright import observe
from scalewright.errors import (
    DataError,
    MergeError,
    NonFiniteError,
    RecipeError,
    StrictError,
    UnknownObserverError,
)
from scalewright.modifiers.schemes import scheme_named
from scalewright.numerics.moments import moments_of
from scalewright.observers import Observer
from scalewright.observing import Observations, merge_files
from scalewright.observing.files import packed
from scalewright.observing.records import InputRecord

IDS = torch.randint(1, 96, (6, 24), generator=torch.Generator().manual_seed(1))
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
QUERY = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
REAL_MODEL = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"
REAL_TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinystories_calib.txt"


def tiny(kind: Any = LlamaConfig, *, dtype: torch.dtype = torch.float32, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, **given}), dtype=dtype).eval()


def inputs_of(model: nn.Module, name: str, samples: list[list[int]]) -> Tensor:
    """What a layer is given, sample by sample, [tokens, channels]."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0][0].clone()))
    with torch.no_grad():
        for each in samples:
            model(input_ids=torch.tensor([each]))
    hook.remove()
    return torch.cat(seen)


def sqnr(x: np.ndarray, rounded: np.ndarray) -> float:
    return float(10 * np.log10((x**2).sum() / ((x - rounded) ** 2).sum()))


def by_strength(x_TH: Tensor, rounded_TH: Tensor) -> float:
    """Noise to signal of tokens from 4^(k-1) to 4^k, in the mean over all tokens, in decibels."""
    k = torch.floor(torch.log2(x_TH.square().mean(dim=1).sqrt()) / 2)
    total = 0.0
    for each in torch.unique(k):
        mine = k == each
        noise = (x_TH - rounded_TH)[mine].square().sum() / x_TH[mine].square().sum()
        total += float(noise * mine.sum() / len(x_TH))
    return -10 * math.log10(total)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_values_themselves() -> None:
    model = tiny()
    found = observe(model, IDS.tolist(), batch_size=1)
    assert len(found) == 14 and found.num_tokens == IDS.numel() and found.model == "LlamaForCausalLM"
    for name in (QUERY, DOWN):
        x = inputs_of(model, name, IDS.tolist()).double().numpy()
        layer = found[name]
        seen = layer.input
        assert seen is not None and layer.tokens == len(x) == IDS.numel()
        assert (seen.min, seen.max) == (x.min(), x.max())
        centred = x - x.mean()
        assert seen.kurtosis == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-12)
        absmax = np.abs(x).max(axis=0)
        assert seen.channels.count == x.shape[1] and not seen.channels.dead and not seen.channels.outliers
        assert seen.channels.median == pytest.approx(np.median(absmax), rel=1e-12)
        assert seen.channels.ratio == pytest.approx(absmax.max() / np.median(absmax), rel=1e-12)
        w = model.get_submodule(name).weight.detach().double().numpy()
        assert (layer.weight.min, layer.weight.max, layer.weight.shape) == (w.min(), w.max(), w.shape)
        centred = w - w.mean()
        assert layer.weight.kurtosis == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-12)
        columns = np.abs(w).max(axis=0)
        assert layer.weight.channels.ratio == pytest.approx(columns.max() / np.median(columns), rel=1e-12)


def test_scales_for_each_token_lose_what_rounding_each_token_loses() -> None:
    model = tiny()
    seen = observe(model, IDS.tolist(), batch_size=1, observers="static_minmax")[DOWN].input
    x = inputs_of(model, DOWN, IDS.tolist()).numpy()
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127.5)
    rounded = np.clip(np.rint(x / scale), -128, 127) * scale
    assert seen is not None and seen.dynamic is not None
    assert seen.dynamic.db == pytest.approx(sqnr(x.astype(float), rounded.astype(float)), abs=1e-6)
    static = seen.choices["static_minmax"].kept
    assert seen.dynamic.db > static.db and seen.dynamic.token_db > static.token_db
    assert seen.lost_by_one_scale == seen.dynamic.least - static.least


@pytest.mark.parametrize("scheme", ["W8A8", "FP8"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-4), (torch.float32, 0.1)])
def test_a_named_observer_loses_what_quantising_with_its_qparams_loses(
    scheme: str, dtype: torch.dtype, tolerance: float
) -> None:
    names = ["static_minmax", "percentile", "histogram_mse", "entropy"]
    model = tiny(dtype=dtype)
    found = observe(model, IDS.tolist(), targets=[DOWN], batch_size=1, observers=names, scheme=scheme)
    seen = found[DOWN].input
    x = inputs_of(model, DOWN, IDS.tolist())
    args = scheme_named(scheme).input_activations
    assert seen is not None and list(seen.choices) == names and args is not None
    for name in names:
        observer = Observer.load_from_registry(name, base_name="input", args=args)
        qparams = observer(x).get_qparams()
        choice = seen.choices[name]
        assert choice.scale == float(qparams["scale"]) and choice.zero_point == 0
        rounded = fake_quantize(x.float(), qparams["scale"].float(), qparams["zero_point"], args)
        lost = sqnr(x.double().numpy(), rounded.double().numpy())
        assert choice.kept.db == pytest.approx(lost, abs=tolerance), name
        assert choice.kept.token_db == pytest.approx(by_strength(x.double(), rounded.double()), abs=tolerance), name
    assert seen.best == max(((name, each.kept.least) for name, each in seen.choices.items()), key=lambda each: each[1])


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "NVFP4", "MXFP4"])
def test_weights_lose_what_quantising_them_loses(scheme: str) -> None:
    model = tiny(hidden_size=128, intermediate_size=128)
    names = ["static_minmax", "memoryless_mse", "optimal"]
    found = observe(model, IDS.tolist(), targets=[QUERY], observers=names, scheme=scheme)
    weight = model.get_submodule(QUERY).weight.detach()
    args = scheme_named(scheme).weights
    choices = found[QUERY].weight.choices
    assert list(choices) == names
    for name, choice in choices.items():
        qparams = Observer.load_from_registry(name, base_name="weight", args=args)(weight).get_qparams()
        rounded = fake_quantize(
            weight, qparams["scale"], qparams["zero_point"], args, global_scale=qparams["global_scale"]
        )
        assert choice.db == pytest.approx(sqnr(weight.double().numpy(), rounded.double().numpy()), abs=1e-4), name
    assert choices["static_minmax"].share == 1
    assert choices["optimal"].db >= choices["static_minmax"].db - 0.1
    assert found[QUERY].weight.best[1] == max(each.db for each in choices.values())


def test_nvfp4_has_a_global_scale_to_choose_and_groups_that_are_rounded_as_they_come() -> None:
    model = tiny(dtype=torch.bfloat16)
    ids = IDS[:1]
    seen = observe(model, ids.tolist(), batch_size=1, scheme="nvfp4")[QUERY].input
    assert seen is not None and list(seen.choices) == ["static_minmax"]
    x = inputs_of(model, QUERY, ids.tolist()).float()
    choice = seen.choices["static_minmax"]
    assert choice.global_scale == pytest.approx(448 * 6 / float(x.abs().max()), rel=1e-6)
    assert (choice.scale, choice.kept, seen.best, seen.lost_by_one_scale) == (None, None, None, 0.0)
    groups = x.reshape(-1, 16)
    scale = (groups.abs().amax(dim=1, keepdim=True) / 6 * choice.global_scale).to(torch.float8_e4m3fn).float()
    steps = (groups / (scale / choice.global_scale)).numpy()
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = numbers[np.abs(np.abs(steps)[..., None] - numbers).argmin(axis=-1)] * np.sign(steps)
    rounded = nearest * (scale / choice.global_scale).numpy()
    assert seen.dynamic.db == pytest.approx(sqnr(groups.double().numpy(), rounded), abs=1e-3)


def test_what_the_scheme_leaves_alone_has_no_loss() -> None:
    layer = observe(tiny(hidden_size=128, intermediate_size=128), IDS.tolist(), scheme="W8A16", targets=[DOWN])[DOWN]
    assert layer.input is not None and (layer.input.choices, layer.input.dynamic) == ({}, None)
    assert list(layer.weight.choices) == ["static_minmax", "optimal"]
    dynamic = observe(tiny(), IDS.tolist(), scheme="FP8_DYNAMIC")[DOWN].input
    assert dynamic is not None and not dynamic.choices and 25 < dynamic.dynamic.least < 35


# ---- what stands out -------------------------------------------------------------------------------------------------


def test_dead_and_outlying_channels_are_found() -> None:
    model = tiny()
    with torch.no_grad():
        model.get_submodule("model.layers.0.input_layernorm").weight[3] = 0
        model.get_submodule("model.layers.0.input_layernorm").weight[5] = 200
        model.get_submodule("model.layers.1.mlp.up_proj").weight[7] = 0
    found = observe(model, IDS.tolist(), batch_size=1)
    seen = found[QUERY].input
    assert seen is not None and seen.channels.dead == (3,)
    assert [channel for channel, _ in seen.channels.outliers] == [5]
    x = np.abs(inputs_of(model, QUERY, IDS.tolist()).double().numpy()).max(axis=0)
    assert seen.channels.outliers[0][1] == pytest.approx(x[5] / np.median(x[x > 0]), rel=1e-9)
    down = found[DOWN].input
    assert down is not None and down.channels.dead == (7,)
    loud = f"{QUERY} and 2 more: 1 of 32 channels is over 20 times the median channel (the largest, 5, is "
    assert len([each for each in found.notes if each.startswith(loud)]) == 1
    assert f"{QUERY} and 2 more: 1 of 32 input channels have only zeros (3)." in found.notes
    assert f"{DOWN}: 1 of 48 input channels have only zeros (7)." in found.notes


class Plain(nn.Module):
    """An embedding, and a layer that is given what it has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(96, 32), nn.Linear(32, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embed(input_ids))


def test_a_loud_token_is_told_from_loud_channels() -> None:
    model = Plain()
    with torch.no_grad():
        model.embed.weight[5] *= 300
    found = observe(model, [[5, *each] for each in IDS.tolist()], observers=["static_minmax"])
    seen = found["layer"].input
    assert seen is not None and seen.best is not None and not seen.channels.outliers
    kept = seen.choices["static_minmax"].kept
    assert kept.db > 30  # all values together look well, and nearly all tokens have vanished
    assert kept.token_db < 2 and seen.dynamic.least > 30
    assert found.notes[-1] == (
        f"layer: one scale for all tokens keeps {seen.best[1]:.1f} dB at best (static_minmax), and loses "
        f"{seen.lost_by_one_scale:.1f} dB against one for each token: use dynamic activations or ignore it."
    )
    even = observe(Plain(), IDS, observers=["static_minmax"])
    assert not any(each.startswith("layer:") for each in even.notes)


def test_experts_see_the_tokens_that_the_router_gives_them_and_dead_ones_are_found() -> None:
    model = tiny(MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    router = model.get_submodule("model.layers.0.mlp.gate")
    with torch.no_grad():
        model.get_submodule("model.embed_tokens").weight[:, 0] = 0.1  # a channel that is positive for every token
        router.weight[2] = 0
        router.weight[2, 0] = -100
    samples = [each[: 4 + i] for i, each in enumerate(IDS.tolist())]
    chosen = np.zeros(4, dtype=int)
    seen: list[Tensor] = []
    hook = router.register_forward_pre_hook(lambda module, args: seen.append(args[0].reshape(-1, 32).clone()))
    with torch.no_grad():
        for each in samples:
            model(input_ids=torch.tensor([each]))
    hook.remove()
    logits = torch.cat(seen).double() @ router.weight.detach().double().T
    for best in logits.topk(2, dim=1).indices.numpy():
        chosen[best] += 1
    found = observe(model, samples, batch_size=3)  # padded: padding chooses experts, too, and does not count
    first = "model.layers.0.mlp.experts"
    assert found.experts[first] == dict(enumerate(chosen.tolist())) and chosen[2] == 0
    assert sum(found.experts[first].values()) == 2 * sum(map(len, samples))
    dead = found[f"{first}.2.w1"]
    assert dead.input is None and dead.tokens == 0 and dead.weight.choices
    assert f"{first}: 1 of 4 experts was given no token (2). Add samples, or use dynamic activations." in found.notes
    assert not any(each.startswith(f"{first}.2") for each in found.notes)


def test_a_layer_that_no_token_comes_to_is_named() -> None:
    model = Plain()
    model.unused = nn.Linear(4, 4)
    with torch.no_grad():
        model.embed.weight.fill_(1)
    found = observe(model, IDS)
    assert found["unused"].input is None and "unused: was given no token. Add samples, or ignore it." in found.notes
    constant = found["layer"].input
    assert constant is not None and constant.kurtosis is None and constant.channels.ratio == 1


def test_padding_is_not_seen() -> None:
    model = tiny()
    with torch.no_grad():
        model.get_submodule("model.embed_tokens").weight[0] = 1e3 * torch.arange(32)
    samples = [each[: 3 + 4 * i] for i, each in enumerate(IDS.tolist())]
    alone, together = (observe(model, samples, batch_size=size) for size in (1, 6))
    for one, other in zip(alone.layers, together.layers, strict=True):
        assert one.tokens == other.tokens == sum(map(len, samples))
        assert one.input is not None and other.input is not None
        for figure in ("min", "max", "kurtosis"):
            assert getattr(other.input, figure) == pytest.approx(getattr(one.input, figure), rel=1e-3), figure
        assert other.input.dynamic.db == pytest.approx(one.input.dynamic.db, abs=0.01)


# ---- adding up -------------------------------------------------------------------------------------------------------

ORDER_FREE = ("static_minmax", "percentile", "histogram_mse", "balanced_mse")


@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4"])
def test_halves_merge_to_the_whole_and_order_does_not_matter(scheme: str) -> None:
    def seen(samples: list[list[int]], seed: int = 0) -> Observations:
        given = {"targets": [QUERY, DOWN], "observers": ORDER_FREE, "scheme": scheme, "seed": seed}
        return observe(tiny(), samples, batch_size=1, **given)

    whole = seen(IDS.tolist())
    merged = seen(IDS[:2].tolist()).merge(seen(IDS[2:5].tolist()), seen(IDS[5:].tolist()))
    backwards = seen(IDS.flip(0).tolist(), seed=7)
    assert packed(merged.records) == packed(whole.records) == packed(backwards.records)
    assert merged.layers == whole.layers == backwards.layers
    assert merged.num_tokens == whole.num_tokens == IDS.numel() and backwards.seeds == (7,)
    assert merged.to_dict() == whole.to_dict() | {"notes": merged.notes}
    assert packed(seen(IDS[:2].tolist()).records) != packed(whole.records)


def test_merging_changes_neither_side() -> None:
    one, other = (observe(tiny(), some.tolist(), targets=[DOWN]) for some in (IDS[:3], IDS[3:]))
    before = packed(one.records), packed(other.records)
    assert packed(one.merge(other).records) == packed(other.merge(one).records)
    assert (packed(one.records), packed(other.records)) == before


@pytest.mark.parametrize("pieces", [1, 3, 10])
def test_records_add_up_in_any_order_to_the_last_bit(pieces: int) -> None:
    generator = torch.Generator().manual_seed(pieces)
    x_TH = torch.randn(40, 16, generator=generator) * torch.logspace(-18, 18, 40).unsqueeze(1)
    args = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    records = [InputRecord.of(each, args) for each in x_TH.tensor_split(pieces)]
    totals = []
    for seed in range(3):
        total = InputRecord()
        for i in torch.randperm(pieces, generator=torch.Generator().manual_seed(seed)):
            total = total + records[int(i)]
        totals.append(total)
    assert len({each.moments for each in totals}) == 1 and len(totals[0].strengths) > 1
    for total in totals[1:]:
        assert list(total.strengths) == list(totals[0].strengths)
        for k, each in total.strengths.items():
            same = totals[0].strengths[k]
            assert (each.num_tokens, each.signal, each.noise) == (same.num_tokens, same.signal, same.noise)
            assert torch.equal(each.counts_C, same.counts_C)
    assert totals[0].num_tokens == 40 and int(totals[0].all_counts().sum()) == x_TH.numel() == totals[0].moments.count
    assert float(sum(each.signal for each in totals[0].strengths.values())) == pytest.approx(totals[0].moments.squares)
    exact = [sum(Fraction(float(v)) ** power for v in x_TH.flatten()) for power in (1, 2, 3, 4)]
    for have, want in zip(totals[0].moments.sums, exact, strict=True):
        assert float(have) == pytest.approx(float(want), rel=1e-9)


def test_kurtosis_is_right_far_from_zero_and_none_where_there_is_no_spread() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert moments_of(x).kurtosis == pytest.approx(1.8, abs=0.02)
    assert moments_of(x + 1000).kurtosis == pytest.approx(moments_of(x).kurtosis, rel=1e-9)
    halves = moments_of(x[:99] + 1000) + moments_of(x[99:] + 1000)
    assert halves.kurtosis == pytest.approx(moments_of(x).kurtosis, rel=1e-9)
    assert moments_of(torch.full((7,), 3.0)).kurtosis is None and moments_of(torch.empty(0)).kurtosis is None
    assert moments_of(torch.randn(600_000, generator=torch.Generator().manual_seed(0))).kurtosis == pytest.approx(
        3, abs=0.05
    )


def test_what_does_not_belong_together_is_not_merged() -> None:
    one = observe(tiny(), IDS)
    narrow = observe(tiny(), IDS, targets=[DOWN])
    other = observe(tiny(hidden_size=64), IDS, targets=[DOWN])
    cases = {
        "observations: was observed with scheme FP8, and observations with W8A8. Merge what was observed in the same "
        "way.": (one, observe(tiny(), IDS, scheme="FP8", observers=one.observers)),
        "observations: was observed with observers percentile, and observations with static_minmax, percentile, "
        "histogram_mse, balanced_mse, optimal. Merge what was observed in the same way.": (
            one,
            observe(tiny(), IDS, observers=["percentile"]),
        ),
        "observations: has 1 layers, and observations has 14: model.layers.0.self_attn.q_proj is in observations, and "
        "not in observations. Merge what was observed of one model and the same layers.": (one, narrow),
    }
    for words, (mine, theirs) in cases.items():
        with pytest.raises(MergeError) as caught:
            mine.merge(theirs)
        assert str(caught.value) == words
    with pytest.raises(
        MergeError, match=f"^observations: {DOWN}: its weight is 32 x 48 in float32 from .* in one, and "
    ):
        narrow.merge(other)
    renamed = copy.copy(one)
    object.__setattr__(renamed, "model", "mine")
    assert one.merge(renamed).notes[-1] != renamed.notes[-1]
    assert "observations of models by different names were merged: LlamaForCausalLM, mine." in one.merge(renamed).notes


@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_averages_merge_as_if_one_run_had_seen_all_in_turn(name: str, tmp_path: Path) -> None:
    one, other, whole = (
        observe(tiny(), iter(some.tolist()), batch_size=1, observers=name, targets=[QUERY, DOWN])  # in this order
        for some in (IDS[:2], IDS[2:], IDS)
    )
    files = [each.save(tmp_path / f"{i}.json") for i, each in enumerate((one, other))]
    for both in (one.merge(other), merge_files(files)):
        for layer in (QUERY, DOWN):
            assert both[layer].input.choices[name].scale == whole[layer].input.choices[name].scale
    assert other.merge(one)[DOWN].input.choices[name].scale != whole[DOWN].input.choices[name].scale


# ---- the model -------------------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> dict[str, Any]:
    """All that may be left on a model."""
    found: dict[str, Any] = {"config": copy.deepcopy(model.config.to_dict())}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if isinstance(value, dict) and "hooks" in key}
        found[name] = (type(module), sorted(vars(module)), hooks, module.training)
    found |= {name: (id(each), each.detach().clone().view(torch.int32)) for name, each in model.named_parameters()}
    return found


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = traces(model)
    assert after.keys() == before.keys()
    for name, each in after.items():
        if isinstance(each, tuple) and isinstance(each[-1], Tensor):
            assert each[0] == before[name][0] and torch.equal(each[1], before[name][1]), name
        else:
            assert each == before[name], name


@pytest.mark.parametrize("kind", [LlamaConfig, MixtralConfig])
def test_the_model_stays_as_it_was_even_when_the_pass_breaks(kind: Any) -> None:
    model = tiny(kind, tie_word_embeddings=True).train()
    before, logits = traces(model), model.eval()(input_ids=IDS).logits
    model.train()
    observe(model, IDS, ignore=[])
    assert_untouched(model, before)
    assert torch.equal(model.eval()(input_ids=IDS).logits, logits)
    with torch.no_grad():
        model.get_submodule("model.embed_tokens").weight[5] = float("inf")
    before = traces(model)
    with pytest.raises(NonFiniteError) as caught:
        observe(model, [[5, 5, 6]], ignore=["lm_head"])
    assert str(caught.value) == (
        f"{QUERY}.input: 64 of 96 values are NaN or Inf. Mend the model, or leave this layer out."
    )
    assert_untouched(model, before)


def test_a_model_in_training_is_seen_as_it_will_be_used() -> None:
    model = tiny(attention_dropout=0.5, attn_implementation="eager").train()
    trained = observe(model, IDS.tolist(), batch_size=1, targets=[DOWN], observers="static_minmax")
    used = observe(model.eval(), IDS.tolist(), batch_size=1, targets=[DOWN], observers="static_minmax")
    assert packed(trained.records) == packed(used.records)


def test_a_weight_that_is_broken_is_named() -> None:
    model = tiny()
    with torch.no_grad():
        model.get_submodule(DOWN).weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        observe(model, IDS)
    assert str(caught.value) == (f"{DOWN}.weight: there are NaN or Inf in it. Mend the model, or leave this layer out.")


def test_the_data_is_run_once() -> None:
    model = tiny()
    calls: list[int] = []
    hook = model.get_submodule("model").register_forward_hook(lambda *_: calls.append(1))
    observe(model, IDS.tolist(), batch_size=2, ignore=[])
    hook.remove()
    assert len(calls) <= 3


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_layers_and_observers_are_those_that_were_asked_for() -> None:
    found = observe(tiny(), IDS, targets=["*.down_proj"], ignore="re:.*layers.0.*", observers="balanced-mse")
    assert list(found.records) == [DOWN] and found.observers == ("balanced_mse",)
    assert (found.scheme, found.seeds) == ("W8A8", (0,))
    assert observe(tiny(), IDS, scheme="w8a16").observers == ("static_minmax", "optimal")
    assert len(observe(tiny(), IDS, ignore=[])) == 15


def test_what_has_nothing_to_look_at_is_a_note() -> None:
    found = observe(tiny(), IDS, observers=["percentile", "optimal"], scheme="FP8_DYNAMIC")
    assert found.notes[2:] == [
        "percentile: watches activations, attention states and serves tensor, attn_head, so FP8_DYNAMIC (weights: fp8, "
        "per channel; activations: fp8, per token, dynamic) gives it nothing to choose."
    ]
    unfit = observe(tiny(), IDS, scheme="W4A16").notes
    assert unfit[2] == (
        f"{QUERY} and 11 more: W4A16 does not fit (32 columns do not divide into groups of 128 (remainder 32). Use "
        "group_size 32, or ignore this layer), so no loss is told."
    )
    many = torch.randint(1, 96, (64, 32), generator=torch.Generator().manual_seed(2))
    given = {"num_calibration_samples": 64, "targets": [DOWN], "strict": True}
    assert observe(tiny(), many, **given).notes == []
    with pytest.raises(StrictError, match=r"^percentile: watches"):
        observe(tiny(), many, observers=["percentile"], scheme="FP8_DYNAMIC", **given)


def test_mistakes_are_refused_before_any_work() -> None:
    model = "no such folder"
    for given, kind, words in (
        ({"dataset": None}, DataError, "a model is observed by running data through it. Give a dataset."),
        ({"scheme": "W8A9"}, RecipeError, "there is no scheme 'W8A9'. Did you mean 'W8A8'? Schemes: "),
        ({"observers": ["minmaxx"]}, UnknownObserverError, "there is no observer 'minmaxx'. Did you mean 'minmax'? "),
        ({"num_calibration_samples": 0}, DataError, "num_calibration_samples: is 0. Use 1 or more."),
    ):
        with pytest.raises(kind) as caught:
            observe(model, **{"dataset": IDS, **given})
        assert str(caught.value).startswith(words)
    with pytest.raises(RecipeError, match=r"^no layer of this model is meant\. "):
        observe(tiny(), IDS, targets=["Conv2d"])


@pytest.mark.real_model
@pytest.mark.skipif(not REAL_MODEL.exists(), reason="the trained model is not here")
def test_a_trained_model_has_loud_tokens_before_its_down_projections() -> None:
    found = observe(REAL_MODEL, REAL_TEXT, num_calibration_samples=8, max_seq_length=128)
    assert len(found) == 35 and found.model == "stories260K"
    worst = min(found.layers, key=lambda each: each.worst_db)
    assert worst.name.endswith("mlp.down_proj") and worst.input is not None and worst.input.lost_by_one_scale > 6
    for layer in found.layers:
        seen = layer.input
        assert seen is not None and seen.dynamic is not None
        kept = {name: each.kept for name, each in seen.choices.items()}
        assert kept["histogram_mse"].db >= max(each.db for each in kept.values()) - 0.01
        assert seen.dynamic.db > kept["histogram_mse"].db and math.isfinite(layer.weight.best[1])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["layers"][0]["name"] == QUERY


def test_data_that_is_not_there_is_said_before_a_model_is_read():
    with pytest.raises(DataError, match=r"^nowhere\.txt: there is no such file\.$"):
        observe("a model that is not there", dataset="nowhere.txt")
