"""Draws the pictures of docs/: `make docs-tables` calls it, too.

The flow and the shapes are drawn; numbers are those of a layer of `examples/demo_model`, found by the observers
themselves. Each picture has its own ground, light or dark as the reader's system asks, so it can be read on any page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from safetensors import safe_open
from torch import Tensor

from scalewright.observers import Observer

ROOT = Path(__file__).resolve().parents[1]
DOCS, MODEL = ROOT / "docs", ROOT / "examples" / "demo_model" / "model.safetensors"
LAYER, ROW, GROUP = "model.layers.2.mlp.up_proj.weight", 3, 32

STYLE = """
svg { --ground: #ffffff; --ink: #1f2933; --faint: #52606d; --line: #cbd2d9; --soft: #f1f5f9;
      --a: #0b6bcb; --b: #d9730d; --c: #2f855a; --d: #7c3aed; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #1c2128; --ink: #e6edf3; --faint: #9aa7b4; --line: #3d4752; --soft: #262d36;
        --a: #58a6ff; --b: #f0a35e; --c: #56c288; --d: #b392f0; } }
text { fill: var(--ink); font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
.faint { fill: var(--faint); } .bold { font-weight: 600; } .mid { text-anchor: middle; } .end { text-anchor: end; }
.mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.box { fill: var(--soft); stroke: var(--line); } .line { stroke: var(--line); fill: none; }
.way { stroke: var(--faint); stroke-width: 1.6; fill: none; marker-end: url(#tip); }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); }
"""


class Picture:
    """An SVG that grows by what is drawn on it."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.width, self.height = width, height
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<defs>{tip}<path d="M0 0L8 4L0 8z" class="faint"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="var(--ground)"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", *, size: float = 13) -> None:
        """A line of text."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size:g}">{escape(words)}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str = "box", *, opacity: float = 1, rx: float = 0
    ) -> None:
        """A filled box."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx:g}" class="{kind}" '
            f'opacity="{opacity:.3g}"/>'
        )

    def path(self, way: str, kind: str = "line") -> None:
        """A line, or an arrow of the kind `way`."""
        self.parts.append(f'<path d="{way}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, *, radius: float = 3) -> None:
        """A point."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def card(self, x: float, y: float, width: float, lines: Sequence[str], *, height: float = 0) -> None:
        """A box whose first line is bold."""
        self.rect(x, y, width, height or 18 + 18 * len(lines), rx=8)
        for i, line in enumerate(lines):
            self.text(
                x + width / 2, y + 23 + 18 * i, line, "mid bold" if i == 0 else "mid faint", size=14 if i == 0 else 12
            )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


# ---- the flow -------------------------------------------------------------------------------------------------------


def flow() -> Picture:
    """From a model to a checkpoint."""
    p = Picture("From a model, a recipe and text to a checkpoint", 880, 332)
    p.card(20, 24, 170, ["model", "a folder, a hub name,", "or an object in memory"])
    p.card(20, 130, 170, ["recipe", "a scheme's name, YAML,", "JSON or objects"])
    p.card(20, 236, 170, ["text", "files, datasets, tokens;", "only where it is needed"])
    p.card(250, 130, 150, ["plan", "which layers, which", "observers, which way"])
    for y in (60, 166, 272):
        p.path(f"M190 {y} C 220 {y}, 220 166, 248 166", "way")
    p.rect(460, 24, 190, 284, "box", rx=8)
    p.text(555, 48, "block by block", "mid bold", size=14)
    for i, (head, rest) in enumerate(
        (
            ("observe", "weights, inputs, keys, values"),
            ("search", "the scale that loses least"),
            ("round", "to nearest, or GPTQ"),
            ("show", "the next block what is left"),
        )
    ):
        y = 64 + 60 * i
        p.rect(474, y, 162, 46, "box", rx=6)
        p.text(555, y + 19, head, "mid bold")
        p.text(555, y + 36, rest, "mid faint", size=11)
        if i < 3:
            p.path(f"M555 {y + 46} L 555 {y + 58}", "way")
    p.path("M400 166 L 458 166", "way")
    p.card(710, 24, 150, ["checkpoint", "compressed-tensors:", "vLLM, transformers"])
    p.card(710, 130, 150, ["figures", "each layer's error,", "notes, the recipe"])
    p.card(710, 236, 150, ["OUT.partial", "finished layers: a", "stopped run goes on"])
    for y in (60, 166, 272):
        p.path(f"M650 166 C 680 166, 680 {y}, 708 {y}", "way")
    return p


def observing() -> Picture:
    """Values, statistics, qparams."""
    p = Picture("An observer turns values into statistics, and statistics into qparams", 820, 176)
    p.card(20, 16, 190, ["value", "a weight, an activation,", "q, k or v"])
    p.card(20, 100, 190, ["another's statistics", "an observer, or other ranks"])
    p.card(330, 46, 170, ["statistics", "min_vals, max_vals,", "counts, sums"])
    p.card(620, 46, 180, ["qparams", "scale, zero_point,", "global_scale"])
    p.path("M210 52 C 270 52, 270 82, 328 82", "way")
    p.path("M210 127 C 270 127, 270 82, 328 82", "way")
    p.path("M500 82 L 618 82", "way")
    p.text(268, 40, "observer(value)", "mid mono faint", size=11)
    p.text(268, 146, "merge, sync", "mid mono faint", size=11)
    p.text(559, 72, "get_qparams()", "mid mono faint", size=11)
    return p


# ---- real numbers ---------------------------------------------------------------------------------------------------


def real_weight() -> Tensor:
    """A layer of the demo model."""
    with safe_open(MODEL, "pt") as file:
        weight: Tensor = file.get_tensor(LAYER)
    return weight.float()


def found(name: str, args: QuantizationArgs, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Qparams that an observer finds, and the weight as it is read back."""
    qparams = Observer.load_from_registry(name, base_name="weight", args=args)(weight).get_qparams()
    return qparams, fake_quantize(weight, args=args, **qparams)


def group_that_gains(weight: Tensor, args: QuantizationArgs) -> tuple[int, Tensor]:
    """The row whose first group gains most by the search, and that group."""
    groups = weight[:, :GROUP].contiguous()
    before, after = (
        (found(name, args, groups)[1] - groups).square().sum(1) for name in ("memoryless_minmax", "optimal")
    )
    row = int((after / before).argmin())
    return row, groups[row : row + 1]


def scales() -> Picture:
    """One group of real weights on two grids: min-max's and the best."""
    args = QuantizationArgs(num_bits=3, strategy="group", group_size=GROUP)
    row, group = group_that_gains(real_weight(), args)
    reach = float(group.abs().max()) * 1.3
    p = Picture("The same 32 weights on the grid of min-max, and on the grid that loses least", 820, 312)

    def at(value: float) -> float:
        return 410 + value / reach * 390

    p.text(
        20, 30, f"32 weights of the demo model ({LAYER.removesuffix('.weight')}, row {row}) in 3 bits", "bold", size=14
    )
    for place, (name, kind) in enumerate((("memoryless_minmax", "b"), ("optimal", "a"))):
        y = 94 + 118 * place
        qparams, restored = found(name, args, group)
        scale, error = float(qparams["scale"]), float((restored - group).square().sum())
        p.text(20, y - 26, "min-max" if place == 0 else "optimal", f"bold {kind}")
        p.text(100, y - 26, f"scale {scale:.4f}, squared error {error:.4f}", "faint")
        for code in range(-4, 4):
            x = at(code * scale)
            p.path(f"M{x:.1f} {y - 6} L {x:.1f} {y + 34}")
            p.text(x, y + 50, str(code), "mid faint", size=11)
        for value, kept in zip(group[0].tolist(), restored[0].tolist(), strict=True):
            p.path(f"M{at(value):.1f} {y + 2} L {at(kept):.1f} {y + 28}")
            p.dot(at(value), y + 2, kind)
            p.dot(at(kept), y + 28, kind, radius=2.2)
    p.text(
        *(
            20,
            298,
            "Above: the weights. Below: what is read back. A smaller step clips the ends, and loses less.",
            "faint",
        ),
        size=12,
    )
    return p


def strategies() -> Picture:
    """Which elements share a scale."""
    p = Picture("Which elements of a weight share a scale, strategy by strategy", 860, 250)
    rows, columns, cell = 8, 16, 11
    kinds = {
        "tensor": ("(1,)", lambda r, c: 0),
        "channel": ("(R, 1)", lambda r, c: r),
        "group": ("(R, C/g)", lambda r, c: r * 4 + c // 4),
        "block": ("(R/b, C/b)", lambda r, c: (r // 4) * 4 + c // 4),
    }
    for i, (name, (shape, owner)) in enumerate(kinds.items()):
        left = 24 + 210 * i
        p.text(left, 34, name, "bold", size=14)
        p.text(left + 176, 34, shape, "end mono faint", size=12)
        for r in range(rows):
            for c in range(columns):
                number = owner(r, c)
                row, column = (number // 4, number % 4) if name in ("group", "block") else (number, 0)
                kind = "abcd"[(row + column) % 4]
                p.rect(left + c * cell, 48 + r * cell, cell - 1.5, cell - 1.5, kind, opacity=0.85)
    told = (
        ("one scale for all", ""),
        ("one for each row", "(output channel)"),
        ("one for g columns", "of a row"),
        ("one for each", "rectangle"),
    )
    for i, lines in enumerate(told):
        for j, line in enumerate(lines):
            p.text(24 + 210 * i, 162 + 17 * j, line, "faint", size=12)
    p.text(
        24,
        206,
        "Activations: tensor (one static scale), token (one for each token, found while the model runs), group.",
        "",
        size=12,
    )
    p.text(
        24,
        228,
        "tensor_group (NVFP4) is group, with a global scale for the whole tensor above the groups' scales.",
        "",
        size=12,
    )
    return p


def zero_points() -> Picture:
    """Symmetric and affine int4 on values that are not round 0."""
    torch.manual_seed(0)
    values = (torch.rand(1, 24) * 1.5 - 0.25).sort().values
    p = Picture("A grid that is symmetric round zero, and one with a zero point", 820, 262)
    p.text(20, 30, "24 values from -0.25 to 1.25 in 4 bits", "bold", size=14)
    for row, symmetric in enumerate((True, False)):
        args = QuantizationArgs(num_bits=4, strategy="channel", symmetric=symmetric)
        qparams, restored = found("memoryless_minmax", args, values)
        scale, zero = float(qparams["scale"]), int(qparams["zero_point"])
        y, kind = 94 + 92 * row, "ba"[row]
        error = float((restored - values).square().sum())
        p.text(20, y - 26, "symmetric" if symmetric else "with a zero point", f"bold {kind}")
        p.text(160, y - 26, f"scale {scale:.4f}, zero point {zero}, squared error {error:.4f}", "faint")

        def at(value: float) -> float:
            return 410 + value / 1.4 * 380

        for code in range(-8, 8):
            x = at((code - zero) * scale)
            p.path(f"M{x:.1f} {y - 6} L {x:.1f} {y + 22}")
            p.text(x, y + 38, str(code), "mid bold" if code == zero else "mid faint", size=11)
        for value in values[0].tolist():
            p.dot(at(value), y + 8, kind)
    p.text(
        20,
        252,
        "Seven of the symmetric codes stand where there are no values. The bold code is the one that means 0.",
        "faint",
        size=12,
    )
    return p


def global_scale() -> Picture:
    """NVFP4: e2m1 codes, e4m3 scales of groups, an fp32 scale of the tensor."""
    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    weight = real_weight()[:, :128]
    qparams, restored = found("optimal", args, weight)
    group_scales = qparams["scale"][ROW].float()
    top = float(qparams["global_scale"])
    p = Picture("NVFP4: codes, scales of groups, and one global scale", 860, 250)
    p.text(20, 30, "NVFP4: one row of 128 weights, in groups of 16", "bold", size=14)
    p.text(20, 58, "codes, e2m1", "a bold")
    p.text(20, 128, "group scales, e4m3", "b bold")
    p.text(20, 188, "global scale, fp32", "c bold")
    most = float(weight[ROW].abs().max())
    for i in range(128):
        height = float(restored[ROW, i].abs()) / most * 34
        p.rect(170 + i * 5.2, 78 - height / 2, 4, max(height, 1), "a", opacity=0.9)
    for g, scale in enumerate(group_scales.tolist()):
        x = 170 + g * 16 * 5.2
        p.rect(x, 106, 16 * 5.2 - 4, 34, "b", opacity=0.25 + 0.6 * scale / float(group_scales.max()), rx=4)
        p.text(x + 40, 128, f"{scale:g}", "mid", size=12)
    p.rect(170, 166, 128 * 5.2 - 4, 34, "c", opacity=0.45, rx=4)
    p.text(170 + 330, 188, f"{top:.1f}, for the whole tensor; layers that loaders merge share it", "mid", size=12)
    p.text(
        20,
        232,
        "weight = code · group scale / global scale; the global scale is 448 · 6 / largest value, to use all of e4m3.",
        "faint",
        size=12,
    )
    return p


PICTURES = {
    "flow.svg": flow,
    "observing.svg": observing,
    "scales.svg": scales,
    "strategies.svg": strategies,
    "zero-points.svg": zero_points,
    "global-scale.svg": global_scale,
}


def main(names: Iterable[str] = PICTURES) -> int:
    """Draw them, and say which have changed."""
    torch.set_num_threads(1)
    for name in names:
        path, drawn = DOCS / name, str(PICTURES[name]())
        changed = not path.is_file() or path.read_text(encoding="utf-8") != drawn
        if changed:
            path.write_text(drawn, encoding="utf-8")
        print(f"docs/{name}: {'drawn' if changed else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
