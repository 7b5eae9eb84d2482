"""Draws the five findings and the devices into an image; coordinates and conventions are those of ``anatomy``.

Opacities are combined (1 - product of the clear shares) and scaled by the air that they replace. So overlapping disease
saturates at the grey of soft tissue, and a finding adds nothing outside the chest. A pneumothorax removes the vessels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedvlp.data.synthetic.anatomy import ZONE_Y, Scene, bump, column, ramp, stroke
from fedvlp.data.synthetic.cases import (
    CONSOLIDATION,
    DEVICES,
    EDEMA,
    EFFUSION,
    ETT,
    FINDINGS,
    LINE,
    NGT,
    PACEMAKER,
    PNEUMONIA,
    PNEUMOTHORAX,
    WIRES,
    Cases,
)

Extents = dict[int, tuple[np.ndarray, np.ndarray]]
"""Finding -> indices [b] of the images that show it, and its extent 0..1 [b, S, S] in them."""

FAINT = 0.75  # opacity of an uncertain finding relative to a mild one


def extents(cases: Cases, rows: np.ndarray, s: Scene, without: frozenset[str] = frozenset()) -> Extents:
    """Where in the chest each finding is; those named in ``without`` are left out."""
    shapes: dict[int, Callable[[Scene, Cases, np.ndarray], np.ndarray]] = {
        EDEMA: _edema,
        EFFUSION: _effusion,
        CONSOLIDATION: _consolidation,
        PNEUMOTHORAX: _pneumothorax,
        PNEUMONIA: _pneumonia,
    }
    result: Extents = {}
    for finding, shape in shapes.items():
        which = np.flatnonzero(cases.present[rows, finding])
        if len(which) and FINDINGS[finding] not in without:
            films, affected_rows = s.pick(which), rows[which]
            side = cases.side[affected_rows, finding]
            affected = np.where(films.right, column(side != 1), column(side != 0))
            result[finding] = which, shape(films, cases, affected_rows) * affected
    return result


def draw_findings(cases: Cases, rows: np.ndarray, s: Scene, grey: np.ndarray, without: frozenset[str]) -> np.ndarray:
    """Grey values [B, S, S] with the rows' findings, but for those named in ``without``, drawn into ``grey``."""
    shown = extents(cases, rows, s, without)
    opacity = {  # mild, moderate, severe
        EDEMA: (0.26, 0.46, 0.74),
        EFFUSION: (0.92, 0.92, 0.92),
        CONSOLIDATION: (0.48, 0.68, 0.92),
        PNEUMONIA: (0.42, 0.62, 0.86),
    }
    clear = np.ones_like(grey)  # share of the air that no opacity replaces
    for finding, (which, extent) in shown.items():
        if finding != PNEUMOTHORAX:
            at = rows[which]
            strength = np.array(opacity[finding])[cases.severity[at, finding]]
            strength = strength * np.where(cases.labels[at, finding] < 0, FAINT, 1.0)
            strength = strength * (1 + 0.08 * cases.jitter[at, finding, 1])  # severities overlap a little
            clear[which] *= 1 - column(strength) * extent
    if PNEUMOTHORAX in shown:
        which, extent = shown[PNEUMOTHORAX]
        films, at = s.pick(which), rows[which]
        fluid = np.zeros_like(clear)
        if EFFUSION in shown:
            wet, level = shown[EFFUSION]
            fluid[wet] = level
        bare = extent * (1 - fluid[which])
        clear[which] += (1 - clear[which]) * 0.9 * bare  # opacities lie in the lung, not in the pleural air
        grey[which] -= bare * (0.12 + films.vessels)
        rim = 4 * extent * (1 - extent) * films.lung  # the visceral pleura, where the lung's edge runs
        side = cases.side[at, PNEUMOTHORAX]
        sides = np.where(films.right, column(side != 1), column(side != 0))
        squeeze = column(np.array([0.0, 0.015, 0.03])[cases.severity[at, PNEUMOTHORAX]])
        grey[which] += 0.10 * rim * (films.wall > 2 * films.pixel) + squeeze * sides * (films.lung - extent).clip(0)
    return grey + clear * s.vessels + (1 - clear) * (0.42 * s.lung + 0.10 * (s.chest - s.lung))


def _cavity(s: Scene) -> np.ndarray:
    """1 throughout the pleural cavity, its blurred border included, so that disease reaches the wall."""
    return np.minimum(6 * s.chest, 1)


