"""Row 20 of the faults: how many patients two sites share is counted, at sites that let it be, and nothing else leaves.

Tables of patients with a planted overlap; the real executor, filters and FLARE's protocol, every message as bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import PSIConst
from nvflare.app_opt.psi.dh_psi.dh_psi_client import PSIClient
from nvflare.fuel.sec.audit import AuditService
from private_set_intersection.python import Request, Response, ServerSetup
from support.counting import JOB, KEY, Between, Hospital, counted, people, traces, written
from support.flare_memory import site_executor, toy_experiment
from support.hostile_jobs import JOB as JOB_ID
from support.hostile_jobs import arrived, built
from support.simulator import simulator
from typer.testing import CliRunner

from fedvlp.cli import app as cli
from fedvlp.core.types import Failure, FailureKind
from fedvlp.data.patients import keyed
from fedvlp.data.sources.table import TableSource
from fedvlp.deploy.overlap import BOOK
from fedvlp.deploy.site_config import NamedData
from fedvlp.flare import messages
from fedvlp.flare.encryption import Decrypt
from fedvlp.flare.job_check import JobCheck
from fedvlp.flare.jobs import experiment_of, overlap_files, write_overlap_job
from fedvlp.flare.overlap_messages import (
    COUNT,
    COUNTED,
    FEWER,
    LEAST,
    MORE,
    MOST_BYTES,
    PATIENTS,
    PREPARE,
    REQUEST,
    RESPONSE,
    SEAL,
    SETUP,
    Count,
    Sealed,
    Size,
    Task,
    read_answer,
    to_reply,
)
from fedvlp.flare.overlap_server import OverlapTable, Pair, count_pairs, read_reply, read_table
from fedvlp.flare.overlap_site import NO_SECRET, OverlapExecutor, _derived
from fedvlp.flare.privacy_filters import AllowMetrics, ClipAndNoise, RememberReceived, UpdateFilter
from fedvlp.flare.psi_ends import CountingClient, CountingServer

EXACT: dict[str, Any] = {"least_shared": 0}


def consortium(root: Path, patients: Mapping[str, Iterable[str]], **rules: Any) -> Between:
    return Between({name: Hospital(root, name, own, EXACT | rules) for name, own in patients.items()})


# --- the counts are right ----------------------------------------------------------------------------------------


def test_the_planted_overlap_of_three_sites_is_counted(tmp_path: Path) -> None:
    """12 between two, 10 between two, none between the third pair, by the numbers of their patients."""
    between = consortium(
        tmp_path,
        {
            "north": people(range(80)),
            "south": people(range(68, 150)),  # 68 to 79 are north's: 12
            "east": people(range(140, 210)),  # 140 to 149 are south's: 10
        },
    )
    table = between.count()
    assert counted(table) == {("east", "north"): 0, ("east", "south"): 10, ("north", "south"): 12}
    assert table.patients == {"north": 80, "south": 82, "east": 70}
    assert table.complete
    assert "north and south share 12 of 80 / 82 patients" in table.in_words()
    assert "east and north share 0 of 70 / 80 patients" in table.in_words()


def test_all_of_them_and_repeated_rows_and_spellings(tmp_path: Path) -> None:
    """A patient with many films, or written in another way, is one patient."""
    names = people(range(64))
    spelt = [f"  {name.lower()} " for name in names]
    between = consortium(tmp_path, {"north": names * 3 + ["", " "], "south": spelt + names[:10]})
    assert counted(between.count()) == {("north", "south"): 64}
    assert between.count().patients == {"north": 64, "south": 64}


@pytest.mark.parametrize("seed", range(3))
def test_any_sets(seed: int, tmp_path: Path) -> None:
    """Python's own sets say how many."""
    random = Random(seed)
    sets = {name: set(random.sample(range(200), random.randint(64, 150))) for name in ("north", "south", "east")}
    table = consortium(tmp_path, {name: people(sorted(own)) for name, own in sets.items()}).count()
    assert len(table.pairs) == 3
    for pair in table.pairs:
        assert pair.shared == len(sets[pair.first] & sets[pair.second])


