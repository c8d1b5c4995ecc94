"""Importance that is gathered first: what is summed, who uses it, what is then not needed, what stays behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Animal, Counter, padded, traces, without_padding, zoo

from scalewright import IMatrixGatherer, QuantizationModifier, oneshot
from scalewright.calibration import gathering
from scalewright.calibration.experts import showing_all_tokens, unfuse_experts
from scalewright.calibration.gathering import Gathering, Importance, check_fits, gather_squares, layers_meant
from scalewright.calibration.pipelines import Calibration
from scalewright.errors import DataError, ImportanceError, NonFiniteError, RecipeError, ScalewrightError, StrictError
from scalewright.importance import gather_importance, save_importance
from scalewright.modifiers import GPTQModifier
from scalewright.modifiers.figures import Sample
from scalewright.observers.importance import ImportanceObserver
from scalewright.oneshot import Result
from scalewright.planning import plan_of

HEAD = ["lm_head"]
Q_PROJ = "model.layers.0.self_attn.q_proj"
UP_PROJ = "model.layers.1.mlp.up_proj"


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of weights takes time, and is tested elsewhere."""
    for name in ("above_optimum", "gain_over_minmax"):
        monkeypatch.setattr(Sample, name, lambda _: None)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor | None]:
    """The importance that the errors of each layer's weight are weighed by."""
    found: dict[str, Tensor | None] = {}
    importance_for = ImportanceObserver.importance_for

    def spy(self: ImportanceObserver, observed: Tensor) -> Tensor | None:
        found[self.label.removesuffix(".weight")] = self.channel_importance
        return importance_for(self, observed)

    monkeypatch.setattr(ImportanceObserver, "importance_for", spy)
    return found


def quantising(observer: str = "imatrix_mse", **given: Any) -> QuantizationModifier:
    return QuantizationModifier(
        **{"scheme": "W4A16", "group_size": 16, "weight_observer": observer, "ignore": HEAD, **given}
    )


