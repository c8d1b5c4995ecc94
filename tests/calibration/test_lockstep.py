"""Passes that wait for each other give what plain passes give, bit for bit, and leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from zoo import ANIMALS, Animal, assert_same, traces, zoo

from scalewright.calibration.experts import unfuse_experts
from scalewright.calibration.lockstep import Enough, LockStep


def lockstep_of(animal: Animal, *blocks: str, **given: Any) -> LockStep:
    modules = {name: animal.model.get_submodule(name) for name in blocks or animal.blocks}
    return LockStep(modules, lambda i: animal.model(**animal.batches[i], **given), len(animal.batches))


def run(lockstep: LockStep, *, rehearsals: int = 0) -> list[tuple[str, list[int]]]:
    """Go through all steps, rehearsing each block so many times."""
    steps = []
    with torch.no_grad(), lockstep.running():
        for name, batches in lockstep.steps():
            steps.append((name, list(batches)))
            for batch in batches:
                for _ in range(rehearsals):
                    lockstep.rehearse(batch)
            for batch in batches:
                lockstep.go_on(batch)
    return steps


def plain(animal: Animal, **given: Any) -> list[Any]:
    with torch.no_grad():
        return [animal.model(**batch, **given) for batch in animal.batches]


def settings(animal: Animal) -> dict[str, Any]:
    return {} if animal.model.__class__.__name__ == "Odd" else {"use_cache": False}


# ---- the same as plain passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rehearsals", [0, 2])
@pytest.mark.parametrize("name", ANIMALS)
def test_outputs_are_those_of_plain_passes_bit_for_bit(name: str, rehearsals: int) -> None:
    animal = zoo(name)
    given = settings(animal) if rehearsals else {}
    expected, before = plain(animal, **given), traces(animal.model)
    lockstep = lockstep_of(animal, **given)
    steps = run(lockstep, rehearsals=rehearsals)
    for i, each in enumerate(expected):
        assert_same(lockstep.outputs[i], each)
    assert {step for step, _ in steps} == set(animal.blocks)
    assert traces(animal.model) == before


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_unfused_experts_are_the_same_in_lock_step(name: str) -> None:
    animal = zoo(name)
    unfuse_experts(animal.model)
    expected = plain(animal)
    lockstep = lockstep_of(animal)
    run(lockstep)
    for i, each in enumerate(expected):
        assert_same(lockstep.outputs[i], each)


def test_hidden_states_and_attentions_that_a_model_collects_are_not_those_of_rehearsals() -> None:
    animal = zoo("llama")
    given = {"use_cache": False, "output_hidden_states": True}
    expected = plain(animal, **given)
    lockstep = lockstep_of(animal, **given)
    run(lockstep, rehearsals=2)
    for i, each in enumerate(expected):
        assert len(lockstep.outputs[i].hidden_states) == 3
        assert_same(lockstep.outputs[i], each)


def test_any_modules_will_do_also_some_within_others() -> None:
    animal = zoo("llama")
    expected = plain(animal, use_cache=False)
    names = [*animal.blocks, "model.layers.0.mlp", "model.layers.1.self_attn.q_proj", "lm_head"]
    lockstep = lockstep_of(animal, *names, use_cache=False)
    steps = run(lockstep, rehearsals=1)
    for i, each in enumerate(expected):
        assert_same(lockstep.outputs[i], each)
    order = ["model.layers.0", "model.layers.0.mlp", "model.layers.1", "model.layers.1.self_attn.q_proj", "lm_head"]
    assert steps == [(name, [0, 1, 2]) for name in order]


def test_all_batches_come_to_a_block_before_any_goes_on() -> None:
    animal = zoo("odd")
    steps = run(lockstep_of(animal))
    # The second block is called again at the end.
    assert steps == [(f"blocks.{i}", [0, 1, 2]) for i in (0, 1, 2, 1)]


def test_batches_that_skip_some_blocks_wait_for_the_others() -> None:
    animal = zoo("llava")
    steps = run(lockstep_of(animal))
    vision = [(f"model.vision_tower.encoder.layers.{i}", [0, 1]) for i in range(3)]
    assert steps == [*vision, *((f"model.language_model.layers.{i}", [0, 1, 2]) for i in range(2))]


def test_a_tensor_that_is_there_twice_is_one_tensor_in_a_rehearsal_too() -> None:
    seen = []

    class Adds(nn.Module):
        def forward(self, x: Tensor, *, same: dict[str, Tensor]) -> Tensor:
            x.add_(1)
            seen.append(same["x"].clone())
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Adds()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            return self.block(x, same={"x": x})

    model = Model()
    lockstep = LockStep({"block": model.block}, lambda i: model(torch.zeros(2)), 1)
    run(lockstep, rehearsals=2)
    assert [each.tolist() for each in seen] == [[1, 1]] * 3
    assert lockstep.outputs[0].tolist() == [1, 1]


# ---- what belongs to the thread --------------------------------------------------------------------------------------


class Switching(nn.Module):
    """Each pass has its own modes between blocks, and writes down what it finds."""

    place: ContextVar[int] = ContextVar("place")

    def __init__(self, modes: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.modes = modes
        self.found: dict[int, list[Any]] = {}

    def forward(self, batch: int) -> Tensor:
        x = torch.ones(2, 4)
        self.place.set(batch)
        found = self.found.setdefault(batch, [])
        with self.modes[batch]():
            for block in self.blocks:
                x = block(x)
                found.append((self.place.get(), modes()))
        found.append((self.place.get(), modes()))
        return x.detach().clone()


class Noting(TorchFunctionMode):
    """A mode that stands in for functions of torch, and notes how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_asked += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


