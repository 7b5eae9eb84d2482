"""One page over all runs of a server, for its operators, and their figures for Prometheus at ``/metrics``.

Read-only: it answers GET alone, from this machine alone, and reads nothing but the status of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedvlp.core.json_file import read_json
from fedvlp.report import html
from fedvlp.report.explore.serve import LOOPBACK, OWN_NAMES, address, listening
from fedvlp.run.lock import in_use
from fedvlp.run.status import FILE, RUNNING, exit_code, in_words, missing

FIGURES = (
    "round", "phases_done", "phases", "seconds", "seconds_left", "answered", "dropped", "loss", "val_r1_average",
    "val_r1_worst",
)  # fmt: skip
"""Fields of a status that Prometheus gets as they are."""

UNREADABLE = {"status": "unreadable", "summary": "its status cannot be read"}

Statuses = Mapping[str, dict[str, Any]]


def statuses(root: Path) -> Statuses:
    """The status of every run in ``root``/<experiment>/<number>; of one whose process was killed, that."""
    runs = {}
    for file in sorted(root.glob(f"*/*/{FILE}")):
        try:
            status = dict(read_json(file))
            if status["status"] == RUNNING and not in_use(file.parent):
                status |= {
                    "status": "killed",
                    "summary": "no process writes it: it was killed, or this is a copy",
                }
        except (OSError, ValueError, LookupError, TypeError):
            status = UNREADABLE
        runs[file.parent.relative_to(root).as_posix()] = status
    return runs


def _checked(status: dict[str, Any]) -> dict[str, Any]:
    """The status if it has the form of one, whoever wrote it."""
    try:
        page({"": status})
        metrics({"": status})
    except (ValueError, LookupError, TypeError, AttributeError):
        return UNREADABLE
    return status


def page(runs: Statuses) -> str:
    """The page: a table of all runs, unfinished ones first; then each with a sentence, figures and its sites."""
    order = sorted(runs, key=lambda name: (runs[name]["status"] != RUNNING, name))
    head = ("run", "state", "phases", "loss", "val R@1, average (%)", "val R@1, worst site (%)")
    table = html.table(head, [_row(name, runs[name]) for name in order])
    body = table + "".join(_run(name, runs[name]) for name in order)
    return html.page("Runs", body if runs else "<p>no run yet</p>")


def _row(name: str, status: Mapping[str, Any]) -> list[object]:
    """The cells of a run in the table of all."""
    done = f"{status['phases_done']} of {status['phases']}" if "phases_done" in status else html.ABSENT
    return [name, status["status"], done, *(html.number(status.get(figure)) for figure in FIGURES[-3:])]


def _run(name: str, status: Mapping[str, Any]) -> str:
    summary, *lines = (html.text(line) for line in in_words(status))
    rest = "".join(f"<li>{line}</li>" for line in lines)
    state = f'<span class="status">{html.text(status["status"])}</span>'
    kind = ' class="caution"' if exit_code(status) else ""
    return f"<h2>{html.text(name)} {state}</h2><p{kind}>{summary}</p><ul>{rest}</ul>"


def metrics(runs: Statuses) -> str:
    """The same as figures, in the text form of Prometheus; ``state`` is the exit code of `fedvlp jobs status`."""
    lines = []
    for name, status in runs.items():
        figures = {"state": exit_code(status), "missing_sites": len(missing(status))}
        figures |= {figure: status[figure] for figure in FIGURES if figure in status}
        label = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for figure, value in figures.items():
            if isinstance(value, int | float) and math.isfinite(value):
                lines.append(f'fedvlp_run_{figure}{{run="{label}"}} {value}\n')
    return "".join(sorted(lines))


def served(read: Callable[[], Statuses], port: int, every: int) -> HTTPServer:
    """A server of the page, which reads again when it is asked; browsers ask ``every`` so many seconds.

    Each connection has a thread: one on which nobody asks, for the seconds until it is closed, holds up nobody else.

    Raises PageError for a port that is in use or not allowed.
    """
    pages = {"/": (page, "text/html; charset=utf-8"), "/metrics": (metrics, "text/plain; version=0.0.4; charset=utf-8")}

    class Answers(BaseHTTPRequestHandler):
        timeout = 5  # seconds that a browser may take to ask

        def do_GET(self) -> None:
            asked = self.headers.get("Host", "").removesuffix(f":{self.connection.getsockname()[1]}")
            if asked not in OWN_NAMES or self.path not in pages:  # another name that leads here is a stranger's page
                self.send_error(404)
                return
            write, kind = pages[self.path]
            content = write({name: _checked(status) for name, status in read().items()}).encode()
            self.send_response(200)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), ("Refresh", str(every))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the terminal is the operator's."""

    server = ThreadingHTTPServer((LOOPBACK, port), Answers, bind_and_activate=False)
    server.socket.close()
    server.socket = listening(LOOPBACK, port)
    server.server_address = server.socket.getsockname()
    return server


def where(server: HTTPServer) -> str:
    """What to open in a browser."""
    return address(server.socket)
