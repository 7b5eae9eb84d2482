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
ASKED: dict[str, Any] = {"job": JOB, "port": 41235, "environment": {}}
OWN = {
    "servers": [{"service": {"target": "fl.consortium.example:8002", "scheme": "http"}}],
    "client": {"fqsn": "site-1"},
}
"""startup/fed_client.json, as far as a job's process is told of it."""
ELSEWHERE = "tcp://198.51.100.7:9"


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit with a job that JobCheck takes."""
    monkeypatch.setattr(JobCheck, "validate", lambda check, app: ("", {}))
    made = tmp_path / ("a kit whose path is longer than a socket's may be " * 2)
    for folder in ("startup", "local", f"{JOB}/app_site-1/config"):
        (made / folder).mkdir(parents=True)
    (made / "startup" / "fed_client.json").write_text(json.dumps(OWN))
    return made


@pytest.fixture
def jobs(kit: Path) -> Iterator[job_user._Jobs]:
    with job_user._Address(kit) as address, job_user._Jobs(address, kit) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def started(kit: Path, parent: str = "tcp://localhost:41235", security: str = "clear") -> list[str]:
    """The command of the job, put together by hand from what FLARE gives a job's process."""
    return [
        sys.executable, "-m", job_user.MODULE, "-m", str(kit), "-w", str(kit / "startup"), "-n", JOB,
        "-s", "fed_client.json", "-c", "site-1", "-g", "fl.consortium.example:8002", "-scheme", "http",
        "-p", parent, "--parent_conn_sec", security,
        "--set", "secure_train=true", "uid=site-1", "config_folder=config", "print_conf=True",
    ]  # fmt: skip


def test_a_job_of_the_kit_is_started_with_what_the_kit_says(jobs: job_user._Jobs, kit: Path) -> None:
    assert jobs.command(ASKED) == started(kit)
    link = {"scheme": "tcp", "resources": {"host": "127.0.0.1", "connection_security": "mtls"}}
    files = {"comm_config.json.default": {"internal": link}, "comm_config.json": {"internal": {"scheme": "tcp"}}}
    said = [("stcp://127.0.0.1:41235", "mtls"), ("tcp://localhost:41235", "clear")]
    for (name, content), expected in zip(files.items(), said, strict=True):  # the second takes the first one's place
        (kit / "local" / name).write_text(json.dumps(content))
        assert jobs.command(ASKED) == started(kit, *expected)
    (kit / "local" / "comm_config.json").write_text('{"max_message_size": 1}')
    assert jobs.command(ASKED) == started(kit)


@pytest.mark.parametrize(
    "asked",
    [
        {"job": "../x"},
        {"job": JOB + "/../" + JOB},
        {"port": "41235@198.51.100.7:9"},
        {"port": -1},
        {"port": 1 << 16},
        {"port": True},
        {"options": {"-c": "x/y"}},
        {"options": {"-p": ELSEWHERE}},
        {"options": {"-g": "198.51.100.7:9"}},
        {"options": {"--parent_conn_sec": "clear"}},
        {"set": ["config_folder=/tmp/evil"]},
        {"set": ["secure_train=false"]},
        {"set": []},
        {"kit": "/elsewhere"},
        {"cwd": "/tmp"},
    ],
)
def test_a_request_with_anything_else_starts_nothing(jobs: job_user._Jobs, asked: dict[str, Any]) -> None:
    with pytest.raises(job_user.JobRequestError, match="none that SiteJobLauncher makes"):
        jobs.command(ASKED | asked)


def test_a_jobs_environment_is_the_programs_own_with_a_list_of_variables(jobs: job_user._Jobs) -> None:
    given = {name: f"0,1 {name}+/=" for name in job_user.ENVIRONMENT}
    assert set(given) == {
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NVFLARE_JOB_AUTH_TOKEN", "NVFLARE_JOB_TOKEN_SIGNATURE",
        "NVFLARE_JOB_SSID",
    }  # fmt: skip
    assert jobs.environment(ASKED | {"environment": given}) == {**os.environ, **given}
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH", "HOME", "FEDVLP_HOME", "cuda_visible_devices"):
        with pytest.raises(job_user.JobRequestError, match="nothing else"):
            jobs.environment(ASKED | {"environment": {**given, name: "/tmp/evil"}})
    for value in ("0\nx", "0\0", "$(id)", "0;1", "\u202e"):
        with pytest.raises(job_user.JobRequestError, match="plain words"):
            jobs.environment(ASKED | {"environment": {"CUDA_VISIBLE_DEVICES": value}})


