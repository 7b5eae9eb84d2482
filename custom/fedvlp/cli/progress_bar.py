"""The bar below the lines of a run on a terminal: how far it is, the time left, its speed, the worst site so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedvlp.evaluation import metric_names as names
from fedvlp.run.metrics import by_site

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fedvlp.run.status_writer import Progress


class RunBar:
    """Nothing is shown where ``console`` is no terminal."""

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds = console, rounds
        self.worst = ""

    def note(self, record: dict[str, Any]) -> None:
        """Remembers the worst site of a record, if the record measured any."""
        recall = names.recall("val", 1)
        measured = {site: values[recall] for site, values in by_site(record).items() if recall in values}
        if measured:
            site = min(measured, key=lambda name: (measured[name], name))
            self.worst = f"worst site so far: {site}, R@1 {measured[site]:.1f}"

    @contextmanager
    def showing(self, progress: Progress) -> Iterator[None]:
        """The bar, while ``progress`` goes on."""
        if not self.console.is_terminal:
            yield
            return
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}", markup=False),  # names of sites
        )
        bar, speed = Bar(*columns, console=self.console, speed_estimate_period=600), _Speed()
        task = bar.add_task("", total=progress.total, more="")

        def drawn() -> RenderableType:
            now = speed(progress.steps())
            more = ", ".join(filter(None, (f"{now:.1f} steps/s" if now else "", self.worst)))
            bar.update(task, completed=progress.done(), description=self.said(progress), more=more)
            return bar.get_renderable()

        with Live(get_renderable=drawn, console=self.console, transient=True, refresh_per_second=2):
            yield

    def said(self, progress: Progress) -> str:
        """Where the run is, in words."""
        if not progress.phase:
            return "beginning"
        return (
            f"round {min(progress.round + 1, self.rounds)} of {self.rounds}, {progress.phase}: {progress.answered} of "
            f"{progress.asked} sites"
        )


class _Speed:
    """Steps a second of the phase under way."""

    def __init__(self) -> None:
        self._began, self._first, self._last = time.monotonic(), 0, 0

    def __call__(self, steps: int) -> float:
        """The speed since the phase began, at ``steps`` steps; 0 at its beginning."""
        now = time.monotonic()
        if steps < self._last:  # another phase
            self._began, self._first = now, steps
        self._last = steps
        return (steps - self._first) / (now - self._began) if now > self._began else 0.0
