"""What the built-in reports' sentences say: by hand in every style, and together what the record's labels say."""

from __future__ import annotations

import numpy as np

from fedvlp.data.synthetic.cases import FINDINGS, FOURTEEN
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.reports import WrittenSentences

SPEC = SyntheticCohort(size=500, image_size=32, hard_site="site-5", labels="fourteen")


def test_by_hand() -> None:
    for sentence, said in [
            ("Small right pleural effusion", {"Pleural Effusion": 1}),
            ("There is no edema, effusion or pneumonia", {"Edema": 0, "Pleural Effusion": 0, "Pneumonia": 0}),
            ("Possible left effusion", {"Pleural Effusion": -1}),
            ("Right lower pneumonia cannot be excluded", {"Pneumonia": -1}),
            ("Bilateral pleural effusion, left pneumothorax", {
                "Pleural Effusion": 1, "Pneumothorax": 1, "Bilateral Pneumothorax": 0}),
            ("Small bilateral apical pneumothorax", {"Pneumothorax": 1, "Bilateral Pneumothorax": 1}),
            ("No acute cardiopulmonary abnormality", {}),
            ("The heart is normal in size", {"Cardiomegaly": 0}),
            ("Flattened diaphragms with hyperinflation", {"Hyperinflation": 1}),
            ("cxr ap: mild cardiomegaly; small rt pleural effusion; no pneumonia", {
                "Cardiomegaly": 1, "Pleural Effusion": 1, "Pneumonia": 0}),
        ]:  # fmt: skip
        labels = WrittenSentences(FOURTEEN).labels(sentence)
        assert {name: value for name, value in zip(FOURTEEN, labels, strict=True) if not np.isnan(value)} == said


def test_a_reports_sentences_say_together_what_the_record_is_labelled() -> None:
    """The five findings exactly, blanks included; of the others what is said, since a normal heart may go unsaid."""
    cohort = SPEC.build()
    assert cohort.sentences is not None
    said = np.full(cohort.labels.shape, np.nan, dtype=np.float32)
    for row, report in enumerate(cohort.reports):
        for _, labels in cohort.sentences(report):
            known = ~np.isnan(labels)
            assert np.isnan(said[row][known]).all() or np.array_equal(
                said[row][known & ~np.isnan(said[row])], labels[known & ~np.isnan(said[row])]
            ), "two sentences of one report contradict each other"
            said[row, known] = labels[known]
    np.testing.assert_array_equal(said[:, : len(FINDINGS)], cohort.labels[:, : len(FINDINGS)])
    spoken = ~np.isnan(said)
    np.testing.assert_array_equal(said[spoken], cohort.labels[spoken])
    assert spoken[:, len(FINDINGS) :].sum(axis=0).min() > 0, "every other label is spoken of somewhere"


def test_five_labels_have_five_columns() -> None:
    assert WrittenSentences(FINDINGS)("Mild pulmonary edema. Mild cardiomegaly.")[0][1].shape == (5,)
