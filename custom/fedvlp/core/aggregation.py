"""What the server does with updates: check each one, shorten it if asked to, and average them as they stream in.

One update is resident at a time beside the accumulator. Updates are folded in site-name order, so the result does
not depend on the order of arrival: in float64 for models up to ``EXACT_NUMEL`` values, in float32 beyond.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedvlp.core.types import Broadcast, Reply, State, Update, is_statistic

logger = logging.getLogger(__name__)

EXACT_NUMEL = 16_000_000
"""Up to this many values the mean is accumulated in float64 (128 MB); beyond, in float32 in a fixed order."""

PARK_BYTES = 64_000_000
"""An update that arrives before its turn waits in memory up to this size, beyond on disk."""

LARGEST_METRIC = 1e12
"""A reported loss or recall beyond this is nonsense that would overflow statistics over sites."""

BLOCK = 1 << 15
"""Values of a small model that are widened and added at a time: they stay in the cache, on one thread."""


def check(
    update: Update,
    *,
    site: str,
    round: int,
    phase: str,
    reference: Mapping[str, Tensor],
    max_samples: int,
    aux: Mapping[str, Tensor] | None = None,
) -> str | None:
    """Why this reply must be dropped, or None. ``reference`` and ``aux`` hold exactly the tensors that it must carry.

    FLARE itself lets NaN through, broadcasts a (1,) tensor into (3,) and counts 0 or negative samples as 1.
    """
    if update.site != site:
        return f"it names another site than the channel it came through (expected {site})"
    if (update.round, update.phase) != (round, phase):
        return f"it is for round {update.round} phase {update.phase!r}, expected round {round} phase {phase!r}"
    samples = update.num_samples
    if isinstance(samples, bool) or not isinstance(samples, int) or not 0 <= samples <= max_samples:
        return f"num_samples is {samples!r}, expected a whole number from 0 to {max_samples:,}"
    for name, value in update.metrics.items():
        if not isinstance(value, (int, float)) or not abs(value) <= LARGEST_METRIC:
            return f"metric {name!r} is {str(value)[:20]}, expected a finite number up to {LARGEST_METRIC:g}"
    return check_tensors(update.state, reference) or check_tensors(update.aux, aux or {})


def check_tensors(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Why ``state`` does not have exactly the names, shapes and dtypes of ``reference`` with finite values, or None."""
    for label, names in (("missing", reference.keys() - state.keys()), ("unexpected", state.keys() - reference.keys())):
        if names:
            listed = ", ".join(sorted(map(str, names))[:3])
            return f"{len(names)} {label} tensor(s), e.g. {listed}"
    for name, expected in reference.items():
        seen = state[name]  # once: what waits on disk is read, and decoded, whenever it is asked for
        if not isinstance(seen, Tensor):
            return f"{name} is a {type(seen).__name__}, expected a tensor"
        if seen.shape != expected.shape or seen.dtype != expected.dtype:
            return f"{name} is {tuple(seen.shape)} {seen.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        problem = _check_values(name, seen)
        if problem:
            return problem
    return None


def _check_values(name: str, tensor: Tensor) -> str | None:
    """Counts NaN and infinite values, refuses a negative running variance, which makes every output NaN; or None."""
    # A finite sum proves every value finite in one read; only an infinite sum needs the exact count.
    if tensor.is_floating_point() and not math.isfinite(tensor.sum().item()):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            return f"{name} has {bad} value(s) that are NaN or infinite"
    if name.endswith(".running_var") and bool((tensor < 0).any()):
        return f"{name} has a negative variance"
    return None


@torch.no_grad()
def update_norm(state: Mapping[str, Tensor], reference: Mapping[str, Tensor], running: bool = False) -> float:
    """L2 norm of the change from ``reference`` to ``state``, over the weights that both have.

    With ``running`` over the running statistics of batch normalisation instead, which are of another size.
    """
    squares = 0.0
    for name in _moved(state, reference, running):
        for new, old in _blocks(state[name], reference[name]):
            squares += float((new.double() - old).square().sum())
    return math.sqrt(squares)


def _moved(state: Mapping[str, Tensor], reference: Mapping[str, Tensor], running: bool) -> list[str]:
    """Names of the floating-point tensors that both have, statistics or weights."""
    both = sorted(state.keys() & reference.keys())
    return [name for name in both if reference[name].is_floating_point() and is_statistic(name) == running]


