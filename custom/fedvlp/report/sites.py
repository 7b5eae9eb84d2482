"""The report's section on the sites: training samples and answers."""

from __future__ import annotations

from fedvlp.report.html import ABSENT, table
from fedvlp.report.run import Run


def section(run: Run) -> str:
    """Training samples and answers of every site that trains."""
    total = sum(run.samples.values())
    rows = []
    for site in run.sites:
        records = [record for record in run.history if site in record["members"]]
        if records:
            count = run.samples.get(site, 0)
            share = f"{100 * count / total:.1f} %" if count else ABSENT
            rows.append([site, f"{count:,}", share, f"{sum(site in r['sites'] for r in records)} of {len(records)}"])
    head = "site", "training samples", "share", "phases answered"
    return table(head, rows) if rows else "<p>No site has answered so far.</p>"
