"""Which values reach observers, when layers are rounded, how much is computed, and that nothing is left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor, nn
from zoo import ANIMALS, HIDDEN, Animal, Counter, padded, traces, without_padding, zoo

from scalewright.calibration import pipelines
from scalewright.calibration.experts import showing_all_tokens, unfuse_experts
from scalewright.calibration.pipelines import Calibration
from scalewright.calibration.steps import units_of
from scalewright.calibration.taps import Masks
from scalewright.errors import CalibrationError, DataError, NonFiniteError
from scalewright.modifiers import layers as layers_module
from scalewright.modifiers.attention import WatchedAttention
from scalewright.modifiers.figures import Sample
from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer
from scalewright.modifiers.schemes import scheme_named
from scalewright.numerics import histogram
from scalewright.observers import Observer
from scalewright.observers import histogram as histogram_observers

PIPELINES = ["basic", "sequential"]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of weights takes time, and is tested elsewhere."""
    for name in ("above_optimum", "gain_over_minmax"):
        monkeypatch.setattr(Sample, name, lambda _: None)


def scheme_of(name: str, **observers: str) -> QuantizationScheme:
    """A scheme by name, in small groups, with `weights` and `inputs` observed by those that are named."""
    scheme = scheme_named(name)
    if scheme.weights is not None and scheme.weights.strategy == "group":
        scheme.weights.group_size = 16
    for part, args in (("weights", scheme.weights), ("inputs", scheme.input_activations)):
        if part in observers and args is not None:
            args.observer = observers[part]
    return scheme


STATIC = scheme_of("FP8", weights="memoryless_minmax", inputs="static_minmax")  # as quick as it gets


def watch(
    model: nn.Module, scheme: QuantizationScheme = STATIC, only: Callable[[str], bool] = lambda name: True
) -> list[WatchedLayer]:
    return [
        WatchedLayer(name, module, scheme)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and only(name)
    ]


def calibrate(
    animal: Animal, pipeline: str, scheme: QuantizationScheme = STATIC, *, blocks: list[str] | None = None, **given: Any
) -> list[QuantizedLayer]:
    layers = given.pop("layers", None) or watch(animal.model, scheme, **given)
    blocks = animal.blocks if blocks is None else blocks
    return Calibration(animal.model, layers, animal.batches, blocks).run(pipeline)


def in_blocks(name: str) -> bool:
    return any(f".{part}." in f".{name}" for part in ("layers", "h", "block", "blocks"))


def qparams(model: nn.Module, kind: str = "input_scale") -> dict[str, Tensor]:
    return {name: p.detach().float() for name, p in model.named_parameters() if name.endswith(kind)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **(tolerance or {"rtol": 0.0, "atol": 0.0}), msg=name)


@contextmanager
def observed_inputs(model: nn.Module, scheme: QuantizationScheme, name: str, batches: list[Any]) -> Iterator[Observer]:
    """An observer that has seen what goes into a layer in plain passes, written down by plain means."""
    (observer,) = [
        each for base, each in WatchedLayer(name, nn.Linear(1, 1), scheme).new_observers().items() if base == "input"
    ]
    mask: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = [slice(i, i + 1) for i in range(len(args[0]))] if observer.ordered else [slice(None)]
        for row in rows:  # a moving average goes by samples
            observer(args[0][row], mask=mask[-1][row])

    hook = model.get_submodule(name).register_forward_pre_hook(see)
    with torch.no_grad():
        for batch in batches:
            mask.append(batch["attention_mask"])
            model(**batch)
    hook.remove()
    yield observer


def input_scale(model: nn.Module, name: str, batches: list[Any], scheme: QuantizationScheme = STATIC) -> Tensor:
    with observed_inputs(model, scheme, name, batches) as observer:
        return observer.get_qparams()["scale"].reshape(-1).float()


# ---- what is seen ----------------------------------------------------------------------------------------------------