def test_a_site_without_patients_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(60, 130)), "east": []})
    table = between.count()
    assert counted(table) == {("north", "south"): 10}
    assert "a set has 0 patients" in table.refused["east"]
    assert not table.complete
    assert table.in_words()[0].startswith("east took no part: ")


# --- only at sites that let it be --------------------------------------------------------------------------------


def test_a_site_that_did_not_opt_in_refuses_and_is_named(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(60, 130))})
    between.sites["east"] = Hospital(tmp_path, "east", people(range(70)), rules=None)  # type: ignore[index]
    table = between.count()
    assert counted(table) == {("north", "south"): 10}

    assert not (tmp_path / "east" / BOOK).exists()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"data": ["pretrain"]}, "this site counts no patients of that data set"),
        ({"least_patients": 71}, "has 70 patients; this site counts none in a set of fewer than 71"),
        ({"jobs": 0}, "took part in 0 jobs that count patients and lets 0"),
        ({"column": "passport"}, "cannot be read here"),
    ],
)
def test_the_sites_own_rules_hold(rules: dict[str, Any], said: str, tmp_path: Path) -> None:
    """By the executor alone, whatever filters there are."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(60, 130))})
    between.sites["north"].configure(EXACT | rules)
    between.sites["north"].filters = []
    reply = between.one("north", Task(PREPARE))
    assert isinstance(reply, Failure)
    assert said in reply.text


def test_a_source_that_the_job_brings_is_not_opened(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, "north", people(range(70)), EXACT)
    hospital.executor = OverlapExecutor(
        TableSource(str(tmp_path / "north" / "data" / "people.csv")), ("north", "south")
    )
    reply = Between({"north": hospital}).one("north", Task(PREPARE))
    assert isinstance(reply, Failure)
    assert "the job brings a data set of its own" in reply.text


def test_a_set_of_one_patient_is_refused_at_both_ends(tmp_path: Path) -> None:
    """By the site whose set it is, and by the other, whatever the first one lets be counted."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people([3])})
    assert "south" in between.count().refused
    between.sites["south"].configure(EXACT | {"least_patients": 2})
    between.sites["south"].hold(people([3, 4]))
    between.sites["south"].start_anew()
    table = between.count()
    assert table.patients["south"] == 2
    assert counted(table) == {("north", "south"): None}
    assert "north: OverlapError: a set has 2 patients; this site counts none" in table.pairs[0].reason
    assert not any(isinstance(reply, Sealed) for _, _, reply in between.seen), "nothing of a patient was sent"


