"""Images, reports, or both from a CSV table and a folder of radiographs: the source for a hospital's own export."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedvlp.core.types import MODALITIES
from fedvlp.core.validate import require
from fedvlp.data import delimited, report_text
from fedvlp.data.burned_in import SEARCH, check_choice
from fedvlp.data.cohort import PUBLIC, digest
from fedvlp.data.images import MISSING, NO_NAME, OUTSIDE, SEVERAL, ImageNames
from fedvlp.data.labels import CHEXPERT, ONE_CLASS, common_findings, findings_in, folded, separator_of
from fedvlp.data.masks import read_masks
from fedvlp.data.record_ids import mangled, normalised, one_number, one_spelling
from fedvlp.data.report_text import is_rtf, lacks_letters, plain
from fedvlp.data.sentences import SentenceTable, read_sentence_table
from fedvlp.data.sources.listed import BELOW_ROOT, Listed, Listing, Masks
from fedvlp.data.subgroups import AGE, VIEW
from fedvlp.data.table_files import as_csv
from fedvlp.data.text_restoration import restorations

log = logging.getLogger(__name__)

_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "validate": "val"}
_SPLITS |= {"dev": "val", "test": "test", "testing": "test"}
BY_STUDY, BY_ROW = "without patient: that of their study", "without patient: each its own"
"""What a summary counts of rows that name no patient."""

LONGEST_SITE = 100  # bytes of a name that is also a folder's
NO_SITE, LONG_SITE = "no site", f"site with a name of more than {LONGEST_SITE} bytes"
EMPTY, NEITHER, REPEATED = "empty report", "neither image nor report", "duplicate report"
RTF, OTHER_LETTERS, SHORT = "report in RTF", "report in other than Latin letters", "report too short"
GARBLED, SPLIT = "report with garbled letters", "unknown split"
MOST_LOST = 0.1
"""Part of a report's letters that may be of other alphabets, as in "5 μm"; above it the rest would be no report."""

REMEDIES = {
    RTF: "convert reports in RTF to text",
    GARBLED: "letters were lost before this table was written, and \\ufffd stands for them: export it again, as UTF-8",
    NO_SITE: ("each row says its site, in letters, digits, '.', '_' and '-'; site_column=\"\" deals the rows to sites"),
    SPLIT: 'the split column says train, val or test; split_column="" draws splits by patient',
    OTHER_LETTERS: (
        "only Latin letters are read: set reports='as written' and a text tower of their language, or translate them"
    ),
    SHORT: "min_report_words=1 keeps reports of one or two words, such as Normal",
    MISSING: "images are looked for below root=FOLDER, by default the table's, whatever case and suffix a name has",
    SEVERAL: "write the names as the files have them, or set suffix=png (or dcm, ...) where they lack it",
    OUTSIDE: (
        "names of images are relative to the table's folder, or to root=FOLDER: of absolute paths, take off what comes "
        "before it; where a link leads out of it, root= says the folder that it leads to"
    ),
    "burned-in": "look at the images with text in them: burned_in=accept takes them as they are",
}
"""How the reason begins for which rows cannot be used -> what to do."""

COMMON = "common"
"""Value of ``label_words``."""

_TRUTH = {"uncertain": -1.0, "unklar": -1.0}
_TRUTH |= dict.fromkeys(("true", "wahr", "yes", "ja", "positive", "positiv", "present"), 1.0)
_TRUTH |= dict.fromkeys(("false", "falsch", "no", "nein", "negative", "negativ", "absent"), 0.0)
"""What spreadsheets, pandas and people write in the place of 1, 0 and -1."""
_MAX_CLASSES = 64  # a text column with more distinct values is no label
LABELS = "label_columns names columns of 1, 0, -1 and empty cells, or one column of words that are the classes"
Skipped = Mapping[str, Sequence[str]]
"""Why rows cannot be used -> their numbers, from 1 on, below the header."""


OPTIONAL = ("site_column", "patient_column", "study_column", "split_column", "view_column")
"""Settings whose default names a column that a table may lack; another name must be one of the table's."""

SEVERAL_IN = re.compile(r"[|;+&/]| and | und ")
"""What people write between several columns, beside the comma."""

