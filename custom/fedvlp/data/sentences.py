"""Sentences as MedCLIP's unit of text (Wang et al., 2022, https://arxiv.org/abs/2210.10163), with labels of their own.

A sentence's labels come from a table (``sentence,<label>,...``) or from whoever wrote the report. Differs: a report
without a sentence of more than ``SHORT`` words is its own unit, with the study's labels; a record without a report gets
no sentence here, but may get a whole report before (data/report_imputation.py).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedvlp.data import delimited
from fedvlp.data.cohort import Cohort
from fedvlp.data.report_text import clean_report, sentences

SHORT = 4
"""Words. A sentence of so many, or fewer, is no unit of text."""

COLUMN = "sentence"
"""Column of a table of sentences; every other column is a label."""

Labelled = tuple[str, np.ndarray]
"""A sentence and its labels [L] float32: 1 present, 0 absent, -1 uncertain, nan not mentioned."""


def units(cohort: Cohort, row: int, report: str) -> list[Labelled]:
    """The units of text of a record's ``report``: its sentences of more than ``SHORT`` words, else all of it.

    Raises ValueError for a cohort whose sentences have no labels.
    """
    if cohort.sentences is None:
        raise ValueError(
            "site data: training on sentences (objective.sentences) needs labels of sentences, and this data set has "
            "none. Give data.sentence_table, or train on whole reports: objective.sentences=false"
        )
    long = [(text, labels) for text, labels in cohort.sentences(report) if len(text.split()) > SHORT]
    return long or [(report, cohort.labels[row])]


def cleaned(report: str) -> list[str]:
    """The sentences of a report as written, each as lower-case words; empty ones are left out."""
    return [text for sentence in sentences(report) if (text := clean_report(sentence, 1))]


class SentenceTable:
    """Labels of sentences by their words. A sentence that the table does not have is blank in every label."""

    def __init__(self, labels: dict[str, np.ndarray], width: int) -> None:
        self._labels = labels  # cleaned sentence -> [L]
        self._blank = np.full(width, np.nan, dtype=np.float32)
        self._reports: dict[str, tuple[str, ...]] = {}  # report as trained on -> its cleaned sentences

    def add(self, report: str, written: str) -> None:
        """Remembers the sentences of a ``report``, which has no full stops any more, from how it was ``written``."""
        self._reports[report] = tuple(cleaned(written))

    def __call__(self, report: str) -> list[Labelled]:
        """The sentences of a report, with their labels."""
        return [(text, self._labels.get(text, self._blank)) for text in self._reports.get(report, ())]


def read_sentence_table(path: Path, label_names: Sequence[str]) -> SentenceTable:
    """The table of a CSV with a column ``sentence`` and one for each of the L ``label_names``; others are ignored.

    Raises ValueError for a missing file or column, a lone quotation mark, a value that is none of 1, 0, -1 and empty,
    or a sentence that is there twice with different labels. Messages hold counts and numbers of rows and lines only.
    """
    if not path.is_file():
        raise ValueError("sentence table: the table (sentence_table) is not a file")
    rows = delimited.rows(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), "sentence table")
    header = [name.strip() for name in rows[0]] if rows else []
    if missing := [name for name in (COLUMN, *label_names) if name not in header]:
        raise ValueError(
            f"sentence table: none of its {len(header)} columns is {', '.join(map(repr, missing))}; its first line "
            "must name the column 'sentence' and every label of the data"
        )
    columns = [header.index(name) for name in label_names]
    labels: dict[str, np.ndarray] = {}
    for number, row in enumerate(filter(None, rows[1:]), start=1):
        cells = row + [""] * len(header)
        text = clean_report(cells[header.index(COLUMN)], 1)
        values = np.array([_value(cells[column], number) for column in columns], dtype=np.float32)
        if not np.array_equal(labels.setdefault(text, values), values, equal_nan=True):
            raise ValueError(
                f"sentence table: the sentence of row {number} (row 1 is below the header) is there before, with other "
                "labels; leave one of them"
            )
    return SentenceTable(labels, len(columns))


def _value(cell: str, row: int) -> float:
    values = {"": np.nan, "1": 1.0, "0": 0.0, "-1": -1.0, "1.0": 1.0, "0.0": 0.0, "-1.0": -1.0}
    if cell.strip() not in values:
        raise ValueError(
            f"sentence table: a label of row {row} is none of 1, 0, -1 and empty (row 1 is below the header)"
        )
    return float(values[cell.strip()])
