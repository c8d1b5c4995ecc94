"""Where the parts meet: a model, a recipe and data go in; a quantised model, a checkpoint and a `Result` come out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalewright.calibration.data import DataOptions, Samples, load_samples
from scalewright.calibration.experts import showing_all_tokens, unfuse_experts
from scalewright.calibration.pipelines import PIPELINES, Calibration, OnStep, silent
from scalewright.calibration.targets import check_layers, largest_blocks, loader_targets, resolve_targets
from scalewright.checkpoint.saving import check_output, save_checkpoint
from scalewright.errors import DataError, ModelError, RecipeError, StrictError, did_you_mean
from scalewright.modifiers import QuantizationModifier
from scalewright.modifiers.layers import QuantizedLayer, WatchedAttention, WatchedLayer
from scalewright.modifiers.schemes import in_words
from scalewright.recipe import Recipe, Stage


@dataclass
class Result:
    """What a run has done: the quantised model, its layers, and what the user should know."""

    model: nn.Module
    recipe: Recipe
    pipeline: str
    why: str
    layers: list[QuantizedLayer]
    notes: list[str]
    seconds: dict[str, float]
    num_samples: int
    num_tokens: int
    seed: int
    versions: dict[str, str]
    output_dir: Path | None = None
    companions: list[Any] = field(default_factory=list, repr=False)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the checkpoint to a folder."""
        folder = Path(path)
        check_output(folder, overwrite=overwrite)
        save_checkpoint(self.model, self.layers, folder, recipe=self.recipe.to_yaml(), companions=self.companions)
        (folder / "scalewright.json").write_text(self.to_json(), encoding="utf-8")
        return folder

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as plain data."""
        return {
            "pipeline": self.pipeline,
            "why": self.why,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "seed": self.seed,
            "versions": self.versions,
            "seconds": self.seconds,
            "notes": self.notes,
            "recipe": self.recipe.to_dict(),
            "layers": [layer_row(each) for each in self.layers],
        }

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def layer_row(layer: QuantizedLayer) -> dict[str, Any]:
    """A layer as one row of the table."""
    return {
        "name": layer.name,
        "weights": in_words(layer.scheme.weights),
        "activations": in_words(layer.scheme.input_activations),
        "observers": layer.observers,
        "shape": list(layer.shape),
        "weight_db": layer.weight_db,
        "gain_db": layer.gain_db,
        "output_db": layer.output_db,
        "above_optimum": layer.above_optimum,
    }


def oneshot(
    model: nn.Module | str | Path,
    *,
    recipe: Any = None,
    scheme: str | None = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int = 2048,
    batch_size: int | None = None,
    column: str | None = None,
    pack: bool | None = None,
    split: str = "train",
    pipeline: str = "auto",
    sequential_targets: str | Sequence[str] | None = None,
    moe_calibrate_all_experts: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    seed: int = 0,
    on_step: OnStep = silent,
) -> Result:
    """Quantise a model, given as an object or by its path or hub name, as a recipe (or the name of a scheme) says.

    With `output_dir` the checkpoint is written there. Nothing is skipped in silence: what could not be done as asked is
    a note of the result, or an error if `strict`.
    """
    clock = _Clock()
    parsed = _recipe(recipe, scheme)
    if pipeline not in PIPELINES:
        raise RecipeError(
            f"there is no pipeline '{pipeline}'.{did_you_mean(pipeline, PIPELINES)} Pipelines: {', '.join(PIPELINES)}."
        )
    if output_dir is not None:
        check_output(Path(output_dir), overwrite=overwrite)
    with clock("load"):
        loaded = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    companions = _companions(model, tokenizer, trust_remote_code=trust_remote_code)
    torch.manual_seed(seed)
    notes: list[str] = []
    layers: list[QuantizedLayer] = []
    samples: Samples | None = None
    chosen, why = "data_free", "there is nothing to do"
    for stage in parsed.stages:
        plan = make_plan(loaded, stage, pipeline=pipeline, has_data=dataset is not None, blocks=sequential_targets)
        notes += plan.notes
        _say(notes, strict)
        chosen, why = plan.pipeline, plan.why
        if plan.pipeline != "data_free" and samples is None:
            with clock("data"):
                samples = _samples(
                    dataset,
                    DataOptions(num_calibration_samples, max_seq_length, batch_size, column, pack, split, seed),
                    loaded,
                    companions,
                )
            notes += samples.notes
            _say(notes, strict)
        with clock("calibrate"), showing_all_tokens(loaded, on=moe_calibrate_all_experts):
            calibration = Calibration(loaded, plan.layers, _on_device(samples, loaded), plan.blocks, on_step)
            layers += calibration.run(plan.pipeline)
    notes += [note for layer in layers for note in layer.notes]
    _say(notes, strict)
    result = Result(
        loaded,
        parsed,
        chosen,
        why,
        layers,
        notes,
        clock.seconds,
        0 if samples is None else samples.num_samples,
        0 if samples is None else samples.num_tokens,
        seed,
        _versions(),
        companions=companions,
    )
    if output_dir is not None:
        with clock("save"):
            result.output_dir = result.save(output_dir, overwrite=overwrite)
    return result


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What would be done to a model: which layers, by which pipeline, and why."""

    layers: list[WatchedLayer]
    ignored: list[str]
    pipeline: str
    why: str
    blocks: list[str]
    notes: list[str]


