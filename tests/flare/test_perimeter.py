"""Every topic that FLARE's console, server and jobs have, from every kind of sender.

The slow tests send such messages to two provisioned hospitals, from the accounts' own sessions.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import psutil
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FedEventHeader, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    IdentityChallengeKey,
    MessageHeaderKey,
    MessagePropKey,
    MessageType,
    ReturnCode,
)
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authn import set_add_auth_headers_filters
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.private import admin_defs
from nvflare.private.defs import (
    CellMessageHeaderKeys,
    ClientType,
    ControlCommandTopic,
    RequestHeader,
    SysCommandTopic,
    TrainingTopic,
    new_cell_message,
)
from nvflare.private.fed.authenticator import Authenticator
from nvflare.private.fed.server import job_cmds, job_meta_validator
from nvflare.private.fed.utils.identity_utils import IdentityAsserter
from support.hospitals import LEAD, MEMBER, Hospitals, joined, opened, submitted
from support.nobody import NOBODY, lacking, said_to_nobody
from support.provisioned import processes, until
from support.short_jobs import committed

from fedvlp.core.json_file import LARGEST_JOB
from fedvlp.deploy.named_data import NamedData
from fedvlp.flare import audit_log, perimeter
from fedvlp.flare.audit_log import REFUSED
from fedvlp.flare.job_check import bound_submissions, unfit_archive
from fedvlp.flare.jobs import write_job
from fedvlp.flare.perimeter import ADMIN_TOPICS, PARENTS, SERVER, Perimeter
from fedvlp.run.lock import in_use, only_writer

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
TOPICS = [
    topic
    for group in (TrainingTopic, SysCommandTopic, ControlCommandTopic)
    for name, topic in vars(group).items()
    if name.isupper()
]
SERVERS = (SERVER, SERVER, "signed")
OURS = ("site-1", "token-1", "signed")
STRANGERS = {  # name, token and signature; the cell that sent it, and its certificate
    "no signature": ((SERVER, SERVER, ""), SERVER, "the server's"),
    "forged": ((SERVER, SERVER, "forged"), SERVER, "the server's"),
    "an admin": (("member", "token-m", "signed"), SERVER, "the server's"),
    "another site": (("site-2", "token-2", "signed"), SERVER, "the server's"),
    "our token, past the server": (OURS, SERVER, "the server's"),
    "the server's token at our port": (SERVERS, f"site-1.{JOB}", ""),
    "our token at our port": (OURS, f"site-1.{JOB}", ""),
    "the server's token with another's certificate": (SERVERS, "site-2", "site-2"),
    "our name with another's certificate": (OURS, f"site-1.{JOB}", "site-2"),
    "a name that begins like ours": (OURS, f"site-10.{JOB}", "site-1"),
    "nobody": (("", "", ""), "server.x", ""),
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    written: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: written.append(line))
    return written


def guard(**args: Any) -> Perimeter:
    verifier = SimpleNamespace(verify=lambda name, token, signature: signature == "signed")
    made = Perimeter(**args)
    made._cell = made._own_name = "site-1"
    made._site = SimpleNamespace(communicator=SimpleNamespace(token_verifier=verifier))
    return made


def asked(
    topic: str, sender: tuple[str, str, str], cell: str = SERVER, peer: str = "the server's", job: str = JOB
) -> Message:
    """A request that says it comes from the server; ``cell`` and its certificate are those of the connection."""
    body = admin_defs.Message(topic, archive("{}") if topic == TrainingTopic.DEPLOY else "")
    body.set_header("job_id", job)
    keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
    headers = {MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.CHANNEL: CellChannel.CLIENT_MAIN}
    headers |= {MessageHeaderKey.ORIGIN: SERVER, MessageHeaderKey.DESTINATION: "site-1"}
    message = Message({**headers, **dict(zip(keys, sender, strict=True))}, body)
    message.set_prop(MessagePropKey.COMMON_NAME, peer)
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(cell))
    return message


def archive(*files: str, compression: int = ZIP_STORED, name: str = "config/config_fed_client.json") -> bytes:
    """A job as FLARE packs it."""
    content = BytesIO()
    with ZipFile(content, "w", compression) as job:
        for number, text in enumerate(files):
            job.writestr(f"job-{number}/{name}", text)
    return content.getvalue()


INCLUDES = '{ include file("/etc/hostname") }, "path": ${?PATH}'
"""What FLARE's second format of configurations reads beside itself."""