def test_a_server_that_lies_of_the_number_of_patients_gains_nothing(tmp_path: Path) -> None:
    """The number that counts is in the sealed message."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(2))})
    between.sites["south"].configure(EXACT | {"least_patients": 2})

    def lie(site: str, task: Task) -> Task:
        return replace(task, patients=70) if task.stage == SETUP else task

    between.change = lie
    assert "north: OverlapError: a set has 2 patients" in between.count().pairs[0].reason


def test_only_with_the_sites_that_the_rules_name(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    between.sites["south"].configure(EXACT | {"sites": ["east"]})
    assert "this site counts no patients with that site" in between.count().pairs[0].reason


def test_after_so_many_jobs_a_site_takes_part_in_no_more(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))}, jobs=2)
    for number in range(3):
        for site in between.sites.values():
            site.start_anew()
        between.job = f"{JOB[:-1]}{number}"
        table = between.count()
        assert bool(table.pairs) == (number < 2)
    assert "took part in 2 jobs" in table.refused["north"]
    book = json.loads((tmp_path / "north" / BOOK).read_text())
    assert [entry["job"] for entry in book] == [f"{JOB[:-1]}{number}" for number in range(2)]


@pytest.mark.parametrize("stricter", ["north", "south"])
def test_small_counts_leave_as_fewer_than_that(stricter: str, tmp_path: Path) -> None:
    """The stricter of the two sites decides; nobody is told whether it is 0 or 6."""
    for shared in (0, 6, 7):
        root = tmp_path / str(shared)
        between = consortium(root, {"north": people(range(70)), "south": people(range(70 - shared, 140 - shared))})
        between.sites[stricter].configure({"least_shared": 7})
        table = between.count()
        pair = table.pairs[0]
        assert (pair.shared, pair.fewer) == (7, shared < 7)
        told = "fewer than 7" if shared < 7 else "7"
        assert table.in_words() == [f"north and south share {told} of 70 / 70 patients"]


@pytest.mark.parametrize("stricter", ["north", "south"])
def test_nearly_all_of_a_set_leave_as_at_least_that(stricter: str, tmp_path: Path) -> None:
    """Otherwise a full overlap names every patient of the smaller set: each of them is at the other site."""
    for shared in (57, 58, 64):
        root = tmp_path / str(shared)
        between = consortium(root, {"north": people(range(64)), "south": people(range(64 - shared, 144 - shared))})
        between.sites[stricter].configure({"least_shared": 7})
        table = between.count()
        pair = table.pairs[0]
        told = (57, False) if shared == 57 else (58, True)
        assert (pair.shared, pair.more, pair.fewer) == (*told, False)
        words = f"north and south share {'at least ' * told[1]}{told[0]} of 64 / 80 patients"
        assert table.in_words() == [words]
        table.save(root / "table" / "overlap.json")
        assert read_table(root / "table") == table


def test_a_set_in_which_every_number_would_tell_of_few_is_not_counted(tmp_path: Path) -> None:
    """Of 13 patients each number is below 7, or leaves fewer than 7 out."""
    between = consortium(tmp_path, {"north": people(range(13)), "south": people(range(80))}, least_patients=2)
    between.sites["north"].configure({"least_shared": 7, "least_patients": 2})
    assert "the smaller set has 13 patients" in between.count().pairs[0].reason


def test_every_job_and_refusal_is_in_the_audit_log_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(60, 130))})
    between.sites["south"].configure(None)
    between.count()
    said = [(line["user"], line["action"], line["ref"]) for line in lines]
    assert said == [("north", "patients_counted", JOB), ("south", "patients_counted", JOB)]
    assert "70 patients of data set registry, job 1 of 3" in lines[0]["msg"]
    assert "refused: OverlapError: this site lets no patients be counted" in lines[1]["msg"]
    assert "MRN" not in json.dumps(lines)


def in_kit(root: Path, side: str, data: Any) -> Path:
    """The job as it arrives at a kit with the shipped policies: its app."""
    for folder in ("startup", "local"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    return arrived(root, side, files=overlap_files("patient-overlap", data, ("north", "south"), custom=False))


def test_flare_builds_the_job_with_the_shipped_lists(tmp_path: Path) -> None:
    configs = {}
    for side in ("client", "server"):
        app = in_kit(tmp_path / side, side, NamedData("registry"))
        assert JobCheck(side).validate(str(app)) == ("", {})
        configs[side] = built(tmp_path / side, side, app)
    executor, controller = configs["client"].executors[0].executor, configs["server"].workflows[0].controller
    assert (executor.data, executor.sites) == (NamedData("registry"), ("north", "south"))
    assert (controller.run_name, controller.sites) == ("patient-overlap", ("north", "south"))


def test_the_audit_log_says_who_sent_such_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a site's list has no source of files, which would open a path that the job brings."""
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    why, _ = JobCheck("client").validate(str(in_kit(tmp_path, "client", TableSource("x"))))
    assert "class 'fedvlp.data.TableSource' is not on this site's list" in why
    assert [line["action"] for line in lines] == ["job_refused"]
    assert JobCheck("client").validate(str(in_kit(tmp_path, "client", NamedData("registry")))) == ("", {})
    assert [line["action"] for line in lines] == ["job_refused", "overlap_asked"]
    assert lines[-1]["ref"] == JOB_ID
    assert "counts shared patients" in lines[-1]["msg"]


# --- nothing else crosses ----------------------------------------------------------------------------------------


