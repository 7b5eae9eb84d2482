"""Jobs as a second user: what it starts and what not, and a real site whose FLARE process may not read the data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from support.hospitals import LEAD, Hospitals, joined, opened, submitted
from support.provisioned import until
from support.short_jobs import committed

from fedvlp.deploy.machine import JOBS_SOCKET
from fedvlp.deploy.named_data import NamedData
from fedvlp.deploy.site_doctor import _job_user
from fedvlp.flare import job_user
from fedvlp.flare.job_check import JobCheck
from fedvlp.flare.jobs import write_job

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
OPTIONS = {"-c": "site-1", "-p": "tcp://localhost:9", "-g": "localhost:8002", "-scheme": "http"}
ASKED: dict[str, Any] = {"job": JOB, "options": OPTIONS, "set": ["secure_train=true"], "environment": {}}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit with a job that JobCheck takes."""
    monkeypatch.setattr(JobCheck, "validate", lambda check, app: ("", {}))
    made = tmp_path / ("a kit whose path is longer than a socket's may be " * 2)
    for folder in ("startup", "local", f"{JOB}/app_site-1/config"):
        (made / folder).mkdir(parents=True)
    return made


@pytest.fixture
def jobs(kit: Path) -> Iterator[job_user._Jobs]:
    with job_user._Address(kit) as address, job_user._Jobs(address, kit) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def test_a_job_of_the_kit_is_started_as_flare_would(jobs: job_user._Jobs, kit: Path) -> None:
    command = jobs.command(ASKED)
    assert command[:5] == [sys.executable, "-m", job_user.MODULE, "-m", str(kit)]
    assert command[-2:] == ["--set", "secure_train=true"]


@pytest.mark.parametrize(
    "asked",
    [
        {"job": "../x"},
        {"options": OPTIONS | {"-m": "/elsewhere"}},
        {"options": OPTIONS | {"-c": "../site-1"}},
        {"set": ["secure_train=true", "-m", "/elsewhere"]},
        {"set": ["config_folder=../../elsewhere"]},
        {"set": ["a b"]},
    ],
)
def test_nothing_else_is_started(jobs: job_user._Jobs, asked: dict[str, Any]) -> None:
    with pytest.raises(job_user.JobRequestError):
        jobs.command(ASKED | asked)


def test_no_job_that_brings_code_or_that_is_refused_is_started(
    jobs: job_user._Jobs, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom = kit / JOB / "app_site-1" / "custom"
    custom.mkdir()
    with pytest.raises(job_user.JobRequestError, match="code"):
        jobs.command(ASKED)
    custom.rmdir()
    monkeypatch.setattr(JobCheck, "validate", lambda check, app: ("another class", {}))
    with pytest.raises(job_user.JobRequestError, match="another class"):
        jobs.command(ASKED)


def launched(kit: Path) -> Any:
    """The job, as FLARE's process has it started."""
    context = FLContext()
    told = {
        JobProcessArgs.CLIENT_NAME: ("-c", "site-1"),
        JobProcessArgs.OPTIONS: ("--set", " secure_train=true"),
        JobProcessArgs.AUTH_TOKEN: ("-t", "secret"),
    }
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, SimpleNamespace(get_root_dir=lambda: str(kit)))
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, told)
    return job_user.SiteJobLauncher().launch_job({"job_id": JOB}, context)


@pytest.mark.parametrize(("code", "said"), [(0, JobReturnCode.SUCCESS), (1, JobReturnCode.EXECUTION_ERROR)])
def test_flare_learns_how_it_ended(
    jobs: job_user._Jobs, kit: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: int
) -> None:
    program = f"import os; assert os.environ['NVFLARE_JOB_AUTH_TOKEN'] == 'secret'; os._exit({code})"
    monkeypatch.setattr(jobs, "command", lambda asked: [sys.executable, "-c", program])
    job = launched(kit)
    job.wait()
    assert job.poll() == said


def test_flare_ends_it(jobs: job_user._Jobs, kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "command", lambda asked: [sys.executable, "-c", "import time; time.sleep(600)"])
    job = launched(kit)
    assert job.poll() == JobReturnCode.UNKNOWN
    job.terminate()
    job.wait()
    assert job.poll() == JobReturnCode.EXECUTION_ERROR


def test_a_socket_that_nobody_answers_starts_no_job_as_flares_own_user(kit: Path) -> None:
    with job_user._Address(kit) as address, socket.socket(socket.AF_UNIX) as left:
        left.bind(address)
    with pytest.raises(ConnectionRefusedError):
        launched(kit)


FLARE, JOBS, GROUP = 10001, 10002, 10003
"""Accounts of one machine, and their group."""


def as_user(uid: int, *command: str | Path) -> list[str]:
    switch = ["setpriv", f"--reuid={uid}", f"--regid={GROUP}", "--clear-groups", "--inh-caps=-all"]
    return [*switch, "sh", "-c", 'umask 007; exec "$@"', "sh", *map(str, command)]


LIBRARIES = os.pathsep.join(path for path in sys.path if path)
PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
"""That of a test may lie in a home which no other account may enter."""


