"""A site's own rules for counting shared patients: off unless they are there, and each of them holds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvlp.cli import app as cli
from fedvlp.deploy.overlap import BOOK, OWN_MACHINE, Overlap, OverlapError, make_key, note_job, pairs_of, read_key
from fedvlp.deploy.site_config import SiteConfig, SiteConfigError, overlap_at


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A provisioned site without a file of its own."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_client.json").write_text("{}")
    (tmp_path / "local").mkdir()
    return tmp_path


def write(kit: Path, **content: Any) -> None:
    (kit / "local" / "fedvlp.json").write_text(json.dumps(content))


def test_nothing_is_counted_unless_the_site_says_so(kit: Path) -> None:
    with pytest.raises(OverlapError, match='has no entry "overlap"'):
        overlap_at(kit)
    write(kit)
    with pytest.raises(OverlapError, match='has no entry "overlap"'):
        overlap_at(kit)
    assert SiteConfig.load(kit / "local").overlap is None
    write(kit, overlap={})
    assert overlap_at(kit) == Overlap()
    with pytest.raises(OverlapError, match="does not name it"):
        overlap_at(kit).admit("pretrain")
    with pytest.raises(OverlapError, match="does not name it"):
        overlap_at(kit).admit_site("south")


def test_the_shipped_file_counts_nothing() -> None:
    shipped = Path(__file__).parents[2] / "provisioning" / "site" / "fedvlp.json"
    assert "overlap" not in json.loads(shipped.read_text())


def test_what_the_file_says_holds(kit: Path) -> None:
    write(kit, overlap={"data": ["pretrain"], "sites": ["south"], "least_patients": 100, "jobs": 1})
    rules = overlap_at(kit)
    rules.admit("pretrain")
    rules.admit_site("south")
    rules.admit_size(100, "south")
    with pytest.raises(OverlapError, match="south has 99 patients; this site counts none in a set of fewer than 100"):
        rules.admit_size(99, "south")
    assert "of pretrain, with south" in rules.in_words()


def test_a_machine_that_is_no_site_needs_no_entry(tmp_path: Path) -> None:
    assert overlap_at(tmp_path) is OWN_MACHINE


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"patients": 3}, "unknown limit 'patients'"),
        ({"least_patients": 1}, "least_patients is 1"),
        ({"least_shared": -1}, "least_shared is -1"),
        ({"jobs": -1}, "jobs is -1"),
        ({"data": "pretrain"}, "overlap.data|data is 'pretrain'"),
        ({"data": ["../x"]}, "overlap.data"),
        ({"sites": [1]}, "overlap.sites is no list of texts"),
        ([], '"overlap" is an object'),
        (None, '"overlap" is an object'),
        (True, '"overlap" is an object|overlap is True'),
    ],
)
def test_a_mistake_in_the_rules_stops_everything(kit: Path, entry: Any, said: str) -> None:
    write(kit, overlap=entry)
    with pytest.raises(SiteConfigError, match=said):
        overlap_at(kit)


def test_a_key_is_made_once_and_read_by_its_owner_alone(kit: Path) -> None:
    done = CliRunner().invoke(cli, ["site", "overlap-key", "--kit", str(kit)])
    assert done.exit_code == 0
    file = kit / "local" / "overlap.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() not in done.output
    key = read_key(kit / "local")
    assert len(key) == 32
    with pytest.raises(OverlapError, match=r"there is a local/overlap\.key already"):
        make_key(kit / "local")
    with pytest.raises(OverlapError, match="give the folder of the site's kit"):
        make_key(kit / "nowhere")
    assert read_key(kit / "local") == key


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "one site makes it"),
        ("a secret", 0o600, "is no key"),
        ("00" * 31, 0o600, "has 31 bytes"),
        ("", 0o600, "has 0 bytes"),
        ("00" * 32, 0o640, "chmod 600"),
        ("00" * 32, 0o604, "chmod 600"),
    ],
)
def test_a_key_that_is_none_is_refused(kit: Path, text: str | None, mode: int, said: str) -> None:
    if text is not None:
        (kit / "local" / "overlap.key").write_text(text)
        (kit / "local" / "overlap.key").chmod(mode)
    with pytest.raises(OverlapError, match=said):
        read_key(kit / "local")


def test_a_site_takes_part_in_so_many_jobs_and_no_more(tmp_path: Path) -> None:
    """The same id again counts too: a new process would answer a question of its own, and the server gives the ids."""
    assert note_job(tmp_path, "a", "pretrain", 90, 2) == 1
    assert note_job(tmp_path, "a", "pretrain", 90, 2) == 2
    before = (tmp_path / BOOK).read_bytes()
    with pytest.raises(OverlapError, match="took part in 2 jobs that count patients and lets 2"):
        note_job(tmp_path, "a", "pretrain", 90, 2)
    assert (tmp_path / BOOK).read_bytes() == before
    with pytest.raises(OverlapError):
        note_job(tmp_path / "new", "a", "pretrain", 90, 0)


def test_of_jobs_that_come_at_once_no_more_than_so_many_take_part(tmp_path: Path) -> None:
    """Six processes and a limit of 3, four times over: without a lock some read the same book."""
    for trial in range(4):
        kit = tmp_path / str(trial)
        go, start = os.pipe()
        children = []
        for number in range(6):
            child = os.fork()
            if not child:
                os.close(start)
                os.read(go, 1)  # until the parent closes its end
                try:
                    note_job(kit, f"job{number}", "pretrain", 80, 3)
                    os._exit(0)
                except OverlapError:
                    os._exit(1)
                except BaseException:
                    os._exit(2)
            children.append(child)
        os.close(go)
        os.close(start)
        ended = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert ended == [0, 0, 0, 1, 1, 1]
        assert len({entry["job"] for entry in json.loads((kit / BOOK).read_text())}) == 3


@pytest.mark.parametrize("content", ["", "[", "{}", '[{"data": "x"}]', "[1]"])
def test_a_book_that_cannot_be_read_is_no_empty_book(tmp_path: Path, content: str) -> None:
    note_job(tmp_path, "a", "pretrain", 90, 5)
    (tmp_path / BOOK).write_text(content)
    with pytest.raises(OverlapError, match=r"cannot be read|damaged"):
        note_job(tmp_path, "b", "pretrain", 90, 5)


def test_every_two_sites_once() -> None:
    assert pairs_of(["c", "a", "b", "a"]) == [("a", "b"), ("a", "c"), ("b", "c")]
