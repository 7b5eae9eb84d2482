"""The report's sections on evaluations that a person asked for (`fedvlp evaluate`): linear probe and subgroups."""

from __future__ import annotations

from collections.abc import Sequence

from fedvlp.report import figures
from fedvlp.report.html import grid, number, table, text
from fedvlp.report.run import Run
from fedvlp.run import measurements
from fedvlp.run.measurements import PROBE, table_of

Lines = Sequence[dict[str, str]]

PROBE_NOTE = (
    "A logistic regression on the frozen image tower, trained on labels of the training split and judged on the test "
    "split. In brackets: 95 % bootstrap intervals over the test patients. Calibration error is the mean distance of a "
    "stated probability from the share that has the finding (Guo et al., 2017); 0 is best."
)
SUBGROUPS_NOTE = (
    "Test records of all sites by what the data set says of their patients. A subgroup of few patients has a wide "
    "interval, and a difference within the intervals shows nothing."
)


def linear_probe(run: Run) -> str:
    """Metrics and calibration of the linear probe, as HTML; "" where nobody measured it."""
    lines = table_of(run.folder, PROBE)
    if not lines:
        return ""
    rows = [
        [
            f"{line['train_on']} ({line['train_records']} records)",
            measurements.interval(line, "macro_auc", 3),
            measurements.interval(line, "accuracy", 1),
            number(float(line["majority_accuracy"])),
            f"{float(line['calibration_error']):.3f}",
        ]
        for line in lines
    ]
    head = ("trained on", "macro AUC", "accuracy, %", "accuracy of the most frequent answer, %", "calibration error")
    last = lines[-1]["train_on"]
    bins = [line for line in table_of(run.folder, f"{PROBE}-reliability") if line["train_on"] == last]
    curves = []
    for index, label in enumerate(dict.fromkeys(line["label"] for line in bins)):
        points = [(float(line["stated"]), float(line["happened"])) for line in bins if line["label"] == label]
        curves.append((label, points, figures.look(index)))
    drawing = figures.unit(f"Calibration, trained on {last}", curves, "stated probability", "share present")
    return f"<p>{text(PROBE_NOTE)}</p>{table(head, rows)}{grid(drawing, kind='cards')}"


def subgroups(run: Run) -> str:
    """Zero-shot and linear probe by subgroup of patients, as HTML; "" where nobody measured them."""
    rows = measurements.subgroups(run.folder)
    head = ("subgroup", "evaluation", "test records", "macro AUC", "accuracy, %")
    return f"<p>{text(SUBGROUPS_NOTE)}</p>{table(head, rows)}" if rows else ""
