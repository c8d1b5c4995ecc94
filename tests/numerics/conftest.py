"""Everything in this folder holds for the compiled loops and for torch alike."""

from __future__ import annotations

import pytest

from scalewright.numerics import native

COMPILED = native._module


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "_module", None)
    elif COMPILED is None:
        pytest.skip("the compiled loops are not there: install the package where there is a compiler")
    return str(request.param)