def _edema(s: Scene, cases: Cases, rows: np.ndarray) -> np.ndarray:
    """Haze about the hila (bat wings), of the bases or throughout, thicker along vessels, septal lines at the bases."""
    zone, jitter = cases.zone[rows, EDEMA], cases.jitter[rows, EDEMA]
    wide = column(np.array([0.34, 0.52, 0.62])[zone] * (1 + 0.08 * jitter[:, 0]))
    high = column(np.array([0.42, 0.36, 1.05])[zone] * (1 + 0.08 * jitter[:, 1]))
    cx, cy = column(np.array([0.25, 0.40, 0.38])[zone]), column(np.array([-0.02, 0.30, 0.0])[zone])
    haze = np.minimum(1.5 * bump(((s.ax - cx) / wide) ** 2 + ((s.y - cy) / high) ** 2), 1)
    comb = s.y * 13
    comb = np.abs(comb - np.floor(comb) - 0.5)  # Kerley B: short horizontal lines at the lateral base
    kerley = ramp(0.12 - comb, 0.10) * ramp(s.ax - 0.58, 0.05) * ramp(s.y + 0.05, 0.1)
    cloud = 0.80 + 0.16 * s.fine + 2.5 * s.vessels  # uneven, the vessels wide and blurred
    return np.clip(haze * cloud + 0.35 * kerley * (haze + 0.3), 0, 1) * _cavity(s)


def _effusion(s: Scene, cases: Cases, rows: np.ndarray) -> np.ndarray:
    """Fluid from the diaphragm up to a meniscus that climbs the wall: a blunt angle, a third, most of a side."""
    high = np.array([0.05, 0.24, 0.58])[cases.severity[rows, EFFUSION]]
    high = high * (1 + 0.12 * cases.jitter[rows, EFFUSION, 0])
    climb = np.maximum(s.ax - 0.16, 0) / 0.6
    level = 0.46 - s.rise - column(high) - column(0.13 + 0.16 * np.minimum(high, 0.4)) * climb * climb
    return ramp(s.y - level, np.maximum(np.float32(0.045), s.pixel)) * _cavity(s)


def _patch(s: Scene, cases: Cases, rows: np.ndarray, finding: int, radius: float) -> np.ndarray:
    """Squared distance [b, S, S] from the zone's centre, in units of the patch's radius, with irregular border."""
    zone, jitter = cases.zone[rows, finding], cases.jitter[rows, finding]
    scale = np.array([0.80, 1.0, 1.28])[cases.severity[rows, finding]] * radius
    cx = 0.40 + 0.05 * zone + 0.06 * jitter[:, 0]
    cy = np.array(ZONE_Y)[zone] + 0.05 * jitter[:, 1]
    dx, dy = (s.ax - column(cx)) / column(1.15 * scale), (s.y - column(cy) + s.rise) / column(scale)
    return dx * dx + dy * dy + 0.34 * s.coarse + 0.10 * s.fine


def _consolidation(s: Scene, cases: Cases, rows: np.ndarray) -> np.ndarray:
    """One dense homogeneous area with air bronchograms."""
    solid = ramp(1.1 - _patch(s, cases, rows, CONSOLIDATION, 0.21), 0.55)
    return solid * (1 - 1.6 * s.vessels) * _cavity(s)  # the bronchi run with the vessels


def _pneumonia(s: Scene, cases: Cases, rows: np.ndarray) -> np.ndarray:
    """Several fluffy, ill-defined patches in one zone."""
    field = np.minimum(2.2 * bump(0.75 * _patch(s, cases, rows, PNEUMONIA, 0.25)), 1)
    return field * ramp(s.fine + 0.5 * s.coarse + 0.15, 0.75) * _cavity(s)


