"""The report of a run, in progress, stopped or finished: one HTML page, whose chapters are those with content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedvlp.core.checkpoint import save_text
from fedvlp.report import (
    audit,
    classifier,
    costs,
    figures,
    head,
    html,
    loss,
    public_set,
    records,
    retrieval,
    settings,
    sites,
    updates,
    weights,
    zero_shot,
)
from fedvlp.report.run import Run
from fedvlp.run import plugins
from fedvlp.run.folder import RunFolder

SECTIONS: dict[str, Callable[[Run], str]] = {
    "": head.section,
    "Retrieval": retrieval.section,
    "Films and the reports that they find": records.section,
    "Zero-shot by finding and site": zero_shot.section,
    "Sites": sites.section,
    "Loss": loss.section,
    "Site weights": weights.section,
    "Classifier": classifier.section,
    "Public set": lambda run: public_set.section(run.history, run.memory),
    "What an attacker learns": audit.section,
    "Bytes and seconds": costs.section,
    "Changes that sites sent": lambda run: updates.changes(run.history, run.sites, run.style),
    "Dropped updates": lambda run: updates.dropped(run.history),
    "All settings and versions": settings.section,
}
"""The page from top to bottom: heading, and what writes its HTML, "" for no chapter. Those of plugins come last."""


def write(folder: RunFolder, films: bool = False) -> Path:
    """Writes ``report.html`` into the run's folder and returns its path.

    With ``films``, which a person must ask for, ``report-films.html`` with films and reports of the records. Raises
    CheckpointError for damaged results, ValueError for films of a run that has not finished.
    """
    import matplotlib

    run = Run.read(folder, films)
    sections = plugins.table("SECTIONS", SECTIONS, wanted="")  # of installed plugins only what is in use already
    body = ""
    with matplotlib.rc_context(figures.RC):
        for title, section in sections.items():
            content = section(run)
            heading = f"<h2>{title}</h2>\n" if title else ""
            body += f"{heading}{content}\n" if content else ""
    path = folder.page(films)
    save_text(path, html.page(f"fedvlp: {run.setting('name') or 'run'} {folder.path.name}", body))
    return path
