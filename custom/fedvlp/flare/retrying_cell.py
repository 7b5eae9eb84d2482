"""A transfer that outlives its connection: what was lost on the way is asked for again, and only that.

FLARE asks for a model piece by piece, and a site's link drops now and then. FLARE 2.9 sends an answer again until it is
acknowledged, but not a request: one that is lost costs its whole timeout. It gives a download up after four timeouts in
a row, or at the first request that finds no connection, and then everything is sent anew; at the server it ends the
job's process. Here a request for a piece is repeated for as long as ``RETRIED_FOR`` allows, and what a site says to the
server's job (give me a task, here is a result) is sent again like an answer (:func:`send_again`).
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import DownloadService

logger = logging.getLogger(__name__)

RETRIED_FOR = 600.0
"""Seconds without any answer until a transfer is given up: FLARE's own default for a transfer that stands still."""

PAUSE = 2.0
"""Seconds between two requests; FLARE connects again after one."""

SENT_AGAIN = "what this site asks of the server is sent again until it is acknowledged"
"""In the site's log, so that it shows where FLARE no longer has its connection where it is looked for."""

LOST = (ReturnCode.TIMEOUT, ReturnCode.COMM_ERROR, ReturnCode.TARGET_UNREACHABLE)
"""What FLARE answers in place of a peer that was not reached, or whose answer was not."""


class RetryingCell:
    """FLARE's cell, for one download; equal to it, as FLARE notes for which cells it listens."""

    def __init__(self, cell: Any) -> None:
        DownloadService.initialize(cell)
        self._cell = cell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cell, name)

    def __eq__(self, other: object) -> bool:
        return other is self._cell or (isinstance(other, RetryingCell) and other._cell is self._cell)

    def __hash__(self) -> int:
        return hash(self._cell)

    def send_request(self, *, request: Message, abort_signal: Any = None, **options: Any) -> Message:
        """The answer to ``request``; with none within ``RETRIED_FOR`` seconds, what FLARE says of the last one."""
        until = time.monotonic() + RETRIED_FOR
        while True:
            copy = Message(dict(request.headers or {}), request.payload)  # sending it changes it
            reply: Message = self._cell.send_request(request=copy, abort_signal=abort_signal, **options)
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code not in LOST or time.monotonic() >= until or not _paused(abort_signal):
                return reply
            logger.warning("a piece from %s did not arrive (%s); asking again", options.get("target"), code)


def _paused(abort_signal: Any) -> bool:
    """Waits a moment; False where the transfer was aborted."""
    end = time.monotonic() + PAUSE
    while time.monotonic() < end:
        if abort_signal is not None and abort_signal.triggered:
            return False
        time.sleep(0.1)
    return True


def send_again(fl_ctx: FLContext) -> None:
    """From now on FLARE sends what this site's process asks of its server again, every 5 s, until it is acknowledged.

    For all processes and messages of a kit ``streaming_reliable`` does so; each such message costs the receiver a
    thread for a minute, too much for pieces.
    """
    client = getattr(fl_ctx.get_engine(), "client", None)
    if client is not None:
        client.communicator.cell = acknowledged(client.communicator.cell)
        logger.info(SENT_AGAIN)


def acknowledged(cell: Any) -> Any:
    """``cell``, by which every message is sent again until it is acknowledged; answers come to both."""
    twin = object.__new__(type(cell))  # copy.copy would ask it for __setstate__, and FLARE's cell has every name
    twin.__dict__.update(cell.__dict__, send_blob=partial(cell.send_blob, reliable=True))
    return twin