OTHERWISE = [
    f"{folder}{stem}{ext}"
    for ext in ConfigFormat.config_ext_formats()
    for folder, stem in [
        ("", "meta"), ("custom/", "meta"), ("app/config/", "config_fed_server"), ("app/config/", "config_fed_client"),
        ("app/custom/config/", "config_fed_server"), ("app/config/", "comm_config"), ("", "resources"),
    ]
    if (ext, stem) not in {(".json", name) for name in ("meta", "config_fed_server", "config_fed_client")}
]  # fmt: skip
"""Every other file that FLARE could read in the place of a job's own three."""

UNFIT: dict[str, tuple[Callable[[], bytes], str]] = {  # made by their tests: they are large
    "large": (lambda: archive("{}", " " * (LARGEST_JOB + 1)), "at most 4,194,304 are read"),
    "compressed": (lambda: archive(" " * LARGEST_JOB, compression=ZIP_DEFLATED), "the job is compressed"),
    "many": (lambda: archive(*[""] * 16385), "the job has 16,385 files"),
    "in all": (lambda: archive(*[" " * LARGEST_JOB] * 17), "the job has 17 files"),
    "cut": (lambda: archive("{}")[:-1], "no archive"),
    "none": (bytes, "no archive"),
    **{
        file: (partial(archive, INCLUDES, name=file), "the job has another configuration than meta.json, config_fed_")
        for file in OTHERWISE
    },
}


@pytest.mark.parametrize("kind", UNFIT)
def test_an_unfit_job_is_refused_before_it_is_unpacked_and_parsed(
    kind: str, lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At a site whatever the server sends, and at the server when it is submitted, from a file."""
    monkeypatch.setattr(ConfigFactory, "get_config_loader", lambda fmt: pytest.fail("it is parsed"))
    make, why = UNFIT[kind]
    content = make()
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


@pytest.mark.parametrize(
    "file",
    [
        "meta.json", "README.md", "app/config/config_fed_client.json", "app/config/config_fed_server.json",
        NVFLARE_SIG_FILE, f"app/config/{NVFLARE_SIG_FILE}", "app/custom/notes.yml", "app/custom/fedvlp/names.json",
    ],
)  # fmt: skip
def test_a_job_as_flare_packs_it_is_fit(file: str) -> None:
    """Signatures, and what code of its own a job has where a site takes such, included."""
    assert unfit_archive(archive("{}", name=file)) == ""


def validated(meta: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    """What the server says to a whole job of this ``meta.json``."""
    monkeypatch.setattr(job_cmds, "JobMetaValidator", job_cmds.JobMetaValidator)
    bound_submissions()
    content = BytesIO()
    with ZipFile(content, "w") as job:
        job.writestr("job/app/config/", "")
        for name in ("config_fed_server", "config_fed_client"):
            job.writestr(f"job/app/config/{name}.json", "{}")
        job.writestr("job/meta.json", json.dumps(meta))
    valid, said, _ = job_cmds.JobMetaValidator().validate("job", content.getvalue())
    return valid, said


WHOLE = {"name": "feddra", "min_clients": 1, "deploy_map": {"app": ["server", "site-1"]}}


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        ("feddra", True), ("Größe 1", True), ("n" * 64, True), ("n" * 65, False), ("", False), (" ", False),
        (None, False), (7, False), ("x\nname", False), ("\x1b[2J", False), ("a\u202egpj", False),
    ],
)  # fmt: skip
def test_the_name_of_a_job_can_be_shown(
    name: Any, fit: bool, lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    valid, said = validated({**WHOLE, "name": name}, monkeypatch)
    assert (valid, "1 to 64 printable characters" in said) == (fit, not fit)
    message = asked(TrainingTopic.START_JOB, SERVERS)
    message.payload.set_header(RequestHeader.JOB_META, {**WHOLE, "name": name})
    assert (guard().check_request(message) is None) == fit


@pytest.mark.parametrize(
    "change",
    [
        {"deploy_map": {"app": ["server"]}}, {"deploy_map": {"app": 7}}, {"deploy_map": ["app"]}, {"min_clients": []},
        {"mandatory_clients": 7}, {"deploy_map": {"app": [["server"]]}}, {"deploy_map": {"app": ["server", "a\nb", 1]}},
    ],
)  # fmt: skip
def test_a_job_that_flare_cannot_read_is_refused_with_a_sentence(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validated(WHOLE, monkeypatch) == (True, "")
    valid, said = validated({**WHOLE, **change}, monkeypatch)
    assert (valid, said.isprintable(), bool(said)) == (False, True, True)


def test_no_job_brings_the_container_in_which_it_runs(
    lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a site whose processes are containers it could be any program, with the site's data."""
    for topic in [TrainingTopic.DEPLOY, TrainingTopic.START_JOB]:
        for meta, fit in [
            ({}, True),
            ({"resource_spec": {"site-1": {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 8}}, "launcher_spec": {}}, True),
            ({"launcher_spec": {"site-1": {"docker": {"image": "theirs"}}}}, False),
            ({"launcher_spec": {"default": {"k8s": {"image": "theirs"}}}}, False),
            ({"resource_spec": {"site-1": {"docker": {"image": "theirs"}}}}, False),
            ({"resource_spec": {"site-1": {"num_of_gpus": 1, "slurm": {"image": "theirs"}}}}, False),
            ({"resource_spec": {"site-1": ["image"]}}, False),
            ({"resource_spec": ["site-1"]}, False),
        ]:
            message = asked(topic, (SERVER, SERVER, "signed"))
            meta["name"] = "feddra"
            message.payload.set_header(RequestHeader.JOB_META, meta)
            assert (guard().check_request(message) is None) == fit
            monkeypatch.setattr(job_meta_validator.JobMetaValidator, "validate", lambda *_, meta=meta: (True, "", meta))
            monkeypatch.setattr(job_cmds, "JobMetaValidator", job_cmds.JobMetaValidator)
            bound_submissions()
            assert job_cmds.JobMetaValidator().validate("job", archive("{}"))[0] == fit


def test_a_second_process_on_one_kit_ends_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of jobs, which build the same component in another folder, do not look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CoreCell, "start", CoreCell.start)
    monkeypatch.setattr(CommConfigurator, "get_config", lambda self: INNER)
    with only_writer(tmp_path):
        Perimeter()
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=PARENTS[1]))
        with pytest.raises(SystemExit, match=f"^not started: the kit of {tmp_path.name} is in use: process "):
            Perimeter()
    monkeypatch.setattr(perimeter, "_until_the_end", ExitStack())
    with perimeter._until_the_end:
        Perimeter()
        assert in_use(tmp_path)


