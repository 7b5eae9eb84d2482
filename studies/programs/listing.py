"""A table of the size of MIMIC-CXR: seconds and memory to list it, deal it to sites, and read its cache by index.

    python studies/programs/listing.py [--films 377110] [--size 32] [--sites 5] [--folder DIR] [--quick]

The tables, reports and films are generated in the published layout: 377,110 films of 227,835 studies of 65,379
patients, six in ten of them frontal. The films are hard links to a few small files, and the cache is filled with
stand-ins instead of decoded films: what decoding costs is in pipeline.py. Then, in a process of its own each time:

    first       the tables, reports and files are listed, the cache is filled, the cohort is built
    again       the same with the cache there, as every later start does it
    partition   Dirichlet over the labels, and the assignment written with its hash
    batches     100 batches of 64 in random order, each image found in the cache by its index

Seconds of the wall and of the processor, and the peak of resident memory of the process until then. The target is 4 GB
and 5 minutes for all but the first.
"""

from __future__ import annotations

import csv
import gzip
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import command_line, fresh_peak, machine, peak, rounded, say

from fedvlp.data import images
from fedvlp.data.cohort import Cohort
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.partition import dirichlet_partition, write_assignment
from fedvlp.data.sources.mimic_cxr import MIMICSource

MIMIC, STUDIES, PATIENTS = 377_110, 227_835, 65_379
LINKS = 60_000  # to one file; ext4 allows 65,000
VIEWS = ("PA", "AP", "LATERAL", "LL")
SHARES = (0.26, 0.39, 0.22, 0.13)
FINDINGS = """                                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 INDICATION:  Cough and fever for three days, question pneumonia.

 FINDINGS:

 The cardiac silhouette is of normal size. Film {number} shows a small left pleural effusion with
 adjacent atelectasis. There is no pneumothorax. The mediastinal contours are unremarkable and the
 osseous structures are intact.

 IMPRESSION:  Small left pleural effusion, without evidence of pneumonia.
"""


def generate(root: Path, films: int) -> None:
    """Writes the tables, the reports and the frontal films of ``films`` films."""
    rng = np.random.default_rng(0)
    studies, patients = max(4, films * STUDIES // MIMIC), max(2, films * PATIENTS // MIMIC)
    study = np.sort(np.concatenate([np.arange(studies), rng.integers(0, studies, films - studies)]))
    patient = np.sort(np.concatenate([np.arange(patients), rng.integers(0, patients, studies - patients)]))
    view = rng.choice(len(VIEWS), films, p=SHARES)
    split = np.where(rng.random(patients) < 0.98, "train", np.where(rng.random(patients) < 0.5, "validate", "test"))
    names = [(10_000_000 + 7 * int(p), 50_000_000 + int(s)) for s, p in enumerate(patient)]
    owners = zip(study.tolist(), view.tolist(), strict=True)
    rows = [(f"{row:08x}-{row * 7:08x}", *names[s], VIEWS[v]) for row, (s, v) in enumerate(owners)]
    columns = ("dicom_id", "subject_id", "study_id", "ViewPosition")
    extra = ("PerformedProcedureStepDescription", "Rows", "Columns", "StudyDate", "StudyTime", "ProcedureCodeMeaning")
    filling = ("CHEST (PA AND LAT)", 3056, 2544, 21_800_506, "213014.531", "CHEST (PA AND LAT)")
    _table(root / "mimic-cxr-2.0.0-metadata.csv.gz", (*columns, *extra), ((*row, *filling) for row in rows))
    splits = ((key, s, p, split[patient[number]]) for (key, p, s, _), number in zip(rows, study, strict=True))
    _table(root / "mimic-cxr-2.0.0-split.csv.gz", ("dicom_id", "study_id", "subject_id", "split"), splits)
    cells = rng.choice(np.array(["", "1.0", "0.0", "-1.0"]), (studies, len(CHEXPERT)), p=(0.7, 0.2, 0.07, 0.03))
    labelled = ((*name, *values) for name, values in zip(names, cells.tolist(), strict=True))
    _table(root / "mimic-cxr-2.0.0-chexpert.csv.gz", ("subject_id", "study_id", *CHEXPERT), labelled)
    _files(root, rows)


def _table(file: Path, columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> None:
    with gzip.open(file, "wt", compresslevel=1, newline="") as lines:
        csv.writer(lines).writerows([columns, *rows])


def _files(root: Path, rows: list[tuple[Any, ...]]) -> None:
    """The report of every study, and a link for every frontal film."""
    last = ""
    for number, (key, patient, study, view) in enumerate(rows):
        folder = root / "files" / f"p{patient}"[:3] / f"p{patient}" / f"s{study}"
        if str(folder) != last:
            folder.mkdir(parents=True, exist_ok=True)
            folder.with_suffix(".txt").write_text(FINDINGS.format(number=number))
            last = str(folder)
        if view in ("PA", "AP"):
            original = root / f"film-{number // LINKS}.jpg"
            if not original.exists():
                original.write_bytes(bytes(1000))
            os.link(original, folder / f"{key}.jpg")


def stand_in(file: Path, size: int, burned_in: str, colour: bool) -> np.ndarray:
    """In the place of a decoded film: a square whose grey levels are made of its name."""
    return np.resize(np.frombuffer(file.stem.encode(), dtype=np.uint8), (size, size))


class Stages:
    """Prints seconds and memory of one stage after the other."""

    def __init__(self, process: str) -> None:
        self.process = process
        fresh_peak()

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = work()
        say(
            {
                "process": self.process,
                "stage": stage,
                "seconds": rounded(time.perf_counter() - wall),
                "processor_seconds": rounded(time.process_time() - processor),
                "peak_gb": rounded(peak() / 1e9),
            }
        )
        return result


def start(process: str, root: Path, size: int, sites: int) -> None:
    """What a run does before it trains."""
    images.film = stand_in  # type: ignore[assignment]
    stage = Stages(process)
    source = MIMICSource(str(root), str(root), image_size=size, cache=str(root / "cache"))
    cohort: Cohort = stage("cohort", source.build)
    groups = np.asarray(cohort.studies)
    owner = stage("partition", partial(dirichlet_partition, cohort.labels, groups, sites, 1.0, 0))
    stage("assignment", partial(write_assignment, root / f"{process}.json", owner, list(cohort.ids), 0))
    rng = np.random.default_rng(0)
    chosen = [rng.integers(0, len(cohort), 64) for _ in range(100)]
    stage("batches", lambda: [cohort.images(rows).sum() for rows in chosen])
    say({"process": process, "records": len(cohort), "at sites": np.bincount(owner).tolist()})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--films", type=int, default=MIMIC)
    parser.add_argument("--size", type=int, default=32, help="side of the cached squares, pixels")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to generate; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="2,000 films: does everything run?")
    options = parser.parse_args()
    films = 2000 if options.quick else options.films
    say({**machine(), **vars(options)})
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-", dir=options.folder) as folder:
        began = time.perf_counter()
        generate(Path(folder), films)
        say({"generated": films, "seconds": rounded(time.perf_counter() - began)})
        context = multiprocessing.get_context("spawn")
        for process in ("first", "again"):
            child = context.Process(target=start, args=(process, Path(folder), options.size, options.sites))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{process} ended with exit code {child.exitcode}")


if __name__ == "__main__":
    main()
