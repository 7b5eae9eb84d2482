"""CANDID-PTX (Feng et al., 2021, doi:10.1148/ryai.2021210136): films, reports, outlined pneumothoraces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.deid import scan
from fedvlp.data.labels import by_name, names_of
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import Listing, Published, first_of, read_rows
from fedvlp.data.sources.table import BELOW_ROOT

SUFFIXES = ("", ".dcm", ".png", ".jpg")
ABSENT = "-1"  # stands for "no outline" in the column EncodedPixels


def outlines(source: str, rows: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Whether a film has an outlined pneumothorax in any of its ``rows`` (film, run lengths or -1), in their order.

    Raises ValueError for an outline that is neither.
    """
    outlined: dict[str, bool] = {}
    strange = 0
    for key, cell in rows:
        outline = cell.strip()
        strange += outline != ABSENT and not (outline and outline.replace(" ", "").isdigit())
        outlined[key] = outlined.get(key, False) or outline != ABSENT
    if strange:
        raise ValueError(f"{source} source: EncodedPixels of {strange} rows is neither run lengths nor {ABSENT}")
    return outlined


@dataclass(frozen=True)
class CandidPTXSource(Published):
    """``Pneumothorax_reports.csv`` (one row per outline) and the folder of the films, named by SOPInstanceUID.

    The cohort has one row per film. Pneumothorax is 1 where any of its rows has an outline, else 0; other findings are
    not labelled. The collection has no patient ids: two films of one patient count as two patients.
    """

    table: ClassVar[str] = "Pneumothorax_reports.csv"
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # Pneumothorax_reports.csv, or the CSV as .gz or .zip
    root: str | None = None  # folder of the films, with or without .dcm, .png, .jpg; None: text and labels alone
    labels: tuple[str, ...] | str = (
        "Pneumothorax",
    )  # the cohort's labels, in order; names other than Pneumothorax are nan
    min_report_words: int = 3  # films with shorter reports are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table, and the films in ``dataset/``, ``images/`` or beside it."""
        films = first_of(root, ["dataset", "images"]) or root
        return super().layout(root) | {"root": str(films)}

    def listing(self) -> Listing:
        """The films with text. Raises ValueError if columns are missing or an outline is neither run lengths nor -1."""
        rows = list(read_rows("candid_ptx", self.path, ("SOPInstanceUID", "EncodedPixels", "Report")))
        outlined = outlines("candid_ptx", [(row["SOPInstanceUID"], row["EncodedPixels"]) for row in rows])
        reports: dict[str, str] = {}
        for row in rows:
            reports.setdefault(row["SOPInstanceUID"], row["Report"])
        texts = {
            key: clean_report(report, self.min_report_words, self.min_sentence_words) for key, report in reports.items()
        }
        keys = [key for key, text in texts.items() if text]
        wanted = names_of(self.labels)
        values = np.array([[outlined[key]] for key in keys], dtype=np.float32).reshape(-1, 1)
        return Listing(
            source="candid_ptx",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[texts[key] for key in keys],
            labels=by_name(values, ("Pneumothorax",), wanted),
            names=wanted,
            splits=[""] * len(keys),
            files=None if self.root is None else [self._file(Path(self.root), key) for key in keys],
            left_out={"report empty or too short": len(texts) - len(keys)},
            phi=scan(reports.values(), reports),
        )

    @staticmethod
    def _file(root: Path, key: str) -> Path:
        """A film's file with any of ``SUFFIXES``; where none exists, a name that is then counted as missing."""
        candidates = [root / f"{Path(key).name}{suffix}" for suffix in SUFFIXES]
        return next((file for file in candidates if file.is_file()), candidates[0])
