"""Spec faults, row 19: what libraries say in exceptions (paths, names, lines of a report) stays out of all that leaves.

Each exception is one that a library really raises, with a patient's name and path in it, in a real task: through the
executor, FLARE's serialiser and controller, and through a site's own files that are wrong.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs
from safetensors import safe_open
from support.flare_memory import Engine, MemoryFlare, site_executor, toy_experiment
from support.planted import CANARIES, found, planted
from support.toy import three_sites

from fedvlp.core.types import Broadcast
from fedvlp.data.loader import SiteData
from fedvlp.deploy.named_data import NamedData
from fedvlp.flare import child, child_protocol, messages
from fedvlp.flare.privacy_filters import AllowMetrics
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity, override
from fedvlp.run.experiment import Experiment

FILE = "/srv/films/ZYXFERREIRA^ANNA/QQ0048392175.dcm"
WORDS = "Dr. Zyxferreira notes a Zanzibar Quagmire, MRN QQ0048392175"


def names(text: str) -> list[str]:
    """The planted names in a text."""
    return [canary for canary in CANARIES if canary in text.lower()]


# --- what libraries raise ----------------------------------------------------------------------------------------


def of_pydicom(folder: Path) -> None:
    from pydicom import dcmread

    dcmread(folder / "ZYXFERREIRA.dcm")


def of_pydicom_tags(folder: Path) -> None:
    from pydicom.config import RAISE
    from pydicom.valuerep import validate_value

    validate_value("DA", WORDS, RAISE)


def of_pillow(folder: Path) -> None:
    from PIL import Image

    (folder / "ZYXFERREIRA.png").write_bytes(b"no PNG")
    Image.open(folder / "ZYXFERREIRA.png")


def of_torch(folder: Path) -> None:
    torch.load(folder / "ZYXFERREIRA.pt", weights_only=True)


def of_torch_names(folder: Path) -> None:
    torch.nn.Linear(1, 1).load_state_dict({"ZYXFERREIRA": torch.ones(1)})


def of_numpy(folder: Path) -> None:
    import numpy as np

    np.array([WORDS]).astype(float)


def of_safetensors(folder: Path) -> None:
    safe_open(FILE, framework="pt")


def of_open(folder: Path) -> None:
    Path(FILE).read_bytes()


def of_a_number(folder: Path) -> None:
    int(WORDS)


def of_csv(folder: Path) -> None:
    csv.DictWriter(io.StringIO(), ["image"]).writerow({WORDS: 1})


def of_a_dictionary(folder: Path) -> None:
    {}[WORDS]  # type: ignore[misc]


def of_a_program(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(1)", FILE], check=True, capture_output=True)


def of_another(folder: Path) -> None:
    try:
        of_open(folder)
    except OSError as error:
        raise RuntimeError(f"while reading {WORDS}") from error


def with_notes(folder: Path) -> None:
    error = ValueError(WORDS)
    if hasattr(error, "add_note"):
        error.add_note(FILE)
    raise error


class StrangeError(Exception):
    """Its text cannot even be made."""

    def __str__(self) -> str:
        raise RuntimeError(WORDS)


def without_a_text(folder: Path) -> None:
    raise StrangeError


RAISES: tuple[Callable[[Path], None], ...] = (
    of_pydicom, of_pydicom_tags, of_pillow, of_torch, of_torch_names, of_numpy, of_safetensors, of_open, of_a_number,
    of_csv, of_a_dictionary, of_a_program, of_another, with_notes, without_a_text,
)  # fmt: skip


def kind_of(text: str, error: Exception) -> bool:
    """Whether a reply's words are the kind of the error, or less, and no word of it."""
    return text.partition(":")[0] in (type(error).__name__, "an error") and names(text) == []


def raised(raises: Callable[[Path], None], folder: Path) -> Exception:
    try:
        raises(folder)
    except Exception as error:
        return error
    raise AssertionError(f"{raises.__name__} raises nothing")


