"""From case to image: anatomy, findings and devices, then the site's detector; the result is 8-bit pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedvlp.data.synthetic.anatomy import column, scene
from fedvlp.data.synthetic.cases import DEVICES, FINDINGS, Cases, SiteStyle
from fedvlp.data.synthetic.findings import draw_devices, draw_findings, extents

CHUNK_PIXELS = 1 << 16  # pixels drawn at once: the working set stays in a core's cache

GLYPHS = {"R": "11110 10001 10001 11110 10100 10010 10001", "L": "10000 10000 10000 10000 10000 10000 11111"}


def detect(cases: Cases, rows: np.ndarray, grey: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """uint8 [B, S, S]: grey values [B, S, S] as the row's site records them (blur, contrast, tone, noise, collimation).

    ``noise`` [B, S, S] is standard normal. A side marker is burned in where the site does that.
    """
    size = grey.shape[-1]
    styles = [cases.styles[site] for site in cases.site[rows]]

    def of_site(name: str) -> np.ndarray:  # [B, 1, 1]
        return column([getattr(style, name) for style in styles])

    blur = of_site("blur")
    if blur.any():
        near = np.empty_like(grey)
        near[:, 1:-1] = grey[:, 2:] + grey[:, :-2]
        near[:, 0], near[:, -1] = 2 * grey[:, 1], 2 * grey[:, -2]
        near[:, :, 1:-1] += grey[:, :, 2:] + grey[:, :, :-2]
        near[:, :, 0] += 2 * grey[:, :, 1]
        near[:, :, -1] += 2 * grey[:, :, -2]
        grey = grey + blur * (0.25 * near - grey)
    contrast = 1.1 * of_site("contrast")
    grey = grey * contrast + (0.45 - 0.45 * contrast + of_site("brightness"))
    np.clip(grey, 0, 1, out=grey)
    grain = noise * (0.6 + 0.8 * grey)
    grey += of_site("curve") * grey * (1 - grey)
    grey += of_site("noise") * grain
    axis = np.abs((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
    grey *= np.maximum(axis[None, None, :], axis[None, :, None]) <= of_site("collimation")
    for i, style in enumerate(styles):
        if style.marker:
            _burn(grey[i], style)
    return (np.clip(grey, 0, 1) * 255 + 0.5).astype(np.uint8)


def _burn(film: np.ndarray, style: SiteStyle) -> None:
    """Burns "R" into the upper left or "L" into the upper right corner of one image [S, S], in place."""
    size = film.shape[-1]
    letter = "R" if style.words % 2 == 0 else "L"
    glyph = np.array([[bit == "1" for bit in line] for line in GLYPHS[letter].split()])
    glyph = np.kron(glyph, np.ones((max(1, size // 64),) * 2, dtype=bool))
    high, wide = glyph.shape
    gap = size // 22
    left = gap if letter == "R" else size - gap - wide
    film[gap : gap + high, left : left + wide][glyph] = 0.95


@dataclass(frozen=True, eq=False)
class Renderer:
    """Draws the pixels of a synthetic cohort on demand: rows [n] -> uint8 [n, S, S]."""

    cases: Cases
    size: int  # S, pixels
    seed: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S] of ``rows`` [n]."""
        return self.render(rows)

    def render(self, rows: np.ndarray, without: Iterable[str] = ()) -> np.ndarray:
        """uint8 [n, S, S] of ``rows`` [n], without the findings or devices named in ``without``.

        Raises ValueError for a name that is neither, IndexError for a row outside of the cohort.
        """
        rows, without = self._check(rows), frozenset(without)
        if without - {*FINDINGS, *DEVICES}:
            raise ValueError(f"synthetic: cannot leave out {sorted(without - {*FINDINGS, *DEVICES})}")
        films = np.empty((len(rows), self.size, self.size), np.uint8)
        for chunk in self._chunks(len(rows)):
            fields, grey, noise = scene(self.cases, rows[chunk], self.seed, self.size)
            grey = draw_findings(self.cases, rows[chunk], fields, grey, without)
            grey = draw_devices(self.cases, rows[chunk], fields, grey, without)
            films[chunk] = detect(self.cases, rows[chunk], grey, noise)
        return films

    def masks(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bool [n, S, S] by finding and for "lungs" (the pleural cavities without heart and mediastinum)."""
        rows = self._check(rows)
        masks = {name: np.zeros((len(rows), self.size, self.size), bool) for name in (*FINDINGS, "lungs")}
        for chunk in self._chunks(len(rows)):
            fields, _, _ = scene(self.cases, rows[chunk], self.seed, self.size)
            masks["lungs"][chunk] = fields.lung > 0.5
            for finding, (which, extent) in extents(self.cases, rows[chunk], fields).items():
                masks[FINDINGS[finding]][np.arange(chunk.start, chunk.stop)[which]] = extent > 0.3
        return masks

    def _check(self, rows: np.ndarray) -> np.ndarray:
        rows = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.cases)):
            raise IndexError(f"synthetic: rows must be in 0..{len(self.cases) - 1}, got {rows.min()}..{rows.max()}")
        return rows

    def _chunks(self, count: int) -> list[slice]:
        step = max(1, CHUNK_PIXELS // (self.size * self.size))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]
