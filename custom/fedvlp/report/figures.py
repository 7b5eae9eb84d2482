"""Figures of a report page, each with a table of its values, as HTML.

A figure is SVG inside the page, drawn through matplotlib's object interface.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvlp.evaluation.intervals import Interval
from fedvlp.report.html import number, table, text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, without yellow and black
MARKERS, DASHES = "os^DvPX", ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
SHADES = ("#3E4C66", "#A3B1C9", "#6F809E", "#D4DBE7")  # of segments of a bar that are not sites
BEFORE = "#C9CED6"  # of all groups of bars but the last
UNTRAINED = {"color": "#7A828E", "marker": "o"}  # of dots of an initial model
AVERAGE = {"color": "black", "lw": 2.2, "zorder": 5}
WORST = {"color": "#555555", "lw": 1.8, "ls": "--", "zorder": 4}
RC = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "fedvlp",
    "svg.fonttype": "path",
}
Style = dict[str, Any]
"""matplotlib's settings of a line, as ``look`` gives them."""

Points = dict[int, float]
"""Round -> value."""

Curve = tuple[str, Points, dict[str, Any]]
"""Name, points, and matplotlib's settings of the line."""


def look(index: int) -> dict[str, Any]:
    """matplotlib's settings for the line of the site ``index``: colour, marker and, beyond six sites, dashes."""
    return {"color": COLOURS[index % 6], "marker": MARKERS[index % 7], "ls": DASHES[index // 6 % 4], "lw": 1.0}


def lines(
    title: str,
    curves: Sequence[Curve],
    x: str,
    level: tuple[str, float] | None = None,
    errors: Mapping[str, Points] | None = None,
) -> str:
    """Curves over rounds, with an optional dashed level (name, value), as HTML; "" where no value is finite.

    ``errors`` (a curve's name -> points) are drawn as bars of plus and minus one of them, where they are finite.
    """
    curves = [(name, {k: v for k, v in points.items() if math.isfinite(v)}, style) for name, points, style in curves]
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return ""
    figure, axes = _axes(title, 2.4, below=0.5 + 0.18 * math.ceil((len(curves) + bool(level)) / 4))
    handles = [axes.plot(*zip(*sorted(points.items()), strict=True), **style)[0] for _, points, style in curves]
    spread = {name: _spread(axes, points, (errors or {}).get(name, {}), style) for name, points, style in curves}
    spread = {name: points for name, points in spread.items() if points}
    if max(len(points) for _, points, _ in curves) > 12:
        for handle in handles:
            handle.set_markersize(2)
    names = [name for name, _, _ in curves]
    if level:
        handles.append(axes.axhline(level[1], color="black", ls=(0, (3, 2)), lw=1.1))
        names.append(f"{level[0]} {level[1]:.5g}")
    axes.set_xlabel(f"{x}; bars: one standard error" if spread else x)
    _whole(axes, {k for _, points, _ in curves for k in points})
    figure.legend(handles, names, loc="lower center", ncols=4, fontsize=8)
    columns = {name: points for name, points, _ in curves}
    columns |= {f"standard error, {name}": points for name, points in spread.items()}
    return _figure(figure, _described(title, level), x, columns)


def _spread(axes: Any, points: Points, errors: Points, style: Mapping[str, Any]) -> Points:
    """Draws the error bars of one curve, and returns those there were."""
    drawn = {k: error for k, error in errors.items() if k in points and math.isfinite(error)}
    if drawn:
        heights = [points[k] for k in drawn]
        axes.errorbar(list(drawn), heights, list(drawn.values()), fmt="none", ecolor=style["color"], capsize=2, lw=0.8)
    return drawn


def unit(title: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]], Style]], x: str, y: str) -> str:
    """Curves in the unit square beside its diagonal, as HTML; "" without a point. Their values are not rounds."""
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return ""
    from matplotlib.figure import Figure

    legend = 0.2 + 0.18 * math.ceil(len(curves) / 2)
    figure = Figure((3.6, 3.4 + legend))
    axes = figure.add_axes((0.14, (0.4 + legend) / (3.4 + legend), 0.82, 2.7 / (3.4 + legend)))
    axes.set_title(title)
    axes.plot((0, 1), (0, 1), color="black", ls=(0, (3, 2)), lw=0.9)
    handles = [axes.plot(*zip(*points, strict=True), **style)[0] for _, points, style in curves]
    axes.set(xlabel=x, ylabel=y, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    figure.legend(handles, [name for name, _, _ in curves], loc="lower center", ncols=2, fontsize=8)
    rows = {f"{name}, {of}": dict(enumerate(values)) for name, points, _ in curves
            for of, values in zip((x, y), zip(*points, strict=True), strict=True)}  # fmt: skip
    return _figure(figure, title, "point", rows)


def stack(title: str, segments: Mapping[str, Points]) -> str:
    """One bar for each round, divided into ``segments`` (name -> points), as HTML."""
    figure, axes = _axes(title, 2.2, below=0.65)
    base: Points = {}
    for index, (name, points) in enumerate(segments.items()):
        below = [base.get(k, 0.0) for k in points]
        axes.bar(list(points), list(points.values()), 0.7, bottom=below, color=SHADES[index % 4], label=name)
        base |= {k: base.get(k, 0.0) + v for k, v in points.items()}
    axes.set_xlabel("round")
    axes.grid(axis="x", visible=False)
    _whole(axes, base)
    figure.legend(loc="lower center", ncols=4, fontsize=8)
    return _figure(figure, title, "round", segments)


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    level: tuple[str, float] | None = None,
) -> str:
    """For every site (a key of ``colours``), one bar of each group (name -> site -> value), as HTML.

    The bars of the last group have the site's colour, the others are grey. ``level`` is a dashed line (name, value).
    """
    names = [_short(site) for site in colours]
    size = (0.12 + 0.2 * len(groups)) * len(colours)
    figure, axes = _axes(title, size, below=0.5, left=0.25 + 0.08 * max(map(len, names)), pad=16 if level else 6)
    last = list(groups)[-1]
    height = 0.8 / len(groups)
    for row, (site, colour) in enumerate(colours.items()):
        for index, (name, values) in enumerate(groups.items()):
            if site not in values:
                continue
            y = row + height * (index - (len(groups) - 1) / 2)
            axes.barh(y, values[site], 0.92 * height, color=colour if name == last else BEFORE)
            axes.annotate(
                number(values[site]),
                (values[site], y),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.85},
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(colours) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    if level:
        _vertical(axes, level)
    axes.set_xlabel(f"grey: {', '.join(list(groups)[:-1])}; coloured: {last}" if len(groups) > 1 else last)
    return _figure(figure, _described(title, level), "site", groups, list(colours))


