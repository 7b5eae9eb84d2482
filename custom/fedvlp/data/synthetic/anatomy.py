"""The healthy frontal chest of each synthetic case: body, ribs, lungs, heart, vessels, diaphragm.

Geometry is analytic in body coordinates: x in about -1..1 from the left of the image (the patient's right) to its
right, y in about -1..1 downwards, so one description serves 64 and 256 pixels. A batch of B rows is drawn at once,
float32 [B, S, S]. Only + - * / sqrt and comparisons are applied to pixels, so a row has the same bits in any batch.
Grey is radiographic density: air is black, bone is white.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedvlp.data.synthetic.cases import Cases, stream

ZONE_Y = (-0.40, -0.06, 0.24)  # centre of the upper, mid and lower zone


@dataclass(eq=False)
class Scene:
    """Fields of a batch of images, float32 [B, S, S] unless said otherwise; per-row scalars are [B, 1, 1]."""

    x: np.ndarray
    y: np.ndarray
    ax: np.ndarray  # |x|
    right: np.ndarray  # bool, True in the patient's right half
    pixel: np.ndarray  # [B, 1, 1] size of a pixel in body units
    rise: np.ndarray  # [B, 1, 1] how far up the breath of this image moves the diaphragm
    dome: np.ndarray  # y of the diaphragm below each pixel
    wall: np.ndarray  # distance to the chest wall, positive inside
    lung: np.ndarray  # share of aerated lung, 0..1, heart and mediastinum excluded
    chest: np.ndarray  # share of the pleural cavity, 0..1, lung behind heart and diaphragm included
    vessels: np.ndarray  # grey added by hila and vessels
    coarse: np.ndarray  # smooth texture, about N(0, 0.6)
    fine: np.ndarray  # finer texture

    def pick(self, rows: np.ndarray) -> Scene:
        """The same fields for the images ``rows`` [b] of the batch."""
        return Scene(**{name: value[rows] for name, value in vars(self).items()})


def column(values: ArrayLike) -> np.ndarray:
    """[B] -> [B, 1, 1] float32."""
    return np.asarray(values, dtype=np.float32).reshape(-1, 1, 1)


def ramp(distance: np.ndarray, edge: np.ndarray | float) -> np.ndarray:
    """0 where ``distance`` is below -edge, 1 above edge, linear between. In place after the first step, for speed."""
    t: np.ndarray = distance * (np.float32(0.5) / edge)
    t += 0.5
    return np.clip(t, 0, 1, out=t)


def bump(q: np.ndarray) -> np.ndarray:
    """(1 - q)^2 where q < 1, else 0; q is a squared radius."""
    t = 1 - q
    np.maximum(t, 0, out=t)
    t *= t
    return t


def stroke(distance: np.ndarray, width: float, pixel: np.ndarray) -> np.ndarray:
    """Profile 0..1 of a line of half width ``width``. Below the width of a pixel it becomes fainter, not thinner."""
    half = np.maximum(np.float32(width), pixel)
    r = distance * (1 / half)
    r *= r
    line = bump(r)
    line *= np.minimum(np.float32(1.4 * width) / half, 1)
    return line


def texture(nodes: np.ndarray, size: int) -> np.ndarray:
    """Smooth interpolation of lattice values [B, K, K] to [B, S, S]."""
    k = nodes.shape[-1]
    position = (np.arange(size) + 0.5) / size * (k - 1)
    low = np.minimum(position.astype(np.int64), k - 2)
    w = (position - low).astype(np.float32)
    w = w * w * (3 - 2 * w)  # no creases at the nodes
    rows = nodes[:, low, :] * (1 - w)[:, None] + nodes[:, low + 1, :] * w[:, None]
    return rows[:, :, low] * (1 - w) + rows[:, :, low + 1] * w


def coordinates(cases: Cases, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Body coordinates x, y [B, S, S] of every pixel (from field of view and pose), and its size [B, 1, 1]."""
    styles = [cases.styles[site] for site in cases.site[rows]]
    pose, body = cases.pose[rows], cases.body[rows]
    zoom = np.array([style.zoom for style in styles]) * (1 + 0.05 * pose[:, 0])
    shift = np.array([style.shift for style in styles]) + 0.05 * pose[:, 1:3]
    angle = 0.04 * pose[:, 3]
    axis = ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
    u, v = axis[None, None, :], axis[None, :, None]
    wide, tall = zoom * (1 - 0.05 * body[:, 0]), zoom * (1 - 0.05 * body[:, 1])
    x = column(wide) * u + column(wide * angle) * v + column(shift[:, 0])
    y = column(tall) * v - column(tall * angle) * u + column(shift[:, 1])
    return x, y, column(2 * zoom / size)


