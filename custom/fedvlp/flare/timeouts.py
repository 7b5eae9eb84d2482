"""The timeouts of a job with a large model on slow links, derived together from the two numbers that decide them.

They must fit each other, or the job dies in the known way: a site gives up a transfer that is still under way and asks
again, the server keeps both in memory, and so on until it has none left. And none may be longer than what it bounds
takes: a message that was lost with its connection is noticed by nothing else.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

from fedvlp.core.client import named_state
from fedvlp.core.validate import require
from fedvlp.flare.retrying_cell import RETRIED_FOR
from fedvlp.flare.tensor_stream import PIECE, SETTING
from fedvlp.run.experiment import Experiment

MARGIN = 3.0  # a link is slower at times than its owner believes
LEAST = 300.0  # seconds; FLARE's own default (communication_timeout, set by each site), below which nothing is gained
BUSY = 15.0  # seconds until a peer that has much to do answers; every break of a link costs about that
RESENT = 5.0  # seconds after which FLARE 2.9 sends again what is not acknowledged (streaming_retry_wait)
SMALLEST = 256 << 10  # bytes of a piece; a smaller one costs more in waiting for the next than it takes


@dataclass(frozen=True)
class Timeouts:
    """In seconds, but for the first. One transfer of the model takes ``t``, one piece of it ``p``.

    =================================== ==================== ==========================================================
    name                                where it is read     what it bounds
    =================================== ==================== ==========================================================
    piece                               server, site         bytes of a piece: FLARE acknowledges a piece when it is
                                                             whole, and sends all of it again every 5 s until then, so
                                                             that one that takes longer is sent twice, the next one
                                                             three times, and so on until nothing arrives
    tensor_streaming_per_request_timeout server, site        one piece; a request that was lost is repeated after it
    tensor_min_download_timeout         server, site         the sender keeps a message for a receiver that is silent;
                                                             longer than the receiver keeps asking (flare/
                                                             retrying_cell.py)
    get_task_timeout                    site                 asking for a task; its tensors come later, piece by piece
    submit_task_result_timeout          site                 handing in one result, the whole model up, a pause included
    task_timeout                        controller, child    one task from being offered to its result: down, train, up
    grace                               controller           after the quorum has replied, what slower links may add
    =================================== ==================== ==========================================================

    ``communication_timeout`` belongs to each site's own configuration (default 300 s); asking for a task waits for the
    larger of it and ``get_task_timeout``.
    """

    piece: int
    tensor_streaming_per_request_timeout: float
    tensor_min_download_timeout: float
    get_task_timeout: float
    submit_task_result_timeout: float
    task_timeout: int  # FLARE takes whole seconds
    grace: float

    @staticmethod
    def of(size: int, link_mbit: float, training: float = 3600.0) -> Timeouts:
        """For a model of ``size`` bytes, the slowest link (Mbit/s, all sites busy) and the longest local training."""
        require(link_mbit > 0, f"the slowest link is {link_mbit} Mbit/s; give a positive number")
        slow = link_mbit * 1e6 / 8 / MARGIN  # bytes a second, at times
        piece = min(PIECE, max(SMALLEST, int(slow * RESENT)))
        request = BUSY + piece / slow
        transfer = size / slow
        whole = max(LEAST, transfer + RETRIED_FOR)
        return Timeouts(
            piece=piece,
            tensor_streaming_per_request_timeout=request,
            tensor_min_download_timeout=2 * RETRIED_FOR + request,
            get_task_timeout=request,
            submit_task_result_timeout=whole,
            task_timeout=math.ceil(training + 2 * whole),
            grace=max(60.0, 2 * transfer),
        )

    def transfers(self) -> dict[str, float]:
        """What server and sites need at the top level of their configuration."""
        names = ("tensor_streaming_per_request_timeout", "tensor_min_download_timeout")
        sizes = {SETTING: self.piece, "tensor_download_chunk_size": self.piece}  # of small tensors together
        return sizes | {name: getattr(self, name) for name in names}

    def of_site(self) -> dict[str, float]:
        """What a site needs at the top level of its configuration."""
        return self.transfers() | {
            "get_task_timeout": self.get_task_timeout,
            "submit_task_result_timeout": self.submit_task_result_timeout,
        }


def model_bytes(experiment: Experiment) -> int:
    """The size of the model that travels; it is built with random weights, unless its towers are frozen."""
    frozen = getattr(experiment.model, "adapters", "")
    with warnings.catch_warnings():  # without its tokenizer the model is as large
        warnings.filterwarnings("ignore", message=".*no vocabulary at hand")
        model = (experiment.model if frozen else replace(experiment.model, pretrained=False)).build(0)
    state = named_state(model, experiment.objective.build(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
