"""Image-text pairs from a CSV table and a folder of radiographs: the source for a hospital's own export."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from fedvlp.core.validate import require
from fedvlp.data import delimited, report_text
from fedvlp.data.burned_in import REASON, SEARCH, check_choice
from fedvlp.data.cache import ImageCache
from fedvlp.data.cache_build import SERIAL, Building
from fedvlp.data.cohort import Cohort, digest
from fedvlp.data.images import MISSING, NO_NAME, OUTSIDE, SEVERAL, ImageNames, films, unsearched
from fedvlp.data.labels import ONE_CLASS, findings_in, separator_of
from fedvlp.data.masks import read_masks
from fedvlp.data.record_ids import mangled, normalised, one_number
from fedvlp.data.report_text import is_rtf, lacks_letters, plain
from fedvlp.data.screening import BY_VIEW, DataSource, Screened, searched
from fedvlp.data.sentences import SentenceTable, read_sentence_table
from fedvlp.data.subgroups import AGE, VIEW, table_of, view_of
from fedvlp.data.table_files import as_csv

log = logging.getLogger(__name__)

BELOW_ROOT = {"below_root": True}
"""Metadata of a source's field that is a file or a folder of the data set: at a site it lies below the set's root."""

_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "validate": "val"}
_SPLITS |= {"dev": "val", "test": "test", "testing": "test"}
BY_STUDY, BY_IMAGE = "without patient: that of their study", "without patient: each image its own"
"""What a summary counts of rows that name no patient."""

RTF, OTHER_LETTERS, SHORT = "report in RTF", "report in other than Latin letters", "report too short"
GARBLED, SPLIT = "report with garbled letters", "unknown split"
MOST_LOST = 0.1
"""Part of a report's letters that may be of other alphabets, as in "5 μm"; above it the rest would be no report."""

