"""What each sentence of a built-in report says: its labels, read from the words that ``reports`` writes.

The wording is the cohort's own, so reading it back is exact; on a hospital's reports it would not be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fedvlp.data.report_text import clean_report, sentences
from fedvlp.data.sentences import Labelled
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.reports import TERMS

DENIAL = re.compile(r"^(there is )?no ")
HEDGE = re.compile(r"^possible |^questionable |cannot be excluded")
BOTH = re.compile(r"\b(bilateral|bilat)( \w+)? pneumothorax|\bon both sides\b")
NAMED = {name: TERMS[index][0].rpartition(" ")[2] for index, name in enumerate(FINDINGS)}  # the last word is enough
ALSO = {  # label of "fourteen" -> words that say it, words that say the opposite ("" for none)
    "Cardiomegaly": (r"enlarged|cardiomegaly|enlargement", r"normal in size|within normal limits|normal heart size"),
    "Hyperinflation": (r"hyperinflat", r"low lung volumes|underinflated|well expanded"),
    "Support Devices": (r"endotracheal tube|central line|nasogastric tube|enteric tube", ""),
    "Pacemaker": (r"pacemaker", ""),
    "Sternal Wires": (r"wires", ""),
    "Granuloma": (r"calcified granuloma|calcified nodule", ""),
    "Aortic Calcification": (r"aortic knob|aortic atherosclerosis", ""),
    "Elevated Left Diaphragm": (r"elevated (left|lt) hemidiaphragm", ""),
}


class WrittenSentences:
    """Labels of the sentences of the cohort's reports, for the ``label_names`` asked for."""

    def __init__(self, label_names: Sequence[str]) -> None:
        self._names = tuple(label_names)

    def __call__(self, report: str) -> list[Labelled]:
        """The sentences of a report, with their labels."""
        return [(clean_report(sentence, 1), self.labels(sentence)) for sentence in sentences(report)]

    def labels(self, sentence: str) -> np.ndarray:
        """Labels [L] of a sentence; the clauses of a telegraphic one, between semicolons, are read one by one."""
        said: dict[str, float] = {}
        for clause in sentence.lower().rpartition(": ")[2].split(";"):
            said |= _clause(clause.strip())
        return np.array([said.get(name, np.nan) for name in self._names], dtype=np.float32)


def _clause(clause: str) -> dict[str, float]:
    """Label -> value of every label that a clause speaks of."""
    value = 0.0 if DENIAL.search(clause) else -1.0 if HEDGE.search(clause) else 1.0
    said = {name: value for name, word in NAMED.items() if re.search(rf"\b{word}s?\b", clause)}
    if "Pneumothorax" in said:
        said["Bilateral Pneumothorax"] = value if value < 1 or BOTH.search(clause) else 0.0
    for name, (present, absent) in ALSO.items():
        if re.search(present, clause):
            said[name] = 1.0
        elif absent and re.search(absent, clause):
            said[name] = 0.0
    return said
