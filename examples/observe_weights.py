"""Observers at work: what each of them loses on real weights, and on a stream of activations with one outlier batch.

    python examples/observe_weights.py [--model DIR] [--text FILE]

DIR is a Hugging Face folder with safetensors files. Without one, the small model that lies beside the repository is
taken, and where there is none, a small one is trained on the spot; the first lines of the output say which.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import safe_open
from torch import Tensor

from scalewright.numerics.measure import sqnr_db
from scalewright.observers import Observer

BESIDE = Path(__file__).resolve().parents[2] / "shared"
MODEL, TEXT = BESIDE / "models" / "stories15M", BESIDE / "data" / "tinystories_calib.txt"

NUM_LAYERS, MAX_ELEMENTS = 5, 1 << 18
NUM_TOKENS, NUM_HELD_OUT, SAMPLE_LENGTH = 1024, 256, 128
LINEAR_NAMES = re.compile(r"((q|k|v|o|out|qkv|gate|up|gate_up|down)_proj|fc[12]|w[123])$")

FORMATS = {
    "INT4, groups of 32": QuantizationArgs(num_bits=4, strategy="group", group_size=32),
    "INT8, one scale for each row": QuantizationArgs(num_bits=8, strategy="channel"),
    "NVFP4, groups of 16 under a global scale": preset_name_to_scheme("NVFP4", ["Linear"]).weights,
}
WEIGHT_OBSERVERS = ("memoryless_minmax", "memoryless_mse", "imatrix_mse", "optimal")
ACTIVATION_OBSERVERS = ("static_minmax", "minmax", "mse", "percentile", "entropy", "histogram_mse", "balanced_mse")


@dataclass(frozen=True)
class Layer:
    """One Linear layer, inputs to calibrate with, and others to measure its output on."""

    name: str
    linear: torch.nn.Linear
    calibration: Tensor
    held_out: Tensor


def main() -> None:
    """Print a table for each weight format, then one for activations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder with safetensors files")
    parser.add_argument("--text", type=Path, help="text to run through the model, for importance from real inputs")
    options = parser.parse_args()
    if options.model is None and MODEL.is_dir():
        options.model, options.text = MODEL, options.text or (TEXT if TEXT.is_file() else None)
    if options.text is not None and options.model is None:
        parser.error("--text: there is no model to read it with. Give --model, too.")
    terminal = Console()
    console = Console(width=min(100, terminal.width) if terminal.is_terminal else 100, highlight=False)
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # seconds that compare, on a busy machine too
    if options.model is None:
        layers, source = trained_layers()
        inputs = "real (the text that it was trained on)"
    else:
        try:
            layers = read_layers(options.model, options.text)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        source = f"{options.model.resolve().name}, a real model"
        inputs = f"real ({options.text.name}, read by the model)" if options.text else "random"
    console.print(f"[bold]Weights[/]: {source}.")
    console.print(
        f"[bold]Inputs[/]: {inputs}. {NUM_TOKENS} tokens give imatrix_mse and optimal their importance; "
        f"outputs are measured on {NUM_HELD_OUT} others.\n"
    )
    for title, args in FORMATS.items():
        console.print(weights_table(title, args, layers))
    console.print(
        "[dim]dB: signal to quantisation noise (SQNR) of the weight, and of the output that the layer computes with "
        "it. Error left: squared error of that output, as a share of min-max's. Seconds: observing the weight, and "
        "get_qparams(), on one thread.[/]\n"
    )
    console.print(activations_table())
    console.print(
        "[dim]INT8, one scale for the whole tensor. 32 batches of 64 tokens of standard deviation 1; one of them "
        "holds 4 values of 50. An ordered observer's scale depends on when that batch came (red); the SQNR is "
        "that of the scale which it gives when the batch comes last.[/]\n"
    )
    console.print(f"Done in {time.perf_counter() - began:.1f} s.")


# ---- weights ---------------------------------------------------------------------------------------------------


