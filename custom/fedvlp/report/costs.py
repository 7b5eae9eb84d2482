"""The report's section on bytes and seconds."""

from __future__ import annotations

from fedvlp.report import figures
from fedvlp.report.figures import Points
from fedvlp.report.html import grid
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Bytes and seconds of each round."""
    if not run.history:
        return "<p>No phase is complete.</p>"
    traffic: dict[str, Points] = {"to sites": {}, "from sites": {}}
    seconds: dict[str, Points] = {}
    for record in run.history:
        added = [(seconds.setdefault(record["phase"], {}), record["seconds"])]
        for points, key in zip(traffic.values(), ("bytes_down", "bytes_up"), strict=True):
            added.append((points, record.get("bytes", {}).get(key, 0) / 1e6))
        for points, value in added:
            points[record["round"]] = points.get(record["round"], 0.0) + value
    down, up = (sum(points.values()) for points in traffic.values())
    took = sum(sum(points.values()) for points in seconds.values())
    said = f"Tensors: {down:,.1f} MB to sites, {up:,.1f} MB from sites. Phases: {took:,.1f} s."
    drawn = figures.stack("Megabytes per round, all sites", traffic) + figures.stack("Seconds per round", seconds)
    return f"<p>{said}</p>{grid(drawn)}"
