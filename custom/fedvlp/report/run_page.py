"""The report of a run, in progress, stopped or finished: one HTML page, whose chapters are those with content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedvlp.core.checkpoint import save_text
from fedvlp.core.norm_statistics import AVERAGED
from fedvlp.report import classifier, evaluations, figures, html, opening, records, retrieval_section, sections
from fedvlp.report.html import ABSENT, text
from fedvlp.report.run import Run
from fedvlp.run import plugins
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import Record


def head(run: Run) -> str:
    """One screen: what happened, status, what to do next, metrics of the sites with baselines, as HTML."""
    last: Record = run.history[-1] if run.history else {"round": 0, "phase": "", "members": []}
    planned = f" of {run.setting('rounds.rounds')}" if run.config else ""
    done = [
        f"trained up to round {record['round'] + 1}{planned}, phase {record['phase']}" for record, _ in run.training
    ]
    where = done[-1] if done else "not trained yet"
    older = (
        bool(run.history)
        and "round" in run.status
        and (run.status["round"], run.status.get("phase")) != (last["round"], last["phase"])
    )
    status = run.status.get("status")
    if run.folder.model.exists():
        status = "finished"
    elif status in (None, "running") or older:
        status = "in progress or interrupted"
    out = "".join(f'<p class="lead">{text(sentence)}</p>' for sentence in opening.sentences(run))
    out += f"<p>{text(retrieval_section.DEFINITION)}</p>" if run.recalls else ""
    out += f'<p><span class="status">{text(status)}</span> {text(where)}{"; saved " * bool(run.saved)}{run.saved}.</p>'
    if run.status.get("reason"):
        out += f"<p>{'An earlier attempt ended with: ' if older else ''}{text(run.status['reason'])}</p>"
    cautions = [*([records.OWNERS_EYES] if run.films else []), *run.cautions]
    out += "".join(f'<p class="caution">{text(sentence[:1].upper() + sentence[1:])}.</p>' for sentence in cautions)
    if not run.config:
        return out + "<p>The folder has no config.json, so what was run is not known.</p>"
    facts = {"method": html.kind(run.setting("method")), "sites": _sites(run, last)}
    beside = f"<div>{retrieval_section.drawing(run)}{retrieval_section.next_steps(run)}</div>" if run.recalls else ""
    return html.grid(f"<div>{out}{html.pairs(facts)}</div>{beside}") + retrieval_section.at_a_glance(run)


def _sites(run: Run, last: Record) -> str:
    """The sites that took part in the last phase."""
    return ", ".join(site for site in run.sites if site in last["members"]) or "not known yet"


def settings(run: Run) -> str:
    """Normalisation and fingerprint, then all settings and versions, as HTML."""
    if not run.config:
        return sections.settings(run)
    facts = {
        "normalisation": _normalisation(run),
        "fingerprint": run.environment.get("fingerprint", "not recorded"),
    }
    return html.pairs(facts) + sections.settings(run)


def _normalisation(run: Run) -> str:
    """How the model normalises, and whose statistics its figures and its file are of."""
    heads = run.setting("model.head_norm") or ABSENT
    averaged = run.config.get("args", {}).get("norm_statistics", AVERAGED) == AVERAGED
    whose = "averaged over the sites" if averaged else "each site's own, estimated on its training records"
    saved = f"; in the model's file: {run.statistics}" if run.statistics else ""
    return f"heads: {heads}; batch statistics, if any: {whose}{saved}"


SECTIONS: dict[str, Callable[[Run], str]] = {
    "": head,
    "Test images and the reports retrieved for them": records.section,
    "Retrieval": retrieval_section.section,
    "Zero-shot by finding and site": sections.zero_shot,
    "Linear probe and calibration": evaluations.linear_probe,
    "Subgroups": evaluations.subgroups,
    "Sites": sections.sites,
    "Loss": sections.losses,
    "Site weights": sections.site_weights,
    "Classifier": classifier.section,
    "Public set": lambda run: sections.public_set(run.history, run.memory),
    "What an attacker learns": sections.attacks,
    "Bytes and seconds": sections.costs,
    "Changes that sites sent": lambda run: sections.changes(run.history, run.sites, run.style),
    "Dropped updates": lambda run: sections.dropped(run.history),
    "All settings and versions": settings,
}
"""The page from top to bottom: heading, and what writes its HTML, "" for no chapter. Those of plugins come last."""


def write(folder: RunFolder, films: bool = False) -> Path:
    """Writes ``report.html`` into the run's folder and returns its path.

    With ``films``, which a person must ask for, ``report-films.html`` with images and reports of the records. Raises
    CheckpointError for damaged results, ValueError for images of a run that has not finished.
    """
    import matplotlib

    run = Run.read(folder, films)
    chapters = plugins.table("SECTIONS", SECTIONS, wanted="")  # of installed plugins only what is in use already
    body = ""
    with matplotlib.rc_context(figures.RC):
        for title, section in chapters.items():
            content = section(run)
            heading = f"<h2>{title}</h2>\n" if title else ""
            body += f"{heading}{content}\n" if content else ""
    path = folder.page(films)
    save_text(path, html.page(f"fedvlp: {run.setting('name') or 'run'} {folder.path.name}", body))
    return path
