"""Nothing that identifies a patient leaves a site or is written down: a whole run over planted records, searched."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedvlp import __version__
from fedvlp.config import fingerprint, override
from fedvlp.core.types import Broadcast
from fedvlp.data.deid import PHIError
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic import SyntheticCohort
from fedvlp.data.synthetic_files import write
from fedvlp.experiment import Assembly, Experiment
from fedvlp.flare.door import Door
from fedvlp.flare.jobs import write_job
from fedvlp.flare.places import Place
from fedvlp.presets import get

pytestmark = pytest.mark.slow
pydicom = pytest.importorskip("pydicom", reason="pip install 'fedvlp[dicom]'")

BIN = Path(sys.executable).parent
CANARIES = ("zyxferreira", "qq0048392175", "zanzibar quagmire", "19470231", "kumquatweg", "acqx20481733")
"""A name, a record number, words of a report, a date of birth, an address, an accession number."""
SENTENCE = "Dr. Zyxferreira notes a Zanzibar Quagmire, MRN QQ0048392175."
RECORDER = """
import os, socket

def recorded(name):
    original = getattr(socket.socket, name)
    def send(self, data, *rest):
        with open(os.path.join(os.environ["RECORD"], str(os.getpid())), "ab") as file:
            for part in data if name == "sendmsg" else [data]:
                file.write(part)
        return original(self, data, *rest)
    setattr(socket.socket, name, send)

for name in ("send", "sendall", "sendmsg"):
    recorded(name)
"""
"""As sitecustomize.py on PYTHONPATH: writes down what every process sends through any socket."""


def planted(folder: Path) -> Path:
    """A table of DICOM films whose every text names somebody: reports, ids, file names, tags. Four sites share it."""
    table = write(SyntheticCohort(sites=2, size=80, image_size=72), folder, format="dicom")
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        old = folder / row["image"]
        data = pydicom.dcmread(old)
        data.PatientName, data.PatientID, data.AccessionNumber = "ZYXFERREIRA^ANNA", "QQ0048392175", "ACQX20481733"
        data.PatientBirthDate, data.PatientAddress, data.BurnedInAnnotation = "19470231", "Kumquatweg 5", "NO"
        data.ImageComments = SENTENCE
        new = old.with_name(f"ZYXFERREIRA_{number}.dcm")
        data.save_as(new)
        old.unlink()
        row["image"] = str(new.relative_to(folder))
        row["patient_id"] = f"QQ0048392175-{row['patient_id']}"
        if "study_id" in row:
            row["study_id"] = f"ACQX20481733-{number}"
        row["report"] += f" {SENTENCE}"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return table


def experiment(table: Path) -> Experiment:
    chosen = get("feddra")
    settings = {
        "rounds.rounds": 1, "method.local_steps": 1, "method.align_steps": 1, "training.batch_size": 4,
        "method.dro_batch": 4,
    }  # fmt: skip
    for key, value in settings.items():
        chosen = override(chosen, key, str(value))
    return Experiment(**{**vars(chosen), "data": TableSource(str(table), image_size=72)})


def found(folder: Path) -> list[str]:
    """Where a planted text is, in the content or the name of a file."""
    hits = []
    for path in sorted(folder.rglob("*")):
        content = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        hits += [f"{canary} in {path}" for canary in CANARIES if canary.encode() in content.lower()]
    return hits


def search(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Asserts that the run ended well and that neither its files nor its output name anybody."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    assert found(folder) == []


def test_the_search_finds_what_is_planted(tmp_path: Path) -> None:
    planted(tmp_path)
    assert {hit.split(" in ")[0] for hit in found(tmp_path)} == set(CANARIES)


def test_a_site_answers_only_when_its_own_settings_accept_the_risk(tmp_path: Path) -> None:
    chosen = experiment(planted(tmp_path / "data"))
    (tmp_path / "local").mkdir()
    place = Place("site-1", str(tmp_path / "runs"), str(tmp_path / "local"))
    run = {"folder": "feddra/001", "fingerprint": fingerprint(chosen), "version": __version__}
    message = Broadcast(0, "evaluate", Assembly(chosen).server(("site-1",)).state)
    settings = tmp_path / "local" / "fedvlp.json"
    for content in (None, "{}", '{"accept_phi_risk": false}'):
        if content:
            settings.write_text(content)
        with pytest.raises(PHIError, match="record number in 80"):
            Door(chosen, place).answer(message, run, lambda: False)
    settings.write_text('{"accept_phi_risk": true}')
    assert Door(chosen, place).answer(message, run, lambda: False).site == "site-1"


def test_an_engine_run_names_nobody(tmp_path: Path) -> None:
    table = planted(tmp_path / "site")
    out = tmp_path / "out"
    out.mkdir()
    command = [
        BIN / "fedvlp", "simulate", "feddra", "--data", f"table:{table}", "--workers", "2", "--set", "rounds.rounds=1",
        "--set", "method.local_steps=1", "--set", "method.align_steps=1", "--set", "training.batch_size=4",
    ]  # fmt: skip
    run = {"cwd": out, "capture_output": True, "text": True, "timeout": 300, "check": False}
    blocked = subprocess.run(command, **run)  # type: ignore[call-overload]
    assert blocked.returncode == 2
    assert "record number in 80" in blocked.stderr
    (out / "blocked.txt").write_text(blocked.stdout + blocked.stderr)
    search(out, subprocess.run([*command, "--accept-phi-risk"], **run))  # type: ignore[call-overload]
    assert len(list(out.rglob("*.safetensors"))) >= 2
    assert list(out.rglob("events.out.tfevents*"))
    assert list(out.rglob("report.html"))


def test_a_flare_run_names_nobody_in_any_file_or_byte_sent(tmp_path: Path) -> None:
    """The sites accept the risk in their own settings; every process writes down what it sends."""
    table = planted(tmp_path / "site")
    out, sent, local, code = (tmp_path / name for name in ("out", "out/sent", "out/workspace/local", "code"))
    for folder in (sent, local, code):
        folder.mkdir(parents=True)
    (local / "fedvlp.json").write_text(json.dumps({"accept_phi_risk": True}))
    (code / "sitecustomize.py").write_text(RECORDER)
    job = write_job(experiment(table), out / "job")
    environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}
    done = subprocess.run(
        [BIN / "nvflare", "simulator", job, "-w", out / "workspace", "-t", "2"],
        env={**environment, "PYTHONPATH": str(code), "RECORD": str(sent)},
        cwd=out, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    search(out, done)
    assert list((out / "runs").rglob("model.safetensors"))
    assert list((out / "runs").rglob("events.out.tfevents*"))
    recorded = b"".join(path.read_bytes() for path in sent.iterdir())
    assert b"loss/contrastive" in recorded, "the recorder saw the updates"
    assert len(recorded) > 2 * 2 * sum(path.stat().st_size for path in (out / "runs").rglob("model.safetensors"))