def test_no_patient_and_no_hash_of_one_crosses_or_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor the keyed hash, which an engineer of another site could try names with; nor who is shared, at either site."""
    names = {"north": people(range(70)), "south": people(range(60, 130))}
    between = consortium(tmp_path, names)
    with caplog.at_level(logging.DEBUG):
        table = between.count()
        between.sites["south"].start_anew()
        between.one("south", Task(COUNT, "north", message=Sealed(RESPONSE, b"x", 70, 1, bytes(32))))  # errors too
    assert counted(table) == {("north", "south"): 10}
    table.save(tmp_path / "overlap.json")
    crossed = b"".join(between.crossed)
    items = keyed(names["north"], _derived(bytes.fromhex(KEY), "items"))
    assert items == between.sites["north"].executor._party.items  # type: ignore[union-attr]
    for trace in traces(set(names["north"] + names["south"])):
        assert trace not in crossed
        assert trace not in (tmp_path / "overlap.json").read_bytes()
    for item in items:
        assert item.encode() not in crossed
        assert bytes.fromhex(item) not in crossed
    assert "MRN" not in caplog.text
    for site in between.sites.values():
        assert "mrn" not in written(site.root).lower()
    assert len(crossed) > 3 * 70 * 33, "the search saw the blinded sets"


def test_the_search_finds_what_is_planted() -> None:
    name = people([7])[0]
    for planted in (
        name,
        name.lower(),
        hashlib.md5(name.encode()).hexdigest(),
        hashlib.sha256(name.lower().encode()).hexdigest(),
    ):
        assert any(trace in f"x{planted}y".encode() for trace in traces([name]))


def test_what_is_blinded_once_is_another_thing_the_next_time(tmp_path: Path) -> None:
    """A new secret in every job and for every pair: messages of two jobs cannot be compared."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    sent = []
    for number in range(2):
        between.job = f"{JOB[:-1]}{number}"
        for site in between.sites.values():
            site.start_anew()
        between.seen.clear()
        between.count()
        sent.append({reply.stage: reply.content for _, _, reply in between.seen if isinstance(reply, Sealed)})
    for stage in (SETUP, REQUEST, RESPONSE):
        assert sent[0][stage] != sent[1][stage]
    elements = [{content[i : i + 33] for i in range(len(content) - 33)} for content in (s[REQUEST] for s in sent)]
    assert len(elements[0]) > 1000
    assert not {e for e in elements[0] & elements[1] if len(set(e)) > 3}, "no element came twice"


def test_no_filter_counts_a_patient_too_many(tmp_path: Path) -> None:
    """FLARE's ends send a Bloom filter, whose two hashes of a small table meet far more often than it is asked for."""
    setup = ServerSetup()
    setup.ParseFromString(CountingServer(keyed(people(range(70)), b"key")).setup(70))
    assert setup.WhichOneof("data_structure") == "raw"
    elements = list(setup.raw.encrypted_elements)
    assert len(set(elements)) == 70
    assert elements == sorted(elements), "their order says nothing"