def ranges(
    title: str,
    groups: Mapping[str, Mapping[str, Interval]],
    looks: Mapping[str, Mapping[str, Any]],
    level: tuple[str, float] | None = None,
) -> str:
    """A dot with its interval for every row (a key of the groups), in a colour for each group, as HTML; "" without any.

    ``groups``: name -> row -> figure; ``looks``: name -> as ``look`` gives it. ``level``: a dashed line (name, value).
    """
    rows = list(dict.fromkeys(row for of_group in groups.values() for row in of_group))
    if not rows:
        return ""
    shown = [_short(row) for row in rows]
    size = (0.16 + 0.15 * len(groups)) * len(rows)
    legend = 0.18 * math.ceil(len(groups) / 4)
    left = 0.25 + 0.08 * max(map(len, shown))
    figure, axes = _axes(title, size, below=0.35 + legend, left=left, pad=16 if level else 6)
    handles = []
    for index, (name, of_group) in enumerate(groups.items()):
        style = looks[name]
        offset = 0.7 * ((index + 0.5) / len(groups) - 0.5)
        for row, interval in of_group.items():
            below, above = interval.value - interval.low, interval.high - interval.value
            bounds = [[max(below, 0.0)], [max(above, 0.0)]]  # percentiles may leave the value out; nan draws no bar
            drawn = axes.errorbar(
                interval.value,
                rows.index(row) + offset,
                xerr=bounds,
                fmt=style["marker"],
                ms=4.5,
                color=style["color"],
                capsize=2,
                lw=1.1,
            )
        handles.append(drawn)
    axes.set_yticks(range(len(rows)), shown)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    if level:
        _vertical(axes, level)
    figure.legend(handles, list(groups), loc="lower center", ncols=4, fontsize=8)
    columns: dict[str, dict[Any, float]] = {}
    for name, of_group in groups.items():
        columns[name] = {row: interval.value for row, interval in of_group.items()}
        columns[f"{name}, low"] = {row: interval.low for row, interval in of_group.items()}
        columns[f"{name}, high"] = {row: interval.high for row, interval in of_group.items()}
    return _figure(figure, _described(title, level), "", columns, rows)