@pytest.mark.parametrize(("side", "program"), zip(("server", "client"), PARENTS, strict=True))
def test_it_looks_at_messages_before_the_process_opens_a_port(
    side: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, str]]
) -> None:
    """And refuses them at a site that has not joined yet, since nobody has a signature then."""
    at_start: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CoreCell, "start", lambda core: at_start.append(len(core.filters)))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=program))
    monkeypatch.setattr(perimeter, "_until_the_end", ExitStack())
    monkeypatch.setattr(CommConfigurator, "get_config", lambda self: INNER)
    filters: list[Any] = []
    core = SimpleNamespace(
        filters=filters,
        secure=True,
        get_fqcn=lambda: "site-1",
        identity_resolver=SimpleNamespace(resolve=lambda name: "site-1"),
        add_incoming_filter=lambda *args: filters.append(args[-1]),
        add_incoming_request_filter=lambda *args: filters.append(args[-1]),
        add_outgoing_reply_filter=lambda *args: None,
    )
    with perimeter._until_the_end:
        Perimeter(side)
        CoreCell.start(core)
    assert filters
    assert at_start == [len(filters)]
    assert all(refuses(asked(TrainingTopic.ABORT, (SERVER, SERVER, "signed"))) for refuses in filters)


INNER = {"internal": {"scheme": "tcp", "resources": {"host": "127.0.0.1", "connection_security": "mtls"}}}


@pytest.mark.parametrize(
    "config", [None, {}, {"internal": {"scheme": "tcp", "resources": {"connection_security": "clear"}}}]
)
def test_flare_does_not_start_where_anybody_could_speak_for_its_jobs(
    config: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CoreCell, "start", CoreCell.start)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=PARENTS[1]))
    monkeypatch.setattr(perimeter, "_until_the_end", ExitStack())
    monkeypatch.setattr(CommConfigurator, "get_config", lambda self: config)
    with perimeter._until_the_end, pytest.raises(SystemExit, match=r"^not started: .*local/comm_config\.json"):
        Perimeter()