def test_no_end_of_the_protocol_can_say_who_is_shared(tmp_path: Path) -> None:
    """FLARE's own ends can; these ask for the number alone, and the library then gives no more."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(60, 130))})
    between.count()
    requests = [reply.content for _, _, reply in between.seen if isinstance(reply, Sealed) and reply.stage == REQUEST]
    asked = Request()
    asked.ParseFromString(requests[0])
    assert len(requests) == 1
    assert len(asked.encrypted_elements) == 70
    assert not asked.reveal_intersection
    server, client = CountingServer(["a", "b"]), CountingClient(["b", "c"])
    client.receive_setup(server.setup(2))
    response = server.respond(client.request(), 2)
    assert client.count(response) == 1
    with pytest.raises(RuntimeError, match="reveal_intersection == false"):
        client.get_intersection(response)
    with pytest.raises(RuntimeError, match="reveal_intersection"):
        server.process_request(PSIClient(["b", "c"]).get_request(["b", "c"]))


def test_an_end_takes_as_many_items_as_were_told(tmp_path: Path) -> None:
    """A request that is larger than the sender says, or an answer to a part of the patients, is none."""
    server, client = CountingServer(["a", "b"]), CountingClient(["b", "c"])
    client.receive_setup(server.setup(2))
    request = client.request()
    for number in (1, 3):
        with pytest.raises(ValueError, match="another number of items than it says"):
            server.respond(request, number)
    answer = Response()
    answer.ParseFromString(server.respond(request, 2))
    del answer.encrypted_elements[0]
    with pytest.raises(ValueError, match="to another number of items"):
        client.count(answer.SerializeToString())


# --- a hostile server, another key -------------------------------------------------------------------------------


def test_sites_with_different_keys_say_so(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    between.sites["south"].key("ab" * 32)
    assert "the seal of a message is wrong" in between.count().pairs[0].reason


@pytest.mark.parametrize("stage", [REQUEST, RESPONSE, COUNT])
@pytest.mark.parametrize("what", ["content", "patients", "least_shared", "seal"])
def test_a_server_that_alters_a_message_gets_no_count(stage: str, what: str, tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))}, least_shared=2)

    def altered(site: str, task: Task) -> Task:
        if task.stage != stage:
            return task
        assert task.message is not None
        values = {"content": task.message.content + b"\0", "patients": 69, "least_shared": 0, "seal": bytes(32)}
        return replace(task, message=replace(task.message, **{what: values[what]}))

    between.change = altered
    pair = between.count().pairs[0]
    assert pair.shared is None
    assert "the seal of a message" in pair.reason


def test_a_server_cannot_ask_with_patients_of_its_own(tmp_path: Path) -> None:
    """It has the protocol's code, but not the sites' key: no seal, and no site answers."""
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    assert between.one("north", Task(PREPARE)) == Size(70)
    setup = between.one("north", Task(SETUP, "south", 70))
    assert isinstance(setup, Sealed)
    probe = CountingClient(keyed(people(range(70)), _derived(NO_SECRET, "items")))
    probe.receive_setup(setup.content)
    forged = Sealed(REQUEST, probe.request(), 70, 1, hmac.new(NO_SECRET, b"", "sha256").digest())
    reply = between.one("north", Task(RESPONSE, "south", message=forged))
    assert isinstance(reply, Failure)
    assert "the seal of a message is wrong" in reply.text


def test_an_end_answers_once(tmp_path: Path) -> None:
    """A task that comes again at once, as FLARE may send it, is answered as before; later, or elsewhere, it is not."""
    names = {name: people(range(70)) for name in ("north", "south", "east")}
    between = consortium(tmp_path, names)
    between.count()
    tasks = {(site, task.stage, task.peer): (task, reply) for site, task, reply in between.seen}
    last, before = tasks["north", RESPONSE, "south"]
    assert between.one("north", last) == before
    refused = [
        between.one("south", tasks["south", COUNT, "east"][0]),  # what east answered south
        between.one("north", tasks["north", SETUP, "south"][0]),
        between.one("north", last) if between.one("north", Task(PREPARE)) == Size(70) else None,
        between.one("east", tasks["south", REQUEST, "north"][0]),
    ]
    said = ["did not begin to count with that site", "counts once in a job", "did not begin", "the seal"]
    for reply, text in zip(refused, said, strict=True):
        assert isinstance(reply, Failure)
        assert text in reply.text


def test_a_message_of_another_job_is_refused(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    between.count()
    request = next(task for site, task, _ in between.seen if task.stage == REQUEST)
    between.job = "another"
    between.sites["south"].start_anew()
    assert between.one("south", Task(PREPARE)) == Size(70)
    reply = between.one("south", request)
    assert isinstance(reply, Failure)
    assert "the seal" in reply.text


def test_a_process_that_was_started_anew_says_so(tmp_path: Path) -> None:
    between = consortium(tmp_path, {"north": people(range(70)), "south": people(range(70))})
    between.one("north", Task(PREPARE))
    between.sites["north"].start_anew()
    reply = between.one("north", Task(SETUP, "south", 70))
    assert isinstance(reply, Failure)
    assert "-t as many threads as there are sites" in reply.text


PEER, SIZE = "fedvlp_peer", PSIConst.ITEMS_SIZE
MESSAGE = {PSIConst.TASK_KEY: REQUEST, PEER: "south", PSIConst.SETUP_MSG: b"x", SEAL: bytes(32), PATIENTS: 70, LEAST: 1}
"""A task of the right form; its seal is wrong."""


@pytest.mark.parametrize(
    "content",
    [
        {}, {PSIConst.TASK_KEY: "PSI_OTHER"}, {PSIConst.TASK_KEY: 7}, {PSIConst.TASK_KEY: [SETUP]},
        {PSIConst.TASK_KEY: SETUP}, {PSIConst.TASK_KEY: SETUP, PEER: ""},
        {PSIConst.TASK_KEY: SETUP, PEER: "x" * 300, SIZE: 70},
        {PSIConst.TASK_KEY: SETUP, PEER: "south", SIZE: "70"},
        {PSIConst.TASK_KEY: SETUP, PEER: "south", SIZE: 10**9},
        {PSIConst.TASK_KEY: SETUP, PEER: "south", SIZE: True},
        {PSIConst.TASK_KEY: SETUP, PEER: "south\nforged", SIZE: 70},
        {PSIConst.TASK_KEY: REQUEST, PEER: "south"},
        MESSAGE, {**MESSAGE, PSIConst.SETUP_MSG: "text"}, {**MESSAGE, SEAL: b""}, {**MESSAGE, PEER: "south\nforged"},
        {**MESSAGE, PSIConst.TASK_KEY: COUNT},
    ],
    ids=str,
)  # fmt: skip
def test_a_task_of_no_form_is_refused_in_words(content: dict[str, Any], tmp_path: Path) -> None:
    """FLARE's own tasks included, which bring no seal: its workflow gets nothing out of a site."""
    hospital = Hospital(tmp_path, "north", people(range(70)), EXACT)
    prepare = Shareable()
    prepare[PSIConst.TASK_KEY] = PREPARE
    assert read_reply(hospital.answer(prepare)) == Size(70)
    task = Shareable()
    task.update(content)
    reply = read_reply(hospital.answer(task))
    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.FAILED
    assert reply.text.startswith("OverlapError: ")
    assert "\n" not in reply.text
    assert "forged" not in reply.text


