"""Open-I, Indiana University (Demner-Fushman et al., 2016, doi:10.1093/jamia/ocv080): reports, images if present."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from fedvlp.data.deid import scan
from fedvlp.data.images import files_below, is_beside
from fedvlp.data.labels import CHEXPERT, OPENI, from_terms, names_of
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import (
    Listing,
    Published,
    first_of,
    read_rows,
    refuse_absent,
    require_items,
    undamaged,
)
from fedvlp.data.sources.table import BELOW_ROOT
from fedvlp.data.subgroups import VIEW
from fedvlp.data.table_files import parts_of
from fedvlp.data.text_restoration import restorations

log = logging.getLogger(__name__)

UNINDEXED = "no indexing"
PROJECTIONS = "indiana_projections.csv"
"""The table of views. It comes with Kaggle's copy of the collection (raddar/chest-xrays-indiana-university)."""

KAGGLE = "indiana_reports.csv"
"""The reports of that copy: uid, MeSH, Problems, image, indication, comparison, findings, impression."""

VIEWS = ("Frontal", "Lateral")


@dataclass(frozen=True)
class Report:
    """What is read of one XML file."""

    key: str  # number of the report
    sections: dict[str, str]  # label ("IMPRESSION") -> text
    headings: frozenset[str] | None  # of MeSH: the first part, and the first two, lower case; None: not indexed
    images: tuple[str, ...]  # names of its images, without suffix


@dataclass(frozen=True)
class OpenISource(Published):
    """``NLMCXR_reports.tgz`` or its folder of XML files, and the folder of the images (``NLMCXR_png``).

    The reports do not say which of their images is frontal and which lateral; ``projections`` does. Without it all
    images are used, and counted as of an unknown view. The text is impression + " " + findings (spec 1.1). Labels come
    from the indexers' MeSH headings: a finding that they did not index is absent (0), and a report that they did not
    index at all is not labelled (nan).
    """

    table: ClassVar[str] = "NLMCXR_reports.tgz"
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # NLMCXR_reports.tgz, a folder of XML files, or Kaggle's indiana_reports.csv
    root: str | None = None  # folder of <image id>.png; None: text alone, one row per report
    # indiana_projections.csv (uid, filename, projection); None: no image's view is known
    projections: str | None = field(default=None, metadata=BELOW_ROOT)
    views: tuple[str, ...] | str = VIEWS[:1]  # of Frontal, Lateral: the images that are used, where views are known
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names without a heading are nan
    min_report_words: int = 3  # shorter reports are left out
    alone: bool = False  # keep reports of which no image is used, as records that have a report alone
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The reports, packed or unpacked (``ecgen-radiology``), and the images unpacked into ``NLMCXR_png``.

        Without images, or with the archive alone as ``path``, records are reports with their findings.
        """
        names, films = [cls.table, "ecgen-radiology", KAGGLE], ["NLMCXR_png", "images/images_normalized", "images"]
        require_items("openi", root, [" or ".join(names)])
        folders = {"root": first_of(root, films), "projections": first_of(root, [PROJECTIONS])}
        if folders["root"] is None:
            log.warning("openi source: no %s: records are reports alone, with their findings", " or ".join(films))
        return {"path": str(first_of(root, names)), **{name: str(path) for name, path in folders.items() if path}}

    def listing(self) -> Listing:
        """One row per report or, with ``root``, per image of a chosen view. Each report counts as a patient of its own.

        Raises ValueError for a ``path`` or an XML file that is not Open-I's, for unknown ``views``, and where more than
        ``max_missing`` of the images are not under ``root``.
        """
        wanted = names_of(self.labels)
        published = sorted(self.reports(), key=lambda report: report.key)
        texts = {report.key: self._text(report) for report in published}
        worded = [report for report in published if texts[report.key]]
        left_out = {"report empty or too short": len(published) - len(worded)}
        rows: list[tuple[Report, Path | None, str]] = [(report, None, "") for report in worded]
        if self.root is not None:
            rows = self._films(Path(self.root), worded, left_out)
            shown = {report.key for report, _, _ in rows}
            if self.alone:
                rows += [(report, None, "") for report in worded if report.key not in shown]
                left_out.pop("report without an image")
        files = [file for _, file, _ in rows if file is not None]
        known = self.root is not None and self.projections is not None
        unsure = {} if known or not files else {f"images of unknown view (no {PROJECTIONS})": len(files)}
        for what, count in unsure.items():
            log.warning(
                "openi source: %d %s; lateral ones are among them. Put that table beside the images", count, what
            )
        return Listing(
            source="openi",
            keys=[file.stem if file else report.key for report, file, _ in rows],
            patients=[report.key for report, _, _ in rows],
            studies=[report.key for report, _, _ in rows],
            reports=[texts[report.key] for report, _, _ in rows],
            labels=from_terms([report.headings for report, _, _ in rows], OPENI, wanted),
            names=wanted,
            splits=[""] * len(rows),
            files=[file for _, file, _ in rows] if self.root else None,
            left_out=left_out,
            noted=unsure | restorations(" ".join(report.sections.values()) for report in worded),
            phi=scan(
                (" ".join(report.sections.values()) for report in published), (report.key for report in published)
            ),
            subgroups={VIEW: [view for _, _, view in rows]} if known else {},
        )

    def _text(self, report: Report) -> str:
        """Impression and findings of a report, cleaned."""
        both = " ".join(report.sections.get(name, "") for name in ("IMPRESSION", "FINDINGS"))
        return clean_report(both, self.min_report_words, self.min_sentence_words)

    def _films(
        self, root: Path, reports: list[Report], left_out: dict[str, int]
    ) -> list[tuple[Report, Path | None, str]]:
        """(report, file, view or "") of each image that is used; ``left_out`` counts the others."""
        views, chosen = self._views(), names_of(self.views)
        if unknown := set(chosen) - set(VIEWS):
            raise ValueError(f"openi source: {len(unknown)} of the views are none of {', '.join(VIEWS)}")
        left_out["report without an image"] = sum(not report.images for report in reports)
        named = [(report, name, views.get(_film_key(name), "")) for report in reports for name in report.images]
        shown = [film for film in named if not views or film[2] in chosen]
        films = [(report, root / f"{Path(name).name.removesuffix('.png')}.png", view) for report, name, view in shown]
        there = [film for film in films if film[1].is_file()]
        left_out["image of another or an unknown view"] = len(named) - len(shown)
        left_out["image not under root"] = missing = len(films) - len(there)
        refuse_absent("openi", missing, len(films), self.max_missing)
        return list(there)

    def _views(self) -> dict[str, str]:
        """Key of an image (``_film_key``) -> its view; empty without the table."""
        if self.projections is None:
            return {}
        rows = read_rows("openi", self.projections, ("uid", "filename", "projection"))
        return {_film_key(f"CXR{row['uid']}_{row['filename']}"): row["projection"].strip() for row in rows}

    def reports(self) -> Iterator[Report]:
        """Every report of the archive or folder, in the archive's order or by path."""
        path = Path(self.path)
        if path.name.startswith(KAGGLE):
            yield from self._of_kaggle()
        elif path.is_dir():
            for file in files_below(path, "*.xml"):
                yield parse(file.read_bytes())
        elif path.is_file():
            with undamaged("openi", path), tarfile.open(path) as archive:
                for member in archive:
                    named = member.name.endswith(".xml") and not any(map(is_beside, parts_of(member.name)))
                    content = archive.extractfile(member) if named else None
                    if content is not None:
                        yield parse(content.read())
        else:
            raise ValueError(f"openi source: path is neither NLMCXR_reports.tgz, a folder of XML files nor {KAGGLE}")

    def _of_kaggle(self) -> Iterator[Report]:
        """The reports of Kaggle's copy, whose images are named in the table of views."""
        films: dict[str, list[str]] = {}
        if self.projections is not None:
            for row in read_rows("openi", self.projections, ("uid", "filename")):
                films.setdefault(row["uid"], []).append(row["filename"])
        elif self.root is not None:
            raise ValueError(f"openi source: {KAGGLE} does not name its images: give projections={PROJECTIONS} too")
        for row in read_rows("openi", self.path, ("uid", "MeSH", "findings", "impression")):
            texts = {"IMPRESSION": row["impression"], "FINDINGS": row["findings"]}
            headings = _headings(filter(None, row["MeSH"].split(";")))
            yield Report(f"CXR{row['uid']}", texts, headings, tuple(films.get(row["uid"], ())))