def _vertical(axes: Any, level: tuple[str, float]) -> None:
    """A dashed line at a level, its name above it."""
    axes.axvline(level[1], color="black", ls=(0, (3, 2)), lw=1.1)
    axes.annotate(
        f"{level[0]} {level[1]:.5g}",
        (level[1], 1),
        (0, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )


def _short(name: str) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= 24 else f"{name[:23]}\N{HORIZONTAL ELLIPSIS}"


def clouds(title: str, groups: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Points (x, y), one cloud for every site, as HTML; the table of values has the centre of each cloud."""
    figure, axes = _axes(title, 3.6, below=0.5 + 0.18 * math.ceil(len(groups) / 4))
    handles = []
    for index, points in enumerate(groups.values()):
        style = {key: look(index)[key] for key in ("color", "marker")}
        handles.append(axes.scatter(*zip(*points, strict=True), s=9, alpha=0.7, **style))
    axes.set_xlabel("first component")
    axes.set_ylabel("second component")
    figure.legend(handles, list(groups), loc="lower center", ncols=4, fontsize=8)
    first = {name: sum(x for x, _ in points) / len(points) for name, points in groups.items()}
    second = {name: sum(y for _, y in points) / len(points) for name, points in groups.items()}
    return _figure(figure, title, "site", {"centre, first": first, "second": second}, list(groups))


def films(
    title: str, images: Sequence[Any], captions: Sequence[str], numbers: Mapping[str, Mapping[Any, float]]
) -> str:
    """Grey images, [S, S] uint8 each, side by side with captions, as HTML; the table of values has ``numbers``."""
    from matplotlib.figure import Figure

    figure = Figure((5.2, 1.75))
    figure.suptitle(title, x=0.02, ha="left", fontsize=9.5, fontweight="bold")
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        axes = figure.add_axes((index / len(images) + 0.005, 0.0, 1 / len(images) - 0.01, 0.7))
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(caption, fontsize=6.5, fontweight="normal", loc="center", pad=3)
    return _figure(figure, title, "round", numbers)


def _axes(title: str, size: float, below: float, left: float = 0.6, pad: float = 6) -> tuple[Any, Any]:
    """A figure with axes ``size`` inches high plus margins, set by hand: matplotlib's layout doubles the time."""
    from matplotlib.figure import Figure

    width, above = 5.2, 0.24 + pad / 72
    height = size + below + above
    figure = Figure((width, height))
    axes = figure.add_axes((left / width, below / height, 1 - (left + 0.15) / width, size / height))
    axes.set_title(title, pad=pad)
    return figure, axes


def _whole(axes: Any, rounds: Iterable[int]) -> None:
    """Puts ticks at whole rounds only, however few there are."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(min(rounds) - 0.5, max(rounds) + 0.5)


def _described(title: str, level: tuple[str, float] | None) -> str:
    """The text of a figure with an optional level, for those who cannot see it."""
    return f"{title}; dashed line: {level[0]} {level[1]:.5g}" if level else title


def _figure(
    figure: Any,
    description: str,
    key: str,
    columns: Mapping[str, Mapping[Any, float]],
    keys: Sequence[Any] | None = None,
) -> str:
    """HTML of a figure: the drawing, its ``description``, and a table of values (column -> key -> value)."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    data = base64.b64encode(drawing.getvalue()).decode("ascii")
    listed = keys if keys is not None else sorted({k for points in columns.values() for k in points})
    rows = [[k, *(number(points.get(k)) for points in columns.values())] for k in listed]
    return (
        f'<figure><img alt="{text(description)}" src="data:image/svg+xml;base64,{data}">'
        f"<details><summary>Values</summary>{table([key, *columns], rows)}</details></figure>\n"
    )


def font_file() -> Path:
    """The font of the figures, which has the accents of Europe's languages; it comes with matplotlib."""
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