def clipped(
    updates: Iterable[Update], reference: Mapping[str, Tensor], times: float, spool: Path | None = None
) -> Iterator[Update]:
    """The updates, a change longer than ``times`` the median over sites shortened to that, its direction kept.

    Norm bounding (Sun et al., 2019, https://arxiv.org/abs/1911.07963), the bound taken from the round itself. Weights
    and running statistics have a median each: the lower one, of changes that are not zero. As long as at most half of
    the sites that trained send nonsense, each moves a mean by its share of ``times`` an honest site's change. The
    medians are known when all updates have come; until then they wait, in memory up to ``PARK_BYTES`` each, beyond in
    the folder ``spool``.
    """
    waiting = []
    for update in updates:
        state, aux = ({name: t.clone() for name, t in part.items()} for part in (update.state, update.aux))
        own = replace(update, state=state, aux=aux)  # a site in this process trains on in the tensors that it sent
        norms = tuple(update_norm(state, reference, running) for running in (False, True))
        waiting.append((norms, cast("Callable[[], Update]", _parked(own, spool))))
        del update, own, state, aux
    limits = [times * _median(norms) for norms in zip(*(norms for norms, _ in waiting), strict=True)]
    while waiting:
        norms, back = waiting.pop(0)
        update = back()
        for norm, limit, running in zip(norms, limits, (False, True), strict=True):
            if norm > limit:
                what = "running statistics" if running else "weights"
                logger.warning("%s: its change of %s, %.3g long, is shortened to %.3g", update.site, what, norm, limit)
                names = _moved(update.state, reference, running)
                short = {name: torch.lerp(reference[name], update.state[name], limit / norm) for name in names}
                update = replace(update, state=update.state | short)
        yield update
        del update


def _median(norms: Iterable[float]) -> float:
    """The lower median of those that are not zero."""
    return statistics.median_low([norm for norm in norms if norm > 0] or [0.0])


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
            for total, values in _blocks(accumulator, state[name]):
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
        correction = 1.0 / (self.total * self._scale)
        if correction != 1.0:
            for accumulator in self._sum.values():
                accumulator.mul_(correction)
        return dict(self._sum)

    def _divided(self, name: str, accumulator: Tensor) -> Tensor:
        mean = torch.empty(accumulator.shape, dtype=self._reference[name].dtype)
        for values, total in _blocks(mean, accumulator):
            values.copy_(total.div_(self.total))
        return mean


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The values of tensors of one shape, side by side, at most ``BLOCK`` at a time."""
    return zip(*(tensor.reshape(-1).split(BLOCK) for tensor in tensors), strict=True)


def in_site_order(
    replies: Iterable[tuple[str, Reply]], sites: Sequence[str], spool: Path | None = None
) -> Iterator[tuple[str, Reply]]:
    """Yields (site, reply) in the order of ``sites``, each as soon as all before it have come; early ones wait.

    Only a site's first reply counts, and none of a stranger. An update beyond ``PARK_BYTES`` waits on disk in the
    folder ``spool``, so that one update is resident at a time whoever is slow.
    """
    waiting: dict[str, Callable[[], Reply]] = {}
    pending = list(sites)
    for site, reply in replies:
        if site in pending and site not in waiting:
            waiting[site] = _parked(reply, spool if site != pending[0] else None)
        del reply
        while pending and pending[0] in waiting:
            first = pending.pop(0)
            yield first, waiting.pop(first)()
    for site in pending:
        if site in waiting:
            yield site, waiting.pop(site)()


def _parked(reply: Reply, spool: Path | None) -> Callable[[], Reply]:
    """Puts a reply aside; calling the result brings it back, its tensors mapped from disk if they are there."""
    if spool is None or isinstance(reply, Exception) or not isinstance(reply.state, dict):
        return lambda: reply  # a view of the disk needs no parking
    if payload(reply) < PARK_BYTES:
        return lambda: reply
    spool.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=spool, suffix=".safetensors")
    os.close(handle)
    tensors = {f"{part}/{n}": t for part in ("state", "aux") for n, t in getattr(reply, part).items()}
    save_file({n: t.detach().contiguous() for n, t in tensors.items()}, name)
    bare = replace(reply, state={}, aux={})

    def back() -> Reply:
        parts: dict[str, State] = {"state": {}, "aux": {}}
        for key, tensor in load_file(name).items():
            part, _, rest = key.partition("/")
            parts[part][rest] = tensor
        os.unlink(name)
        return replace(bare, state=parts["state"], aux=parts["aux"])

    return back


def payload(message: Broadcast | Update) -> int:
    """Bytes of the tensors in a message, read one by one; what else a reply may hold is for :func:`check` to refuse."""
    values = (value for part in (message.state, message.aux) for value in part.values())
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, Tensor))
