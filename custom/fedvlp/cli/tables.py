"""What the command line shows of a run: a line per phase while it goes on, tables of the initial and trained model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedvlp.data.overview import label_counts, report_lengths, split_counts
from fedvlp.run.metrics import SERVER, by_site, overall

if TYPE_CHECKING:
    from rich.table import Table

    from fedvlp.data.cohort import Cohort

AREA = "/auc/"


def progress_line(record: dict[str, Any]) -> str:
    """One line per phase: loss, recall of the model it started from, seconds, who was dropped."""
    losses = [sum(v for n, v in metrics.items() if n.startswith("loss/")) for metrics in by_site(record).values()]
    parts = [f"round {record['round']:>3} {record['phase']:<9} {record['seconds']:6.1f} s"]
    if any(losses):
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    measured = overall(record)
    if "val/mean/r1/average" in measured:
        parts.append(f"val R@1 {measured['val/mean/r1/average']:.1f} (worst {measured['val/mean/r1/worst']:.1f})")
    own = record.get("server", {}).get("val/all/mean/r1")
    if own is not None:
        parts.append(f"server on the public set, val R@1 {own:.1f}")
    if record["dropped"]:
        parts.append("dropped: " + "; ".join(f"{site}: {why}" for site, why in sorted(record["dropped"].items())))
    return "  ".join(parts)


def prepared_tables(cohort: Cohort, summary: dict[str, int], built: dict[str, str]) -> list[Table]:
    """What became of a data set's rows: counts, splits, labels, lengths of reports. No text and no id of a record."""
    from rich.table import Table

    def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
        made = Table(title=title, title_justify="left")
        for place, column in enumerate(columns):
            made.add_column(column, justify="right" if place else "left")
        for row in rows:
            made.add_row(*map(str, row))
        return made

    splits, labels, lengths = split_counts(cohort), label_counts(cohort), report_lengths(cohort)
    made = [
        table("rows", ("what", "count"), (summary | {f"reports with {k}": n for k, n in cohort.phi.items()}).items()),
        table("splits", ("split", *splits["train"]), ((name, *counts.values()) for name, counts in splits.items())),
    ]
    if labels:
        columns = ("label", "positive", "negative", "uncertain", "blank")
        made.append(table("labels", columns, ((name, *counts.values()) for name, counts in labels.items())))
    if lengths:
        made.append(table("words in a report", [f"{q:.0%}" for q in lengths], [[f"{n:.0f}" for n in lengths.values()]]))
    return [*made, table("images", ("what", "value"), built.items())]


def summary_tables(name: str, figures: dict[str, dict[str, float]]) -> list[Table]:
    """Held-out retrieval over sites and areas under the ROC curve on the public set, as far as they were measured.

    ``figures``: as ``runs.summary`` gives them.
    """
    if not figures:
        return []
    areas = [key for key in figures["trained"] if key.startswith(SERVER) and AREA in key]
    recalls = any(not key.startswith(SERVER) for key in figures["trained"])
    return [*([_retrieval(name, figures)] if recalls else []), *([_areas(name, figures, areas)] if areas else [])]


def _retrieval(name: str, figures: dict[str, dict[str, float]]) -> Table:
    """In-batch where every site has a batch; the server's own model on the public set below."""
    from rich.table import Table

    keys = figures["trained"]
    split = "test" if any(key.startswith("test/") for key in keys) else "val"
    middle = "mean" if f"{split}/mean/r1/average" in keys else "all/mean"
    scope = "in batches of 32" if middle == "mean" else "whole set"
    table = Table(title=f"{name}: retrieval on the {split} split, {scope}, both directions, %")
    for column in ("model", "R@1 average", "R@1 worst site", "R@5 average", "R@5 worst site"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for label, key in (("initial", "initial"), (name, "trained")):
        cells = [figures[key].get(f"{split}/{middle}/r{k}/{kind}") for k in (1, 5) for kind in ("average", "worst")]
        table.add_row(label, *("n/a" if cell is None else f"{cell:.2f}" for cell in cells))
    own = [[figures[key].get(f"server/{split}/all/mean/r{k}") for k in (1, 5, 10)] for key in ("initial", "trained")]
    if None not in own[0] + own[1]:
        said = " to ".join("/".join(f"{value:.2f}" for value in values) for values in own)
        table.caption = f"server's model on the public set, whole set, R@1/5/10: {said}"
    return table


def _areas(name: str, figures: dict[str, dict[str, float]], keys: list[str]) -> Table:
    from rich.table import Table

    split = "test" if any(key.startswith(f"{SERVER}/test") for key in keys) else "val"
    keys = [key for key in keys if key.startswith(f"{SERVER}/{split}")]
    table = Table(title=f"{name}: area under the ROC curve on the public set's {split} split, %")
    table.add_column("model")
    for key in keys:
        table.add_column(key.partition(AREA)[2], justify="right")
    for label, of in (("initial", "initial"), (name, "trained")):
        cells: list[Any] = [figures[of].get(key) for key in keys]
        table.add_row(label, *("n/a" if cell is None else f"{100 * cell:.1f}" for cell in cells))
    return table
