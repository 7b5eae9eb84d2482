"""Prepares a data set: chooses its source by name and folder, and decodes its images once, into a cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvlp.data.cache_build import Building
from fedvlp.data.cohort import Cohort
from fedvlp.data.deid import Accepted, refuse_phi
from fedvlp.data.screening import Screened
from fedvlp.data.sources import SOURCES, FileSource
from fedvlp.run.config import choose, override


@dataclass(frozen=True)
class Prepared:
    """A data set that was read and decoded."""

    cohort: Cohort
    summary: dict[str, int]  # what is counted (rows, used, "skipped: <reason>") -> number
    built: dict[str, str]  # about the cache: size, decoded, speed
    skipped: Mapping[str, Sequence[str]]  # reason -> rows that were not used, by number or by name


def source_of(
    name: str, root: Path, out: Path, path: str | None, image_size: int, settings: Sequence[str]
) -> FileSource:
    """The source ``name`` with its files below ``root``, its cache in ``out``, and settings such as "labels=Edema".

    ``path`` is the table relative to ``root``; None: the collection lies in ``root`` as it was published.
    ``image_size`` is in pixels. Raises ValueError for an unknown source or setting, a ``root`` that is no folder, and
    one that lists what it lacks.
    """
    kind: Any = choose("source", name, "SOURCES", SOURCES)
    if image_size < 1:
        raise ValueError(f"--image-size is {image_size}; give the side of the decoded squares in pixels, e.g. 256")
    if not root.is_dir():
        raise ValueError("--root is not a folder; give the folder of the images")
    if not (path or kind.table):
        raise ValueError(f"source {name} has no usual table; give it with --path")
    given = {"image_size": image_size, "cache": str(out)}
    source: FileSource
    if path is None and hasattr(kind, "at"):
        source = kind.at(root, **given)
    else:
        source = kind(path=str(root / (path or kind.table)), root=str(root), **given)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set labels=Edema")
        source = override(source, key, value)
    return source


def prepared(
    source: FileSource,
    workers: int,
    progress: Callable[[int, int], None],
    accept: Accepted = False,
    look: Callable[[Screened], None] = lambda screened: None,
) -> Prepared:
    """Reads the data set and decodes what its cache lacks, in ``workers`` processes (0: as many as cores).

    ``progress`` is called with (rows ready, rows in all). Before any image is decoded, ``look`` is called with what the
    reports hold. Then PHIError is raised where they seem to identify people, unless that is accepted. Raises ValueError
    as the source does.
    """
    ready: list[tuple[float, int]] = []

    def tell(rows: int, total: int) -> None:
        ready.append((time.monotonic(), rows))
        progress(rows, total)

    screened = source.screen(building=Building(workers or os.cpu_count() or 1, tell))
    look(screened)
    refuse_phi(screened.phi, screened.records, accept)
    cohort, summary = screened.prepare()
    built = {"size": f"{source.image_size} x {source.image_size} pixels"}
    if not ready:
        return Prepared(cohort, summary, built | {"decoded": "nothing, the cache was there"}, screened.skipped)
    (began, before), (ended, after) = ready[0], ready[-1]
    built["decoded"] = f"{after - before} now" + (f", {before} in an earlier run" if before else "")
    built["speed"] = f"{(after - before) / max(ended - began, 1e-9):.1f} images per second"
    built["cache"] = f"{after * source.image_size**2 / 1e9:.3f} GB"
    return Prepared(cohort, summary, built, screened.skipped)