def weights_table(title: str, args: QuantizationArgs, layers: list[Layer]) -> Table:
    """What each observer loses on each layer in one format."""
    table = empty_table(title, ("layer", "observer"), ("weight, dB", "output, dB", "error left", "seconds"))
    names = (*WEIGHT_OBSERVERS, "nvfp4_expanded_mse") if args.strategy == "tensor_group" else WEIGHT_OBSERVERS
    for layer in layers:
        measured = [(name, *measure(name, args, layer)) for name in names]
        least = min(error for _, _, _, error, _ in measured)
        baseline = measured[0][3]
        for index, (name, weight_db, output_db, error, seconds) in enumerate(measured):
            table.add_row(
                layer.name if index == 0 else "",
                name,
                f"{weight_db:.2f}",
                f"{output_db:.2f}",
                Text(f"{error / baseline:.0%}", style="bold green" if error == least else ""),
                f"{seconds:.3f}",
                end_section=index == len(measured) - 1,
            )
    return table


def measure(name: str, args: QuantizationArgs, layer: Layer) -> tuple[float, float, float, float]:
    """SQNR of the weight and of the output, the output's squared error, and the seconds that it took to find scales."""
    observer = Observer.load_from_registry(name, base_name="weight", args=args)
    observer.attach(layer.linear)
    layer.linear(layer.calibration)  # imatrix_mse and optimal watch the inputs go by
    weight = layer.linear.weight.detach()
    began = time.perf_counter()
    qparams = observer(weight).get_qparams()
    seconds = time.perf_counter() - began
    observer.detach(layer.linear)
    stored = fake_quantize(weight, args=args, **qparams)
    wanted, given = layer.held_out @ weight.T, layer.held_out @ stored.T
    return sqnr_db(weight, stored), sqnr_db(wanted, given), float((wanted - given).square().sum()), seconds


def read_layers(model: Path, text: Path | None) -> list[Layer]:
    """A handful of Linear weights of the model, with real inputs if there is a text that the model can read."""
    if not model.is_dir():
        raise ValueError(f"{model}: there is no such folder. Give a Hugging Face folder as --model.")
    weights = dict(pick_weights(model))
    if not weights:
        raise ValueError(f"{model}: no Linear weight whose columns divide into groups of 32. Give another --model.")
    inputs = {} if text is None else real_inputs(model, text, list(weights))
    layers = []
    for name, weight in weights.items():
        x = inputs[name] if inputs else random_inputs(weight.shape[1])
        layers.append(Layer(name.removeprefix("model."), linear_of(weight), x[:NUM_TOKENS], x[NUM_TOKENS:]))
    return layers


