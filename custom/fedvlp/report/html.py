"""HTML of a report page: escaped text, tables and the page itself."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

ABSENT = "\N{EN DASH}"  # in place of a value
CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:0 auto;padding:1rem;max-width:1120px}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:1.6rem 0 .5rem;border-bottom:1px solid #d8dce2}
h3{font-size:.95rem;margin:.8rem 0 .3rem}p{margin:.4rem 0;max-width:52rem;overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.2rem 1.8rem}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr))}.cards img{max-width:400px}
figure{margin:0;min-width:0}
img{width:100%;max-width:560px;height:auto;display:block}img.sheet{max-width:100%}.scroll{overflow:auto;
background:linear-gradient(90deg,#fff 40%,#fff0) 0 0/3rem 100% local no-repeat,
linear-gradient(270deg,#fff 40%,#fff0) 100% 0/3rem 100% local no-repeat,
linear-gradient(90deg,#0004,#0000) 0 0/.9rem 100% scroll no-repeat,
linear-gradient(270deg,#0004,#0000) 100% 0/.9rem 100% scroll no-repeat}
details .scroll,.scroll:has(tr:nth-child(40)){max-height:26rem}th{position:sticky;top:0}
details{font-size:.87rem;margin:.2rem 0}summary{cursor:pointer;color:#444c56}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #e4e7eb;vertical-align:top}
th{background:#f5f6f8;font-weight:600;vertical-align:bottom}.text td,.text th{text-align:left}
td{white-space:nowrap}td:first-child,th:first-child{text-align:left;white-space:normal}
.text td:last-child{white-space:normal;overflow-wrap:anywhere;min-width:12rem}
.scroll+.grid{margin-top:1.2rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:0 .8rem;margin:0;font-size:.87rem}dt{color:#555d68}
dd{margin:0;overflow-wrap:anywhere}.caution{border-left:4px solid #b35900;padding-left:.6rem}
.films>div{display:flex;flex-wrap:wrap;gap:.4rem 1.2rem;align-items:flex-start;margin:1.2rem 0}
.films img{width:420px;max-width:100%}.films>div>div{flex:1 1 300px}mark{background:#ffe9a8;color:inherit}
mark.negated{background:#e4e7eb;font-style:italic}
.films h3{margin-top:0}.films ol{margin:.2rem 0;padding-left:1.2rem;font-size:.87rem}.films li{margin-bottom:.3rem}
.films .own{background:#e3eefb}.films span{color:#555d68;font-weight:400;white-space:nowrap}
.lead{font-size:1.05rem;margin:.3rem 0}.lead:first-of-type{font-weight:600}.lead+p:not(.lead){margin-top:1rem}
@media(max-width:600px){td:first-child,th:first-child{min-width:6.5rem}td,th{padding:.2rem .4rem}}
.status{padding:.1rem .6rem;border-radius:1rem;background:#e8edf3;font-weight:600}
@media(prefers-color-scheme:dark){html{background:#fff;filter:invert(.91) hue-rotate(180deg)}
img:not([src*="svg+xml"]){filter:invert(1) hue-rotate(180deg)}}
"""


def page(title: str, body: str, images: str = "data:") -> str:
    """A page with ``body`` (HTML) that runs nothing and loads nothing but ``images``: "data:", those inside of it."""
    policy = f"default-src 'none'; img-src {images}; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{CSS}</style></head>\n<body><h1>{text(title)}</h1>\n{body}</body></html>\n"
    )


def text(value: object) -> str:
    """``value`` as escaped text."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"))


def number(value: float | None) -> str:
    """``value`` with four significant digits; a dash for None, nan and infinity."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def pairs(items: Mapping[str, object]) -> str:
    """A list of names and values."""
    return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in items.items())}</dl>"


def grid(figures: str, otherwise: str = "", kind: str = "") -> str:
    """Figures (HTML) side by side where they fit; where there are none, the sentence ``otherwise``, if any."""
    if figures:
        return f'<div class="grid {kind}">{figures}</div>'
    return f"<p>{text(otherwise)}</p>" if otherwise else ""


def kind(config: Any) -> str:
    """Name of the class of a ``{"path", "args"}`` of the configuration, without "Config"."""
    path = config.get("path", ABSENT) if isinstance(config, dict) else ABSENT
    return str(path).rpartition(".")[2].removesuffix("Config")


def shown(value: Any, name: str = "") -> str:
    """A setting as text; of a path only the last component. ``name``: the setting's own, by which it may be one."""
    if isinstance(value, dict):
        return f"{kind(value)}({', '.join(f'{k}={shown(v, k)}' for k, v in value.get('args', {}).items())})"
    if isinstance(value, list):
        return f"[{', '.join(shown(item, name) for item in value)}]"
    if isinstance(value, str):
        return (PureWindowsPath(value).name or value) if name in _files() or _is_path(value) else value
    return json.dumps(value)


def _is_path(value: str) -> bool:
    """Whether a text can only be a path. A relative one of two components looks like a hub's name, ``a/b``."""
    absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
    return absolute or value.startswith(("~", ".")) or len(PureWindowsPath(value).parts) > 2


def _files() -> frozenset[str]:
    """Names of the settings that are files or folders, whatever they look like: of data sets, and initial weights.

    Those of the plugins in use are among the data sets.
    """
    from fedvlp.data.sources import SOURCES
    from fedvlp.run import plugins

    sources = plugins.table("SOURCES", SOURCES, wanted="table").values()
    of_sources = {one.name for source in sources for one in fields(source) if "below_root" in one.metadata}
    return frozenset(of_sources | {"root", "cache", "init"})


def table(head: Iterable[object], rows: Iterable[Iterable[object]], kind: str = "") -> str:
    """A table that scrolls within itself on a narrow screen; cells are escaped. ``kind`` is a class of the CSS."""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
