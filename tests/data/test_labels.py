"""Labels by name: columns follow the names asked for, whatever a collection calls or orders them."""

from __future__ import annotations

import numpy as np
import pytest

from fedvlp.data.labels import CHEXPERT, COLLECTIONS, NIH, OPENI, by_name, common_findings, folded, from_terms, names_of

nan = np.nan


def test_terms_become_labels_by_name() -> None:
    """Row 1 has a mass and an effusion, row 2 no finding, row 3 was never labelled; NIH knows no fractures."""
    names = ("Pleural Effusion", "Fracture", "No Finding", "Lung Lesion")
    rows = [["Mass", "Effusion"], ["No Finding"], None]
    expected = [[1, nan, 0, 1], [0, nan, 1, 0], [nan, nan, nan, nan]]
    np.testing.assert_array_equal(from_terms(rows, NIH, names), np.array(expected, dtype=np.float32))


def test_columns_are_found_by_name_in_any_order() -> None:
    labels = np.array([[1, 0, -1]], dtype=np.float32)
    picked = by_name(labels, ("Edema", "Pneumonia", "Fracture"), ("Fracture", "Hernia", "Edema"))
    np.testing.assert_array_equal(picked, np.array([[-1, nan, 1]], dtype=np.float32))


def test_the_common_list_is_chexperts() -> None:
    assert len(CHEXPERT) == len(set(CHEXPERT)) == 14
    assert set(NIH) | set(OPENI) <= set(CHEXPERT)
    assert all(len(set(terms)) == len(terms) for terms in (*NIH.values(), *OPENI.values()))
    assert len(set(sum(NIH.values(), ()))) == len(sum(NIH.values(), ()))


def test_one_heading_may_state_two_findings() -> None:
    """Fluid or blood with air in the pleural space is an effusion and a pneumothorax."""
    names = ("Pneumothorax", "Pleural Effusion", "Pleural Other", "Cardiomegaly")
    rows = [["hydropneumothorax"], ["hemopneumothorax"], ["hemothorax"], ["thickening", "thickening/pleura"],
            ["cardiac shadow", "cardiac shadow/enlarged"], ["thickening", "cardiac shadow"]]  # fmt: skip
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(from_terms(rows, OPENI, names), np.array(expected, dtype=np.float32))


def test_names_of() -> None:
    assert names_of(" Edema, Pleural Effusion,") == names_of(("Edema", "Pleural Effusion"))
    with pytest.raises(ValueError, match="1 of 2 names are repeated"):
        names_of("Edema,Edema")


def test_each_collections_words_are_in_the_table_of_common_findings() -> None:
    """Whatever their case and the signs between their parts; a word with two meanings is under both."""
    words = common_findings()
    for terms in COLLECTIONS.values():
        assert set(terms) <= set(CHEXPERT)
        assert all(name in words[folded(word)] for name, of_name in terms.items() for word in of_name)
    for word in ("Infiltration", "lung-opacity", "Lung_Opacity", "LUNG OPACITY", "infiltrate"):
        assert words[folded(word)] == ("Lung Opacity",)
    assert words["hydropneumothorax"] == ("Pneumothorax", "Pleural Effusion")
    assert "hernia" not in words
    assert common_findings({"Effusion": "", "Hernia": "Lung Lesion"})["effusion"] == ()
