"""A hospital's CSV: what is read, what is skipped and counted, and that no error or log names a patient."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib.util
import io
import json
import logging
import lzma
import re
import time
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvlp.data import delimited
from fedvlp.data.cohort import Cohort
from fedvlp.data.images import ImageNames
from fedvlp.data.report_text import clean_report, is_missing
from fedvlp.data.sources.listed import draw_splits
from fedvlp.data.sources.table import BY_ROW, BY_STUDY, TableSource
from fedvlp.run.assembly import refuse_no_folder

Image = pytest.importorskip("PIL.Image")
PAIRS = Path(__file__).parents[3].parent / "shared" / "data" / "real-cxr" / "pairs.csv"
REPORT = "Canary effusion on the left."
HEADER = ["image", "report", "site", "patient_id", "split", "finding"]


def picture(path: Path, seed: int) -> str:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 16), dtype=np.uint8)).save(path)
    return path.name


def good(folder: Path, count: int) -> list[list[str]]:
    """Rows of two patients per site, two images per patient."""
    return [
        [
            picture(folder / f"canary{i}.png", i),
            f"{REPORT} Number {i} seen.",
            f"site{i // 4 % 2}",
            f"Canary^{i // 2}",
            "val" if i // 2 % 4 == 3 else "train",
            "Edema" if i % 3 else "Normal",
        ]
        for i in range(count)
    ]


def write(folder: Path, rows: list[list[str]], header: list[str] = HEADER) -> str:
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(folder / "pairs.csv")


def column(rows: list[list[str]], *names: str) -> list[list[str]]:
    return [[row[HEADER.index(name)] for name in names] for row in rows]


def silent_error(source: TableSource) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        source.build()
    message = str(caught.value)
    assert "anary" not in message
    assert "effusion" not in message
    assert str(Path(source.path).parent) not in message
    return message


def test_a_table_becomes_a_cohort(tmp_path: Path) -> None:
    rows = good(tmp_path, 8)
    cohort, summary = TableSource(write(tmp_path, rows), image_size=16, label_columns="finding").prepare()
    assert len(cohort) == summary["rows"] == summary["used"] == 8
    assert summary["patients"] == len(set(cohort.patients)) == 4
    assert cohort.sites == tuple(row[2] for row in rows)
    assert cohort.splits.tolist() == [row[4] for row in rows]
    assert cohort.reports[3] == "canary effusion on the left number 3 seen"
    assert cohort.label_names == ("Edema", "Normal")
    assert cohort.labels.tolist() == [[float(row[5] == name) for name in cohort.label_names] for row in rows]
    assert not any("anary" in name for name in (*cohort.ids, *cohort.patients, *cohort.studies))
    images = cohort.images(np.array([5, 0]))
    assert images.shape == (2, 16, 16)
    assert images.dtype == np.uint8
    assert not np.array_equal(images[0], images[1])
    assert len(cohort.rows("test")) == 0
    assert len(set(cohort.studies)) == 8, "no study column: each image its own"


def test_every_field_is_a_plain_value_that_json_can_hold() -> None:
    given = [field.default for field in fields(TableSource) if field.name != "path"]
    assert {type(default) for default in given} <= {str, int, float, type(None)}


def test_unusable_rows_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = good(tmp_path, 12)
    (tmp_path / "cut.png").write_bytes((tmp_path / rows[0][0]).read_bytes()[:60])
    (tmp_path / "words.png").write_text("canary")
    Image.fromarray(np.full((20, 20), 9, dtype=np.uint8)).save(tmp_path / "flat.png")
    extra = {name: picture(tmp_path / f"{name}.png", 50 + i) for i, name in enumerate(["a", "b", "c", "d", "e", "f"])}
    bad = [
        (rows[0][0], REPORT, "train", "duplicate image"),
        ("./" + rows[0][0], REPORT, "train", "duplicate image"),
        ("", "", "train", "neither image nor report"),
        ("NaN", " \n ", "train", "neither image nor report"),
        ("none", "NaN", "train", "neither image nor report"),
        (extra["d"], "Canary effusion", "train", "report too short"),
        (extra["e"], "1. Canary. Normal.", "train", "report too short"),
        (extra["f"], REPORT, "holdout", "unknown split"),
        ("absent.png", REPORT, "train", "missing image"),
        ("", "Canary effusion", "train", "report too short"),
        (extra["a"], REPORT, "", "unknown split"),
        ("cut.png", REPORT, "train", "corrupt image"),
        ("words.png", REPORT, "train", "unsupported image format"),
        ("flat.png", REPORT, "train", "constant image"),
    ]
    path = write(tmp_path, rows + [[image, text, "site0", "p", split, "Edema"] for image, text, split, _ in bad])
    with caplog.at_level(logging.DEBUG):
        cohort, summary = TableSource(path, image_size=16, max_skipped=0.6).prepare()
    counted = {name.removeprefix("skipped: "): n for name, n in summary.items() if name.startswith("skipped: ")}
    assert counted == Counter(reason for *_, reason in bad)
    assert len(cohort) == 12
    assert summary["rows"] == 26
    assert "anary" not in caplog.text
    assert str(tmp_path) not in caplog.text
    pixels = cohort.images(np.arange(12))
    alone = TableSource(write(tmp_path, rows), image_size=16).build()
    assert np.array_equal(pixels, alone.images(np.arange(12))), "rows and pixels stay together"
    assert cohort.fingerprint == alone.fingerprint


def test_too_many_unusable_rows_stop_with_counts_and_numbers_of_rows(tmp_path: Path) -> None:
    rows = good(tmp_path, 6)
    for row in rows[:2]:
        row[1] = "Canary."
    rows[2][0] = "canary-absent.png"
    message = silent_error(TableSource(write(tmp_path, rows), image_size=16))
    assert "3 of 6 rows" in message
    assert "report too short 2 (row 1, 2)" in message
    assert "missing image 1 (row 3)" in message
    TableSource(write(tmp_path, rows), image_size=16, max_skipped=0.5).build()
    (tmp_path / rows[3][0]).write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "4 of 6 rows" in silent_error(TableSource(write(tmp_path, rows), image_size=16, max_skipped=0.5))


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    assert "no row below its header" in silent_error(TableSource(write(tmp_path, []), max_skipped=1.0))
    silent_error(TableSource(str(tmp_path / "absent.csv")))
    rows = [["absent.png", REPORT, "s", "p", "train", "x"]]
    assert "1 of 1" in silent_error(TableSource(write(tmp_path, rows), max_skipped=1.0))


def test_wrong_columns_are_named_but_never_those_of_the_file(tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    headless = TableSource(write(tmp_path, rows[1:], header=rows[0]))  # its first line is a patient's
    assert "'image', 'report'" in silent_error(headless)
    assert "'Edema'" in silent_error(TableSource(write(tmp_path, rows), label_columns="finding, Edema"))
    twice = TableSource(write(tmp_path, rows, header=["image", "report", "report", "a", "b", "c"]))
    assert "has the name of one before it" in silent_error(twice)


def test_images_may_not_leave_the_root(tmp_path: Path) -> None:
    """Absolute, drive, parent and symlink names are refused alike, whether or not the file is there."""
    root = tmp_path / "site"
    (root / "images").mkdir(parents=True)
    rows = good(root, 9)
    picture(tmp_path / "outside.png", 77)
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "folder").symlink_to(tmp_path)
    (root / "loop.png").symlink_to(root / "loop.png")
    names = [str(tmp_path / "outside.png"), "../outside.png", "images/../../outside.png", "..\\outside.png"]
    names += ["C:\\outside.png", "C:outside.png", "\\\\host\\share\\outside.png", "link.png", "folder/outside.png"]
    missing = ["loop.png", "a\0b.png", "x" * 5000 + ".png", "images"]
    bad = [[name, REPORT, "site0", "p", "train", "x"] for name in names + missing]
    source = TableSource(write(root, rows + bad), image_size=16, max_skipped=0.9)
    summary = source.summary()
    assert summary["skipped: image outside the root"] == len(names)
    assert summary["skipped: missing image"] == len(missing)
    assert summary["used"] == 9
    silent_error(TableSource(source.path, image_size=16))


def test_an_image_is_found_whatever_case_accents_and_suffix_its_name_has(tmp_path: Path) -> None:
    """As Windows and a Mac write names; the id is that of the file, so an image is the same under all its names."""
    changes: tuple[Callable[[str], str], ...] = (str.upper, str.title, lambda name: name.rpartition(".")[0], str)
    for written, suffix in product(("NFC", "NFD"), ("png", "JPG")):
        root = tmp_path / f"{written} {suffix}"
        file = root / unicodedata.normalize(written, f"Köln/größe 1.2.{suffix}")
        file.parent.mkdir(parents=True)
        file.touch()
        for named, change in product(("NFC", "NFD"), changes):
            name = change(unicodedata.normalize(named, f"Köln/größe 1.2.{suffix}"))
            assert ImageNames(root).find(name) == (file, ""), (written, name)


def test_a_suffix_says_which_of_two_files_is_meant_and_columns_are_joined_to_a_path(tmp_path: Path) -> None:
    """As PadChest has folder and name; DICOM files lie beside their copies; a column may have a slash in its name."""
    (tmp_path / "a").mkdir()
    for number in range(2):
        for suffix in ("png", "tif"):
            picture(tmp_path / "a" / f"{number}.1.{suffix}", number)
    rows = [["a", f"{number}.1", f"{REPORT} {number}"] for number in range(2)]
    path = write(tmp_path, rows, ["Folder", "Name", "report"])
    source = TableSource(path, image_column="folder/Name", suffix=".png", image_size=16)
    ids = source.build().ids
    with pytest.raises(ValueError, match=r"several images of this name.* 2 .*suffix=png"):
        replace(source, suffix="").build()
    with pytest.raises(ValueError, match="columns is 'folder/Named'"):
        replace(source, image_column="folder/Named").build()
    path = write(tmp_path, [[f"a/{number}.1", row[2]] for number, row in enumerate(rows)], ["a/b", "report"])
    assert replace(source, path=path, image_column="a/b").build().ids == ids


def test_an_image_is_found_where_one_alone_is_meant(tmp_path: Path) -> None:
    for number, (files, name, found) in enumerate(
        [
            (("a.png", "A.png"), "A.PNG", None),  # which of the two is not said
            (("a.png", "A.png"), "a.png", "a.png"),
            (("a.png", "a.dcm"), "A", None),
            (("a.png", "a"), "a", "a"),
            (("a.txt", "b.png"), "a", None),
            (("x/a.png", "X/a.png"), "x/A.png", None),
            (("x/a.png", "x/1.png"), "X/1", "x/1.png"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
        expected = folder / found if found else None
        assert ImageNames(folder).find(name)[0] == expected


def test_absolute_paths_and_links_that_lead_outside_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "own").mkdir()
    rows = good(tmp_path / "share", 4)
    (tmp_path / "own" / "films").symlink_to(tmp_path / "share")
    for folder in ("films/", f"{tmp_path}/share/"):
        table = write(tmp_path / "own", [[folder + row[0], *row[1:]] for row in rows])
        assert re.search(
            "image outside the root 4 .* root= says the folder that it leads to", silent_error(TableSource(table))
        )
    assert len(TableSource(write(tmp_path / "own", rows), root=str(tmp_path / "share"), image_size=16).build()) == 4


def test_another_root_and_windows_separators(tmp_path: Path) -> None:
    images = tmp_path / "images" / "one"
    images.mkdir(parents=True)
    rows = [["one\\" + row[0], *row[1:]] for row in good(images, 4)]
    cohort = TableSource(write(tmp_path, rows), root=str(tmp_path / "images"), image_size=16).build()
    assert len(cohort) == 4


def exported(folder: Path, text: str, encoding: str) -> TableSource:
    """A table of three films as an export in that encoding; "%s" in the text are the films."""
    names = [picture(folder / f"{i}.png", i) for i in range(3)]
    (folder / "pairs.csv").write_bytes((text % tuple(names)).encode(encoding))
    return TableSource(str(folder / "pairs.csv"), image_size=16, val_fraction=0, test_fraction=0)


BODY = (
    '%s,"Derrame en el lado\r\nizquierdo."\r\n\r\n%s,Neumonía del lóbulo inferior\r\n%s,"Sin infiltración, derrame"\r\n'
)
CLEANED = ("derrame en el lado izquierdo", "neumonia del lobulo inferior", "sin infiltracion derrame")
SEMICOLONS = "IMAGE;Report;n\n%s;Derrame en el lado izquierdo;1\n%s;Neumonía del lóbulo inferior;2\n"
SEMICOLONS += "%s;Sin infiltración, derrame;3\n"
EXPORTS = {
    "plain": ("image,report\r\n" + BODY, "utf-8", ""),
    "with a byte order mark": ("image,report\r\n" + BODY, "utf-8-sig", ""),
    "one byte a letter": ("image,report\r\n" + BODY, "cp1252", "read as comma-separated cp1252"),
    "UTF-16": ("image,report\r\n" + BODY, "utf-16", "read as comma-separated utf-16"),
    "a German Excel": (
        SEMICOLONS,
        "cp1252",
        "semicolon-separated cp1252 with the columns image, report in another case",
    ),
    "what Excel calls CSV": (
        "sep=;\r\n" + SEMICOLONS,
        "utf-8",
        "semicolon-separated utf-8 with the columns image, report",
    ),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_exports_are_read_as_what_they_are_and_it_is_said(
    export: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, encoding, said = EXPORTS[export]
    cohort = exported(tmp_path, text, encoding).build()
    assert cohort.reports == CLEANED
    assert cohort.sites is None
    assert cohort.patients == cohort.ids
    warned = [
        record.message for record in caplog.records if record.levelno >= logging.WARNING and "read" in record.message
    ]
    assert len(warned) == bool(said)
    assert said in "".join(warned)


WORDS = ["Kein", "Erguß.", "größer,", "rechts;", '"frei"', "5 mm", "a|b", "x\ty", "Z.n.\nOP", "Übersicht"]
CELLS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


@settings(deadline=None)
@given(
    st.lists(CELLS, min_size=2, max_size=5),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]),
    st.sampled_from(list(delimited.DELIMITERS)),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_a_table_is_the_same_in_every_encoding_with_any_delimiter_and_line_end(
    reports: list[str], encoding: str, mark: str, end: str, quoting: Any
) -> None:
    """With signs of the format in its cells."""
    rows = [[f"{number}.png", report] for number, report in enumerate(reports)]
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=mark, lineterminator=end, quoting=quoting).writerows([["image", "report"], *rows])
    table = delimited.read(written.getvalue().encode(encoding), ["image", "report"])
    assert (table.columns, table.lines) == (["image", "report"], rows)


AMBIGUOUS = {
    "two encodings": ("image,report\n%s,Neumonía del lóbulo\n%s,a\n%s,b\n".encode() + b"x,l\xf3bulo\n",
                      "two encodings: line 5 is no UTF-8"),
    "none of the three": (b"image,report\nx,l\x81bulo\n", "line 2 is neither UTF-8 nor cp1252"),
    "no text": (b"\0\1\2\3" * 20, "none of the table's 1 columns is 'image', 'report'"),
    "two delimiters": (b"image,report;image;report,x\n", "the delimiter may be comma or semicolon"),
    "two columns of one name": (b"Image,IMAGE,report\n", "2 columns are 'image' but for their case"),
    "names of its own": (b"Bild;Befund\nx.png;Erguss\n", "none of the table's 2 columns is 'image', 'report'"),
    "a name twice": (b"image,report,site,report\n", "column 4 of the table has the name of one before it"),
    "no row": (b"\xef\xbb\xbfimage,report\n", "the table has no row below its header"),
    "nothing": (b"", "is empty; export it again"),
    "blank lines": (b"\r\n \n", "is empty; export it again"),
    "a mark alone": ("\ufeff".encode(), "is empty; export it again"),
    "no reports": (b"image,n\nx.png,1\n", 'a table of images without reports: set report_column=""'),
}  # fmt: skip


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    for case in AMBIGUOUS:
        raw, said = AMBIGUOUS[case]
        (tmp_path / "pairs.csv").write_bytes(raw)
        assert said in silent_error(TableSource(str(tmp_path / "pairs.csv")))


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def packed_tables(rows: list[dict[str, object]], text: bytes) -> dict[str, bytes]:
    """The table in every container that is read."""
    lines = "\n".join(map(json.dumps, rows)).encode()
    made = {"gz": gzip.compress(text, mtime=0), "bz2": bz2.compress(text), "xz": lzma.compress(text), "jsonl": lines}
    made |= {"zip": zipped(**{"a/t.csv": text, "__MACOSX/t.csv": b"x"}), "jsonl.gz": gzip.compress(lines, mtime=0)}
    return made | {"json": json.dumps(rows, indent=1).encode(), "json with a mark": b"\xef\xbb\xbf" + lines}


def test_tables_in_other_files_are_read(tmp_path: Path) -> None:
    source = exported(
        tmp_path, "image,report\n%s,Neumon\u00eda del l\u00f3bulo\n%s,Sin derrame visible\n%s,\n", "utf-8"
    )
    source = replace(source, min_report_words=0)
    file = tmp_path / "pairs.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        rows: list[dict[str, object]] = [{**row, "report": row["report"] or None} for row in csv.DictReader(lines)]
    plain, containers = source.build(), packed_tables(rows, file.read_bytes())
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
        containers["parquet"] = file.read_bytes()
    for raw in containers.values():
        file.write_bytes(raw)
        assert source.build().fingerprint == plain.fingerprint


def test_what_no_table_is_read_from_is_named_with_its_remedy(tmp_path: Path) -> None:
    for raw, said in [
        (zipped(**{"xl/workbook.xml": b"canary"}), "is an Excel workbook, and no CSV; save it as CSV"),
        (zipped(mimetype=b"x", **{"content.xml": b"x"}), "is an OpenDocument spreadsheet or text"),
        (zipped(**{"a.csv": b"x", "b.csv": b"x"}), "is an archive with 2 tables, and no CSV; unpack it"),
        (gzip.compress(b"image,report\n" * 99, mtime=0)[:-9], "is damaged, or was cut off"),
        (gzip.compress(b"%PDF-1.7", mtime=0), "is a PDF, and no CSV; export the table as CSV"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an old Excel workbook"),
        (b"\n<html><table>canary", "is XML or a web page"),
        (b'{"image": "canary', "is JSON that cannot be read"),
        (b'[{"image": 1}, 2]', "is JSON with other than objects"),
        (b"\x89PNG\r\n", "is an image"),
        (b"PAR1 canary", "parquet"),
    ]:
        (tmp_path / "pairs.csv").write_bytes(raw)
        assert said in silent_error(TableSource(str(tmp_path / "pairs.csv")))


@pytest.mark.parametrize(
    "title", ["Canary export\n", "Canary, of 2024;;\n\n", "\n", "Created;2024-01-01;\nby canary\n"]
)
def test_a_title_above_the_header_is_left_out_and_said(
    title: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "image;report;n\n%s;Derrame en el lado;1\n%s;No derrame visto;2\n%s;Sin derrame visto;3\n"
    plain = exported(tmp_path, body, "utf-8").build()
    source = exported(tmp_path, title + body, "utf-8")
    assert source.build().fingerprint == plain.fingerprint
    assert re.search(rf"without {title.count(chr(10))} lines? above its header", caplog.text)
    assert not source.names_sites()
    assert "canary" not in caplog.text.lower()


WESTERN = (
    "Kein Pleuraerguß, Herz nicht vergrößert. Herd von 5 µm², Übersicht",
    "Épanchement modéré, cœur normal, pas d\u2019opacité à la base",
    "Neumonía del lóbulo inferior, corazón pequeño. ¿Derrame?",
    "Não há derrame, coração normal, opacidade na região do pulmão",
    "Più opacità alla base, l\u2019ombra cardiaca è nei limiti",
    "Hjertet er ikke forstørret, på venstre side fortætninger",
    "Hjärtat är inte förstorat, på vänster sida små områden",
)
OTHERS = {
    "Płuca bez zmian, serce niepowiększone, kąty wolne": ("cp1250", "iso-8859-2", "cp852"),
    "Plíce bez ložisek, srdce není zvětšeno, při předchozím": ("cp1250", "iso-8859-2", "mac_latin2"),
    "Bal oldalon folyadékgyülem, kóros árnyék nincs, tüdőszűrés": ("cp1250", "iso-8859-2"),
    "Pluća bez promjena, srce nije povećano, ošit, kašalj, žarište": ("cp1250", "iso-8859-2"),
    "Akciğerler normal, kalp boyutu artm\u0131ş, sol altta s\u0131v\u0131": ("cp1254", "iso-8859-9"),
    "Легкие без очаговых изменений, синусы свободны": ("cp1251", "koi8-r", "iso-8859-5", "cp866", "mac_cyrillic"),
    "Πνεύμονες χωρίς εστιακές αλλοιώσεις": ("cp1253", "iso-8859-7", "cp737"),
    "ריאות ללא תסנינים": ("cp1255", "iso-8859-8"),
    "الرئتان خاليتان من الآفات": ("cp1256", "iso-8859-6"),
    "Plaušas bez izmaiņām, sirds nav palielināta, šķidrums": ("cp1257",),
    "双肺纹理清晰\uff0c心影不大\uff0c未见胸腔积液。": ("gbk", "big5"),
    "両側の肺に異常陰影はありません": ("cp932", "euc_jp"),
    "양측 폐에 이상 소견 없음": ("euc_kr",),
    "Kein Pleuraerguß, Herz nicht vergrößert": ("cp850", "mac_roman"),
}


def test_an_encoding_is_guessed_only_where_it_makes_words() -> None:
    for text in WESTERN:
        assert delimited.decoded(f"image;report\nx.png;{text}\n".encode("cp1252")) == (
            f"image;report\nx.png;{text}\n",
            "cp1252",
        )
    named = "image;report\n" + "x.png;Herz nicht vergrößert\n" * 20 + "y.png;Morbus Behçet\n"
    assert delimited.decoded(named.encode("cp1252")) == (named, "cp1252")
    for text, encodings in OTHERS.items():
        for encoding in encodings:
            raw = f"image;report\nx.png;{text}\n".encode(encoding, "ignore")
            with pytest.raises(
                ValueError, match=r"line 2 is (no UTF-8, and no words|neither UTF-8).*set data\.encoding"
            ):
                delimited.decoded(raw)
            assert delimited.decoded(raw, encoding)[1] == encoding


def test_what_is_set_is_not_told_from_the_file(tmp_path: Path) -> None:
    source = exported(tmp_path, SEMICOLONS, "cp1250")
    assert replace(source, encoding="cp1250", delimiter=";").build().reports == CLEANED
    (tmp_path / "pairs.csv").write_bytes(b"image,report\nx,l\xf3bulo\n")
    assert "line 2 is no utf-8; export the table again" in silent_error(replace(source, encoding="utf-8"))
    assert "encoding 'utf-9' is none that Python knows" in silent_error(replace(source, encoding="utf-9"))
    assert "data.delimiter is '::'" in silent_error(replace(source, delimiter="::"))


def test_a_text_with_unquoted_commas_is_not_cut_in_silence(tmp_path: Path) -> None:
    source = exported(tmp_path, "image,report\n%s,Edema, mild\n%s,Effusion on the left\n%s,No effusion seen\n", "utf-8")
    summary = replace(source, max_skipped=0.5).summary()
    assert summary["skipped: more cells than columns"] == 1
    assert summary["used"] == 2
    assert "more cells than columns 1 (row 1)" in silent_error(source)


def quoted(folder: Path, reports: dict[int, str]) -> TableSource:
    """A table of twelve films of twelve patients as written by hand, so that a mark in ``reports`` stays lone."""
    lines = ["image,report,patient_id,Edema"]
    for i in range(12):
        text = reports.get(i, "no canary effusion seen")
        lines.append(f"{picture(folder / f'{i}.png', i)},{text},p{i},1")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return TableSource(str(folder / "pairs.csv"), image_size=16)


LONE = {
    "one": ({3: '"no canary effusion seen'}, "the row that begins in line 5 is not CSV"),
    "two that open": ({3: '"no canary effusion seen', 9: '"no canary effusion'}, "that begins in line 5 is not CSV"),
    "two of neighbours": ({3: '"no effusion, seen', 4: 'no canary effusion"'}, "line 5 is where such rows begin"),
    "two around others": ({3: '"no canary effusion seen', 9: 'no canary effusion"'}, "line 5 is where such rows begin"),
}


def test_a_lone_quotation_mark_takes_no_other_patients_rows_into_a_report(tmp_path: Path) -> None:
    for case in LONE:
        reports, said = LONE[case]
        assert said in silent_error(quoted(tmp_path, reports))


def test_reports_of_several_lines_in_quotation_marks_are_read(tmp_path: Path) -> None:
    """With commas, numbers, empty lines and marks written twice; and where the films come last."""
    text = '"Edema, 3, mild.\r\n\r\n1. Heart, lungs, ribs, 1\n2, the ""canary"" sign.\nn,o,p1,1"'
    cohort = quoted(tmp_path, {3: text}).build()
    assert len(cohort) == 12
    assert cohort.reports[3] == "edema 3 mild heart lungs ribs 1 2 the canary sign n o p1 1"
    rows = [["Small effusion,\nand edema, no, p1\nHeart, normal.", row[0]] for row in good(tmp_path, 4)]
    assert len(TableSource(write(tmp_path, rows, ["report", "image"]), image_size=16).build()) == 4


def test_a_text_with_an_unquoted_line_break_is_not_cut_in_silence(tmp_path: Path) -> None:
    """Both halves of the row are counted; before, the first was used with half of its report and no label."""
    source = replace(quoted(tmp_path, {3: "no canary effusion seen\nand no edema"}), label_columns="Edema")
    summary = source.summary()
    assert summary["rows"] == 13
    assert summary["skipped: fewer cells than columns"] == 2
    assert summary["used"] == 11
    assert "fewer cells than columns 2 (row 4, 5)" in silent_error(replace(source, max_skipped=0.1))


def test_a_report_longer_than_csv_reads_by_itself_is_read(tmp_path: Path) -> None:
    rows = good(tmp_path, 2)
    limit = csv.field_size_limit()
    rows[0][1] = "effusion " * (limit // 8)
    cohort = TableSource(write(tmp_path, rows), image_size=16).build()
    assert len(cohort.reports[0].split()) == limit // 8
    assert csv.field_size_limit() == limit


def people(folder: Path, patients: list[str], studies: list[str]) -> TableSource:
    """A table of a film for each of the ``patients``, whose split is drawn."""
    pairs = enumerate(zip(patients, studies, strict=True))
    rows = [[picture(folder / f"{i}.png", i), REPORT, patient, study] for i, (patient, study) in pairs]
    return TableSource(write(folder, rows, ["image", "report", "patient_id", "study_id"]), image_size=8)


def splits_of_studies(cohort: Cohort) -> list[set[str]]:
    """The splits of the images 2k and 2k + 1, for each k."""
    splits = cohort.splits.tolist()
    return [set(pair) for pair in zip(splits[::2], splits[1::2], strict=True)]


STUDIES = [f"s{i // 2}" for i in range(60)]


def test_no_study_is_in_two_splits_where_patients_are_missing(tmp_path: Path) -> None:
    """In every fifth study no film has a patient, and in one study one film of two; nobody has four spellings."""
    blanks = ("", "nan", "NA", " null ")
    patients = [blanks[i % 4] if i // 2 % 5 == 0 else f"p{i // 4}" for i in range(60)]
    patients[2] = ""
    cohort, summary = people(tmp_path, patients, STUDIES).prepare()
    assert all(len(splits) == 1 for splits in splits_of_studies(cohort))
    assert cohort.patients[2] == cohort.patients[3] != cohort.patients[0]
    assert len({cohort.patients[i] for i in range(0, 60, 10)}) == 6, "each study its own patient"
    assert summary[BY_STUDY] == 13
    assert BY_ROW not in summary


def test_without_a_column_of_patients_the_study_is_the_patient(tmp_path: Path) -> None:
    source = replace(people(tmp_path, ["p"] * 60, STUDIES), patient_column="")
    cohort, summary = source.prepare()
    assert all(len(splits) == 1 for splits in splits_of_studies(cohort))
    assert summary["patients"] == 30
    assert summary[BY_STUDY] == 60
    assert replace(source, study_column="").summary()[BY_ROW] == 60


def test_a_patient_and_a_study_are_one_however_they_are_written(tmp_path: Path) -> None:
    """A word for nothing is nobody."""
    source = people(tmp_path, ["P1", "p1", "p 2", "P  2", "none", "NaN"], ["S", "s", "S2", "s2", "n/a", "null"])
    cohort = source.build()
    assert [cohort.patients.index(name) for name in cohort.patients] == [0, 0, 2, 2, 4, 5]
    assert [cohort.studies.index(name) for name in cohort.studies] == [0, 0, 2, 2, 4, 5]


def test_ids_that_a_spreadsheet_shortened_are_refused_by_row_count(tmp_path: Path) -> None:
    for shortened in ["1,23457E+11", "1.2e+5", "1E+12", "#####", "#N/A"]:
        given = [shortened, shortened.lower(), "3", "4", "2E+11", "1E5"]
        for source in (people(tmp_path, given, list("abcdef")), people(tmp_path, list("abcdef"), given)):
            assert re.search("in 2 of 6 rows '(patient|study)_id' is a number that a spreadsheet", silent_error(source))
        names = [f"{number}E+11" for number in range(6)]  # none merges two patients
        assert people(tmp_path, names, list("abcdef")).summary()["patients"] == 6


def test_a_number_with_a_decimal_of_zero_is_the_same_number_where_a_column_has_both(tmp_path: Path) -> None:
    source = people(tmp_path, ["100", "100.0", "100,00", "101.0", "100.1", "1000"], [""] * 6)
    cohort = source.build()
    assert len(set(cohort.patients[:3])) == 1
    assert len(set(cohort.patients)) == 4


def test_the_number_of_a_visit_is_a_study_of_each_patient(tmp_path: Path) -> None:
    """Beside patients that are known, a row without one is its image's own: its study does not say whose it is."""
    cohort, summary = people(tmp_path, ["a", "a", "b", "b", "a", ""], ["1", "1", "1", "1", "2", "1"]).prepare()
    assert [cohort.studies.index(name) for name in cohort.studies] == [0, 0, 2, 2, 4, 5]
    assert [cohort.patients.index(name) for name in cohort.patients] == [0, 0, 2, 2, 0, 5]
    assert summary[BY_ROW] == 1


