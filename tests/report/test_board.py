"""The page of all runs: what it shows, to whom, and what no status can make of it."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from fedvlp.report import board
from fedvlp.run.lock import only_writer

GONE = {"state": "dropped", "dropped": 2, "reason": "<script>no reply</script>", "absent_since": 2}
WITHOUT = {"schema": 1, "status": "finished", "round": 4, "num_rounds": 4, "loss": 5.47, "sites": {"site-3": GONE}}


def wrote(root: Path, name: str, content: Any) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "run_status.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return root / name


@contextmanager
def asked(root: Path) -> Iterator[Any]:
    with board.served(lambda: board.statuses(root), 0, 7) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
            connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())

        yield ask
        server.shutdown()


def test_every_run_is_on_the_page_and_its_figures_are_for_prometheus(tmp_path: Path) -> None:
    wrote(tmp_path, "fedavg/001", WITHOUT)
    wrote(tmp_path, "fedavg/002", {"schema": 1, "status": "running", "phase": "train", "round": 1, "num_rounds": 3})
    alive = wrote(tmp_path, "fedprox/001", {"schema": 1, "status": "running", "summary": "running in round 1 of 3"})
    with asked(tmp_path) as ask, only_writer(alive):
        status, text, headers = ask()
        assert (status, headers["Refresh"]) == (200, "7")
        assert text.index("running in round 1 of 3") < text.index("completed without site-3 from round 2")
        assert "no process writes it" in text
        rows = re.findall("<tr><td>(.*?)</td></tr>", text)
        assert [row.split("</td><td>") for row in rows] == [
            ["fedprox/001", "running", *["\N{EN DASH}"] * 4],
            ["fedavg/001", "finished", "\N{EN DASH}", "5.47", *["\N{EN DASH}"] * 2],
            ["fedavg/002", "killed", *["\N{EN DASH}"] * 4],
        ], "all runs in a table, those that go on first"
        figures = ask("/metrics")[1].splitlines()
    assert {
        'fedvlp_run_state{run="fedavg/001"} 3', 'fedvlp_run_missing_sites{run="fedavg/001"} 1',
        'fedvlp_run_loss{run="fedavg/001"} 5.47', 'fedvlp_run_state{run="fedavg/002"} 1',
        'fedvlp_run_state{run="fedprox/001"} 0',
    } <= set(figures)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, "", "7", "[]", {}, {"status": []}, {"status": "x", "sites": 7}, {"status": "x", "sites": {"a": 1}},
     {"status": "finished", "absent": 7}, {"status": "running", "under_way": 1}, {"status": "x", "seconds": "y"}],
)  # fmt: skip
def test_no_status_takes_the_page_away(content: Any, tmp_path: Path) -> None:
    wrote(tmp_path, "a/001", content)
    wrote(tmp_path, "b/001", WITHOUT)
    with asked(tmp_path) as ask:
        status, text, _ = ask()
        assert (status, "its status cannot be read" in text or "a/001" in text) == (200, True)
        assert "completed without site-3 from round 2" in text
        assert ask("/metrics")[0] == 200


def test_text_is_text(tmp_path: Path) -> None:
    wrote(tmp_path, "<b>x/001", {**WITHOUT, "status": '<img src="x">'})
    with asked(tmp_path) as ask:
        text = ask()[1]
        assert "<script" not in text
        assert "<img" not in text
        assert "<b>" not in text
        assert "default-src 'none'" in text
        assert 'run="<b>x/001"' in ask("/metrics")[1]


def test_only_this_machine_is_answered_and_nothing_but_two_pages(tmp_path: Path) -> None:
    with asked(tmp_path) as ask:
        assert ask()[0] == 200
        for path in ("/../etc/hostname", "/runs", "/?x", "/metrics/"):
            assert ask(path)[0] == 404
        assert ask(Host="board.example")[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            assert ask(method=method)[0] == 501
    with board.served(dict, 0, 1) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_connections_on_which_nobody_asks_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before, in the middle of a request, and for good: the page comes while all of them are open."""
    wrote(tmp_path, "fedavg/001", WITHOUT)
    with board.served(lambda: board.statuses(tmp_path), 0, 7) as server:
        monkeypatch.setattr(server.RequestHandlerClass, "timeout", None)  # or it would come when they are closed
        threading.Thread(target=server.serve_forever, daemon=True).start()
        idle = [socket.create_connection(server.server_address[:2]) for _ in range(20)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost:")
        connection = HTTPConnection(*server.server_address[:2], timeout=60)
        connection.request("GET", "/")
        assert "completed without site-3" in connection.getresponse().read().decode()
        for other in idle:
            other.close()
        server.shutdown()
    with board.served(dict, 0, 1) as server:
        assert server.RequestHandlerClass.timeout == 5, "and each is closed after a few seconds"
