"""Tables as published that came damaged: what is wrong is named with a remedy, and nothing is read from them."""

from __future__ import annotations

import csv
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.published import chexpert_row, mimic, openi, openi_reports

from fedvlp.data.labels import CHEXPERT
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.published import numbers, read_rows
from fedvlp.data.sources.tabular import CheXpertSource, COVIDxSource, NIHSource

ROWS = "name,finding,more\n" + "".join(f"canary{i},none,{i}\n" for i in range(2000))


def read(path: Path, *optional: str) -> list[dict[str, str]]:
    return list(read_rows("toy", path, ("name", "finding"), optional))


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def gzip_cut(path: Path) -> None:
    path.write_bytes(gzip.compress(ROWS.encode(), mtime=0)[:-2000])


def gzip_wrong(path: Path) -> None:
    whole = bytearray(gzip.compress(ROWS.encode(), mtime=0))
    whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
    path.write_bytes(whole)


def no_gzip(path: Path) -> None:
    path.write_text(ROWS)


def zip_cut(path: Path) -> None:
    packed(path, {"t.csv": ROWS.encode()})
    path.write_bytes(path.read_bytes()[:-100])


def zip_wrong(path: Path) -> None:
    packed(path, {"t.csv": ROWS.encode()})
    whole = bytearray(path.read_bytes())
    whole[60:90] = bytes(30)
    path.write_bytes(whole)


def other_letters(path: Path) -> None:
    path.write_bytes(ROWS.replace("none", "R\u00f6ntgen").encode("cp1252"))


def lone_quotes(path: Path) -> None:
    """The text between two of them would be one cell, of several rows."""
    path.write_text(ROWS.replace("canary3,", '"canary3,').replace("canary9,", '"canary9,'))


def lone_quote(path: Path) -> None:
    path.write_text(ROWS.replace("canary3,", '"canary3,', 1))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("t.csv.gz", gzip_cut), ("t.csv.gz", gzip_wrong), ("t.csv.gz", no_gzip), ("t.csv.zip", zip_cut),
        ("t.csv.zip", zip_wrong), ("t.csv", other_letters), ("t.csv", lone_quotes), ("t.csv", lone_quote),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named_with_its_remedy(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    damage(tmp_path / name)
    with pytest.raises(ValueError, match=rf"toy source: {name} is damaged \(.*\); download it again") as caught:
        read(tmp_path / name)
    assert "canary" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_table_that_was_cut_off_within_a_row_is_refused(tmp_path: Path) -> None:
    """The last row has to be whole, whatever is read of it; what is read has to be there in all rows."""
    for end, columns in [("canary7", ("name", "finding")), ("canary7,no", ("name",)), ("canary7,none", ("name",))]:
        (tmp_path / "t.csv").write_text("name,finding,more\na,none,1\n" + end)
        with pytest.raises(
            ValueError, match=r"t\.csv is damaged: its line 3 ends before its last column; download"
        ) as e:
            list(read_rows("toy", tmp_path / "t.csv", columns))
        assert "canary" not in str(e.value)
        (tmp_path / "t.csv").write_text("name,finding,more\na\nb,none,1\n")
        with pytest.raises(ValueError, match="its line 2 ends before its last column"):
            read(tmp_path / "t.csv")
        assert [row["name"] for row in read_rows("toy", tmp_path / "t.csv", ("name",))] == ["a", "b"]


def test_a_table_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text(ROWS)

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "t.csv"))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"t\.csv cannot be read \(Permission denied\); see that its disk") as caught:
        read(tmp_path / "t.csv")
    monkeypatch.undo()
    assert str(tmp_path) not in str(caught.value)


def test_long_cells_quotes_and_missing_columns_are_read(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    long = "x" * (limit + 1)
    (tmp_path / "t.csv").write_text(f'name, finding\n"a ""b"", c","{long}"\nd,\n')
    rows = read(tmp_path / "t.csv", "age")
    assert [row["name"] for row in rows] == ['a "b", c', "d"]
    assert rows[0]["finding"] == long
    assert rows[1] == {"name": "d", "finding": "", "age": ""}
    assert csv.field_size_limit() == limit


def test_the_table_of_an_archive_made_on_a_mac_is_found(tmp_path: Path) -> None:
    junk = b"\0\5\x16\7junk"
    members = {"__MACOSX/._t.csv": junk, "._t.csv": junk, "in/._t.csv": junk, "readme.txt": b"x"}
    path = packed(tmp_path / "t.csv.zip", {**members, "in/t.CSV": b"name,finding\na,b\n"})
    assert read(path) == [{"name": "a", "finding": "b"}]
    packed(path, members)
    with pytest.raises(ValueError, match=r"there is no \.csv in t\.csv\.zip; give the archive as it was published"):
        read(path)


def test_labels_that_are_no_numbers_are_counted_and_not_repeated(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": ""}, {"a": "-1.0", "b": "0"}]
    np.testing.assert_array_equal(numbers("toy", rows, ("a", "b")), np.array([[1, np.nan], [-1, 0]], np.float32))
    assert numbers("toy", [], ("a", "b")).shape == (0, 2)
    films = [chexpert_row(f"C/train/patient0000{i}/study1/view1_frontal.jpg") for i in range(3)]
    films[1] |= {"Edema": "Mrs Canary"}
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(films[0]), *(list(row.values()) for row in films)])
    source = mimic(tmp_path / "m")
    table = tmp_path / "m" / "mimic-cxr-2.0.0-chexpert.csv"
    blank = ",".join([""] * (len(CHEXPERT) - 1))
    table.write_text(f"study_id,{','.join(CHEXPERT)}\n50000001,Mrs Canary,{blank}\n")
    for broken, said in ((CheXpertSource(str(tmp_path / "train.csv")), "1 of 3"), (source, "1 of 1")):
        with pytest.raises(
            ValueError, match=f"{said} rows have a label that is not a number; give the table"
        ) as caught:
            broken.build()
        assert "Canary" not in str(caught.value)


def test_damaged_archives_and_lists_of_other_collections_are_named_too(tmp_path: Path) -> None:
    openi(tmp_path / "openi")
    archive = tmp_path / "openi" / "NLMCXR_reports.tgz"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as made:
        made.add(openi_reports(tmp_path / "xml"), "ecgen-radiology")
    whole = content.getvalue()
    for broken in (whole[: len(whole) // 2], b"no archive"):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match=r"openi source: NLMCXR_reports\.tgz is damaged \(.*\); download it again"):
            list(OpenISource(str(archive)).reports())
    table = tmp_path / "Data_Entry_2017_v2020.csv"
    table.write_text("Image Index,Finding Labels,Patient ID,Follow-up #\n1.png,Mass,1,0\n")
    films: dict[str, Any] = {"test_list.txt": NIHSource(str(table), test_list=str(tmp_path / "test_list.txt"))}
    films["train_COVIDx9A.txt"] = COVIDxSource(str(tmp_path / "train_COVIDx9A.txt"))
    for name, source in films.items():
        (tmp_path / name).write_bytes("R\u00f6ntgen.png".encode("cp1252"))
        with pytest.raises(ValueError, match=rf"{name} is damaged \(not UTF-8\); download it again"):
            source.build()
