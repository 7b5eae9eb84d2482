"""What the server does with updates that passed the gate: shortens them if asked to, averages them as they stream in.

One update is resident at a time beside the accumulator. Updates are folded in site-name order, so the result does
not depend on the order of arrival: in float64 for models up to ``EXACT_NUMEL`` values, in float32 beyond.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from fedvlp.core.change import BESIDE, BLOCK, EXACT_NUMEL, KINDS, Norms, change_norms, kind_of
from fedvlp.core.tensor_file import Spool
from fedvlp.core.types import KEPT, TENSORS, Broadcast, Failure, LazyState, Reply, State, Update, total_size
from fedvlp.core.validate import require

if TYPE_CHECKING:
    from fedvlp.core.server_state import Server


# Averages of states that a minority of sites cannot spoil, value by value: the trimmed mean and the median.
#
# Yin et al., 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
# https://arxiv.org/abs/1803.01498, definitions 1 (median) and 2 (trimmed mean).

MEAN, TRIMMED, MEDIAN = AVERAGES = ("mean", "trimmed", "median")

VALUES = 1 << 15
"""Values of one tensor that are sorted at a time, each over all sites."""

ROUNDING = 1e-9
"""0.29 of 100 sites are 29: the product as a float is a little less."""


class Mean(Protocol):
    """Folds states into one, each with its weight."""

    def add(self, state: Mapping[str, Tensor], weight: float) -> None: ...

    def result(self) -> State: ...


@dataclass(frozen=True)
class Averaging:
    """How several states become one: ``kind`` is mean, trimmed or median; ``trim`` is that of the trimmed mean.

    States that must wait for the others do so in the folder ``spool``, if they are large. Raises ValueError for values
    outside of their range.
    """

    kind: str = MEAN
    trim: float = 0.2  # share of the sites whose values are left out at each end, 0 to below 0.5; 0 is the mean
    spool: Path | None = None

    def __post_init__(self) -> None:
        require(self.kind in AVERAGES, f"averaging is {self.kind!r}; choose one of {', '.join(AVERAGES)}")
        require(0 <= self.trim < 0.5, f"trim is {self.trim}; the share that is left out at each end is below a half")

    @property
    def robust(self) -> bool:
        """Whether it is another average than the mean; so it is not where nothing is trimmed."""
        return self.kind == MEDIAN or (self.kind == TRIMMED and self.trim > 0)

    def begin(self, reference: State, expected_weight: float = 1.0, spare: State | None = None) -> Mean:
        """An empty average of tensors as in ``reference``; the other arguments are those of ``StreamingMean``."""
        if not self.robust:
            return StreamingMean(reference, expected_weight, spare)
        return SortedMean(reference, 0.5 if self.kind == MEDIAN else self.trim, self.spool)


class SortedMean:
    """Coordinate-wise trimmed mean, in float64.

    Of n sites with a weight above 0, floor(``trim`` n) are left out at each end: at least one, as long as one or two
    are left. A weight buys no place in the list, so what n_k a site claims does not decide whose values are left out.
    As long as no more sites send nonsense than are left out at one end, every value of the result lies between honest
    ones.

    Trimmed mean: those that are left count by their weights, so that trimming nothing is FedAvg's mean. Differs from
    definition 2, which has no weights: with equal ones it is the same.
    Median (``trim`` 0.5): the value in the middle, or half the sum of the two; weights above 0 do not matter.
    """

    def __init__(self, reference: State, trim: float, spool: Path | None = None) -> None:
        self._reference = {name: t for name, t in reference.items() if t.is_floating_point()}
        self._trim = trim
        self._spool = Spool(spool)
        self._states: list[Callable[[str], Tensor]] = []
        self._weights: list[float] = []

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Keeps a copy of ``state`` until all have come; a weight of 0 adds nothing."""
        if weight == 0:
            return
        self._states.append(self._spool.put({name: state[name].detach() for name in self._reference}))
        self._weights.append(weight)

    @torch.no_grad()
    def result(self) -> State:
        """The average, in the dtypes of the reference; empty when nothing was added (keep what you have)."""
        if not self._states:
            return {}
        return {name: self._of(name, like) for name, like in self._reference.items()}

    def _of(self, name: str, like: Tensor) -> Tensor:
        """One tensor of the result. Of one tensor at a time the values of all sites are in memory."""
        result = torch.empty(like.shape, dtype=like.dtype)
        chunks = [state(name).reshape(-1).split(VALUES) for state in self._states]
        for values, *sites in zip(result.reshape(-1).split(VALUES), *chunks, strict=True):
            values.copy_(self._middle(torch.stack([chunk.double() for chunk in sites])))  # [n, values]
        return result

    def _middle(self, values: Tensor) -> Tensor:
        """[n, v] float64, one row a site, to [v]."""
        count = len(values)
        cut = left_out(count, self._trim)
        ordered, sites = values.sort(dim=0, stable=True)
        middle = ordered[cut : count - cut]
        if self._trim == 0.5:
            return middle.mean(dim=0)
        weights = torch.tensor(self._weights, dtype=torch.float64)[sites[cut : count - cut]]
        return (middle * weights).sum(dim=0) / weights.sum(dim=0)