REMEDIES = {
    RTF: "convert reports in RTF to text",
    GARBLED: "letters were lost before this table was written, and \\ufffd stands for them: export it again, as UTF-8",
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

_TRUTH = {"true": 1.0, "false": 0.0}  # as spreadsheets and pandas write them
_MAX_CLASSES = 64  # a text column with more distinct values is no label
LABELS = "label_columns names columns of 1, 0, -1 and empty cells, or one column of words that are the classes"
_ID, _TEXT, _NUMBER, _UNEVEN = (
    "\0id",
    "\0text",
    "\0number",
    "\0uneven",
)  # keys added to a row; no column has such a name
Row = dict[str, str]


class _Skips:
    """The numbers of the rows that cannot be used, by reason."""

    def __init__(self, total: int, most: float) -> None:
        self.rows: dict[str, list[str]] = {}
        self._total, self._most = total, most

    def add(self, reason: str, row: Row) -> None:
        """Notes a row."""
        self.rows.setdefault(reason, []).append(row[_NUMBER])

    def check(self) -> None:
        """Raises ValueError if more than ``most`` of the rows (0..1), or all of them, cannot be used."""
        if self._total == 0:
            raise ValueError("table source: the table has no row below its header; export it again")
        bad = sum(map(len, self.rows.values()))
        if bad == self._total or bad > self._most * self._total:
            ordered = sorted(self.rows.items(), key=lambda item: -len(item[1]))
            known = [
                f"; {remedy}" for begin, remedy in REMEDIES.items() if any(one.startswith(begin) for one in self.rows)
            ]
            counts = [f"{reason} {len(rows)} (row {', '.join(rows[:5])})" for reason, rows in ordered]
            raise ValueError(
                f"table source: {bad} of {self._total} rows cannot be used, at most {self._most:.0%} may be: "
                f"{'; '.join(counts)}. Repair them (row 1 is below the header), or raise max_skipped{''.join(known)}"
            )


class _People(NamedTuple):
    """Whose the N rows of a table are, as hashes."""

    patients: tuple[str, ...]
    studies: tuple[str, ...]
    by_study: int  # rows without a patient that have the one of their study
    by_image: int  # rows without patient and study, or with a study of several patients: each image its own patient


@dataclass(frozen=True, eq=False, repr=False)
class _Listed:
    """A table that was read, before any image is. It shows nothing of its rows."""

    rows: list[Row]  # the usable ones
    files: list[Path]  # image of each of them
    present: set[str]  # columns named in the settings that the table has
    skips: _Skips
    total: int  # rows of the table
    phi: dict[str, int]  # kind of identifier -> reports of the usable rows that hold one


@dataclass(frozen=True)
class TableSource(DataSource):
    """A CSV with one row per image. A column that is named here and missing in the table is ignored unless required.
    Names may differ in case.

    Ids, patients and studies become hashes in memory, which no file has (data/record_ids.py); errors and logs hold
    counts and numbers of rows only.
    """

    table: ClassVar[str] = ""  # usual name of the table; a hospital's own has none

    path: str = field(metadata=BELOW_ROOT)  # the CSV, with a header; packed (gz, bz2, xz, zip), JSON or parquet too
    root: str | None = None  # folder the image names are relative to and may not leave; None: the CSV's own
    image_size: int = 72  # side of the decoded square, pixels
    image_column: str = "image"  # required; A/B joins two columns, as a folder and a name in it
    suffix: str = ""  # of the images, where names lack it and a folder has several of one name: png, dcm, ...
    report_column: str = "report"  # required; "" for a table of images without text
    label_columns: tuple[str, ...] | str = ""  # required; names, or one string "a,b"; a column of words is made one-hot
    label_values: tuple[str, ...] | str = ""  # classes of a column of words, in order; "": those found, sorted
    label_separator: str = ""  # between several classes in a cell, as "|"; "": asked for where it seems so; none: one
    site_column: str = "site"
    patient_column: str = "patient_id"  # absent: each study its own patient, or each image
    study_column: str = "study_id"  # absent: each image its own study; a visit's number is counted with its patient
    split_column: str = "split"  # absent or "": drawn by patient, per site
    view_column: str = "view"  # AP, PA, ...: a subgroup, and images are counted by it; absent or "": not known
    val_fraction: float = 0.1  # of the patients, when splits are drawn
    test_fraction: float = 0.2  # of the patients, when splits are drawn
    seed: int = 0  # of the drawn splits
    min_report_words: int = 3  # rows with fewer words are skipped; 0 keeps them, as images without text
    # cleaned: words in small Latin letters | as written: for a text tower of another script | papers: as cleaned, but
    # that sentences of one word ("Cardiomegaly.") are dropped
    reports: str = report_text.CLEANED
    min_site_size: int = 0  # sites with fewer usable rows are left out
    max_skipped: float = 0.2  # more skipped rows than this part of the table is an error, 0..1
    sentence_table: str | None = field(default=None, metadata=BELOW_ROOT)  # CSV of data/sentences.py; None: no labels
    cache: str | None = None  # folder for decoded images and for tokens; None: made in memory by every process
    burned_in: str = SEARCH  # text in images: search (pixels, where fedvlp[ocr] is installed) | header | accept
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

    def build(self) -> Cohort:
        """Reads the table and its images. Raises ValueError as ``prepare`` does."""
        return self.prepare()[0]

    def summary(self) -> dict[str, int]:
        """What is counted (rows, used, "skipped: <reason>", ...) -> how many. Reads everything, as ``build`` does."""
        return self.prepare()[1]

    def folder(self) -> Path:
        """The folder that names of images are relative to. Two images of one name are one image only in one folder."""
        return (Path(self.root) if self.root else Path(self.path).parent).resolve()

    def names_sites(self) -> bool:
        """Whether the table says whose each row is. Raises ValueError for a file that is no table."""
        return self.site_column != "" and self.site_column in self._read(self._named())[1]

    def prepare(self, most: int | None = None, building: Building = SERIAL) -> tuple[Cohort, dict[str, int]]:
        """The cohort and its ``summary``. ``most`` takes the first usable rows only, as a quick check.

        Raises ValueError if a setting is out of range, the file or a required column is missing, labels are none of
        1, 0, -1 and empty, or more than ``max_skipped`` of the rows cannot be used.
        """
        return self.screen(most, building).prepare()

    def screen(self, most: int | None = None, building: Building = SERIAL) -> Screened:
        """The usable rows' reports, searched, before any image is decoded. Raises ValueError as ``prepare`` does.

        Only the column of the reports is searched: one that credits the authors of published images names no patient.
        """
        self._check()
        table, columns = self._read(self._named())
        present = self._present(columns)
        self._check_ids(table, sorted({self.patient_column, self.study_column} & present))
        skips = _Skips(len(table), self.max_skipped)
        rows, files = self._select(table, present, self.folder(), skips)
        skips.check()  # before hours of decoding
        self._check_findings(rows)
        self._check_splits(rows, present)
        reported = rows[:most] if self.report_column else []
        texts = [row[self.report_column] for row in reported]
        phi = searched(self.cache, texts, (row[_NUMBER] for row in reported))
        listed = _Listed(rows, files, present, skips, len(table), dict(phi))
        return Screened(phi, len(rows[:most]), partial(self._prepare, listed, most, building), skips.rows)

    def written(self) -> dict[str, str]:
        """Reads the table again: the cohort has the words alone, in small letters."""
        table, columns = self._read(self._named())
        rows, _ = self._select(table, self._present(columns), self.folder(), _Skips(len(table), self.max_skipped))
        return {row[_ID]: row[self.report_column] for row in rows} if self.report_column else {}

    def _prepare(self, listed: _Listed, most: int | None, building: Building) -> tuple[Cohort, dict[str, int]]:
        """``prepare`` of the rows that are listed."""
        rows, files, present, skips = listed.rows, listed.files, listed.present, listed.skips
        ids = [row[_ID] for row in rows]
        images = films("table", ids[:most], files[:most], self.image_size, self.cache, building, self.burned_in)
        for row, reason in images.skipped.items():
            skips.add(reason, rows[row])
        skips.check()
        readable = [row for row in range(len(rows))[:most] if row not in images.skipped]
        used = self._at_large_sites(rows, readable, present)
        people = self._people([rows[row] for row in used], present)
        cohort = self._cohort(listed, images, used, people)
        summary = {"rows": listed.total, "used": len(cohort), "patients": len(set(cohort.patients))}
        fallbacks = {BY_STUDY: people.by_study, BY_IMAGE: people.by_image}
        summary |= {name: count for name, count in fallbacks.items() if count}
        summary |= {"skipped: at sites below min_site_size": few} if (few := len(readable) - len(used)) else {}
        summary |= {f"skipped: {reason}": len(numbers) for reason, numbers in sorted(skips.rows.items())}
        summary |= self._views_with_text([rows[row] for row, reason in images.skipped.items() if reason == REASON])
        summary |= unsearched(self.burned_in, len(readable), "table")
        log.info("table source: %s", ", ".join(f"{name} {count}" for name, count in summary.items()))
        return cohort, summary

    def _views_with_text(self, rows: Sequence[Row]) -> dict[str, int]:
        """Count the rows of images with burned-in text by view, where the table says that."""
        views = Counter(view_of(row.get(self.view_column, "")) or "not known" for row in rows)
        known = set(views) - {"not known"}
        return {f"{BY_VIEW}{view}": count for view, count in sorted(views.items())} if known else {}

    def _check(self) -> None:
        if self.root and not Path(self.root).is_dir():
            raise ValueError("table source: the folder of the images (root) is no folder")
        for name in ("val_fraction", "test_fraction", "max_skipped"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"table source: {name} must be in 0..1, got {getattr(self, name)}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("table source: val_fraction + test_fraction must leave patients to train on, below 1")
        check_choice(self.burned_in)
        known = (report_text.CLEANED, report_text.AS_WRITTEN, report_text.PAPERS)
        if self.reports not in known:
            raise ValueError(f"table source: reports is {self.reports!r}; expected {', '.join(known)}")

    def _required(self) -> list[str]:
        several = (self.label_columns, self.mask_columns, self.subgroup_columns)
        named = (self.image_column, self.report_column, *chain.from_iterable(map(_names, several)))
        return [column for column in named if column]

    def _named(self) -> list[str]:
        """All columns that the settings name."""
        optional = (self.site_column, self.patient_column, self.study_column, self.split_column, self.view_column)
        return [*self._required(), *self.image_column.split("/"), *filter(None, optional)]

    def _read(self, wanted: list[str]) -> tuple[list[Row], list[str]]:
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
        rows = []
        for number, line in enumerate(table.lines, start=1):
            excess = len(line) - len(table.columns)
            row = dict(zip(table.columns, map(str.strip, line + [""] * -excess), strict=False))
            if len(folders) > 1 and {*folders} <= row.keys():
                row[self.image_column] = "/".join(row[name] for name in folders)
            rows.append({**row, _NUMBER: str(number), _UNEVEN: _uneven(excess)})
        joined = [self.image_column] if len(folders) > 1 and {*folders} <= {*table.columns} else []
        return rows, table.columns + joined

    def _present(self, columns: list[str]) -> set[str]:
        """The columns named in the settings that the table has. Raises ValueError if a required one is missing."""
        if missing := [column for column in self._required() if column not in columns]:
            names = ", ".join(map(repr, missing))  # those in the file stay out: its first line may be a patient's
            without = (
                '; a table of images without reports: set report_column=""' if missing == [self.report_column] else ""
            )
            raise ValueError(
                f"table source: none of the table's {len(columns)} columns is {names}; set image_column, "
                "report_column, label_columns, mask_columns and subgroup_columns to the names in its first line, e.g. "
                "table:FILE,image_column=Bild,report_column=Befund"
                f"{without}"
            )
        return {column for column in self._named() if column in columns}

    @staticmethod
    def _check_ids(table: list[Row], columns: list[str]) -> None:
        """Raises ValueError where patients or studies would be one for a number that a spreadsheet shortened."""
        for column in columns:
            if count := mangled([row[column] for row in table]):
                raise ValueError(
                    f"table source: in {count} of {len(table)} rows {column!r} is a number that a spreadsheet "
                    "shortened (1.23E+11) or did not show (####, #N/A), and the same in several rows, so that patients "
                    "or studies cannot be distinguished; format the column as text or as a whole number in the system "
                    "that the numbers come from, and export again without opening it in a spreadsheet"
                )

    def _check_findings(self, rows: list[Row]) -> None:
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

    def _check_splits(self, rows: list[Row], present: set[str]) -> None:
        """Raises ValueError, before an image is decoded, where a patient's rows are in more than one split."""
        if self.split_column not in present:
            return
        first: dict[str, Row] = {}
        crossing: dict[str, str] = {}  # patient -> two rows of unlike splits
        for row, patient in zip(rows, self._people(rows, present).patients, strict=True):
            before, split = first.setdefault(patient, row), _SPLITS[row[self.split_column].lower()]
            if split != (other := _SPLITS[before[self.split_column].lower()]):
                crossing.setdefault(patient, f"row {before[_NUMBER]} ({other}) and row {row[_NUMBER]} ({split})")
        require(
            not crossing,
            f"table source: {len(crossing)} of {len(first)} patients are in more than one split, e.g. "
            f"{', '.join(list(crossing.values())[:3])} are one patient's. Give each patient one split in the column "
            f"{self.split_column!r}, or have patients drawn: data.split_column= (nothing behind it)",
        )

    def _select(self, table: list[Row], present: set[str], root: Path, skips: _Skips) -> tuple[list[Row], list[Path]]:
        """The usable rows, with the keys ``_ID`` and ``_TEXT`` added, and their image files."""
        rows: dict[Path, Row] = {}
        names = ImageNames(root, self.suffix)
        for row in table:
            file, reason = names.find(row[self.image_column])
            if file in rows:
                reason = "duplicate image"
            reason = row[_UNEVEN] or reason
            if not reason and self.report_column:
                row[_TEXT], reason = self._text(row)
            if not reason and self.split_column in present and row[self.split_column].lower() not in _SPLITS:
                reason = SPLIT
            if not reason and self.site_column in present and not row[self.site_column]:
                reason = "no site"
            # the id is made from the path below root, so that two spellings of one name are one id
            row[_ID] = _hashed("image", file.relative_to(root).as_posix() if file else row[self.image_column])
            if reason or file is None:
                skips.add(reason, row)
            else:
                rows[file] = row
        return list(rows.values()), list(rows)

    def _text(self, row: Row) -> tuple[str, str]:
        """The report of a row, cleaned, and why it cannot be used ("": it can). The row keeps it without markup."""
        written = row[self.report_column]
        if is_rtf(written):
            return "", RTF
        if lacks_letters(written):
            return "", GARBLED
        cell = row[self.report_column] = plain(written).strip()
        missing = report_text.is_missing(cell)
        if not missing and self.cleans_reports and report_text.letters_lost(cell) > MOST_LOST:
            return "", OTHER_LETTERS
        text = "" if missing else report_text.read_report(cell, self.reports, self.min_report_words)
        if text or self.min_report_words <= 0:
            return text, ""
        return "", "empty report" if missing else SHORT

    def _at_large_sites(self, rows: list[Row], readable: list[int], present: set[str]) -> list[int]:
        """Those of the ``readable`` row numbers whose site has at least ``min_site_size`` of them."""
        if self.site_column not in present or self.min_site_size <= 0:
            return readable
        sizes = Counter(rows[row][self.site_column] for row in readable)
        used = [row for row in readable if sizes[rows[row][self.site_column]] >= self.min_site_size]
        if not used:
            raise ValueError(
                f"table source: none of {len(sizes)} sites has {self.min_site_size} usable rows; lower min_site_size"
            )
        return used

    def _cohort(self, listed: _Listed, images: ImageCache, numbers: list[int], people: _People) -> Cohort:
        """The cohort of the listed rows with these ``numbers``, of ``people``; ``images`` reads by the same numbers."""
        used, present = [listed.rows[number] for number in numbers], listed.present
        ids = tuple(row[_ID] for row in used)
        sites = tuple(row[self.site_column] for row in used) if self.site_column in present else None
        labels, names = _labels(
            used, _names(self.label_columns), _names(self.label_values), self.label_separator or ONE_CLASS
        )
        if self.split_column in present:
            splits = np.array([_SPLITS[row[self.split_column].lower()] for row in used])
        else:
            splits = draw_splits(people.patients, sites, self.val_fraction, self.test_fraction, self.seed)
        subgroups, subgroup_names = _subgroups(used, self._grouping(present))
        texts = tuple(row.get(_TEXT, "") for row in used)
        sentences = self._sentences(used, names)
        number = np.asarray(numbers, dtype=np.int64)  # [N]
        columns = (ids, people.patients, people.studies, texts, names, splits.tolist(), sites or ())
        content = [digest(*column) for column in columns]
        if self.sentence_table and sentences:
            content.append(digest(Path(self.sentence_table).read_bytes()))
        return Cohort(
            ids=ids,
            patients=people.patients,
            studies=people.studies,
            reports=texts,
            labels=labels,
            label_names=names,
            splits=splits,
            sites=sites,
            images=lambda chosen: images(number[np.asarray(chosen, dtype=np.int64)]),
            fingerprint=digest(
                *content, labels.astype("<f4").tobytes(), images.checksums[number].astype("<u4").tobytes()
            ),
            phi=listed.phi,
            private=True,
            masks=self._masks(used),
            sentences=sentences,
            subgroups=subgroups,
            subgroup_names=subgroup_names,
            stored=tuple(images.stored[index] for index in numbers),
            files=tuple(listed.files[index] for index in numbers),
        )

    def _grouping(self, present: set[str]) -> dict[str, str]:
        """Subgroup -> the column that says it; the views are always called "view", so that sites can be joined."""
        columns = {name: name for name in _names(self.subgroup_columns) if name != self.view_column}
        return columns | ({VIEW: self.view_column} if self.view_column in present else {})

    def _sentences(self, rows: list[Row], label_names: tuple[str, ...]) -> SentenceTable | None:
        """The labels of the sentences of all reports; None without a table of sentences."""
        if not (self.sentence_table and self.report_column):
            return None
        table = read_sentence_table(Path(self.sentence_table), label_names)
        for row in rows:
            table.add(row[_TEXT], row[self.report_column])
        return table

    def _masks(self, rows: list[Row]) -> Callable[[np.ndarray], dict[str, np.ndarray]] | None:
        """Reader of the masks of ``rows`` by column; None where no column is named.

        Raises ValueError, at once, for a mask that is missing or lies outside of the root.
        """
        if not _names(self.mask_columns):
            return None
        names = ImageNames(self.folder())
        files: dict[str, list[Path | None]] = {}
        for column in _names(self.mask_columns):
            resolved = [names.find(row[column]) for row in rows]
            files[column] = [file for file, _ in resolved]
            bad = Counter(reason for _, reason in resolved if reason not in ("", NO_NAME))
            if bad:
                counts = ", ".join(f"{reason} {count}" for reason, count in sorted(bad.items()))
                raise ValueError(f"table source: masks of {column!r}: {counts}; repair those cells, or empty them")
        with_suffix = ImageNames(names.root, self.suffix)
        films = [with_suffix.find(row[self.image_column])[0] for row in rows]
        return partial(read_masks, files, self.image_size, films=films)

    def _people(self, rows: list[Row], present: set[str]) -> _People:
        """Whose the ``rows`` are. A study is one of its patient: the same number at another patient is another study.

        A row without a patient has the patient of its study's other rows, or the study itself where none of them has
        one, so that no study is in two splits.
        """
        names = self._written(rows, self.patient_column, present)
        studies = self._written(rows, self.study_column, present)
        seen: dict[str, set[str]] = {}  # study -> its patients
        for name, study in zip(names, studies, strict=True):
            seen.setdefault(study, set()).update({name} - {""})

        def patient(row: Row, name: str, study: str) -> str:
            if name:
                return _hashed(self.patient_column, name)
            if not study or len(seen[study]) > 1:
                return row[_ID]
            return _hashed(self.patient_column, *seen[study]) if seen[study] else _hashed(self.study_column, study)

        patients = tuple(map(patient, rows, names, studies))
        by_image = sum(owner == row[_ID] for owner, row in zip(patients, rows, strict=True))
        hashed = tuple(
            _hashed(self.study_column, study, owner) if study else row[_ID]
            for row, study, owner in zip(rows, studies, patients, strict=True)
        )
        return _People(patients, hashed, names.count("") - by_image, by_image)

    @staticmethod
    def _written(rows: list[Row], column: str, present: set[str]) -> list[str]:
        """A column's value in each row as sites agree on it (data/record_ids.py); "" where it is missing."""
        cells = one_number([row[column] if column in present else "" for row in rows])
        return ["" if report_text.is_missing(cell) else normalised(cell) for cell in cells]


def _uneven(excess: int) -> str:
    """Why a row with ``excess`` cells more than the table has columns cannot be used; "" for none more or fewer."""
    if excess > 0:
        return "more cells than columns"  # a text with the delimiter in it, without quotes
    return "fewer cells than columns" if excess < 0 else ""  # a text with a line break in it, without quotes


def draw_splits(patients: Sequence[str], sites: Sequence[str] | None, val: float, test: float, seed: int) -> np.ndarray:
    """Split [N] of each row, drawn by patient within each site; it does not depend on the order of the rows.

    ``val`` and ``test`` are shares of the patients, 0..1. A patient seen at several sites is drawn once, at the first
    by name. At least one patient of each site stays in training.
    """
    home: dict[str, str] = {}  # patient -> the site where it is drawn
    for patient, site in zip(patients, sites or [""] * len(patients), strict=True):
        home[patient] = min(site, home.get(patient, site))
    rng = np.random.default_rng(seed)
    split: dict[str, str] = {}
    for site in sorted(set(home.values())):
        own = sorted(patient for patient, own_site in home.items() if own_site == site)
        order = rng.permutation(own).tolist()
        held_out = min(round((val + test) * len(order)), len(order) - 1)
        tested = min(round(test * len(order)), held_out)
        split |= dict.fromkeys(order[:tested], "test")
        split |= dict.fromkeys(order[tested:held_out], "val")
        split |= dict.fromkeys(order[held_out:], "train")
    return np.array([split[patient] for patient in patients], dtype="<U5")


def _labels(
    rows: list[Row], columns: tuple[str, ...], values: tuple[str, ...], separator: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels [N, L] float32 and their names; a single column of words becomes one column per word.

    ``separator`` stands between several words in a cell.
    """
    labels = np.full((len(rows), len(columns)), np.nan, dtype=np.float32)
    for index, column in enumerate(columns):
        numbers = [_number(row[column]) for row in rows]
        only_words = None in numbers and all(n is None or np.isnan(n) for n in numbers)
        if len(columns) == 1 and (values or only_words):
            return _of_words(column, [row[column] for row in rows], values, separator)
        if strange := sum(n is None or not (np.isnan(n) or n in (1, 0, -1)) for n in numbers):
            raise ValueError(f"table source: {strange} values of label column {column!r} are none of 1, 0, -1, empty")
        labels[:, index] = np.array(numbers, dtype=np.float32)
    return labels, columns


def _subgroups(rows: list[Row], columns: dict[str, str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """``table_of`` of subgroup -> column. Raises ValueError for one with more values than a subgroup can have."""
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
    return table_of(cells)


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
    """The number in a cell, nan for an empty one, None for a word."""
    try:
        return np.nan if report_text.is_missing(cell) else float(_TRUTH.get(cell.lower(), cell))
    except ValueError:
        return None


def _names(columns: tuple[str, ...] | str) -> tuple[str, ...]:
    """Names of columns from a tuple, or from a string with commas."""
    return tuple(filter(None, map(str.strip, columns.split(",") if isinstance(columns, str) else columns)))


def _hashed(kind: str, *values: str) -> str:
    return digest(kind, *values)[:16]