def test_basic_shows_the_model_as_it_is() -> None:
    animal, plain = zoo("llama"), zoo("llama").model
    calibrate(animal, "basic")
    for name, scale in qparams(animal.model).items():
        assert torch.equal(scale.reshape(-1), input_scale(plain, name.removesuffix(".input_scale"), animal.batches)), (
            name
        )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequential_shows_each_block_what_the_quantised_ones_before_it_give(name: str) -> None:
    animal, by_hand = zoo(name), zoo(name).model.eval()
    scheme = scheme_of("W4A16", weights="memoryless_minmax")
    scheme.input_activations = STATIC.input_activations
    basic = zoo(name)
    calibrate(basic, "basic", scheme)
    calibrate(animal, "sequential", scheme)
    units = [*animal.blocks, "lm_head"]
    differs = 0
    for unit in units:  # by hand: all before this one are quantised, this one is not
        inside = [n for n, m in by_hand.named_modules() if isinstance(m, nn.Linear) and f"{n}.".startswith(f"{unit}.")]
        for layer in inside:
            expected = input_scale(by_hand, layer, animal.batches, scheme)
            found = animal.model.get_submodule(layer).input_scale.detach().float().reshape(-1)
            assert torch.equal(found, expected), layer
            differs += not torch.equal(found, basic.model.get_submodule(layer).input_scale.detach().reshape(-1).float())
        by_hand.set_submodule(unit, copy.deepcopy(animal.model.get_submodule(unit)))
    assert differs > 5  # of layers after the first block


def test_importance_is_that_of_the_inputs_in_both_pipelines() -> None:
    scheme = scheme_of("W4A16", weights="imatrix_mse")
    collected: dict[str, Tensor] = {}
    animal, plain = zoo("llama"), zoo("llama").model
    name = "model.layers.0.mlp.down_proj"

    class Watched(WatchedLayer):
        def finish(self) -> QuantizedLayer:
            collected[self.name] = self.importance.channel_importance.clone()
            return super().finish()

    inputs: list[Tensor] = []
    hook = plain.get_submodule(name).register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        for batch in animal.batches:
            plain(**batch)
            inputs[-1] = inputs[-1][batch["attention_mask"].bool()]
    hook.remove()
    expected = torch.cat(inputs).square().mean(dim=0)
    for pipeline in PIPELINES:
        again = zoo("llama")
        collected.clear()
        calibrate(again, pipeline, layers=[Watched(name, again.model.get_submodule(name), scheme)])
        torch.testing.assert_close(collected[name], expected, rtol=1e-5, atol=1e-9)


def test_data_free_runs_nothing() -> None:
    animal = zoo("llama")

    def fail(*_: Any) -> None:
        raise AssertionError("a forward pass")

    for module in animal.model.modules():
        module.register_forward_pre_hook(fail)
    done = calibrate(animal, "data_free", scheme_of("W8A16"), only=lambda name: name != "lm_head")
    assert len(done) == 14 and all(layer.weight_db > 30 for layer in done)


@pytest.mark.parametrize("pipeline", ["data_free", *PIPELINES])
def test_results_come_in_the_order_of_the_layers(pipeline: str) -> None:
    animal = zoo("t5")
    layers = watch(animal.model, scheme_of("W8A16", weights="memoryless_minmax"))[::-1]
    done = calibrate(animal, pipeline, layers=layers)
    assert [each.name for each in done] == [each.name for each in layers]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", ANIMALS)
