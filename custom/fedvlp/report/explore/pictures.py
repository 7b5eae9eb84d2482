"""HTML of what the page of a model shows. Texts of records are escaped, pictures are inside of it: it loads nothing."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvlp.evaluation.attribution import Attribution, drawn
from fedvlp.report.explore.content import NOT_MENTIONED, REPORTS, SITE, Finding, Projection, Record
from fedvlp.report.figures import COLOURS
from fedvlp.report.html import text

CSS = """
.fx{color:var(--body-text-color);font-size:.92rem}
.fx p{margin:.3rem 0}
.fx .note{opacity:.78;max-width:52rem}
.fx h1{font-size:1.5rem;margin:0}
.fx h2{font-size:1.05rem;margin:.4rem 0 0}
.fx .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(185px,1fr));gap:.9rem}
.fx .card{border:1px solid var(--border-color-primary);border-radius:8px;overflow:hidden;min-width:0;
background:var(--background-fill-primary)}
.fx .card img,.fx .none{width:100%;aspect-ratio:1;object-fit:contain;background:#000;display:block}
.fx .none{color:#bbb;display:flex;align-items:center;justify-content:center}
.fx .said{padding:.5rem .65rem .65rem}
.fx .first{display:flex;justify-content:space-between;gap:.5rem;font-variant-numeric:tabular-nums}
.fx .key{font-family:var(--font-mono,monospace);font-size:.75rem;overflow-wrap:anywhere}
.fx .tag{display:inline-block;border-radius:1rem;padding:0 .5rem;margin:.15rem .2rem .05rem 0;font-size:.78rem;
background:var(--border-color-primary)}
.fx .report{white-space:pre-wrap;overflow-wrap:anywhere;max-height:9.5rem;overflow:auto;font-size:.86rem;
scrollbar-width:thin;scrollbar-color:var(--border-color-primary) transparent}
.fx table{border-collapse:collapse;width:100%;max-width:46rem;font-variant-numeric:tabular-nums}
.fx table,.fx thead,.fx table tr{border:0}
.fx table th,.fx table td{padding:.25rem .6rem;text-align:left;border:0;
border-bottom:1px solid var(--border-color-primary)}
.fx td.number,.fx th.number{text-align:right}.fx td.number{white-space:nowrap}
.fx .card[data-index]{cursor:zoom-in}
.fx .seen{width:100%;max-width:260px;background:#000;display:block;border-radius:8px}
.fx .large{width:100%;max-width:1024px;background:#000;display:block;border-radius:8px}
.fx .map{width:100%;max-width:860px;display:block;background:#fff;border-radius:8px}
.fx svg{width:100%;max-width:900px;height:auto;display:block}
.fx svg text{fill:var(--body-text-color);font-size:13px}
.fx svg [data-index]{cursor:pointer}
.fx svg [data-index]:hover{stroke:var(--body-text-color);fill-opacity:1}
.dark .fx svg path{filter:brightness(1.4);fill-opacity:1}
.fx svg .frame{fill:none;stroke:var(--border-color-primary)}
.fx .legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.fx .legend svg{width:14px;height:14px;display:inline-block;vertical-align:-2px;margin-right:.3rem}
.fx-beside{align-self:end}
"""

MARKERS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.5-3.5h7v7h-7z", "M0-4.6L4.4 3.4H-4.4z", "M0-5L5 0L0 5L-5 0z")
"""Outlines about the origin: circle, square, triangle, diamond. With another colour each, 12 groups are distinct."""

ORDER = (NOT_MENTIONED, "absent", "uncertain", "present", "train", "val", "test")
"""Groups in which order they are drawn, the last on top; sites are sorted by name."""

OF_STATES = {"present": "#D55E00", "absent": "#0072B2", "uncertain": "#E69F00", NOT_MENTIONED: "#9AA3AE"}

WIDTH, HEIGHT, MARGIN = 900, 540, 28


def film(pixels: np.ndarray) -> str:
    """An image, uint8 [H, W] or [H, W, 3], as an address that holds its PNG."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, pixels, format="png", cmap="gray", vmin=0, vmax=255)
    return address(buffer.getvalue())


def seen(prepared: Tensor) -> str:
    """An image, float32 [C, S, S] in -1..1, as the model sees it."""
    pixels = ((prepared + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    shown = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    return f'<div class="fx"><img class="seen" alt="the image as the model sees it" src="{film(shown.numpy())}"></div>'


def windowed(pixels: np.ndarray, level: float, width: float, said: str) -> str:
    """An image, uint8, of whose grey levels those about ``level`` fill the screen's range, with what is ``said`` of it.

    It is as large as the page allows; a click opens nothing more.
    """
    shown = (np.asarray(pixels, np.float32) - (level - width / 2)) * (255 / max(width, 1.0))
    picture = film(shown.clip(0, 255).astype(np.uint8))
    return f'<div class="fx"><p class="note">{text(said)}</p><img class="large" alt="an image" src="{picture}"></div>'


def cards(records: Sequence[Record], otherwise: str) -> str:
    """Records side by side, each with its image, report and labels; the sentence ``otherwise`` where there are none."""
    if not records:
        return f'<div class="fx"><p class="note">{text(otherwise)}</p></div>'
    shown = "".join(_card(rank, record) for rank, record in enumerate(records, start=1))
    return f'<div class="fx"><div class="cards">{shown}</div></div>'


def card(record: Record) -> str:
    """One record, which nothing was asked of."""
    return f'<div class="fx"><div class="cards">{_card(None, record)}</div></div>'


def _card(rank: int | None, record: Record) -> str:
    picture = '<div class="none">no image</div>'
    if record.pixels is not None:
        picture = f'<img alt="image {rank or ""}, enlarge" tabindex="0" role="button" src="{film(record.pixels)}">'
    first = f"<b>{rank}</b><span>cosine {record.cosine:+.3f}</span>" if rank else ""
    where = ", ".join(filter(None, (record.site, record.split)))
    tags = "".join(f'<span class="tag">{text(label)}</span>' for label in record.labels)
    return (
        f'<div class="card" data-index="{record.index}">{picture}<div class="said">'
        f'<div class="first">{first}</div>'
        f'<div>{text(where)}</div><div class="key">{text(record.key)}</div><div>{tags}</div>'
        f'<p class="report">{text(record.report or "no report")}</p></div></div>'
    )


def stated(rows: Sequence[tuple[str, float, Mapping[str, float]]]) -> str:
    """A table of findings with their probabilities by heads beside the model, and what is known of each head."""
    lines = ""
    for name, probability, known in rows:
        area = known.get("test_auc", known.get("auc"))
        bounds = f" [{known['test_low']:.2f}, {known['test_high']:.2f}]" if "test_low" in known else ""
        worth = "not measured" if area is None else f"{area:.2f}{bounds}"
        if area is not None and not known.get("test_low", area) > 0.5:
            worth += ", no better than chance"
        above = "yes" if probability >= known.get("threshold", math.inf) else ""
        lines += (
            f'<tr><td>{text(name)}</td><td class="number">{probability:.2f}</td><td>{above}</td><td>{worth}</td></tr>'
        )
    return (
        '<div class="fx"><table><thead><tr><th>finding</th><th class="number">probability</th>'
        "<th>above the threshold</th><th>AUC on images not seen before</th></tr></thead>"
        f'<tbody>{lines}</tbody></table><p class="note">By the heads beside the model.</p></div>'
    )


CHANCE = "These classes, by words alone, are no better than chance on the test images of this model's run."


def findings(listed: Sequence[Finding], films: int, chance: bool = False) -> str:
    """A table of findings. ``films``: how many of the data set they are compared with; ``chance``: they say nothing."""
    caution = f'<p class="note">{CHANCE}</p>' if chance else ""
    rows = "".join(
        f'<tr><td>{text(one.name)}</td><td class="number">{one.cosine:+.3f}</td>'
        f'<td class="number">{one.below * films:,.0f} of {films:,}</td></tr>'
        for one in listed
    )
    return (
        '<div class="fx"><table><thead><tr><th>class</th><th class="number">cosine</th>'
        '<th class="number">images of the data set with a lower cosine</th></tr></thead>'
        f'<tbody>{rows}</tbody></table>{caution}<p class="note">A rank among images, not a probability.</p></div>'
    )


def looked(result: Attribution, phrase: str) -> str:
    """The image beside the same image with the map of a phrase on it."""
    return (
        f'<div class="fx"><p>For <b>{text(phrase)}</b>: {text(result.sentence)}.</p>'
        f'<img class="map" alt="the image, and the map on it" src="{address(drawn(result))}">'
        '<p class="note">It says what the model looks at, and not whether it is right.</p></div>'
    )


def projection(plane: Projection, notes: Sequence[str], among: str, colour: str) -> str:
    """The points with a legend; a point that is pointed at says its note. ``notes``: by index, of the records.

    The index of a point's record is in its attribute ``data-index``.
    """
    groups = sorted(set(plane.groups), key=lambda name: (ORDER.index(name) if name in ORDER else -1, name))
    looks = {name: _look(index, name) for index, name in enumerate(groups)}
    first, second = (f"{100 * share:.0f} % of the variance" for share in plane.shares)
    count = len(plane.indices)
    drawn_of = f"{count:,} of {plane.total:,}, a random sample" if count < plane.total else f"{count:,}"
    what = "Reports" if among == REPORTS else "Images"
    note = (
        "Point at a study for its report, click for its image. First two principal components of the embeddings: what "
    )
    note += "is near here need not be near in the whole space."
    note += " Where the sites lie apart, the model distinguishes them." if colour == SITE else ""
    return (
        f'<div class="fx"><p><b>{what} by {text(colour)}</b> ({drawn_of})</p>{_legend(plane, looks)}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 24}" role="img" aria-label="{what} in the plane, by {text(colour)}">'
        f'<rect class="frame" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="8"/>'
        f"{_points(plane, looks, notes)}"
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 18}" text-anchor="middle">first component, {first}</text>'
        f'<text transform="translate(17 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">second component, {second}'
        f'</text></svg><p class="note">{note}</p></div>'
    )


Looks = Mapping[str, tuple[str, str]]
"""Group -> colour and outline, in the order in which groups are drawn."""


def _legend(plane: Projection, looks: Looks) -> str:
    shown = "".join(
        f'<span><svg viewBox="-7 -7 14 14"><path d="{outline}" fill="{colour}"/></svg>'
        f"{text(name)} ({plane.groups.count(name):,})</span>"
        for name, (colour, outline) in looks.items()
    )
    return f'<div class="legend">{shown}</div>'


def _points(plane: Projection, looks: Looks, notes: Sequence[str]) -> str:
    """The points of one group after those of the other, so that the last group is on top."""
    x, y = _scaled(plane.points)
    drawing = []
    for name, (colour, outline) in looks.items():
        for i in (i for i, group in enumerate(plane.groups) if group == name):
            drawing.append(
                f'<path data-index="{plane.indices[i]}" d="{outline}" fill="{colour}" fill-opacity=".75" '
                f'transform="translate({x[i]:.1f} {y[i]:.1f})">'
                f"<title>{text(notes[plane.indices[i]])}: {text(name)}</title></path>"
            )
    return "".join(drawing)


def _look(index: int, name: str) -> tuple[str, str]:
    """Colour and outline of a group."""
    return OF_STATES.get(name, COLOURS[index % len(COLOURS)]), MARKERS[index % len(MARKERS)]


def _scaled(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates in the drawing, [m] each. One unit is as long in both directions."""
    low, high = points.min(0), points.max(0)
    inner = np.array([WIDTH - 3 * MARGIN, HEIGHT - 2 * MARGIN])
    scale = float((inner / np.maximum(high - low, 1e-12)).min())
    x, y = ((points - (low + high) / 2) * scale).T
    return WIDTH / 2 + MARGIN / 2 + x, HEIGHT / 2 - y


def address(png: bytes) -> str:
    """A PNG as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