def test_a_flood_of_messages_does_not_fill_the_disk(
    lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sender has lines of its own, and those that were left out are counted."""
    clock = [0.0]
    monkeypatch.setattr(audit_log.time, "monotonic", lambda: clock[0])
    made = Perimeter("server")
    flood = from_outside(CellChannel.CLIENT_MAIN, "x", to="site-2", **ACCOUNT)
    assert all(made.check_at_server(flood) for _ in range(1050))
    assert len(lines) == 1000
    made.check_at_server(from_outside(CellChannel.CLIENT_MAIN, "x", to="site-2", **SITE))
    assert "certificate site-1" in lines[-1]["msg"]
    clock[0] += 1.0
    for _ in range(50):
        assert made.check_at_server(flood)
    assert [" 50 more" in line["msg"] for line in lines[1000:]] == [False, True]


def test_a_stranger_is_refused(lines: list[dict[str, str]]) -> None:
    for sender in STRANGERS:
        for topic in TOPICS:
            message = asked(topic, *STRANGERS[sender])
            assert guard().check_sender(message), sender
            assert guard().check_request(message)
            assert lines[-1]["action"] == REFUSED


def test_the_server_asks_what_the_table_says(lines: list[dict[str, str]]) -> None:
    for topic in TOPICS:
        message = asked(topic, (SERVER, SERVER, "signed"))
        assert not guard().check_sender(message)
        assert (guard().check_request(message) is None) == (topic in ADMIN_TOPICS)


@pytest.mark.parametrize("channel", ["_net_manager", CellChannel.AUX_COMMUNICATION, CellChannel.CLIENT_COMMAND])
def test_the_server_asks_a_site_on_one_channel_and_the_sites_own_processes_on_all(
    channel: str, lines: list[dict[str, str]]
) -> None:
    for sender, passes in (
        ((SERVERS,), False),
        ((OURS, f"site-1.{JOB}", "site-1"), True),
        ((OURS, "site-1", ""), True),
    ):
        message = asked("stop_cell", *sender)
        message.set_header(MessageHeaderKey.CHANNEL, channel)
        assert not guard().check_sender(message)
        assert (guard().check_request(message) is None) == passes


def test_a_shell_only_where_the_site_asks_for_it(lines: list[dict[str, str]]) -> None:
    message = asked(SysCommandTopic.SHELL, (SERVER, SERVER, "signed"))
    assert guard().check_request(message)
    assert not guard(allow_shell=True).check_request(message)


def test_only_a_job_is_deleted(lines: list[dict[str, str]]) -> None:
    for job in ["data", "privacy", "../x", "", JOB + "/.."]:
        assert guard().check_request(asked(TrainingTopic.DELETE_RUN, SERVERS, job=job))


def from_outside(channel: str, topic: str, *, peer: str, cell: str, to: str = SERVER, name: str = "") -> Message:
    """A request as the server's cell receives it from the cell of an account or of a site."""
    headers = {MessageHeaderKey.MSG_TYPE: MessageType.REQ, MessageHeaderKey.DESTINATION: to}
    headers |= {MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic}
    headers |= {MessageHeaderKey.ORIGIN: cell, CellMessageHeaderKeys.CLIENT_NAME: name or peer}
    message = Message(headers, None)
    message.set_prop(MessagePropKey.COMMON_NAME, peer)
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(cell))
    return message


ACCOUNT = {"peer": "member", "cell": f"_admin_{JOB}"}
SITE = {"peer": "site-1", "cell": "site-1"}
SITE_JOB = {"peer": "site-1", "cell": f"site-1.{JOB}"}
SERVER_JOB = f"server.{JOB}"


def at_server(message: Message) -> Message | None:
    """What the server's guard says to it."""
    made = Perimeter("server")
    made._cell, made._own_name = SERVER, "the server's"
    return made.check_at_server(message)


def test_the_server_passes_nothing_on_to_another(lines: list[dict[str, str]]) -> None:
    for sender in [ACCOUNT, SITE, SITE_JOB]:
        for to in ["site-2", f"site-2.{JOB}", f"_admin_{JOB}"]:
            for channel in [value for name, value in vars(CellChannel).items() if name.isupper()]:
                assert at_server(from_outside(channel, "x", to=to, **sender))
                assert f"through certificate {sender['peer']}" in lines[-1]["msg"]


def test_nobody_outside_uses_anothers_token(lines: list[dict[str, str]]) -> None:
    for name in [SERVER, "server_job", "site-2"]:
        message = from_outside(CellChannel.HCI, "command", name=name, **ACCOUNT)
        assert at_server(message)
        message.set_header(MessageHeaderKey.MSG_TYPE, MessageType.REPLY)
        assert at_server(message)


def test_what_the_server_takes_from_outside(lines: list[dict[str, str]]) -> None:
    """A stream is judged by what it carries."""
    for sender, to, channel, topic, passes in [
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
        (SITE, SERVER, CellChannel.AUX_COMMUNICATION, "fed.event", False),
        (SITE, SERVER, "_net_manager", "stop", False),
        (SITE_JOB, SERVER_JOB, CellChannel.SERVER_COMMAND, "get_task", True),
        (SITE_JOB, SERVER_JOB, CellChannel.SERVER_COMMAND, "abort", False),
        (SITE_JOB, SERVER_JOB, CellChannel.AUX_COMMUNICATION, "fed.event", True),
        (SITE_JOB, "site-1", CellChannel.CLIENT_MAIN, TrainingTopic.NOTIFY_JOB_STATUS, False),  # it asks it itself
    ]:
        for streamed in [False, True]:
            message = from_outside(channel, topic, to=to, **sender)
            if streamed:
                message.set_header(MessageHeaderKey.CHANNEL, STREAM_CHANNEL)
                message.set_header(MessageHeaderKey.TOPIC, STREAM_DATA_TOPIC)
                message.set_header(StreamHeaderKey.CHANNEL, channel)
                message.set_header(StreamHeaderKey.TOPIC, topic)
            assert (at_server(message) is None) == passes


