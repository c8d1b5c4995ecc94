"""Commands that torchrun starts on several ranks: one of them speaks, and none waits for another that is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalewright.cli.options import run_option
from scalewright.cli.shown import failing_politely

if TYPE_CHECKING:
    from scalewright.calibration.distributed import Ranks

RankTimeout = Annotated[
    float,
    run_option(min=1, help="Seconds that ranks of torchrun wait for one that lives and does not come."),
]


@contextmanager
def shared_by_ranks(out: Path | None, *, timeout: float, device: str | None) -> Iterator[Ranks]:
    """Failing politely, on all ranks that torchrun has started, or alone."""
    from scalewright.calibration.distributed import joined_ranks

    held: list[Ranks] = []
    try:
        with (
            failing_politely(out, is_quiet=lambda: bool(held) and not held[0].speaks),
            _heeding_torchrun(held),
            joined_ranks(timeout=timeout, device=device) as ranks,
        ):
            held.append(ranks)
            yield ranks
    except typer.Exit as end:
        if held and held[0].count > 1:
            # The group is not left: that would wait for what is under way, and nobody may come any more.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.exit_code)
        raise


class _Ended(BaseException):
    """Somebody has asked this process to end."""


@contextmanager
def _heeding_torchrun(held: list[Ranks]) -> Iterator[None]:
    """When one rank has ended, torchrun asks the others to: there is time enough to say which it was."""

    def end(*_: Any) -> None:
        if not (held and held[0].is_ending):
            raise _Ended

    is_started = "TORCHELASTIC_RUN_ID" in os.environ
    before = signal.signal(signal.SIGTERM, end) if is_started else None
    try:
        yield
    except _Ended:
        raise KeyboardInterrupt from None
    finally:
        if is_started:
            signal.signal(signal.SIGTERM, before)
