"""Runs on two and three ranks end in what one rank ends in; and when a rank fails, dies or hangs, the others say which.

Processes are forked from a server that has imported everything, which is quick. This process keeps the store of the
process groups, as torchrun does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from scalewright.calibration.distributed import watched_ranks
from scalewright.checkpoint.journal import partial_of
from scalewright.importance import gather_importance
from scalewright.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier, SmoothQuantModifier
from scalewright.modifiers.layers import WatchedLayer
from scalewright.observers.catalog import registered_observers
from scalewright.oneshot import oneshot

pytestmark = pytest.mark.ranks

WORLDS = (1, 2, 3)
SECONDS_AT_MOST = 240.0  # a backstop for a busy machine
VOCAB = 64

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OBSERVERS = {name: cls for name, cls in registered_observers().items() if cls.__module__.startswith("scalewright.")}
OF_WEIGHTS = [name for name, cls in OBSERVERS.items() if "weights" in cls.watches]
OF_ACTIVATIONS = [name for name, cls in OBSERVERS.items() if "activations" in cls.watches]
ORDERED = {name for name, cls in OBSERVERS.items() if cls.ordered}
LINEARS = [
    f"model.layers.{block}.{name}"
    for block in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
] + [f"model.layers.{block}.mlp.{name}" for block in range(2) for name in ("gate_proj", "up_proj", "down_proj")]


# ---- what is run -----------------------------------------------------------------------------------------------------


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "output_router_logits": False}
    more = {
        "mixtral": experts,
        "many experts": {**experts, "model_type": "mixtral", "num_local_experts": 12, "num_hidden_layers": 1},
        "phi": {"num_key_value_heads": 4},
    }
    given = {"model_type": kind, **sizes, **heads, **more.get(kind, {})}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(count: int, length: int = 24) -> list[list[int]]:
    """Samples of different lengths, so that there is padding."""
    drawn = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    return [row[: length - i % 5].tolist() for i, row in enumerate(drawn)]


def with_each_observer(part: str, names: list[str], **args: Any) -> QuantizationModifier:
    """A modifier that gives each linear layer another observer of that part."""
    assert len(names) <= len(LINEARS)
    return QuantizationModifier(
        config_groups={
            f"group_{i}": {"targets": [layer], "weights": INT8, part: {**args, "observer": name}}
            for i, (layer, name) in enumerate(zip(LINEARS, names, strict=False))
        }
    )


@dataclass(frozen=True)
class Case:
    """A recipe and data; `is_exact` if not a bit depends on the number of ranks."""

    recipe: Callable[[], Any]
    kind: str = "llama"
    num_samples: int = 12
    batch_size: int = 3
    is_exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)


FIRST = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
HEAD = {"ignore": ["lm_head"]}
CASES = {
    "every observer of weights": Case(lambda: with_each_observer("weights", OF_WEIGHTS, **INT4)),
    "every observer of inputs": Case(
        lambda: with_each_observer("input_activations", [x for x in OF_ACTIVATIONS if x not in ORDERED], **STATIC)
    ),
    "averages of inputs": Case(lambda: with_each_observer("input_activations", sorted(ORDERED), **STATIC)),
    "W4A16": Case(lambda: QuantizationModifier(weights=INT4, **HEAD)),
    "NVFP4": Case(lambda: QuantizationModifier(scheme="NVFP4", **HEAD)),
    "kv cache": Case(lambda: QuantizationModifier(scheme="FP8", kv_cache_scheme=KV, **HEAD)),
    "in sequence": Case(lambda: QuantizationModifier(scheme="W8A8", **HEAD), options={"pipeline": "sequential"}),
    "data-free": Case(lambda: QuantizationModifier(scheme="W4A16", group_size=32, **HEAD), num_samples=0),
    "gathered": Case(
        lambda: [IMatrixGatherer(), QuantizationModifier(weights={**INT4, "observer": "imatrix_mse"}, **HEAD)]
    ),
    "smoothed": Case(lambda: [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", **HEAD)]),
    "smoothed, one sample": Case(
        lambda: [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", **HEAD)], num_samples=1
    ),
    "smoothed experts": Case(
        lambda: [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8_DYNAMIC", ignore=["lm_head", "re:.*gate$"])],
        kind="mixtral",
        num_samples=9,
        batch_size=1,
    ),
    "gptq": Case(lambda: GPTQModifier(weights=INT4, **HEAD), is_exact=False),
    "gptq, makes up": Case(
        lambda: GPTQModifier(weights=INT4, input_activations=STATIC, correction=0.5, refinements=1, **HEAD),
        is_exact=False,
    ),
    "five samples": Case(lambda: QuantizationModifier(scheme="W8A8", **HEAD), num_samples=5, batch_size=1),
    "one sample": Case(lambda: QuantizationModifier(scheme="W8A8", **HEAD), num_samples=1),
    "one sample, gptq": Case(lambda: GPTQModifier(weights=INT4, **HEAD), num_samples=1),
    "one sample, in sequence": Case(
        lambda: QuantizationModifier(scheme="W8A8", **HEAD), num_samples=1, options={"pipeline": "sequential"}
    ),
    "experts": Case(
        lambda: GPTQModifier(weights=INT4, correction=0.5, ignore=["lm_head", "re:.*gate$"]),
        kind="mixtral",
        num_samples=9,
        batch_size=1,
        is_exact=False,
        options={"moe_calibrate_all_experts": False},
    ),
    "experts that see the same": Case(  # so many that they are not quantised at one time
        lambda: GPTQModifier(weights=INT4, correction=0.5, ignore=["lm_head", "re:.*gate$"]),
        kind="many experts",
        is_exact=False,
    ),
    "an input that comes again": Case(  # to the MLP, after the projection of what was attended to
        lambda: GPTQModifier(weights=INT4, correction=0.5, **HEAD), kind="phi", is_exact=False
    ),
}

SAVED = ("W4A16", "data-free")  # by the user, when the run is done


def run_case(name: str, out: Path | None, **more: Any) -> dict[str, Any]:
    """What is known of the run, and of the model in memory."""
    case, model = CASES[name], model_of(CASES[name].kind)
    data = tokens(case.num_samples) if case.num_samples else None
    given = {"batch_size": case.batch_size, "num_calibration_samples": 12, **case.options, **more}
    result = oneshot(model, recipe=case.recipe(), dataset=data, output_dir=None if name in SAVED else out, **given)
    if name in SAVED and out is not None:
        result.save(out)
    sums = {key: each.double().abs().sum().item() for key, each in model.state_dict().items()}
    return {"result": {**result.to_dict(), "seconds": {}}, "sums": sums}


def play_all(folder: Path, rank: int) -> None:
    for name in CASES:
        known = run_case(name, folder / name)
        (folder / f"{name}.rank{rank}.json").write_text(json.dumps(known), encoding="utf-8")
    found = gather_importance(model_of("llama"), tokens(5), batch_size=1, output_file=folder / "importance")
    (folder / f"importance.rank{rank}.json").write_text(json.dumps(found.to_dict()), encoding="utf-8")


# ---- processes -------------------------------------------------------------------------------------------------------


def as_rank(rank: int, world: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What a started process does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    work(*args, rank)
    if world > 1:
        dist.destroy_process_group()
    os._exit(0)


@contextmanager
def started(world: int, work: Callable[..., None], *args: Any) -> Iterator[list[BaseProcess]]:
    """Processes that are killed in the end, if they are still there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.test_ranks_run"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=as_rank, args=(rank, world, store.port, work, args)) for rank in range(world)]
    try:
        for each in processes:
            each.start()
        yield processes
    finally:
        for each in processes:
            if each.is_alive():
                each.kill()
            each.join()


