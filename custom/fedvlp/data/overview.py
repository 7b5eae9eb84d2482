"""What a person should look at before training on a data set: counts, labels, lengths of reports, sample images.

Nothing here repeats a report, an id or a path.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedvlp.data.cohort import SPLITS, Cohort

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
TILE = 160  # side of a sample on the contact sheet, pixels
CAPTION = 30  # height of the text below a sample, pixels


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


def contact_sheet(cohort: Cohort, file: Path, samples: int, seed: int = 0, columns: int = 6) -> int:
    """Writes a PNG of up to ``samples`` images, drawn by ``seed``, with split and positive labels below each.

    Returns how many there are. The cohort must have at least one image.
    """
    from PIL import Image, ImageDraw

    imaged = np.flatnonzero(cohort.has_image())
    rows = np.sort(np.random.default_rng(seed).permutation(imaged)[:samples])
    columns = max(1, min(columns, len(rows)))
    lines = -(-len(rows) // columns)  # rounded up
    kind, white = ("L", 255) if cohort.channels == 1 else ("RGB", (255, 255, 255))
    sheet = Image.new(kind, (columns * TILE, lines * (TILE + CAPTION)), white)
    draw = ImageDraw.Draw(sheet)
    for index, (row, pixels) in enumerate(zip(rows.tolist(), cohort.images(rows), strict=True)):
        left, top = index % columns * TILE, index // columns * (TILE + CAPTION)
        sheet.paste(Image.fromarray(pixels).resize((TILE - 4, TILE - 4), Image.Resampling.BOX), (left + 2, top + 2))
        positive = [name for name, value in zip(cohort.label_names, cohort.labels[row], strict=True) if value == 1]
        draw.text((left + 3, top + TILE), f"{cohort.splits[row]}\n{', '.join(positive)[:26]}", fill=0)
    sheet.save(file)
    return len(rows)