# --- the door in the filters -------------------------------------------------------------------------------------

ANSWERS = [
    Size(70),
    Count(5, 70),
    Count(65, 70),
    Count(5, 70, fewer=True),
    Count(66, 70, more=True),
    Sealed(SETUP, b"x" * 99, 70, 5, bytes(32)),
]


def through(hospital: Hospital, reply: Shareable, rule: UpdateFilter, task: str = "PSI", mark: Any = True) -> str:
    """Why the filter let the reply not go; "" where it did, unchanged."""
    context = hospital.context(task=task)
    context.set_prop(COUNTED, mark, private=True, sticky=False)
    out = rule.process(reply, context)
    failed = messages.failure(out)
    if failed is None:
        assert read_answer(out) == read_answer(reply)
        return ""
    assert not out.get("DXO")
    return failed.text


NOISE = {"clip": 0.5, "noise_multiplier": 4.0, "epsilon": 8.0, "delta": 1e-5, "dataset": "chest"}


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
@pytest.mark.parametrize("rule", [AllowMetrics([]), ClipAndNoise(**NOISE)], ids=lambda rule: type(rule).__name__)
def test_the_door_is_open_in_a_job_that_counts_and_nowhere_else(
    answer: Any, rule: UpdateFilter, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path, "north", people(range(70)), {})
    assert through(hospital, to_reply(answer), rule) == ""
    assert "is not an update" in through(hospital, to_reply(answer), rule, mark=None), "another executor"
    assert "is not an update" in through(hospital, to_reply(answer), rule, task="train"), "another task"
    assert "is not an update" in through(hospital, to_reply(answer), rule, task="train", mark=None), "a training job"
    hospital.configure(None)
    assert "lets no patients be counted" in through(hospital, to_reply(answer), rule), "no entry"


def psi(**data: Any) -> Shareable:
    return DXO(DataKind.PSI, data=data).to_shareable()


def with_meta() -> Shareable:
    dxo = DXO(DataKind.PSI, data={PSIConst.ITEMS_SIZE: 70}, meta={"patient": "Jane"})
    return dxo.to_shareable()


SEALED = {SEAL: bytes(32), PATIENTS: 70, LEAST: 5}
NUMBER = {PATIENTS: 70, FEWER: False, MORE: False}
"""Beside a count that leaves as a number; of 70 patients 5 to 65 may."""