def test_nobody_outside_speaks_for_another(lines: list[dict[str, str]]) -> None:
    for kind in [MessageType.REQ, MessageType.REPLY, MessageType.RETURN]:
        for origin in [SERVER, "site-2", f"site-2.{JOB}", f"_admin_{JOB[::-1]}", ["site-1"]]:
            for sender in [ACCOUNT, SITE, SITE_JOB]:
                message = from_outside(CellChannel.SERVER_MAIN, CellChannelTopic.Challenge, **sender)
                assert not at_server(message)
                message.set_header(MessageHeaderKey.MSG_TYPE, kind)
                message.set_header(MessageHeaderKey.ORIGIN, origin)
                assert at_server(message)
                assert f"through certificate {sender['peer']}" in lines[-1]["msg"]


@pytest.mark.parametrize(
    ("sender", "joins_as", "passes"),
    [(ACCOUNT, "admin", True), (ACCOUNT, "regular", False), (ACCOUNT, None, False), (SITE, "regular", True)],
)
def test_an_account_joins_as_no_site(
    sender: dict[str, str], joins_as: str | None, passes: bool, lines: list[dict[str, str]]
) -> None:
    message = from_outside(CellChannel.SERVER_MAIN, CellChannelTopic.Register, **sender)
    message.set_header(CellMessageHeaderKeys.CLIENT_TYPE, joins_as)
    assert (at_server(message) is None) == passes


def test_only_the_server_itself_needs_no_certificate(lines: list[dict[str, str]]) -> None:
    for peer, cell, passes in [
        ("", SERVER, True),  # under this name FLARE lets nobody else connect
        ("the server's", SERVER_JOB, True),
        ("", SERVER_JOB, False),  # whoever connects may call itself so
        ("", "server.x", False),
        ("", "site-1", False),
        ("", f"_admin_{JOB}", False),
        ("site-1", SERVER_JOB, False),
    ]:
        message = asked(TrainingTopic.ABORT, SERVERS, cell, peer)
        assert (at_server(message) is None) == passes, (peer, cell)


OTHER = JOB[::-1]


@pytest.mark.parametrize(("side", "name"), [("server", "the server's"), ("client", "site-1")])
def test_no_job_speaks_to_another_job(side: str, name: str, lines: list[dict[str, str]]) -> None:
    own = SERVER if side == "server" else "site-1"
    for to, passes in [
        (own, True), (f"{own}.{JOB}", True), (f"site-2.{JOB}", True),
        (f"{own}.{OTHER}", False), (f"site-2.{OTHER}", False), (f"site-2.{OTHER}.trainer", False),
    ]:  # fmt: skip
        message = asked("abort", OURS, f"{own}.{JOB}", name)
        message.set_header(MessageHeaderKey.DESTINATION, to)
        made = guard(side=side)
        made._cell, made._own_name = own, name
        refused = (made.check_at_server if side == "server" else made.check_sender)(message)
        assert (refused is None) == passes, to


def test_no_reply_of_the_server_carries_its_token() -> None:
    """FLARE adds it to each; the first filter that returns a reply is the last one."""
    made = Perimeter("server")
    made._cell = SERVER
    for to, bare in [("site-1", True), (f"_admin_{JOB}", True), (SERVER_JOB, True), (SERVER, False)]:
        reply = Message({MessageHeaderKey.DESTINATION: to})
        assert made.without_token(reply) is (reply if bare else None)


# Two provisioned hospitals

PAIR = ("site-1", "site-2")
ALTERED = "site-3"
"""A third hospital, which runs software of its own."""
CHANNELS = ["_net_manager", *(value for name, value in vars(CellChannel).items() if name.isupper())]
TIMEOUT = ReturnCode.TIMEOUT
TWO = {"data__sites": 2, "data__size": 400, "partition__sites": 2, "extra__sites": 2}
"""Settings of a job for them."""
system = pytest.mark.slow(seconds=60)


class Three(Hospitals):
    """There is a third kit, which nobody starts."""

    def provision(self, workspace: str, sites: tuple[str, ...]) -> None:
        super().provision(workspace, (*sites, ALTERED))


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
    with Three(tmp_path_factory.mktemp("perimeter") / "consortium", PAIR) as hospitals:
        yield up(hospitals)
        altered(hospitals).stop()


