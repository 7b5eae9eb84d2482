"""Draws docs/pictures/rooms.svg: the rooms of the package in their layers, and an arrow for every import between them.

    PYTHONPATH=tests python -m support.picture

The arrows are read from the source. Rows are the layers of the import law, so an arrow that broke it would point
upward. Dark arrows are those that no longer way through other rooms implies; the rest are pale.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from support.rooms import LAYERS, MODULES, imports, part

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "rooms.svg"

ROOMS = {  # room: where its middle is, from the left; what it is about
    "cli": (430, "commands"),
    "flare": (650, "NVIDIA FLARE"),
    "report": (210, "a run's page"),
    "deploy": (650, "a hospital's machine"),
    "run": (430, "experiments"),
    "evaluation": (800, "what is measured"),
    "federation": (800, "the round loop"),
    "methods": (80, "one file a method"),
    "models": (250, "towers"),
    "objectives": (430, "losses"),
    "data": (590, "images and reports"),
    "training": (800, "the training loop"),
    "core": (440, "the contract"),
}
WIDTH, HEIGHT, ROW = 140, 44, 80
EDGE = 880  # width of the picture

Arrow = tuple[str, str]


def arrows() -> set[Arrow]:
    """(room, room that it imports). The front door belongs to no room: it imports names when they are asked for."""
    return {
        (part(module), part(name))
        for module, path in MODULES.items()
        for name, _, _ in imports(path)
        if name.startswith("fedvlp.") and part(module) not in ("", part(name))
    }


def level(room: str) -> int:
    """The row of a room, 0 at the bottom."""
    return next(index for index, layer in enumerate(LAYERS) if room in layer)


def not_downward(found: Iterable[Arrow]) -> list[Arrow]:
    """The arrows that do not point to a lower row."""
    return sorted(arrow for arrow in found if level(arrow[1]) >= level(arrow[0]))


def implied(found: set[Arrow]) -> set[Arrow]:
    """The arrows between rooms that a longer way through other rooms connects as well. No circles, please."""
    longer = {(a, c) for a, b in found for other, c in found if other == b}
    while more := {(a, c) for a, b in longer for other, c in found if other == b} - longer:
        longer |= more
    return found & longer


def middle(room: str) -> tuple[int, int]:
    return ROOMS[room][0], (len(LAYERS) - 1 - level(room)) * ROW + HEIGHT // 2 + 16


def line(source: str, target: str, kind: str) -> str:
    """From the lower edge of one box to the upper edge of the other; straight down to the wide box of core."""
    (x, y), (to_x, to_y) = middle(source), middle(target)
    if target == "core":
        to_x = x
    end = to_y - HEIGHT // 2 - 3
    return f'<line class="{kind}" x1="{x}" y1="{y + HEIGHT // 2}" x2="{to_x}" y2="{end}" marker-end="url(#{kind})"/>'


def box(room: str) -> str:
    (x, y), subject = middle(room), ROOMS[room][1]
    width = EDGE - 20 if room == "core" else WIDTH
    return (
        f'<rect x="{x - width // 2}" y="{y - HEIGHT // 2}" width="{width}" height="{HEIGHT}" rx="6"/>'
        f'<text class="room" x="{x}" y="{y - 3}">{room}</text><text x="{x}" y="{y + 14}">{subject}</text>'
    )


def head(kind: str, colour: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


DARK, PALE = "#37474f", "#b0bec5"
STYLE = (
    "text{font:12px sans-serif;text-anchor:middle;fill:#546e7a}.room{font-weight:bold;font-size:14px;fill:#102027}"
    "rect{fill:#e3f2fd;stroke:#1565c0}.back{fill:#fff;stroke:none}"
    f".direct{{stroke:{DARK};stroke-width:1.6}}.also{{stroke:{PALE};stroke-width:1.3}}"
)


def drawn(found: set[Arrow]) -> str:
    """The picture as SVG. Raises KeyError for a room that has no place in ``ROOMS``."""
    also = implied(found)
    height = len(LAYERS) * ROW
    rooms = sorted({room for arrow in found for room in arrow})
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {EDGE} {height}" role="img">',
            "<title>The rooms of fedvlp; an arrow leads from a room to one that it imports</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{head('direct', DARK)}{head('also', PALE)}</defs>",
            f'<rect class="back" width="{EDGE}" height="{height}"/>',
            *(line(*arrow, "also") for arrow in sorted(also)),
            *(line(*arrow, "direct") for arrow in sorted(found - also)),
            *(box(room) for room in rooms),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(arrows()), encoding="utf-8")
    print(f"wrote {PICTURE}")
