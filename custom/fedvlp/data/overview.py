"""What a person looks at before training on a data set: counts, labels, lengths of reports, a sheet of samples.

Nothing here repeats a report, an id or a path.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedvlp.data.cohort import SPLITS, Cohort

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
TILE = 160  # side of a sample on the sheet, pixels
CAPTION = 30  # height below it


def split_counts(cohort: Cohort) -> dict[str, dict[str, int]]:
    """Images, patients, studies and reports of each split."""
    reports = cohort.has_report()
    counts = {}
    for split in SPLITS:
        rows = cohort.rows(split)
        named = {"patients": cohort.patients, "studies": cohort.studies}
        counts[split] = {"records": len(rows), "images": int(cohort.has_image()[rows].sum())}
        counts[split] |= {name: len({column[row] for row in rows}) for name, column in named.items()}
        counts[split] |= {"reports": int(reports[rows].sum())}
    return counts


def label_counts(cohort: Cohort) -> dict[str, dict[str, int]]:
    """Records by label that are positive, negative, uncertain and blank."""
    return {
        name: {
            "positive": int((column == 1).sum()), "negative": int((column == 0).sum()),
            "uncertain": int((column == -1).sum()), "blank": int(np.isnan(column).sum()),
        }
        for name, column in zip(cohort.label_names, cohort.labels.T, strict=True)
    }  # fmt: skip


def report_lengths(cohort: Cohort) -> dict[float, float]:
    """``QUANTILES`` of the words in a report, over the reports there are; empty without any."""
    words = [len(report.split()) for report in cohort.reports if report]
    return dict(zip(QUANTILES, np.quantile(words, QUANTILES).tolist(), strict=True)) if words else {}


def contact_sheet(cohort: Cohort, file: Path, samples: int, seed: int = 0, columns: int = 6) -> int:
    """Writes a PNG of up to ``samples`` images drawn by ``seed``, with split and labels below; returns how many."""
    from PIL import Image, ImageDraw

    there = np.flatnonzero(cohort.has_image())
    rows = np.sort(np.random.default_rng(seed).permutation(there)[:samples])
    columns = max(1, min(columns, len(rows)))
    sheet = Image.new("L", (columns * TILE, -(-len(rows) // columns) * (TILE + CAPTION)), 255)
    draw = ImageDraw.Draw(sheet)
    for place, (row, pixels) in enumerate(zip(rows.tolist(), cohort.images(rows), strict=True)):
        left, top = place % columns * TILE, place // columns * (TILE + CAPTION)
        sheet.paste(Image.fromarray(pixels).resize((TILE - 4, TILE - 4), Image.Resampling.BOX), (left + 2, top + 2))
        found = [name for name, value in zip(cohort.label_names, cohort.labels[row], strict=True) if value == 1]
        draw.text((left + 3, top + TILE), f"{cohort.splits[row]}\n{', '.join(found)[:26]}", fill=0)
    sheet.save(file)
    return len(rows)