def refusals(here: Hospitals, name: str) -> list[str]:
    """The perimeter's audit lines of a kit."""
    file = here.kits / name / "audit.log"
    return [line for line in file.read_text().splitlines() if REFUSED in line] if file.exists() else []


class Intruder:
    """A cell of an account or of a kit, with software of its own, and what it sends to any other cell."""

    def __init__(self, cell: Cell) -> None:
        self.core = cell.core_cell
        self.worn: dict[str, Any] = {}  # what each message says of its sender
        self.core.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(self.worn))

    def replay(self, token: tuple[str, str, str]) -> None:
        """From now on each message says that it is the server's, with the signature of the server's own messages."""
        keys = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
        self.worn = dict(zip(keys, token, strict=True))
        self.worn |= {MessageHeaderKey.ORIGIN: SERVER, MessageHeaderKey.SERVER_TRANSIT_REQUIRED: False}

    def told(self) -> set[str]:
        """What the server's answer says of its own token."""
        nonce = new_cell_message({IdentityChallengeKey.NONCE: "any"}, None)
        reply = self.core.send_request(CellChannel.SERVER_MAIN, CellChannelTopic.Challenge, SERVER, nonce, timeout=10)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK
        return {CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE} & {*reply.headers}

    def send(self, channel: str, topic: str, cell: str, body: Any = None) -> str:
        """What came of it."""
        reply = self.core.send_request(channel, topic, cell, new_cell_message({}, body), timeout=0.5)
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    def everything(self) -> int:
        """Sends both sites all that FLARE's server sends, and waits for nothing. How many messages those were."""
        for topic in TOPICS:
            for site in PAIR:
                asked = admin_defs.Message(topic, "ls" if topic == SysCommandTopic.SHELL else "")
                asked.set_header("job_id", "keep")
                self.core.fire_and_forget(CellChannel.CLIENT_MAIN, topic, site, new_cell_message({}, asked))
        for channel in CHANNELS:
            for cell in (*PAIR, f"site-1.{JOB}"):
                self.core.fire_and_forget(channel, "abort", cell, new_cell_message({}, None))
        return len(PAIR) * len(TOPICS) + (len(PAIR) + 1) * len(CHANNELS)


def signed(here: Hospitals, name: str = SERVER, token: str = SERVER) -> tuple[str, str, str]:
    """A token as the server makes them, its own for one: all that somebody could have read or overheard."""
    startup = here.kits / "localhost" / "startup"
    asserter = IdentityAsserter(str(startup / "server.key"), str(startup / "server.crt"))
    return name, token, str(asserter.sign(name + token, return_str=True))


@contextmanager
def intruder(here: Hospitals, user: str = MEMBER) -> Iterator[Intruder]:
    session = None if user == ALTERED else opened(here, user)
    made = Intruder(session.api.cell if session else altered(here))
    try:
        yield made
    finally:
        made.worn = {}
        if session:
            session.close()


@cache
def altered(here: Hospitals) -> Cell:
    """Of a hospital's own kit with other software, which joined as FLARE's would."""
    startup = here.kits / ALTERED / "startup"
    root, certificate, key = (str(startup / name) for name in ("rootCA.pem", "client.crt", "client.key"))
    credentials = {
        DriverParams.CA_CERT.value: root,
        DriverParams.CLIENT_CERT.value: certificate,
        DriverParams.CLIENT_KEY.value: key,
    }
    server = {SERVER: "localhost"}  # whose certificate is the server's
    cell = Cell(ALTERED, f"http://localhost:{here.port}", True, credentials, auth_identity_map=server)
    NetAgent(cell)
    cell.start()
    joining = Authenticator(
        cell, "fedvlp", ALTERED, ClientType.REGULAR, "localhost", secure_mode=True,
        root_cert_file=root, private_key_file=key, cert_file=certificate,
        msg_timeout=15.0, retry_interval=1.0, timeout=70.0,
    )  # fmt: skip
    context = FLContext()
    context.set_public_props({ReservedKey.IDENTITY_NAME: ALTERED})
    token, signature, ssid, _ = joining.authenticate(context, Signal())
    set_add_auth_headers_filters(cell, ALTERED, token, signature, ssid)
    return cell


@contextmanager
def refused(here: Hospitals, kits: Sequence[str], said: str) -> Iterator[list[int]]:
    """Nothing is done: each kit has as many more audit lines as the body notes; both sites run, with their folders."""
    before = {name: len(refusals(here, name)) for name in kits}
    running = {name: here.parent(name).pid for name in ("localhost", *PAIR)}
    count: list[int] = []
    yield count
    for name in kits:
        until(lambda name=name: len(refusals(here, name)) >= before[name] + sum(count), f"{name} refused all", 60.0)
        lines = refusals(here, name)[before[name] :]
        assert len(lines) == sum(count), lines
        assert all(said in line for line in lines), lines
    assert {name: here.parent(name).pid for name in running} == running
    assert all((here.kits / site / "keep").is_dir() for site in PAIR)


