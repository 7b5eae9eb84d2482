"""Subgroups of people: ages in bands, and columns that stay with their rows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.probing import cohort

from fedvlp.data.cohort import Cohort
from fedvlp.data.sources.table import TableSource
from fedvlp.data.subgroups import READ, SEX, age_band, table_of, view_of


def test_ages_are_bands_of_twenty_years() -> None:
    for text, band in [
            ("0", "0-19"), ("19.9", "0-19"), ("20", "20-39"), ("059Y", "40-59"), (" 79 ", "60-79"), ("80", "80+"),
            ("103", "80+"), ("11 M", "0-19"), ("6W", "0-19"), ("30D", "0-19"), ("414", ""), ("", ""), ("adult", ""),
            ("-3", ""), ("47Q", ""), ("45 years", "40-59"), ("45 J", "40-59"), ("45y/o", "40-59"), ("45,5", "40-59"),
            ("45-year-old", ""), ("6 months", "0-19"), ("90+", "80+"), (">89", "80+"), ("> 79", "80+"),
            ("\u226580", "80+"),            ("79+", ""), (">18", ""), ("18+", ""), ("999+", ""),
        ]:  # fmt: skip
        assert age_band(text) == band


def test_only_ages_are_cut_into_bands() -> None:
    values, names = table_of({"Age": ["47", "x"], "score": ["47", " 3 "]})
    assert values is not None
    assert (names, values.tolist()) == (("Age", "score"), [["40-59", "47"], ["", "3"]])
    assert table_of({}) == (None, ())


def test_sexes_and_views_of_all_collections_have_one_name() -> None:
    """What no list has stays as it is: it may be a value of its own."""
    sexes = ["F", " female ", "M", "Male", "Unknown", "", "w", "O"]
    views = ["AP", "pa", "Lateral", "LL", "Frontal", "AP AXIAL", "", "LATERAL"]
    values, _ = table_of({"Sex": sexes, "VIEW": views, "gender": sexes})
    assert values is not None
    assert values[:, 0].tolist() == ["F", "F", "M", "M", "", "", "F", "O"]
    assert values[:, 1].tolist() == ["AP", "PA", "lateral", "lateral", "frontal", "AP AXIAL", "", "lateral"]
    assert values[:, 2].tolist() == list(map(str.strip, sexes)), "columns of other names are not touched"


def people(count: int, **columns: list[str]) -> Cohort:
    plain = cohort(np.zeros((count, 1)), ["finding"], ["train"] * count)
    values, names = table_of(columns)
    return replace(plain, subgroups=values, subgroup_names=names)


def test_they_stay_with_their_rows() -> None:
    three = people(3, sex=["F", "M", ""], age=["1", "30", "99"])
    assert three.take(np.array([2, 0])).subgroup("age").tolist() == ["80+", "0-19"]
    assert three.subgroup("view").tolist() == ["", "", ""]
    others = [replace(part, ids=tuple(f"{n}{i}" for i in part.ids)) for n, part in enumerate([three, people(1)])]
    views = replace(people(1, view=["PA"], sex=["F"]), ids=("v",))
    joined = Cohort.concat([*others, views])
    assert joined.subgroup_names == ("sex", "age", "view")
    assert joined.subgroup("sex").tolist() == ["F", "M", "", "", "F"]
    assert joined.subgroup("view").tolist() == ["", "", "", "", "PA"]
    assert Cohort.concat([others[1]]).subgroups is None


def test_a_table_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"subgroups have shape \(2, 1\), expected \(2, 2\)"):
        replace(people(2, sex=["F", "M"]), subgroup_names=("sex", "age"))
    with pytest.raises(ValueError, match=r"subgroups have shape \(\), expected \(2, 1\)"):
        replace(people(2, sex=["F", "M"]), subgroups=None)
    with pytest.raises(ValueError, match="must be unique"):
        replace(people(2, sex=["F", "M"], age=["1", "2"]), subgroup_names=("sex", "sex"))


def write(folder: Path, header: str, cells: list[str]) -> str:
    for row in range(len(cells)):
        Image.fromarray(np.arange(576, dtype=np.uint8).reshape(24, 24) + row).save(folder / f"{row}.png")
    lines = [f"{row}.png,The lungs are clear.,{cell}" for row, cell in enumerate(cells)]
    (folder / "films.csv").write_text("\n".join([f"image,report,{header}", *lines]) + "\n")
    return str(folder / "films.csv")


def test_columns_of_a_table_are_subgroups_only_where_they_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "Sex,age", ["F,47", "M,", "n/a,8"])
    given = TableSource(path=path, burned_in="header").build()
    assert given.subgroup_names == ()
    named = TableSource(path=path, burned_in="header", subgroup_columns="sex, age").build()
    assert named.subgroup("sex").tolist() == ["F", "M", ""]
    assert named.subgroup("age").tolist() == ["40-59", "", "0-19"]
    assert named.fingerprint == given.fingerprint, "they are no part of what is trained on"
    with pytest.raises(ValueError, match="none of the table's 4 columns is 'race'; set image_column"):
        TableSource(path=path, burned_in="header", subgroup_columns="race").build()


def test_a_column_with_a_value_for_each_person_is_no_subgroup(tmp_path: Path) -> None:
    path = write(tmp_path, "number", [str(row) for row in range(65)])
    with pytest.raises(ValueError, match="subgroup column 'number' has 65 values, at most 64; an age goes into a col"):
        TableSource(path=path, burned_in="header", subgroup_columns="number").build()


def test_a_column_of_views_needs_no_naming_and_is_called_view(tmp_path: Path) -> None:
    """Whatever its name, so that the sites of a run have one subgroup of views; "" leaves it out."""
    path = write(tmp_path, "Projektion,VIEW", ["schräg,AP", "a.p.,PA", ",lateral"])
    assert TableSource(path=path, burned_in="header").build().subgroup("view").tolist() == ["AP", "PA", "lateral"]
    named = TableSource(path=path, burned_in="header", view_column="Projektion", subgroup_columns="Projektion").build()
    assert named.subgroup_names == ("view",)
    assert named.subgroup("view").tolist() == ["schräg", "AP", ""]
    assert TableSource(path=path, burned_in="header", view_column="").build().subgroup_names == ()


def test_a_padded_age_is_read_in_time_proportional_to_it() -> None:
    """1,500 blanks took 10 s."""
    start = time.process_time()
    assert age_band("47" + " " * 50_000 + "years") == "40-59"
    assert age_band("47" + " " * 50_000 + "!") == ""
    assert time.process_time() - start < 0.5


def test_sexes_and_views_of_several_languages_meet() -> None:
    sexes = ["F", "female", "Frau", "weiblich", "W", "Mujer", "femenino", "femme", "féminin", "donna", "vrouw"]
    assert {SEX_OF(word) for word in sexes} == {"F"}
    assert {
        SEX_OF(word) for word in ["M", "male", "männlich", "maennlich", "H", "hombre", "homme", "masculin", "uomo"]
    } == {"M"}
    assert [SEX_OF(word) for word in ("0", "D", "unbekannt", "")] == ["0", "D", "", ""]
    assert {view_of(word) for word in ("PA", "p.a.", "P. A.", "postero-anterior", "PosteroAnterior")} == {"PA"}
    assert {view_of(word) for word in ("AP", "ap liegend", "AP_horizontal", "antero-posterior", "AP portable")} == {
        "AP"
    }
    assert {view_of(word) for word in ("L", "LL", "LAT", "lateral", "seitlich", "profil")} == {"lateral"}
    assert [view_of(word) for word in ("COSTAL", "oblique")] == ["ribs", "oblique"]


def test_ages_in_other_languages_are_ages() -> None:
    ages = ("45 a\u00f1os", "45 ans", "45 Jahre", "45 anni", "6 meses", "1956")
    assert list(map(age_band, ages)) == ["40-59", "40-59", "40-59", "40-59", "0-19", ""]


SEX_OF = READ[SEX]