_OF_PATIENTS = re.compile(
    r"(id|no|nr|num|number|code|key)?(of)?(the)?"
    r"(patients?|patienten|pat|pt|subjects?|persons?|people|case|paciente|mrn|pid|medicalrecord(number)?)"
    r"(id|ids|no|nr|num|number|nummer|code|key|name|identifier|pseudonym|hash)?"
)


def tells_patients(name: str) -> bool:
    """Whether a column's name says that it says who the patients are."""
    return bool(_OF_PATIENTS.fullmatch("".join(filter(str.isalnum, name.casefold()))))


class Line(NamedTuple):
    """A row of a table as it was read."""

    number: str  # from 1 on, below the header
    cells: dict[str, str]  # column -> cell
    uneven: str  # why it cannot be used, where it has other cells than the table has columns


class Usable(NamedTuple):
    """A row that has an image, a report, or both."""

    line: Line
    name: str  # a hash that is its alone, and the same in every table that lists it
    file: Path | None  # its image
    text: str  # its report, cleaned; "" without
    written: str  # and without markup alone


def refuse_unusable(skipped: Skipped, total: int, most: float) -> None:
    """Raises ValueError if more than ``most`` of ``total`` rows (0..1), or all of them, cannot be used."""
    if total == 0:
        raise ValueError("table source: the table has no row below its header; export it again")
    bad = sum(map(len, skipped.values()))
    if bad == total or bad > most * total:
        ordered = sorted(skipped.items(), key=lambda item: -len(item[1]))
        known = [f"; {remedy}" for begin, remedy in REMEDIES.items() if any(one.startswith(begin) for one in skipped)]
        counts = [f"{reason} {len(rows)} (row {', '.join(rows[:5])})" for reason, rows in ordered]
        raise ValueError(
            f"table source: {bad} of {total} rows cannot be used, at most {most:.0%} may be: {'; '.join(counts)}. "
            f"Repair them (row 1 is below the header), or raise max_skipped{''.join(known)}"
        )


class _People(NamedTuple):
    """Whose the N rows of a table are, as hashes."""

    patients: tuple[str, ...]
    studies: tuple[str, ...]
    by_study: int  # rows without a patient that have the one of their study
    by_row: int  # rows without patient and study, or with a study of several patients: each its own patient