class OtherNoting(Noting):
    """Another one."""


def modes() -> tuple[Any, ...]:
    return (
        [type(each) for each in _get_current_function_mode_stack()],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


MODES: list[Callable[[], Any]] = [
    torch.enable_grad,
    torch.no_grad,
    nullcontext,
    torch.inference_mode,
    lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    Noting,
    OtherNoting,
]


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad])
def test_each_pass_keeps_its_modes_and_the_caller_keeps_his(outside: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Switching(MODES)
    with outside():
        outputs = [model(batch) for batch in range(len(MODES))]
        expected, model.found = model.found, {}
        before = modes()
        lockstep = LockStep({str(i): each for i, each in enumerate(model.blocks)}, model, len(MODES))
        with lockstep.running():
            for _, batches in lockstep.steps():
                assert modes() == before
                for batch in batches[::-1]:
                    lockstep.go_on(batch)
                    assert modes() == before
        assert modes() == before
    assert model.found == expected
    for i, each in enumerate(outputs):
        assert_same(lockstep.outputs[i], each)


def test_passes_and_nothing_else_are_run_within() -> None:
    model, noting = Switching(MODES), Noting()
    with noting:
        outputs = [model(batch) for batch in range(len(MODES))]
    expected, model.found = model.found, {}
    num_asked, noting.num_asked = noting.num_asked, 0
    assert num_asked == 3 * len(MODES)
    blocks = {str(i): each for i, each in enumerate(model.blocks)}
    lockstep = LockStep(blocks, model, len(MODES), within=lambda: noting)
    with OtherNoting() as outside, lockstep.running():
        for _, batches in lockstep.steps():
            for batch in batches[::-1]:
                lockstep.go_on(batch)
                assert _get_current_function_mode_stack() == [outside]
    assert noting.num_asked == num_asked
    for batch, found in model.found.items():
        for (place, (entered, *others)), (_, (entered_before, *before)) in zip(found, expected[batch], strict=True):
            assert (place, others, entered) == (batch, before, [OtherNoting, *entered_before])
    for i, each in enumerate(outputs):
        assert_same(lockstep.outputs[i], each)


def test_a_rehearsal_is_in_the_modes_of_who_asks_for_it() -> None:
    model, noting = Switching([nullcontext]), Noting()
    lockstep = LockStep({"1": model.blocks[1]}, model, 1)
    with lockstep.running():
        for _, [batch] in lockstep.steps():
            with noting:
                lockstep.rehearse(batch)
            lockstep.go_on(batch)
    assert noting.num_asked == 1


def test_modes_are_the_callers_after_passes_were_ended_half_way() -> None:
    model = Switching(MODES)
    before = modes()
    lockstep = LockStep({"1": model.blocks[1]}, model, len(MODES))
    with lockstep.running():
        next(iter(lockstep.steps()))
    assert modes() == before
    assert torch.ones(1, requires_grad=True).mul(2).requires_grad


def test_passes_that_are_ended_later_do_not_bring_old_modes_back() -> None:
    model = Switching(MODES[:3])
    lockstep = LockStep({"1": model.blocks[1]}, model, 3)
    with lockstep.running(), torch.no_grad():
        next(iter(lockstep.steps()))
    assert torch.is_grad_enabled()


# ---- nothing is left -------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Three blocks. A pass may fail in the middle; it says when it is left, and calls a block on the way out."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.error = error
        self.left: list[int] = []

    def forward(self, batch: int) -> Tensor:
        x = torch.ones(2, 4)
        try:
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 1 and batch == 1 and self.error is not None:
                    raise self.error
        finally:
            self.left.append(batch)
            self.blocks[2](x)
        return x

    def lockstep(self) -> LockStep:
        return LockStep({f"blocks.{i}": each for i, each in enumerate(self.blocks)}, self, 3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, Enough, SystemExit])
