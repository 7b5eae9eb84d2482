"""A piece that was lost with its connection is asked for again, and only that piece; FLARE's own loop does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.signal import Signal
from nvflare.app_opt.pt.tensor_downloader import TensorConsumer
from nvflare.fuel.f3.cellnet.cell import Cell as FlareCell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import byte_streamer
from nvflare.fuel.f3.streaming.download_service import DownloadService, ProduceRC, download_object
from nvflare.fuel.f3.streaming.stream_const import STREAM_DATA_TOPIC
from support.provisioned import free_port

from fedvlp.flare import retrying_cell, tensor_stream
from fedvlp.flare.retrying_cell import PAUSE, RETRIED_FOR, RetryingCell, send_again
from fedvlp.flare.tensor_stream import PieceDecomposer, joined


class Clock:
    """Seconds that pass only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retrying_cell, "time", clock)
    return clock


class Cell:
    """FLARE's cell to a peer that serves tensors; ``lost`` says of the number of a request how it is lost."""

    def __init__(self, lost: Callable[[int], str | None], source: Any = None) -> None:
        self.lost, self.source = lost, source
        self.asked: list[Any] = []

    def register_request_cb(self, **_: Any) -> None:
        """FLARE's downloads listen on it."""

    def fire_and_forget(self, **_: Any) -> None:
        """A word without an answer."""

    def send_request(self, *, request: Message, **_: Any) -> Message:
        state = request.payload.get("state")
        self.asked.append(state)
        request.payload, request.headers = b"encoded", {"sent": True}  # as sending does
        code = self.lost(len(self.asked))
        if code is not None:
            return make_reply(code)
        status, data, new = self.source.produce(state, "receiver")
        return make_reply(ReturnCode.OK, body={"status": status, "data": data, "state": new})


def download(cell: Cell) -> TensorConsumer:
    """FLARE's own loop over it."""
    consumer = TensorConsumer(None, {})
    retrying: Any = RetryingCell(cell)
    download_object(from_fqcn="peer", ref_id="R1", per_request_timeout=1.0, cell=retrying, consumer=consumer)
    return consumer


@pytest.mark.parametrize("code", [ReturnCode.TIMEOUT, ReturnCode.COMM_ERROR, ReturnCode.TARGET_UNREACHABLE])
def test_what_is_lost_is_asked_for_again_and_nothing_else(
    code: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven losses in a row: FLARE alone gives up at the first of a connection, at the fourth of an answer."""
    monkeypatch.setattr(tensor_stream, "PIECE", 64)
    sent = torch.randn(5, 31)
    source = PieceDecomposer().to_downloadable({"w": sent}, 100, {})
    cell = Cell(lambda number: code if 3 <= number < 10 else None, source)
    found = download(cell)
    assert found.error is None
    names = list(found.result)
    assert torch.equal(joined([found.result[name] for name in names], names), sent)
    assert len(names) == 10
    assert len(cell.asked) == len(names) + 1 + 7, "every piece once, the end, and what was lost"
    assert all(state == cell.asked[2] for state in cell.asked[2:10]), "the same piece"
    assert clock.now == pytest.approx(7 * PAUSE, abs=1.0)


def test_silence_that_lasts_too_long_ends_a_transfer(clock: Clock) -> None:
    cell = Cell(lambda number: ReturnCode.COMM_ERROR)
    assert "comm_error" in str(download(cell).error)
    assert clock.now == pytest.approx(RETRIED_FOR, abs=2 * PAUSE)


def test_an_answer_that_says_no_is_none_to_ask_for_again(clock: Clock) -> None:
    cell = Cell(lambda number: ReturnCode.INVALID_REQUEST)
    assert "invalid_request" in str(download(cell).error)
    assert (len(cell.asked), clock.now) == (1, 0.0)


def test_an_aborted_job_asks_no_more(clock: Clock) -> None:
    signal = Signal()
    signal.trigger(True)
    cell = Cell(lambda number: ReturnCode.TIMEOUT)
    reply = RetryingCell(cell).send_request(request=Message({}, {}), abort_signal=signal)
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.TIMEOUT
    assert (len(cell.asked), clock.now) == (1, 0.0)


def test_flare_takes_it_for_the_cell_that_it_listens_on() -> None:
    cell = Cell(lambda number: None)
    wrapped: Any = RetryingCell(cell)
    assert wrapped == RetryingCell(cell)
    assert wrapped != RetryingCell(Cell(lambda number: None))
    assert DownloadService._initialized_cells.get(wrapped) is True
    assert ProduceRC.OK == "ok", "what the peer of these tests answers"


# What a site asks of its server


@pytest.fixture
def cells() -> Iterator[tuple[FlareCell, FlareCell]]:
    """FLARE's own cells of a server and a site, over loopback."""
    url = f"tcp://127.0.0.1:{free_port()}"
    pair = [FlareCell(fqcn=name, root_url=url, secure=False, credentials={}) for name in ("server", "site-1")]
    for cell in pair:
        cell.start()
    yield pair[0], pair[1]
    for cell in reversed(pair):
        cell.stop()
        CoreCell.ALL_CELLS.pop(cell.core_cell.my_info.fqcn, None)


def test_a_result_that_was_lost_on_its_way_is_sent_again(
    cells: tuple[FlareCell, FlareCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is handed in once. Without it the site waits until its time is up."""
    monkeypatch.setattr(byte_streamer, "STREAM_RETRY_WAIT", 0.2)
    server, site = cells
    came, sent = list[Any](), list[Message]()

    def submitted(message: Message) -> Message:
        came.append(message.payload)
        return make_reply(ReturnCode.OK)

    server.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="submit", cb=submitted)
    send = site.core_cell.fire_and_forget

    def losing(channel: str, topic: str, targets: Any, message: Message, **options: Any) -> Any:
        if topic == STREAM_DATA_TOPIC:
            sent.append(message)
            if len(sent) == 1:
                return {}  # as when the connection breaks after it was written
        return send(channel, topic, targets, message, **options)

    monkeypatch.setattr(site.core_cell, "fire_and_forget", losing)
    communicator = SimpleNamespace(cell=site)
    engine = SimpleNamespace(client=SimpleNamespace(communicator=communicator))

    def submit(timeout: float) -> str:
        reply = communicator.cell.send_request(
            channel=CellChannel.SERVER_COMMAND, topic="submit", target="server",
            request=Message(None, {"an": "update"}), timeout=timeout,
        )  # fmt: skip
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    assert submit(1.0) == ReturnCode.TIMEOUT
    assert came == []
    send_again(context(engine))
    sent.clear()
    assert submit(20.0) == ReturnCode.OK
    assert came == [{"an": "update"}]
    assert len(sent) == 2


def context(engine: object) -> Any:
    """FLARE's context of an event."""
    return SimpleNamespace(get_engine=lambda: engine)


def test_an_engine_without_a_connection_is_left_alone() -> None:
    """That of a test, or of another version of FLARE."""
    send_again(context(object()))