@dataclass(frozen=True, eq=False, repr=False)
class TableSource(Listed):
    """A CSV with a row for each image, for each report without one, or both. Names of columns may differ in case.

    A column that somebody names must be there; one with its usual name may be absent unless it is required.

    Ids, patients and studies become hashes in memory, which no file has (data/record_ids.py); errors and logs hold
    counts and numbers of rows only.
    """

    path: str = field(metadata=BELOW_ROOT)  # the CSV, with a header; packed (gz, bz2, xz, zip), JSON or parquet too
    root: str | None = None  # folder the image names are relative to and may not leave; None: the CSV's own
    # by name alone, as in the base class; Python 3.10 cannot resolve the hints of a class with dataclasses.KW_ONLY
    image_size: int = field(default=72, kw_only=True)  # side of the decoded square, pixels
    # required; A/B joins two columns, as a folder and a name in it; "" for a table of reports alone
    image_column: str = "image"
    suffix: str = ""  # of the images, where names lack it and a folder has several of one name: png, dcm, ...
    report_column: str = "report"  # required; "" for a table of images without text
    label_columns: tuple[str, ...] | str = ""  # required; names, or one string "a,b"; a column of words is made one-hot
    label_values: tuple[str, ...] | str = ""  # classes of a column of words, in order; "": those found, sorted
    label_separator: str = ""  # between several classes in a cell, as "|"; "": asked for where it seems so; none: one
    # "": labels are called as the table calls them; common: by the common findings of data/labels.py, whatever word a
    # collection has for them; or WORD=FINDING, ... of one's own beside those, and WORD= for what is none
    label_words: tuple[str, ...] | str = ""
    site_column: str = "site"
    patient_column: str = "patient_id"  # absent: each study its own patient, or each row
    study_column: str = "study_id"  # absent: each row its own study; a visit's number is counted with its patient
    split_column: str = "split"  # absent or "": drawn by patient, per site
    view_column: str = "view"  # AP, PA, ...: a subgroup, and images are counted by it; absent or "": not known
    min_report_words: int = 3  # rows with shorter reports are skipped; 0 keeps them, as images alone
    # cleaned: words in small Latin letters | as written: for a text tower of another script | papers: as cleaned, but
    # that sentences of one word ("Cardiomegaly.") are dropped
    reports: str = report_text.CLEANED
    min_site_size: int = 0  # sites with fewer usable rows are left out
    max_skipped: float = 0.2  # more skipped rows than this part of the table is an error, 0..1
    sentence_table: str | None = field(default=None, metadata=BELOW_ROOT)  # CSV of data/sentences.py; None: no labels
    burned_in: str = field(
        default=SEARCH, kw_only=True
    )  # text in images: search (pixels, where fedvlp[ocr] is installed) | header | accept
    # of image files, not 0 within a structure that the column is named after; names, or "a,b"; an empty cell: no mask
    mask_columns: tuple[str, ...] | str = ""
    # sex, age, ...: what evaluations judge by; names, or "a,b"; "age" becomes bands of 20 years
    subgroup_columns: tuple[str, ...] | str = ""
    encoding: str = ""  # of the CSV, as Python names it; "": UTF-8, UTF-16 or cp1252, told from its bytes
    delimiter: str = ""  # one character; "": comma, semicolon, tab or pipe, told from the header

    @property
    def cleans_reports(self) -> bool:
        """Whether reports are words alone (report_text.clean_report), and so are the phrases that a model is asked."""
        return self.reports != report_text.AS_WRITTEN

    def folder(self) -> Path:
        """The folder that names of images are relative to. Two images of one name are one image only in one folder."""
        return (Path(self.root) if self.root else Path(self.path).parent).resolve()

    def names_sites(self) -> bool:
        """Whether the table says whose each row is. Raises ValueError for a file that is no table."""
        return self.site_column != "" and self.site_column in self._read(self._named())[1]

    def modalities_by_site(self) -> dict[str, tuple[str, ...]]:
        """Site ("" where no column says it) -> which of image and text any of its rows has, by the table alone.

        Sites without either are left out.
        """
        lines, columns = self._read(self._named())
        present = self._present_columns(columns)
        held: dict[str, set[str]] = {}
        named = [line.cells[self.site_column] for line in lines] if self.site_column in present else []
        called = one_spelling(named, [PUBLIC])
        for line in lines:
            site = called[line.cells[self.site_column]] if self.site_column in present else ""
            halves = {"image": self.image_column, "text": self.report_column}
            has = {name for name, column in halves.items() if column and not report_text.is_missing(line.cells[column])}
            held.setdefault(site, set()).update(has)
        return {site: tuple(name for name in MODALITIES if name in held[site]) for site in sorted(held) if held[site]}

    def listing(self) -> Listing:
        """The usable rows: pairs, then images alone, then reports alone.

        Only the column of the reports is searched: one that credits the authors of published images names no patient.
        Raises ValueError if a setting is out of range, the file or a required column is missing, labels are none of
        1, 0, -1 and empty, or more than ``max_skipped`` of the rows cannot be used.
        """
        self._check()
        lines, columns = self._read(self._named())
        present = self._present_columns(columns)
        self._check_ids(lines, sorted({self.patient_column, self.study_column} & present))
        rows, skipped = self._select(lines, present)
        refuse_unusable(skipped, len(lines), self.max_skipped)
        rows.sort(key=lambda row: (row.file is None, row.text == ""))
        cells = [row.line.cells for row in rows]
        self._check_findings(cells)
        labels, names = _labels(
            cells,
            _names(self.label_columns),
            _names(self.label_values),
            self.label_separator,
            [row.line.number for row in rows],
        )
        labels, names = self._common(labels, names)
        people = self._people(rows, present)
        splits = [_SPLITS[row[self.split_column].lower()] if self.split_column in present else "" for row in cells]
        self._check_splits([row.line.number for row in rows], people.patients, splits)
        fallbacks = {BY_STUDY: people.by_study, BY_ROW: people.by_row}
        restored = restorations(row[self.report_column] for row in cells if self.report_column)
        sentences = self._sentences(rows, names)
        marks = [digest(Path(self.sentence_table).read_bytes())] if self.sentence_table and sentences else []
        return Listing(
            source="table",
            keys=[row.name for row in rows],
            patients=people.patients,
            studies=people.studies,
            reports=[row.text for row in rows],
            labels=labels,
            names=names,
            splits=splits,
            files=[row.file for row in rows],
            noted={name: count for name, count in fallbacks.items() if count} | restored,
            subgroups=_subgroups(cells, self._grouping(present)),
            private=True,
            sites=[row[self.site_column] for row in cells] if self.site_column in present else None,
            numbers=[row.line.number for row in rows],
            skipped=skipped,
            written=[row.written for row in rows],
            masks=self._masks(rows),
            sentences=sentences,
            marks=tuple(marks),
        )

    def _check_splits(self, numbers: Sequence[str], patients: Sequence[str], splits: Sequence[str]) -> None:
        """Raises ValueError, before an image is decoded, where a patient's rows are in more than one split."""
        first: dict[str, tuple[str, str]] = {}
        crossing: dict[str, str] = {}  # patient -> two rows of unlike splits
        for number, patient, split in zip(numbers, patients, splits, strict=True):
            other, before = first.setdefault(patient, (number, split))
            if split != before:
                crossing.setdefault(patient, f"row {other} ({before}) and row {number} ({split})")
        require(
            not crossing,
            f"table source: {len(crossing)} of {len(first)} patients are in more than one split, e.g. "
            f"{', '.join(list(crossing.values())[:3])} are one patient's. Give each patient one split in the column "
            f"{self.split_column!r}, or have patients drawn: data.split_column= (nothing behind it)",
        )

    def _refuse(self, listing: Listing, skipped: Skipped) -> None:
        unlisted = sum(map(len, listing.skipped.values()))
        refuse_unusable(skipped, len(listing.keys) + unlisted, self.max_skipped)

    def written(self) -> dict[str, str]:
        """Reads the table again: the cohort has the words alone, in small letters."""
        lines, columns = self._read(self._named())
        rows, _ = self._select(lines, self._present_columns(columns))
        return {row.name: row.written for row in rows if row.written}

    def _check(self) -> None:
        if self.root and not Path(self.root).is_dir():
            raise ValueError("table source: the folder of the images (root) is no folder")
        for name in ("val_fraction", "test_fraction", "max_skipped"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"table source: {name} must be in 0..1, got {getattr(self, name)}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("table source: val_fraction + test_fraction must leave patients to train on, below 1")
        if not (self.image_column or self.report_column):
            raise ValueError('table source: image_column and report_column are both ""; name one of them, or both')
        check_choice(self.burned_in)
        known = (report_text.CLEANED, report_text.AS_WRITTEN, report_text.PAPERS)
        if self.reports not in known:
            raise ValueError(f"table source: reports is {self.reports!r}; expected {', '.join(known)}")

    def _required(self) -> list[str]:
        several = (self.label_columns, self.mask_columns, self.subgroup_columns)
        named = [self.image_column, self.report_column, *chain.from_iterable(map(_names, several))]
        defaults = {setting.name: setting.default for setting in fields(self)}
        named += [column for name in OPTIONAL if (column := getattr(self, name)) != defaults[name]]
        return [column for column in named if column]

    def _named(self) -> list[str]:
        """All columns that the settings name."""
        optional = filter(None, (getattr(self, name) for name in OPTIONAL))
        return [*dict.fromkeys([*self._required(), *self.image_column.split("/"), *optional])]

    def _read(self, wanted: list[str]) -> tuple[list[Line], list[str]]:
        """The rows of the table, and the names of its columns; of the ``wanted`` ones as they are wanted."""
        path = Path(self.path)
        if not path.is_file():
            raise ValueError("table source: the table (path) is not a file")
        raw, made = as_csv(path.read_bytes())
        told = ("utf-8", ",") if made else (self.encoding, self.delimiter)
        table = delimited.read(raw, wanted, *told)
        if not table.columns:
            raise ValueError("table source: the table (path) is empty; export it again")
        if table.said:
            log.warning("table source: %s", table.said)
        folders = [] if self.image_column in table.columns else self.image_column.split("/")
        joined = [self.image_column] if len(folders) > 1 and {*folders} <= {*table.columns} else []
        lines = []
        for number, line in enumerate(table.lines, start=1):
            excess = len(line) - len(table.columns)
            cells = dict(zip(table.columns, map(str.strip, line + [""] * -excess), strict=False))
            cells |= {column: "/".join(cells[name] for name in folders) for column in joined}
            lines.append(Line(str(number), cells, _uneven(excess)))
        return lines, table.columns + joined

    def _present_columns(self, columns: list[str]) -> set[str]:
        """The columns named in the settings that the table has. Raises ValueError if a required one is missing."""
        if missing := [column for column in self._required() if column not in columns]:
            names = ", ".join(map(repr, missing))  # those in the file stay out: its first line may be a patient's
            without = {
                self.report_column: '; a table of images without reports: set report_column=""',
                self.image_column: '; a table of reports without images: set image_column=""',
            }.get(missing[0] if len(missing) == 1 else "", "")
            raise ValueError(
                f"table source: none of the table's {len(columns)} columns is {names}; set image_column, "
                "report_column, label_columns and the other settings of columns to the names in its first line, e.g. "
                "table:FILE,image_column=Bild,report_column=Befund"
                f"{self._several(missing)}{without}"
            )
        self._refuse_unnamed_patients(columns)
        return {column for column in self._named() if column in columns}

    def _several(self, missing: list[str]) -> str:
        """How several columns are written, where a missing one looks like several."""
        for name in ("label_columns", "mask_columns", "subgroup_columns"):
            odd = [column for column in _names(getattr(self, name)) if column in missing and SEVERAL_IN.search(column)]
            if odd:
                names = ", ".join(f'"{column.strip()}"' for column in SEVERAL_IN.split(odd[0]))
                return f"; several columns are a list: --set 'data.{name}=[{names}]', or \"A,B\" in a site's file"
        return ""

    def _refuse_unnamed_patients(self, columns: list[str]) -> None:
        """Raises ValueError where no column has the default name of patients, and one that seems to is not named."""
        default = next(setting.default for setting in fields(self) if setting.name == "patient_column")
        if self.patient_column != default or default in columns:
            return
        named = {*self._named()}
        alike = [number for number, name in enumerate(columns, start=1) if name not in named and tells_patients(name)]
        if alike:
            raise ValueError(
                f"table source: no column is {default!r}, and column {alike[0]} seems to say whose each row is; set "
                'patient_column to its name, or patient_column="" where it does not: a patient who counts as several '
                "would be trained on and tested on"
            )

    @staticmethod
    def _check_ids(lines: list[Line], columns: list[str]) -> None:
        """Raises ValueError where patients or studies would be one for a number that a spreadsheet shortened."""
        for column in columns:
            if count := mangled([line.cells[column] for line in lines]):
                raise ValueError(
                    f"table source: in {count} of {len(lines)} rows {column!r} is a number that a spreadsheet "
                    "shortened (1.23E+11) or did not show (####, #N/A), and the same in several rows, so that patients "
                    "or studies cannot be distinguished; format the column as text or as a whole number in the system "
                    "that the numbers come from, and export again without opening it in a spreadsheet"
                )

    def _check_findings(self, rows: list[dict[str, str]]) -> None:
        """Raises ValueError where a cell of the column of labels seems to hold several classes."""
        columns, values = _names(self.label_columns), _names(self.label_values)
        if len(columns) != 1 or self.label_separator:
            return
        cells = [row[columns[0]] for row in rows]
        if mark := separator_of([cell for cell in cells if _number(cell) is None], values):
            count = sum(len(findings_in(cell, mark)) > 1 for cell in cells)
            raise ValueError(
                f"table source: label column {columns[0]!r} seems to hold several classes in {count} of {len(cells)} "
                f"cells, with {mark!r} between them; set label_separator to it, or to {ONE_CLASS} where each such cell "
                "is a class of its own"
            )

    def _select(self, lines: list[Line], present: set[str]) -> tuple[list[Usable], Skipped]:
        """The usable rows, and the numbers of the others by reason."""
        names = ImageNames(self.folder(), self.suffix)
        patients = self._written(lines, self.patient_column, present)
        studies = self._written(lines, self.study_column, present)
        if self.site_column in present:
            self._spell_sites(lines)
        rows: list[Usable] = []
        skipped: dict[str, list[str]] = {}
        known: set[object] = set()  # images and reports of the rows so far
        alike = Counter[object]()
        for line, patient, study in zip(lines, patients, studies, strict=True):
            file, reason = names.find(line.cells[self.image_column]) if self.image_column else (None, NO_NAME)
            text, written, unread = self._text(line.cells)
            # A report is told from others by all that the table says of whose it is.
            report = (patient, study, text) if study else (*line.cells.values(),) if patient else None
            if file is None and reason == NO_NAME:  # a report alone, unless that lacks too
                reason = unread if unread != EMPTY else "" if text else self._nothing()
                reason = REPEATED if not reason and report in known else reason
            elif not reason:
                reason = "duplicate image" if file in known else "" if unread == EMPTY else unread
            reason = line.uneven or reason
            if not reason and self.split_column in present and line.cells[self.split_column].lower() not in _SPLITS:
                reason = SPLIT
            if not reason and self.site_column in present and not line.cells[self.site_column]:
                reason = NO_SITE
            if not reason and self.site_column in present:
                reason = LONG_SITE if len(line.cells[self.site_column].encode()) > LONGEST_SITE else ""
            if reason:
                skipped.setdefault(reason, []).append(line.number)
                continue
            if file is not None:
                # the id is made from the path below root, so that two spellings of one name are one id
                name = _hashed("image", file.relative_to(names.root).as_posix())
            else:
                alike[patient, study, text] += 1
                name = _hashed("report", patient, study, text, str(alike[patient, study, text]))
            known |= {file, report if text else None} - {None}
            rows.append(Usable(line, name, file, text, written))
        return rows, skipped

    def _spell_sites(self, lines: list[Line]) -> None:
        """Calls each site by one name, which is also a folder's, and says which names that has changed."""
        cells = [line.cells for line in lines]
        called = one_spelling([row[self.site_column] for row in cells], [PUBLIC])
        for row in cells:
            row[self.site_column] = called[row[self.site_column]]
        if changed := sorted(f"{old!r} is {new!r}" for old, new in called.items() if new and old != new):
            shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            log.warning("table source: a site has one name, which is also a folder's: %s", shown)

    def _nothing(self) -> str:
        """Why a row without image and report cannot be used."""
        return NEITHER if self.image_column and self.report_column else EMPTY if self.report_column else NO_NAME

    def _text(self, cells: dict[str, str]) -> tuple[str, str, str]:
        """The report of a row, cleaned and as it was written without markup, and why there is none ("": there is)."""
        written = cells[self.report_column] if self.report_column else ""
        if is_rtf(written):
            return "", "", RTF
        if lacks_letters(written):
            return "", "", GARBLED
        cell = plain(written).strip()
        if report_text.is_missing(cell):
            return "", "", EMPTY
        if self.cleans_reports and report_text.letters_lost(cell) > MOST_LOST:
            return "", "", OTHER_LETTERS
        text = report_text.read_report(cell, self.reports, self.min_report_words)
        return text, cell, "" if text else SHORT if self.min_report_words > 0 else EMPTY

    def _admitted(self, listing: Listing, rows: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
        """Those of the readable ``rows`` [n] whose site has at least ``min_site_size`` of them."""
        if listing.sites is None or self.min_site_size <= 0:
            return rows, {}
        sites = np.asarray(listing.sites)[rows]
        names, sizes = np.unique(sites, return_counts=True)
        used = rows[np.isin(sites, names[sizes >= self.min_site_size])]
        if not len(used):
            raise ValueError(
                f"table source: none of {len(sizes)} sites has {self.min_site_size} usable rows; lower min_site_size"
            )
        few = len(rows) - len(used)
        return used, {"at sites below min_site_size": few} if few else {}

    def _grouping(self, present: set[str]) -> dict[str, str]:
        """Subgroup -> the column that says it; the views are always called "view", so that sites can be joined."""
        columns = {name: name for name in _names(self.subgroup_columns) if name != self.view_column}
        return columns | ({VIEW: self.view_column} if self.view_column in present else {})

    def _common(self, labels: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
        """Labels [N, 14] of the common findings by the table's own [N, L], where ``label_words`` asks for them.

        A finding that several of the table's labels stand for is there where one of them is. Labels that stand for none
        are left out, and the log names them. Raises ValueError where none stands for any.
        """
        if not self.label_words or not names:
            return labels, names
        own = {} if self.label_words == COMMON else dict(pair.split("=", 1) for pair in self._word_pairs())
        words = common_findings({word.strip(): name.strip() for word, name in own.items()})
        meanings = {name: [common for common in words.get(folded(name), ()) if common] for name in names}
        if unknown := [name for name in names if folded(name) not in words]:
            log.warning(
                "table source: %d of %d labels stand for no common finding and are left out: %s; say what they are, or "
                "that they are none: label_words=%s=Edema, or %s=",
                len(unknown), len(names), ", ".join(map(repr, unknown[:20])), unknown[0], unknown[0],
            )  # fmt: skip
        columns = {common: [names.index(n) for n in names if common in meanings[n]] for common in CHEXPERT}
        columns = {common: of for common, of in columns.items() if of}
        if not columns:
            raise ValueError(
                f"table source: none of {len(names)} labels stands for a common finding; say what they are, as in "
                f"label_words=Erguss=Pleural Effusion; the common ones are {', '.join(CHEXPERT)}"
            )
        # 1 goes before -1, then 0; nan where all are: a label that is not known does not say that another is absent.
        rank = np.select([labels == 1, labels == -1, labels == 0], [3, 2, 1], 0)
        best = np.stack([rank[:, of].max(axis=1) for of in columns.values()], axis=1)
        return np.array([np.nan, 0, -1, 1], dtype=np.float32)[best], tuple(columns)

    def _word_pairs(self) -> list[str]:
        """The parts of ``label_words``. Raises ValueError for one without "="."""
        pairs = [pair for pair in _names(self.label_words) if pair != COMMON]
        if strange := [pair for pair in pairs if "=" not in pair]:
            raise ValueError(
                f"table source: label_words has {strange[0]!r}; write {COMMON}, or WORD=FINDING, e.g. "
                "label_words=Erguss=Pleural Effusion"
            )
        return pairs

    def _sentences(self, rows: list[Usable], label_names: tuple[str, ...]) -> SentenceTable | None:
        """The labels of the sentences of all reports; None without a table of sentences."""
        if not (self.sentence_table and self.report_column):
            return None
        table = read_sentence_table(Path(self.sentence_table), label_names)
        for row in rows:
            table.add(row.text, row.written)
        return table

    def _masks(self, rows: list[Usable]) -> Masks | None:
        """Reader of the masks of ``rows`` by column; None where no column is named.

        Raises ValueError, at once, for a mask that is missing or lies outside of the root.
        """
        if not _names(self.mask_columns):
            return None
        names = ImageNames(self.folder())
        files: dict[str, list[Path | None]] = {}
        for column in _names(self.mask_columns):
            resolved = [names.find(row.line.cells[column]) for row in rows]
            files[column] = [file for file, _ in resolved]
            bad = Counter(reason for _, reason in resolved if reason not in ("", NO_NAME))
            if bad:
                counts = ", ".join(f"{reason} {count}" for reason, count in sorted(bad.items()))
                raise ValueError(f"table source: masks of {column!r}: {counts}; repair those cells, or empty them")
        return partial(read_masks, files, self.image_size, films=[row.file for row in rows])

    def _people(self, rows: list[Usable], present: set[str]) -> _People:
        """Whose the ``rows`` are. A study is one of its patient: the same number at another patient is another study.

        A row without a patient has the patient of its study's other rows, or the study itself where none of them has
        one, so that no study is in two splits.
        """
        lines = [row.line for row in rows]
        names = self._written(lines, self.patient_column, present)
        studies = self._written(lines, self.study_column, present)
        seen: dict[str, set[str]] = {}  # study -> its patients
        for name, study in zip(names, studies, strict=True):
            seen.setdefault(study, set()).update({name} - {""})

        def patient(row: Usable, name: str, study: str) -> str:
            if name:
                return _hashed(self.patient_column, name)
            if not study or len(seen[study]) > 1:
                return row.name
            return _hashed(self.patient_column, *seen[study]) if seen[study] else _hashed(self.study_column, study)

        patients = tuple(map(patient, rows, names, studies))
        by_row = sum(owner == row.name for owner, row in zip(patients, rows, strict=True))
        hashed = tuple(
            _hashed(self.study_column, study, owner) if study else row.name
            for row, study, owner in zip(rows, studies, patients, strict=True)
        )
        return _People(patients, hashed, names.count("") - by_row, by_row)

    @staticmethod
    def _written(lines: list[Line], column: str, present: set[str]) -> list[str]:
        """A column's value in each row as sites agree on it (data/record_ids.py); "" where it is missing."""
        cells = one_number([line.cells[column] if column in present else "" for line in lines])
        return ["" if report_text.is_missing(cell) else normalised(cell) for cell in cells]


def _uneven(excess: int) -> str:
    """Why a row with ``excess`` cells more than the table has columns cannot be used; "" for none more or fewer."""
    if excess > 0:
        return "more cells than columns"  # a text with the delimiter in it, without quotes
    return "fewer cells than columns" if excess < 0 else ""  # a text with a line break in it, without quotes


def _labels(
    rows: list[dict[str, str]],
    columns: tuple[str, ...],
    values: tuple[str, ...],
    separator: str,
    lines: Sequence[str],
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels [N, L] float32 and their names; a single column of words becomes one column per word.

    ``separator`` stands between several words in a cell; ``lines`` are the numbers of the rows, for messages.
    """
    labels = np.full((len(rows), len(columns)), np.nan, dtype=np.float32)
    for index, column in enumerate(columns):
        numbers = [_number(row[column]) for row in rows]
        only_words = None in numbers and all(n is None or np.isnan(n) for n in numbers)
        if len(columns) == 1 and (values or only_words):
            return _of_words(column, [row[column] for row in rows], values, separator)
        odd = [
            line for line, n in zip(lines, numbers, strict=True) if n is None or not (np.isnan(n) or n in (1, 0, -1))
        ]
        if odd:
            raise ValueError(
                f"table source: {len(odd)} values of label column {column!r} are none of 1, 0, -1, empty (row "
                f"{', '.join(odd[:5])}; row 1 is below the header); write those, or name a column of words alone"
            )
        labels[:, index] = np.array(numbers, dtype=np.float32)
    return labels, columns


def _subgroups(rows: list[dict[str, str]], columns: dict[str, str]) -> dict[str, list[str]]:
    """Subgroup -> its cells, of subgroup -> column. Raises ValueError for one with more values than it can have."""
    cells = {
        name: ["" if report_text.is_missing(row[column]) else row[column] for row in rows]
        for name, column in columns.items()
    }
    for name, given in cells.items():
        if name.lower() != AGE and (count := len(set(given))) > _MAX_CLASSES:
            raise ValueError(
                f"table source: subgroup column {name!r} has {count} values, at most {_MAX_CLASSES}; an age goes into "
                "a column named age, which becomes bands of 20 years; "
                'view_column="" leaves the views out'
            )
    return cells


def _of_words(
    column: str, cells: list[str], values: tuple[str, ...], separator: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels [N, L] of N cells, nan for a missing one, and the L classes: ``values``, or the words that occur.

    A word for "nothing", such as "none", is a class only where ``values`` has it. Capitals make no class of their own.
    """
    wanted = {word.casefold() for word in values}
    words = [findings_in(cell, separator) for cell in cells]
    named = [
        [word for word in several if not report_text.is_missing(word) or word.casefold() in wanted] for several in words
    ]
    missing = np.array([not several for several in named])  # [N]
    if not values and (count := sum(bool(cell) for cell, lost in zip(cells, missing, strict=True) if lost)):
        log.warning(
            "table source: label column %r: %d cells hold a word for nothing (none, na, null, nan) and have no label; "
            "if that is a class, name all classes: label_values",
            column,
            count,
        )
    first = {word.casefold(): word for several in reversed(named) for word in several}
    names = values or tuple(sorted(first.values()))
    if len(names) > _MAX_CLASSES:
        raise ValueError(
            f"table source: label column {column!r} has {len(names)} values, at most {_MAX_CLASSES}; {LABELS}"
        )
    number = {name.casefold(): index for index, name in enumerate(names)}
    labels = np.zeros((len(cells), len(names)), dtype=np.float32)
    for row, several in enumerate(named):
        labels[row, [number[word.casefold()] for word in several if word.casefold() in number]] = 1
    labels[missing] = np.nan
    return labels, names


def _number(cell: str) -> float | None:
    """The number in a cell, nan for an empty one, None for a word.

    As spreadsheets write it: with a comma, a true minus, or as a percentage.
    """
    if report_text.is_missing(cell):
        return np.nan
    if cell.casefold() in _TRUTH:
        return _TRUTH[cell.casefold()]
    written = cell.replace("\u2212", "-").replace("\u2013", "-").replace(",", ".")
    try:
        return float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except ValueError:
        return None


def _names(columns: tuple[str, ...] | str) -> tuple[str, ...]:
    """Names of columns from a tuple, or from a string with commas."""
    return tuple(filter(None, map(str.strip, columns.split(",") if isinstance(columns, str) else columns)))


def _hashed(kind: str, *values: str) -> str:
    return digest(kind, *values)[:16]