def static(**given: Any) -> QuantizationModifier:
    """Weights that want importance, and inputs that want to be seen all the same."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16, "observer": "imatrix_mse"}
    inputs = {"num_bits": 8, "strategy": "tensor", "observer": "static_minmax"}
    return QuantizationModifier(**{"weights": weights, "input_activations": inputs, "ignore": HEAD, **given})


def linear_layers(model: nn.Module, only: Callable[[str], bool] = lambda name: name != "lm_head") -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and only(name)}


def gathered_from(animal: Animal, **given: Any) -> Importance:
    return gather_importance(animal.model, animal.batches, **given)


def stored(result: Result) -> dict[str, Tensor]:
    return {f"{layer.name}.{name}": each for layer in result.layers for name, each in layer.compressed.items()}


def assert_same_checkpoint(result: Result, expected: Result) -> None:
    found, wanted = stored(result), stored(expected)
    assert found.keys() == wanted.keys() and found
    for name, each in found.items():
        assert torch.equal(each, wanted[name]), name


def left_behind(model: nn.Module) -> list[str]:
    return [
        f"{name}.{each}"
        for name, module in model.named_modules()
        for each in vars(module)
        if each.startswith("_imatrix")
    ]


def refused(kind: type[ScalewrightError], recipe: Any, **given: Any) -> str:
    animal = given.pop("animal", None) or zoo("llama")
    with pytest.raises(kind) as caught:
        oneshot(animal.model, recipe=recipe, **given)
    assert type(caught.value) is kind
    assert left_behind(animal.model) == []
    return str(caught.value)


# ---- what is summed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_squares_of_all_tokens_that_count_are_summed(name: str) -> None:
    animal, plain = zoo(name), zoo(name).model
    modules = linear_layers(animal.model, lambda name: True)
    found = gather_squares(animal.model, modules, animal.batches)
    inputs: dict[str, list[Tensor]] = {each: [] for each in modules}
    mask = torch.ones(0)

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: inputs[name].append(args[0][mask.bool()])

    for each in modules:
        plain.get_submodule(each).register_forward_pre_hook(keep(each))
    with torch.no_grad():
        for batch in animal.batches:
            mask = batch["attention_mask"]
            plain(**batch)
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in animal.batches)
    assert found.keys() == modules.keys()
    for each, (sum_C, count) in found.items():
        assert count == num_tokens and sum_C.dtype == torch.float32
        torch.testing.assert_close(sum_C, torch.cat(inputs[each]).square().sum(dim=0), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "shows_all"), [("llama", True), ("gemma3", True), ("t5", True), ("mixtral", True), ("mixtral", False)]
)
def test_padding_is_not_summed(name: str, shows_all: bool) -> None:
    found = []
    for is_padded in (True, False):
        animal = zoo(name)
        unfuse_experts(animal.model)
        with torch.no_grad():
            animal.model.get_input_embeddings().weight[0, 5] = 40.0
        batches = animal.batches if is_padded else without_padding(animal.batches)
        with showing_all_tokens(animal.model, on=shows_all):
            found.append(gather_squares(animal.model, linear_layers(animal.model), batches))
    one, other = found
    assert {name: count for name, (_, count) in one.items()} == {name: count for name, (_, count) in other.items()}
    for each, (sum_C, _) in one.items():
        torch.testing.assert_close(sum_C, other[each][0], rtol=1e-4, atol=1e-7, msg=each)


def test_a_layer_that_is_called_twice_counts_both() -> None:
    animal = zoo("odd")
    modules = linear_layers(animal.model, lambda name: name.startswith("blocks."))
    found = gather_squares(animal.model, modules, animal.batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in animal.batches)
    assert not any("lm_head" in note for note in gathered_from(animal).notes), "none is asked for"
    counts = {name: count for name, (_, count) in found.items()}
    assert counts["blocks.0.first"] == counts["blocks.2.second"] == tokens
    assert counts["blocks.1.first"] == counts["blocks.1.second"] == 2 * tokens


def test_all_experts_have_importance_under_the_names_that_quantising_gives_them(used: dict[str, Tensor | None]) -> None:
    found = gathered_from(zoo("mixtral"))
    animal = zoo("mixtral")
    result = oneshot(animal.model, recipe=quantising(ignore=["lm_head", "*.gate"]), dataset=animal.batches)
    experts = [layer.name for layer in result.layers if ".experts." in layer.name]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        assert torch.equal(found[name], used[name]), name


def test_dropout_and_the_cache_are_off() -> None:
    found, caches = [], []
    for is_training in (True, False):
        animal = zoo("llama")
        animal.model.train(is_training)
        for block in animal.model.model.layers:
            block.self_attn.attention_dropout = 0.9
        animal.model.model.layers[0].register_forward_pre_hook(
            lambda module, args, keywords: caches.append(keywords.get("past_key_values")), with_kwargs=True
        )
        torch.manual_seed(0)
        found.append(gather_squares(animal.model, linear_layers(animal.model), animal.batches))
    for name, (sum_C, _) in found[0].items():
        assert torch.equal(sum_C, found[1][name][0]), name
    assert caches == [None] * 6


# ---- how much is computed --------------------------------------------------------------------------------------------


def test_inputs_that_several_layers_share_are_squared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sum_squares = gathering.sum_squares
    monkeypatch.setattr(gathering, "sum_squares", lambda x, **given: calls.append(x) or sum_squares(x, **given))
    animal = zoo("llama")
    gather_squares(animal.model, linear_layers(animal.model), animal.batches)
    assert len(calls) == 3 * 2 * 4  # q/k/v, o, gate/up, down, instead of seven


def test_passes_end_at_the_last_input_that_is_needed() -> None:
    animal = zoo("llama")
    last = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    counter = Counter(animal.model, *last, "model.layers.1", "lm_head")
    gather_squares(animal.model, linear_layers(animal.model, lambda name: "layers.0." in name), animal.batches)
    assert counter.calls == {last[0]: 3, last[1]: 1, "model.layers.1": 1, "lm_head": 0}


def test_one_pass_is_all_that_weights_need() -> None:
    animal = zoo("llama")
    counter = Counter(animal.model, "model.layers.0")
    result = oneshot(animal.model, recipe=[IMatrixGatherer(ignore=HEAD), quantising()], dataset=animal.batches)
    assert counter.calls == {"model.layers.0": 3}
    assert (result.pipeline, result.why) == ("data_free", "all importance that it uses was gathered before")
    assert result.num_samples == 6 and list(result.seconds) == ["load", "data", "gather", "calibrate"]
    assert [note for note in result.notes if "importance" in note] == []


def test_what_nobody_uses_is_not_gathered() -> None:
    animal = zoo("llama")
    counter = Counter(animal.model, "model.embed_tokens")
    result = oneshot(animal.model, recipe=[IMatrixGatherer(), quantising("memoryless_minmax")], dataset=animal.batches)
    assert counter.calls == {"model.embed_tokens": 0} and result.num_samples == 0


def test_steps_tell_of_the_pass() -> None:
    animal = zoo("llama")
    steps: list[tuple[Any, ...]] = []
    recipe = [IMatrixGatherer(ignore=HEAD), quantising()]
    oneshot(animal.model, recipe=recipe, dataset=animal.batches, on_step=lambda *step: steps.append(step))
    phases = list(dict.fromkeys(step[0] for step in steps))
    assert phases == ["loading", "gathering", "quantising"]
    tokens = [int(batch["attention_mask"].sum()) for batch in animal.batches]
    shown = [step[1:] for step in steps if step[0] == "gathering"]
    assert shown[0] == ("batch 1 of 3", 0, sum(tokens)) and shown[-1] == ("batch 3 of 3", sum(tokens), sum(tokens))


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ["imatrix_mse", "optimal"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_gathering_and_quantising_is_the_same_as_doing_both_at_once(name: str, observer: str) -> None:
    ignore = ["lm_head", "*.gate"] if name == "mixtral" else HEAD
    at_once, in_two = zoo(name), zoo(name)
    expected = oneshot(at_once.model, recipe=quantising(observer, ignore=ignore), dataset=at_once.batches)
    gatherer = IMatrixGatherer(ignore=ignore)
    result = oneshot(in_two.model, recipe=[gatherer, quantising(observer, ignore=ignore)], dataset=in_two.batches)
    assert expected.pipeline == "basic" and result.pipeline == "data_free"
    assert_same_checkpoint(result, expected)
    plain = zoo(name)
    without = oneshot(plain.model, recipe=quantising("memoryless_mse", ignore=ignore))
    assert any(not torch.equal(each, stored(without)[name]) for name, each in stored(result).items())


RECIPES = {
    "one stage": {"modifiers": {"IMatrixGatherer": {"ignore": HEAD}, "QuantizationModifier": quantising().given}},
    "the other way round": {
        "modifiers": {"QuantizationModifier": quantising().given, "IMatrixGatherer": {"ignore": HEAD}}
    },
    "classes alone": {"IMatrixGatherer": {"ignore": HEAD}, "QuantizationModifier": quantising().given},
    "a list": [{"IMatrixGatherer": {"ignore": HEAD}}, {"QuantizationModifier": quantising().given}],
    "two stages": {
        "first_stage": {"first_modifiers": {"IMatrixGatherer": {"ignore": HEAD}}},
        "second_stage": {"second_modifiers": {"QuantizationModifier": quantising().given}},
    },
    "classes in stages": {
        "first_stage": {"IMatrixGatherer": {"ignore": HEAD}},
        "second_stage": {"QuantizationModifier": quantising().given},
    },
    "two gatherers": [
        IMatrixGatherer(targets=["re:.*mlp.*"]),
        IMatrixGatherer(targets=["re:.*self_attn\\..*"]),
        quantising(),
    ],
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_stands_in_the_same_stage_or_in_an_earlier_one(recipe: Any) -> None:
    at_once, in_two = zoo("llama"), zoo("llama")
    expected = oneshot(at_once.model, recipe=quantising(), dataset=at_once.batches)
    result = oneshot(in_two.model, recipe=recipe, dataset=in_two.batches)
    assert result.pipeline == "data_free" and [note for note in result.notes if "importance" in note] == []
    assert_same_checkpoint(result, expected)


@pytest.mark.parametrize("targets", [["*.q_proj"], ["re:.*mlp.*"]])
def test_what_was_not_gathered_is_collected_as_ever(targets: list[str]) -> None:
    at_once, in_two = zoo("llama"), zoo("llama")
    expected = oneshot(at_once.model, recipe=quantising(), dataset=at_once.batches)
    recipe = [IMatrixGatherer(targets=targets), quantising()]
    result = oneshot(in_two.model, recipe=recipe, dataset=in_two.batches)
    assert result.pipeline == "basic"
    assert_same_checkpoint(result, expected)


def test_later_stages_use_what_was_gathered_before_the_first(used: dict[str, Tensor | None]) -> None:
    expected = gathered_from(zoo("llama"))
    stages = {
        "a_stage": {"modifiers": [IMatrixGatherer(ignore=HEAD), quantising(targets=["*.q_proj"])]},
        "b_stage": {"modifiers": [quantising(ignore=["lm_head", "*.q_proj"])]},
    }
    animal = zoo("llama")
    counter = Counter(animal.model, "model.layers.0")
    result = oneshot(animal.model, recipe=stages, dataset=animal.batches)
    assert counter.calls == {"model.layers.0": 3} and result.pipeline == "data_free"
    assert used.keys() == expected.sums.keys()
    for name, each in used.items():
        assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_pipeline_that_is_asked_for_is_run(pipeline: str, used: dict[str, Tensor | None]) -> None:
    expected, animal = gathered_from(zoo("llama")), zoo("llama")
    recipe = [IMatrixGatherer(ignore=HEAD), quantising()]
    result = oneshot(animal.model, recipe=recipe, dataset=animal.batches, pipeline=pipeline)
    assert (result.pipeline, result.why) == (pipeline, "asked for")
    assert all(torch.equal(each, expected[name]) for name, each in used.items())


def test_an_embedding_wants_no_importance() -> None:
    animal = zoo("llama")
    embedded = quantising(scheme="W8A16", targets=["Linear", "Embedding"])
    result = oneshot(animal.model, recipe=[IMatrixGatherer(ignore=HEAD), embedded], dataset=animal.batches)
    assert result.pipeline == "data_free" and "model.embed_tokens" in {layer.name for layer in result.layers}


def test_batches_are_those_of_quantising(used: dict[str, Tensor | None]) -> None:
    ids = torch.randint(3, 63, (90, 30), generator=torch.Generator().manual_seed(2)).tolist()
    found = gather_importance(zoo("llama").model, ids)
    oneshot(zoo("llama").model, recipe=quantising(), dataset=ids)
    assert used.keys() == found.sums.keys()
    for name, each in used.items():
        assert torch.equal(each, found[name]), name


@pytest.mark.parametrize("pipeline", ["auto", "basic", "sequential"])
def test_inputs_that_are_seen_later_add_nothing(pipeline: str, used: dict[str, Tensor | None], tmp_path: Any) -> None:
    """With other data in the second pass: the same data twice would be the same on average."""
    importance = gathered_from(zoo("llama"))
    save_importance(importance, tmp_path / "importance.safetensors")
    animal = zoo("llama")
    others = [padded((11, 4), 20), padded((6, 6), 21)]
    recipe = [IMatrixGatherer(file=tmp_path / "importance.safetensors"), static()]
    result = oneshot(animal.model, recipe=recipe, dataset=others, pipeline=pipeline)
    assert result.pipeline == ("basic" if pipeline == "auto" else pipeline)
    assert used.keys() == importance.sums.keys()
    for name, each in used.items():
        assert torch.equal(each, importance[name]), name


def test_gptq_takes_its_scales_from_what_was_gathered(used: dict[str, Tensor | None], tmp_path: Any) -> None:
    importance = gathered_from(zoo("llama"))
    save_importance(importance, tmp_path / "importance.safetensors")
    animal = zoo("llama")
    others = [padded((21, 14), 20), padded((16, 16), 21)]
    rounding = GPTQModifier(scheme="W4A16", group_size=16, weight_observer="imatrix_mse", ignore=HEAD)
    recipe = [IMatrixGatherer(file=tmp_path / "importance.safetensors"), rounding]
    result = oneshot(animal.model, recipe=recipe, dataset=others)
    assert result.pipeline == "sequential" and used.keys() == importance.sums.keys()
    for name, each in used.items():
        assert torch.equal(each, importance[name]), name


# ---- what stays behind -----------------------------------------------------------------------------------------------


def test_the_pass_leaves_no_trace() -> None:
    animal = zoo("llama")
    animal.model.train()
    before = traces(animal.model)
    gather_squares(animal.model, linear_layers(animal.model), animal.batches)
    assert traces(animal.model) == before


def test_a_pass_that_fails_leaves_no_trace() -> None:
    animal = zoo("llama")
    with torch.no_grad():
        animal.model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    before = traces(animal.model)
    with pytest.raises(NonFiniteError) as caught:
        gather_squares(animal.model, linear_layers(animal.model), animal.batches)
    assert str(caught.value) == (
        "model.layers.1.mlp.down_proj: the module's input has NaN or Inf in it, or numbers too large to be squared in "
        "fp32, so it has no importance. Mend the data."
    )
    assert traces(animal.model) == before


def test_importance_stands_on_modules_until_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    animal = zoo("llama")
    seen: list[list[str]] = []
    run = Calibration.run
    monkeypatch.setattr(Calibration, "run", lambda self, name: seen.append(left_behind(self.model)) or run(self, name))
    oneshot(animal.model, recipe=[IMatrixGatherer(targets=["*.q_proj"]), quantising()], dataset=animal.batches)
    assert seen == [
        [f"model.layers.{i}.self_attn.q_proj._imatrix_{each}" for i in range(2) for each in ("sum", "count")]
    ]
    assert left_behind(animal.model) == []


def test_nothing_stays_behind_when_quantising_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr(Calibration, "run", fail)
    animal = zoo("llama")
    before = traces(animal.model)
    with pytest.raises(RuntimeError, match="stopped"):
        oneshot(animal.model, recipe=[IMatrixGatherer(ignore=HEAD), quantising()], dataset=animal.batches)
    assert traces(animal.model) == before


def test_old_importance_on_a_module_gives_way(used: dict[str, Tensor | None]) -> None:
    expected = gathered_from(zoo("llama"))
    animal = zoo("llama")
    layer = animal.model.get_submodule(Q_PROJ)
    layer._imatrix_sum, layer._imatrix_count = torch.ones(32), torch.tensor(1)
    oneshot(animal.model, recipe=[IMatrixGatherer(ignore=HEAD), quantising()], dataset=animal.batches)
    assert torch.equal(used[Q_PROJ], expected[Q_PROJ])


def test_old_importance_is_gone_where_nothing_was_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0]._imatrix_sum, model[0]._imatrix_count = torch.ones(3), torch.tensor(1)
    with Gathering(given={"0": (model[0], torch.zeros(3), 0)}).standing(model, []) as notes:
        assert left_behind(model) == []
    assert notes == ["0: no token was seen while importance was gathered. Add samples."]


# ---- what is said ----------------------------------------------------------------------------------------------------

UNUSED = (
    "no observer of the recipe uses importance here, so it is not gathered. Ignore it, or name an observer such as "
    "imatrix_mse."
)


def notes_of(*recipe: Any, dataset: Any = "own", name: str = "llama", **given: Any) -> list[str]:
    animal = zoo(name)
    dataset = animal.batches if dataset == "own" else dataset
    result = oneshot(animal.model, recipe=list(recipe), dataset=dataset, **given)
    assert left_behind(animal.model) == []
    return [note for note in result.notes if "batches" not in note and "samples were" not in note]


def few_tokens(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if "tokens are little" not in note]


def test_layers_that_nobody_uses_are_named() -> None:
    some = quantising(targets=["re:.*layers.0.*"], ignore=[])
    notes = few_tokens(notes_of(IMatrixGatherer(ignore=HEAD), some))
    assert notes == [f"model.layers.1.self_attn.q_proj and 6 more: {UNUSED}"]
    all_but_one = quantising(ignore=["lm_head", UP_PROJ])
    assert few_tokens(notes_of(IMatrixGatherer(ignore=HEAD), all_but_one)) == [f"{UP_PROJ}: {UNUSED}"]
    message = refused(StrictError, [IMatrixGatherer(ignore=HEAD), some], dataset=zoo("llama").batches, strict=True)
    assert message == notes[0]


@pytest.mark.parametrize("observer", ["memoryless_minmax", {"name": "optimal", "importance": "off"}])
def test_observers_that_do_not_ask_are_not_served(observer: Any) -> None:
    gathering, on_data = few_tokens(notes_of(IMatrixGatherer(ignore=HEAD), quantising(observer)))
    assert gathering == f"{Q_PROJ} and 13 more: {UNUSED}"
    assert on_data.startswith("data: nothing is calibrated with it (data_free: weights are all there is to see).")


def test_a_head_that_is_left_alone_goes_without_saying() -> None:
    assert few_tokens(notes_of(IMatrixGatherer(), quantising())) == []
    assert few_tokens(notes_of(IMatrixGatherer(ignore=[]), quantising())) == [f"lm_head: {UNUSED}"]


def test_a_head_that_is_quantised_is_gathered(used: dict[str, Tensor | None]) -> None:
    assert few_tokens(notes_of(IMatrixGatherer(), quantising(ignore=[]))) == []
    expected = gathered_from(zoo("llama"), ignore=[])
    assert used.keys() == expected.sums.keys() and "lm_head" in used
    for name, each in used.items():
        assert torch.equal(each, expected[name]), name


def test_names_that_match_nothing_and_embeddings_are_named() -> None:
    gatherer = IMatrixGatherer(targets=["Linear", "Embedding", "third"], ignore=["lm_heads"])
    assert few_tokens(notes_of(gatherer, quantising())) == [
        "targets: 'third' matches no module.",
        "ignore: 'lm_heads' matches no module. Did you mean 'lm_head'?",
        "model.embed_tokens: what goes into an embedding are token ids, which have no importance.",
        f"lm_head: {UNUSED}",
    ]


def test_a_gatherer_that_comes_too_late_is_named() -> None:
    stages = {"a_stage": {"modifiers": [quantising()]}, "b_stage": {"modifiers": [IMatrixGatherer(ignore=HEAD)]}}
    animal = zoo("llama")
    result = oneshot(animal.model, recipe=stages, dataset=animal.batches)
    assert result.pipeline == "basic"
    assert (
        "IMatrixGatherer: nothing that comes after it uses what it gathers, so it is not run. Put it before the "
        "modifier that does."
    ) in result.notes


def test_experts_that_saw_no_token_are_named() -> None:
    one_token, many = ([{"input_ids": torch.full((rows, 1), 5)}] for rows in (1, 2048))
    ignore = ["lm_head", "*.gate"]
    recipe = [IMatrixGatherer(ignore=ignore), quantising("optimal", ignore=ignore)]
    animal = zoo("mixtral")
    result = oneshot(animal.model, recipe=recipe, dataset=one_token, moe_calibrate_all_experts=False)
    unseen = [note for note in result.notes if "no token was seen" in note]
    assert unseen[0].endswith(" and 11 more: no token was seen while importance was gathered. Add samples.")
    found = gather_importance(zoo("mixtral").model, one_token, ignore=ignore, moe_calibrate_all_experts=False)
    assert sorted(found.counts.values()) == [0] * 12 + [1] * 20  # two of four experts, in two layers
    assert unseen[0] in found.notes
    with pytest.raises(StrictError) as caught:
        gather_importance(
            zoo("mixtral").model,
            many,
            num_calibration_samples=2048,
            ignore=ignore,
            moe_calibrate_all_experts=False,
            strict=True,
        )
    assert str(caught.value) == unseen[0]


def test_data_is_needed_for_what_is_used() -> None:
    words = "IMatrixGatherer runs data through the model"
    assert refused(DataError, [IMatrixGatherer(), quantising()]) == (
        f"{words}. Give a dataset, or a file with importance."
    )
    given = {"dataset": zoo("llama").batches, "pipeline": "data_free"}
    assert refused(DataError, [IMatrixGatherer(), quantising()], **given) == (
        f"{words}, so the recipe cannot be run data_free. Give it a file with importance."
    )


def test_a_recipe_that_only_gathers_is_refused() -> None:
    assert refused(RecipeError, IMatrixGatherer(), dataset=zoo("llama").batches) == (
        "the recipe gathers importance, and there is nothing in it that uses it. Add a QuantizationModifier; to keep "
        "importance in a file, use `scalewright importance`."
    )


def test_two_gatherers_that_mean_one_layer_are_refused() -> None:
    recipe = [IMatrixGatherer(ignore=HEAD), IMatrixGatherer(targets=["*.up_proj"]), quantising()]
    message = refused(RecipeError, recipe, dataset=zoo("llama").batches)
    assert message == "model.layers.0.mlp.up_proj: two gatherers mean it. Use ignore, or narrower targets."


def test_a_plan_tells_of_it() -> None:
    recipe = [IMatrixGatherer(ignore=HEAD), quantising()]
    plan = plan_of(zoo("llama").model, recipe)
    assert (plan.pipeline, plan.why) == ("data_free", "all importance that it uses was gathered before")
    assert plan.notes == []
    alone = plan_of(zoo("llama").model, quantising("memoryless_minmax"))
    assert plan.shared_seconds > 2 * alone.shared_seconds, "a pass takes time"
    late = [{"modifiers": [quantising("memoryless_minmax")]}, IMatrixGatherer(ignore=HEAD)]
    assert "IMatrixGatherer: nothing that comes after it" in plan_of(zoo("llama").model, late).notes[0]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_file_serves_instead_of_data(name: str, tmp_path: Any) -> None:
    ignore = ["lm_head", "*.gate"] if name == "mixtral" else HEAD
    file = save_importance(gathered_from(zoo(name), ignore=ignore), tmp_path / "importance.safetensors")
    at_once, from_file = zoo(name), zoo(name)
    expected = oneshot(at_once.model, recipe=quantising(ignore=ignore), dataset=at_once.batches)
    result = oneshot(from_file.model, recipe=[IMatrixGatherer(file=file), quantising(ignore=ignore)])
    assert (result.pipeline, result.why) == ("data_free", "all importance that it uses was gathered before")
    assert result.notes == [] and result.num_tokens == 0
    assert_same_checkpoint(result, expected)


def test_experts_that_stay_fused_may_be_in_the_file(tmp_path: Any) -> None:
    file = save_importance(gathered_from(zoo("mixtral")), tmp_path / "importance.safetensors")
    attention = quantising(targets=["re:.*self_attn\\..*"], ignore=[])
    result = oneshot(zoo("mixtral").model, recipe=[IMatrixGatherer(file=file), attention])
    assert len(result.layers) == 8 and result.pipeline == "data_free"


@pytest.mark.parametrize("has_data", [True, False])
def test_layers_that_a_file_does_not_have_are_named(has_data: bool, tmp_path: Any) -> None:
    animal = zoo("llama")
    some = gathered_from(animal, ignore=["lm_head", "*.up_proj", "*.o_proj"])
    file = save_importance(some, tmp_path / "some.safetensors")
    dataset = animal.batches if has_data else None
    notes = few_tokens(notes_of(IMatrixGatherer(file=file), quantising(), dataset=dataset))
    what = "its importance comes from the data" if has_data else "all errors weigh the same"
    assert (
        notes[0] == f"model.layers.0.self_attn.o_proj and 3 more: some.safetensors has no importance of it, so {what}."
    )
    # Where nothing is collected, the observers say so themselves.
    fallback = ".weight and 3 more: no importance was collected, so all errors weigh the same."
    assert [note.endswith(fallback) for note in notes[1:]] == ([] if has_data else [True])
    if has_data:
        other = notes_of(IMatrixGatherer(file=file), quantising(), dataset=dataset, pipeline="data_free")
        assert other[0].endswith(", so all errors weigh the same.")


@pytest.mark.parametrize("observer", ["imatrix_mse", "optimal"])
def test_importance_of_a_file_that_says_nothing_is_named(observer: str, tmp_path: Any) -> None:
    found = gathered_from(zoo("llama"))
    zero = Importance({**found.sums, UP_PROJ: torch.zeros_like(found.sums[UP_PROJ])}, found.counts)
    file = save_importance(zero, tmp_path / "importance.safetensors")
    assert notes_of(IMatrixGatherer(file=file, ignore=HEAD), quantising(observer), dataset=None) == [
        f"{UP_PROJ}.weight: importance is zero for every channel, so all errors weigh the same."
    ]


def test_layers_of_a_file_that_nobody_uses_are_named(tmp_path: Any) -> None:
    file = save_importance(gathered_from(zoo("llama")), tmp_path / "importance.safetensors")
    some = quantising(ignore=["lm_head", UP_PROJ])
    assert notes_of(IMatrixGatherer(file=file), some, dataset=None) == [f"{UP_PROJ}: {UNUSED}"]
    assert notes_of(IMatrixGatherer(file=file, ignore=[UP_PROJ]), some, dataset=None) == []


def importance_of(sums: dict[str, int]) -> Importance:
    return Importance(
        {name: torch.ones(size) for name, size in sums.items()}, dict.fromkeys(sums, 1), origin="mine.safetensors"
    )


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        (
            {Q_PROJ: 32, "model.layers.7.mlp.up_proj": 32},
            "mine.safetensors: has importance of model.layers.7.mlp.up_proj, and the model has no such layer. Did you "
            "mean 'model.layers.1.mlp.up_proj'? Use a file that was gathered from this model.",
        ),
        (
            {"model.layers.0.mlp": 32},
            "mine.safetensors: has importance of model.layers.0.mlp, and the model has no such layer. Did you mean "
            "'model.layers.0.mlp.up_proj'? Use a file that was gathered from this model.",
        ),
        (
            {UP_PROJ: 48},
            "mine.safetensors: has importance of 48 input channels for model.layers.1.mlp.up_proj, and the layer has "
            "32. Use a file that was gathered from this model.",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(sums: dict[str, int], expected: str, tmp_path: Any) -> None:
    importance = importance_of(sums)
    with pytest.raises(ImportanceError) as caught:
        check_fits(importance, zoo("llama").model)
    assert str(caught.value) == expected
    file = save_importance(importance, tmp_path / "mine.safetensors")
    assert refused(ImportanceError, [IMatrixGatherer(file=file), quantising()]) == expected


def test_layers_meant_are_those_of_the_targets() -> None:
    model = zoo("llama").model
    meant, notes = layers_meant(model, IMatrixGatherer(targets=["*.up_proj", "lm_head"], ignore=["re:.*layers.0.*"]))
    assert list(meant) == [UP_PROJ, "lm_head"] and notes == []
    assert meant[UP_PROJ] is model.get_submodule(UP_PROJ)
