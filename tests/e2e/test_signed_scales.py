"""Negative scales, in a checkpoint that transformers loads.

With `signed`, the observer `optimal` may give a negative scale to symmetric integers, so that the extra code on the
negative side serves the larger positive values. A loader need do nothing for it but multiply. That it does is shown
on a small random Llama, written by compressed-tensors and read by transformers: its logits are those of the model that
was quantised, and follow the sign in the file.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    fake_quantize,
)
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from scalewright.observers import Observer

# R rows, C columns of a weight; S scales of a row.

INT4_GROUPS = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
INT8_CHANNELS = QuantizationArgs(num_bits=8, strategy="channel")
INT8_TOKENS = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)


@dataclass(frozen=True)
class Scheme:
    weights: QuantizationArgs
    inputs: QuantizationArgs | None
    format: str


SCHEMES = {
    "W4A16": Scheme(INT4_GROUPS, None, "pack-quantized"),
    "W8A16": Scheme(INT8_CHANNELS, None, "pack-quantized"),
    "W8A8": Scheme(INT8_CHANNELS, INT8_TOKENS, "int-quantized"),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of logits whose spread is about 0.8


def tiny_llama(dtype: torch.dtype) -> torch.nn.Module:
    """A random model, the same at each call, made as the loader makes it: the rotary frequencies stay fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def linear_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def scales_of(weight: Tensor, args: QuantizationArgs, *, signed: bool) -> Tensor:
    observer = Observer.load_from_registry("optimal", base_name="weight", args=args, signed=signed)
    return observer(weight).get_qparams()["scale"]


def rounded(weight: Tensor, scale: Tensor, args: QuantizationArgs) -> Tensor:
    return fake_quantize(weight, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int8), args=args)