def left_out(count: int, trim: float) -> int:
    """How many of ``count`` sites are left out at each end."""
    return min(max(1, math.floor(trim * count + ROUNDING)), (count - 1) // 2)


logger = logging.getLogger(__name__)


def bounded(
    updates: Iterable[Update],
    reference: Callable[[str], Mapping[str, Tensor]],
    *,
    times: float = 0.0,
    share: float = 1.0,
    spool: Path | None = None,
    norms: Callable[[Update], Norms] | None = None,
) -> Iterator[Update]:
    """The updates, none of which can do more than its part: in how far it moves the model, and in what it weighs.

    A change is measured from the model that the site was sent, its ``reference``. Longer than ``times`` the median over
    sites it is shortened to that, its direction kept; 0 shortens none. This is norm bounding (Sun et al., 2019,
    https://arxiv.org/abs/1911.07963), the bound taken from the round itself.
    Weights, running statistics and changes beside the model (``CHANGE``) have a median each: the lower one, of changes
    that are not zero. As long as at most half of the sites that trained send nonsense, each moves a mean by its share
    of ``times`` an honest site's change. ``norms`` says how long a change is, where that was measured before.
    Counts of samples above ``share`` of their sum are lowered (``capped_counts``).

    The medians and the sum are known when all updates have come; until then they wait in the folder ``spool``
    (core/tensor_file.py). A site in this process trains on in the tensors that it sent, so of those a copy waits.
    """
    waiting = []
    for update in updates:
        lengths = (norms(update) if norms else change_norms(update.state, reference(update.site))) if times else {}
        waiting.append((lengths, update.num_samples, _set_aside(update, spool, copied=True)))
        del update
    limits = {kind: times * _median(lengths.get(kind, 0.0) for lengths, *_ in waiting) for kind in KINDS}
    counts = capped_counts([samples for _, samples, _ in waiting], share)
    while waiting:
        lengths, samples, back = waiting.pop(0)
        update, count = cast("Update", back()), counts.pop(0)
        if count < samples:
            logger.warning("%s: its %d samples count as %d: max_share is %g", update.site, samples, count, share)
            update = replace(update, num_samples=count)
        long = {kind: norm for kind, norm in lengths.items() if norm > limits[kind]}
        for kind, norm in long.items():
            limit = limits[kind]
            logger.warning("%s: its change of %s, %.3g long, is shortened to %.3g", update.site, kind, norm, limit)
        if long:
            update = _shortened(
                update, reference(update.site), {kind: limits[kind] / norm for kind, norm in long.items()}
            )
        yield update
        del update


@torch.no_grad()
def _shortened(update: Update, reference: Mapping[str, Tensor], factors: Mapping[str, float]) -> Update:
    """The update with its changes ``factors[kind]`` times as long, by kind; a view stays one."""

    def made(name: str) -> Tensor:
        tensor, kind = update.state[name], kind_of(name, reference)
        if kind is None or kind not in factors:
            return tensor
        factor = factors[kind]
        return tensor * factor if kind == BESIDE else torch.lerp(reference[name], tensor, factor)

    lazy = LazyState(update.state, made)
    state = dict(lazy) if isinstance(update.state, dict) else cast("State", lazy)
    share_left = {KEPT: factors[BESIDE]} if BESIDE in factors else {}
    return replace(update, state=state, scalars=update.scalars | share_left)


def capped_counts(counts: Sequence[int], share: float) -> list[int]:
    """The counts, the largest ones lowered until none is above ``share`` of their sum; the others stay.

    Of fewer than three sites with samples one always has half or more, so nothing is lowered. Where so few sites are
    there that one of them must be above ``share``, all count alike.
    """
    largest = sorted((count for count in counts if count), reverse=True)
    if share >= 1 or len(largest) < 3:
        return list(counts)
    for capped in range(len(largest)):
        rest = 1 - capped * share  # the part of the sum that the sites below the limit have, at least
        limit = math.floor(share * sum(largest[capped:]) / rest) if rest > 0 else 0
        if limit < largest[-1]:
            break  # so few sites that one must be above
        if largest[capped] <= limit:
            return [min(count, limit) for count in counts]
    return [min(count, largest[-1]) for count in counts]


def _median(norms: Iterable[float]) -> float:
    """The lower median of those that are not zero."""
    return statistics.median_low([norm for norm in norms if norm > 0] or [0.0])


class Aggregator(Protocol):
    """Folds the updates of one phase into the server's state and memory.

    The federation gives it every checked update, in site order, and then lets it commit. It owns their lifetime: one
    update is resident at a time, so ``add`` keeps no tensor of an update (a copy, if it must). When the quorum is lost,
    ``commit`` is not called, and the server's state and memory are put back as they were.
    """

    def add(self, update: Update) -> None:
        """Folds one update in."""
        ...

    def commit(self) -> None:
        """Changes the server's state and memory by what was added."""
        ...


class MeanAggregator:
    """FedAvg's: the weighted mean of the tensors of ``reference`` goes into ``server.state``."""

    def __init__(
        self, server: Server, reference: State, weight: Callable[[Server, Update], float], expected_weight: float
    ) -> None:
        self._server = server
        self._weight = weight
        self._mean = server.mean(reference, expected_weight, server.spare)

    def add(self, update: Update) -> None:
        self._mean.add(update.state, self._weight(self._server, update))

    def commit(self) -> None:
        self._server.replace(self._mean.result())


class StreamingMean:
    """A weighted mean of states, folded one update at a time.

    A small model's is sum(w x) / sum(w) in float64, block by block in the cache. For a large one ``expected_total`` is
    the weight the whole cohort is thought to have: when it is right, no second pass over the accumulator is needed.
    ``spare`` lends tensors of an earlier round to accumulate in (large models only).
    """

    def __init__(self, reference: State, expected_total: float = 1.0, spare: State | None = None) -> None:
        self._reference = {name: t for name, t in reference.items() if t.is_floating_point()}
        self._exact = sum(t.numel() for t in self._reference.values()) <= EXACT_NUMEL
        self._scale = 1.0 / expected_total if expected_total > 0 and not self._exact else 0.0
        self._spare = spare or {}
        self._sum: State = {}
        self.total = 0.0

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Adds ``weight * state``; a weight of 0 adds nothing."""
        if weight == 0:
            return
        if self._exact:
            self._add_exactly(state, weight)
        else:
            # A large model is summed in float32 with weights that come to about 1.
            self._scale = self._scale or 1.0 / weight  # keeps the sum in float32's range
            self._add(state, weight * self._scale)
        self.total += weight

    def _add(self, state: Mapping[str, Tensor], factor: float) -> None:
        if self._sum:
            for name, accumulator in self._sum.items():
                accumulator.add_(state[name], alpha=factor)
        else:
            self._sum = {name: torch.mul(state[name], factor, out=self._buffer(name)) for name in self._reference}

    def _add_exactly(self, state: Mapping[str, Tensor], weight: float) -> None:
        first = not self._sum
        if first:
            self._sum = {name: torch.empty(t.shape, dtype=torch.float64) for name, t in self._reference.items()}
        wide = torch.empty(BLOCK, dtype=torch.float64)
        for name, accumulator in self._sum.items():
            for total, values in blocks(accumulator, state[name]):
                if first:
                    total.copy_(values).mul_(weight)
                else:
                    total.add_(wide[: len(values)].copy_(values), alpha=weight)

    def _buffer(self, name: str) -> Tensor:
        spare, like = self._spare.get(name), self._reference[name]
        usable = spare is not None and spare.shape == like.shape and spare.dtype == like.dtype
        return spare if usable and spare is not None else torch.empty_like(like)

    @torch.no_grad()
    def result(self) -> State:
        """The mean, in the dtypes of the reference; empty when the total weight is 0 (keep what you have)."""
        if self.total == 0:
            return {}
        if self._exact:
            return {name: self._divided(name, accumulator) for name, accumulator in self._sum.items()}
        # Exactly 1 where the expected total was right: then no second pass over the model.
        correction = 1.0 / (self.total * self._scale)
        if correction != 1.0:
            for accumulator in self._sum.values():
                accumulator.mul_(correction)
        return dict(self._sum)

    def _divided(self, name: str, accumulator: Tensor) -> Tensor:
        mean = torch.empty(accumulator.shape, dtype=self._reference[name].dtype)
        for values, total in blocks(mean, accumulator):
            values.copy_(total.div_(self.total))
        return mean


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The values of tensors of one shape, side by side, at most ``BLOCK`` at a time."""
    return zip(*(tensor.reshape(-1).split(BLOCK) for tensor in tensors), strict=True)


def in_site_order(
    replies: Iterable[tuple[str, Reply]], sites: Sequence[str], spool: Path | None = None
) -> Iterator[tuple[str, Reply]]:
    """Yields (site, reply) in the order of ``sites``, each as soon as all before it have come; early ones wait.

    Only a site's first reply counts, and none of an unknown site; the log names the others. A large update
    waits on disk in the folder ``spool``, so that one update is resident at a time whichever site is slow.
    """
    waiting: dict[str, Callable[[], Reply]] = {}
    pending = list(sites)
    for site, reply in replies:
        if site in pending and site not in waiting:
            waiting[site] = _set_aside(reply, spool if site != pending[0] else None, copied=False)
        else:
            what = "a second reply in one phase" if site in sites else "a reply of a site that was not asked"
            logger.warning("%s: %s is dropped", site, what)
        del reply
        # All that has come without a gap, in the order of the sites.
        while pending and pending[0] in waiting:
            first = pending.pop(0)
            yield first, waiting.pop(first)()
    for site in pending:
        if site in waiting:
            yield site, waiting.pop(site)()


def _set_aside(reply: Reply, spool: Path | None, *, copied: bool) -> Callable[[], Reply]:
    """Puts a reply aside; calling the result brings it back as it was.

    Nobody changes what a view reads, such as the file of another process or of a download: it stays where it is. What
    no file holds stays as well, and the gate will refuse it.
    """
    waits = copied or spool is not None
    if not waits or isinstance(reply, Failure) or not isinstance(reply.state, dict):
        return lambda: reply
    tensors = {f"{name}/{n}": t for name in TENSORS for n, t in getattr(reply, name).items()}
    if not all(map(_is_dense, tensors.values())):
        return lambda: reply
    # The tensors go to disk; what stays in memory is the reply without them.
    read, names = Spool(spool).put(tensors, copied=copied), list(tensors)
    bare = replace(reply, state={}, aux={})
    del tensors

    def back() -> Reply:
        fields: dict[str, State] = {"state": {}, "aux": {}}
        for key in names:
            field, _, rest = key.partition("/")
            fields[field][rest] = read(key)
        return replace(bare, state=fields["state"], aux=fields["aux"])

    return back


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def payload(message: Broadcast | Update) -> int:
    """Bytes of the tensors in a message; what else a reply may hold is for the gate to refuse."""
    return total_size(message.state) + total_size(message.aux)
