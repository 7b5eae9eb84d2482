"""The user of jobs: a second account of a site's machine, which alone may read the data.

FLARE's process, which talks to the network, needs no patient's record. ``SiteJobLauncher`` therefore has the process of
a job started by the other account, whose program is here: ``python -m fedvlp.flare.job_user KIT``. The two share the
kit and a socket in it, and nothing has root's rights. The guide of sites says how to set that up.

The program starts jobs of its own kit and nothing else. FLARE's process says which job, at which port it listens, and
the credentials of the job; the command is made of what the kit says, which FLARE's account cannot write. The program
looks at a job once more, as JobCheck does, and takes none that brings code. A FLARE process that is taken over as a
whole can still alter a job's files after that.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobProcessArgs, JobProcessEnv, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import JOB_RETURN_CODE_MAPPING
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.utils.job_launcher_utils import get_credential_env

from fedvlp.deploy.machine import JOBS_SOCKET
from fedvlp.flare.job_check import JobCheck
from fedvlp.flare.perimeter import JOB_ID

log = logging.getLogger(__name__)

MODULE = "nvflare.private.fed.app.client.worker_process"
ASKED = frozenset({"job", "port", "environment"})
"""All that FLARE's process says: the job, the port at which it listens for the job's process, and variables."""
ENVIRONMENT = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    JobProcessEnv.AUTH_TOKEN,
    JobProcessEnv.TOKEN_SIGNATURE,
    JobProcessEnv.SSID,
)
"""The variables that a job's process may get from FLARE's. Another one, LD_PRELOAD above all, is a program of its own.
"""
VALUE = re.compile(r"[\w ,:./+=-]*", re.ASCII)  # numbers of GPUs, or a token
LONGEST = 65536  # bytes of a request
GRACE = 5.0  # seconds between the request to end and the end


class SiteJobLauncher(ClientProcessJobLauncher):
    """``process_launcher`` of ``local/resources.json``: FLARE's own, where no user of jobs listens."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """A socket that nobody answers is an error: the job does not start as FLARE's own user instead."""
        kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
        if not (kit / JOBS_SOCKET).exists():
            return super().launch_job(job_meta, fl_ctx)
        told = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        request = {
            "job": job_meta[JobConstants.JOB_ID],
            "port": urlsplit(told[JobProcessArgs.PARENT_URL][1]).port,
            "environment": {
                **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                **get_credential_env(told),
            },
        }
        link = socket.socket(socket.AF_UNIX)
        with _Address(kit) as address:
            link.connect(address)
        link.sendall(json.dumps(request).encode() + b"\n")
        return StartedJob(link)


class StartedJob(JobHandleSpec):
    """A job's process of the other account. It ends when ``link`` is closed, with FLARE's process at the latest."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__()
        self._link = link
        self._code = JobReturnCode.EXECUTION_ERROR  # where nobody says how it ended
        self._over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._link, self._link.makefile("r") as answer:
            self._code = JOB_RETURN_CODE_MAPPING.get(int(answer.readline()), JobReturnCode.EXECUTION_ERROR)
        self._over.set()

    def poll(self) -> Any:
        """FLARE's code of how it ended; UNKNOWN while it runs."""
        return self._code if self._over.is_set() else JobReturnCode.UNKNOWN

    def wait(self) -> None:
        """Returns when it has ended."""
        self._over.wait()

    def terminate(self) -> None:
        """Asks the jobs' account to end the process."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)


class JobRequestError(ValueError):
    """What FLARE's process asks for is no job of this kit."""


class _Address:
    """The socket of a kit by a short name: a path to a socket has 107 characters at most."""

    def __init__(self, kit: Path) -> None:
        self._folder = os.open(kit, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._folder}/{JOBS_SOCKET}"

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)


