"""What crosses in a job that counts shared patients: FLARE's messages of private set intersection, each bounded.

A task is a Shareable with FLARE's keys (``PSIConst``), an answer a DXO of FLARE's kind ``PSI``. Beside FLARE's content
a message between two sites has the sender's number of patients, the smallest count it lets be told, and a seal by the
key that the sites share: the server passes messages on, and can neither make nor alter one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import PSIConst

from fedvlp.deploy.overlap import OverlapError
from fedvlp.deploy.site_config import overlap_at

TASK: str = PSIConst.TASK
PREPARE, SETUP, REQUEST, RESPONSE, COUNT = (
    PSIConst.TASK_PREPARE,
    PSIConst.TASK_SETUP,
    PSIConst.TASK_REQUEST,
    PSIConst.TASK_RESPONSE,
    PSIConst.TASK_INTERSECT,
)
"""The stages of a job, in their order. The first is asked of every site, the others of the two sites of a pair."""

CARRIED = {SETUP: PSIConst.SETUP_MSG, REQUEST: PSIConst.REQUEST_MSG, RESPONSE: PSIConst.RESPONSE_MSG}
"""Stage: FLARE's key of the message that its answer carries to the other site."""

PEER, PATIENTS, LEAST, SEAL = (f"fedvlp_{name}" for name in ("peer", "patients", "least", "seal"))
FEWER, MORE = "fedvlp_fewer", "fedvlp_more"
COUNTED = "fedvlp_overlap"
"""Property of a task's context: it was answered by the executor that counts patients, not by one that trains."""

MOST_PATIENTS = 1_000_000
MOST_BYTES = 40 * MOST_PATIENTS  # of a message; an item takes 35
SEAL_BYTES = hashlib.sha256().digest_size
LONGEST_NAME = 255  # characters of a site's name


@dataclass(frozen=True)
class Size:
    """How many patients a site has."""

    patients: int


@dataclass(frozen=True)
class Sealed:
    """A message of one site to another: the answer of ``stage``."""

    stage: str
    content: bytes  # of FLARE's protocol
    patients: int  # of the sender
    least_shared: int  # that the sender lets be told
    seal: bytes


@dataclass(frozen=True)
class Count:
    """How many patients two sites share, of the ``of`` that the smaller set has.

    ``fewer`` than ``shared`` where the sites let no smaller number be told. ``more``: at least ``shared``, where so few
    of the smaller set are not shared that a number would name nearly all of them.
    """

    shared: int
    of: int
    fewer: bool = False
    more: bool = False


Answer = Size | Sealed | Count


@dataclass(frozen=True)
class Task:
    """What a site is asked."""

    stage: str
    peer: str = ""
    patients: int = 0  # of the peer, for SETUP
    message: Sealed | None = None  # of the peer, for the stages after SETUP


def seal(key: bytes, job: str, sender: str, receiver: str, message: Sealed) -> bytes:
    """HMAC-SHA256 of all that the message says, whom it is from and to, and in which job."""
    about = [job, sender, receiver, message.stage, message.patients, message.least_shared]
    return hmac.new(key, json.dumps(about).encode() + b"\0" + message.content, hashlib.sha256).digest()


def to_task(task: Task) -> Shareable:
    """The task as FLARE sends it."""
    shareable = Shareable()
    shareable[PSIConst.TASK_KEY] = task.stage
    shareable[PEER] = task.peer
    shareable[PSIConst.ITEMS_SIZE] = task.patients
    if task.message:
        shareable.update(_carried(task.message))
    return shareable


def to_reply(answer: Answer) -> Shareable:
    """The answer as FLARE sends it."""
    if isinstance(answer, Size):
        data: dict[str, Any] = {PSIConst.ITEMS_SIZE: answer.patients}
    elif isinstance(answer, Count):
        data = {PSIConst.ITEMS_SIZE: answer.shared, PATIENTS: answer.of, FEWER: answer.fewer, MORE: answer.more}
    else:
        data = _carried(answer)
    return DXO(DataKind.PSI, data=data).to_shareable()


def _carried(message: Sealed) -> dict[str, Any]:
    content = {CARRIED[message.stage]: message.content, SEAL: message.seal}
    return content | {PATIENTS: message.patients, LEAST: message.least_shared}


