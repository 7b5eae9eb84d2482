"""The report's sections on evaluations that a person asked for (`fedvlp evaluate`): linear probe and subgroups."""

from __future__ import annotations

from collections.abc import Sequence

from fedvlp.report import figures
from fedvlp.report.html import grid, number, table, text
from fedvlp.report.run import Run
from fedvlp.run.measurements import PROBE, ZERO_SHOT, folder_of, lines_of

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
    lines = _lines(run, PROBE)
    if not lines:
        return ""
    rows = [
        [
            f"{line['train_on']} ({line['train_records']} records)",
            _interval(line, "macro_auc", 3),
            _interval(line, "accuracy", 1),
            number(float(line["majority_accuracy"])),
            f"{float(line['calibration_error']):.3f}",
        ]
        for line in lines
    ]
    head = ("trained on", "macro AUC", "accuracy, %", "accuracy of the most frequent answer, %", "calibration error")
    last = lines[-1]["train_on"]
    bins = [line for line in _lines(run, f"{PROBE}-reliability") if line["train_on"] == last]
    curves = []
    for index, label in enumerate(dict.fromkeys(line["label"] for line in bins)):
        points = [(float(line["stated"]), float(line["happened"])) for line in bins if line["label"] == label]
        curves.append((label, points, figures.look(index)))
    drawing = figures.unit(f"Calibration, trained on {last}", curves, "stated probability", "share present")
    return f"<p>{text(PROBE_NOTE)}</p>{table(head, rows)}{grid(drawing, kind='cards')}"


def subgroups(run: Run) -> str:
    """Zero-shot and linear probe by subgroup of patients, as HTML; "" where nobody measured them."""
    probed = _lines(run, f"{PROBE}-subgroups")
    rows: list[list[object]] = [
        [f"{line['by']}: {line['subgroup']}", f"linear probe, {line['train_on']}", line["test_records"],
         _interval(line, "macro_auc", 3), _interval(line, "accuracy", 1)]
        for line in probed if line["train_on"] == probed[-1]["train_on"]
    ]  # fmt: skip
    rows += [
        [line["subgroup"], f"zero-shot, {line['model']} model", line["records"], _figure(line["macro_auc"], 3),
         _figure(line["accuracy"], 1)]
        for line in _lines(run, f"{ZERO_SHOT}-subgroups")
    ]  # fmt: skip
    rows.sort(key=lambda row: str(row[:2]))
    head = ("subgroup", "evaluation", "test records", "macro AUC", "accuracy, %")
    return f"<p>{text(SUBGROUPS_NOTE)}</p>{table(head, rows)}" if rows else ""


def _lines(run: Run, name: str) -> Lines:
    """The lines of a table of the run's own records; none where nobody measured it, or of another model."""
    return lines_of(run.folder, folder_of(run.folder) / f"{name}.csv", dict)


def _interval(line: dict[str, str], name: str, digits: int) -> str:
    value, low, high = (_figure(line[f"{name}{end}"], digits) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]" if line[name] else value


def _figure(value: str, digits: int) -> str:
    return f"{float(value):.{digits}f}" if value else figures.number(None)