def make_plan(
    model: nn.Module,
    stage: Stage,
    *,
    pipeline: str = "auto",
    has_data: bool = False,
    will_have_data: bool = False,
    blocks: str | Sequence[str] | None = None,
) -> Plan:
    """Resolve a stage on a model; takes fused experts apart, and changes nothing else."""
    replaced, notes = unfuse_experts(model)
    layers: list[WatchedLayer] = []
    ignored: list[str] = []
    needs: list[str] = []
    for modifier in stage.modifiers:
        if not isinstance(modifier, QuantizationModifier):
            raise RecipeError(f"{type(modifier).__name__} cannot be run.")
        targets = resolve_targets(model, modifier)
        check_layers(targets.layers)
        notes += targets.notes
        ignored += targets.ignored
        needs.append(modifier.data)
        taken = {layer.name for layer in layers}
        twice = next((each.name for each in targets.layers if each.name in taken), None)
        if twice is not None:
            raise RecipeError(f"{twice}: two modifiers of one stage mean it. Use ignore, or narrower targets.")
        by_loader = loader_targets(targets)
        layers += [
            WatchedLayer(each.name, each.module, each.scheme.model_copy(update={"targets": by_loader[each.group]}))
            for each in targets.layers
        ]
        layers += [
            WatchedAttention(name, module, args, model=model, queries=queries)
            for name, module, args, queries in targets.attention
        ]
    for name, fused in replaced.items():
        if not any(layer.name.startswith(f"{name}.") for layer in layers):
            model.set_submodule(name, fused)
    if not layers:
        raise RecipeError("the recipe means no layer of this model." + "".join(f" {note}" for note in notes))
    _untie(model, layers, notes)
    names = [layer.name for layer in layers]
    found = _blocks(model, names, blocks)
    if will_have_data and "needed" in needs:
        has_data = True
    chosen, why = _pipeline(pipeline, needs, has_data, found)
    return Plan(layers, ignored, chosen, why, found, notes)


def _pipeline(asked: str, needs: Sequence[str], has_data: bool, blocks: Sequence[str]) -> tuple[str, str]:
    """Which pipeline, and why."""
    if "needed" in needs and not has_data:
        raise DataError(
            "the recipe has static activation scales, which are found by watching data. Give a dataset, or use a scheme "
            "with dynamic activations."
        )
    if asked == "data_free" and "needed" in needs:
        raise DataError("the recipe has static activation scales, so it cannot be run data_free.")
    if asked in ("basic", "sequential") and not has_data:
        raise DataError(f"the {asked} pipeline runs data through the model. Give a dataset.")
    if asked == "sequential" and not blocks:
        raise ModelError("no repeated blocks were found in this model. Name them in sequential_targets, or use basic.")
    if asked != "auto":
        return asked, "asked for"
    if not has_data or ("needed" not in needs and "useful" not in needs):
        return "data_free", "weights are all there is to see" if "useful" not in needs else "no data was given"
    reason = "static activation scales" if "needed" in needs else "the importance of input channels"
    return "basic", f"one pass over the data shows all that is needed: {reason}"


