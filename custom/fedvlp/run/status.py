"""``run_status.json``: its fields, and what they say in words. FLARE's console and `fedvlp jobs status` have the same.

``docs/design.md``, section 6, explains the fields to those who read the file with programs of their own. A command that
reads a status must not wait for torch: what writes it is in run/status_writer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FILE = "run_status.json"
SCHEMA = 1
"""Changes when a field changes its meaning or goes; a new field leaves it as it is."""

RUNNING, FINISHED, STOPPED, ABORTED, FAILED = "running", "finished", "stopped", "aborted", "failed"
"""Values of ``status``. A run is stopped by the quorum, by FLARE or by hand; aborted by a person through FLARE; failed
by an error."""

PROCESS_FAILED = "job process failed"
"""The ``state`` of a site for which FLARE ended the run."""

WHOLE, ENDED_EARLY, SITES_MISSING = 0, 1, 3
"""Exit codes of `fedvlp jobs status`; 2 is a command that was typed wrongly."""


def missing(status: Mapping[str, Any]) -> list[str]:
    """Which sites the run is without, and since when: "site-3 from round 2", "site-4 from the beginning"."""
    sites = status.get("sites", {})
    since = {name: entry["absent_since"] for name, entry in sites.items() if "absent_since" in entry}
    gone = [f"{name} from round {round}" for name, round in since.items()]
    # A site of the job that is no site of the run. One of the run is counted by its answers.
    return gone + [f"{name} from the beginning" for name in status.get("absent", ()) if name not in sites]


def summary(status: Mapping[str, Any]) -> str:
    """The status in a sentence, e.g. "completed without site-3 from round 2".

    Of a run that FLARE ended it is the cause alone: a site that is missing since an earlier round would look like it.
    """
    if "cause" in status:
        return f"ended by FLARE: {status['cause']}"
    without = f" without {', '.join(gone)}" if (gone := missing(status)) else ""
    if status["status"] == FINISHED:
        return f"completed{without}"
    at = status.get("under_way", status)
    where = f" in round {at['round']} of {status['num_rounds']}, {at['phase']}" if "num_rounds" in status else ""
    return f"{status['status']}{where}{',' * bool(where and without)}{without}"


def exit_code(status: Mapping[str, Any], alive: bool = True) -> int:
    """Of `fedvlp jobs status`. ``alive``: whether a process still works on a run that says that it is running."""
    if status.get("status") not in (RUNNING, FINISHED) or (status["status"] == RUNNING and not alive):
        return ENDED_EARLY
    return SITES_MISSING if missing(status) else WHOLE


def in_words(status: Mapping[str, Any]) -> list[str]:
    """The status for people: a sentence, then figures, then a line for every site."""
    lines = [status.get("summary") or summary(status)]
    if status.get("reason"):
        lines.append(status["reason"])
    figures = [f"{done} of {status['phases']} phases" for done in [status.get("phases_done")] if done is not None]
    if "seconds" in status:
        figures.append(f"{_duration(status['seconds'])} since it began")
    if "seconds_left" in status:
        figures.append(f"about {_duration(status['seconds_left'])} left")
    figures += _metrics(status, "loss", "val_r1_average", "val_r1_worst")
    if figures:
        lines.append(", ".join(figures))
    if under_way := status.get("under_way"):
        waits = ", ".join(under_way["waits_for"]) or "nobody"
        lines.append(f"now: round {under_way['round']}, {under_way['phase']}, waits for {waits}")
    lines += [_line(name, entry) for name, entry in status.get("sites", {}).items()]
    return lines + [f"{name}: {', '.join(status[name])}" for name in ("absent", "not_in_run") if status.get(name)]


def _line(site: str, entry: Mapping[str, Any]) -> str:
    said = [entry["state"]]
    if "absent_since" in entry:
        said.append(f"absent since round {entry['absent_since']}")
    if entry.get("dropped"):
        said.append(f"dropped in {entry['dropped']} phase{'s' * (entry['dropped'] > 1)}")
    said += _metrics(entry, "loss", "val_r1")
    return f"{site}: {', '.join(said)}" + (f": {entry['reason']}" if entry.get("reason") else "")


def _metrics(of: Mapping[str, Any], *names: str) -> list[str]:
    """Those of the metrics that there are, a recall in percent: "val R@1 worst 37.5 %"."""
    shown = {name: f"{of[name]:.4g}" for name in names if name in of}
    words = {name: name.replace("_r1", " R@1").replace("_", " ") for name in shown}
    return [f"{words[name]} {value}{' %' * (name != 'loss')}" for name, value in shown.items()]


def _duration(seconds: float) -> str:
    """In the two largest units: "95 s", "12 min", "3 h 20 min"."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def rounded(text: str) -> str:
    """The text with four digits of every number that has more than four decimals."""
    return re.sub(r"(?<![\d.])\d+\.\d{5,}(?![\d.])", lambda number: f"{float(number[0]):.4g}", text)
