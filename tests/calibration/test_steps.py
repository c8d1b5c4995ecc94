"""The steps that blocks go in, what flows through the model as it was and as it is, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from greenlet import greenlet
from torch import Tensor, nn
from zoo import ANIMALS, HIDDEN, Animal, Counter, traces, zoo

from scalewright.calibration import lockstep, pipelines
from scalewright.calibration.experts import showing_all_tokens, unfuse_experts
from scalewright.calibration.passes import quickly
from scalewright.calibration.pipelines import Calibration
from scalewright.calibration.steps import Unit, steps_of
from scalewright.errors import CalibrationError
from scalewright.modifiers.attention import WatchedAttention
from scalewright.modifiers.figures import Sample
from scalewright.modifiers.gptq import Rounding
from scalewright.modifiers.gptq_layer import GPTQLayer
from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.modifiers.shown import Shown

# T tokens, C columns of the weight (input channels).


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of weights takes time, and is tested elsewhere."""
    for name in ("above_optimum", "gain_over_minmax"):
        monkeypatch.setattr(Sample, name, lambda _: None)


def scheme_of(name: str) -> QuantizationScheme:
    """A scheme by name, in small groups, with observers that are quick."""
    scheme = scheme_named(name)
    scheme.weights.observer = "memoryless_minmax"
    if scheme.weights.strategy == "group" and scheme.weights.scale_dtype is None:
        scheme.weights.group_size = 16
    if scheme.input_activations is not None and scheme.input_activations.dynamic is not True:
        scheme.input_activations.observer = "static_minmax"
    return scheme


W4 = scheme_of("W4A16")
PLAIN, MAKING_UP = Rounding(), Rounding(correction=1.0)


# ---- models that are odd in one way each -----------------------------------------------------------------------------


class Stack(nn.Module):
    """Two blocks of one kind, one after the other."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


class Parallel(nn.Module):
    """Attention and the rest are given the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear() for _ in range(4))
        self.fc1, self.fc2 = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(x, (HIDDEN,))
        weights = torch.softmax(self.q_proj(y) @ self.k_proj(y).mT / HIDDEN**0.5, dim=-1)
        return x + self.o_proj(weights @ self.v_proj(y)) + self.fc2(torch.relu(self.fc1(y)))


class Twice(nn.Module):
    """One layer is called twice, with a sum in between that is made in place; another sees only the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.other(x)
        x += torch.tanh(self.first(x))
        x *= 1.5
        return self.last(torch.tanh(y) + self.first(x))


class Changing(nn.Module):
    """The same tensor is not the same input: it is changed in place between two layers, and so is the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.9
        y = self.first(x)
        x += 1.0
        return torch.tanh(y) + self.second(x) + self.third(x)


class Choosing(nn.Module):
    """Experts that are given the tokens whose strongest channel is theirs, if there are any; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.before = linear()
        self.experts = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(5))
        self.after = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        chosen = x[..., :4].argmax(dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if bool((chosen == i).any()):
                out[chosen == i] = expert(x[chosen == i])
        return x + self.after(out)


class Compressed(nn.Module):
    """Attention whose queries and keys come from a few channels each; loaders merge the layers that make these."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        for name in names:
            self.self_attn.add_module(name, linear())
        self.self_attn.forward = self._attend
        self.mlp = nn.Sequential(linear(), nn.Tanh(), linear())

    def _attend(self, x: Tensor) -> Tensor:
        part = self.self_attn
        query = part.q_b_proj(torch.tanh(part.q_a_proj(x)))
        key = part.kv_b_proj(torch.tanh(part.kv_a_proj_with_mqa(x)))
        return part.o_proj(torch.softmax(query @ key.mT / HIDDEN**0.5, dim=-1) @ key)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Spare(nn.Module):
    """A layer that is never called stands between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.second = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Turning(Parallel):
    """What goes into a layer is turned by a hook."""

    def __init__(self) -> None:
        super().__init__()
        turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
        self.v_proj.register_forward_pre_hook(lambda _, args: (args[0] @ turn,))


class Inferring(Parallel):
    """Runs in inference mode, whose tensors cannot be told to have changed."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = super().forward(x)
        return y.clone()


