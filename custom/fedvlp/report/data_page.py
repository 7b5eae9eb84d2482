"""The page of a prepared data set: what a person should look at before training on it, as counts and curves.

No report, id or path is in it: rows that are not used are told by number, those known by name are counted. Nor is a
image: it shows ``SHEET``, which lies beside it, and handed on alone it shows none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedvlp.core.checkpoint import save_text
from fedvlp.data import overview
from fedvlp.data.cohort import Cohort
from fedvlp.data.screening import SKIPPED
from fedvlp.data.subgroups import VIEW
from fedvlp.evaluation.intervals import Interval
from fedvlp.report import figures, html
from fedvlp.report.html import grid, table, text

BINS = 32  # of grey levels
MOST_LABELS = 20  # drawn
SHEET = "contact-sheet.png"
"""Some images with split, site and view, beside the page (data/overview.py)."""
EMPTY = {
    "train": "nothing can be trained on",
    "val": "no curve over rounds can be drawn",
    "test": "no run on this data can be measured on patients that it has not seen",
}
"""Split -> what its lack means."""
NUMBERS = "Row 1 is the first below the table's header."
NORMAL = 1.959964  # 97.5 % quantile of the normal distribution


def write(
    cohort: Cohort,
    summary: Mapping[str, int],
    skipped: Mapping[str, Sequence[str]],
    built: Mapping[str, str],
    path: Path,
) -> Path:
    """Writes the page and returns its path. All but ``cohort`` and ``path`` as ``deploy.prepare.Prepared`` has it."""
    import matplotlib

    groups = overview.groups(cohort)
    looks = {name: figures.look(index) for index, name in enumerate(groups)}
    with matplotlib.rc_context(figures.RC):
        sections = {
            "": "".join(f'<p class="lead">{text(sentence)}</p>' for sentence in sentences(cohort, summary)),
            "Records": _records(cohort, groups),
            "Rows that are not used": _skipped(summary, skipped),
            "Identifiers in reports": _identifiers(cohort),
            "Labels": _labels(cohort, groups, looks),
            "Reports": _reports(cohort, groups, looks),
            "Images": _images(cohort, groups, looks) + html.pairs(built),
            "Contact sheet": _films(cohort),
        }
    body = ""
    for title, content in sections.items():
        heading = f"<h2>{title}</h2>\n" if title else ""
        body += f"{heading}{content}\n" if content else ""
    save_text(path, html.page("fedvlp: a prepared data set", body, images="data: file:"))
    return path


def sentences(cohort: Cohort, summary: Mapping[str, int]) -> list[str]:
    """What is there, what is not used, and what somebody should look into."""
    images, reports = int(cohort.has_image().sum()), int(cohort.has_report().sum())
    patients = len(set(cohort.patients))
    used = f"{len(cohort):,} records of {patients:,} patients are used"
    lines = [f"{used}: {images:,} with an image, {reports:,} with a report."]
    left = {name.removeprefix(SKIPPED): count for name, count in summary.items() if name.startswith(SKIPPED) and count}
    if left:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in left.items())
        lines.append(f"Not used, of {summary.get('rows', 0):,} rows: {reasons}.")
    splits = {split: of["records"] for split, of in overview.split_counts(cohort).items()}
    lines += [
        f'No record is in the {split} split: {EMPTY[split]}. split_column="" draws splits by patient.'
        for split, count in splits.items()
        if not count
    ]
    if cohort.phi:
        kinds = ", ".join(f"{kind} in {count:,}" for kind, count in cohort.phi.items())
        lines.append(f"Reports seem to identify people: {kinds}. Look at them before anything is trained.")
    stored = [set(of) for of in overview.stored_counts(cohort).values() if of]
    if cohort.sites is not None and any(of_site != stored[0] for of_site in stored):
        lines.append(
            "Sites store their images in different containers, bits or interpretations (see Images). Compare their "
            "grey levels, as a model may learn from these which site an image comes from."
        )
    texts, records = overview.repeated_reports(cohort)
    if texts:
        lines.append(
            f"Reports that are the same word for word at several patients: {texts:,}, in {records:,} records. "
            "Among these, retrieval cannot know which image is meant."
        )
    return lines


def _records(cohort: Cohort, groups: Mapping[str, np.ndarray]) -> str:
    """Tables of records, images, patients, studies and reports: by split, and by site where records have one."""
    counts = overview.split_counts(cohort)
    out = table(("split", *counts["train"]), [(split, *of.values()) for split, of in counts.items()])
    of_subgroups = "".join(_subgroup(cohort, name) for name in cohort.subgroup_names)
    if cohort.sites is None:
        return out + of_subgroups
    imaged, reported = cohort.has_image(), cohort.has_report()
    rows = []
    for site, chosen in groups.items():
        splits = [int((cohort.splits[chosen] == split).sum()) for split in counts]
        patients = len({cohort.patients[row] for row in chosen})
        rows.append((site, len(chosen), *splits, int(imaged[chosen].sum()), int(reported[chosen].sum()), patients))
    by_site = table(("site", "records", *counts, "images", "reports", "patients"), rows)
    return f"{out}<h3>By site</h3>{by_site}{of_subgroups}"


def _subgroup(cohort: Cohort, name: str) -> str:
    """Table of the records of every value of a subgroup, by site, or by split where records have none."""
    if name == VIEW:
        return _views(cohort)
    counts = overview.subgroup_counts(cohort, name)
    rows = [(value or "not known", sum(of.values()), *of.values()) for value, of in counts.items()]
    return f"<h3>By {text(name)}</h3>{table((name, 'records', *overview.groups(cohort)), rows)}"


def _views(cohort: Cohort) -> str:
    """Table of the images of each site, or of each split where records have none, by view; "" without images."""
    counts = overview.subgroup_counts(cohort, VIEW, cohort.has_image())
    if not counts:
        return ""
    group = "split" if cohort.sites is None else "site"
    rows = [
        (name, sum(of[name] for of in counts.values()), *(of[name] for of in counts.values()))
        for name in overview.groups(cohort)
    ]
    columns = (group, "images", *(view or "not known" for view in counts))
    return f"<h3>Images by {group} and view</h3>{table(columns, rows)}"


def _skipped(summary: Mapping[str, int], skipped: Mapping[str, Sequence[str]]) -> str:
    """Table of the reasons, each with the numbers of its rows; "" where every row is used."""
    counts = {
        name.removeprefix(SKIPPED): count for name, count in summary.items() if name.startswith(SKIPPED) and count
    }
    rows = []
    for reason in dict.fromkeys([*counts, *(reason for reason, of_reason in skipped.items() if of_reason)]):
        known = [row for row in skipped.get(reason, ()) if row.isdecimal()]
        count = counts.get(reason, len(skipped.get(reason, ())))
        named = count - len(known)
        shown = ", ".join(overview.ranges(known))
        if named > 0:
            shown += f"{'; and ' if shown else ''}{named:,} that have no number"
        rows.append((reason, f"{count:,}", shown))
    if not rows:
        return ""
    return f"<p>{text(NUMBERS)}</p>{table(('reason', 'rows', 'numbers of the rows'), rows, 'text')}"


def _identifiers(cohort: Cohort) -> str:
    """How many reports hold what kind of identifier."""
    if not cohort.phi:
        return "<p>The scan finds none. It cannot find everything: a name alone looks like any other word.</p>"
    return table(("kind", "reports"), cohort.phi.items())


def _labels(cohort: Cohort, groups: Mapping[str, np.ndarray], looks: Mapping[str, figures.Style]) -> str:
    """Counts of every label, and the share of positive records by group; "" for records without labels."""
    counts = overview.label_counts(cohort)
    if not counts:
        return ""
    head = ("label", "positive", "negative", "uncertain", "blank", *(f"positive, {name}" for name in groups))
    rows = []
    shares: dict[str, dict[str, Interval]] = {name: {} for name in groups}
    for (label, of), column in zip(counts.items(), cohort.labels.T, strict=True):
        positive = {name: int((column[chosen] == 1).sum()) for name, chosen in groups.items()}
        shown = [f"{count:,} ({100 * count / len(groups[name]):.1f} %)" for name, count in positive.items()]
        rows.append((label, *(f"{count:,}" for count in of.values()), *shown))
        if len(rows) <= MOST_LABELS:
            for name, count in positive.items():
                shares[name][label] = share(count, len(groups[name]))
    title = "Positive records (%), with 95 % intervals"
    return table(head, rows) + grid(figures.ranges(title, shares, looks))


def share(count: int, total: int) -> Interval:
    """``count`` of ``total`` in percent, with Wilson's 95 % interval (1927, doi:10.1080/01621459.1927.10502953).

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half-width z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n).
    """
    p, square = count / total, NORMAL**2
    centre = (p + square / (2 * total)) / (1 + square / total)
    reach = NORMAL * math.sqrt(p * (1 - p) / total + square / (4 * total**2)) / (1 + square / total)
    return Interval(100 * p, 100 * max(0.0, centre - reach), 100 * min(1.0, centre + reach))


def _reports(cohort: Cohort, groups: Mapping[str, np.ndarray], looks: Mapping[str, figures.Style]) -> str:
    """Lengths of reports: quantiles and a histogram by group; "" without reports."""
    lengths = overview.report_lengths(cohort)
    if not lengths:
        return ""
    quantiles = table([f"{quantile:.0%}" for quantile in lengths], [[f"{words:.0f}" for words in lengths.values()]])
    words = {name: overview.word_counts(cohort, chosen) for name, chosen in groups.items()}
    width = max(1, math.ceil((max(lengths.values()) + 1) / BINS))
    curves: list[figures.Curve] = []
    for name, of_group in words.items():
        if len(of_group):
            counts = np.bincount(of_group // width).tolist()
            points = {index * width: 100 * count / len(of_group) for index, count in enumerate(counts)}
            curves.append((name, points, looks[name]))
    x = "words" if width == 1 else f"words, in steps of {width}"
    drawing = figures.lines("Words in a report (% of the reports)", curves, x)
    return f"<p>Words in a report, by quantile:</p>{quantiles}{grid(drawing)}"


def _images(cohort: Cohort, groups: Mapping[str, np.ndarray], looks: Mapping[str, figures.Style]) -> str:
    """How files store the images, and their grey levels, by group; "" without images."""
    stored = overview.stored_counts(cohort)
    kinds = sorted({kind for of_group in stored.values() for kind in of_group})
    rows = [(kind, *(f"{of_group[kind]:,}" for of_group in stored.values())) for kind in kinds]
    counted = f"<h3>Image files</h3>{table(('stored as', *stored), rows)}" if rows else ""
    curves: list[figures.Curve] = []
    for name, chosen in groups.items():
        shares = overview.grey_levels(cohort, chosen, BINS)
        if shares is not None:
            points = {index * 256 // BINS: 100 * value for index, value in enumerate(shares.tolist())}
            curves.append((name, points, looks[name]))
    note = (
        "Grey levels of the decoded images, up to 200 of each group. A peak at either end is a border, or an image "
        "that was cut off in brightness; curves that lie apart are different acquisition."
    )
    drawing = figures.lines("Grey levels (% of the pixels)", curves, f"grey level, in steps of {256 // BINS}")
    return f"{counted}<p>{text(note)}</p>{grid(drawing)}" if drawing else ""


def _films(cohort: Cohort) -> str:
    """Some images, each with split, site and view; "" without images."""
    if not cohort.has_image().any():
        return ""
    note = (
        f"They lie beside this page in {SHEET}: for the eyes of the records' owner alone. Handed on, the page has none."
    )
    sheet = f'<a href="{SHEET}"><img class="sheet" src="{SHEET}" alt="images with split, site, view and labels"></a>'
    return f"<p>{text(note)}</p>{sheet}"
