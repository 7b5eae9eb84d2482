"""What a person should look at before training on a data set: counts, labels, lengths of reports, sample images.

Nothing here repeats a report, an id or a path.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedvlp.core.checkpoint import save_bytes
from fedvlp.data.cohort import SPLITS, Cohort

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
TILE = 160  # side of a sample on the contact sheet, pixels
CAPTION = 44  # height of the text below a sample, pixels
LINES = 3  # of that text
LETTER = 11  # height of its letters, pixels
WIDTH = 25  # letters of a line of it
CUT = "…"  # ends what is longer


def split_counts(cohort: Cohort) -> dict[str, dict[str, int]]:
    """Split -> number of records, images, patients, studies and reports."""
    images, reports = cohort.has_image(), cohort.has_report()
    counts = {}
    for split in SPLITS:
        rows = cohort.rows(split)
        counts[split] = {
            "records": len(rows),
            "images": int(images[rows].sum()),
            "patients": len({cohort.patients[row] for row in rows}),
            "studies": len({cohort.studies[row] for row in rows}),
            "reports": int(reports[rows].sum()),
        }
    return counts


def label_counts(cohort: Cohort) -> dict[str, dict[str, int]]:
    """Label -> number of records that are positive (1), negative (0), uncertain (-1) and blank (nan)."""
    return {
        name: {
            "positive": int((column == 1).sum()),
            "negative": int((column == 0).sum()),
            "uncertain": int((column == -1).sum()),
            "blank": int(np.isnan(column).sum()),
        }
        for name, column in zip(cohort.label_names, cohort.labels.T, strict=True)
    }


def report_lengths(cohort: Cohort) -> dict[float, float]:
    """Quantile (0 to 1) -> number of words in a report, over the records with a report; empty without any."""
    words = [len(report.split()) for report in cohort.reports if report]
    if not words:
        return {}
    return dict(zip(QUANTILES, np.quantile(words, QUANTILES).tolist(), strict=True))


def ranges(rows: Sequence[str]) -> list[str]:
    """Compress consecutive row numbers into ranges, "7-9"; other names stay as they are."""
    runs: list[list[str]] = []
    for row in rows:
        if runs and row.isdecimal() and runs[-1][-1].isdecimal() and int(row) == int(runs[-1][-1]) + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def groups(cohort: Cohort) -> dict[str, np.ndarray]:
    """Rows [n] of every site, sorted by name; of every split where records have no site."""
    names = cohort.splits.tolist() if cohort.sites is None else cohort.sites
    order = SPLITS if cohort.sites is None else sorted(set(names))
    return {name: np.flatnonzero(np.asarray(names) == name) for name in order if name in names}


def word_counts(cohort: Cohort, rows: np.ndarray) -> np.ndarray:
    """Words [m] int64 in each report of these rows, those without a report left out."""
    return np.array([len(cohort.reports[row].split()) for row in rows if cohort.reports[row]], dtype=np.int64)


def grey_levels(cohort: Cohort, rows: np.ndarray, bins: int = 32, most: int = 200, seed: int = 0) -> np.ndarray | None:
    """Share [bins] of the pixels in each of ``bins`` equal steps of 0..255; None where no row has an image.

    Of more than ``most`` images, so many are drawn by ``seed``. Each counts alike; colours are averaged.
    """
    rows = rows[cohort.has_image()[rows]]
    if not len(rows):
        return None
    rows = np.sort(np.random.default_rng(seed).permutation(rows)[:most])
    total = np.zeros(bins)
    for chunk in np.array_split(rows, -(-len(rows) // 32)):
        for pixels in cohort.images(chunk):
            grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2)
            total += np.histogram(grey, bins=bins, range=(0, 256))[0] / grey.size
    return total / len(rows)


def stored_counts(cohort: Cohort) -> dict[str, Counter[str]]:
    """Site, or split, of :func:`groups` -> how files store its images -> images; without those that nobody noted."""
    stored, imaged = cohort.stored or ("",) * len(cohort), cohort.has_image()
    return {
        name: Counter(stored[row] for row in rows if imaged[row] and stored[row])
        for name, rows in groups(cohort).items()
    }


def repeated_reports(cohort: Cohort) -> tuple[int, int]:
    """How many reports stand word for word at more than one patient, and how many records have one of them."""
    patients: dict[str, set[str]] = {}
    for report, patient in zip(cohort.reports, cohort.patients, strict=True):
        if report:
            patients.setdefault(report, set()).add(patient)
    shared = {report for report, of_report in patients.items() if len(of_report) > 1}
    return len(shared), sum(report in shared for report in cohort.reports)


def subgroup_counts(cohort: Cohort, name: str, counted: np.ndarray | None = None) -> dict[str, dict[str, int]]:
    """Value of the subgroup ``name`` -> site, or split, of :func:`groups` -> records. "" where it is not known.

    ``counted`` [N] bool: the records to count; None: all.
    """
    of_rows = groups(cohort)
    values = cohort.subgroup(name)
    rows = np.ones(len(cohort), dtype=bool) if counted is None else counted
    order = sorted(set(values[rows].tolist()), key=lambda value: (value == "", value))
    return {
        value: {group: int((values[of_group][rows[of_group]] == value).sum()) for group, of_group in of_rows.items()}
        for value in order
    }


def caption(cohort: Cohort, row: int) -> str:
    """For a sample, in up to three lines: its split, site and subgroups such as the view; then the positive labels."""
    site = [] if cohort.sites is None else [cohort.sites[row]]
    known = [value for name in cohort.subgroup_names if (value := str(cohort.subgroup(name)[row]))]
    positive = [name for name, value in zip(cohort.label_names, cohort.labels[row], strict=True) if value == 1]
    taken = " ".join([str(cohort.splits[row]), *site, *known])
    lines = textwrap.wrap(taken, WIDTH, max_lines=2, placeholder=CUT)
    labels = textwrap.wrap(", ".join(positive), WIDTH, max_lines=LINES - len(lines), placeholder=CUT)
    return "\n".join([*lines, *labels])


def contact_sheet(
    cohort: Cohort, file: Path, samples: int, seed: int = 0, columns: int = 6, font: Path | None = None
) -> int:
    """Writes a PNG of up to ``samples`` images, drawn by ``seed``, each with its ``caption`` below.

    The file is for its owner alone. Returns how many images there are. The cohort must have at least one. Raises
    CheckpointError where it cannot be written. ``font``: a TrueType file; None: Pillow's own, which has no accents.
    """
    from PIL import Image, ImageDraw, ImageFont

    imaged = np.flatnonzero(cohort.has_image())
    rows = np.sort(np.random.default_rng(seed).permutation(imaged)[:samples])
    columns = max(1, min(columns, len(rows)))
    lines = -(-len(rows) // columns)  # rounded up
    kind, white = ("L", 255) if cohort.channels == 1 else ("RGB", (255, 255, 255))
    sheet = Image.new(kind, (columns * TILE, lines * (TILE + CAPTION)), white)
    draw = ImageDraw.Draw(sheet)
    letters = ImageFont.truetype(font, LETTER) if font else ImageFont.load_default(LETTER)
    for index, (row, pixels) in enumerate(zip(rows.tolist(), cohort.images(rows), strict=True)):
        left, top = index % columns * TILE, index // columns * (TILE + CAPTION)
        sheet.paste(Image.fromarray(pixels).resize((TILE - 4, TILE - 4), Image.Resampling.BOX), (left + 2, top + 2))
        draw.text((left + 3, top + TILE), caption(cohort, row), fill=0, font=letters)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    save_bytes(file, png.getvalue(), private=True)
    return len(rows)
