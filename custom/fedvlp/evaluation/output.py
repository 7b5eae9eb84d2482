"""Result tables as CSV files and drawings as PNG files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import save_text
from fedvlp.evaluation.intervals import Interval


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A matplotlib Figure of ``width`` x ``height`` inches that needs no screen, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def write_png(path: Path, figure: Any) -> Path:
    """Writes ``<path>.png`` and returns its path."""
    file = path.with_suffix(".png")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
    """Writes ``<path>.csv`` atomically and returns its path."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    save_text(path.with_suffix(".csv"), text.getvalue())
    return path.with_suffix(".csv")


def write_table(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """Writes ``<path>.csv`` with a column for each key of the ``lines``, which all have the same; returns its path."""
    return write_csv(path, [list(lines[0]), *(list(line.values()) for line in lines)])


def columns_of(interval: Interval | None, value: str, bounds: str) -> dict[str, float | None]:
    """A figure's three cells under ``value``, ``<bounds>low`` and ``<bounds>high``; empty ones for None."""
    cells = [None, None, None] if interval is None else [interval.value, interval.low, interval.high]
    return dict(zip((value, f"{bounds}low", f"{bounds}high"), cells, strict=True))