def _pneumothorax(s: Scene, cases: Cases, rows: np.ndarray) -> np.ndarray:
    """Pleural air: the cavity outside a shrunken lung that has fallen away from the apex, the side or the base."""
    zone, jitter = cases.zone[rows, PNEUMOTHORAX], cases.jitter[rows, PNEUMOTHORAX]
    k = np.array([0.13, 0.25, 0.44])[cases.severity[rows, PNEUMOTHORAX]] * (1 + 0.1 * jitter[:, 0])
    thin = 1 - k * np.array([0.35, 0.80, 0.40])[zone]  # [b] width of the lung left
    short = 1 - k * np.array([0.90, 0.45, 0.60])[zone]
    inward = 0.345 * k * np.array([0.25, 0.80, 0.35])[zone]
    down = 0.82 * np.stack([k * 0.9, 0.2 * k, -(0.36 + 0.6 * k)])[zone, np.arange(len(k))]
    down = down - np.array([0, 0, 1])[zone] * s.rise.reshape(-1)
    xr = (s.ax - 0.40 + column(inward) - 0.10 * (s.y - 0.05)) / column(0.345 * thin)
    yr = (s.y - 0.06 - column(down)) / column(0.82 * short)
    y2 = yr * yr
    left = ramp((1 - xr * xr - 0.5 * y2 * (1 + y2)) * 0.17, np.maximum(np.float32(0.012), 0.7 * s.pixel))
    return (1 - left) * s.lung


def draw_devices(cases: Cases, rows: np.ndarray, s: Scene, grey: np.ndarray, without: frozenset[str]) -> np.ndarray:
    """Draws the rows' devices, but for those in ``without``, and calcified granulomas into ``grey`` [B, S, S]."""
    shapes = {PACEMAKER: _pacemaker, ETT: _tube, LINE: _line, NGT: _feeding, WIRES: _wires}
    for device, shape in shapes.items():
        which = np.flatnonzero(cases.devices[rows, device])
        if len(which) and DEVICES[device] not in without:
            sign = column(2 * cases.device_side[rows[which], device] - 1)  # -1 the patient's right
            grey[which] += shape(s.pick(which), sign)
    which = np.flatnonzero(cases.granuloma[rows])
    if len(which):
        films, code = s.pick(which), cases.granuloma[rows[which]] - 1
        dx = films.x - column((2 * (code // 3) - 1) * 0.47)
        dy = films.y - column(np.array(ZONE_Y)[code % 3] + 0.04) + films.rise
        grey[which] += 0.34 * stroke(np.sqrt(dx * dx + dy * dy), 0.035, films.pixel)
    return grey


def _pacemaker(s: Scene, sign: np.ndarray) -> np.ndarray:
    bx, by = (s.x - 0.56 * sign) / 0.115, (s.y + 0.44) / 0.095
    bx, by = bx * bx, by * by
    box = ramp((1 - bx * bx - by * by) * 0.05, np.maximum(np.float32(0.012), s.pixel))
    reach = (s.x + 0.07) / (0.56 * sign + 0.07)  # 0 at the vena cava, 1 at the box
    arc = stroke(s.y + 0.46 + 0.42 * reach * (1 - reach), 0.014, s.pixel) * ((reach > 0) & (reach < 0.95))
    t = (s.y + 0.46) / 0.84
    lead = stroke(s.x + 0.07 - 0.27 * t * t * t, 0.014, s.pixel) * ((t > 0) & (t < 1))
    return 0.42 * np.maximum(box, 0.8 * np.maximum(arc, lead))


def _tube(s: Scene, sign: np.ndarray) -> np.ndarray:
    edges = stroke(s.ax - 0.022, 0.013, s.pixel) + 0.4 * stroke(s.x, 0.03, s.pixel)
    return 0.30 * np.minimum(edges, 1) * ramp(-0.36 - s.y, 0.02)


def _line(s: Scene, sign: np.ndarray) -> np.ndarray:
    t = np.clip((-0.36 - s.y) / 0.55, 0, 2)
    path = stroke(s.x + 0.085 - (0.24 * sign + 0.085) * t * t, 0.013, s.pixel)
    return 0.32 * path * ramp(0.03 - s.y, 0.02)


def _feeding(s: Scene, sign: np.ndarray) -> np.ndarray:
    t = np.maximum(s.y - 0.30, 0) / 0.30
    path = stroke(s.x - 0.03 - 0.03 * s.y - 0.26 * t * t, 0.014, s.pixel)
    return 0.30 * path * ramp(0.66 - s.y, 0.02)


def _wires(s: Scene, sign: np.ndarray) -> np.ndarray:
    turn = (s.y + 0.52) / 0.14
    loop = np.abs(turn - np.floor(turn) - 0.5)
    return 0.34 * stroke(loop * 0.14, 0.016, s.pixel) * ramp(0.035 - s.ax, 0.015) * ((turn > 0) & (turn < 5))