def run_ranks(world: int, work: Callable[..., None], *args: Any) -> list[int | None]:
    with started(world, work, *args) as processes:
        for each in processes:
            each.join(SECONDS_AT_MOST)
        return [each.exitcode for each in processes]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """All cases, played by one, two and three ranks."""
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in WORLDS}
    for world, folder in folders.items():
        assert run_ranks(world, play_all, folder) == [0] * world
    return folders


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


# ---- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_exact])
def test_the_bytes_do_not_depend_on_the_number_of_ranks(name: str, world: int, played: dict[int, Path]) -> None:
    assert files_of(played[world] / name) == files_of(played[1] / name)


def test_every_average_is_among_what_is_compared(played: dict[int, Path]) -> None:
    averaged = [name for name in tensors_of(played[1] / "averages of inputs") if name.endswith("input_scale")]
    assert len(averaged) == len(ORDERED) > 0


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_codes_of_layers_that_see_the_same_are_the_same(name: str, world: int, played: dict[int, Path]) -> None:
    """The first layers see what they see on one rank; GPTQ's Hessian is added up in another order, and no more."""
    one, many = (tensors_of(played[each] / name) for each in (1, world))
    assert one.keys() == many.keys()
    for key in (each for each in one if each.startswith(FIRST)):
        if one[key].is_floating_point() and one[key].dtype.itemsize > 1:
            torch.testing.assert_close(many[key], one[key], rtol=1e-4, atol=0)
        else:
            assert share_of_equal_codes(one[key], many[key]) >= 0.9999, key


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_exact])
def test_layers_are_as_good_as_on_one_rank(name: str, world: int, played: dict[int, Path]) -> None:
    """A code that falls to the other side changes all that comes after it, as another order of batches does."""
    rows = [json.loads((played[each] / name / "scalewright.json").read_text())["layers"] for each in (1, world)]
    gains = [
        many["output_db"] - one["output_db"]
        for one, many in zip(*rows, strict=True)
        if one["output_db"] is not None and many["output_db"] is not None
    ]
    assert len(gains) >= len(ORDERED) and abs(sum(gains) / len(gains)) < 0.5 and min(gains) > -3