def test_drawn_splits_are_disjoint_by_patient_and_repeatable(tmp_path: Path) -> None:
    rows = good(tmp_path, 80)
    header = ["image", "report", "site", "patient_id"]
    path = write(tmp_path, column(rows, *header), header)
    source = TableSource(path, image_size=8, val_fraction=0.2, test_fraction=0.2)
    cohort = source.build()
    by_patient: dict[str, set[str]] = {}
    for patient, split in zip(cohort.patients, cohort.splits.tolist(), strict=True):
        by_patient.setdefault(patient, set()).add(split)
    assert all(len(splits) == 1 for splits in by_patient.values())
    for site in ("site0", "site1"):  # 20 patients of 2 images: 4 test, 4 val
        assert [len(cohort.rows(split, site)) for split in ("train", "val", "test")] == [24, 8, 8]
    assert cohort.splits.tolist() == source.build().splits.tolist()
    other = TableSource(path, image_size=8, val_fraction=0.2, test_fraction=0.2, seed=1).build()
    assert cohort.splits.tolist() != other.splits.tolist()
    turned = TableSource(write(tmp_path, column(rows[::-1], *header), header), image_size=8, val_fraction=0.2).build()
    assert dict(zip(turned.ids, turned.splits.tolist(), strict=True)) == dict(
        zip(cohort.ids, cohort.splits.tolist(), strict=True)
    )