def lacking() -> str:
    """What this machine lacks for two accounts; "" where nothing is missing."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        return "root and setpriv, for two accounts"
    tried = as_user(FLARE, PYTHON, "-c", "import nvflare, torch")
    done = subprocess.run(tried, env={**os.environ, "PYTHONPATH": LIBRARIES}, capture_output=True, check=False)
    return "" if done.returncode == 0 else "a Python that other accounts may use"


class TwoUsers(Hospitals):
    """At site-1 one account runs FLARE, another one the jobs, as the guide sets it up."""

    def start(self, name: str) -> None:
        if name != "site-1":
            super().start(name)
            return
        kit = self.kits / name
        offered = json.loads((kit / "local" / "fedvlp.json").read_text())
        offered["data"]["pretrain"]["burned_in"] = "accept"  # this Python may have no words to search films with
        (kit / "local" / "fedvlp.json").write_text(json.dumps(offered))
        subprocess.run(["chown", "-R", f"0:{GROUP}", kit], check=True)
        subprocess.run(["chmod", "-R", "u=rwX,g=rX,o=", kit], check=True)
        kit.chmod(0o3770)
        for log in (entry for entry in kit.iterdir() if entry.is_file()):  # of the check before
            os.chown(log, FLARE, GROUP)
        for own in ("data", "cache", "runs", "privacy"):
            (kit / own).mkdir(exist_ok=True)
            subprocess.run(["chown", "-R", f"{JOBS}:{GROUP}", kit / own], check=True)
            (kit / own).chmod(0o700)
        programs = self.folder / "programs"
        programs.mkdir()
        (programs / "python3").symlink_to(PYTHON)
        account = {"HOME": "/tmp", "USER": "jobs", "LOGNAME": "jobs", "PATH": f"{programs}:{os.environ['PATH']}"}
        environment = {**os.environ, **account, "PYTHONPATH": LIBRARIES, "OMP_NUM_THREADS": "1"}
        for uid, *command in (
            (JOBS, PYTHON, "-m", "fedvlp.flare.job_user", kit),
            (FLARE, "bash", kit / "startup" / "sub_start.sh"),
        ):
            log = open(self.folder / f"{name}-{uid}.log", "ab")  # noqa: SIM115
            started = subprocess.Popen(
                as_user(uid, *command), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            self._daemons.append(started)
            if uid == JOBS:
                until((kit / JOBS_SOCKET).is_socket, "jobs can be started", 60.0)


@pytest.mark.slow(seconds=90)
def test_a_site_trains_whose_flare_process_may_not_read_the_data() -> None:
    if reason := lacking():
        pytest.skip(reason)
    sites = ("site-1", "site-2")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        with TwoUsers(Path(folder) / "consortium", sites) as here:
            until(lambda: joined(here) == set(sites), "both sites have joined")
            kit = here.kits / "site-1"
            until(lambda: "registered" in (kit / "log.txt").read_text(), "it is the site that has joined")
            parent = here.parent("site-1")
            assert parent.uids().effective == FLARE
            read = subprocess.run(as_user(FLARE, "ls", kit / "data"), capture_output=True, text=True, check=False)
            assert "Permission denied" in read.stderr
            looked = f"import sys; from pathlib import Path; from {_job_user.__module__} import _job_user\n"
            looked += "print(*_job_user(Path(sys.argv[1])), sep='\\n')"
            said = subprocess.run(
                as_user(FLARE, PYTHON, "-c", looked, kit),
                env={**os.environ, "PYTHONPATH": LIBRARIES},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            assert said.count("ok=True") == 2, said
            settings = {"data__sites": 2, "data__size": 400, "partition__sites": 2, "extra__sites": 2}
            experiment = committed("fedavg", **settings, rounds__rounds=1)
            job = write_job(
                replace(experiment, data=NamedData("pretrain")), here.folder / "job", sites=sites, custom=False,
                child=True,
            )  # fmt: skip
            job_id, meta = submitted(here, {"job": job})["job"]
            assert meta["status"] == "FINISHED:COMPLETED", meta
            assert "train failed" not in (kit / job_id / "log.txt").read_text(), "site-1 took part"
            assert (kit / "cache").stat().st_uid == JOBS
            assert (kit / job_id / "log.txt").stat().st_uid == JOBS
            session = opened(here, LEAD)
            try:  # the next one is ended by the console
                longer = write_job(
                    replace(experiment, data=NamedData("pretrain"), rounds=replace(experiment.rounds, rounds=50)),
                    here.folder / "longer", sites=sites, custom=False, child=True,
                )  # fmt: skip
                running = session.submit_job(str(longer))
                until(lambda: (kit / running / "log.txt").exists(), "it has begun at the site")
                session.abort_job(running)
                until(lambda: session.get_job_status(running).startswith("FINISHED"), "it has been aborted")
            finally:
                session.close()
            os.kill(parent.pid, signal.SIGKILL)  # the watchdog starts FLARE again
            until(lambda: here.parent("site-1").pid != parent.pid, "FLARE runs again")
