"""Pipelines over a model whose weights are given up when they are done: the same values are seen, the same is found."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_pipelines import Forking, Wandering, attention_layers, forking, scheme_of, watch
from zoo import ANIMALS, Animal, zoo

from scalewright.calibration.experts import showing_all_tokens, unfuse_experts
from scalewright.calibration.gathering import gather_squares
from scalewright.calibration.pipelines import Calibration
from scalewright.calibration.scratch import Scratch, WaitingRoom
from scalewright.checkpoint.journal import Journal, journal_for
from scalewright.checkpoint.mapped import MappedFiles
from scalewright.checkpoint.shelf import Shelf
from scalewright.modifiers.figures import Sample
from scalewright.modifiers.layers import QuantizedLayer, WatchedLayer

SCHEME = scheme_of("W8A8", weights="imatrix_mse", inputs="static_minmax")
MADE = {
    **{name: (lambda name=name: zoo(name)) for name in ANIMALS},
    "forking": forking,
    "wandering": lambda: forking(Wandering),
}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """What the table says of weights takes time, and is tested elsewhere."""
    for name in ("above_optimum", "gain_over_minmax"):
        monkeypatch.setattr(Sample, name, lambda _: None)


def made(name: str) -> tuple[Animal, list[WatchedLayer]]:
    animal = MADE[name]()
    unfuse_experts(animal.model)
    is_seen = (lambda each: not each.startswith("blocks.3")) if isinstance(animal.model, Forking) else lambda each: True
    return animal, watch(animal.model, SCHEME, is_seen)


def run(
    animal: Animal, layers: list[WatchedLayer], pipeline: str, journal: Journal, **streaming: object
) -> list[QuantizedLayer]:
    with showing_all_tokens(animal.model, on=True):
        return Calibration(animal.model, layers, animal.batches, animal.blocks, journal=journal, **streaming).run(
            pipeline
        )


def streaming(animal: Animal, folder) -> dict[str, object]:
    scratch = Scratch(folder)
    return {"weights": Shelf(animal.model, MappedFiles(scratch)), "waiting_room": WaitingRoom(scratch, 0)}


def assert_same(found: list[QuantizedLayer], expected: list[QuantizedLayer]) -> None:
    assert [each.record() for each in found] == [each.record() for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.name == other.name and one.compressed.keys() == other.compressed.keys()
        for name in other.compressed:
            assert torch.equal(one.compressed[name], other.compressed[name]), f"{one.name}.{name}"


@pytest.mark.parametrize("pipeline", ["data_free", "basic", "sequential"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_given_up_was_not_needed(name, pipeline, tmp_path):
    if pipeline == "data_free":
        scheme = scheme_of("W8A16")
    animal, layers = made(name)
    plain, plain_layers = made(name)
    if pipeline == "data_free":
        layers, plain_layers = watch(animal.model, scheme), watch(plain.model, scheme)
    with journal_for(tmp_path / "a", {}, restart=False) as a, journal_for(tmp_path / "b", {}, restart=False) as b:
        found = run(animal, layers, pipeline, a, **streaming(animal, tmp_path))
        assert_same(found, run(plain, plain_layers, pipeline, b))
        assert a.entries.keys() == b.entries.keys()
    for layer in layers:
        assert layer.module.weight_scale.device.type == "meta"


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "forking"])
def test_whoever_multiplies_does_so_in_all_passes(name, pipeline, tmp_path, products_by_onednn):
    """Those that wait for each other, and those that do not."""
    test_what_is_given_up_was_not_needed(name, pipeline, tmp_path)
    assert products_by_onednn[0] > 20


def test_what_observers_have_seen_is_let_go_of_with_their_unit(tmp_path, monkeypatch):
    """Also where they are fused, and know each other; nothing is left for Python's search for cycles."""
    animal = zoo("llama")
    layers = watch(animal.model, scheme_of("NVFP4A16"), lambda name: "layers" in name)
    stop, seen = WatchedLayer.stop, []

    def note_and_stop(self: WatchedLayer) -> None:
        seen.append(weakref.ref(self.observers["weight"].min_vals))
        stop(self)

    monkeypatch.setattr(WatchedLayer, "stop", note_and_stop)
    gc.collect()
    gc.disable()
    try:
        with journal_for(tmp_path / "a", {}, restart=False) as journal:
            run(animal, layers, "data_free", journal, **streaming(animal, tmp_path))
        assert len(seen) == len(layers) and not any(each() is not None for each in seen)
    finally:
        gc.enable()


def test_attention_states_of_a_block_that_is_met_again(tmp_path):
    """What was finished too early is undone, hooks on attention modules too."""

    class Twice(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, input_ids, attention_mask):
            self.model(input_ids=input_ids, attention_mask=attention_mask)
            return self.model(input_ids=input_ids.flip(0), attention_mask=attention_mask.flip(0))

        def set_attn_implementation(self, name):
            self.model.set_attn_implementation(name)

    results = []
    for streams in (True, False):
        animal = zoo("llama")
        twice = Animal(Twice(animal.model), animal.batches, [f"model.{block}" for block in animal.blocks])
        layers = [*watch(twice.model, SCHEME, lambda name: "layers" in name), *attention_layers(twice, queries=False)]
        with journal_for(tmp_path / f"{streams}", {}, restart=False) as journal:
            results.append(run(twice, layers, "basic", journal, **(streaming(twice, tmp_path) if streams else {})))
            for each in results[-1]:
                each.compressed = dict(each.compressed)
    assert_same(*results)


@pytest.mark.parametrize("name", ["llama", "odd"])
def test_gathering_by_blocks_adds_up_the_same(name, tmp_path):
    animal, layers = made(name)
    modules = {layer.name: layer.module for layer in layers}
    found = gather_squares(animal.model, modules, animal.batches, blocks=animal.blocks, **streaming(animal, tmp_path))
    expected = gather_squares(animal.model, modules, animal.batches)
    assert found.keys() == expected.keys()
    for each, (sum_C, count) in expected.items():
        assert torch.equal(found[each][0], sum_C) and found[each][1] == count
