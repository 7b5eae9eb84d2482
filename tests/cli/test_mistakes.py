"""Mistakes at the command line: each is one sentence and exit code 2, no traceback, and leaves nothing behind.

The sentence says what was seen and what to do; mistakes.txt has as much of it as does not depend on versions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mistakes import refused, taken_otherwise

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

SMALL = {
    "data.sites": "2", "data.size": "200", "method.local_steps": "1", "training.batch_size": "8", "rounds.rounds": "1",
}  # fmt: skip

LINES = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").split("\n\n")
MISTAKES = {one.split("\n")[0].removeprefix("$ fedvlp").strip(): one.strip().split("\n")[1] for one in LINES}
"""Arguments of `fedvlp` in the folder that ``here`` makes: words of the sentence that is printed."""

USAGE = {
    "simulate feddra extra": "unexpected extra argument(s) (extra)",
    "simulate feddra --nonsense": "No such option: --nonsense",
    "simulate feddra --rounds 5": "No such option: --rounds; write --set rounds.rounds=5",
    "simulate feddra --lr=0.1": "No such option: --lr; write --set training.lr=0.1",
    "simulate feddra --clients": "No such option: --clients; write --sites VALUE",
    "sweep feddra --seeds 0 --epochs 2": "No such option: --epochs; write --set training.local_epochs=2",
    "feddra --sites 3": "No such command 'feddra': it is a preset; write fedvlp simulate feddra --sites 3",
    "FedDRA": "No such command 'FedDRA': it is a preset; write fedvlp simulate feddra",
    "simulate fedavg --data table:pairs.csv, seed=3": "(seed=3); no blank stands behind a comma of --data",
    "jobs nonsense": "No such command 'nonsense'",
}
"""What the command-line library itself refuses, in a frame."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a person who has begun: a table, films, a finished run, and things that are not what they seem."""
    folder = tmp_path_factory.mktemp("person")
    write(SyntheticCohort(sites=2, size=80, image_size=72), folder)
    header = (folder / "pairs.csv").read_text(encoding="utf-8").splitlines()[0]
    texts = {
        "empty.csv": "", "header.csv": f"{header}\n", "nocolumn.csv": "a,b\n1,2\n", "notes.txt": "hello",
        "bad.toml": "preset = \n", "odd.toml": 'preset="fedavg"\n[method]\nrhoo=1\n',
        "bom.csv": f"\ufeff{header}\n", "twice.csv": "image,report,image\na,b,c\n", "cases.csv": "Image,IMAGE,report\n",
        "german.csv": "Bild;Befund\nimages/000000.png;Kein Erguss.\n", "nul.csv": "image,report\nx.png,a\0b\n",
        "outside.csv": "image,report\n../notes.txt,The lungs are clear.\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "broken.csv").write_bytes(b"\xff\xfe\x00\x01\x02" * 9)
    (folder / "mixed.csv").write_bytes(b"image,report\na,Erg\xc3\xbcsse\nb,Erg\xfcsse\n")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    from PIL import Image

    Image.new("L", (64, 64), 7).save(folder / "constant.png")
    experiment = presets.get("fedavg")
    for key, value in SMALL.items():
        experiment = override(experiment, key, value)
    finished = RunFolder.create(folder / "runs", experiment)
    simulate(experiment, finished)
    run = finished.path
    assert run == folder / "runs" / "fedavg" / "001"
    for name in ("emptyrun", "damaged"):
        (folder / name / "fedavg").mkdir(parents=True)
    empty = folder / "emptyrun" / "fedavg" / "001"
    empty.mkdir()
    shutil.copy(run / "config.json", empty)
    for number, file in (("001", "model/model.safetensors"), ("002", "config.json")):
        copied = folder / "damaged" / "fedavg" / number
        shutil.copytree(run, copied)
        (copied / file).write_bytes((copied / file).read_bytes()[:100])
    for number, file in (("003", "model/model.safetensors"), ("004", "model/config.json")):
        shutil.copytree(run, folder / "damaged" / "fedavg" / number)
        (folder / "damaged" / "fedavg" / number / file).unlink()
    newer = folder / "newer" / "fedavg" / "001"  # as a later fedvlp may write it
    shutil.copytree(run, newer)
    config = (newer / "config.json").read_text(encoding="utf-8")
    (newer / "config.json").write_text(config.replace('"local_steps"', '"later_steps": 1, "local_steps"', 1))
    return folder


@pytest.fixture(autouse=True)
def _there(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In that folder, on a machine without a GPU; the mistake leaves it as it was."""
    monkeypatch.chdir(here)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("fedvlp.models.fetched.unreachable", lambda: True)
    before = every_file(here)
    yield
    assert every_file(here) == before


def every_file(folder: Path) -> dict[str, int]:
    """Path -> time of change of every file below a folder."""
    return {str(path): os.stat(path).st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("part", range(8))
def test_a_mistake_is_one_line_and_exit_code_2(
    part: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(MISTAKES) >= 60
    some = dict(list(MISTAKES.items())[part::8])
    assert taken_otherwise(some, monkeypatch, capsys) == {}


def test_a_wrong_word_is_shown_with_the_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in USAGE.items():
        assert refused(arguments, monkeypatch) == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert said.startswith("Usage: ")
        assert words in said


def test_a_run_without_a_complete_phase_has_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("report emptyrun/fedavg/001", monkeypatch) == 1
    assert "has no complete phase yet, so there is nothing to report" in capsys.readouterr().out
