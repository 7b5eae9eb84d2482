"""The report's section on the sites: training samples and answers."""

from __future__ import annotations

from fedvlp.report.html import ABSENT, table
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Table of the training samples of every site that trains, and how often it answered, as HTML; "" before any."""
    total = sum(run.samples.values())
    rows = []
    for site in run.sites:
        records = [record for record in run.history if site in record["members"]]
        if records:
            count = run.samples.get(site, 0)
            share = f"{100 * count / total:.1f} %" if count else ABSENT
            answered = sum(site in record["sites"] for record in records)
            rows.append([site, f"{count:,}", share, f"{answered} of {len(records)}"])
    head = "site", "training samples", "share", "phases answered"
    return table(head, rows) if rows else ""