@system
def test_a_site_alone_refuses_what_its_server_did_not_sign(tmp_path: Path) -> None:
    """The server passes everything on."""
    with (
        SitesAlone(tmp_path / "consortium", PAIR) as hospitals,
        intruder(up(hospitals)) as sender,
        refused(hospitals, PAIR, "it is neither this site's nor the server's own") as count,
    ):
        for topic in TOPICS:
            for site in PAIR:
                assert sender.send(CellChannel.CLIENT_MAIN, topic, site, admin_defs.Message(topic, "")) == TIMEOUT
        count.append(len(TOPICS))


@system
@pytest.mark.parametrize("user", [MEMBER, LEAD, "it@northgate.example", ALTERED])
@pytest.mark.parametrize("replayed", [False, True])
def test_nobodys_messages_but_the_servers_reach_a_site(here: Hospitals, user: str, replayed: bool) -> None:
    """With the sender's own token, and with the server's, which sites receive with each message of it."""
    with intruder(here, user) as sender:
        assert sender.told() == set()
        if replayed:
            sender.replay(signed(here))
        with refused(here, ["localhost"], f"through certificate {user}: ") as count:
            count.append(sender.everything())


@system
@pytest.mark.parametrize("policy", ["privacy-dp.json", "privacy-he.json"])
def test_a_policy_of_noise_or_encryption_changes_nothing_of_that(here: Hospitals, policy: str) -> None:
    here.adopt(policy)
    for name, program in (("localhost", "server_train"), ("site-1", "client_train")):
        (port,) = ports(here, str(here.kits / name), program)
        speaks = {
            "port": port,
            "cell": f"{name}.x",
            "token": signed(here),
            "messages": [("site-1", "admin", "sys.info")],
        }
        assert lacking() or said_to_nobody([speaks]) == [ReturnCode.TARGET_UNREACHABLE]
    with intruder(here) as sender, refused(here, ["localhost"], f"through certificate {MEMBER}: ") as count:
        count.append(sender.everything())
    here.adopt("privacy.json")


@system
def test_a_site_with_other_software_neither_joins_as_a_console_nor_fires_the_servers_events(here: Hospitals) -> None:
    with intruder(here, ALTERED) as sender, refused(here, ["localhost"], f"through certificate {ALTERED}: ") as count:
        for topic in ("fed.event", "ObjectStreamer.Request"):
            assert sender.send(CellChannel.AUX_COMMUNICATION, topic, SERVER) == TIMEOUT
        assert sender.send(CellChannel.HCI, "command", SERVER) == TIMEOUT
        assert sender.send(CellChannel.SERVER_PARENT_LISTENER, "update_run_status", SERVER) == TIMEOUT
        count.append(4)


@system
def test_nobody_drives_the_server_or_a_running_job(here: Hospitals) -> None:
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
        with intruder(here) as sender, refused(here, ["localhost"], f"certificate {MEMBER}: ") as count:
            assert {sender.send(*message) for message in messages} == {TIMEOUT}
            count.append(len(messages))
        event = Shareable()
        event.set_peer_props({ReservedKey.IDENTITY_NAME: ALTERED})
        for header, value in ((FedEventHeader.EVENT_TYPE, EventType.FATAL_SYSTEM_ERROR), (FedEventHeader.TIMESTAMP, 1)):
            event.set_header(header, value)
        message = (CellChannel.AUX_COMMUNICATION, "fed.event", f"server.{running}", event)
        with intruder(here, ALTERED) as sender:
            until(lambda: sender.send(*message) == ReturnCode.OK, "the event has arrived", 60.0)
        time.sleep(2.0)  # FLARE fires it in a thread
        assert session.get_job_status(running) == "RUNNING"
        for command in (f"show_stats {running} server", f"show_errors {running} server", "check_status server"):
            assert "timeout" not in str(session.api.do_command(command)).lower()
        cloned = session.clone_job(running)
        for job_id in (running, cloned):
            session.abort_job(job_id)
        until(lambda: str(session.get_job_status(running)).startswith("FINISHED:ABORT"), "the job has been aborted")
    finally:
        session.close()