def _headings(majors: Iterable[str]) -> frozenset[str] | None:
    """Of MeSH: the first part of each heading, and the first two, in small letters; None: nobody indexed the report."""
    parted = [[term.strip().lower() for term in major.split("/")] for major in majors]
    headings = frozenset("/".join(terms[:count]) for terms in parted for count in (1, 2))
    return None if not headings or UNINDEXED in headings else headings


def _film_key(name: str) -> str:
    """What the names of an image have in common: "1 IM-0001-3001" of CXR1_1_IM-0001-3001 and 1_IM-0001-3001.dcm.png."""
    report, _, rest = name.removeprefix("CXR").partition("_")
    return f"{report} {rest[rest.find('IM-') :].removesuffix('.png').removesuffix('.dcm')}"


def parse(xml: bytes) -> Report:
    """Reads one XML file. Raises ValueError, which holds nothing of its content, if it is no report of Open-I."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(
            f"openi source: a file is not XML (line {error.position[0]}); download the reports again"
        ) from None
    number = root.find("uId")
    if number is None:
        raise ValueError("openi source: an XML file without uId is no Open-I report")
    texts = {node.get("Label", ""): (node.text or "").strip() for node in root.iter("AbstractText")}
    headings = _headings(node.text or "" for node in root.iter("major"))
    images = tuple(node.get("id", "") for node in root.iter("parentImage"))
    return Report(number.get("id", ""), texts, headings, images)