def share_of_equal_codes(one: Tensor, other: Tensor) -> float:
    both = [each.contiguous().flatten().view(torch.uint8) for each in (one, other)]
    both = [torch.cat([each & 15, each >> 4]) for each in both]
    return float((both[0] == both[1]).double().mean())


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_same_model_and_the_same_result(name: str, world: int, played: dict[int, Path]) -> None:
    known = [json.loads((played[world] / f"{name}.rank{rank}.json").read_text()) for rank in range(world)]
    assert known[0]["sums"] and all(each == known[0] for each in known)


def test_an_expert_without_tokens_on_a_rank_is_there(played: dict[int, Path]) -> None:
    told = json.loads((played[3] / "experts" / "scalewright.json").read_text())
    assert any("tokens, and GPTQ needs" in note for note in told["notes"])
    assert any(row["output_db"] is not None for row in told["layers"] if ".experts." in row["name"])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_importance_is_gathered_by_all_ranks(world: int, played: dict[int, Path]) -> None:
    one, many = (load_file(played[each] / "importance") for each in (1, world))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    known = [json.loads((played[world] / f"importance.rank{rank}.json").read_text()) for rank in range(world)]
    assert all(each == known[0] for each in known)


# ---- failures --------------------------------------------------------------------------------------------------------


def note_error(folder: Path, rank: int, work: Callable[[], object]) -> None:
    """Run something, and write down how it ends."""
    began, text = time.monotonic(), "it went well"
    try:
        work()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (folder / f"rank{rank}.txt").write_text(text, encoding="utf-8")
    (folder / f"rank{rank}.seconds").write_text(str(time.monotonic() - began), encoding="utf-8")
    os._exit(1)


def after_layers(count: int, act: Callable[[], object]) -> None:
    """Do something when so many layers were quantised by this rank, before the next one is."""
    finish, done = WatchedLayer.finish, []

    def finish_and_act(self: WatchedLayer) -> Any:
        if len(done) == count:
            act()
        done.append(self.name)
        return finish(self)

    WatchedLayer.finish = finish_and_act  # type: ignore[method-assign]


def run_and_fail(folder: Path, name: str, how: str, timeout: float, rank: int) -> None:
    def fail() -> None:
        if how == "raise":
            raise OSError("no luck today")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def sleep() -> None:
        time.sleep(SECONDS_AT_MOST)

    if rank == 1:
        after_layers(2, sleep if how == "sleep" else fail)

    def work() -> None:
        with watched_ranks(timeout=timeout) as ranks:
            run_case(name, folder / "out", ranks=ranks)

    note_error(folder, rank, work)


