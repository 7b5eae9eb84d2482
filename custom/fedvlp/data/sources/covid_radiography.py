"""COVID-19 Radiography (Rahman et al., 2021, doi:10.1016/j.compbiomed.2021.104319): films by class, a folder each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.labels import by_name, names_of
from fedvlp.data.sources.published import Listing, Published, require_items
from fedvlp.data.sources.table import BELOW_ROOT

NAMES = ("No Finding", "Pneumonia", "COVID-19", "Lung Opacity")
FOLDERS = {"Normal": 0, "Viral Pneumonia": 1, "COVID": 2, "Lung_Opacity": 3}
"""Folder: index of its class in ``NAMES``."""


@dataclass(frozen=True)
class COVIDRadiographySource(Published):
    """The folders COVID, Normal, Viral Pneumonia and Lung_Opacity, with the films in them or in their ``images/``.

    The collection has neither splits nor patient ids: splits are drawn, and two films of one patient count as two
    patients. Its normal films and lung opacities are RSNA's, so it is no other site than ``rsna``.
    """

    table: ClassVar[str] = "."

    path: str = field(metadata=BELOW_ROOT)  # the folder of the four folders
    root: str | None = None  # the same; None: labels alone, no image is read
    labels: tuple[str, ...] | str = NAMES  # the cohort's labels, in order; names that the collection has not are nan

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The four folders."""
        require_items("covid_radiography", root, FOLDERS)
        return {"path": str(root), "root": str(root)}

    def listing(self) -> Listing:
        """The films, by class and name. Raises ValueError that lists the folders that are missing or empty."""
        require_items("covid_radiography", Path(self.path), FOLDERS)
        films = {name: self._films(Path(self.path) / name) for name in FOLDERS}
        if empty := [name for name, files in films.items() if not files]:
            raise ValueError(f"covid_radiography source: no .png is in {', '.join(empty)}; unpack the whole archive")
        files = [file for name in FOLDERS for file in films[name]]
        classes = [index for name, index in FOLDERS.items() for _ in films[name]]
        keys = [f"{NAMES[index]}/{file.name}" for index, file in zip(classes, files, strict=True)]
        wanted = names_of(self.labels)
        return Listing(
            source="covid_radiography",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[""] * len(keys),
            labels=by_name(np.eye(len(NAMES), dtype=np.float32)[classes], NAMES, wanted),
            names=wanted,
            splits=[""] * len(keys),
            files=None if self.root is None else files,
        )

    @staticmethod
    def _films(folder: Path) -> list[Path]:
        """The films of a class; lung masks, in ``masks/``, are none."""
        images = folder / "images"
        return sorted((images if images.is_dir() else folder).glob("*.png"))