def _blocks(model: nn.Module, names: Sequence[str], given: str | Sequence[str] | None) -> list[str]:
    if given is None:
        return largest_blocks(model, names)
    from scalewright.calibration.targets import Pattern

    patterns = [Pattern.of(each) for each in ([given] if isinstance(given, str) else given)]
    found = [
        name for name, module in model.named_modules() if name and any(each.means(name, module) for each in patterns)
    ]
    if not found:
        raise ModelError(f"sequential_targets: {given!r} matches no module.")
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _untie(model: nn.Module, layers: Sequence[WatchedLayer], notes: list[str]) -> None:
    """Give each quantised layer that shares its weight with another module a weight of its own."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    for layer in layers:
        weight = getattr(layer.module, "weight", None)
        others = [name for name in owners.get(id(weight), []) if name != layer.name]
        if isinstance(weight, nn.Parameter) and others:
            layer.module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
            owners[id(weight)].remove(layer.name)
            for config in (
                getattr(model, "config", None),
                getattr(getattr(model, "config", None), "text_config", None),
            ):
                if config is not None and hasattr(config, "tie_word_embeddings"):
                    config.tie_word_embeddings = False
            if hasattr(model, "all_tied_weights_keys"):
                model.all_tied_weights_keys = {}
            notes.append(f"{layer.name}: shared its weight with {', '.join(others)}, and has its own now.")


# ---- parts -----------------------------------------------------------------------------------------------------------


def load_model(
    model: nn.Module | str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model itself, or the one that a path or hub name stands for, in its own dtype."""
    if isinstance(model, nn.Module):
        return model if device is None else model.to(device)
    try:
        config, auto = _config_of(model, trust_remote_code)
        loaded: nn.Module = auto.from_pretrained(model, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(model, error) from None
    return loaded if device is None else loaded.to(device)


def empty_model(model: str | Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model that a path or hub name stands for, without its weights."""
    try:
        config, auto = _config_of(model, trust_remote_code)
        with torch.device("meta"):
            built: nn.Module = auto.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(model, error) from None
    return built


def _config_of(model: str | Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The configuration of a model, and the class that loads such models."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{model}: is quantised already. Give the original.")
    if getattr(config, "is_encoder_decoder", False):
        return config, transformers.AutoModelForSeq2SeqLM
    if hasattr(config, "vision_config"):
        return config, transformers.AutoModelForImageTextToText
    return config, transformers.AutoModelForCausalLM


def _cannot_load(model: str | Path, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    lines = str(error).strip().splitlines()
    return ModelError(f"{model}: cannot be loaded ({lines[0] if lines else type(error).__name__}).")


def _recipe(recipe: Any, scheme: str | None) -> Recipe:
    if recipe is not None and scheme is not None:
        raise RecipeError("a recipe and a scheme both say what to do. Keep one of them.")
    if recipe is None and scheme is None:
        raise RecipeError("nothing says what to do. Give a recipe or a scheme.")
    if scheme is not None:
        return Recipe.of(QuantizationModifier(scheme=scheme, targets=["Linear"], ignore=["re:(.*\\.)?lm_head$"]))
    return Recipe.of(recipe)


def _companions(model: Any, tokenizer: Any, *, trust_remote_code: bool) -> list[Any]:
    """The tokenizer or processor that belongs to the model, if there is one."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return [tokenizer]
    import transformers

    name = tokenizer if tokenizer is not None else model
    if isinstance(name, nn.Module):
        name = getattr(getattr(name, "config", None), "_name_or_path", "") or None
    if name is None:
        return []
    for auto in (transformers.AutoProcessor, transformers.AutoTokenizer):
        try:
            return [auto.from_pretrained(name, trust_remote_code=trust_remote_code)]
        except Exception:  # there is none of that kind
            continue
    return []


def _samples(dataset: Any, options: DataOptions, model: nn.Module, companions: Sequence[Any]) -> Samples:
    def tokenizer() -> Any:
        if not companions:
            raise DataError("data: there is text in it, and no tokenizer. Give tokenizer=, or token ids.")
        return getattr(companions[0], "tokenizer", companions[0])

    config = getattr(model, "config", None)
    vocab_size = getattr(config, "vocab_size", None) or getattr(
        getattr(config, "text_config", None), "vocab_size", None
    )
    return load_samples(dataset, options, tokenizer=tokenizer, vocab_size=vocab_size)


def _on_device(samples: Samples | None, model: nn.Module) -> list[dict[str, Any]]:
    if samples is None:
        return []
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return [
        {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
        for batch in samples.batches
    ]


def _say(notes: Sequence[str], strict: bool) -> None:
    if strict and notes:
        raise StrictError(notes[0])


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("scalewright", "torch", "transformers", "compressed-tensors")}


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