@pytest.mark.parametrize(
    ("how", "timeout", "text"),
    [
        ("raise", 60.0, "rank 1: OSError: no luck today"),
        ("kill", 60.0, "rank 1: its process has ended."),
        ("stop", 10.0, "rank 1: nothing was heard of it for 5 s. It hangs, or its machine is lost."),
        (
            "sleep",
            10.0,
            "rank 1: has not come to where the others wait within 10 s. Look what it does there, or give it more time "
            "with rank_timeout.",
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_the_run_goes_on_later(
    how: str, timeout: float, text: str, tmp_path: Path, played: dict[int, Path]
) -> None:
    name = "gptq"
    with started(3, run_and_fail, tmp_path, name, how, timeout) as processes:
        for each in (processes[0], processes[2]):
            each.join(SECONDS_AT_MOST)
        assert (processes[0].exitcode, processes[2].exitcode) == (1, 1)
    for rank in (0, 2):
        assert (tmp_path / f"rank{rank}.txt").read_text() == f"RankError: {text}"
    out = tmp_path / "out"
    assert not out.exists() and list(partial_of(out).glob("0*.safetensors"))
    assert run_ranks(3, resume, tmp_path, name) == [0, 0, 0]
    assert files_of(out) == files_of(played[3] / name)
    assert not partial_of(out).exists()


def resume(folder: Path, name: str, rank: int) -> None:
    kept = len(list(partial_of(folder / "out").glob("0*.safetensors")))
    quantised: list[int] = []
    after_layers(-1, lambda: None)
    finish = WatchedLayer.finish
    WatchedLayer.finish = lambda self: (quantised.append(1), finish(self))[1]  # type: ignore[method-assign]
    run_case(name, folder / "out")
    assert len(quantised) <= 14 - kept  # what was kept is not done again


def run_with_other_data(folder: Path, rank: int) -> None:
    note_error(
        folder,
        rank,
        lambda: oneshot(
            model_of("llama"), recipe=CASES["W4A16"].recipe(), dataset=tokens(4 + rank), num_calibration_samples=8
        ),
    )


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    run_ranks(2, run_with_other_data, tmp_path)
    for rank in range(2):
        text = "RankError: rank 1: has another set of samples than rank 0. Give all ranks the same."
        assert (tmp_path / f"rank{rank}.txt").read_text() == text


def run_to_a_place_that_is_taken(folder: Path, rank: int) -> None:
    note_error(folder, rank, lambda: run_case("one sample", folder))


def test_a_place_that_is_taken_stops_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    run_ranks(2, run_to_a_place_that_is_taken, tmp_path)
    text = f"{tmp_path}: exists already and is not empty. Give another folder, or overwrite."
    assert (tmp_path / "rank0.txt").read_text() == f"OutputError: {text}"
    assert (tmp_path / "rank1.txt").read_text() == f"RankError: rank 0: {text}"


# ---- torchrun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_quantises_and_speaks_once(nodes: int, tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "model")
    samples = [json.dumps({"input_ids": each}) for each in tokens(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(samples), encoding="utf-8")
    common = ["quantize", str(tmp_path / "model"), "--scheme", "W8A8", "--data", str(tmp_path / "data.jsonl")]
    common += ["--batch-size", "2", "--samples", "8", "--json", "--rank-timeout", "60"]
    port = free_port()
    started = []
    for node in range(nodes):
        where = ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(2 // nodes)]
        setting = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*torchrun, "-m", "scalewright", *common, "--out", str(tmp_path / "two")]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=setting, **pipes))
    said = [each.communicate(timeout=SECONDS_AT_MOST) for each in started]
    assert [each.returncode for each in started] == [0] * nodes, said
    assert json.loads(said[0][0])["out"] == str(tmp_path / "two")
    assert "".join(out for out, _ in said[1:]) == ""
    assert run_ranks(1, quantise_by_command, common, str(tmp_path / "one")) == [0]
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def quantise_by_command(arguments: list[str], out: str, rank: int) -> None:
    from scalewright.cli import app

    app([*arguments, "--out", out], standalone_mode=False)
