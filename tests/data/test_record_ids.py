"""Ids of a hospital's records in files: keyed, so that who tries all record numbers finds none of them."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import multiprocessing
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvlp.data import record_ids
from fedvlp.data.cohort import PUBLIC, Cohort, digest
from fedvlp.data.partition import write_assignment
from fedvlp.data.record_ids import NAME, RecordKeyError, as_written, hidden, key_in, own_folder
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.models import fetched
from fedvlp.run import presets
from fedvlp.run.experiment import Partition
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

Image = pytest.importorskip("PIL.Image")
NUMBERS = range(1200, 1224)
TRIED = range(1_000, 4_000)


@pytest.fixture(autouse=True)
def _own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))


@pytest.fixture
def table(tmp_path: Path) -> TableSource:
    """24 films named by their record number, at two sites and in the public set."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [["image", "report", "site", "patient_id", "study_id", "split"]]
    for index, number in enumerate(NUMBERS):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 36), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        site, split = (PUBLIC, "north", "south")[index % 3], ("train", "train", "val", "test")[index // 3 % 4]
        rows.append([f"{number}.png", f"Effusion on the left, {index} cm.", site, str(number), str(number), split])
    rows.append(["9999.png", "An image that is not there.", "north", "9999", "9999", "train"])
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return TableSource(str(folder / "pairs.csv"), image_size=72, cache=str(tmp_path / "cache"))


def recovered(content: bytes) -> set[int]:
    """The enumeration attack: record numbers whose hash, in any form without a key, is in ``content``."""
    known: dict[str, int] = {}
    for number in TRIED:
        for kind, value in (("image", f"{number:04d}.png"), ("patient_id", str(number)), ("study_id", str(number))):
            known[digest(kind, value)[:16]] = number
            for text in (value, digest(kind, value)[:16]):
                known[hashlib.sha256(text.encode()).hexdigest()[:16]] = number
                known[hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:16]] = number
    tokens = {token.decode()[:16] for token in re.findall(rb"(?<![0-9a-f])[0-9a-f]{16,64}", content)}
    return {known[token] for token in tokens & known.keys()}


def run_of(table: TableSource, root: Path) -> RunFolder:
    usual = presets.get("fedavg")
    rounds = Rounds(rounds=0, evaluate_every=0)
    chosen = replace(usual, data=table, rounds=rounds, partition=Partition(retrieve=True))
    folder = RunFolder.create(root, chosen)
    simulate(chosen, folder)
    return folder