def test_every_layer_of_every_model_is_quantised(name: str, pipeline: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    with showing_all_tokens(animal.model, on=True):
        done = calibrate(animal, pipeline)
    modules = [m for m in animal.model.modules() if isinstance(m, nn.Linear)]
    assert len(done) == len(modules)
    assert all(float(m.input_scale) > 0 for m in modules)
    with torch.no_grad():
        assert bool(torch.isfinite(torch.cat([t.flatten() for t in _outputs(animal)])).all())


def _outputs(animal: Animal) -> list[Tensor]:
    outputs = [animal.model(**batch) for batch in animal.batches]
    return [each if isinstance(each, Tensor) else each.logits for each in outputs]


# ---- padding ---------------------------------------------------------------------------------------------------------


def loud_padding(animal: Animal) -> None:
    """Give the padding token an embedding that sticks out in one channel, also when it is normed."""
    embedding = animal.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[0] = 0
        embedding[0, 5] = 40


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("name", "shows_all"),
    [
        ("llama", False),
        ("gemma3", False),
        ("t5", False),
        ("mixtral", True),
        ("mixtral", False),
        ("qwen3_moe", True),
        ("qwen3_moe", False),
    ],
)
def test_padding_is_not_observed(name: str, shows_all: bool, pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Weights stay as they are, so that rounding does not blow up the last bits in which padded passes differ.
    scheme = QuantizationScheme(targets=["Linear"], input_activations=STATIC.input_activations)
    found = []
    for way in ("padded", "alone", "unmasked"):
        animal = zoo(name)
        if name in ("mixtral", "qwen3_moe"):  # so that each expert is chosen by some
            animal.batches.extend([padded((11, 30), 7), padded((30, 21), 8)])
        unfuse_experts(animal.model)
        loud_padding(animal)
        with monkeypatch.context() as patch:
            if way == "unmasked":
                patch.setattr(Masks, "of", lambda *_: None)
            batches = without_padding(animal.batches) if way == "alone" else animal.batches
            with showing_all_tokens(animal.model, on=shows_all):
                blocks = animal.blocks if pipeline == "sequential" else []
                Calibration(animal.model, watch(animal.model, scheme, in_blocks), batches, blocks).run(pipeline)
        found.append(qparams(animal.model))
    # In sequence, inputs of later blocks are rounded to fp8, which may turn a last bit into a step.
    assert_equal(found[0], found[1], rtol=1e-4 if pipeline == "basic" else 0.1, atol=1e-6)
    ratios = torch.stack([found[2][each] / found[0][each] for each in found[0]])
    assert float(ratios.max()) > 1.3


# ---- how much is computed --------------------------------------------------------------------------------------------


def count_calls(animal: Animal, pipeline: str, *names: str, **given: Any) -> dict[str, int]:
    counter = Counter(animal.model, *names)
    calibrate(animal, pipeline, **given)
    counter.remove()
    return counter.calls


def test_basic_is_one_pass_for_each_batch() -> None:
    animal = zoo("llama")
    last = ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]
    calls = count_calls(animal, "basic", "model.layers.0", *last, "model.norm", "lm_head", only=in_blocks)
    # Where there is nothing to see any more, passes end; the first shows where that is, and never enters the head.
    assert calls == {"model.layers.0": 3, last[0]: 3, last[1]: 1, "model.norm": 1, "lm_head": 0}


def test_basic_ends_passes_at_the_last_input_that_is_needed() -> None:
    animal = zoo("llama")
    last = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    calls = count_calls(animal, "basic", *last, "model.layers.1", "lm_head", only=lambda name: "layers.0." in name)
    assert calls == {last[0]: 3, last[1]: 1, "model.layers.1": 1, "lm_head": 0}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_head_is_not_run_to_see_its_input(pipeline: str) -> None:
    animal, names = zoo("llama"), ["model.norm", "lm_head"]
    calls = count_calls(animal, pipeline, *names, only=lambda name: name == "lm_head")
    assert calls == {"model.norm": 3, "lm_head": 0}
    assert torch.equal(
        animal.model.lm_head.input_scale.detach().float().reshape(-1),
        input_scale(zoo("llama").model, "lm_head", animal.batches),
    )


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_head_is_run_where_its_output_is_wanted(pipeline: str) -> None:
    animal = zoo("llama")
    scheme = QuantizationScheme(targets=["Linear"], output_activations=STATIC.input_activations)
    calls = count_calls(animal, pipeline, "lm_head", scheme=scheme, only=lambda name: name == "lm_head")
    assert calls == {"lm_head": 3}
    with torch.no_grad():
        plain = zoo("llama").model
        seen = [plain(**batch).logits[batch["attention_mask"].bool()] for batch in animal.batches]
    found = float(animal.model.lm_head.output_scale)
    assert found == pytest.approx(float(torch.cat(seen).abs().max()) / 448, rel=1e-5)