def scene(cases: Cases, rows: np.ndarray, seed: int, size: int) -> tuple[Scene, np.ndarray, np.ndarray]:
    """The healthy chest of each row: its fields, its grey values [B, S, S] and standard normal noise [B, S, S]."""
    x, y, pixel = coordinates(cases, rows, size)
    coarse, fine, noise = _textures(rows, seed, size)
    body = cases.body[rows]
    ax, right = np.abs(x), x < 0
    edge = np.maximum(pixel, np.float32(0.018))

    rise = np.array([0.12, 0.0, -0.08])[cases.volume[rows]] + 0.04 * body[:, 2]
    lift = 0.15 * (cases.raised[rows][:, None] == np.array([1, 2]))  # [B, 2]
    base = np.where(right, column(0.40 - rise - lift[:, 0]), column(0.45 - rise - lift[:, 1]))
    off = ax - 0.34
    dome = base + off * off * column(0.85 + 0.15 * body[:, 2] + 1.2 * np.minimum(rise, 0.05))

    xr = (ax - 0.40 - 0.10 * (y - 0.05)) / column(0.345 + 0.015 * body[:, 2])
    yr = (y - 0.06) / 0.82
    y2 = yr * yr
    wall = (1 - xr * xr - 0.5 * y2 * (1 + y2)) * 0.17
    chest = ramp(wall, edge) * ramp(dome - y, edge)
    heart, middle = _mediastinum(cases, rows, x, y, ax, edge)
    lung = chest * (1 - middle) * (1 - heart)
    vessels = _vessels(ax, y, right, lung, coarse, pixel)
    fields = Scene(x, y, ax, right, pixel, column(rise), dome, wall, lung, chest, vessels, coarse, fine)
    return fields, _anatomy(cases, rows, fields, heart, middle, edge), noise


