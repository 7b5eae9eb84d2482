"""Writes the report of each synthetic case: findings with side, zone and severity, denials, devices, normal remarks.

A finding is named if and only if its label is not blank: stated (1), hedged (-1) or denied (0); but for what the cohort
lets reports leave out (``omitted``), which no sentence then contradicts. Sites differ in layout, in preferred synonyms
and in how they word a negation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fedvlp.data.report_text import clean_report, sentences
from fedvlp.data.sentences import Labelled
from fedvlp.data.synthetic.cases import (
    CONSOLIDATION,
    DEVICES,
    EDEMA,
    EFFUSION,
    FINDINGS,
    PNEUMONIA,
    PNEUMOTHORAX,
    SAYABLE,
    SIDES,
    ZONES,
    Cases,
)

TERMS = {  # how a report may name each finding; the last word of a term is enough to recognise it
    EDEMA: ("pulmonary edema", "interstitial edema", "edema"),
    EFFUSION: ("pleural effusion", "effusion", "pleural effusion"),
    CONSOLIDATION: ("consolidation", "focal consolidation", "airspace consolidation"),
    PNEUMOTHORAX: ("pneumothorax", "pneumothorax", "pneumothorax"),
    PNEUMONIA: ("pneumonia", "pneumonia", "infectious pneumonia"),
}
SIZES = {  # mild, moderate, severe
    EDEMA: ("mild", "moderate", "severe"),
    EFFUSION: ("small", "moderate", "large"),
    CONSOLIDATION: ("mild", "moderate", "extensive"),
    PNEUMOTHORAX: ("small", "moderate", "large"),
    PNEUMONIA: ("mild", "moderate", "severe"),
}
STATED = {
    EDEMA: (
        "{size} {side} {zone} pulmonary edema",
        "there is {size} interstitial edema, {side} and {zone}",
        "{side} {zone} haze compatible with {size} edema",
    ),
    EFFUSION: (
        "{size} {side} pleural effusion{s}",
        "{a} {size} {side} pleural effusion{s} {is_are} present",
        "{side} effusion{s}, {size} in size, with a meniscus",
    ),
    CONSOLIDATION: (
        "{size} consolidation in {where}",
        "there is {size} airspace consolidation in {where}",
        "dense opacity with air bronchograms in {where}, {size} consolidation",
    ),
    PNEUMOTHORAX: (
        "{size} {side} {zone} pneumothorax",
        "{a} {size} {zone} pneumothorax is seen on {on}",
        "visceral pleural line on {on}, {size} {zone} pneumothorax",
    ),
    PNEUMONIA: (
        "{size} patchy opacities in {where}, consistent with pneumonia",
        "there is {size} pneumonia in {where}",
        "ill-defined patches in {where}, {size} pneumonia",
    ),
}
HEDGED = ("possible {what}", "{what} cannot be excluded", "questionable {what}, correlate clinically")
DENIED = ("no {list}", "there is no {list}", "no evidence of {list}")
WHERE = (("the {side} {zone} zone", "both {zone} zones"), ("the {side} {zone} lung", "the {zone} lungs bilaterally"))
HEART = (
    ("the heart is normal in size", "cardiac silhouette within normal limits", "normal heart size"),
    ("the heart is mildly enlarged", "mild cardiomegaly", "borderline to mild cardiac enlargement"),
    ("the heart is markedly enlarged", "marked cardiomegaly", "severe cardiac enlargement"),
)
VOLUME = (
    ("low lung volumes", "the lungs are underinflated"),
    ("the lungs are well expanded", ""),
    ("the lungs are hyperinflated", "flattened diaphragms with hyperinflation"),
)
DEVICE = (
    ("{side} chest pacemaker with lead in the right ventricle", "{side} sided cardiac pacemaker in place"),
    ("endotracheal tube in satisfactory position", "the tip of the endotracheal tube is above the carina"),
    ("{side} internal jugular central line with tip in the superior vena cava", "{side} central line in place"),
    ("nasogastric tube with tip in the stomach", "enteric tube courses below the diaphragm"),
    ("median sternotomy wires are intact", "sternal wires"),
)
NORMAL = ("no acute bony abnormality", "the bony thorax is intact", "mediastinal contours are unremarkable", "")
CLEAR = ("no acute cardiopulmonary abnormality", "no acute cardiopulmonary process", "no acute disease of the chest")
SHORT = (("there is ", ""), ("right", "rt"), ("left", "lt"), ("bilateral", "bilat"), ("the ", ""))
DEVICE_SAID = 0.75  # probability that a device on the image is in the report
HABIT = 0.65  # probability that a site uses its preferred wording, and not any


def write_reports(cases: Cases) -> tuple[str, ...]:
    """The report of every row, in the order of the table."""
    return tuple(_Writer(cases, row).report() for row in range(len(cases)))


def write_captions(cases: Cases, findings: Sequence[str]) -> tuple[str, ...]:
    """A caption of every row from a template, as photographs of eyes get them: "chest X-ray with mild edema and ...".

    It grades what the image shows, so that ``findings`` of F names have at most 4^F different captions.
    """
    kinds = [FINDINGS.index(name) for name in findings]
    return tuple(
        "chest film with "
        + " and ".join(f"{SIZES[kind][severity[kind]] if present[kind] else 'no'} {TERMS[kind][0]}" for kind in kinds)
        for present, severity in zip(cases.present.tolist(), cases.severity.tolist(), strict=True)
    )


class _Writer:
    """Writes the report of one row. Column k of the row's ``words`` decides choice k."""

    def __init__(self, cases: Cases, row: int) -> None:
        self.cases, self.row = cases, row
        self.style = cases.styles[cases.site[row]]
        self.words = cases.words[row].tolist()
        self.labels = cases.labels[row].tolist()
        self.omitted = {SAYABLE[thing] for thing in np.flatnonzero(cases.omitted[row])}
        self.said = [None if name in self.omitted else self.labels[f] for f, name in enumerate(FINDINGS)]

    def choose(self, options: Sequence[str], column: int) -> str:
        """One of ``options``: the site's preferred one with probability ``HABIT``, else any."""
        draw = self.words[column]
        if draw < HABIT:
            return options[self.style.words % len(options)]
        return options[int((draw - HABIT) / (1 - HABIT) * len(options))]

    def findings(self) -> list[str]:
        """A sentence for each finding that is visible."""
        sentences = []
        for finding in range(len(FINDINGS)):
            if self.said[finding] == 1:
                sentences.append(self.fill(self.choose(STATED[finding], finding), finding))
            elif self.said[finding] == -1:
                term = self.choose(TERMS[finding], finding)
                where = "{side} " if finding == EFFUSION else "{side} {zone} "
                what = self.fill(where + term, finding)
                sentences.append(self.choose(HEDGED, 5).format(what=what))
        return sentences

    def fill(self, template: str, finding: int) -> str:
        """The template with side, zone, severity and articles of this row's finding."""
        cases, row = self.cases, self.row
        side = SIDES[cases.side[row, finding]]
        zone = ZONES[finding][cases.zone[row, finding]]
        both = side == "bilateral"
        where = WHERE[int(self.words[6] < 0.5)][both].format(side=side, zone=zone)
        text = template.format(
            size=SIZES[finding][cases.severity[row, finding]],
            side=side,
            zone=zone,
            where=where,
            on="both sides" if both else f"the {side}",
            a="" if both and finding == EFFUSION else "a",
            s="s" if both else "",
            is_are="are" if both else "is",
        )
        return text.strip()

    def denials(self) -> list[str]:
        """The findings that are denied, in one sentence or one sentence each."""
        names = [self.choose(TERMS[f], 7) for f in range(len(FINDINGS)) if self.said[f] == 0]
        if not names:
            return []
        if self.style.words % 2:
            return [self.choose(DENIED, 8).format(list=name) for name in names]
        joined = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        return [self.choose(DENIED, 8).format(list=joined)]

    def devices(self) -> list[str]:
        """A sentence for each device that is reported."""
        cases, row = self.cases, self.row
        side = [SIDES[index] for index in cases.device_side[row]]
        carried = [d for d in range(len(DEVICES)) if cases.devices[row, d] and self.words[19 + d] < DEVICE_SAID]
        said = [d for d in carried if DEVICES[d] not in self.omitted]
        return [self.choose(DEVICE[device], 9).format(side=side[device]) for device in said]

    def incidental(self) -> list[str]:
        """Heart, lung volume, diaphragm, aorta, granuloma: if abnormal always; normal heart and volume sometimes."""
        cases, row, said = self.cases, self.row, set(SAYABLE) - self.omitted
        sentences = []
        if "heart" in said and (cases.heart[row] or self.words[18] < 0.6):
            sentences.append(self.choose(HEART[cases.heart[row]], 10))
        if "volume" in said and (cases.volume[row] != 1 or self.words[17] < 0.3):
            sentences.append(self.choose(VOLUME[cases.volume[row]], 11))
        if "diaphragm" in said and cases.raised[row]:
            sentences.append(f"elevated {SIDES[cases.raised[row] - 1]} hemidiaphragm")
        if "aorta" in said and cases.aorta[row]:
            sentences.append(self.choose(("calcified aortic knob", "aortic atherosclerosis with a prominent knob"), 12))
        if "granuloma" in said and cases.granuloma[row]:
            side, zone = divmod(int(cases.granuloma[row]) - 1, 3)
            spot = f"{SIDES[side]} {('upper', 'mid', 'lower')[zone]} zone"
            sentences.append(self.choose((f"calcified granuloma in the {spot}", f"small calcified nodule, {spot}"), 13))
        return sentences

    def view(self) -> str:
        """The projection, AP or PA."""
        bedside = ("portable AP view of the chest", "AP bedside radiograph")
        upright = ("PA view of the chest", "upright PA radiograph")
        return self.choose(bedside if self.cases.ap[self.row] else upright, 14)

    def impression(self) -> str:
        """The findings labelled 1 in short, in the order of ``FINDINGS``; "as above" where there are none."""
        seen = [f for f in range(len(FINDINGS)) if self.said[f] == 1]
        if not seen:
            return "as above"
        return ", ".join(self.fill(f"{{side}} {TERMS[f][0]}", f) for f in seen)

    def report(self) -> str:
        """The report in the site's layout."""
        present, denied, devices, other = self.findings(), self.denials(), self.devices(), self.incidental()
        normal = self.choose(NORMAL, 15)
        clear = [] if {1.0, -1.0} & set(self.labels) else [self.choose(CLEAR, 16)]
        if self.style.report == "sections":
            body = _sentences([*present, *denied, *other, *devices, normal])
            summary = _sentences(clear or [self.impression()])
            return f"EXAM: {_sentences([self.view()])}\nFINDINGS: {body}\nIMPRESSION: {summary}"
        if self.style.report == "list":
            lines = _sentences([*devices, *present, *denied, *other, *clear], "\n").split("\n")
            return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        if self.style.report == "impression":
            return f"IMPRESSION: {_sentences([*present, *clear, *denied, *devices, *other])}"
        if self.style.report == "terse":
            text = "; ".join(filter(None, [*other, *present, *denied, *devices])).lower()
            for long, short in SHORT:
                text = text.replace(long, short)
            return f"cxr {'ap' if self.cases.ap[self.row] else 'pa'}: {text}"
        return _sentences([self.view(), *devices, *other, *present, *denied, *clear, normal])


def _sentences(phrases: Sequence[str], separator: str = " ") -> str:
    """The phrases as sentences: capitalised, with a full stop. Empty phrases are left out."""
    return separator.join(phrase[0].upper() + phrase[1:] + "." for phrase in phrases if phrase)


# What each sentence of a built-in report says: its labels, read from the words that ``reports`` writes.
#
# The wording is the cohort's own, so reading it back is exact; on a hospital's reports it would not be.

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