def lost(weight_RC: Tensor, scale_RS: Tensor, args: QuantizationArgs) -> float:
    """What the observer makes least where it knows nothing of the inputs, in float64.

    In bf16 the divisions of compressed-tensors add a quarter and more to it at 8 bits, which hides what the sign gains.
    """
    scale_RC = scale_RS.double().repeat_interleave(weight_RC.shape[1] // scale_RS.shape[1], dim=1)
    most = 2 ** (args.num_bits - 1)
    codes_RC = (weight_RC.double() / scale_RC).round().clamp(-most, most - 1)
    return float((codes_RC * scale_RC - weight_RC.double()).abs().pow(2.4).sum())


def logits_of(model: torch.nn.Module) -> Tensor:
    tokens = torch.randint(0, 128, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


def logits_with(weights: dict[str, Tensor], scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """The logits of the plain model with these weights, and its activations rounded as the scheme says."""

    def round_input(module, inputs):
        scale, zero_point = compute_dynamic_scales_and_zp(value=inputs[0], args=scheme.inputs, module=module)
        return fake_quantize(inputs[0], scale=scale, zero_point=zero_point, args=scheme.inputs)

    model = tiny_llama(dtype)
    for name, weight in weights.items():
        module = model.get_submodule(name)
        module.weight.data.copy_(weight)
        if scheme.inputs is not None:
            module.register_forward_pre_hook(round_input)
    return logits_of(model)


def save_compressed(scales: dict[str, Tensor], scheme: Scheme, dtype: torch.dtype, path: Path) -> None:
    """Write the random model with these scales, by the functions of compressed-tensors alone."""
    model = tiny_llama(dtype)
    group = QuantizationScheme(targets=["Linear"], weights=scheme.weights, input_activations=scheme.inputs)
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for name, scale in scales.items():
        model.get_submodule(name).weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=scheme.format)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model


def weights_in(stored: dict[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The weights that the tensors of a file mean, in plain arithmetic: code times scale."""
    found = {}
    for key, scale_RS in stored.items():
        name, _, kind = key.rpartition(".")
        if kind != "weight_scale":
            continue
        if scheme.format == "int-quantized":
            codes_RC = stored[f"{name}.weight"]
        else:
            bits = scheme.weights.num_bits
            shifts = torch.arange(0, 32, bits, dtype=torch.int32)
            words = stored[f"{name}.weight_packed"].unsqueeze(-1)
            codes_RC = ((words >> shifts) & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
        num_columns = codes_RC.shape[1] // scale_RS.shape[1]
        found[name] = codes_RC.to(scale_RS.dtype) * scale_RS.repeat_interleave(num_columns, dim=1)
    return found


@dataclass(frozen=True)
class Saved:
    """A checkpoint with negative scales, and what it was made from."""

    path: Path
    scheme: Scheme
    dtype: torch.dtype
    scales: dict[str, Tensor]
    rounded: dict[str, Tensor]

    @property
    def file(self) -> Path:
        return self.path / "model.safetensors"


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in SCHEMES for dtype in TOLERANCES],
    ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}",
)
def saved(request, tmp_path_factory):
    name, dtype = request.param
    scheme, path = SCHEMES[name], tmp_path_factory.mktemp("checkpoint")
    weights = linear_weights(tiny_llama(dtype))
    scales = {layer: scales_of(weight, scheme.weights, signed=True) for layer, weight in weights.items()}
    save_compressed(scales, scheme, dtype, path)
    rounded_weights = {layer: rounded(weight, scales[layer], scheme.weights) for layer, weight in weights.items()}
    return Saved(path, scheme, dtype, scales, rounded_weights)


def num_negative(tensors: dict[str, Tensor]) -> int:
    return sum(int((value < 0).sum()) for key, value in tensors.items() if key.endswith("weight_scale"))


def test_transformers_computes_the_logits_of_the_model_that_was_quantised(saved):
    expected = sum(int((scale < 0).sum()) for scale in saved.scales.values())
    assert expected > 0
    assert num_negative(load_file(saved.file)) == expected
    model = load(saved.path, saved.dtype)
    assert num_negative(model.state_dict()) == expected
    wanted = logits_with(saved.rounded, saved.scheme, saved.dtype)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=TOLERANCES[saved.dtype])


def test_transformers_follows_the_sign_of_a_scale_in_the_file(saved, tmp_path):
    stored = load_file(saved.file)
    key = next(key for key in sorted(stored) if key.endswith("weight_scale") and bool((stored[key] < 0).any()))
    stored[key].view(-1)[stored[key].argmin()] *= -1
    shutil.copy(saved.path / "config.json", tmp_path)
    save_file(stored, tmp_path / saved.file.name, metadata={"format": "pt"})

    logits = logits_of(load(tmp_path, saved.dtype))
    wanted = logits_with(weights_in(stored, saved.scheme), saved.scheme, saved.dtype)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=TOLERANCES[saved.dtype])
    before = logits_of(load(saved.path, saved.dtype))
    assert float((logits - before).abs().max()) > 10 * TOLERANCES[saved.dtype]


def test_the_file_means_code_times_scale(saved):
    found = weights_in(load_file(saved.file), saved.scheme)
    assert found.keys() == saved.rounded.keys()
    for layer, weight in found.items():
        torch.testing.assert_close(weight, saved.rounded[layer], rtol=0, atol=0)


def test_negative_scales_lose_less_than_positive_ones_alone(saved):
    args = saved.scheme.weights
    lost_signed = lost_unsigned = 0.0
    for layer, weight in linear_weights(tiny_llama(saved.dtype)).items():
        unsigned = scales_of(weight, args, signed=False)
        assert bool((unsigned > 0).all())
        lost_signed += lost(weight, saved.scales[layer], args)
        lost_unsigned += lost(weight, unsigned, args)
    # An eighth at 4 bits; at 8 bits one code more or less hardly matters.
    assert lost_signed < (0.9 if args.num_bits == 4 else 0.9995) * lost_unsigned
