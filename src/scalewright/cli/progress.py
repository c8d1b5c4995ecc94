"""How far a run is, how fast it goes, and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from scalewright.cli.shown import err_console

_UNITS = {
    "smoothing": "tokens",
    "gathering": "tokens",
    "observing": "tokens",
    "calibrating": "tokens",
    "quantising": "layers",
    "weighing": "layers",
    "measuring": "groups",
    "evaluating": "tokens",
    "generating": "tokens",
}


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """Shows how far each phase is, how fast it goes, and the time left; nothing when not on a terminal."""
    if quiet or not err_console.is_terminal:
        yield lambda phase, what, done, total: None
        return
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    name = TextColumn("{task.fields[what]}", markup=False, table_column=rest)
    columns = (TextColumn("{task.description:11}"), BarColumn(10), _Pace(Column(no_wrap=True)), name)
    room = max(12, err_console.width - 56)
    with Progress(*columns, console=err_console, transient=True, expand=True) as progress:
        tasks: dict[str, TaskID] = {}

        def on_step(phase: str, what: str, done: int, total: int) -> None:
            what = what if len(what) <= room else f"…{what[1 - room :]}"  # the end of a layer's name says most
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total if phase in _UNITS else None, what=what)
            progress.update(tasks[phase], what=what, completed=done, total=total if done or phase in _UNITS else None)

        yield on_step


class _Pace(ProgressColumn):
    """`25 %, 2,310 tokens/s, 3 s left`; seconds alone where nothing is counted."""

    @override
    def render(self, task: Task) -> Text:
        unit = _UNITS.get(task.description)
        seconds = task.finished_time or task.elapsed or 0.0
        if unit is None or task.total is None:
            return Text(in_time(seconds))
        parts = [f"{task.percentage:3.0f} %"]
        if task.completed and seconds:
            speed = task.completed / seconds
            left = (task.total - task.completed) / speed
            parts.append(f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.1f} {unit}/s")
            parts.append(in_time(seconds) if task.finished else f"{in_time(left)} left")
        return Text(", ".join(parts))


def in_time(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 10 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
