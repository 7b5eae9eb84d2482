"""`fedvlp explore`: what it says of its port and of who sees the films, and one sentence for each mistake."""

from __future__ import annotations

import csv
import re
import shlex
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.mistakes import refused, taken_otherwise
from support.presets import MODEL, SMALL
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.models import MultimodalConfig
from fedvlp.report.explore import page, serve
from fedvlp.report.explore.content import Explorer
from fedvlp.run.folder import RunFolder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 films with reports, and finished runs: of a dual encoder and of a classifier."""
    folder = tmp_path_factory.mktemp("home")
    write(SyntheticCohort(sites=2, size=24, image_size=36), folder)
    source = TableSource("pairs.csv", image_size=36)
    for name, model in (("run", MODEL), ("classifier", MultimodalConfig(**{**vars(MODEL), "labels": ("a",)}))):
        experiment = replace(SMALL, name=name, model=model, data=source)
        RunFolder.create(folder / "runs", experiment).finish(experiment, dict(model.build(3).state_dict()), [])
    return folder


class Served:
    """In the place of the server and of Gradio's page: notes what would be served where."""

    def __init__(self) -> None:
        self.explorer: Explorer | None = None
        self.loopback: bool | None = None
        self.names: bool | None = None  # of files, whether they are shown

    def page(self, explorer: Explorer, names: bool) -> Any:
        self.explorer, self.names = explorer, names

    def serve(self, _: Any, opened: socket.socket) -> None:
        self.loopback = serve.is_loopback(opened)


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    noted = Served()
    monkeypatch.setattr(page, "page", noted.page)
    monkeypatch.setattr(serve, "serve", noted.serve)
    monkeypatch.setattr(serve, "refuse_without_gradio", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(home)
    return noted


def test_it_serves_this_machine_alone(served: Served) -> None:
    done = CliRunner().invoke(app, shlex.split("explore runs/run/001 --data table:pairs.csv --port 0"))
    assert done.exit_code == 0, done.output
    first, last = done.stdout.splitlines()
    assert first == "the vectors of 24 records are computed; then the page is there"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+  24 records; Ctrl-C ends the page", last)
    assert done.stderr == ""
    assert served.loopback
    assert served.names
    assert served.explorer is not None
    with open("pairs.csv", newline="", encoding="utf-8") as lines:
        written = {row["report"] for row in csv.DictReader(lines)}
    shown = {served.explorer.record(index).report for index in range(24)}
    assert shown <= written, "as written, with its capitals, where the model reads small letters"
    assert not shown & set(served.explorer.cohort.reports)
    assert len(served.explorer.near_phrase("left effusion", 3)) == 3


def test_another_address_is_a_caution(served: Served) -> None:
    command = "explore runs/run/001 --data table:pairs.csv --split test --port 0 --host 0.0.0.0"
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    assert "CAUTION: whoever reaches this port, from any machine, sees the images and reports" in done.stderr
    assert served.loopback is False
    assert served.names is False, "names of files are for this machine's own user"
    assert served.explorer is not None
    assert 0 < len(served.explorer) < 24


MISTAKES = {
    "explore runs/run/001 --data table:pairs.csv --port 99999": "--port is 99999; expected 0 (any free one) to 65535",
    "explore runs/run/001 --data table:pairs.csv --host nowhere.invalid": "--host is 'nowhere.invalid', which is no",
    "explore runs/run/001 --data table:nowhere.csv --port 0": "'nowhere.csv' is not there; give its table",
    "explore runs/classifier/001 --data table:pairs.csv --port 0": "explore: a MultimodalClassifier compares no images",
    "explore nowhere --data table:pairs.csv --port 0": "nowhere holds no trained model",
    "explore runs/run/001 --data table:pairs.csv --split tset --port 0": "unknown split 'tset'",
}


def test_a_mistake_is_one_line_and_exit_code_2(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken_otherwise(MISTAKES, monkeypatch, capsys) == {}
    assert served.loopback is None


def test_a_port_that_is_in_use(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve.listening(serve.LOOPBACK, 0) as other:
        port = other.getsockname()[1]
        assert refused(f"explore runs/run/001 --data table:pairs.csv --port {port}", monkeypatch) == 2
    said = f"fedvlp: port {port} is in use; end what uses it, or give another: --port {port + 1} (0: any free one)"
    assert capsys.readouterr().err.strip() == said


def test_without_gradio_it_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(home)
    assert refused("explore runs/run/001 --data table:pairs.csv", monkeypatch) == 2
    assert capsys.readouterr().err == "fedvlp: explore: gradio is not installed here; pip install 'fedvlp[app]'\n"