@pytest.mark.parametrize("file", ["startup/fed_client.json", "local/comm_config.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"servers": [], "internal": "tcp"}'])
def test_a_kit_that_does_not_say_it_starts_nothing(
    file: str, content: str, jobs: job_user._Jobs, kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (kit / file).write_text(content)
    job = launched(kit)
    job.wait()
    assert job.poll() == JobReturnCode.EXECUTION_ERROR
    assert "a job was not started: " in caplog.text


def test_a_link_in_a_job_starts_nothing(jobs: job_user._Jobs, kit: Path) -> None:
    """Beside what it leads to, FLARE's account could have a list of classes of its own; a log could be the ledger."""
    job = kit / JOB
    (kit / JOB / "log.txt").write_text("")
    for link in (job / "app_site-1", job / "log.txt", job):
        moved = link.rename(kit / "moved")
        link.symlink_to(moved)
        with pytest.raises(job_user.JobRequestError, match="there is a link"):
            jobs.command(ASKED)
        link.unlink()
        moved.rename(link)


def test_no_job_that_brings_code_or_that_is_refused_is_started(
    jobs: job_user._Jobs, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom = kit / JOB / "app_site-1" / "custom"
    custom.mkdir()
    with pytest.raises(job_user.JobRequestError, match="code"):
        jobs.command(ASKED)
    custom.rmdir()
    custom.symlink_to("made later")
    with pytest.raises(job_user.JobRequestError, match="a link"):
        jobs.command(ASKED)
    custom.unlink()
    monkeypatch.setattr(JobCheck, "validate", lambda check, app: ("another class", {}))
    with pytest.raises(job_user.JobRequestError, match="another class"):
        jobs.command(ASKED)


def launched(kit: Path) -> Any:
    """The job, as FLARE's process has it started."""
    context = FLContext()
    told = {
        JobProcessArgs.PARENT_URL: ("-p", "tcp://localhost:41235"),
        JobProcessArgs.AUTH_TOKEN: ("-t", "secret"),
    }
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, SimpleNamespace(get_root_dir=lambda: str(kit)))
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, told)
    return job_user.SiteJobLauncher().launch_job({"job_id": JOB}, context)


@pytest.mark.parametrize(("code", "said"), [(0, JobReturnCode.SUCCESS), (1, JobReturnCode.EXECUTION_ERROR)])
def test_flare_learns_how_it_ended(
    jobs: job_user._Jobs, kit: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: int
) -> None:
    program = "import os; assert os.environ['NVFLARE_JOB_AUTH_TOKEN'] == 'secret'; assert os.getcwd() == "
    program += f"{str(kit / 'startup')!r}; os._exit({code})"
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


def asked_as_flare(kit: Path, request: dict[str, Any]) -> str:
    """The answer of the jobs' account to a request that FLARE's account makes by itself, past SiteJobLauncher."""
    program = "import socket, sys; link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1]); "
    program += "link.sendall(sys.argv[2].encode() + b'\\n'); print(link.recv(9).decode())"
    command = as_user(FLARE, PYTHON, "-c", program, JOBS_SOCKET, json.dumps(request))
    return subprocess.run(command, cwd=kit, capture_output=True, text=True, check=True).stdout.strip()


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
            asked = {"job": job_id, "port": 9, "environment": {}}
            for hostile in (
                {"environment": {"LD_PRELOAD": "/tmp/evil.so"}},
                {"options": {"-p": ELSEWHERE}},
                {"set": ["secure_train=false"]},
            ):
                assert asked_as_flare(kit, asked | hostile) == "1"
            refusals = (here.folder / f"site-1-{JOBS}.log").read_text().count("a job was not started")
            assert refusals == 3, "and nothing else was"
            for file in ("local/resources.json", "local/comm_config.json", "startup/fed_client.json"):
                wrote = subprocess.run(as_user(FLARE, "touch", kit / file), capture_output=True, check=False)
                assert wrote.returncode, "what a job's command is made of is not FLARE's account's to write"
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
