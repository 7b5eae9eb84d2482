"""Result tables as CSV files and drawings as PNG files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import save_text


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