def test_the_texts_of_these_exceptions_do_name_somebody(tmp_path: Path) -> None:
    """Else the tests below would show nothing; the one without a text aside."""
    for raises in RAISES[:-1]:
        error = raised(raises, tmp_path)
        assert names(f"{error} {''.join(traceback.format_exception(error))}"), raises.__name__


# --- in a run of FLARE -------------------------------------------------------------------------------------------


def test_no_reply_no_log_and_no_file_of_the_server_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """b fails in each round in another library. All bytes that pass FLARE's serialiser, all lines of any logger and
    all events of FLARE in this process are searched, and every file that the run leaves."""
    sent: list[bytes] = []

    def carry(message: Shareable) -> Shareable:
        sent.append(fobs.dumps(message))
        return fobs.loads(sent[-1])  # type: ignore[no-any-return]

    settings = {"rounds": len(RAISES) + 1, "max_missed": 99, "evaluate_every": 0}
    data = three_sites()
    flare = MemoryFlare(tmp_path / "run", monkeypatch, toy_experiment(**settings), data)
    flare.carry = carry
    (tmp_path / "films").mkdir()

    def fail() -> None:
        done = len(flare.run.history())
        if done < len(RAISES):
            RAISES[done](tmp_path / "films")

    data["b"].tick = fail
    with caplog.at_level(logging.DEBUG):
        job = flare.submit()
    assert job.panic == ""
    dropped = [record["dropped"] for record in flare.records]
    assert [list(why) for why in dropped[:-1]] == [["b"]] * len(RAISES)
    assert dropped[-1] == {}
    for why, raises in zip(dropped, RAISES, strict=False):
        assert kind_of(why["b"], raised(raises, tmp_path / "films"))
    assert names(b"".join(sent).decode("latin-1")) == []
    assert names(caplog.text) == []
    assert "train failed: OSError" in caplog.text or "train failed: FileNotFoundError" in caplog.text
    assert names(repr([fired for engine in (job.engine, flare.sites["b"].engine) for fired in engine.fired])) == []
    assert found(tmp_path / "run") == []