def read_task(shareable: Shareable) -> Task:
    """The task that came. Raises OverlapError for any other content."""
    stage, peer = shareable.get(PSIConst.TASK_KEY), shareable.get(PEER)
    if stage == PREPARE:
        return Task(PREPARE)
    previous = {REQUEST: SETUP, RESPONSE: REQUEST, COUNT: RESPONSE}
    known = isinstance(stage, str) and (stage == SETUP or stage in previous)
    if not (known and isinstance(peer, str) and 0 < len(peer) <= LONGEST_NAME):
        raise OverlapError("the task is none of a job that counts patients")
    if stage == SETUP:
        return Task(SETUP, peer, _number(shareable.get(PSIConst.ITEMS_SIZE)))
    return Task(str(stage), peer, message=_read_carried(shareable, previous[str(stage)]))


def read_answer(shareable: Shareable) -> Answer:
    """The answer in a reply, which holds nothing else. Raises OverlapError for any other content."""
    try:
        dxo = from_shareable(shareable)
        kind, data, beside = dxo.data_kind, dxo.data, set(dxo.meta or ())
    except Exception:
        raise OverlapError("the reply is no message of a job that counts patients") from None
    if kind != DataKind.PSI or not isinstance(data, dict) or beside:
        raise OverlapError("the reply is no message of a job that counts patients")
    names = set(data)
    if names == {PSIConst.ITEMS_SIZE}:
        return Size(_number(data[PSIConst.ITEMS_SIZE]))
    if names == {PSIConst.ITEMS_SIZE, PATIENTS, FEWER, MORE}:
        return _read_count(data)
    for stage, key in CARRIED.items():
        if names == {key, SEAL, PATIENTS, LEAST}:
            return _read_carried(data, stage)
    raise OverlapError("the reply is no message of a job that counts patients")


def _read_count(data: Mapping[str, Any]) -> Count:
    fewer, more = data[FEWER], data[MORE]
    if type(fewer) is not bool or type(more) is not bool or (fewer and more):
        raise OverlapError("the reply is no message of a job that counts patients")
    return Count(_number(data[PSIConst.ITEMS_SIZE]), _number(data[PATIENTS]), fewer, more)


def _read_carried(data: Mapping[str, Any], stage: str) -> Sealed:
    content, mark = data.get(CARRIED[stage]), data.get(SEAL)
    if not (isinstance(content, bytes) and len(content) <= MOST_BYTES):
        raise OverlapError(f"the message holds no bytes, or more than {MOST_BYTES:,}")
    if not (isinstance(mark, bytes) and len(mark) == SEAL_BYTES):
        raise OverlapError("the message has no seal")
    return Sealed(stage, content, _number(data.get(PATIENTS)), _number(data.get(LEAST)), mark)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_PATIENTS:
        raise OverlapError(f"a number of patients is none, or above {MOST_PATIENTS:,}")
    return value


def is_task(fl_ctx: FLContext) -> bool:
    """Whether the task of this context is one of private set intersection by its name."""
    return bool(fl_ctx.get_prop(FLContextKey.TASK_NAME) == TASK)


def is_counted(fl_ctx: FLContext) -> bool:
    """Whether this context's task is such a one, and was answered by the executor that counts patients."""
    return is_task(fl_ctx) and fl_ctx.get_prop(COUNTED) is True


def passed(reply: Shareable, fl_ctx: FLContext) -> Shareable:
    """The door of a site's outgoing filters: the answer put together anew, within the site's own rules.

    Raises OverlapError where the site did not opt in, and for whatever is no answer or says more than it lets be told.
    """
    rules = overlap_at(Path(fl_ctx.get_engine().get_workspace().get_root_dir()))
    answer = read_answer(reply)
    if isinstance(answer, Count):
        _admit_count(answer, rules.least_shared)
    else:
        rules.admit_size(answer.patients, "this site")
    return to_reply(answer)


def _admit_count(count: Count, least: int) -> None:
    """Raises OverlapError for a number by which fewer than ``least`` patients are told apart, at either end."""
    if count.shared < least:
        raise OverlapError(f"a count below {least} does not leave this site")
    left_open = count.of - count.shared  # "at least" may leave one patient fewer open than a number
    if not count.fewer and left_open < least - count.more:
        raise OverlapError(f"a count of all of a set but fewer than {least} does not leave this site")
