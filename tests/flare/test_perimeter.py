"""Every topic that FLARE's console, server and jobs have, from every kind of sender.

The slow tests send such messages to two provisioned hospitals, from the accounts' own sessions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    MessageHeaderKey,
    MessagePropKey,
    MessageType,
    ReturnCode,
)
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.sec.audit import AuditService
from nvflare.private import admin_defs
from nvflare.private.defs import (
    CellMessageHeaderKeys,
    ControlCommandTopic,
    SysCommandTopic,
    TrainingTopic,
    new_cell_message,
)
from nvflare.private.fed.server import job_cmds
from support.hospitals import LEAD, MEMBER, Hospitals, joined, opened, submitted
from support.provisioned import until
from support.short_jobs import committed

from fedvlp.core.json_file import LARGEST_JOB
from fedvlp.deploy.site_config import NamedData
from fedvlp.flare import kit_lock
from fedvlp.flare.job_check import bound_submissions
from fedvlp.flare.jobs import write_job
from fedvlp.flare.kit_lock import PARENTS
from fedvlp.flare.perimeter import ADMIN_TOPICS, REFUSED, SERVER, Perimeter
from fedvlp.run.lock import in_use, only_writer

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
TOPICS = [
    topic
    for group in (TrainingTopic, SysCommandTopic, ControlCommandTopic)
    for name, topic in vars(group).items()
    if name.isupper()
]
STRANGERS = {
    "no signature": (SERVER, SERVER, ""),
    "forged": (SERVER, SERVER, "forged"),
    "an admin": ("member", "token-m", "signed"),
    "another site": ("site-2", "token-2", "signed"),
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    written: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: written.append(line))
    return written


def guard(**args: bool) -> Perimeter:
    verifier = SimpleNamespace(verify=lambda name, token, signature: signature == "signed")
    made = Perimeter(**args)
    link = SimpleNamespace(client_name="site-1", token="token-1", token_verifier=verifier)
    made._site = SimpleNamespace(communicator=link)
    return made


def asked(topic: str, sender: tuple[str, str, str], job: str = JOB) -> Message:
    """A request that says it comes from the server."""
    body = admin_defs.Message(topic, archive("{}") if topic == TrainingTopic.DEPLOY else "")
    body.set_header("job_id", job)
    keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
    headers = {MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.CHANNEL: CellChannel.CLIENT_MAIN}
    return Message({**headers, MessageHeaderKey.ORIGIN: SERVER, **dict(zip(keys, sender, strict=True))}, body)


def archive(*files: str, compression: int = ZIP_STORED, name: str = "config/config_fed_client.json") -> bytes:
    """A job as FLARE packs it."""
    content = BytesIO()
    with ZipFile(content, "w", compression) as job:
        for number, text in enumerate(files):
            job.writestr(f"job-{number}/{name}", text)
    return content.getvalue()


UNFIT = {
    "large": (archive("{}", " " * (LARGEST_JOB + 1)), "at most 4,194,304 are read"),
    "compressed": (archive(" " * LARGEST_JOB, compression=ZIP_DEFLATED), "the job is compressed"),
    "many": (archive(*[""] * 16385), "the job has 16,385 files"),
    "in all": (archive(*[" " * LARGEST_JOB] * 17), "the job has 17 files"),
    "cut": (archive("{}")[:-1], "no archive"),
    "none": (b"", "no archive"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_job_that_is_too_large_is_refused_before_it_is_unpacked_and_parsed(
    kind: str, lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At a site whatever the server sends, and at the server when it is submitted, from a file."""
    content, why = UNFIT[kind]
    sent = asked(TrainingTopic.DEPLOY, (SERVER, SERVER, "signed"))
    assert not guard().check_request(sent)
    sent.payload.body = content
    assert guard().check_request(sent)
    assert why in lines[0]["msg"]
    (tmp_path / "job.zip").write_bytes(content)
    monkeypatch.setattr(job_cmds, "JobMetaValidator", job_cmds.JobMetaValidator)
    bound_submissions()
    valid, said, _ = job_cmds.JobMetaValidator().validate("job-0", str(tmp_path / "job.zip"))
    assert (valid, why in said) == (False, True)


