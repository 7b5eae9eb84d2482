"""The timeouts of a job with a large model on slow links, derived together from the two numbers that decide them.

They must fit each other, or the job dies in the known way: a site gives up a transfer that is still under way and asks
again, the server keeps both in memory, and so on until it has none left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedvlp.core.client import named_state
from fedvlp.core.validate import require
from fedvlp.run.experiment import Experiment

MARGIN = 3.0  # a link is slower at times than its owner believes
LEAST = 300.0  # seconds; FLARE's own default (communication_timeout, set by each site), below which nothing is gained
IDLE = 600.0  # seconds; FLARE's own default for a transfer that stands still


@dataclass(frozen=True)
class Timeouts:
    """All in seconds. One transfer of the model takes ``t``; each value bounds what the one before it may need.

    =================================== ==================== ==========================================================
    name                                where FLARE reads it what it bounds
    =================================== ==================== ==========================================================
    tensor_streaming_per_request_timeout server, site        one piece of a transfer (a tensor, or 2 MiB of small ones)
    tensor_min_download_timeout         server, site         the sender keeps a message for a receiver that is silent;
                                                             longer than a piece, or a repeated request finds nothing
    get_task_timeout                    site                 fetching one task, the whole model down
    submit_task_result_timeout          site                 handing in one result, the whole model up
    task_timeout                        controller, child    one task from being offered to its result: down, train, up
    grace                               controller           after the quorum has replied, what slower links may add
    =================================== ==================== ==========================================================

    ``communication_timeout`` belongs to each site's own configuration (default 300 s); fetching a task waits for the
    larger of it and ``get_task_timeout``, so a site needs to change nothing.
    """

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
        transfer = MARGIN * size * 8 / (link_mbit * 1e6)
        piece = max(IDLE, transfer)  # one tensor can be most of a model
        whole = max(LEAST, transfer + piece)  # a transfer that had to repeat a piece
        return Timeouts(
            tensor_streaming_per_request_timeout=piece,
            tensor_min_download_timeout=2 * piece,
            get_task_timeout=whole,
            submit_task_result_timeout=whole,
            task_timeout=math.ceil(training + 2 * whole),
            grace=max(60.0, 2 * transfer),
        )

    def transfers(self) -> dict[str, float]:
        """What server and sites need at the top level of their configuration."""
        names = ("tensor_streaming_per_request_timeout", "tensor_min_download_timeout")
        return {name: getattr(self, name) for name in names}

    def of_site(self) -> dict[str, float]:
        """What a site needs at the top level of its configuration."""
        return self.transfers() | {
            "get_task_timeout": self.get_task_timeout,
            "submit_task_result_timeout": self.submit_task_result_timeout,
        }


def model_bytes(experiment: Experiment) -> int:
    """The size of the model that travels; it is built with random weights, unless its towers are frozen."""
    frozen = getattr(experiment.model, "adapters", "")
    model = (experiment.model if frozen else replace(experiment.model, pretrained=False)).build(0)
    state = named_state(model, experiment.objective.build(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