def test_none_comes_out_of_a_training_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a site that trains in processes of its own, up to the bytes that it hands to the job's process."""
    for raises in RAISES:
        error = raised(raises, tmp_path)

        def receive(error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(child.flare, "receive", receive)
        reply, behind = child._reply()
        answer = child_protocol.answer(reply, behind)
        assert names(fobs.dumps(answer).decode("latin-1")) == []
        assert kind_of(answer.meta[child_protocol.FAILURE][1], error)


# --- at a hospital whose own files are wrong ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 DICOM films whose every text names somebody, at a hospital whose folders do as well."""
    pytest.importorskip("pydicom")
    return planted(tmp_path_factory.mktemp("hospital") / "ZYXFERREIRA").parent


@pytest.fixture
def kit(tmp_path: Path, table: Path) -> Path:
    """Its kit: the data set, and the envelope of a rehearsal."""
    kit = tmp_path / "KUMQUATWEG"
    for folder in ("startup", "local", "data"):
        (kit / folder).mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    shutil.copytree(table, kit / "data" / "films")
    configure(kit)
    return kit


def configure(kit: Path, **settings: Any) -> None:
    entry = {"source": "table", "root": "films", "path": "pairs.csv", "burned_in": "header", **settings}
    content = {"accept_phi_risk": True, "envelope": {"least_records": 2}, "data": {"pretrain": entry}}
    (kit / "local" / "fedvlp.json").write_text(json.dumps(content))


def asked() -> Experiment:
    chosen = replace(presets.get("fedavg"), data=NamedData("pretrain"))
    return override(override(chosen, "method.local_steps", "1"), "training.batch_size", "4")


@pytest.fixture(scope="module")
def task() -> Shareable:
    """A task of the server, which has no data."""
    state = Assembly(override(presets.get("fedavg"), "data.sites", "1")).server(("site-1",)).state
    run = identity(asked(), "fedavg/001")
    return messages.send_broadcast(Broadcast(0, "train", state), run)


def own_table(kit: Path, content: bytes) -> None:
    """Another table in the place of the kit's."""
    (kit / "data" / "films" / "pairs.csv").write_bytes(content)


def cache_is_a_file(kit: Path) -> None:
    (kit / "ZYXFERREIRA").write_text("")
    configure(kit, cache="ZYXFERREIRA")


def cache_is_damaged(kit: Path) -> None:
    configure(kit, cache="ZYXFERREIRA")
    Assembly(replace(asked(), data=_source(kit))).sites()
    for file in (kit / "ZYXFERREIRA").glob("*/*.npy"):
        file.write_bytes(WORDS.encode())


def _source(kit: Path) -> Any:
    from fedvlp.deploy.site_config import SiteConfig

    return replace(SiteConfig.load(kit / "local").data["pretrain"], image_size=72)


FAULTS: dict[str, Callable[[Path], None]] = {
    "the table is a folder": lambda kit: configure(kit, path="."),
    "the table is gone": lambda kit: configure(kit, path="ZYXFERREIRA.csv"),
    "the table is no table": lambda kit: own_table(kit, WORDS.encode() * 3),
    "a table without an image": lambda kit: own_table(kit, f"image,report\n{FILE},{WORDS}\n".encode()),
    "a table with a zero byte": lambda kit: own_table(kit, f"image,report\n\0{FILE},\0{WORDS}\n".encode()),
    "labels in words": lambda kit: configure(kit, label_columns="report"),
    "a setting of another type": lambda kit: configure(kit, cache=["/srv/ZYXFERREIRA"]),
    "a setting that is none": lambda kit: configure(kit, ZYXFERREIRA=1),
    "a path that leads out": lambda kit: configure(kit, path="../ZYXFERREIRA.csv"),
    "a source that is none": lambda kit: configure(kit, source="ZYXFERREIRA"),
    "the settings are no JSON": lambda kit: (kit / "local" / "fedvlp.json").write_text(WORDS) and None,
    "the cache is a file": cache_is_a_file,
    "the cache is damaged": cache_is_damaged,
    "the films are gone": lambda kit: shutil.rmtree(kit / "data" / "films" / "images"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hospital_whose_files_are_wrong_names_nobody(
    fault: str, kit: Path, tmp_path: Path, task: Shareable, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reply, as the shipped policy lets it go, and every line of any logger; the words say what is to be done."""
    FAULTS[fault](kit)
    context = Engine("site-1", kit, "job-1").new_context()
    with caplog.at_level(logging.DEBUG):
        reply = site_executor(asked()).execute("train", task, context, Signal())
        reply = AllowMetrics(["*"]).process(reply, context)
    failed = messages.failure(fobs.loads(fobs.dumps(reply)))
    assert failed is not None, "the fault is one"
    said = fobs.dumps(reply).decode("latin-1")
    assert names(said) == []
    assert str(tmp_path) not in said
    if "a setting" not in fault and "a source" not in fault:  # the site's own log may quote the site's own file
        assert names(caplog.text.replace(str(kit), "")) == []
    assert os.sep not in failed.text.replace("local/fedvlp.json", "").replace("provisioning/site/", "")


def test_so_it_is_when_a_film_fails_while_it_is_trained_on(
    kit: Path, task: Shareable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The films are read, the task has begun, and a library gives up in the middle of a batch; then the next task is
    answered."""
    executor, context = site_executor(asked()), Engine("site-1", kit, "job-1").new_context()
    batches = SiteData.train_batches

    def answer() -> Shareable:
        with caplog.at_level(logging.DEBUG):
            return executor.execute("train", task, context, Signal())

    for raises in (of_pydicom, of_pillow, of_torch, of_another):
        monkeypatch.setattr(SiteData, "train_batches", lambda *given, raises=raises: raises(tmp_path))
        reply = AllowMetrics(["*"]).process(answer(), context)
        failed = messages.failure(reply)
        assert failed is not None
        assert kind_of(failed.text, raised(raises, tmp_path))
    assert names(caplog.text.replace(str(kit), "")) == []
    monkeypatch.setattr(SiteData, "train_batches", batches)
    assert messages.failure(answer()) is None