@pytest.mark.parametrize(
    "reply",
    [
        psi(), psi(PSI_ITEMS_SIZE="Jane"), psi(PSI_ITEMS_SIZE=70, patient="Jane"), psi(intersection=["Jane"]),
        psi(PSI_ITEMS_SIZE=-1), psi(PSI_ITEMS_SIZE=True), psi(PSI_ITEMS_SIZE=70.0), psi(PSI_ITEMS_SIZE=10**7),
        psi(PSI_ITEMS_SIZE=3), psi(PSI_ITEMS_SIZE=3, **NUMBER), psi(PSI_ITEMS_SIZE=66, **NUMBER),
        psi(PSI_ITEMS_SIZE=4, **NUMBER | {FEWER: True}), psi(PSI_ITEMS_SIZE=67, **NUMBER | {MORE: True}),
        psi(PSI_ITEMS_SIZE=12, **NUMBER | {FEWER: "Jane"}), psi(PSI_ITEMS_SIZE=12, **NUMBER | {MORE: "Jane"}),
        psi(PSI_ITEMS_SIZE=12, **NUMBER | {FEWER: True, MORE: True}), psi(PSI_ITEMS_SIZE=12, fedvlp_fewer=False),
        psi(PSI_ITEMS_SIZE=12, **NUMBER | {PATIENTS: "Jane"}),
        psi(PSI_SETUP_MSG=b"x"), psi(PSI_SETUP_MSG="Jane", **SEALED),
        psi(PSI_SETUP_MSG=b"x", **{**SEALED, SEAL: b"Jane"}),
        psi(PSI_SETUP_MSG={"70": b"x"}, **SEALED), psi(PSI_SETUP_MSG=b"x", **{**SEALED, PATIENTS: 3}),
        psi(PSI_REQUEST_MSG=b"x", PSI_SETUP_MSG=b"x", **SEALED), psi(PSI_REQUEST_MSG_SET={}, **SEALED), with_meta(),
        psi(PSI_SETUP_MSG=b"\0" * (MOST_BYTES + 1), **SEALED),
        DXO(DataKind.WEIGHTS, data={PSIConst.ITEMS_SIZE: 70}).to_shareable(), make_reply(ReturnCode.OK), Shareable(),
    ],
    ids=lambda reply: str(reply)[:80],
)  # fmt: skip
def test_what_is_no_such_message_or_too_much_stays(reply: Shareable, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, "north", people(range(70)), {})
    said = through(hospital, reply, AllowMetrics([]))
    assert said.startswith("OverlapError: ")
    assert "Jane" not in said


def test_what_rides_beside_an_answer_stays(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, "north", people(range(70)), {})
    laden = to_reply(Size(70))
    laden["report"] = "Jane Doe"
    laden.set_header("patient", "Jane Doe")
    context = hospital.context()
    context.set_prop(COUNTED, True, private=True, sticky=False)
    assert "Jane" not in repr(AllowMetrics([]).process(laden, context))


def test_a_training_executor_never_opens_the_door(tmp_path: Path) -> None:
    """Not even for a task with the name and the content of one that counts."""
    hospital = Hospital(tmp_path, "north", people(range(70)), {})
    task = Shareable()
    task[PSIConst.TASK_KEY] = PREPARE
    context = hospital.context()
    site_executor(toy_experiment()).execute("PSI", task, context, Signal())
    assert context.get_prop(COUNTED) is None


def test_the_other_filters_of_a_site_let_the_task_in(tmp_path: Path) -> None:
    """Under encryption and noise, whose filters look at every task."""
    hospital = Hospital(tmp_path, "north", people(range(70)), {})
    context = hospital.context()
    task = Shareable()
    task[PSIConst.TASK_KEY] = PREPARE
    assert Decrypt().process(task, context) is task
    RememberReceived().handle_event(EventType.BEFORE_TASK_EXECUTION, context)
    with pytest.raises(ValueError, match="not a valid DXO"):
        Decrypt().process(task, hospital.context(task="train"))


# --- the server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [Shareable(), make_reply(ReturnCode.OK), psi(PSI_ITEMS_SIZE="x" * 10**5), psi(a=1), "text", None, 7, {"DXO": 3}],
    ids=lambda reply: str(reply)[:30],
)
def test_the_server_reads_whatever_a_site_sends(reply: Any) -> None:
    found = read_reply(reply)
    assert isinstance(found, Failure)
    assert len(found.text) < 200


