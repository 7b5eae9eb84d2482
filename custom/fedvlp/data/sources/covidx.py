"""COVIDx 9A (Wang et al., 2020, https://arxiv.org/abs/2003.09871): films with one of three classes, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from fedvlp.data.labels import by_name, names_of
from fedvlp.data.sources.published import Listing, Published, first_of, require_items, undamaged
from fedvlp.data.sources.table import BELOW_ROOT

NAMES = ("No Finding", "Pneumonia", "COVID-19")
CLASSES = {"normal": 0, "pneumonia": 1, "COVID-19": 2}
"""Class in the lists: its index in ``NAMES``. Pneumonia is of other causes than COVID-19."""


class _Film(NamedTuple):
    patient: str
    file: str
    label: int  # index into NAMES
    split: str


@dataclass(frozen=True)
class COVIDxSource(Published):
    """``train_COVIDx9A.txt`` and ``test_COVIDx9A.txt`` (patient, file, class, source) and the folders train, test.

    The published split is train and test; validation patients are drawn from train (spec 10.2: 20 %). A patient's
    number counts within its source.
    """

    table: ClassVar[str] = "train_COVIDx9A.txt"

    path: str = field(metadata=BELOW_ROOT)  # the list of training films
    root: str | None = None  # folder of train/ and test/; None: labels alone, no image is read
    # the list of test films; None: test patients are drawn
    test_list: str | None = field(default=None, metadata=BELOW_ROOT)
    labels: tuple[str, ...] | str = NAMES  # the cohort's labels, in order; names that COVIDx has not are nan
    val_fraction: float = field(default=0.2, kw_only=True)  # of the patients

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Both lists and both folders."""
        require_items("covidx", root, [cls.table, "test_COVIDx9A.txt", "train", "test"])
        return {"path": str(root / cls.table), "root": str(root), "test_list": str(root / "test_COVIDx9A.txt")}

    def listing(self) -> Listing:
        """The films of both lists. Raises ValueError for a missing list, or lines of another form."""
        films = self._read(self.path, "train" if self.test_list else "")
        if self.test_list:
            films += self._read(self.test_list, "test")
        values = np.eye(len(NAMES), dtype=np.float32)[[film.label for film in films]].reshape(-1, len(NAMES))
        wanted = names_of(self.labels)
        keys = [f"{film.split or 'train'}/{film.file}" for film in films]
        return Listing(
            source="covidx",
            keys=keys,
            patients=[film.patient for film in films],
            studies=keys,
            reports=[""] * len(films),
            labels=by_name(values, NAMES, wanted),
            names=wanted,
            splits=["" if film.split == "train" else film.split for film in films],
            files=None if self.root is None else [Path(self.root) / key for key in keys],
        )

    @staticmethod
    def _read(path: str, split: str) -> list[_Film]:
        """The films of one list."""
        file = first_of(Path(path).parent, [Path(path).name])
        if file is None:
            raise ValueError("covidx source: a list of films is not a file")
        with undamaged("covidx", file):
            lines = [line.rsplit(None, 3) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if strange := sum(len(line) != 4 or line[2] not in CLASSES for line in lines):
            known = ", ".join(CLASSES)
            raise ValueError(
                f"covidx source: {strange} of {len(lines)} lines are not patient, file, class ({known}), source"
            )
        return [
            _Film(f"{source} {patient}", Path(name).name, CLASSES[kind], split) for patient, name, kind, source in lines
        ]