MADE = (Parallel, Twice, Changing, Choosing, Compressed, Spare, Turning, Inferring)
KINDS = {each.__name__.lower(): each for each in MADE}


def stack(kind: str) -> Animal:
    torch.manual_seed(0)
    model = Stack(KINDS[kind]).eval()
    generator = torch.Generator().manual_seed(5)
    batches = []
    for i in range(4):
        mask = torch.ones(3, 9)
        mask[0, 9 - 2 * i :] = 0
        batches.append({"x": torch.randn(3, 9, HIDDEN, generator=generator), "attention_mask": mask})
    return Animal(model, batches, ["blocks.0", "blocks.1"])


def animal_named(name: str) -> Animal:
    animal = stack(name) if name in KINDS else zoo(name)
    unfuse_experts(animal.model)
    return animal


# ---- watching a run --------------------------------------------------------------------------------------------------


@dataclass
class Diary:
    """What a run has shown to whom, and which layers went together."""

    steps: list[list[str]] = field(default_factory=list)
    blocks: dict[str, list[list[str]]] = field(default_factory=dict)
    """The steps of each block, or none if it went as a whole."""
    given: dict[str, list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)
    """What each layer was shown of the quantised model, and its mask."""
    should: dict[str, list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)
    """The same of the model as it was."""
    hessians: dict[str, Tensor] = field(default_factory=dict)
    crosses: dict[str, Tensor | None] = field(default_factory=dict)
    done: list[QuantizedLayer] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return [note for layer in self.done for note in layer.notes]


class Noted(GPTQLayer):
    """Writes all that it sees into a diary."""

    diary: Diary

    def _add(self, shown: Shown) -> None:
        self.diary.given.setdefault(self.name, []).append((shown.value.clone(), shown.mask))
        super()._add(shown)
        if self._hessian is not None:
            self.diary.hessians[self.name] = self._hessian.matrix.clone()  # the last time, of all

    def _keep_unquantised(self, shown: Shown) -> None:
        self.diary.should.setdefault(self.name, []).append((shown.value.clone(), shown.mask))
        super()._keep_unquantised(shown)

    def finish(self) -> QuantizedLayer:
        if self._hessian is not None:
            cross = self._cross
            self.diary.crosses[self.name] = None if cross is None else cross.clone()
        return super().finish()