def pick_weights(model: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights of different kinds from different depths, cut to a size that a demo has time for."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in sorted(file.keys()):
                name, shape = key.removesuffix(".weight"), file.get_slice(key).get_shape()
                if LINEAR_NAMES.search(name) and len(shape) == 2 and shape[1] % 32 == 0:
                    found.setdefault(name.rsplit(".", 1)[-1], []).append((name, path))
    kinds = evenly([found[kind] for kind in sorted(found)], NUM_LAYERS)
    for depth, same in enumerate(kinds):
        name, path = evenly(same, len(kinds))[min(depth, len(same) - 1)]
        with safe_open(path, "pt") as file:
            weight = file.get_tensor(f"{name}.weight")
        yield name, weight[: max(1, MAX_ELEMENTS // weight.shape[1])].float()


def evenly(items: list, number: int) -> list:
    """At most `number` of the items, the first and the last among them, the others evenly between."""
    if len(items) <= number:
        return items
    return [items[i * (len(items) - 1) // max(1, number - 1)] for i in range(number)]


def real_inputs(model: Path, text: Path, names: list[str]) -> dict[str, Tensor]:
    """What reaches the named layers when the model reads the beginning of `text`: [tokens, in_features] each."""
    import transformers  # noqa: PLC0415 (slow, and not always wanted)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = NUM_TOKENS + NUM_HELD_OUT
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    beginning = text.read_text(encoding="utf-8")[: 16 * wanted]
    tokens = tokenizer(beginning, return_tensors="pt", truncation=True, max_length=wanted).input_ids
    if tokens.numel() < wanted:
        raise ValueError(f"{text}: {tokens.numel()} tokens, and {wanted} are needed. Give a longer --text.")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, Tensor] = {}

    def keep(name: str, _module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0].flatten(0, 1)

    for name in names:
        network.get_submodule(name).register_forward_pre_hook(partial(keep, name))
    with torch.no_grad():
        network(tokens.reshape(-1, SAMPLE_LENGTH))
    return seen


def random_inputs(num_channels: int) -> Tensor:
    """Tokens whose channels differ in strength, a few of them a lot, as in a language model."""
    strength = torch.randn(num_channels).mul(0.7).exp()
    return torch.randn(NUM_TOKENS + NUM_HELD_OUT, num_channels) * strength


def trained_layers() -> tuple[list[Layer], str]:
    """The Linear layers of a small model that is trained on the spot, and what there is to say of it.

    It guesses the next letter from the sixteen before, and learns from a text that every Python has.
    """
    from pydoc_data.topics import topics  # noqa: PLC0415 (only where no model is at hand)

    letters = torch.tensor([min(ord(letter), 127) for letter in "".join(topics.values())])
    context, width = 16, 384
    network = torch.nn.Sequential(
        *(torch.nn.Embedding(128, 32), torch.nn.Flatten()),
        *(torch.nn.Linear(context * 32, width), torch.nn.GELU()),
        *(torch.nn.Linear(width, width), torch.nn.GELU()),
        torch.nn.Linear(width, 128),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    losses = []
    for _ in range(200):
        start = torch.randint(len(letters) - context, (256, 1))
        seen, wanted = letters[start + torch.arange(context)], letters[start + context].flatten()
        loss = torch.nn.functional.cross_entropy(network(seen), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    network.requires_grad_(False)
    start = torch.randint(len(letters) - context, (NUM_TOKENS + NUM_HELD_OUT, 1))
    x, layers = letters[start + torch.arange(context)], []
    for number, part in enumerate(network):
        if isinstance(part, torch.nn.Linear):
            name = f"trained.{number}"
            layers.append(Layer(name, linear_of(part.weight), x[:NUM_TOKENS], x[NUM_TOKENS:]))
        x = part(x)
    learned = f"{losses[0]:.1f} bits a letter before and {sum(losses[-20:]) / 20:.1f} after"
    return layers, f"a small model that was trained just now ({learned})"


def linear_of(weight: Tensor) -> torch.nn.Linear:
    """A Linear layer without bias that has this weight."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    return linear


# ---- activations -----------------------------------------------------------------------------------------------


def activations_table() -> Table:
    """How observers of activations take one outlier batch, and whether it matters when that batch comes."""
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    torch.manual_seed(0)
    usual = list(torch.randn(31, 1, 64, 256))
    outlier = torch.randn(1, 64, 256)
    outlier[0, ::16, 3] = 50.0
    table = empty_table(
        "Activations, one batch in 32 with outliers",
        ("observer", "ordered"),
        ("scale, outliers first", "scale, outliers last", "SQNR, usual batches", "SQNR, all batches"),
    )
    for name in ACTIVATION_OBSERVERS:
        first, last = watch(name, args, [outlier, *usual]), watch(name, args, [*usual, outlier])
        scales = [f"{float(each.get_qparams()['scale']):.4f}" for each in (first, last)]
        losses = [
            sqnr_db(x, fake_quantize(x, args=args, **last.get_qparams()))
            for x in (torch.cat(usual), torch.cat([*usual, outlier]))
        ]
        table.add_row(
            name,
            "yes" if last.ordered else "no",
            *(Text(scale, style="bold red" if scales[0] != scales[1] else "") for scale in scales),
            *(f"{loss:.1f} dB" for loss in losses),
        )
    return table


def watch(name: str, args: QuantizationArgs, batches: list[Tensor]) -> Observer:
    """An observer of a layer's input that has seen all batches, in their order."""
    observer = Observer.load_from_registry(name, base_name="input", args=args)
    for batch in batches:
        observer(batch)
    return observer


def empty_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """A table without rows; columns of words are flush left, those of numbers flush right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


if __name__ == "__main__":
    main()
