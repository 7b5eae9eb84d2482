"""SCAFFOLD (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378): corrects every gradient for a site's drift."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedvlp.core.aggregation import MEAN, Aggregator
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import CHANGE, EVALUATE, KEPT, Broadcast, Expected, State, Update, is_statistic, with_prefix
from fedvlp.core.validate import require

CONTROL, COUNTED, SHARE = "control/", "counted/round", "counted/share"
"""In the server's memory: c; and float64 [N], of each site, the last round whose change is in c, -1 before any, and the
share of that change that is."""

OWN, NEXT, NEXT_ROUND, SUM, STEPS = "own/", "next/", "next_round", "sum/", "steps"
"""In a site's memory: c_i and c_i+, the round of c_i+; during a phase the sum of the raw gradients, and K so far."""

LAST = "counted_round"
"""The scalar of a broadcast beside ``KEPT``: the last round whose change of this site is in c."""


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Algorithm 1 with option II and a global step size of 1, in the paper's symbols, and the hook that does each line.

    x: the model; y_i: that of site i; g: the gradient of a batch; c, c_i: control variates of the server and of site i,
    0 at first; S: the sites that answer, of N. A round:

    1. The server sends x and c (``broadcast``).
    2. Site i takes K steps from y_i = x, each with g - c_i + c in the place of g (``after_backward``).
    3. c_i+ <- the mean of g over the K steps; the site sends y_i and c_i+ - c_i; c_i <- c_i+ (``upload``).
    4. Server: x <- x + mean_S(y_i - x), c <- c + 1/N sum_S(c_i+ - c_i) (``ControlledMean``).

    What leaves a site: its model, and the change of its control variate, a mean gradient of as many values. In its
    first round that change is c_i+ itself, so c_i is no secret from the server; other sites see the mean c alone. Noise
    for differential privacy does not cover it: a site with that filter refuses. It travels in float32, whatever the
    wire's codecs do to the model, so a round of plain wires has twice FedAvg's bytes each way.

    In round 0, and with one site, this is FedAvg with uniform weights, bit for bit.
    Differs: c_i+ is the mean of the gradients themselves. Under plain SGD it is the paper's
    c_i - c + (x - y_i) / (K eta); under AdamW that would be a step and no gradient. Running statistics, and parameters
    that no loss at a site reaches, are not corrected. The server says of which round it counted a site's change last,
    and how much of it, and the site takes back what never arrived and what ``rounds.clip_to_median`` shortened: so c
    is the mean of all c_i, as line 4 wants it, though replies are lost. A trimmed mean or a median of the changes would
    move c away from it for good, so another ``rounds.averaging`` than the mean is refused.
    """

    weighting: str = "uniform"  # line 4: the plain mean over S, as that of c

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.weighting == "uniform",
            f"weighting is {self.weighting!r}; SCAFFOLD's control variates are plain means over the sites: uniform",
        )

    def refuse_settings(self, experiment: Any) -> None:
        average = experiment.rounds.averaging
        require(
            average == MEAN,
            f"rounds.averaging is {average}: SCAFFOLD's c must be the mean of all c_i, and under another average its "
            "corrections turn against the sites; set mean, or take another method, e.g. FedAvg",
        )

    def controlled(self, server: Server) -> State:
        """The tensors of the model that have a control variate: all weights that travel."""
        controlled = {}
        for name, tensor in server.state.items():
            if tensor.is_floating_point() and not is_statistic(name) and self.shares(name, "train"):
                controlled[name] = tensor
        return controlled

    # Server half
    def start(self, server: Server) -> None:
        server.memory |= {CONTROL + name: torch.zeros_like(t) for name, t in self.controlled(server).items()}
        server.memory[COUNTED] = torch.full((len(server.sites),), -1.0, dtype=torch.float64)
        server.memory[SHARE] = torch.ones(len(server.sites), dtype=torch.float64)

    def broadcast(self, server: Server, site: str) -> Broadcast:
        message = super().broadcast(server, site)
        if server.phase == EVALUATE:
            return message
        control = {name: server.memory[CONTROL + name] for name in self.controlled(server)}
        index = server.sites.index(site)
        counted = {LAST: float(server.memory[COUNTED][index]), KEPT: float(server.memory[SHARE][index])}
        return replace(message, aux=control, scalars=message.scalars | counted)  # line 1

    def expects(self, server: Server, site: str) -> Expected:
        expected = super().expects(server, site)
        return replace(expected, state=expected.state | with_prefix(CHANGE, self.controlled(server)))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return ControlledMean(self, server, super().aggregator(server, phase))

    # Site half
    def receive(self, client: Client, message: Broadcast) -> None:
        """Settles which c_i the server counts: after the last training, before it, or between, if it was shortened."""
        super().receive(client, message)
        if message.phase == EVALUATE:
            return
        # Did the change of the last training get into c? All of it, a part (clipping), or none (the reply was lost).
        memory, zeros = client.memory, {name: torch.zeros_like(t) for name, t in message.aux.items()}
        arrived = NEXT_ROUND in memory and float(memory[NEXT_ROUND]) == message.scalars[LAST]
        share = message.scalars[KEPT] if arrived else 0.0
        own = {}
        for name, zero in zeros.items():
            before, after = memory.get(OWN + name, zero), memory.get(NEXT + name, zero)
            own[name] = torch.lerp(before, after, share)  # 0 and 1 give them exactly
        client.memory = with_prefix(OWN, own) | with_prefix(SUM, zeros) | {STEPS: torch.zeros((), dtype=torch.float64)}

    def after_backward(self, client: Client, message: Broadcast) -> None:
        memory = client.memory
        memory[STEPS] += 1
        for name, parameter in client.trainable():
            if parameter.grad is None or name not in message.aux:
                continue
            memory[SUM + name] += parameter.grad  # line 3
            # c - c_i first: it is exactly 0 in round 0 and with one site
            parameter.grad += message.aux[name] - memory[OWN + name]  # line 2

    def upload(self, client: Client, message: Broadcast) -> State:
        memory, steps = client.memory, float(client.memory[STEPS])
        own = {name: memory[OWN + name] for name in message.aux}
        change = {name: torch.zeros_like(control) for name, control in own.items()}
        if steps:  # a site without records keeps its c_i
            change = {name: memory[SUM + name] / steps - control for name, control in own.items()}  # line 3
        # What is kept is what was sent: c_i + change, and not the mean itself, from which it differs by rounding.
        after = {name: control + change[name] for name, control in own.items()}
        last = torch.tensor(float(message.round), dtype=torch.float64)
        client.memory = with_prefix(OWN, own) | with_prefix(NEXT, after) | {NEXT_ROUND: last}
        return super().upload(client, message) | with_prefix(CHANGE, change)


class ControlledMean:
    """FedAvg's mean, and the control variate of the server, moved by the changes of those of the sites."""

    def __init__(self, method: SCAFFOLD, server: Server, mean: Aggregator) -> None:
        self._method = method
        self._server = server
        self._mean = mean
        self._controlled = method.controlled(server)
        self._change = server.mean(with_prefix(CHANGE, self._controlled))
        self._kept: dict[str, float] = {}  # of the sites that answered, the share of their change that is left

    def add(self, update: Update) -> None:
        self._mean.add(update)
        weight = self._method.weight(self._server, update)
        self._change.add(update.state, weight)
        if weight:
            self._kept[update.site] = update.scalars.get(KEPT, 1.0)

    def commit(self) -> None:
        server = self._server
        self._mean.commit()  # line 4: x
        change = self._change.result()
        if not change:
            return
        # What is told to the sites in the next round: when each counted last, and how much of it.
        answered = [server.sites.index(site) for site in self._kept]
        counted, share = server.memory[COUNTED].clone(), server.memory[SHARE].clone()
        counted[answered] = float(server.round)
        share[answered] = torch.tensor(list(self._kept.values()), dtype=torch.float64)
        # Line 4 for c: the change is a mean over S, and the sum over S is divided by N.
        fraction = len(answered) / len(server.sites)  # |S| / N
        moved = {COUNTED: counted, SHARE: share}
        for name in self._controlled:
            moved[CONTROL + name] = server.memory[CONTROL + name] + fraction * change[CHANGE + name]
        server.memory |= moved