def test_drawn_splits_of_a_patient_at_two_sites_and_of_small_sites() -> None:
    splits = draw_splits(("p", "p", "q", "r"), ("b", "a", "b", "c"), 0.4, 0.4, 0)
    assert splits[0] == splits[1]
    assert splits[2] == splits[3] == "train", "a site of one patient trains"
    with pytest.raises(ValueError, match="below 1"):
        TableSource("x.csv", val_fraction=0.5, test_fraction=0.5).build()
    with pytest.raises(ValueError, match="max_skipped"):
        TableSource("x.csv", max_skipped=2).build()


def test_a_patient_in_two_given_splits_is_refused(tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    rows[1][4] = "val"
    assert "more than one split" in silent_error(TableSource(write(tmp_path, rows), image_size=16))


def test_number_labels_and_fixed_classes(tmp_path: Path) -> None:
    rows = [[*row[:5], value, "0"] for row, value in zip(good(tmp_path, 4), ["1", "0.0", "-1", ""], strict=True)]
    path = write(tmp_path, rows, [*HEADER[:5], "edema", "mass"])
    cohort = TableSource(path, image_size=16, label_columns=("edema", "mass")).build()
    assert cohort.label_names == ("edema", "mass")
    np.testing.assert_array_equal(cohort.labels[:, 0], [1, 0, -1, np.nan])
    rows[0][5] = "0.7"
    bad = TableSource(write(tmp_path, rows, [*HEADER[:5], "edema", "mass"]), image_size=16, label_columns="edema")
    assert "1 values of label column 'edema'" in silent_error(bad)

    words = good(tmp_path, 4)
    words[1][5] = ""
    words[2][5] = "Mass"
    fixed = TableSource(write(tmp_path, words), image_size=16, label_columns="finding", label_values="Normal,Edema")
    np.testing.assert_array_equal(fixed.build().labels, [[1, 0], [np.nan, np.nan], [0, 0], [1, 0]])


def test_a_class_may_be_called_none_where_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = good(tmp_path, 4)
    for row, word in zip(rows, ["none", "Edema", "", "none"], strict=True):
        row[5] = word
    source = TableSource(write(tmp_path, rows), image_size=16, label_columns="finding", label_values="none,Edema")
    np.testing.assert_array_equal(source.build().labels, [[1, 0], [0, 1], [np.nan, np.nan], [1, 0]])
    assert "a word for nothing" not in caplog.text
    unnamed = replace(source, label_values="").build()
    np.testing.assert_array_equal(unnamed.labels, [[np.nan], [1], [np.nan], [np.nan]])
    assert "'finding': 2 cells hold a word for nothing" in caplog.text


def test_capitals_make_no_class_of_their_own(tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    for row, word in zip(rows, ["Normal", "normal", "Edema", "EDEMA"], strict=True):
        row[5] = word
    source = TableSource(write(tmp_path, rows), image_size=16, label_columns="finding")
    found = source.build()
    assert found.label_names == ("Edema", "Normal")
    expected = [[0, 1], [0, 1], [1, 0], [1, 0]]
    np.testing.assert_array_equal(found.labels, expected)
    np.testing.assert_array_equal(replace(source, label_values="edema,normal").build().labels, expected)


def labelled(folder: Path, cells: list[str], **settings: str) -> TableSource:
    """A table with such a column of labels."""
    rows = [[picture(folder / f"{i}.png", i), cell] for i, cell in enumerate(cells)]
    table = write(folder, rows, ["image", "finding"])
    return TableSource(table, image_size=8, report_column="", label_columns="finding", **settings)


LISTS = [["Edema", "Effusion"], ["Edema"], ["Effusion"], ["Edema", "Mass"], ["No Finding"]]


@pytest.mark.parametrize(("mark", "as_list"), [
    ("|", False), (";", True), (", ", False), (", ", True), ("/", True), ("\n", False), ("+", False), (" & ", True),
    ("\u3001", False), ("~", True), ("\t", False),
])  # fmt: skip
def test_several_findings_in_a_cell_are_classes_where_it_is_said_what_parts_them(
    mark: str, as_list: bool, tmp_path: Path
) -> None:
    written = [[repr(name) for name in names] if as_list else names for names in LISTS]
    cells = [f"[{mark.join(names)}]" if as_list else mark.join(names) for names in written]
    source = labelled(tmp_path, cells)
    sign = mark.strip(" ")
    classes = "Effusion,Edema"
    if (mark, as_list) == (", ", True):  # as Python and JSON write a list: nothing else is meant
        assert source.build().labels.sum(1).tolist() == [2, 1, 1, 2, 1]
    else:
        assert f"in 2 of 5 cells, with {sign!r} between them; set label_separator" in silent_error(source)
        assert "set label_separator" in silent_error(replace(source, label_values=classes))
    cohort = replace(source, label_separator=sign).build()
    assert cohort.label_names == ("Edema", "Effusion", "Mass", "No Finding")
    assert cohort.labels.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    named = replace(source, label_separator=sign, label_values=classes).build()
    assert named.labels.tolist() == [[1, 1], [0, 1], [1, 0], [0, 1], [0, 0]]
    assert replace(source, label_separator="none").build().labels.sum(1).tolist() == [1] * 5


def test_a_name_with_a_sign_in_it_is_one_class(tmp_path: Path) -> None:
    for cells in [
        ["Pneumonia, viral", "Pneumonia, bacterial", "Normal"],
        ["COVID-19", "Non-COVID", "Mass (left)", "Mass (right)"],
        ["right lower lobe", "right upper lobe", "left lower lobe"],
        ["Edema", "n/a", "Effusion", ""],
    ]:
        cohort = labelled(tmp_path, cells).build()
        assert len(cohort.label_names) == len([cell for cell in cells if cell not in ("n/a", "")])


def test_free_text_is_no_label(tmp_path: Path) -> None:
    rows = good(tmp_path, 70)
    for i, row in enumerate(rows):
        row[5] = f"Canary {i}"
    assert "70 values" in silent_error(TableSource(write(tmp_path, rows), image_size=8, label_columns="finding"))


def test_images_without_text(tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    rows[0][1] = ""
    rows[1][1] = "Canary effusion"
    kept, summary = TableSource(write(tmp_path, rows), image_size=16, min_report_words=0).prepare()
    assert (kept.reports[0], kept.reports[3]) == ("canary effusion", "")
    assert summary["with an image alone"] == 1
    assert "skipped: report too short" in TableSource(write(tmp_path, rows), image_size=16, max_skipped=1).summary()
    assert TableSource(write(tmp_path, rows), image_size=16, report_column="").build().reports == ("",) * 4


def halves(folder: Path, rows: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Two pairs of one patient, two images of another, then two reports of a third and one of nobody's."""
    table = [[*row[:2], row[3], "study" + row[3][-1]] for row in rows[:4]]
    table[2][1] = table[3][1] = ""
    said = "Canary pneumothorax on the right."
    table += [["", said, "Canary^9", "study9"], ["", "Canary heart is large.", "Canary^9", "study8"]]
    return [*table, ["", said, "", ""]], ["image", "report", "patient_id", "study_id"]


def test_rows_have_an_image_a_report_or_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pairs stand first, then images, then reports. A report's id does not depend on where in the table it stands."""
    table, header = halves(tmp_path, good(tmp_path, 4))
    with caplog.at_level(logging.DEBUG):
        cohort, summary = TableSource(write(tmp_path, table, header), image_size=16).prepare()
    assert cohort.has_image().tolist() == [True] * 4 + [False] * 3
    assert cohort.has_report().tolist() == [True, True, False, False, True, True, True]
    assert cohort.reports[4] == cohort.reports[6] == "canary pneumothorax on the right"
    assert len(set(cohort.ids)) == 7
    assert len(set(cohort.patients)) == 4, "a report of nobody is a patient of its own"
    assert [summary[name] for name in ("rows", "used", "with an image alone", "with a report alone")] == [7, 7, 2, 3]
    assert summary["without patient: each its own"] == 1
    assert not cohort.images(np.array([4, 6])).any(), "no pixel is made up"
    assert cohort.images(np.array([3])).any()
    assert cohort.files is not None
    assert cohort.files[4] is None
    assert "anary" not in caplog.text

    turned = TableSource(write(tmp_path, table[::-1], header), image_size=16).build()
    assert set(turned.ids) == set(cohort.ids)
    again = [*table, table[4], ["", table[5][1].upper(), *table[5][2:]]]
    counted = TableSource(write(tmp_path, again, header), image_size=16, max_skipped=0.5).summary()
    assert (counted["used"], counted["skipped: duplicate report"]) == (7, 2)
    beside = [*table, ["", *table[0][1:]]]  # the report of a pair once more, without its image
    assert TableSource(write(tmp_path, beside, header), image_size=16).summary()["skipped: duplicate report"] == 1


def test_equal_reports_of_people_whom_the_table_does_not_tell_apart_are_all_kept(tmp_path: Path) -> None:
    path = write(tmp_path, [[REPORT], [REPORT], ["Canary heart is large."]], ["report"])
    cohort, summary = TableSource(path, image_column="", image_size=16).prepare()
    assert (len(set(cohort.ids)), len(set(cohort.patients)), summary["used"]) == (3, 3, 3)
    assert cohort.images(np.arange(3)).shape == (3, 16, 16)
    message = silent_error(TableSource(path, image_size=16))
    assert "table of reports without images: set image_column=" in message
    assert "name one of them" in silent_error(TableSource(path, image_column="", report_column=""))
    empty = write(tmp_path, [[REPORT, "1"], ["", "2"]], ["report", "number"])
    assert TableSource(empty, image_column="", image_size=16, max_skipped=0.5).summary()["skipped: empty report"] == 1


def test_a_report_that_has_lost_its_image_is_no_report_alone(tmp_path: Path) -> None:
    """A name without a file is damage, and counted as such; so is an image that cannot be read."""
    table, header = halves(tmp_path, good(tmp_path, 4))
    (tmp_path / table[0][0]).unlink()
    (tmp_path / table[1][0]).write_bytes(b"canary")
    summary = TableSource(write(tmp_path, table, header), image_size=16, max_skipped=0.5).summary()
    assert summary["used"] == 5
    assert summary["skipped: missing image"] == summary["skipped: unsupported image format"] == 1


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_json_and_parquet_have_rows_of_either_half_too(form: str, tmp_path: Path) -> None:
    table, header = halves(tmp_path, good(tmp_path, 4))
    records = [{name: cell or None for name, cell in zip(header, row, strict=True)} for row in table]
    path = tmp_path / f"pairs.{form}"
    if form == "parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(arrow.Table.from_pylist(records), path)
    elif form == "json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    expected = TableSource(write(tmp_path, table, header), image_size=16).build()
    assert TableSource(str(path), image_size=16).build().fingerprint == expected.fingerprint


def test_the_fingerprint_sees_which_rows_have_an_image(tmp_path: Path) -> None:
    table, header = halves(tmp_path, good(tmp_path, 4))
    prints = []
    for lost in (None, 0, 1):
        rows = [["" if index == lost else row[0], *row[1:]] for index, row in enumerate(table)]
        prints.append(TableSource(write(tmp_path, rows, header), image_size=16).build().fingerprint)
    assert len(set(prints)) == 3


def test_small_sites_and_rows_without_a_site(tmp_path: Path) -> None:
    rows = good(tmp_path, 7)  # 4 at site0, 3 at site1
    cohort, summary = TableSource(write(tmp_path, rows), image_size=16, min_site_size=4).prepare()
    assert set(cohort.sites or ()) == {"site0"}
    assert summary["skipped: at sites below min_site_size"] == 3
    assert "2 sites" in silent_error(TableSource(write(tmp_path, rows), image_size=16, min_site_size=5))
    rows[0][2] = " "
    assert TableSource(write(tmp_path, rows), image_size=16).summary()["skipped: no site"] == 1


def test_the_cache_is_reused_and_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = good(tmp_path, 5)
    (tmp_path / rows[4][0]).write_bytes(b"canary")
    path, cache = write(tmp_path, rows), tmp_path / "cache"
    source = TableSource(path, image_size=16, cache=str(cache))
    first = source.build()
    with monkeypatch.context() as patch:
        patch.setattr("fedvlp.data.images.decode_stored", lambda *_: pytest.fail("decoded again"))
        second, summary = source.prepare()
    assert summary["skipped: unsupported image format"] == 1
    assert first.fingerprint == second.fingerprint == TableSource(path, image_size=16).build().fingerprint
    assert np.array_equal(first.images(np.arange(4)), second.images(np.arange(4)))
    picture(tmp_path / rows[0][0], 99)
    third = source.build()
    assert third.fingerprint != first.fingerprint
    assert not np.array_equal(third.images(np.array([0])), first.images(np.array([0])))
    TableSource(path, image_size=20, cache=str(cache)).build()
    folders = [folder for folder in cache.iterdir() if folder.is_dir()]
    assert len(folders) == 3, "one per content and size"
    assert all(b"anary" not in file.read_bytes() for folder in folders for file in folder.iterdir())


def test_the_fingerprint_follows_text_and_size(tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    first = TableSource(write(tmp_path, rows), image_size=16).build().fingerprint
    assert TableSource(write(tmp_path, rows), image_size=17).build().fingerprint != first
    rows[0][1] += " ____."
    assert TableSource(write(tmp_path, rows), image_size=16).build().fingerprint == first, "no word"
    other = [[*row, "1" if index < 2 else str(index)] for index, row in enumerate(rows)]
    studied = TableSource(write(tmp_path, other, [*HEADER, "study_id"]), image_size=16).build()
    assert studied.fingerprint != first, "studies decide the partition"
    rows[0][1] += " Much more."
    assert TableSource(write(tmp_path, rows), image_size=16).build().fingerprint != first


def test_the_fingerprint_sees_every_column_that_a_cohort_takes(tmp_path: Path) -> None:
    """Else a run resumes, and a finished one counts, on records that somebody has corrected since."""
    groups = {"sex": "F", "age": "33", "view": "AP"}  # of metrics alone: they train nothing, and are read anew
    changed = {"image": "other.png", "report": "A corrected report of it.", "site": "site9", "patient_id": "new",
               "study_id": "9", "split": "test", "finding": "Mass", **groups}  # fmt: skip
    header = [*HEADER, "study_id", *groups]
    people = enumerate(good(tmp_path, 4))
    rows = [[*row[:3], f"p{index}", *row[4:], str(index), "M", "70", "PA"] for index, row in people]
    picture(tmp_path / "other.png", 99)

    def built() -> Cohort:
        return TableSource(
            write(tmp_path, rows, header), image_size=16, label_columns="finding", subgroup_columns="sex,age"
        ).build()

    before = built()
    for column_, value in changed.items():
        at = header.index(column_)
        kept, rows[0][at] = rows[0][at], value
        after = built()
        assert (after.fingerprint == before.fingerprint) == (column_ in groups), column_
        rows[0][at] = kept
    assert set(before.subgroup_names) == set(groups)


def test_clean_report() -> None:
    for raw, clean in [
        ("1. No pneumothorax.\n2. Small LEFT effusion.", "no pneumothorax small left effusion"),
        ("FINDINGS: The heart is normal. Unchanged.", "findings the heart is normal unchanged"),
        ("Small effusion, 3.5 cm; follow-up", "small effusion 3 5 cm follow up"),
        ("Pneumonía bilateral — día 2", "pneumonia bilateral dia 2"),
        ("肺炎 あり pleural thickening seen", "pleural thickening seen"),
        ("a\ufffdb c", "a b c"),
        ("Normal. Clear. Fine.", "normal clear fine"),
        ("Compared with ____, edema of 2010. Rib 5. Ratio 1:1.", "compared with edema of 2010 rib 5 ratio 1 1"),
        ("IMPRESSION: 1. Pneumothorax. 2. Lung base.", "impression pneumothorax lung base"),
        ("Derrame pleural izq. basal. Cardiomegalia.", "derrame pleural izq basal cardiomegalia"),
        ("two words", ""),
        ("", ""),
    ]:
        assert clean_report(raw) == clean
        assert clean_report(clean) == clean


def test_reports_that_are_no_words_to_read_are_refused_for_that(tmp_path: Path) -> None:
    for report, said in [
        (r"{\rtf1\ansi Kein Erguss links.\par}", "report in RTF 4 (row 1, 2, 3, 4)"),
        ("Очаг слева 12 mm S6 D.", "report in other than Latin letters 4 (row 1, 2, 3, 4)"),
        ("Normal.", "min_report_words=1 keeps"),
    ]:
        rows = [[row[0], report, *row[2:]] for row in good(tmp_path, 4)]
        assert said in silent_error(TableSource(write(tmp_path, rows), image_size=16))


def test_reports_of_another_script_are_taken_as_written(tmp_path: Path) -> None:
    """The refusal says how; what a model is asked is then not cleaned either. An unknown way is none."""
    rows = [[row[0], "Очаг слева 12 мм.", *row[2:]] for row in good(tmp_path, 4)]
    source = TableSource(write(tmp_path, rows), image_size=16)
    assert "reports='as written'" in silent_error(source)
    written = replace(source, reports="as written")
    assert set(written.build().reports) == {"Очаг слева 12 мм."}
    assert (source.cleans_reports, written.cleans_reports) == (True, False)
    with pytest.raises(ValueError, match="expected cleaned, as written, papers"):
        replace(source, reports="raw").build()


@pytest.mark.parametrize(("mark", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\r\n")])
def test_empty_columns_and_rows_as_excel_leaves_them_are_none(mark: str, end: str, tmp_path: Path) -> None:
    text = (
        "image;report;;;\n%s;Kein Erguss rechts;;;\n%s;Derrame pleural izquierdo;;;\n%s;Brak płynu w jamie;;;\n;;;;\n"
    )
    source = exported(tmp_path, text.replace(";", mark).replace("\n", end), "utf-8")
    assert source.summary()["rows"] == source.summary()["used"] == 3


def test_missing_cells() -> None:
    assert all(map(is_missing, ["", "  ", "\r\n", "NaN", "none", "N/A", "NULL"]))
    assert not is_missing("no finding")


def test_the_361_real_pairs_of_four_sites() -> None:
    if not PAIRS.is_file():
        pytest.skip("../shared/data/real-cxr is absent")
    unsearched = {"path": str(PAIRS), "burned_in": "header"}  # some of these figures show words
    cohort, summary = TableSource(
        **unsearched, image_size=32, label_columns="finding", label_separator="none", min_report_words=0
    ).prepare()
    assert summary["rows"] == summary["used"] == len(cohort) == 361
    assert Counter(cohort.sites) == {"journals": 161, "radiopaedia": 103, "eurorad": 55, "sirm": 42}
    assert Counter(cohort.splits.tolist()) == {"train": 294, "val": 67}
    assert summary["patients"] == 216
    assert cohort.labels.sum() == 361
    images = cohort.images(np.arange(361))
    assert (images.reshape(361, -1).std(axis=1) > 5).all()
    assert TableSource(**unsearched, image_size=16).summary()["skipped: report too short"] == 3


def test_sentences_have_the_labels_of_their_table(tmp_path: Path) -> None:
    """Reports lose their full stops when they are read; their sentences are kept apart, and change the fingerprint."""
    rows = good(tmp_path, 4)
    for row in rows:
        row[5] = "1"
    table = write(tmp_path, rows)
    labels = tmp_path / "sentences.csv"
    labels.write_text("sentence,finding\nCanary effusion on the left,0\n", encoding="utf-8")
    plain = TableSource(table, image_size=16, label_columns="finding")
    cohort = replace(plain, sentence_table=str(labels)).build()
    assert plain.build().sentences is None
    assert cohort.sentences is not None
    (first, said), (second, unknown) = cohort.sentences(cohort.reports[2])
    assert (first, second) == ("canary effusion on the left", "number 2 seen")
    assert said.tolist() == [0]
    assert np.isnan(unknown).all()
    assert cohort.fingerprint != plain.build().fingerprint
    assert "anary" not in silent_error(replace(plain, sentence_table=str(tmp_path / "canary.csv")))


def test_a_header_of_many_columns_is_read_in_time_proportional_to_it() -> None:
    """Each name was looked for among all before it: 20,000 took seconds."""
    for name in ["c{}", ""]:
        header = ["image", "report", *(name.format(number) for number in range(20_000))]
        raw = "\n".join((",".join(header), ",".join(["a.png", "Clear."] + [""] * 20_000))).encode()
        start = time.process_time()
        assert delimited.read(raw, ["image", "report"]).columns == [one for one in header if one]
        assert time.process_time() - start < 0.5


def test_films_that_were_converted_are_found_by_the_names_that_they_had(tmp_path: Path) -> None:
    """Where no file has the name of the table; masks and texts beside them are none."""
    rows = good(tmp_path, 8)
    expected = TableSource(write(tmp_path, rows), image_size=16).build()
    (tmp_path / "canary0.txt").write_text("canary")
    converted = [[row[0].replace(".png", ".dcm"), *row[1:]] for row in rows]
    assert TableSource(write(tmp_path, converted), image_size=16).build().ids == expected.ids
    other = [[row[0].replace(".png", ".xml"), *row[1:]] for row in rows]
    assert "missing image 8" in silent_error(TableSource(write(tmp_path, other), image_size=16))


def test_what_a_spreadsheet_and_pandas_call_true_is_one(tmp_path: Path) -> None:
    rows = [[*row[:-1], ("TRUE", "False", "")[index % 3]] for index, row in enumerate(good(tmp_path, 6))]
    cohort = TableSource(write(tmp_path, rows), image_size=16, label_columns="finding").build()
    np.testing.assert_array_equal(cohort.labels[:, 0], [1, 0, np.nan] * 2)
    assert cohort.label_names == ("finding",)


def test_rows_that_cannot_be_used_are_named_with_what_to_do(tmp_path: Path) -> None:
    for column, cell, said in [
        ("report", "Canary effusion, gr\ufffd\ufffder.", "report with garbled letters 8.*export it again"),
        ("split", "0", "unknown split 8.*the split column says train, val or test"),
    ]:
        rows = good(tmp_path, 8)
        for row in rows:
            row[HEADER.index(column)] = cell
        assert re.search(said, silent_error(TableSource(write(tmp_path, rows), image_size=16)))


def test_a_patient_in_two_splits_is_refused_before_an_image_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows in question, counted from 1 below the header, and the setting that draws patients instead."""
    lines = ["image,report,patient_id,split"]
    for number, (patient, split) in enumerate([("a", "train"), ("b", "val"), ("a", "Training"), ("b", "test")]):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
        lines.append(f"{number}.png,no effusion is seen,{patient},{split}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    monkeypatch.setattr("fedvlp.data.sources.listed.films", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="1 of 2 patients are in more than one split") as refused:
        TableSource(str(tmp_path / "pairs.csv")).build()
    assert "row 2 (val) and row 4 (test) are one patient's" in str(refused.value)
    assert "data.split_column=" in str(refused.value)


# Columns


@pytest.mark.parametrize("setting", ["site_column", "patient_column", "study_column", "split_column", "view_column"])
def test_a_column_that_somebody_named_must_be_there(setting: str, tmp_path: Path) -> None:
    """A mistyped one would count each image as a patient, across train and test."""
    source = TableSource(write(tmp_path, good(tmp_path, 4)), image_size=16)
    assert "columns is 'patient_nr'" in silent_error(replace(source, **{setting: "patient_nr"}))
    assert len(replace(source, **{setting: ""}).build()) == 4


@pytest.mark.parametrize("name", ["PatientID", "Patient ID", "Patienten-Nr.", "subject_id", "MRN", "pat", "Patients"])
def test_a_column_that_seems_to_tell_patients_apart_is_asked_for(name: str, tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    path = write(tmp_path, rows, ["image", "report", "site", name, "split", "finding"])
    message = silent_error(TableSource(path, image_size=16))
    assert "column 4 seems to say whose each row is; set patient_column" in message
    assert len(set(TableSource(path, image_size=16, patient_column=name).build().patients)) == 2
    assert len(set(TableSource(path, image_size=16, patient_column="").build().patients)) == 4
    assert len(TableSource(path, image_size=16, study_column=name).build()) == 4, "it is named, for something else"


@pytest.mark.parametrize("name", ["patient_age", "patient_sex", "n_patients", "inpatient", "finding"])
def test_other_columns_with_patients_in_their_names_are_not_asked_for(name: str, tmp_path: Path) -> None:
    rows = [[row[0], row[1], "1"] for row in good(tmp_path, 3)]
    assert len(TableSource(write(tmp_path, rows, ["image", "report", name]), image_size=16).build()) == 3


@pytest.mark.parametrize("sign", ["\ufeff", "\ufeff\ufeff", "\u200b", "\u2060", "\u00a0", "\u00ad", "\x00"])
def test_names_of_columns_lose_signs_that_nobody_sees(sign: str, tmp_path: Path) -> None:
    rows = good(tmp_path, 4)
    header = [f"{sign}{HEADER[0]}", f"{HEADER[1]}{sign}", *HEADER[2:]]
    cohort = TableSource(write(tmp_path, rows, header), image_size=16).build()
    assert cohort.fingerprint == TableSource(write(tmp_path, rows), image_size=16).build().fingerprint


def test_columns_of_one_name_are_refused_only_where_they_are_read(tmp_path: Path) -> None:
    """As an index that was written twice, without a name or as Unnamed: 0."""
    rows = [[str(i), str(i), *row] for i, row in enumerate(good(tmp_path, 4))]
    for name in ("", "Unnamed: 0", "n"):
        assert len(TableSource(write(tmp_path, rows, [name, name, *HEADER]), image_size=16).build()) == 4
    twice = write(tmp_path, rows, ["report", "n", *HEADER])
    assert "column 4 of the table has the name of one before it" in silent_error(TableSource(twice, image_size=16))


@pytest.mark.parametrize("mark", ["|", ";", "+", " and "])
def test_several_label_columns_with_another_sign_are_told_how_to_be_written(mark: str, tmp_path: Path) -> None:
    path = write(
        tmp_path, [[row[0], row[1], "1", "0"] for row in good(tmp_path, 3)], ["image", "report", "Edema", "Mass"]
    )
    message = silent_error(TableSource(path, image_size=16, label_columns=f"Edema{mark}Mass"))
    assert '--set \'data.label_columns=["Edema", "Mass"]\'' in message
    for written in ("Edema,Mass", ("Edema", "Mass")):
        assert TableSource(path, image_size=16, label_columns=written).build().label_names == ("Edema", "Mass")


# Values


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1,0", "0,0", "-1,0", ""], [1, 0, -1, None]),
        (["1.0", "0", "\u22121", "nan"], [1, 0, -1, None]),
        (["100%", "0%", "\u20131", "NA"], [1, 0, -1, None]),
        (["TRUE", "false", "uncertain", ""], [1, 0, -1, None]),
        (["Yes", "no", "-1", "none"], [1, 0, -1, None]),
        (["ja", "Nein", "unklar", ""], [1, 0, -1, None]),
        (["positive", "negative", "0", "1"], [1, 0, 0, 1]),
    ],
)
def test_labels_are_read_as_spreadsheets_write_them(
    cells: list[str], expected: list[float | None], tmp_path: Path
) -> None:
    rows = [[row[0], row[1], cell] for row, cell in zip(good(tmp_path, 4), cells, strict=True)]
    labels = TableSource(
        write(tmp_path, rows, ["image", "report", "Edema"]), image_size=16, label_columns="Edema"
    ).build()
    assert labels.label_names == ("Edema",)
    assert [None if np.isnan(value) else value for value in labels.labels[:, 0].tolist()] == expected


def test_a_label_that_is_none_is_told_with_its_rows(tmp_path: Path) -> None:
    rows = [
        [row[0], row[1], cell, "1"] for row, cell in zip(good(tmp_path, 4), ["1", "50%", "canary", "2"], strict=True)
    ]
    path = write(tmp_path, rows, ["image", "report", "Edema", "Mass"])
    message = silent_error(TableSource(path, image_size=16, label_columns="Edema,Mass"))
    assert "3 values of label column 'Edema' are none of 1, 0, -1, empty (row 2, 3, 4" in message


def test_lists_of_python_and_json_are_lists(tmp_path: Path) -> None:
    """A comma in a name parts nothing; an empty list says nothing of any finding."""
    cells = ["['Edema', 'Mass, left']", '["Edema"]', "[' Mass, left ']", "[]", "nan", "['Edema']"]
    cohort = labelled(tmp_path, cells).build()
    assert cohort.label_names == ("Edema", "Mass, left")
    assert cohort.labels[:3].tolist() == [[1, 1], [1, 0], [0, 1]]
    assert np.isnan(cohort.labels[3:5]).all()


def test_a_site_is_one_however_spelled_and_its_name_is_a_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "Köln",
        "köln",
        "KOELN",
        "Ko\u0308ln",
        "Koln",
        "Klinik Nord",
        "klinik  nord",
        "St. Mary's / North",
        "../up",
    ]
    names += ["Public", "server", "北京医院", "Bauer", "Bar"]
    rows = [[picture(tmp_path / f"{i}.png", i), f"{REPORT} {i}", name] for i, name in enumerate(names)]
    source = TableSource(
        write(tmp_path, rows, ["image", "report", "site"]), image_size=16, val_fraction=0, test_fraction=0
    )
    cohort = source.build()
    assert cohort.sites == (
        *["Köln"] * 5, *["Klinik-Nord"] * 2, "St.-Mary-s-North", "up", "public", "server-site", "北京医院",
        "Bauer", "Bar",
    )  # fmt: skip
    assert "'KOELN' is 'Köln'" in caplog.text
    for name in set(cohort.sites or ()):
        refuse_no_folder(name)
    assert set(source.modalities_by_site()) == set(cohort.sites or ())
    for name in ("#?!", "x" * 200):
        bad = write(tmp_path, [*rows, [picture(tmp_path / "z.png", 99), REPORT, name]], ["image", "report", "site"])
        counted = replace(source, path=bad).summary()
        assert counted["used"] == len(rows)
        assert sum(count for reason, count in counted.items() if reason.startswith("skipped: ")) == 1


# Common findings


def test_words_of_any_collection_become_the_common_findings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NIH's Infiltration, Open-i's lung-opacity and CheXpert's own name are one label; what stands for none is said."""
    cells = ["Infiltration|Effusion", "lung-opacity", "Lung Opacity", "Pleural_Thickening", "Hernia", "no-finding"]
    source = replace(labelled(tmp_path, cells), label_separator="|", label_words="common")
    cohort = source.build()
    assert cohort.label_names == ("No Finding", "Lung Opacity", "Pleural Effusion", "Pleural Other")
    assert cohort.labels.tolist() == [
        [0, 1, 1, 0],
        [0, 1, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
    ]
    assert "1 of 7 labels stand for no common finding and are left out: 'Hernia'" in caplog.text
    caplog.clear()
    own = replace(source, label_words="Hernia=Lung Lesion,effusion=")
    assert own.build().label_names == ("No Finding", "Lung Opacity", "Lung Lesion", "Pleural Other")
    assert "stand for no common finding" not in caplog.text
    assert "label_words: 'Hernie' is no common finding" in silent_error(replace(source, label_words="Hernia=Hernie"))
    assert "write common, or WORD=FINDING" in silent_error(replace(source, label_words="Hernia"))
    none = replace(labelled(tmp_path, ["Hernia", "Scoliosis"]), label_words="common")
    assert "none of 2 labels stands for a common finding" in silent_error(none)


def test_of_several_labels_for_a_common_finding_one_that_is_present_decides(tmp_path: Path) -> None:
    """Then an uncertain one, then an absent one; where none is known it is not."""
    values = [("1", "0"), ("", "1"), ("-1", "0"), ("0", ""), ("", "")]
    rows = [[picture(tmp_path / f"{i}.png", i), f"{REPORT} {i}", *pair] for i, pair in enumerate(values)]
    path = write(tmp_path, rows, ["image", "report", "Mass", "Nodule"])
    cohort = TableSource(path, image_size=16, label_columns=("Mass", "Nodule"), label_words="common").build()
    assert cohort.label_names == ("Lung Lesion",)
    assert [None if np.isnan(x) else x for x in cohort.labels[:, 0].tolist()] == [1, 1, -1, 0, None]