def test_a_second_process_on_one_kit_ends_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of jobs, which build the same component in another folder, do not look."""
    monkeypatch.chdir(tmp_path)
    with only_writer(tmp_path):
        Perimeter()
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=PARENTS[1]))
        with pytest.raises(SystemExit, match=f"^not started: the kit of {tmp_path.name} is in use: process "):
            Perimeter()
    monkeypatch.setattr(kit_lock, "_until_the_end", ExitStack())
    with kit_lock._until_the_end:
        Perimeter()
        assert in_use(tmp_path)


@pytest.mark.parametrize("sender", STRANGERS)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_stranger_is_refused(topic: str, sender: str, lines: list[dict[str, str]]) -> None:
    message = asked(topic, STRANGERS[sender])
    assert guard().check_sender(message)
    assert guard().check_request(message)
    assert lines[0]["action"] == REFUSED


@pytest.mark.parametrize("topic", TOPICS)
def test_the_server_asks_what_the_table_says(topic: str, lines: list[dict[str, str]]) -> None:
    message = asked(topic, (SERVER, SERVER, "signed"))
    assert not guard().check_sender(message)
    assert (guard().check_request(message) is None) == (SERVER in ADMIN_TOPICS.get(topic, ()))


def test_a_shell_only_where_the_site_asks_for_it(lines: list[dict[str, str]]) -> None:
    message = asked(SysCommandTopic.SHELL, (SERVER, SERVER, "signed"))
    assert guard().check_request(message)
    assert not guard(allow_shell=True).check_request(message)


@pytest.mark.parametrize("job", ["data", "privacy", "../x", "", JOB + "/.."])
def test_only_a_job_is_deleted(job: str, lines: list[dict[str, str]]) -> None:
    assert guard().check_request(asked(TrainingTopic.DELETE_RUN, (SERVER, SERVER, "signed"), job))


def from_outside(channel: str, topic: str, *, peer: str, cell: str, to: str = SERVER, name: str = "") -> Message:
    """A request as the server's cell receives it from the cell of an account or of a site."""
    headers = {MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.DESTINATION: to}
    headers |= {MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic}
    message = Message({**headers, CellMessageHeaderKeys.CLIENT_NAME: name or peer}, None)
    message.set_prop(MessagePropKey.COMMON_NAME, peer)
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(cell))
    return message


ACCOUNT = {"peer": "member", "cell": f"_admin_{JOB}"}
SITE = {"peer": "site-1", "cell": "site-1"}
SITE_JOB = {"peer": "site-1", "cell": f"site-1.{JOB}"}
SERVER_JOB = f"server.{JOB}"


@pytest.mark.parametrize("sender", [ACCOUNT, SITE, SITE_JOB])
@pytest.mark.parametrize("to", ["site-2", f"site-2.{JOB}", f"_admin_{JOB}"])
@pytest.mark.parametrize("channel", [value for name, value in vars(CellChannel).items() if name.isupper()])
def test_the_server_passes_nothing_on_to_another(
    channel: str, to: str, sender: dict[str, str], lines: list[dict[str, str]]
) -> None:
    assert Perimeter("server").check_at_server(from_outside(channel, "x", to=to, **sender))
    assert f"through certificate {sender['peer']}" in lines[0]["msg"]


@pytest.mark.parametrize("name", [SERVER, "server_job", "site-2"])
def test_nobody_outside_uses_anothers_token(name: str, lines: list[dict[str, str]]) -> None:
    message = from_outside(CellChannel.HCI, "command", name=name, **ACCOUNT)
    assert Perimeter("server").check_at_server(message)
    message.set_header(MessageHeaderKey.MSG_TYPE, MessageType.REPLY)
    assert Perimeter("server").check_at_server(message)


