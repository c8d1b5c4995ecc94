"""What taps show: the right tensor, the mask of its tokens, and what is known of it. They leave no trace."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from compressed_tensors.modeling import initialize_hooked_attention
from torch import Tensor, nn
from zoo import Animal, assert_same, traces, zoo

from scalewright.calibration.experts import Expert, showing_all_tokens, unfuse_experts
from scalewright.calibration.taps import Masks, Tap, first_tensor, tapped
from scalewright.modifiers.shown import Gallery, Shown


def run_tapped(animal: Animal, taps: list[Tap]) -> list[Any]:
    masks = Masks(animal.model, animal.batches)
    outputs = []
    with torch.no_grad(), masks.following(), tapped(taps, masks):
        for i, batch in enumerate(animal.batches):
            masks.enter(i)
            outputs.append(animal.model(**batch))
    return outputs


def seen_at(animal: Animal, name: str, where: str = "input") -> list[Shown]:
    seen: list[Shown] = []
    run_tapped(animal, [Tap(animal.model.get_submodule(name), where, seen.append)])
    return seen


# ---- what is shown ---------------------------------------------------------------------------------------------------


class Strange(nn.Module):
    def forward(self, *args: Any, **keywords: Any) -> Any:
        return [({"x": torch.full((1, 2), 7.0)}, 3)]


X = torch.arange(6.0).reshape(1, 3, 2)


@pytest.mark.parametrize(
    ("args", "keywords"),
    [((X,), {}), ((), {"x": X}), (((X, None),), {}), (([X],), {}), ((X, torch.zeros(1)), {"y": torch.zeros(1)})],
)
def test_inputs_and_outputs_are_found_however_they_are_wrapped(args: Any, keywords: Any) -> None:
    module, seen = Strange(), []
    taps = [Tap(module, where, lambda shown, w=where: seen.append((w, shown.value))) for where in ("input", "output")]
    with tapped(taps, Masks(module, [{}])):
        module(*args, **keywords)
    assert [where for where, _ in seen] == ["input", "output"]
    assert seen[0][1] is X
    assert seen[1][1].tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize("value", [None, 3, "x", (), [], {}, (None, X), ((),)])
def test_where_no_tensor_comes_first_nothing_is_shown(value: Any) -> None:
    module, seen = Strange(), []
    with tapped([Tap(module, "input", seen.append)], Masks(module, [{}])):
        module(value)
    assert first_tensor(value) is None and not seen


def test_attention_states_are_shown() -> None:
    animal = zoo("llama")
    attention = animal.model.get_submodule("model.layers.1.self_attn")
    plain = animal.model(**animal.batches[0])
    initialize_hooked_attention(animal.model, attention)
    initialize_hooked_attention(animal.model, animal.model.get_submodule("model.layers.0.self_attn"))
    seen: dict[str, list[Shown]] = {"q": [], "k": [], "v": []}
    outputs = run_tapped(animal, [Tap(attention, where, seen[where].append) for where in seen])
    assert torch.equal(outputs[0].logits, plain.logits)
    assert [tuple(each.value.shape) for each in seen["q"]] == [(2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 7, 8)]
    assert [tuple(each.value.shape) for each in seen["v"]] == [(2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 7, 8)]
    for shown in seen.values():
        masks = [each.mask for each in shown]
        assert torch.equal(masks[0], animal.batches[0]["attention_mask"]) and masks[2] is None


def test_what_flows_is_not_changed_and_no_hook_stays() -> None:
    animal = zoo("llama")
    with torch.no_grad():
        expected = [animal.model(**batch) for batch in animal.batches]
    before = traces(animal.model)
    taps = [Tap(m, where, lambda shown: shown) for m in animal.model.modules() for where in ("input", "output")]
    for output, plain in zip(run_tapped(animal, taps), expected, strict=True):
        assert_same(output, plain)
    assert traces(animal.model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_no_hook_stays_when_one_who_looks_fails(error: type[BaseException]) -> None:
    animal = zoo("t5")
    before = traces(animal.model)

    def fail(shown: Shown) -> None:
        raise error

    modules = list(animal.model.modules())
    taps = [Tap(modules[3], "output", print), *(Tap(m, "input", fail) for m in modules)]
    with pytest.raises(error):
        run_tapped(animal, taps)
    assert traces(animal.model) == before


def test_no_hook_stays_when_one_cannot_be_set() -> None:
    animal = zoo("llama")
    before = traces(animal.model)
    attention = animal.model.get_submodule("model.layers.0.self_attn")  # without compressed-tensors' cache
    with pytest.raises(AttributeError):
        run_tapped(animal, [Tap(attention, "input", print), Tap(attention, "k", print)])
    assert traces(animal.model) == before


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_a_mask_that_leaves_nothing_out_is_none() -> None:
    animal = zoo("llama")
    masks = [each.mask for each in seen_at(animal, "model.layers.1.mlp.down_proj")]
    assert torch.equal(masks[0], animal.batches[0]["attention_mask"])
    assert torch.equal(masks[1], animal.batches[1]["attention_mask"])
    assert masks[2] is None


def test_tensors_of_other_tokens_have_no_mask() -> None:
    model = nn.Sequential(nn.Identity())
    masks = Masks(model, [{"attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}])
    shapes = {
        (2, 3, 4): (2, 3),
        (6, 4): (6,),
        (3, 2, 4): None,
        (5, 4): None,
        (2, 4): None,
        (1, 2, 3, 4): None,
        (6,): None,
    }
    for shape, expected in shapes.items():
        mask = masks.of(torch.zeros(shape), model, "input")
        assert (None if mask is None else tuple(mask.shape)) == expected, shape


@pytest.mark.parametrize("given", [None, "text", torch.ones(2, 1, 3, 3), [[1, 0, 0], [1, 1, 1]]])
def test_what_is_no_mask_of_tokens_is_left_alone(given: Any) -> None:
    model = nn.Identity()
    masks = Masks(model, [{"attention_mask": given}, {}])
    for batch in (0, 1):
        masks.enter(batch)
        assert masks.of(torch.zeros(2, 3, 4), model, "input") is None


@pytest.mark.parametrize("shows_all", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_see_tokens_in_a_row_and_their_masks(name: str, shows_all: bool) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    experts = animal.model.get_submodule("model.layers.0.mlp.experts")
    inputs: list[Tensor] = []
    router = animal.model.get_submodule("model.layers.0.mlp.gate")
    chosen: list[Tensor] = []
    router.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
    experts.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    seen: list[list[Shown]] = [[] for _ in experts]
    layers = [list(expert.children()) for expert in experts]
    taps = [Tap(layer, "input", seen[i].append) for i, each in enumerate(layers) for layer in each]
    with showing_all_tokens(animal.model, on=shows_all):
        run_tapped(animal, taps)
    for i in range(len(experts)):
        shown = iter(seen[i])
        for batch, x, index in zip(animal.batches, inputs, chosen, strict=True):
            counts = batch["attention_mask"].reshape(-1).bool()
            rows = torch.arange(len(x)) if shows_all else (index == i).any(dim=-1).nonzero()[:, 0]
            for part in range(3 if len(rows) else 0):
                each = next(shown)
                assert len(each.value) == len(rows)
                assert (each.mask is None) == bool(counts.all())
                if each.mask is not None:
                    assert torch.equal(each.mask.bool(), counts[rows])
                if part < 2:
                    assert torch.equal(each.value, x[rows])
        assert next(shown, None) is None
    assert all(expert.tokens is None for expert in experts.modules() if isinstance(expert, Expert))


def test_encoder_and_decoder_have_masks_of_their_own_also_where_they_have_one_shape() -> None:
    animal = zoo("t5")
    assert animal.batches[1]["input_ids"].shape == animal.batches[1]["decoder_input_ids"].shape
    assert not torch.equal(animal.batches[1]["attention_mask"], animal.batches[1]["decoder_attention_mask"])
    places = {
        "encoder.block.1.layer.0.SelfAttention.q": "attention_mask",
        "encoder.block.0.layer.1.DenseReluDense.wo": "attention_mask",
        "decoder.block.0.layer.0.SelfAttention.q": "decoder_attention_mask",
        "decoder.block.0.layer.1.EncDecAttention.q": "decoder_attention_mask",
        "decoder.block.1.layer.1.EncDecAttention.k": "attention_mask",
        "decoder.block.0.layer.1.EncDecAttention.v": "attention_mask",
        "decoder.block.1.layer.2.DenseReluDense.wi": "decoder_attention_mask",
        "lm_head": "decoder_attention_mask",
    }
    for name, which in places.items():
        for shown, batch in zip(seen_at(animal, name), animal.batches, strict=True):
            expected = batch[which]
            assert (shown.mask is None) == bool(expected.all()), name
            assert shown.mask is None or torch.equal(shown.mask, expected), name


def test_what_the_encoder_gave_is_not_kept() -> None:
    animal = zoo("t5")
    masks, given = Masks(animal.model, animal.batches), []
    animal.model.encoder.register_forward_hook(lambda module, args, output: given.append(weakref.ref(output[0])))
    with torch.no_grad(), masks.following():
        animal.model(**animal.batches[0])
        gc.collect()
        assert given[0]() is None


def test_in_a_decoder_tokens_of_another_number_are_the_encoders() -> None:
    animal = zoo("t5")
    masks = Masks(animal.model, animal.batches)
    decoder = animal.model.get_submodule("decoder.block.0.layer.1.EncDecAttention")
    source, target = (animal.batches[0][f"{each}attention_mask"] for each in ("", "decoder_"))
    assert source.shape != target.shape
    for where, shape in (("input", (*source.shape, 7)), ("k", (2, 4, source.shape[1], 8))):
        assert torch.equal(masks.of(torch.ones(shape), decoder, where), source)
    assert torch.equal(masks.of(torch.ones(*target.shape, 7), decoder, "input"), target)


def test_a_decoder_without_a_mask_does_not_take_the_encoders() -> None:
    animal = zoo("t5")
    for batch in animal.batches:
        del batch["decoder_attention_mask"]
    assert all(each.mask is None for each in seen_at(animal, "decoder.block.0.layer.0.SelfAttention.q"))
    assert seen_at(animal, "decoder.block.0.layer.1.EncDecAttention.k")[1].mask is not None


def test_patches_of_an_image_are_no_tokens_whatever_their_number() -> None:
    animal = zoo("llava")
    shown = seen_at(animal, "model.vision_tower.encoder.layers.0.mlp.fc1")
    (_, patches, _) = shown[0].value.shape
    animal.batches[0]["attention_mask"] = torch.tensor([[1] * (patches - 1) + [0]])
    masks = Masks(animal.model, animal.batches)
    inside, outside = (
        animal.model.get_submodule(f"model.{each}") for each in ("vision_tower.encoder", "language_model")
    )
    assert masks.of(shown[0].value, inside, "input") is None
    assert masks.of(shown[0].value, outside, "input") is not None
    text = seen_at(zoo("llava"), "model.language_model.layers.0.mlp.up_proj")
    assert torch.equal(text[0].mask, zoo("llava").batches[0]["attention_mask"])


# ---- what is known of a tensor ---------------------------------------------------------------------------------------


def test_what_was_computed_from_a_tensor_is_computed_once() -> None:
    gallery, x, asked = Gallery(), torch.ones(2, 3), []

    def compute() -> int:
        asked.append(1)
        return len(asked)

    mask = torch.ones(2)
    assert [gallery.show(x, lambda: mask).once("a", compute) for _ in range(3)] == [1, 1, 1]
    assert gallery.show(x, lambda: None).mask is mask
    assert gallery.show(x, lambda: mask).once("b", compute) == 2
    assert (
        gallery.show(x.view(2, 3), lambda: None).once("a", compute) == 3
    )  # another tensor, though of the same numbers


def test_a_tensor_that_was_changed_is_a_new_one() -> None:
    gallery, x = Gallery(), torch.ones(2, 3)
    assert gallery.show(x, lambda: None).once("sum", lambda: float(x.sum())) == 6
    x[0].mul_(2)
    assert gallery.show(x, lambda: None).once("sum", lambda: float(x.sum())) == 9


def test_tensors_of_inference_mode_are_never_trusted() -> None:
    gallery = Gallery()
    with torch.inference_mode():
        x = torch.ones(2)
        assert gallery.show(x, lambda: None).once("sum", lambda: float(x.sum())) == 2
        x.mul_(2)
        assert gallery.show(x, lambda: None).once("sum", lambda: float(x.sum())) == 4


def test_a_tensor_is_forgotten_when_it_is_gone() -> None:
    gallery = Gallery()
    for i in range(20):  # new tensors take the places of old ones
        x = torch.full((3,), float(i))
        assert gallery.show(x, lambda: None).once("first", lambda x=x: float(x[0])) == i
        del x
    gc.collect()
    assert len(gallery._known) == 0


def test_layers_that_share_an_input_are_shown_one_tensor() -> None:
    animal = zoo("llama")
    computed: dict[str, int] = {}
    layers = {name: m for name, m in animal.model.named_modules() if isinstance(m, nn.Linear) and "layers" in name}

    def count(name: str) -> int:
        computed[name] = computed.get(name, 0) + 1
        return 1

    taps = [Tap(m, "input", lambda shown, n=n: shown.once("x", lambda: count(n))) for n, m in layers.items()]
    run_tapped(animal, taps)
    # q, o, gate and down are the first to see a tensor; k, v and up come to what they have left.
    assert computed == {
        name: 3 for name in layers if name.rsplit(".", 1)[-1] in ("q_proj", "o_proj", "gate_proj", "down_proj")
    }
