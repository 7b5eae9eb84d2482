"""The figures of a run's records: by site, over sites, and as curves."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fedvlp.core.types import EVALUATE
from fedvlp.evaluation.retrieval import across_sites
from fedvlp.run.experiment import POOLED

Record = dict[str, Any]
"""What the server notes of one phase (federation/loop.py)."""
SERVER = "server"


def by_site(record: Record) -> dict[str, dict[str, float]]:
    """The metrics of a record by the site whose records they measure ("site-1:val/mean/r1" of a pooled run too)."""
    sites: dict[str, dict[str, float]] = {}
    for reporter, metrics in record["sites"].items():
        for name, value in metrics.items():
            about, _, metric = name.rpartition(":") if reporter == POOLED else ("", "", name)
            sites.setdefault(about or reporter, {})[metric] = value
    return sites


def is_retrieval(name: str) -> bool:
    """Whether a metric is a recall (percent, higher is better)."""
    return re.search(r"/r\d+$", name) is not None


def overall(record: Record) -> dict[str, float]:
    """Average, worst site and disparity over sites of every recall that all reporting sites have."""
    measured = {site: {n: v for n, v in m.items() if is_retrieval(n)} for site, m in by_site(record).items()}
    measured = {site: values for site, values in measured.items() if values}
    if not measured:
        return {}
    common = set.intersection(*(set(values) for values in measured.values()))
    return across_sites({site: {n: values[n] for n in sorted(common)} for site, values in measured.items()})


def scalars(record: Record) -> dict[str, dict[str, float]]:
    """Everything worth a curve, by site; the server's own under ``server``."""
    own: dict[str, float] = {"seconds": record["seconds"], **record.get("bytes", {}), **overall(record)}
    own |= record.get("server", {})
    sites = by_site(record)
    names = record["members"]
    for tensor, values in record["memory"].items():
        own |= {f"{tensor}/{site}": v for site, v in zip(names, values, strict=True) if math.isfinite(v)}
    return {SERVER: own, **sites}


def summary(history: list[Record]) -> dict[str, dict[str, float]]:
    """Held-out retrieval of the initial and of the trained model: over sites, and ``server/...`` on the public set."""
    measured = [figures for record in history if (figures := overall(record) | on_public_set(record))]
    return {"initial": measured[0], "trained": measured[-1]} if measured else {}


def on_public_set(record: Record) -> dict[str, float]:
    """Every recall and AUC of the server's model on the public set, as ``server/<name>``."""
    figures = record.get("server", {})
    return {f"{SERVER}/{name}": v for name, v in figures.items() if is_retrieval(name) or "/auc/" in name}


class TensorBoard:
    """Writes records as TensorBoard events, one folder per site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def __call__(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for site, values in scalars(record).items():
            if site not in self._writers:
                self._writers[site] = SummaryWriter(str(self.folder / site))
            for tag, value in values.items():
                self._writers[site].add_scalar(f"{tag}{suffix(record, tag)}", value, record["round"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def suffix(record: Record, tag: str) -> str:
    """Distinguishes the phases of a round where both have the curve."""
    per_phase = tag.startswith(("loss/", "update_norm/")) or tag in ("seconds", "bytes_down", "bytes_up")
    return f"/{record['phase']}" if per_phase and record["phase"] != EVALUATE else ""