@pytest.mark.parametrize(
    ("sender", "to", "channel", "topic", "passes"),
    [
        (ACCOUNT, SERVER, CellChannel.HCI, "command", True),
        (ACCOUNT, SERVER, CellChannel.SERVER_MAIN, CellChannelTopic.Challenge, True),
        (ACCOUNT, SERVER, CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE, False),
        (ACCOUNT, SERVER, CellChannel.AUX_COMMUNICATION, "ObjectStreamer.Request", True),
        (ACCOUNT, SERVER, "download_service__", "download_service__download", True),
        (ACCOUNT, SERVER_JOB, "download_service__", "download_service__download", False),
        (ACCOUNT, SERVER, CellChannel.AUX_COMMUNICATION, "fed.event", False),
        (ACCOUNT, SERVER, CellChannel.SERVER_PARENT_LISTENER, "update_run_status", False),
        (ACCOUNT, SERVER, "_net_manager", "stop_cell", False),
        (ACCOUNT, SERVER_JOB, CellChannel.AUX_COMMUNICATION, "__end_run__", False),
        (ACCOUNT, SERVER_JOB, CellChannel.SERVER_COMMAND, "abort", False),
        (SITE, SERVER, CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT, True),
        (SITE, SERVER, CellChannel.HCI, "command", False),
        (SITE, SERVER, CellChannel.CELLNET, "bulk", False),
        (SITE, SERVER, "_net_manager", "stop", False),
        (SITE_JOB, SERVER_JOB, CellChannel.SERVER_COMMAND, "get_task", True),
        (SITE_JOB, SERVER_JOB, CellChannel.SERVER_COMMAND, "abort", False),
        (SITE_JOB, SERVER_JOB, CellChannel.AUX_COMMUNICATION, "fed.event", True),
        (SITE_JOB, "site-1", CellChannel.CLIENT_MAIN, TrainingTopic.NOTIFY_JOB_STATUS, True),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_server_takes_from_outside(
    sender: dict[str, str], to: str, channel: str, topic: str, passes: bool, streamed: bool,
    lines: list[dict[str, str]],
) -> None:  # fmt: skip
    """A stream is judged by what it carries."""
    message = from_outside(channel, topic, to=to, **sender)
    if streamed:
        message.set_header(MessageHeaderKey.CHANNEL, STREAM_CHANNEL)
        message.set_header(MessageHeaderKey.TOPIC, STREAM_DATA_TOPIC)
        message.set_header(StreamHeaderKey.CHANNEL, channel)
        message.set_header(StreamHeaderKey.TOPIC, topic)
    assert (Perimeter("server").check_at_server(message) is None) == passes


@pytest.mark.parametrize("peer", ["", "the server's"])
def test_the_servers_own_processes_are_not_outside(peer: str, lines: list[dict[str, str]]) -> None:
    made = Perimeter("server")
    made._own_name = "the server's"
    message = asked(TrainingTopic.ABORT, (SERVER, SERVER, "signed"))
    message.set_prop(MessagePropKey.COMMON_NAME, peer)
    assert not made.check_at_server(message)


# Two provisioned hospitals

PAIR = ("site-1", "site-2")
TWO = {"data__sites": 2, "data__size": 400, "partition__sites": 2, "extra__sites": 2}
"""Settings of a job for them."""
HARM = (
    (SysCommandTopic.SHELL, "ls", {}),
    (TrainingTopic.DELETE_RUN, "", {"job_id": "keep"}),
    (TrainingTopic.ABORT, "", {"job_id": JOB}),
    (TrainingTopic.SHUTDOWN, "", {}),
    (SysCommandTopic.CONFIGURE_SITE_LOG, "DEBUG", {}),
    (SysCommandTopic.REPORT_ENV, "", {}),
    (TrainingTopic.CHECK_STATUS, "", {}),
)
"""What any account could have a site's process do: topic, body, headers."""

system = pytest.mark.slow(seconds=60)


class SitesAlone(Hospitals):
    """At the server there is no perimeter."""

    def _server_policies(self) -> None:
        super()._server_policies()
        file = self.kits / "localhost" / "local" / "resources.json"
        resources = json.loads(file.read_text())
        resources["components"] = [part for part in resources["components"] if part["id"] != "perimeter"]
        file.write_text(json.dumps(resources))


def up(hospitals: Hospitals) -> Hospitals:
    """Both sites have joined, and have a folder each that a message could take away."""
    until(lambda: joined(hospitals) == set(PAIR), "both sites have joined")
    for site in PAIR:
        (hospitals.kits / site / "keep").mkdir()
    return hospitals


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    with Hospitals(tmp_path_factory.mktemp("perimeter") / "consortium", PAIR) as hospitals:
        yield up(hospitals)


def refusals(here: Hospitals, name: str) -> list[str]:
    """The perimeter's audit lines of a kit."""
    file = here.kits / name / "audit.log"
    return [line for line in file.read_text().splitlines() if REFUSED in line] if file.exists() else []


class Intruder:
    """A session of an account, and what it sends to any cell.

    ``replay`` makes every message say that it is the server's, with the signature of the server's own messages.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.core = session, session.api.cell.core_cell
        self.seen: dict[str, Any] = {}
        self.worn: dict[str, Any] = {}
        self.core.add_incoming_filter("*", "*", self._note)
        self.core.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(self.worn))

    def _note(self, message: Message) -> None:
        keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
        self.seen = {key: message.get_header(key) for key in keys}

    def replay(self) -> None:
        self.session.get_system_info()
        assert self.seen[CellMessageHeaderKeys.CLIENT_NAME] == SERVER
        self.worn = {**self.seen, MessageHeaderKey.ORIGIN: SERVER, MessageHeaderKey.SERVER_TRANSIT_REQUIRED: False}

    def send(self, channel: str, topic: str, cell: str, body: Any = None) -> str:
        """What came of it."""
        reply = self.core.send_request(channel, topic, cell, new_cell_message({}, body), timeout=0.5)
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    def harm(self, site: str) -> list[str]:
        """What came of every message of ``HARM``."""
        said = []
        for topic, body, headers in HARM:
            asked = admin_defs.Message(topic, body)
            for key, value in headers.items():
                asked.set_header(key, value)
            said.append(self.send(CellChannel.CLIENT_MAIN, topic, site, asked))
        return said


@contextmanager
def intruder(here: Hospitals, user: str = MEMBER) -> Iterator[Intruder]:
    session = opened(here, user)
    try:
        made = Intruder(session)
        yield made
        made.worn = {}
    finally:
        session.close()


@contextmanager
def refused(here: Hospitals, kits: Sequence[str], count: int, said: str) -> Iterator[None]:
    """Nothing is done: each kit has so many audit lines more, which say so; both sites run, with their folders."""
    before = {name: len(refusals(here, name)) for name in kits}
    running = {name: here.parent(name).pid for name in ("localhost", *PAIR)}
    yield
    for name in kits:
        lines = refusals(here, name)[before[name] :]
        assert len(lines) == count, lines
        assert all(said in line for line in lines), lines
    assert {name: here.parent(name).pid for name in running} == running
    assert all((here.kits / site / "keep").is_dir() for site in PAIR)


@system
def test_a_site_alone_refuses_what_its_server_did_not_sign(tmp_path: Path) -> None:
    """The server passes everything on."""
    with (
        SitesAlone(tmp_path / "consortium", PAIR) as hospitals,
        intruder(up(hospitals)) as sender,
        refused(hospitals, PAIR, len(HARM), "channel admin"),
    ):
        assert {said for site in PAIR for said in sender.harm(site)} == {ReturnCode.TIMEOUT}


@system
@pytest.mark.parametrize("user", [MEMBER, LEAD, "it@northgate.example"])
@pytest.mark.parametrize("replayed", [False, True])
def test_an_accounts_messages_do_not_reach_a_site(here: Hospitals, user: str, replayed: bool) -> None:
    """With the account's own token, and with the server's, which every account receives with each answer."""
    with intruder(here, user) as sender:
        if replayed:
            sender.replay()
        with refused(here, ["localhost"], len(HARM) * len(PAIR), f"through certificate {user}: "):
            assert {said for site in PAIR for said in sender.harm(site)} == {ReturnCode.TIMEOUT}


@system
def test_a_member_does_not_drive_the_server_or_a_running_job(here: Hospitals) -> None:
    job = exported(here, "long", 50)
    session = opened(here)
    try:
        running = session.submit_job(str(job))
        until(lambda: "site-1" in told(session, running), "the sites tell figures")
        messages = [
            (CellChannel.CLIENT_COMMAND, "abort", f"site-1.{running}"),
            (CellChannel.AUX_COMMUNICATION, "__end_run__", f"site-1.{running}"),
            (CellChannel.AUX_COMMUNICATION, "__end_run__", f"server.{running}"),
            (CellChannel.SERVER_COMMAND, "abort", f"server.{running}"),
            *(("_net_manager", "stop_cell", cell) for cell in (f"site-1.{running}", "site-1", SERVER)),
            (CellChannel.SERVER_PARENT_LISTENER, "update_run_status", SERVER),
        ]
        with intruder(here) as sender, refused(here, ["localhost"], len(messages), f"certificate {MEMBER}: "):
            assert {sender.send(*message) for message in messages} == {ReturnCode.TIMEOUT}
        assert session.get_job_status(running) == "RUNNING"
        session.abort_job(running)
        until(lambda: str(session.get_job_status(running)).startswith("FINISHED:ABORT"), "the job has been aborted")
    finally:
        session.close()


def exported(here: Hospitals, name: str, rounds: int) -> Path:
    experiment = replace(committed("fedavg", **TWO, rounds__rounds=rounds), data=NamedData("pretrain"))
    return write_job(experiment, here.folder / name, sites=PAIR, custom=False, child=True)


def told(session: Session, job_id: str) -> str:
    """What the sites say of a job; "" before it runs."""
    with suppress(JobNotFound, JobNotRunning):
        return str(session.show_stats(job_id, "client"))
    return ""


@system
def test_what_an_operator_needs_still_works(here: Hospitals) -> None:
    before = {name: len(refusals(here, name)) for name in ("localhost", *PAIR)}
    session = opened(here)
    try:
        for command in ("check_status client", "report_env site-1", "sys_info client site-1"):
            said = json.dumps(session.api.do_command(command), default=str)
            assert "site-1" in said, said
            assert "timeout" not in said.lower(), said
        assert "site-1" in str(session.report_resources("client"))
    finally:
        session.close()
    job_id, meta = submitted(here, {"short": exported(here, "short", 1)})["short"]
    assert meta["status"] == "FINISHED:COMPLETED"
    session = opened(here, LEAD)
    try:
        assert (Path(session.download_job_result(job_id, str(here.folder / "home"))) / "workspace").is_dir()
    finally:
        session.close()
    assert {name: len(refusals(here, name)) for name in before} == before, "no honest message is refused"