def test_sequential_runs_a_block_to_see_it_and_to_go_on() -> None:
    animal = zoo("llama")
    calls = count_calls(animal, "sequential", *animal.blocks, "model.norm", "lm_head", only=in_blocks)
    # The last block is only looked at.
    assert calls == {"model.layers.0": 6, "model.layers.1": 3, "model.norm": 0, "lm_head": 0}


def test_sequential_runs_a_block_once_where_its_weights_are_all_there_is_to_see() -> None:
    animal = zoo("llama")
    scheme = scheme_of("W8A16", weights="memoryless_minmax")
    calls = count_calls(animal, "sequential", *animal.blocks, scheme=scheme, only=in_blocks)
    assert calls == {"model.layers.0": 3, "model.layers.1": 0}


def test_sequential_passes_blocks_without_layers_once() -> None:
    animal = zoo("llama")
    calls = count_calls(animal, "sequential", *animal.blocks, only=lambda name: "layers.1." in name)
    assert calls == {"model.layers.0": 3, "model.layers.1": 3}
    assert count_calls(zoo("llama"), "sequential", *animal.blocks, only=lambda name: "layers.0." in name) == {
        "model.layers.0": 3,
        "model.layers.1": 0,
    }


@pytest.mark.parametrize("only", ["layers.0.", "layers.1.", "self_attn.q_proj"])
def test_ending_early_changes_no_statistics(only: str) -> None:
    some, every = zoo("llama"), zoo("llama")
    calibrate(some, "basic", only=lambda name: only in name)
    calibrate(every, "basic", blocks=[])
    expected = qparams(every.model)
    assert_equal(qparams(some.model), {name: each for name, each in expected.items() if only in name})


def test_a_block_that_is_called_again_later_is_seen_again_by_basic() -> None:
    animal = zoo("odd")
    calls = count_calls(animal, "basic", *animal.blocks, "head", only=lambda name: name.startswith("blocks.1."))
    # The second call of a pass ends at the last input that is needed, but in the first pass, which shows the way.
    assert calls == {"blocks.0": 3, "blocks.1": 3 + 1, "blocks.2": 3, "head": 1}
    expected = input_scale(zoo("odd").model, "blocks.1.first", animal.batches)
    assert torch.equal(animal.model.get_submodule("blocks.1.first").input_scale.detach().reshape(-1).float(), expected)


class Forking(nn.Module):
    """Goes another way for batches of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[2 if len(x) == 1 else 1], self.blocks[0]):
            x = block(x)
        return self.blocks[3](x) if len(x) == 3 else x


def forking(kind: type[Forking] = Forking) -> Animal:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 2, HIDDEN), "attention_mask": torch.ones(rows, 2)} for rows in (2, 1, 3, 2)]
    return Animal(kind(), batches, [f"blocks.{i}" for i in range(4)])


class Wandering(Forking):
    """Goes to all blocks, in an order that depends on the batch; what comes later is larger."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for place, i in enumerate(((2, 1, 0, 3, 1), (0, 1, 2, 3), (3, 2, 1, 0))[len(x) - 1]):
            x = self.blocks[i](x) * (1 + place * place)
        return x


@pytest.mark.parametrize("kind", [Forking, Wandering])
def test_passes_that_go_another_way_are_not_cut_short(kind: type[Forking]) -> None:
    animal, plain = forking(kind), forking(kind).model
    calibrate(animal, "basic", only=lambda name: kind is Forking or name != "blocks.3.0")
    for name, scale in qparams(animal.model).items():
        expected = input_scale(plain, name.removesuffix(".input_scale"), animal.batches)
        assert torch.equal(scale.reshape(-1), expected), name


def test_one_input_of_several_layers_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"squares": 0, "codes": 0}

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **keywords: Any) -> Any:
            counts[what] += 1
            return function(*args, **keywords)

        return count

    monkeypatch.setattr(layers_module, "sum_squares", counted("squares", layers_module.sum_squares))
    monkeypatch.setattr(histogram_observers, "count_codes", counted("codes", histogram.count_codes))
    scheme = scheme_of("W8A8", weights="imatrix_mse", inputs="balanced_mse")
    for pipeline in PIPELINES:
        counts.update(squares=0, codes=0)
        calibrate(zoo("llama"), pipeline, scheme, only=in_blocks)
        assert counts == {"squares": 3 * 2 * 4, "codes": 3 * 2 * 4}  # q/k/v, o, gate/up, down, instead of seven
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    counts.update(squares=0, codes=0)
    with showing_all_tokens(animal.model, on=True):
        calibrate(animal, "basic", scheme, only=in_blocks)
    assert counts == {"squares": 3 * 2 * (2 + 1 + 4), "codes": 3 * 2 * (2 + 1 + 4)}  # all experts have one input