def linears(model: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def layers_of(
    model: nn.Module,
    rounding: Rounding = PLAIN,
    scheme: QuantizationScheme = W4,
    only: Callable[[str], bool] = lambda name: True,
    kind: type[GPTQLayer] = GPTQLayer,
) -> list[WatchedLayer]:
    return [kind(name, module, scheme, rounding) for name, module in linears(model) if only(name)]


def noted(
    animal: Animal,
    monkeypatch: pytest.MonkeyPatch,
    rounding: Rounding = PLAIN,
    *,
    shows_all: bool = True,
    more: Iterable[WatchedLayer] = (),
    **given: Any,
) -> Diary:
    """The diary of a sequential run."""
    diary = Diary()
    calibrated, model = Calibration._calibrated, animal.model

    def note_step(self: Calibration, unit: Unit, *args: Any, **keywords: Any) -> list[QuantizedLayer]:
        diary.steps.append([layer.name for layer in unit.layers])
        return calibrated(self, unit, *args, **keywords)

    def note_block(of: nn.Module, unit: Unit, rehearse: Callable[[], object]) -> list[Unit]:
        found = steps_of(of, unit, rehearse)
        if unit.name in animal.blocks:
            names = [[layer.name.removeprefix(f"{unit.name}.") for layer in step.layers] for step in found]
            diary.blocks[unit.name] = names
        return found

    kind = type("Noted", (Noted,), {"diary": diary})
    with monkeypatch.context() as patch, showing_all_tokens(model, on=shows_all):
        patch.setattr(Calibration, "_calibrated", note_step)
        patch.setattr(pipelines, "steps_of", note_block)
        layers = [*layers_of(model, rounding, kind=kind, **given), *more]
        diary.done = Calibration(model, layers, animal.batches, animal.blocks).run("sequential")
    return diary


# ---- which layers go together ----------------------------------------------------------------------------------------

ATTENTION = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
GATED = [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_block_goes_in_four_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    diary = noted(zoo(name), monkeypatch)
    assert diary.blocks == dict.fromkeys(("model.layers.0", "model.layers.1"), ATTENTION + GATED)
    assert diary.steps[-1] == ["lm_head"] and len(diary.steps) == 9 and not diary.notes


def test_cross_attention_takes_keys_and_values_from_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = noted(zoo("t5"), monkeypatch).blocks
    attention = [[f"layer.0.SelfAttention.{each}" for each in "qkv"], ["layer.0.SelfAttention.o"]]
    across = [[f"layer.1.EncDecAttention.{each}" for each in group] for group in (("q",), ("k", "v"), ("o",))]
    for i in range(2):
        assert blocks[f"encoder.block.{i}"] == [*attention, *([f"layer.1.DenseReluDense.{w}"] for w in ("wi", "wo"))]
        dense = ([f"layer.2.DenseReluDense.{w}"] for w in ("wi", "wo"))
        assert blocks[f"decoder.block.{i}"] == [*attention, *across, *dense]


@pytest.mark.parametrize(("name", "parts"), [("mixtral", ("w1", "w3", "w2")), ("qwen3_moe", ("gate", "up", "down"))])
def test_all_experts_of_a_layer_are_one_step(
    name: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    animal = animal_named(name)
    blocks = noted(animal, monkeypatch).blocks
    ends = parts if name == "mixtral" else tuple(f"{each}_proj" for each in parts)
    experts = [f"mlp.experts.{i}.{each}" for i in range(4) for each in ends]
    assert blocks == {block: [*ATTENTION, experts] for block in animal.blocks}


def test_what_is_no_linear_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = zoo("gpt2")  # its blocks have no linear layer
    before = copy.deepcopy(animal.model.transformer.state_dict())
    diary = noted(animal, monkeypatch)
    assert (diary.steps, diary.blocks) == ([["lm_head"]], {})
    assert all(torch.equal(value, before[key]) for key, value in animal.model.transformer.state_dict().items())


STEPS = {
    # They share their input, but not one after the other: what lies in between is quantised first.
    "parallel": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["fc1"], ["fc2"]],
    "twice": [],  # what a layer is given when it is called again comes from itself
    "changing": [["first"], ["second", "third"]],
    "spare": [["first"], ["spare"], ["second"]],
    "compressed": [
        ["self_attn.q_a_proj"],
        ["self_attn.q_b_proj"],
        ["self_attn.kv_a_proj_with_mqa"],
        ["self_attn.kv_b_proj"],
        ["self_attn.o_proj"],
        ["mlp.0"],
        ["mlp.2"],
    ],
    "choosing": [["before"], *([f"experts.{i}.{j}"] for i in range(5) for j in (0, 2)), ["after"]],
}


@pytest.mark.parametrize("kind", STEPS)
def test_layers_that_follow_each_other_with_the_same_input_are_a_step(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noted(stack(kind), monkeypatch).blocks == dict.fromkeys(("blocks.0", "blocks.1"), STEPS[kind])


def test_layers_that_share_a_global_scale_and_not_their_input_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = stack("compressed")
    with torch.no_grad():
        animal.model.blocks[0].self_attn.kv_a_proj_with_mqa.weight *= 8
    blocks = noted(animal, monkeypatch, scheme=scheme_of("NVFP4A16")).blocks
    attention = [f"self_attn.{each}" for each in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    assert blocks == {block: [attention, ["mlp.0"], ["mlp.2"]] for block in animal.blocks}
    part = animal.model.blocks[0].self_attn
    scales = [part.get_submodule(name).weight_global_scale for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    assert torch.equal(scales[0], scales[1]) and not torch.equal(scales[0], scales[2])


def test_layers_that_share_a_global_scale_and_their_input_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = zoo("llama")
    with torch.no_grad():
        animal.model.model.layers[0].self_attn.k_proj.weight *= 8
    blocks = noted(animal, monkeypatch, scheme=scheme_of("NVFP4A16")).blocks
    assert blocks == dict.fromkeys(("model.layers.0", "model.layers.1"), ATTENTION + GATED)
    part = animal.model.model.layers[0].self_attn
    scales = [part.get_submodule(f"{each}_proj").weight_global_scale for each in "qkvo"]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[1], scales[2])
    assert not torch.equal(scales[2], scales[3])


def test_a_block_goes_as_a_whole_where_more_than_inputs_is_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = zoo("llama")
    blocks = noted(animal, monkeypatch, more=attention_of(animal)).blocks
    assert blocks == {"model.layers.0": [], "model.layers.1": []}


def embedding_of(animal: Animal) -> WatchedLayer:
    args = QuantizationArgs(num_bits=4, strategy="channel", observer="memoryless_minmax")
    scheme = QuantizationScheme(targets=["Embedding"], weights=args)
    return WatchedLayer("model.embed_tokens", animal.model.model.embed_tokens, scheme)


def attention_of(animal: Animal, *, queries: bool = False) -> list[WatchedLayer]:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", observer="static_minmax")
    return [
        WatchedAttention(name, module, args, model=animal.model, queries=queries)
        for name, module in animal.model.named_modules()
        if name.endswith("self_attn")
    ]


def test_a_layer_that_is_never_called_is_rounded_to_the_nearest_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    animal, plain = stack("spare"), stack("spare").model
    diary = noted(animal, monkeypatch)
    words = "saw 0 tokens, and GPTQ needs 32 or more. It was rounded to the nearest."
    assert diary.notes == [f"blocks.{i}.spare: {words}" for i in range(2)]
    Calibration(plain, [WatchedLayer(name, module, W4) for name, module in linears(plain)]).run("data_free")
    for i in range(2):
        assert torch.equal(animal.model.blocks[i].spare.weight, plain.blocks[i].spare.weight)
        assert not torch.equal(animal.model.blocks[i].first.weight, plain.blocks[i].first.weight)


# ---- what they are shown ---------------------------------------------------------------------------------------------


def inputs_of(model: nn.Module, names: Iterable[str], animal: Animal, *, shows_all: bool) -> dict[str, list[Tensor]]:
    """What goes into layers in plain forward passes."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].clone()))
        for name, own in seen.items()
    ]
    with torch.no_grad(), showing_all_tokens(model, on=shows_all), quickly(model):
        for batch in copy.deepcopy(animal.batches):
            model(**batch)
    for hook in hooks:
        hook.remove()
    return seen


def tokens_of(value: Tensor, mask: Tensor | None) -> Tensor:
    return value.reshape(-1, value.shape[-1]) if mask is None else value[mask.bool()]


def assert_equal(shown: list[tuple[Tensor, Any]], expected: list[Tensor], name: str) -> None:
    assert len(shown) == len(expected) > 0, name
    assert all(torch.equal(one, other) for (one, _), other in zip(shown, expected, strict=True)), name


CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "t5", "llava")},
    **{name: {} for name in KINDS if name not in ("choosing", "spare")},
    "llama, inputs in 8 bits": {"scheme": scheme_of("W8A8")},
    "llama, NVFP4": {"scheme": scheme_of("NVFP4")},
    "compressed, NVFP4": {"scheme": scheme_of("NVFP4A16")},
    "llama, with a kv cache": {"more": attention_of},
    "llama, with queries": {"more": lambda animal: attention_of(animal, queries=True)},
    "llama, with its embedding": {"more": lambda animal: [embedding_of(animal)]},
    "llama, attention and the rest apart": {"blocks": ("self_attn", "mlp")},
    "llama, layer by layer": {"blocks": ("_proj",)},
    "llama, without blocks": {"blocks": ()},
    "t5, without correction": {"rounding": PLAIN},
    "choosing, without correction": {"rounding": PLAIN},
    "mixtral, those that choose an expert": {"rounding": PLAIN, "shows_all": False},
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_shown_what_plain_passes_give(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: in the model as it was, and in one in which exactly the steps before are quantised."""
    given = {"rounding": MAKING_UP, **CASES[case]}
    animal = animal_named(case.partition(",")[0])
    more = given.pop("more", lambda animal: [])(animal)
    unquantised, by_hand = (copy.deepcopy(animal.model) for _ in range(2))
    if "blocks" in given:
        names = tuple(f".{each}" for each in given.pop("blocks"))
        animal.blocks[:] = [name for name, _ in animal.model.named_modules() if name.endswith(names)]
    shows_all, is_corrected = given.get("shows_all", True), given["rounding"].correction > 0
    before = copy.deepcopy(animal.batches)
    diary = noted(animal, monkeypatch, more=more, **given)
    assert all(
        torch.equal(one[key], other[key]) for one, other in zip(animal.batches, before, strict=True) for key in one
    )
    names = [name for step in diary.steps for name in step if name in diary.given]
    assert names
    should = inputs_of(unquantised, names, animal, shows_all=shows_all)
    num_changed = 0
    for step in diary.steps:
        own = [name for name in step if name in diary.given]
        found = inputs_of(by_hand, own, animal, shows_all=shows_all)
        for name in own:
            assert_equal(diary.given[name], found[name], name)
            masks = [mask for _, mask in diary.given[name]]
            tokens = torch.cat([tokens_of(*each) for each in diary.given[name]])
            torch.testing.assert_close(diary.hessians[name], tokens.T @ tokens, rtol=1e-4, atol=1e-4)
            if is_corrected:
                assert_equal(diary.should[name], should[name], name)
                assert _are_equal(masks, [mask for _, mask in diary.should[name]]), name
                wanted = torch.cat([tokens_of(*each) for each in diary.should[name]])
                expected = tokens.double().T @ (wanted - tokens).double()
                torch.testing.assert_close(diary.crosses[name].double(), expected, rtol=1e-3, atol=1e-3)
                num_changed += not torch.equal(wanted, tokens)
        for name in step:
            by_hand.set_submodule(name, copy.deepcopy(animal.model.get_submodule(name)))
    assert not is_corrected or num_changed > len(names) / 3


@pytest.mark.parametrize("case", ["mixtral", "turning", "compressed", "llava"])
def test_they_are_shown_it_whoever_multiplies(
    case: str, monkeypatch: pytest.MonkeyPatch, products_by_onednn: list[int]
) -> None:
    test_layers_are_shown_what_plain_passes_give(case, monkeypatch)
    assert products_by_onednn[0] > 100


def _are_equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def test_masks_of_both_streams_are_those_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = zoo("t5")
    diary = noted(animal, monkeypatch, MAKING_UP)
    kinds = {
        "encoder.": "attention_mask",
        "SelfAttention": "decoder_attention_mask",
        "EncDecAttention.k": "attention_mask",
    }
    kinds |= {"EncDecAttention.v": "attention_mask", "EncDecAttention": "decoder_attention_mask"}
    for shown in (diary.given, diary.should):
        for name, values in shown.items():
            mask = next((each for part, each in kinds.items() if part in name), "decoder_attention_mask")
            for batch, (_, found) in zip(animal.batches, values, strict=True):
                expected = batch[mask]
                assert found is None if bool(expected.all()) else torch.equal(found, expected), name


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_tokens_that_choose_an_expert_are_not_taken_for_those_that_chose_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    animal = animal_named(name)
    for batch in list(animal.batches):  # enough for each expert
        animal.batches.extend([{key: value.flip(0) for key, value in batch.items()}] * 4)
    diary = noted(animal, monkeypatch, MAKING_UP, shows_all=False)
    experts = {layer.name for layer in diary.done if "experts" in layer.name}
    assert not experts & diary.should.keys() and {diary.crosses[each] for each in experts} == {None}
    words = ": what it would be given by the model as it was is not known, so it does not make up for what earlier "
    told = {note.partition(words)[0] for note in diary.notes if note.endswith(f"{words}layers lost.")}
    few = {note.partition(": saw ")[0] for note in diary.notes if ": saw " in note}
    assert told | few == experts and len(told) > 12
    assert all(diary.crosses[each] is not None for each in diary.crosses.keys() - experts)


def test_pairs_that_cannot_be_told_are_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = noted(stack("choosing"), monkeypatch, MAKING_UP)
    experts = [name for name in diary.given if "blocks.1.experts" in name]
    counts = {
        name: [[len(value) for value, _ in shown.get(name, [])] for shown in (diary.given, diary.should)]
        for name in experts
    }
    differing = [name for name, (given, should) in counts.items() if given != should]
    assert len(differing) > 3  # as tokens that were moved choose other experts
    assert all(diary.crosses[name] is None for name in differing)
    assert diary.crosses["blocks.1.before"] is not None and diary.crosses["blocks.1.after"] is not None


def test_an_input_without_its_counterpart_leaves_nothing_to_make_up_for() -> None:
    value = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))

    def cross_after(*shown: str) -> Tensor | None:
        layer = GPTQLayer("layer", linear(), W4, MAKING_UP)
        layer.start()
        ((_, see_unquantised),) = layer.sees_unquantised()
        see = next(see for where, see in layer._sees_for_weights())
        for each in shown:
            (see_unquantised if each == "should" else see)(Shown(value * (1.1 if each == "should" else 1)))
        return layer._cross

    expected = 0.1 * value.T @ value
    torch.testing.assert_close(cross_after("should", "given"), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cross_after("should", "should", "given", "given"), 2 * expected, rtol=1e-4, atol=1e-4)
    for shown in (
        ("given",),
        ("should", "given", "given"),
        ("should", "should", "given"),
        ("given", "should", "given"),
    ):
        assert cross_after(*shown) is None


def test_what_is_used_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    again = "is used again after it was quantised, and"
    rounded, made_up = "it was rounded for its first use alone.", "later layers do not make up for what that loses."
    owners = ("between", "blocks.1.first", "blocks.1.second")
    # `between` is called by each of the passes through the blocks, of which the second block is in two places.
    assert noted(zoo("odd"), monkeypatch).notes == [f"{name}: {again} {rounded}" for name in owners]
    notes = noted(zoo("odd"), monkeypatch, MAKING_UP).notes
    assert notes == [f"{name}: {again} {what}" for name in owners for what in (rounded, made_up)]
    animal = zoo("llama")
    animal.model.model.layers[1].mlp = animal.model.model.layers[0].mlp
    found = noted(animal, monkeypatch, more=attention_of(animal)).notes  # blocks go as a whole
    assert found == [f"model.layers.0.mlp.{each}: {again} {rounded}" for each in ("gate_proj", "up_proj", "down_proj")]


@pytest.mark.parametrize("what", ["mlp", "block"])
def test_what_is_used_again_when_all_is_rounded_is_named_too(what: str) -> None:
    animal = zoo("llama")
    layers = animal.model.model.layers
    if what == "mlp":
        layers[1].mlp = layers[0].mlp
    else:
        layers[1] = layers[0]
    watched = [each for each in layers_of(animal.model) if each.name != "lm_head"]
    done = Calibration(animal.model, watched, animal.batches, animal.blocks).run("sequential")
    again = "is used again after it was quantised, and it was rounded for its first use alone."
    attention = [f"self_attn.{each}_proj" for each in "qkvo"] if what == "block" else []
    assert [note for layer in done for note in layer.notes] == [
        f"model.layers.0.{each}: {again}" for each in (*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]


def test_before_anything_is_used_again_the_stream_is_that_of_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    animal, plain = zoo("odd"), zoo("odd").model
    diary = noted(animal, monkeypatch, MAKING_UP)
    for name in ("blocks.0.first", "blocks.0.second", "between", "blocks.1.first", "blocks.1.second"):
        every = inputs_of(plain, [name], animal, shows_all=True)[name]
        assert_equal(diary.should[name], every[:: len(every) // 3], name)


def test_a_layer_with_other_neighbours_in_each_batch_is_an_error() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + (self.second(x) if x.sum() > 0 else x)

    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 16, HIDDEN)} for _ in range(3)]
    for i, batch in enumerate(batches):
        batch["x"] -= batch["x"].mean() + (0.1 if i == 1 else -0.1)
    model = Alternating()
    with pytest.raises(CalibrationError) as caught:
        Calibration(model, layers_of(model), batches).run("basic")
    assert str(caught.value) == (
        "second: was shown 2 inputs, of which some but not all were those of another layer (3 in all). Their Hessian "
        "cannot be shared. Use QuantizationModifier for one of them, or ignore it."
    )


# ---- how much is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounding", "streams"), [(PLAIN, 1), (MAKING_UP, 2)])
def test_a_block_is_run_once_for_each_stream_and_once_to_see_its_steps(rounding: Rounding, streams: int) -> None:
    animal = zoo("llama")
    parts = ("self_attn.q_proj", "mlp.down_proj")
    counter = Counter(animal.model, *(f"model.layers.{i}.{part}" for i in range(2) for part in parts), "lm_head")
    layers = layers_of(animal.model, rounding, only=lambda name: name != "lm_head")
    Calibration(animal.model, layers, animal.batches, animal.blocks).run("sequential")
    counter.remove()
    # The last step is only looked at.
    assert list(counter.calls.values()) == [3 * streams + 1] * 3 + [1, 0]


def test_the_model_as_it_was_is_run_if_anybody_asks() -> None:
    animal = zoo("llama")
    counter = Counter(animal.model, "model.embed_tokens")
    only = "model.layers.0.mlp.down_proj"
    layers = [
        *layers_of(animal.model, MAKING_UP, only=lambda name: name == only),
        *layers_of(animal.model, PLAIN, only=lambda name: name not in (only, "lm_head")),
    ]
    Calibration(animal.model, layers, animal.batches, animal.blocks).run("sequential")
    counter.remove()
    assert counter.calls == {"model.embed_tokens": 6}


def test_a_block_is_not_looked_at_as_it_was_where_nobody_asks() -> None:
    animal = zoo("llama")
    counter = Counter(animal.model, *animal.blocks)
    layers = [
        *layers_of(animal.model, PLAIN, only=lambda name: ".layers.0." in name),
        *layers_of(animal.model, MAKING_UP, only=lambda name: ".layers.1." in name),
        *attention_of(animal),  # so that blocks go as a whole
    ]
    Calibration(animal.model, layers, animal.batches, animal.blocks).run("sequential")
    counter.remove()
    assert counter.calls == {"model.layers.0": 3 + 6, "model.layers.1": 6}


def test_progress_goes_on_and_comes_to_its_end() -> None:
    animal = zoo("llama")
    told: list[tuple[str, int, int]] = []
    calibration = Calibration(animal.model, layers_of(animal.model, MAKING_UP), animal.batches, animal.blocks)
    calibration.on_step = lambda phase, what, done, total: told.append((phase, done, total))
    calibration.run("sequential")
    for phase in ("calibrating", "quantising"):
        counts = [done for each, done, _ in told if each == phase]
        (total,) = {total for each, _, total in told if each == phase}
        assert counts == sorted(counts) and counts[0] == 0
        assert counts[-1] == total


# ---- nothing is left -------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[greenlet]:
    """All passes that are begun."""
    begun: list[greenlet] = []

    def begin(run: Callable[..., Any]) -> greenlet:
        begun.append(greenlet(run))
        return begun[-1]

    monkeypatch.setattr(lockstep, "greenlet", begin)
    return begun


def assert_bare(model: nn.Module, before: dict[str, Any], passes: list[greenlet]) -> None:
    """No hook, observer or importance is on the model that was not there, and no pass is left half-way."""
    for name, found in traces(model).items():
        if not name.endswith(" config"):
            kind, attributes, hooks, *_ = found
            assert (kind, hooks) == (before[name][0], before[name][2]), name
            assert set(attributes) - set(before[name][1]) <= {"quantization_scheme", "quantization_status", "forward"}
    assert len(passes) >= 6 and all(each.dead for each in passes)


@pytest.mark.parametrize("name", [*ANIMALS, *KINDS])
def test_nothing_stays_after_success(name: str, passes: list[greenlet]) -> None:
    animal = animal_named(name)
    with torch.no_grad():
        animal.model(**copy.deepcopy(animal.batches[0]))  # transformers puts its own hooks on with the first pass
    before = traces(animal.model)
    scheme = W4.model_copy(deep=True)
    scheme.weights.observer = "imatrix_mse"
    layers = layers_of(animal.model, MAKING_UP, scheme)
    with showing_all_tokens(animal.model, on=True):
        Calibration(animal.model, layers, animal.batches, animal.blocks).run("sequential")
    assert_bare(animal.model, before, passes)
    for layer in layers:
        assert not layer.observers and layer._hessian is None and not layer._unquantised and layer._target is None


PLACES = ["see", "see unquantised", "finish", "forward", "forward of the model as it was", "rehearsal", "step"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", [1, 5])
def test_nothing_stays_after_an_error(
    when: int, place: str, error: type[BaseException], passes: list[greenlet], monkeypatch: pytest.MonkeyPatch
) -> None:
    animal = zoo("llama")
    animal.model.train()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == when:
            raise error("broken")

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **keywords: (fail(), function(*args, **keywords))[1]

    layers = layers_of(animal.model, MAKING_UP)
    calibration = Calibration(animal.model, layers, animal.batches, animal.blocks)
    before = traces(animal.model)
    methods = {"see": "_add", "see unquantised": "_keep_unquantised", "finish": "_rounded"}
    if place in methods:
        monkeypatch.setattr(GPTQLayer, methods[place], failing(getattr(GPTQLayer, methods[place])))
    elif place == "rehearsal":
        monkeypatch.setattr(pipelines, "steps_of", failing(steps_of))
        when = min(when, 2)
    elif place == "step":
        calibration.on_step = fail
    else:
        at = "model.layers.0.mlp.act_fn" if place == "forward" else "model.layers.1.self_attn.q_proj"
        hook = animal.model.get_submodule(at).register_forward_pre_hook(fail)
        before = traces(animal.model)
    grad = torch.is_grad_enabled()
    with pytest.raises(error, match="broken"):
        calibration.run("sequential")
    assert torch.is_grad_enabled() == grad and animal.model.training
    assert_bare(animal.model, before, passes)
    if when == 1 and place != "forward of the model as it was":
        assert traces(animal.model) == before
    if "forward" in place:
        hook.remove()


def test_inputs_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[weakref.ref[Tensor]] = []
    for name in ("_add", "_keep_unquantised"):
        see = getattr(GPTQLayer, name)
        monkeypatch.setattr(
            GPTQLayer, name, lambda self, it, see=see: (shown.append(weakref.ref(it.value)), see(self, it))[1]
        )
    animal = zoo("llama")
    for batch in animal.batches:  # no padding: tokens are where they were
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    calibration = Calibration(animal.model, layers_of(animal.model, MAKING_UP), animal.batches, animal.blocks)
    calibration.run("sequential")
    gc.collect()
    assert len(shown) == 2 * 3 * 15 and not any(each() is not None for each in shown)
