"""FLARE's own auditor, with what it is told by accounts, sites and jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.sec.audit import Auditor, AuditService

from fedvlp.flare import audit_log
from fedvlp.flare.audit_log import Allowance, write_single_lines

FORGED = "list_jobs\n[E:1][T:now][U:admin@consortium.example][A:submit_job]"
STEERING = "\x1b[2J\r\x00\x85\u2028\u2029\u202e\x9b31m"


@pytest.fixture
def auditor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Auditor]:
    """As FLARE's processes have it, whose commands and topics go to it by place and by name."""
    for name in ("add_event", "add_job_event"):
        monkeypatch.setattr(Auditor, name, getattr(Auditor, name))
    monkeypatch.setattr(AuditService, "the_auditor", None)
    made = AuditService.initialize(str(tmp_path / "audit.log"))
    write_single_lines()
    write_single_lines()  # each process of FLARE builds the component anew
    yield made
    made.close()


def lines(tmp_path: Path, name: str = "audit.log") -> list[str]:
    return (tmp_path / name).read_text(encoding="utf-8").split("\n")[:-1]


WRITERS: list[Any] = [
    lambda text: AuditService.add_event(text, text, text, text),
    lambda text: AuditService.add_event(user=text, action=text, ref=text, msg=text),
    lambda text: AuditService.add_job_event(text, text, text, text, text, text),
    lambda text: AuditService.add_job_event(job_id=text, scope_name=text, task_name=text, task_id=text, msg=text),
    lambda text: AuditService.get_auditor().add_event(user=text, action=text),
    lambda text: AuditService.get_auditor().add_job_event(job_id=text, msg=text),
]


@pytest.mark.parametrize("write", WRITERS)
def test_an_event_is_one_printable_line_whatever_it_says(write: Any, auditor: Auditor, tmp_path: Path) -> None:
    for text in (FORGED, STEERING, "x" * 100_000, f"{STEERING}Größe"):
        before = len(lines(tmp_path))
        assert write(text), "FLARE goes on with the event's id"
        (line,) = lines(tmp_path)[before:]
        assert line.isprintable()
        assert line.startswith("[E:"), line
        assert len(line) < 10_000
    assert "Größe" in line


def test_what_flare_leaves_out_stays_out(auditor: Auditor, tmp_path: Path) -> None:
    assert AuditService.add_event(user="site-1", action="_check_session") == ""
    assert lines(tmp_path) == []


def test_a_full_file_is_kept_beside_a_new_one(
    auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is lost, and the oldest file goes when there are more than are kept."""
    monkeypatch.setattr(audit_log, "LARGEST", 400)
    monkeypatch.setattr(audit_log, "KEPT", 2)
    for number in range(4):
        AuditService.add_event("admin", "list_jobs", msg=f"<{number}>" + "x" * 500)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
    kept = [lines(tmp_path, name)[0] for name in ("audit.log.2", "audit.log.1", "audit.log")]
    assert [line.partition("<")[2][:1] for line in kept] == ["1", "2", "3"]


def test_a_file_that_was_full_before_is_not_written_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "LARGEST", 400)
    (tmp_path / "audit.log").write_text("old\n" * 200)
    for name in ("add_event", "add_job_event"):
        monkeypatch.setattr(Auditor, name, getattr(Auditor, name))
    write_single_lines()
    made = Auditor(str(tmp_path / "audit.log"))
    made.add_event("admin", "list_jobs")
    made.close()
    assert made.add_event("admin", "list_jobs") == "", "FLARE says nothing where it has closed the file"
    assert (len(lines(tmp_path, "audit.log.1")), len(lines(tmp_path))) == (200, 1)


def test_an_allowance_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once, two a second: after a second two more, after an hour no more than three."""
    clock = [0.0]
    monkeypatch.setattr(audit_log.time, "monotonic", lambda: clock[0])
    allowance = Allowance(3, 2.0)
    assert [allowance.take("a") for _ in range(5)] == [0, 0, 0, None, None]
    assert allowance.take("b") == 0
    clock[0] = 1.0
    assert [allowance.take("a") for _ in range(3)] == [2, 0, None]
    clock[0] = 3600.0
    assert [allowance.take("a") for _ in range(4)] == [1, 0, 0, None]