@pytest.mark.parametrize("observer", ["static_minmax", "minmax", "mse", "memoryless_mse", "percentile", "balanced_mse"])
def test_looking_once_finds_what_looking_each_time_finds(observer: str) -> None:
    scheme = scheme_of("W8A8", weights="memoryless_minmax", inputs=observer)
    animal, plain = zoo("llama"), zoo("llama").model
    only = "layers.1.self_attn"
    calibrate(animal, "basic", scheme, only=lambda name: only in name)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        expected = input_scale(plain, f"model.{only}.{name}", animal.batches, scheme)
        found = animal.model.get_submodule(f"model.{only}.{name}").input_scale.detach().float().reshape(-1)
        assert torch.equal(found, expected), name


# ---- scales that are shared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "blocks"),
    [
        ("data_free", "none"),
        ("basic", "blocks"),
        ("sequential", "blocks"),
        ("sequential", "layers"),
        ("sequential", "none"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_that_are_merged_on_loading_share_their_global_scale(name: str, pipeline: str, blocks: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    with torch.no_grad():
        for each, module in animal.model.named_modules():
            if isinstance(module, nn.Linear) and each.endswith(("k_proj", "up_proj", "w3")):
                module.weight *= 8
    scheme = scheme_of("NVFP4A16" if pipeline == "data_free" else "NVFP4", weights="memoryless_minmax")
    given = {
        "blocks": animal.blocks,
        "layers": [n for n, m in animal.model.named_modules() if isinstance(m, nn.Linear)],
        "none": [],
    }[blocks]
    with showing_all_tokens(animal.model, on=True):
        done = calibrate(animal, pipeline, scheme, only=in_blocks, blocks=given)
    scales = qparams(animal.model, "weight_global_scale")
    groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")]
    num_groups = 0
    for group in groups:
        for each in scales:
            if each.endswith(f"{group[0]}.weight_global_scale"):
                parent = each.removesuffix(f"{group[0]}.weight_global_scale")
                members = [scales[f"{parent}{one}.weight_global_scale"] for one in group]
                assert all(torch.equal(one, members[0]) for one in members), parent
                num_groups += 1
    assert num_groups == (4 if name == "llama" else 2 + 8) and len(done) == (14 if name == "llama" else 32)
    other = scales["model.layers.0.self_attn.o_proj.weight_global_scale"]
    assert not torch.equal(other, scales["model.layers.0.self_attn.q_proj.weight_global_scale"])


def test_units_keep_together_what_belongs_together() -> None:
    animal = zoo("mixtral")
    unfuse_experts(animal.model)
    names = [n for n, m in animal.model.named_modules() if isinstance(m, nn.Linear)]
    units = units_of(animal.model, watch(animal.model), names)
    parts = ("self_attn", "mlp.experts")
    assert [unit.name for unit in units] == [*(f"model.layers.{i}.{p}" for i in range(2) for p in parts), "lm_head"]
    assert sum(len(unit.layers) for unit in units) == len(names)
    blocks = units_of(animal.model, watch(animal.model), animal.blocks)
    assert [unit.name for unit in blocks] == [*animal.blocks, "lm_head"]


def test_a_block_is_not_taken_for_one_whose_name_begins_alike() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(11))})
    units = units_of(model, watch(model), ["blocks.1"])
    assert {unit.name: len(unit.layers) for unit in units}["blocks.1"] == 1