class _Jobs(socketserver.ThreadingUnixStreamServer):
    """Starts the jobs of ``kit``, each in a process group of its own."""

    daemon_threads = True

    def __init__(self, address: str, kit: Path) -> None:
        super().__init__(address, _Request)
        self.kit = kit

    def command(self, request: dict[str, Any]) -> list[str]:
        """The command of a job of this kit, as FLARE deployed it. Raises JobRequestError for any other request."""
        job, port = request["job"], request["port"]
        if not {*request} <= ASKED or not JOB_ID.fullmatch(job) or type(port) is not int or not 0 < port < 1 << 16:
            raise JobRequestError("the request is none that SiteJobLauncher makes: a job's id, a port, an environment")
        options = {"-m": str(self.kit), "-w": str(self.kit / "startup"), "-n": job, **_own_options(self.kit, port)}
        app = self.kit / job / f"app_{options['-c']}"
        if app.resolve() != app or any(path.is_symlink() for path in app.parent.rglob("*")):
            raise JobRequestError(
                "there is a link in the job's folder, through which a job would read or write elsewhere"
            )
        why = "it brings code" if (app / "custom").exists() else JobCheck("client").validate(str(app))[0]
        if why:
            raise JobRequestError(why)
        settings = ("secure_train=true", f"uid={options['-c']}", "config_folder=config", "print_conf=True")
        words = [word for pair in options.items() for word in pair]
        return [sys.executable, "-m", MODULE, *words, "--set", *settings]

    def environment(self, request: dict[str, Any]) -> dict[str, str]:
        """The environment of a job's process: this program's, with what the request may add. Raises JobRequestError."""
        given = request["environment"]
        if not {*given} <= {*ENVIRONMENT} or not all(VALUE.fullmatch(value) for value in given.values()):
            raise JobRequestError(f"a job's environment is given {', '.join(ENVIRONMENT)} in plain words, nothing else")
        return {**os.environ, **given}


def _own_options(kit: Path, port: int) -> dict[str, str]:
    """The options of a job's process that FLARE takes from the kit, too: who the site is, where its server is."""
    startup = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
    said = [file for end in ("", ".default") if (file := kit / "local" / f"comm_config.json{end}").is_file()]
    inner = json.loads(said[0].read_text(encoding="utf-8")).get("internal", {}) if said else {}
    resources, service = inner.get("resources", {}), startup["servers"][0]["service"]
    return {
        "-s": "fed_client.json",
        "-c": startup["client"]["fqsn"],
        "-g": service["target"],
        "-scheme": service["scheme"],
        "-p": TcpDriver.get_urls("tcp", {**resources, "port": port})[0],  # where FLARE's process listens, and how
        "--parent_conn_sec": resources.get("connection_security", "clear"),
    }


class _Request(socketserver.StreamRequestHandler):
    """One job, from its start to its end."""

    server: _Jobs

    def handle(self) -> None:
        """Starts it, or says why not in this program's log; then waits for its end."""
        try:
            request = json.loads(self.rfile.readline(LONGEST))
            command, environment = self.server.command(request), self.server.environment(request)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            said = str(error) if isinstance(error, JobRequestError) else type(error).__name__
            log.error("a job was not started: %s", said)
            self.wfile.write(b"1\n")
            return
        # Python looks for modules in the folder where it starts: in one that FLARE's account cannot write.
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=self.server.kit / "startup",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._end_when_left, args=(process,), daemon=True).start()
        code = process.wait()
        with suppress(OSError):
            self.wfile.write(f"{code}\n".encode())

    def _end_when_left(self, process: subprocess.Popen[bytes]) -> None:
        """FLARE's process closes its side to end a job, and when it ends itself."""
        with suppress(OSError, ValueError):
            self.rfile.read(1)
        for how in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is ended. Files that FLARE's process shares are the group's; all others nobody's."""
    parser = argparse.ArgumentParser(prog="python -m fedvlp.flare.job_user", description=__doc__)
    parser.add_argument("kit", type=Path, help="folder of the startup kit")
    kit = parser.parse_args(arguments).kit.resolve()
    os.umask(0o007)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    (kit / JOBS_SOCKET).unlink(missing_ok=True)  # of a program that was killed
    with _Address(kit) as address, _Jobs(address, kit) as jobs:
        log.info("jobs of this kit start as uid %d", os.getuid())
        try:
            jobs.serve_forever()
        finally:
            (kit / JOBS_SOCKET).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
