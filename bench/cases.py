"""What is compared: the weights, the formats, the observers of both sides, and the measure that judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

MODEL = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories15M"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
THREADS = (1, 2)

# Formats travel to the workers as JSON: keywords of QuantizationArgs, or the name of a preset scheme.
Format = Mapping[str, Any]
INT4: Format = {"num_bits": 4, "strategy": "group", "group_size": 128}
INT4_CHANNEL: Format = {"num_bits": 4, "strategy": "channel"}
INT4_ASYMMETRIC: Format = {**INT4, "symmetric": False}
INT3: Format = {**INT4, "num_bits": 3}
INT2: Format = {**INT4, "num_bits": 2}
NVFP4: Format = {"preset": "NVFP4"}


@dataclass(frozen=True)
class Weights:
    """Some weight matrices, taken as one piece of work."""

    name: str
    dtype: str
    make: Callable[[], dict[str, Tensor]]
    group_size: int = 128

    def tensors(self) -> dict[str, Tensor]:
        """`weight.NAME` [R, C], and `inputs.NAME` [tokens, C] whose channels differ in strength."""
        torch.manual_seed(0)
        weights = {name: weight.to(DTYPES[self.dtype]) for name, weight in self.make().items()}
        tensors = {f"weight.{name}": weight for name, weight in weights.items()}
        for name, weight in weights.items():
            strength_C = torch.randn(weight.shape[1]).exp()
            tensors[f"inputs.{name}"] = (torch.randn(64, weight.shape[1]) * strength_C).to(weight.dtype)
        return tensors

    def fit(self, form: Format) -> Format:
        """The format with groups that divide these weights."""
        return {**form, "group_size": self.group_size} if "group_size" in form else form


@dataclass(frozen=True)
class Case:
    """One of our observers beside one of the peer's, both judged by `sum of w * |d| ** norm`."""

    name: str
    form: Format
    ours: str
    peer: str
    norm: float
    knobs: Mapping[str, Any] = field(default_factory=dict)
    is_weighted: bool = False

    @property
    def shared(self) -> tuple[Format, str, bool]:
        """Cases that agree in this are measured together, against one run of the peer."""
        return self.form, self.peer, self.is_weighted


def gaussian(rows: int, columns: int) -> Tensor:
    """Weights of a layer as it is initialised."""
    return torch.randn(rows, columns) * 0.02


def heavy_tailed(rows: int, columns: int) -> Tensor:
    """Student-t weights with four degrees of freedom; one in a thousand is 20 times as large."""
    values = torch.distributions.StudentT(4.0).sample((rows, columns)) * 0.02
    return torch.where(torch.rand(rows, columns) < 1e-3, values * 20, values)


def stories() -> dict[str, Tensor]:
    """Every Linear of the blocks of stories15M. Its output layer is the embedding table, which stays as it is."""
    with safe_open(MODEL / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


WEIGHTS = (
    *(Weights("Gaussian", dtype, lambda: {"w": gaussian(2048, 2048)}) for dtype in DTYPES),
    *(Weights("Student-t", dtype, lambda: {"w": heavy_tailed(2048, 2048)}) for dtype in DTYPES),
    Weights("stories15M", "fp32", stories, group_size=32),
)
MINMAX_WEIGHTS = (
    *(Weights("2048 x 2048", dtype, lambda: {"w": gaussian(2048, 2048)}) for dtype in DTYPES),
    *(Weights("8192 x 4096", dtype, lambda: {"w": gaussian(8192, 4096)}) for dtype in DTYPES),
)


def optimal(name: str, form: Format, peer: str) -> tuple[Case, Case]:
    """`optimal` with its defaults, and with plain squares, where the distance to the exact optimum is known."""
    return (
        Case(f"optimal {name}", form, "optimal", peer, norm=2.4),
        Case(f"optimal {name}, norm 2", form, "optimal", peer, norm=2, knobs={"norm": 2.0}),
    )


CASES = (
    Case("memoryless_mse int4", INT4, "memoryless_mse", "memoryless_mse", norm=2.4),
    *optimal("int4", INT4, "memoryless_mse"),
    Case("memoryless_mse int4 channel", INT4_CHANNEL, "memoryless_mse", "memoryless_mse", norm=2.4),
    Case("memoryless_mse int4 asymmetric", INT4_ASYMMETRIC, "memoryless_mse", "memoryless_mse", norm=2.4),
    *optimal("int4 asymmetric", INT4_ASYMMETRIC, "memoryless_mse"),
    *optimal("int3", INT3, "memoryless_mse"),
    *optimal("int2", INT2, "memoryless_mse"),
    Case("imatrix_mse int4", INT4, "imatrix_mse", "imatrix_mse", norm=3, is_weighted=True),
    Case("optimal int4 weighted, norm 2", INT4, "optimal", "imatrix_mse", 2, {"norm": 2.0}, is_weighted=True),
    Case("nvfp4_expanded_mse", NVFP4, "nvfp4_expanded_mse", "nvfp4_expanded_mse", norm=2.4),
    *optimal("NVFP4", NVFP4, "nvfp4_expanded_mse"),
)
MINMAX_OBSERVERS = ("memoryless_minmax", "static_minmax")
MINMAX_FORMATS: Mapping[str, Format] = {
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "channel": {"num_bits": 8, "strategy": "channel"},
    "groups of 128": INT4,
}
GROWTH_CASES = ("optimal int4, norm 2", "memoryless_mse int4", "optimal NVFP4")
GROWTH_MILLIONS = (1, 4, 16, 64)


def growing_weights(millions: int) -> Weights:
    """A Gaussian matrix with 2048 columns."""
    return Weights(f"{millions} M", "fp32", lambda: {"w": gaussian(millions * 512, 2048)})