# ---- nothing seen, seen twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_decoder_that_is_given_nothing_is_said(pipeline: str) -> None:
    animal = zoo("t5")
    batches = [{"input_ids": each["input_ids"]} for each in animal.batches]
    layers = watch(animal.model, scheme_of("W8A8"))
    with pytest.raises(DataError) as caught:
        Calibration(animal.model, layers, batches, animal.blocks).run(pipeline)
    assert str(caught.value) == (
        "data: T5ForConditionalGeneration writes answers, and there are none in it. Give batches with input_ids and "
        "decoder_input_ids."
    )


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_batch_that_the_model_cannot_be_called_with_is_named(pipeline: str) -> None:
    animal = zoo("llama")
    number, count = len(animal.batches), len(animal.batches) + 1
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "position_ids": torch.zeros(3, 9, dtype=torch.long)}
    batches = [*animal.batches, batch]
    with pytest.raises(RuntimeError) as plain:
        animal.model(**batch, use_cache=False)
    with pytest.raises(DataError) as caught:
        Calibration(animal.model, watch(animal.model), batches, animal.blocks).run(pipeline)
    assert str(caught.value) == (
        f"data: batch {number + 1} of {count} (input_ids [2, 5], position_ids [3, 9]): LlamaForCausalLM cannot be "
        f"run on it (RuntimeError: {plain.value}). Give batches that it can be called with, as in model(**batch); or "
        "fewer samples in each, if memory is short."
    )
    assert str(caught.value.__cause__) == str(plain.value)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_an_observer_raises_is_not_blamed_on_the_data(pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise IndexError("a mistake of an observer")

    monkeypatch.setattr(layers_module, "_sample", fail)
    with pytest.raises(IndexError, match=r"^a mistake of an observer$"):
        calibrate(zoo("llama"), pipeline, only=in_blocks)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_layer_that_saw_no_token_is_an_error(pipeline: str) -> None:
    animal = forking()
    del animal.batches[2]
    with pytest.raises(CalibrationError) as caught:
        calibrate(animal, pipeline)
    assert str(caught.value) == (
        "blocks.3.0: saw 0 tokens in calibration, so it has no input scale. "
        "Add samples, make its activations dynamic, or ignore it."
    )
    assert not any("observer" in each for module in animal.model.modules() for each in vars(module))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_expert_that_was_never_chosen_is_an_error_unless_it_is_shown_all(pipeline: str) -> None:
    def of(shows_all: bool) -> None:
        animal = zoo("mixtral")
        unfuse_experts(animal.model)
        router = animal.model.get_submodule("model.layers.1.mlp.gate")
        router.register_forward_hook(
            lambda module, args, output: (output[0], output[1], torch.tensor([0, 1]).expand_as(output[2]))
        )
        with showing_all_tokens(animal.model, on=shows_all):
            calibrate(animal, pipeline)

    of(True)
    words = r"^model\.layers\.1\.mlp\.experts\.2\.w1: saw 0 tokens in calibration, so it has no input scale\."
    with pytest.raises(CalibrationError, match=words):
        of(False)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_layer_that_saw_no_token_is_quantised_by_its_weight_alone(pipeline: str) -> None:
    animal = forking()
    del animal.batches[2]
    done = calibrate(animal, pipeline, scheme_of("W8A16", weights="memoryless_minmax"))
    assert len(done) == 4 and all(each.weight_db > 30 for each in done)


def test_what_is_used_again_after_it_was_quantised_is_named() -> None:
    animal = zoo("odd")
    notes = [note for layer in calibrate(animal, "sequential") for note in layer.notes]
    again = "is used again after it was quantised, and its static scales come from its first use alone."
    assert notes == [f"between: {again}", f"blocks.1: {again}"]
    assert not [note for layer in calibrate(zoo("odd"), "basic") for note in layer.notes]
    weights = scheme_of("W8A16", weights="memoryless_minmax")
    assert not [note for layer in calibrate(zoo("odd"), "sequential", weights) for note in layer.notes]


def test_a_layer_of_two_blocks_is_quantised_once_and_named() -> None:
    def shared() -> Animal:
        animal = zoo("llama")
        animal.model.model.layers[1].mlp = animal.model.model.layers[0].mlp
        return animal

    animal = shared()
    done = calibrate(animal, "basic", only=in_blocks)
    assert len(done) == 11 and not any(layer.notes for layer in done)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(
        animal.model.get_submodule(name).input_scale.detach().float().reshape(-1),
        input_scale(shared().model, name, animal.batches),
    )
    named = [layer.name for layer in calibrate(shared(), "sequential", only=in_blocks) if layer.notes]
    assert named == [f"model.layers.0.mlp.{each}" for each in ("gate_proj", "up_proj", "down_proj")]


def test_what_is_used_again_when_all_is_quantised_is_named_too() -> None:
    """No pass comes to it a second time: all that is to be seen was seen."""

    def notes(pipeline: str, only: Callable[[str], bool]) -> list[str]:
        animal = zoo("llama")
        animal.model.model.layers[1] = animal.model.model.layers[0]
        done = calibrate(animal, pipeline, only=only)
        return [note for layer in done for note in layer.notes]

    again = "is used again after it was quantised, and its static scales come from its first use alone."
    assert notes("sequential", lambda name: name.endswith(("q_proj", "down_proj"))) == [
        f"model.layers.0.{each}: {again}" for each in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert notes("sequential", lambda name: True) == [f"model.layers.0: {again}"], "a pass came to it again"
    assert notes("basic", in_blocks) == []


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_one_block_in_several_places_is_quantised_once(pipeline: str) -> None:
    animal = zoo("llama")
    animal.model.model.layers[1] = animal.model.model.layers[0]
    done = calibrate(animal, pipeline, only=in_blocks)
    assert len(done) == 7
    assert animal.model.model.layers[1] is animal.model.model.layers[0]


@pytest.mark.parametrize("pipeline", ["data_free", *PIPELINES])
def test_embeddings_and_a_head_that_shares_their_weight(pipeline: str) -> None:
    animal = zoo("llama")
    embedding, head = animal.model.model.embed_tokens, animal.model.lm_head
    head.weight = embedding.weight
    original = embedding.weight.detach().clone()
    scheme = scheme_of("W8A16")
    layers = [WatchedLayer("lm_head", head, scheme)]
    (quantised,) = calibrate(animal, pipeline, layers=layers)
    assert torch.equal(embedding.weight, original) and not torch.equal(head.weight, original)
    layers = [WatchedLayer("model.embed_tokens", embedding, scheme), *watch(animal.model, scheme, in_blocks)]
    done = calibrate(animal, pipeline, layers=layers)
    assert not [note for layer in done for note in layer.notes if "importance" in note or "calibration" in note]
    assert done[0].weight_db > 30 and quantised.weight_db > 30
    assert not torch.equal(embedding.weight, original)


def test_sequential_shows_what_a_quantised_embedding_gives() -> None:
    animal, plain = zoo("llama"), zoo("llama").model
    weights = QuantizationScheme(
        targets=["Embedding"], weights=QuantizationArgs(num_bits=4, strategy="channel", observer="memoryless_minmax")
    )
    layers = [WatchedLayer("model.embed_tokens", animal.model.model.embed_tokens, weights)]
    calibrate(animal, "sequential", layers=[*layers, *watch(animal.model, STATIC, in_blocks)])
    name = "model.layers.0.self_attn.q_proj"
    found = animal.model.get_submodule(name).input_scale.detach().reshape(-1).float()
    assert not torch.equal(found, input_scale(plain, name, animal.batches))
    plain.model.embed_tokens.weight.data.copy_(animal.model.model.embed_tokens.weight)
    assert torch.equal(found, input_scale(plain, name, animal.batches))


# ---- nothing is left -------------------------------------------------------------------------------------------------


def attention_layers(animal: Animal, *, queries: bool) -> list[WatchedLayer]:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", observer="static_minmax")
    return [
        WatchedAttention(name, module, args, model=animal.model, queries=queries)
        for name, module in animal.model.named_modules()
        if name.endswith("self_attn")
    ]


@pytest.mark.parametrize("pipeline", ["data_free", *PIPELINES])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "odd"])
def test_no_hook_or_observer_stays_after_success(name: str, pipeline: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    animal.model.train()
    animal.model.get_submodule(animal.blocks[0]).eval()
    before = traces(animal.model)
    scheme = scheme_of("W8A16" if pipeline == "data_free" else "W8A8", weights="imatrix_mse")
    with showing_all_tokens(animal.model, on=True):
        calibrate(animal, pipeline, scheme, only=in_blocks)
    ours = {"quantization_scheme", "quantization_status", "forward"}
    for each, (kind, attributes, hooks, _, forward, training) in _modules(traces(animal.model)):
        kind_before, attributes_before, hooks_before, _, forward_before, training_before = before[each]
        assert (kind, hooks, training) == (kind_before, hooks_before, training_before), each
        assert set(attributes) - set(attributes_before) <= ours, each
        assert (forward is forward_before) or isinstance(animal.model.get_submodule(each), nn.Linear), each
    assert {k: v for k, v in traces(animal.model).items() if "config" in k} == {
        k: v for k, v in before.items() if "config" in k
    }


def _modules(found: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in found.items() if not name.endswith(" config")]


ERRORS = [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit]
PLACES = ["block", "observer", "step", "start", "data"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_trace_stays_after_an_error(
    pipeline: str, place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    animal = zoo("llama")
    animal.model.train()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error("broken")

    layers = [*attention_layers(animal, queries=True), *watch(animal.model, only=in_blocks)]
    on_step = pipelines.silent
    if place == "block":
        animal.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(fail)
    elif place == "observer":
        look = layers_module._sample
        monkeypatch.setattr(layers_module, "_sample", lambda shown: (fail(), look(shown))[1])
    elif place == "step":
        on_step = fail
    elif place == "start":
        start = WatchedLayer.start
        monkeypatch.setattr(WatchedLayer, "start", lambda self: (start(self), fail())[1])
    else:
        animal.batches[1]["input_ids"] = "no ids"
    before = traces(animal.model)
    grad = torch.is_grad_enabled()
    with pytest.raises((error, Exception) if place == "data" else error):
        Calibration(animal.model, layers, animal.batches, animal.blocks, on_step).run(pipeline)
    assert torch.is_grad_enabled() == grad
    assert traces(animal.model) == before


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_nan_in_the_data_is_said_and_leaves_no_trace(pipeline: str) -> None:
    animal = zoo("llama")
    with torch.no_grad():
        animal.model.model.norm.weight[3] = torch.nan
    before = traces(animal.model)
    with pytest.raises(NonFiniteError, match=r"^lm_head\.input: .* NaN"):
        calibrate(animal, pipeline, only=lambda name: name == "lm_head")
    assert traces(animal.model) == before


@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_attention_states_are_calibrated(pipeline: str, queries: bool) -> None:
    animal = zoo("llama")
    implementation = animal.model.config._attn_implementation
    done = calibrate(animal, pipeline, layers=attention_layers(animal, queries=queries))
    assert len(done) == 2
    names = {name.rsplit(".", 1)[-1] for name in qparams(animal.model, "_scale")}
    assert names == ({"q_scale", "k_scale", "v_scale"} if queries else {"k_scale", "v_scale"})
    assert (animal.model.config._attn_implementation == implementation) != queries


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", ["llama", "t5", "llava"])
def test_the_cache_is_off_while_passes_run_and_on_again_afterwards(name: str, pipeline: str) -> None:
    animal, caches = zoo(name), []
    last = animal.blocks[-1]
    animal.model.get_submodule(last).register_forward_pre_hook(
        lambda module, args, keywords: caches.append(keywords.get("past_key_values")), with_kwargs=True
    )
    calibrate(animal, pipeline, only=lambda each: each.startswith(last))
    assert caches == [None] * len(caches) and caches
    with torch.no_grad():
        assert animal.model(**animal.batches[2]).past_key_values is not None


def test_dropout_is_off_while_passes_run() -> None:
    animal = zoo("llama")
    animal.model.config.attention_dropout = 0.5
    animal.model.train()
    training = []
    animal.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args: training.append(module.training)
    )
    calibrate(animal, "basic", only=in_blocks)
    assert training == [False] * 3 and animal.model.training