def ports(here: Hospitals, *words: str) -> list[int]:
    """Where the processes of a kit listen for processes of this machine alone."""
    ports = {
        link.laddr.port
        for process in processes(*words)
        for link in process.net_connections("tcp4")
        if link.status == psutil.CONN_LISTEN and link.laddr.ip == "127.0.0.1"
    }
    return sorted(ports - {here.port})


@system
@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_no_other_account_of_the_machine_speaks_to_flares_processes(here: Hospitals) -> None:
    """With every token that there is, in every name, to a site, to the server and to a job, which then ends as ever."""
    kit = {name: str(here.kits / name) for name in ("localhost", "site-1")}
    session = opened(here, LEAD)
    try:
        running = session.submit_job(str(exported(here, "beside", 3)))
        until(lambda: ports(here, kit["site-1"], "worker_process"), "the job at the site has begun")
        tokens = [signed(here), signed(here, "server_job", running), signed(here, "site-1", JOB), ("", "NA", "NA")]
        listeners = {
            "localhost": ports(here, kit["localhost"], "server_train"),
            "site-1": ports(here, kit["site-1"], "client_train"),
            "job": ports(here, kit["site-1"], "worker_process"),
        }
        assert {name: len(found) for name, found in listeners.items()} == {"localhost": 1, "site-1": 1, "job": 1}
        messages = [
            *(("site-1", CellChannel.CLIENT_MAIN, topic) for topic in TOPICS),
            (SERVER, CellChannel.SERVER_MAIN, CellChannelTopic.Challenge),
            (SERVER, CellChannel.CELLNET, CellChannelTopic.Bye),
            *((f"{cell}.{running}", CellChannel.CLIENT_COMMAND, "abort") for cell in (SERVER, "site-1")),
            (f"server.{running}", CellChannel.SERVER_COMMAND, "get_task"),
            (f"site-1.{running}", "_net_manager", "stop"),
        ]
        before = {name: len(refusals(here, name)) for name in kit}
        names = (f"site-1.{running}.trainer_1", f"site-1.{running}x", f"server.{running}x", f"site-2.{JOB}")
        for (port,) in listeners.values():
            cells = [
                {"port": port, "cell": cell, "token": token, "messages": messages}
                for cell, token in zip(names, tokens, strict=True)
            ]
            assert {*said_to_nobody(cells)} == {ReturnCode.TARGET_UNREACHABLE}
        for name in kit:
            lines = refusals(here, name)[before[name] :]
            assert lines
            assert all(f"[U:uid {NOBODY}]" in line for line in lines), lines
        assert f"[U:uid {NOBODY}]" in (here.kits / "site-1" / running / "audit.log").read_text()
        until(lambda: str(session.get_job_status(running)).startswith("FINISHED"), "the job has ended", 400)
        assert session.get_job_status(running) == "FINISHED:COMPLETED"
    finally:
        session.close()


CONSOLE = (
    "check_status client", "check_status server", "list_jobs", "report_env site-1", "sys_info client site-1",
    "report_resources client", "report_resources server",
)  # fmt: skip
"""What LEAD.md, RUNBOOK.md and the guide of sites have an operator ask."""


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
    until(lambda: joined(here) >= set(PAIR), "both sites have joined")
    restarted = here.parent("site-2").pid
    session = opened(here)
    try:
        for command in CONSOLE:
            said = json.dumps(session.api.do_command(command), default=str)
            assert ("site-1" in said) or not command.endswith("site-1"), said
            assert not any(word in said.lower() for word in ("timeout", "error_runtime", "not_authorized")), said
        assert "site-1" in str(session.report_resources("client"))
        # the server counts a job of another test that was aborted as running for some seconds more
        until(lambda: "still jobs running" not in str(session.api.do_command("restart client site-2")), "no job runs")
    finally:
        session.close()
    until(lambda: here.parent("site-2").pid != restarted, "site-2 has started again")
    until(lambda: joined(here) >= set(PAIR), "site-2 has joined again")
    job_id, meta = submitted(here, {"short": exported(here, "short", 1)})["short"]
    assert meta["status"] == "FINISHED:COMPLETED"
    session = opened(here, LEAD)
    try:
        assert (Path(session.download_job_result(job_id, str(here.folder / "home"))) / "workspace").is_dir()
    finally:
        session.close()
    session = opened(here)
    try:
        for command in ("disable_client site-2", "enable_client site-2"):
            assert "site-2" in json.dumps(session.api.do_command(command), default=str)
            until(lambda command=command: ("site-2" in joined(here)) == command.startswith("enable"), command, 60.0)
        session.api.do_command("shutdown client site-2")
        until(lambda: not processes(str(here.kits / "site-2"), "client_train"), "site-2 has shut down", 60.0)
    finally:
        session.close()
    assert {name: len(refusals(here, name)) for name in before} == before, "no honest message is refused"