def test_a_site_that_answers_with_another_stage_is_named(tmp_path: Path) -> None:
    def ask(tasks: Mapping[str, Task]) -> dict[str, Any]:
        return {site: Size(70) if task.stage == PREPARE else Count(12, 70) for site, task in tasks.items()}

    table = count_pairs(["a", "b"], ask)
    assert table.pairs == [Pair("a", "b", reason="a: answered with a message of another stage")]
    assert table.in_words() == ["a and b were not counted: a: answered with a message of another stage"]


def test_a_count_larger_than_either_site_is_none() -> None:
    answers: dict[str, Any] = {SETUP: Sealed(SETUP, b"x", 70, 0, bytes(32)), COUNT: Count(71, 70)}
    answers |= {stage: replace(answers[SETUP], stage=stage) for stage in (REQUEST, RESPONSE)}

    def one(site: str, task: Task) -> Any:
        return Size(70 if site == "a" else 90) if task.stage == PREPARE else answers[task.stage]

    def ask(tasks: Mapping[str, Task]) -> dict[str, Any]:
        return {site: one(site, task) for site, task in tasks.items()}

    assert count_pairs(["a", "b"], ask).pairs[0].reason == "b: says that more are shared than there are"
    answers[COUNT] = Count(70, 70)
    assert count_pairs(["a", "b"], ask).pairs[0].shared == 70


def test_the_table_is_read_back_and_holds_numbers_and_sites_alone(tmp_path: Path) -> None:
    table = OverlapTable({"a": 70, "b": 80}, {"c": "why"}, [Pair("a", "b", 5, fewer=True)])
    table.save(tmp_path / "deep" / "down" / "overlap.json")
    assert read_table(tmp_path) == table
    done = CliRunner().invoke(cli, ["jobs", "overlap", str(tmp_path)])
    assert done.output.splitlines() == ["c took no part: why", "a and b share fewer than 5 of 70 / 80 patients"]
    assert done.exit_code == 1
    with pytest.raises(ValueError, match=r"holds no overlap\.json"):
        read_table(tmp_path / "deep" / "down" / "overlap.json")


def test_a_job_needs_two_sites_and_names_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="between two sites or more"):
        write_overlap_job("x", None, ["north", "north"], tmp_path / "job")
    done = CliRunner().invoke(
        cli,
        ["jobs", "export-overlap", str(tmp_path / "job"), "--data", "named:registry", "--at", "south", "--at", "north"],
    )
    assert done.exit_code == 0, done.output
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", "north", "south"]}
    with pytest.raises(ValueError, match="counts shared patients and trains nothing"):
        experiment_of(tmp_path / "job")


# --- FLARE's simulator -------------------------------------------------------------------------------------------


@pytest.mark.slow(seconds=25)
def test_in_flares_simulator_the_table_is_right_and_names_nobody(tmp_path: Path) -> None:
    """Three sites of one table; every file that the run leaves is searched, the server's among them."""
    sets = {"north": range(48), "south": range(36, 87), "east": range(86, 100)}
    rows = [[patient, site] for site, own in sets.items() for patient in people(own)]
    file = tmp_path / "data" / "people.csv"
    file.parent.mkdir()
    file.write_text("\n".join(",".join(row) for row in [["patient_id", "site"], *rows]))
    out = tmp_path / "out"
    job = write_overlap_job("patient-overlap", TableSource(str(file)), list(sets), out / "job")
    done = simulator(job, out, 3)
    (out / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shown = CliRunner().invoke(cli, ["jobs", "overlap", str(out / "runs" / "patient-overlap" / "001")])
    assert shown.exit_code == 0
    assert shown.output.splitlines() == [
        "east and north share 0 of 14 / 48 patients",
        "east and south share 1 of 14 / 51 patients",
        "north and south share 12 of 48 / 51 patients",
    ]
    content = b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
    assert b"north and south share 12" in content, "the search saw the server's log"
    for trace in traces(people(range(100))):
        assert trace not in content