def test_no_record_number_is_found_in_what_a_run_leaves(
    table: TableSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Security S12: run folder, cache, log and errors. The attack finds every id that is written as it is in memory."""
    cohort = table.build()
    plain = tmp_path / "plain.json"
    write_assignment(plain, np.zeros(len(cohort), dtype=np.int64), cohort.ids, 0)
    assert recovered(plain.read_bytes()) == set(NUMBERS), "the attack works"
    with caplog.at_level(logging.DEBUG):
        folder = run_of(table, tmp_path / "runs")
    with pytest.raises(ValueError, match=r"missing image 1 \(row 25\)") as caught:
        replace(table, max_skipped=0.0).build()
    files = [file for file in (*folder.path.rglob("*"), *(tmp_path / "cache").rglob("*")) if file.is_file()]
    assert {"partition.json", "config.json"} <= {file.name for file in files}
    left = b"\n".join([*(file.read_bytes() + file.name.encode() for file in files), caplog.text.encode()])
    public = {number for index, number in enumerate(NUMBERS) if index % 3 == 0}
    assert recovered(left + str(caught.value).encode()) == public, "every site holds those"
    written = json.loads((folder.path / "partition.json").read_text())["ids"]
    assert len(set(written)) == 24
    assert [len(name) for name in written].count(32) == 16
    assert not (folder.path / NAME).exists()
    assert not list(folder.path.parents[1].rglob(NAME)), "the key does not travel with a run"


def test_runs_are_compared_by_the_ids_of_one_key(table: TableSource, tmp_path: Path) -> None:
    """A run that is begun again, or was made before, has the file written anew; its order is what it was."""
    folder = run_of(table, tmp_path / "runs")
    first = (folder.path / "partition.json").read_bytes()
    assert (run_of(table, tmp_path / "more").path / "partition.json").read_bytes() == first
    cohort = table.build()
    written = json.loads(first)
    assert written["ids"] == list(as_written(cohort).values())
    assert [sorted(set(cohort.sites or ()))[index] for index in written["assignment"]] == list(cohort.sites or ())


def test_what_is_trained_does_not_depend_on_the_key(table: TableSource, tmp_path: Path, monkeypatch: Any) -> None:
    """Splits, retrieved reports and the order of patients follow from hashes that are the same on every machine."""

    def seen() -> tuple[Any, ...]:
        cohort = replace(table, split_column="").build()
        return cohort.ids, cohort.patients, cohort.splits.tolist(), cohort.fingerprint

    before = seen()
    key_in(own_folder())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    assert seen() == before
    assert before[0][0] == digest("image", "1200.png")[:16], "as in runs of earlier versions"


def test_two_sites_give_one_record_two_hashes(tmp_path: Path) -> None:
    north, south = key_in(tmp_path / "north"), key_in(tmp_path / "south")
    assert len(north) == len(south) == 32
    assert key_in(tmp_path / "north") == north
    assert set(hidden(["a", "b"], north)).isdisjoint(hidden(["a", "b"], south))
    assert hidden(["a"], north) == hidden(["a"], north)
    assert hidden(["a"], north)[0] == hashlib.blake2b(b"a", key=north, digest_size=16).hexdigest()


def test_published_records_keep_their_ids() -> None:
    cohort = SyntheticCohort(sites=2, size=8).build()
    assert as_written(cohort) == {name: name for name in cohort.ids}
    assert not own_folder().exists(), "no key is made for them"
    joined = Cohort.concat((cohort, replace(cohort, private=True, ids=tuple(f"x{name}" for name in cohort.ids))))
    assert joined.private


def _keys(folder: Path, start: Any, out: Any) -> None:
    start.wait()
    out.put(key_in(folder))


def test_two_processes_of_one_site_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Event(), context.Queue()
    processes = [context.Process(target=_keys, args=(tmp_path / "kit", start, out)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    keys = {out.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert keys == {key_in(tmp_path / "kit")}
    assert [file.name for file in (tmp_path / "kit").iterdir()] == [NAME]


def test_the_key_is_its_owners_alone_from_its_first_byte_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    real = record_ids.secrets.token_bytes

    def looked(count: int) -> bytes:
        modes.extend(stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob(f".{NAME}.*"))
        return real(count)

    monkeypatch.setattr(record_ids.secrets, "token_bytes", looked)
    key_in(tmp_path)
    assert modes == [0o600]
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def test_a_key_that_is_open_or_cut_is_refused_in_words(tmp_path: Path) -> None:
    key_in(tmp_path)
    (tmp_path / NAME).chmod(0o640)
    with pytest.raises(RecordKeyError, match=r"others may read the key for record ids \(mode 640\): chmod 600"):
        key_in(tmp_path)
    (tmp_path / NAME).chmod(0o600)
    (tmp_path / NAME).write_bytes(b"short")
    with pytest.raises(RecordKeyError, match="has 5 bytes, expected 32; remove record-key"):
        key_in(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordKeyError, match="set XDG_DATA_HOME to a folder of your own"):
        key_in(tmp_path / "file" / "below")


def test_an_account_without_a_home_is_told_which_folder_to_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a container's `--user 54321`: no HOME, and no entry in passwd."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv(fetched.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(RecordKeyError, match="set XDG_DATA_HOME"):
        own_folder()
    with pytest.raises(fetched.NoWeightsError, match=f"set {fetched.FOLDER_VARIABLE}"):
        fetched.folder_of("lite0")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert own_folder() == tmp_path / "fedvlp"
