"""The report's section on bytes and seconds."""

from __future__ import annotations

from fedvlp.core.metric_names import BYTES_DOWN, BYTES_UP
from fedvlp.report import figures
from fedvlp.report.figures import Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Bytes and seconds of each round, as HTML; "" before there is one."""
    if not run.history:
        return ""
    down: Points = {}  # megabytes by round
    up: Points = {}
    seconds: dict[str, Points] = {}  # by phase
    for record in run.history:
        round, traffic = record["round"], record.get("bytes", {})
        of_phase = seconds.setdefault(record["phase"], {})
        of_phase[round] = of_phase.get(round, 0.0) + record["seconds"]
        down[round] = down.get(round, 0.0) + traffic.get(BYTES_DOWN, 0) / 1e6
        up[round] = up.get(round, 0.0) + traffic.get(BYTES_UP, 0) / 1e6
    megabytes = f"{sum(down.values()):,.1f} MB to sites, {sum(up.values()):,.1f} MB from sites"
    total = sum(sum(points.values()) for points in seconds.values())
    drawings = figures.stack("Megabytes per round, all sites", {"to sites": down, "from sites": up})
    drawings += figures.stack("Seconds per round", seconds)
    return f"<p>Tensors: {megabytes}. Phases: {total:,.1f} s.</p>{grid(drawings)}"