def test_an_error_in_a_pass_ends_all_of_them(error: type[BaseException]) -> None:
    model = Failing(error("broken"))
    before, lockstep = traces(model), model.lockstep()
    with pytest.raises(error):
        run(lockstep)
    assert sorted(model.left) == [0, 1, 2]
    assert traces(model) == before
    assert not lockstep._passes and not lockstep._batches


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("when", ["before", "half"])
def test_an_error_between_steps_ends_all_passes(error: type[BaseException], when: str) -> None:
    model = Failing()
    before, lockstep = traces(model), model.lockstep()

    def go() -> None:
        with lockstep.running():
            for name, batches in lockstep.steps():
                if when == "half":
                    lockstep.go_on(batches[0])
                if name == "blocks.1" or when == "before":
                    raise error
                for batch in batches[when == "half" :]:
                    lockstep.go_on(batch)

    with pytest.raises(error):
        go()
    assert sorted(model.left) == [0, 1, 2]
    assert traces(model) == before


def test_greenlets_are_dead_and_their_frames_are_gone() -> None:
    model = Failing()
    lockstep = model.lockstep()
    with lockstep.running():
        next(iter(lockstep.steps()))
        passes = list(lockstep._passes.values())
        assert all(each and not each.dead for each in passes)
    assert all(each.dead and each.gr_frame is None for each in passes)


def test_one_pass_that_fails_on_its_way_out_does_not_keep_the_others() -> None:
    class Sour(Failing):
        def forward(self, batch: int) -> Tensor:
            try:
                return super().forward(batch)
            finally:
                if batch == 1:
                    raise ValueError("sour")

    model = Sour()
    before, lockstep = traces(model), model.lockstep()
    with pytest.raises(ValueError, match="sour"), lockstep.running():
        next(iter(lockstep.steps()))
    assert sorted(model.left) == [0, 1, 2]
    assert traces(model) == before


def test_a_forward_or_hook_of_the_users_own_stays() -> None:
    model = Failing()
    block, calls = model.blocks[1], []
    block.register_forward_pre_hook(lambda module, args: calls.append("hook"))
    own = block.forward = lambda x: (calls.append("forward"), x)[1]
    before = traces(model)
    run(model.lockstep(), rehearsals=1)
    assert traces(model) == before and block.forward is own
    assert calls == ["hook", "forward"] * 6  # three batches, each rehearsed once


def test_the_model_can_be_run_by_itself_meanwhile() -> None:
    animal = zoo("llama")
    expected = plain(animal)
    lockstep = lockstep_of(animal)
    with torch.no_grad(), lockstep.running():
        for _, batches in lockstep.steps():
            assert_same(animal.model(**animal.batches[0]), expected[0])
            for batch in batches:
                lockstep.go_on(batch)
    assert_same(lockstep.outputs[2], expected[2])


def test_enough_ends_a_rehearsal_and_nothing_else() -> None:
    animal = zoo("llama")
    expected = plain(animal, use_cache=False)
    lockstep = lockstep_of(animal, use_cache=False)
    behind = []
    with torch.no_grad(), lockstep.running():
        for name, batches in lockstep.steps():
            block = animal.model.get_submodule(name)

            def enough(*_: Any) -> None:
                raise Enough

            hooks = [
                block.self_attn.register_forward_hook(enough),
                block.mlp.register_forward_hook(lambda *_: behind.append(1)),
            ]
            for batch in batches:
                lockstep.rehearse(batch)
            assert not behind
            for hook in hooks:
                hook.remove()
            for batch in batches:
                lockstep.go_on(batch)
    for i, each in enumerate(expected):
        assert_same(lockstep.outputs[i], each)


def test_what_went_into_a_block_is_not_kept_when_all_have_gone_on() -> None:
    model = Failing()
    inputs: list[weakref.ref[Tensor]] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
    lockstep = model.lockstep()
    with torch.no_grad(), lockstep.running():
        for name, batches in lockstep.steps():
            if name == "blocks.2":
                gc.collect()
                assert len(inputs) == 3 and all(each() is None for each in inputs)
            for batch in batches:
                lockstep.go_on(batch)


def test_a_batch_that_is_forgotten_is_our_mistake() -> None:
    lockstep = Failing().lockstep()
    with lockstep.running():
        steps = lockstep.steps()
        _, batches = next(steps)
        for batch in batches[:2]:
            lockstep.go_on(batch)
        with pytest.raises(AssertionError, match=r"blocks\.0: batches \[2\] still wait"):
            next(steps)


def test_entering_is_told_of_each_batch_that_goes_on_or_rehearses() -> None:
    model, told = Failing(), []
    lockstep = LockStep({"blocks.1": model.blocks[1]}, model, 2, entering=told.append)
    run(lockstep, rehearsals=1)
    assert told == [0, 1, 0, 1, 0, 1]
