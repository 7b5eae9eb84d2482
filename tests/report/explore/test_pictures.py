"""The HTML of the page: pictures inside of it, texts of records escaped, groups in a fixed order."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest
import torch

from fedvlp.evaluation.attribution import Attribution
from fedvlp.report.explore import pictures
from fedvlp.report.explore.content import FILMS, REPORTS, Finding, Projection, Record

PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


def decoded(address: str) -> np.ndarray:
    """The pixels of a PNG in an address, [H, W, 3]."""
    from PIL import Image

    kind, _, data = address.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def record(**changed: Any) -> Record:
    values: dict[str, Any] = {
        "index": 0, "key": "k1", "site": "north", "split": "test", "labels": ("Edema", "Pneumonia?"),
        "report": "No effusion.", "pixels": PIXELS, "cosine": 0.25,
    }  # fmt: skip
    return Record(**{**values, **changed})


@pytest.mark.parametrize("pixels", [PIXELS, np.stack([PIXELS, PIXELS // 2, PIXELS * 0], 2)], ids=["grey", "colour"])
def test_a_film_is_shown_pixel_by_pixel(pixels: np.ndarray) -> None:
    shown = decoded(pictures.film(pixels)).astype(int)
    expected = pixels if pixels.ndim == 3 else np.repeat(pixels[:, :, None], 3, axis=2)
    assert np.abs(shown - expected).max() <= 1


def test_a_card_says_all_of_a_record() -> None:
    page = pictures.cards([record(), record(key="k2", pixels=None, report="", site="", cosine=-0.5)], "none")
    for words in ("cosine +0.250", "north, test", "k1", "Edema", "Pneumonia?", "No effusion."):
        assert words in page
    assert page.count("<img") == 1
    assert "no image" in page
    assert "no report" in page
    assert "cosine -0.500" in page
    alone = pictures.card(record(cosine=float("nan")))
    assert "k1" in alone
    assert "cosine" not in alone
    assert pictures.cards([], "nothing <here>").count("nothing &lt;here&gt;") == 1


def test_what_a_record_says_runs_nothing() -> None:
    hostile = record(key=HOSTILE, site=HOSTILE, split=HOSTILE, labels=(HOSTILE,), report=HOSTILE)
    plane = Projection(np.eye(3)[:, :2], (0, 1, 2), (HOSTILE, "b", "b"), (0.5, 0.5), 3)
    pages = [
        pictures.cards([hostile], HOSTILE),
        pictures.cards([], HOSTILE),
        pictures.findings([Finding(HOSTILE, 0.1, 0.5)], 3),
        pictures.looked(Attribution(torch.zeros(8, 8), 0.1, torch.zeros(8, 8), 2, "occlusion"), HOSTILE),
        pictures.projection(plane, [HOSTILE] * 3, FILMS, HOSTILE),
    ]
    for page in pages:
        assert "alert(" in page
        assert "<script" not in page
        assert "onerror=alert(1)>" not in page
        assert re.findall(r'(?:src|href)="(?!data:image/png)', page) == []


def test_findings_have_a_rank_and_nothing_that_reads_as_a_probability() -> None:
    page = pictures.findings([Finding("Edema", 0.3, 0.875), Finding("Pneumonia", -0.1, 0.0)], 1024)
    assert "%" not in page
    assert "+0.300" in page
    assert "896 of 1,024" in page


def test_a_window_of_grey_levels_fills_the_range() -> None:
    page = pictures.windowed(PIXELS, level=128, width=64, said=HOSTILE)
    shown = decoded(re.findall(r'src="([^"]+)"', page)[0])[..., 0].astype(int)
    assert (shown[PIXELS <= 96].max(), shown[PIXELS >= 160].min()) == (0, 255)
    assert abs(shown[PIXELS == 128].item() - 127) <= 1
    assert "<script" not in page


def test_where_it_looked_is_said_and_drawn() -> None:
    added = torch.zeros(8, 8)
    added[2, 6] = 0.125
    page = pictures.looked(Attribution(torch.zeros(8, 8), 0.5, added, 2, "occlusion"), "left effusion")
    assert "cosine +0.500; a square of 2 pixels adds most, 0.125, 25 % from the top and 75 % from the left" in page
    assert decoded(re.findall(r'src="([^"]+)"', page)[0]).shape[2] == 3


def test_each_group_has_a_look_and_the_last_is_on_top() -> None:
    groups = ("present", "absent", "present", "not mentioned", "uncertain")
    points = np.array([[0.0, 0], [1, 0], [2, 1], [3, 0], [4, 1]])
    page = pictures.projection(Projection(points, (0, 1, 2, 3, 4), groups, (0.75, 0.125), 50), "abcde", FILMS, "Edema")
    told = re.findall(r"<title>(.): ([a-z ]+)</title>", page)
    assert told == [("d", "not mentioned"), ("b", "absent"), ("e", "uncertain"), ("a", "present"), ("c", "present")]
    assert re.findall(r'data-index="(.)"', page) == ["3", "1", "4", "0", "2"]
    assert "present (2)" in page
    assert "5 of 50, a random sample" in page
    assert "first component, 75 % of the variance" in page
    assert "distinguishes them" not in page
    sites = Projection(points, (0, 1, 2, 3, 4), ("s2", "s1", "s1", "s3", "s2"), (0.5, 0.5), 5)
    page = pictures.projection(sites, "abcde", REPORTS, "site")
    assert re.findall(r"</svg>(s\d) \((\d)\)", page) == [("s1", "2"), ("s2", "2"), ("s3", "1")]
    assert "Reports by site" in page
    assert "Where the sites lie apart, the model distinguishes them." in page


def test_twelve_sites_are_told_apart() -> None:
    looks = [pictures._look(index, f"s{index}") for index in range(12)]
    assert len(set(looks)) == 12


def test_points_lie_inside_of_the_frame_and_are_not_stretched() -> None:
    """A square of four points stays a square; equal points are in the middle."""
    x, y = pictures._scaled(np.array([[0.0, 0], [10, 0], [0, 10], [10, 10]]))
    assert x[1] - x[0] == pytest.approx(y[0] - y[2])
    assert min(x) > 2 * pictures.MARGIN - 1
    assert max(x) <= pictures.WIDTH - pictures.MARGIN + 1
    assert min(y) >= pictures.MARGIN - 1
    assert max(y) <= pictures.HEIGHT - pictures.MARGIN + 1
    x, y = pictures._scaled(np.ones((3, 2)))
    assert np.isfinite([x, y]).all()
    assert set(y.tolist()) == {pictures.HEIGHT / 2}
