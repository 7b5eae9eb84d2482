"""Several processes that train one site's model together (torchrun): rows, gradients and messages between them.

Every process holds the whole model and draws the same batches, of which it reads the images that it trains on. Rank 0
speaks for all; without torchrun it is alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedvlp.core.types import State

PATIENCE = timedelta(minutes=15)
"""How long one waits for another before it gives up, e.g. for rank 0 to write a checkpoint."""


def join() -> None:
    """Under torchrun, makes this process one of several: NCCL between GPUs, gloo between CPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=PATIENCE)


def leave() -> None:
    """Ends what :func:`join` began. A process whose threads still wait for others as it exits is killed by a signal."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def together() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Which one it is, from 0."""
    return dist.get_rank() if together() else 0


def processes() -> int:
    """How many processes train together, this one included."""
    return dist.get_world_size() if together() else 1


def my_rows(total: int, least: int) -> slice:
    """This process's share of ``total`` rows. Raises ValueError where a share would have fewer than ``least``."""
    count = dist.get_world_size()
    if total < least * count:
        raise ValueError(
            f"a batch of {total} records for {count} processes; each needs at least {least}: raise "
            "training.batch_size, or start fewer processes at this site"
        )
    return slice(total * rank() // count, total * (rank() + 1) // count)


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    """Replaces tensors of one device by their means over the processes, in one exchange per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(mean.view_as(tensor))


BUCKET = 25 * 2**20
"""Bytes of gradients that are exchanged at a time."""


class MeansInBackward:
    """Gradients become their means over the processes while the backward pass runs, a bucket at a time.

    The gradients of the last layers are complete first and travel while those of the first are computed. Processes
    exchange the buckets in one fixed order, whichever is complete first, since each has to answer the same question.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._buckets: list[list[nn.Parameter]] = []
        room = 0
        # Buckets from the last layer to the first: the order in which a backward pass completes gradients.
        for parameter in reversed(list(parameters)):
            if not self._buckets or parameter.nbytes > room or parameter.dtype != self._buckets[-1][-1].dtype:
                self._buckets.append([])
                room = BUCKET
            self._buckets[-1].append(parameter)
            room -= parameter.nbytes
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[int] = []
        self._sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self._next = len(self._buckets)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside of it, backward passes between :meth:`begin` and :meth:`finish` are noticed."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket] if together() else []
        handles = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """The next backward pass completes the gradients."""
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0

    def finish(self) -> None:
        """Every gradient is the mean. Parameters without one have none at any process."""
        while self._next < len(self._buckets):
            self._send()
        with torch.no_grad():
            for bucket, flat, exchange in self._sent:
                exchange.wait()
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    assert parameter.grad is not None
                    parameter.grad.copy_(mean.view_as(parameter.grad))
        self._sent.clear()

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._next == len(self._buckets):
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        # In the order of the buckets: a later one that is complete waits for those before it.
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = [parameter for parameter in self._buckets[self._next] if parameter.grad is not None]
        self._next += 1
        if bucket:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None])
            self._sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


class _Gather(torch.autograd.Function):
    """This process's rows [b, ...] -> the rows of all [B, ...].

    All processes compute the same loss of all rows, so the gradient of a tower's weights is the sum of their shares;
    ``average`` makes means, hence the factor.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, rows: slice, total: int) -> Tensor:
        ctx.rows = rows
        whole = mine.new_zeros(total, *mine.shape[1:])
        whole[rows] = mine
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.rows] * dist.get_world_size(), None, None


def gather(mine: Tensor, rows: slice, total: int) -> Tensor:
    """The rows of all processes [total, ...] from this one's ``rows``, with gradient."""
    if mine.dtype == torch.bool:
        return gather(mine.byte(), rows, total).bool()
    return _Gather.apply(mine, rows, total)


def tell(content: Any, tensors: State) -> tuple[Any, State]:
    """Rank 0's JSON-able ``content`` and named ``tensors`` (on the CPU), at every rank; others' are ignored."""
    described = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
    # First how long the description is, then the description, then each tensor that it names.
    letters = torch.frombuffer(bytearray(json.dumps([content, described]).encode()), dtype=torch.uint8)
    size = torch.tensor([len(letters)])
    dist.broadcast(size, 0)
    letters = letters if rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(letters, 0)
    content, described = json.loads(letters.numpy().tobytes())
    received: State = {}
    for name, dtype, shape in described:
        mine = tensors[name].contiguous() if rank() == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(mine, 0)
        received[name] = mine
    return content, received