def _textures(rows: np.ndarray, seed: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coarse and fine texture and the noise of each row, [B, S, S] each, from the row's own random stream.

    The lattices behind the textures are the same at any size.
    """
    coarse = np.empty((len(rows), 9, 9), np.float32)
    fine = np.empty((len(rows), 25, 25), np.float32)
    noise = np.empty((len(rows), size, size), np.float32)
    for i, row in enumerate(rows):
        rng = stream(seed, 0, int(row))
        rng.standard_normal(out=coarse[i], dtype=np.float32)
        rng.standard_normal(out=fine[i], dtype=np.float32)
        rng.standard_normal(out=noise[i], dtype=np.float32)
    return texture(coarse, size), texture(fine, size), noise


def _mediastinum(
    cases: Cases, rows: np.ndarray, x: np.ndarray, y: np.ndarray, ax: np.ndarray, edge: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shares 0..1 of heart and of mediastinum with great vessels, [B, S, S] each; AP images magnify the heart."""
    body = cases.body[rows]
    large = np.array([1.0, 1.2, 1.42])[cases.heart[rows]] * (1 + 0.07 * body[:, 3])
    large *= np.where(cases.ap[rows], 1.07, 1.0)
    dx, dy = x - column(0.02 + 0.085 * large), y - column(0.24 - 0.03 * large)
    along = (dx * 0.90 + dy * 0.44) / column(0.285 * large)
    across = (dy * 0.90 - dx * 0.44) / column(0.235 * large)
    heart = ramp((1 - along * along - across * across) * column(0.13 * large), 2 * edge)
    width = 0.105 + 0.015 * body[:, 7] + np.where(cases.ap[rows], 0.015, 0.0)
    middle = ramp(column(width) + 0.05 * np.maximum(-0.45 - y, 0) - ax, 1.5 * edge)
    knob = column(np.where(cases.aorta[rows], 0.115, 0.085))
    kx, ky = (x - 0.095) / knob, (y + 0.34) / knob
    pulmonary = bump(((x - 0.11) / 0.12) ** 2 + ((y + 0.12) / 0.17) ** 2) * 1.6  # left heart border, below the knob
    arch = ramp((1 - kx * kx - ky * ky) * 0.05, edge)
    return heart, np.minimum(np.maximum(np.maximum(middle, arch), pulmonary), 1)


def _anatomy(
    cases: Cases, rows: np.ndarray, s: Scene, heart: np.ndarray, middle: np.ndarray, edge: np.ndarray
) -> np.ndarray:
    """Grey values [B, S, S] of the healthy chest."""
    body = cases.body[rows]
    half = column(0.96 + 0.04 * body[:, 0])
    slope = np.maximum(s.ax - 0.20, 0)
    outline = ramp(half - 0.04 * s.y - s.ax, 0.04) * ramp(s.y + 1.02 - slope * (0.10 + 0.42 * slope), 0.05)
    side = s.ax / half
    side *= side
    grey = 0.60 - 0.24 * side * side + 0.02 * s.coarse
    grey += 0.13 * ramp(s.y - s.dome, 0.05) * ramp(0.75 - s.ax, 0.25)  # liver, spleen
    grey += 0.11 * bump((s.x / 0.24) ** 2 + ((s.y - 0.1) / 1.6) ** 2) + 0.07 * heart  # spine, heart
    gas = bump(((s.x - 0.33) / 0.13) ** 2 + ((s.y - s.dome - 0.10) / 0.06) ** 2)
    grey -= 0.22 * gas * column(body[:, 6] > -0.3)  # stomach bubble
    fork = 0.42 * np.maximum(s.y + 0.32, 0)  # below the carina the main bronchi part
    grey -= 0.09 * bump(((s.ax - fork) / 0.055) ** 2) * ramp(-0.16 - s.y, 0.07)  # trachea

    air = s.lung * ramp(s.wall, 0.10)  # less lung is crossed near the chest wall
    air = 0.55 * s.lung + 0.45 * air
    grey -= air * (0.40 + 0.05 * np.minimum(s.y, 0.4)) + 0.10 * (s.chest - s.lung) * (1 - middle)
    breast = bump(((s.ax - 0.46) / 0.33) ** 2 + ((s.y - 0.30) / 0.30) ** 2)
    grey += column(0.13 * np.maximum(body[:, 4], 0)) * breast
    grey += _bones(cases, rows, s)
    rim = stroke(np.sqrt((s.x - 0.095) ** 2 + (s.y + 0.34) ** 2) - 0.105, 0.009, s.pixel)
    grey += column(0.24 * cases.aorta[rows]) * rim * ramp(s.x - 0.11, 0.03)  # calcified arch
    return grey * outline + 0.03


def _vessels(
    ax: np.ndarray, y: np.ndarray, right: np.ndarray, lung: np.ndarray, coarse: np.ndarray, pixel: np.ndarray
) -> np.ndarray:
    """Grey added by the hila and by vessels that radiate from them, divide once and thin out towards the wall."""
    dx, dy = ax - 0.15, y - np.where(right, np.float32(-0.02), np.float32(0.03))
    reach = np.abs(dx) + np.abs(dy) + 0.02
    angle = dy / reach + 0.10 * coarse  # -1 up .. 1 down, without a call to arctan
    tree = np.zeros_like(ax)
    for branches, start, phase in ((3.0, 0.05, 0.2), (6.0, 0.30, 0.7)):
        turn = angle * branches + phase
        away = np.abs(turn - np.floor(turn) - 0.5) * reach / branches
        tree += stroke(away, 0.020 if start < 0.1 else 0.012, 0.7 * pixel) * ramp(reach - start, 0.08)
    near = bump(dx * dx / 0.26 + (y - 0.10) ** 2 / 0.50)
    hilum = bump((dx - 0.03) ** 2 / 0.012 + dy * dy / 0.034)
    return lung * (0.20 * hilum + near * (0.02 + 0.13 * np.minimum(tree, 1)))


def _bones(cases: Cases, rows: np.ndarray, s: Scene) -> np.ndarray:
    """Posterior and anterior ribs, clavicles, the medial border of the scapulae."""
    body = cases.body[rows]
    phase, contrast = column(0.5 * body[:, 5]), column(1 + 0.35 * body[:, 6])
    cage = ramp(s.wall + 0.035, 0.04) * ramp(0.62 - s.y, 0.15)
    back = (s.y - 0.10 * s.ax - 0.38 * s.ax * s.ax) * 6.6 + phase
    front = (s.y + 0.62 * s.ax - 0.25 * s.ax * s.ax) * 5.2 + phase + 0.3
    back = np.abs(back - np.floor(back) - 0.5)
    front = np.abs(front - np.floor(front) - 0.5)
    ribs = 0.085 * ramp(0.20 - back, 0.10) * ramp(s.ax - 0.06, 0.05)
    ribs += 0.040 * ramp(0.17 - front, 0.10) * ramp(s.ax - 0.25, 0.15)
    lift = s.ax - 0.40
    clavicle = stroke(s.y + 0.61 + 0.16 * lift - 0.5 * lift * lift * lift, 0.045, s.pixel) * ramp(s.ax - 0.05, 0.03)
    scapula = ramp(s.ax - 0.64 + 0.12 * s.y, 0.05) * ramp(0.05 - s.y, 0.15) * ramp(s.y + 0.62, 0.1)
    return contrast * (cage * ribs + 0.13 * clavicle * ramp(0.80 - s.ax, 0.05) + 0.05 * scapula)
