"""What all pages are made with: jinja2, which writes text and escapes it, and plotly.js, which draws in the browser.

plotly.js is 4.8 MB, and travels compressed: browsers unpack it themselves (`DecompressionStream`), to a page of 2 MB.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs


def render(name: str, data: Any, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """The page `name`.html with its .css and .js, after what all pages share, plotly.js, and `data` to draw from."""
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(filters or {})
    return environment.get_template(f"{name}.html").render(
        style=Markup(_asset("drawing.css") + _asset(f"{name}.css")),
        script=Markup(_asset("drawing.js") + _asset(f"{name}.js")),
        data=Markup(as_script(data)),
        plotly=Markup(_packed_plotly()),
        **values,
    )


def as_script(data: Any) -> str:
    """JSON that can stand in a script tag, whatever is in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (files("scalewright.report") / name).read_text(encoding="utf-8")
