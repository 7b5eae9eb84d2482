"""The two ends of the wire: what goes down and up is encoded, what a site holds is left out, the bytes are counted.

Results do not depend on what was left out: a site that holds nothing (it is new, or lost its copy) is sent every tensor
and decodes the same bits. What the ends remember is versioned by task, so a repeated task sends the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedvlp.core.aggregation import payload
from fedvlp.core.method import Schedule
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update, with_prefix, without_prefix
from fedvlp.federation import codec
from fedvlp.federation.codec import SCALE, CodecError, Wire
from fedvlp.federation.site_memory import SiteMemory, task_of

LABEL = "wire/label"
"""In an end's memory: the label of the copy that it holds."""

HELD, MISSED, DIGEST = "held/", "missed", "digest/"
"""Beginnings of names in an end's memory: the copy, what 8-bit codes left out, hashes of what was encoded."""

Phases = Callable[[int], tuple[str, ...]]


class Exchange(Protocol):
    """Sends ``messages`` and yields (site, reply), each site at most once, in any order: best as they come."""

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]: ...


class Answering(Protocol):
    """A site (federation/site.py)."""

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = ...) -> Update: ...


class NotHeldError(SiteError, RuntimeError):
    """The site does not hold the copy that a broadcast changes; the server then sends everything."""

    kind = FailureKind.NOT_HELD


@dataclass(frozen=True)
class Copy:
    """What a site holds: a label, and the hash of every tensor of the model that it was made from."""

    label: int
    digests: dict[str, bytes]


@dataclass(frozen=True)
class Sent:
    """A model on its way down. ``base`` is what sites decode; ``codes`` are 8-bit changes to the copy ``on``."""

    base: State
    copy: Copy
    codes: State | None = None
    on: int = 0

    def to(self, held: Copy | None) -> tuple[int, State]:
        """The label of the copy to change, and the tensors to send to a site that holds ``held``."""
        # A site with no copy, or with another one than the 8-bit codes change, is sent everything.
        if held is None or (self.codes is not None and held.label != self.on):
            return 0, self.base
        changed = [name for name, value in self.copy.digests.items() if held.digests.get(name) != value]
        source = self.base if self.codes is None else self.codes
        return held.label, {key: source[key] for n in changed for key in (n, n + SCALE) if key in source}


class ServerEnd:
    """An exchange of models over an exchange of encoded messages. ``bytes`` are those of the last phase's tensors."""

    def __init__(self, wire: Wire, exchange: Exchange, phases: Phases, folder: Path | None = None) -> None:
        self.wire = wire
        self.bytes: dict[str, int] = {}
        self._exchange = exchange
        self._phases = phases
        self._memory = SiteMemory(folder / "sent" if folder else None)  # of 8-bit changes
        self._held: dict[str, Copy] = {}  # by site, as its last valid reply left it; after a restart all is sent again

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        self.bytes = {BYTES_DOWN: 0, BYTES_UP: 0}
        return self._replies(messages)

    def _replies(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        sent = self._prepare(messages)
        lost: list[str] = []
        for site, reply in self._exchange(self._outgoing(messages, sent)):
            if isinstance(reply, Update):
                reply = self._incoming(site, reply, sent[site], detach=bool(lost))
            elif self._held.pop(site, None) and reply.kind is FailureKind.NOT_HELD:
                # It is asked again below, once the others have answered.
                lost.append(site)
                continue
            yield site, reply
            del reply  # one update is resident at a time
        if lost:
            again = {site: messages[site] for site in lost}
            for site, reply in self._exchange(self._outgoing(again, sent)):
                yield site, self._incoming(site, reply, sent[site]) if isinstance(reply, Update) else reply

    def _prepare(self, messages: Mapping[str, Broadcast]) -> dict[str, Sent]:
        """What each site is to hold after this phase; sites that are sent one state share it."""
        states = {id(message.state): message for message in messages.values()}
        if self.wire.down == "int8" and len(states) > 1:
            raise ValueError("wire.down=int8 needs a method that sends all sites one model; choose bfloat16")
        made = {key: self._sent(message) for key, message in states.items()}
        return {site: made[id(message.state)] for site, message in messages.items()}

    def _sent(self, message: Broadcast) -> Sent:
        wire, state = self.wire, message.state
        if not wire.plain and any(tensor.dtype in codec.HALVES for tensor in state.values()):
            raise ValueError("the options of wire are for models in float32; this one has half precision tensors")
        if wire.down == "int8":
            return self._changes(message)
        base = state if wire.down == "float32" else {n: codec.cast(n, tensor, wire.down) for n, tensor in state.items()}
        digests = {name: digest(tensor) for name, tensor in state.items()} if wire.skip_unchanged else {}
        return Sent(base, Copy(label(digests), digests))

    def _changes(self, message: Broadcast) -> Sent:
        """8-bit changes to what was sent last; the first time, everything in bfloat16."""
        now, state = task_of(self._phases, message), message.state
        memory = own_memory(self._memory, now)
        base = without_prefix(memory, HELD)
        before = {name: bytes(hashed.tolist()) for name, hashed in without_prefix(memory, DIGEST).items()}
        digests = {name: digest(tensor) for name, tensor in state.items()}
        codes: State = {}
        if not base:
            base = {name: codec.cast(name, tensor, "bfloat16") for name, tensor in state.items()}
        for name, tensor in state.items():
            # Unchanged since it was sent last.
            if before.get(name, digests[name]) == digests[name]:
                continue
            if codec.coded(tensor):
                # ``quantise`` moves the base to what sites decode, so the next change makes up for what this one lost.
                base[name] = codec.widen(base[name])
                codes[name], codes[name + SCALE] = codec.quantise(tensor, base[name])
            else:
                base[name] = codes[name] = tensor
        on = int(memory[LABEL]) if memory else 0
        copy = Copy(label(digests), digests)
        hashes = {name: torch.tensor(list(value), dtype=torch.uint8) for name, value in digests.items()}
        self._memory.after(now, with_prefix(HELD, base) | with_prefix(DIGEST, hashes) | {LABEL: number(copy.label)})
        return Sent(base, copy, codes, on)

    def _outgoing(self, messages: Mapping[str, Broadcast], sent: Mapping[str, Sent]) -> dict[str, Broadcast]:
        encoded: dict[str, Broadcast] = {}
        shared: dict[tuple[int, int], State] = {}  # sites that hold the same are sent the same tensors
        for site, message in messages.items():
            on, state = sent[site].to(self._held.get(site))
            state = shared.setdefault((id(sent[site]), on), state)
            result = sent[site].copy.label if self.wire.skip_unchanged else 0
            encoded[site] = replace(message, state=state, copy_base=on, copy_label=result)
            self.bytes[BYTES_DOWN] += payload(encoded[site])
        return encoded

    def _incoming(self, site: str, update: Update, sent: Sent, detach: bool = False) -> Reply:
        """The decoded update; ``detach`` copies it, as it must wait for a site that is asked again."""
        try:
            self.bytes[BYTES_UP] += payload(update)
            state = update.state if self.wire.plain else codec.decode(update.state, sent.base, self.wire)
            if detach and isinstance(state, dict):  # not a view of the disk
                state = {name: t.clone() for name, t in state.items()}
        except Exception as error:  # garbage may be wrong in any way, and costs its site this phase, not the run
            self._held.pop(site, None)
            why = str(error) if isinstance(error, CodecError) else f"its tensors raise {type(error).__name__}"
            return Failure(FailureKind.UNREADABLE, why)
        if self.wire.skip_unchanged:
            self._held[site] = sent.copy
        return replace(update, state=state)


@dataclass
class _Task:
    """What a site keeps from the broadcast until its update: what it received, and what it will remember."""

    key: tuple[int, int]
    base: State
    missed: State = field(default_factory=dict)  # of every model, by its name in the memory
    memory: State = field(default_factory=dict)


class SiteEnd:
    """Decodes a site's broadcasts and encodes its updates; ``memory`` is apart from the method's."""

    def __init__(self, wire: Wire, method: Schedule, memory: SiteMemory) -> None:
        self.wire = wire
        self._method = method
        self._phases = method.phases
        self._memory = memory
        self._task: _Task | None = None

    def decode(self, message: Broadcast) -> Broadcast:
        """The broadcast as the method knows it. Raises NotHeldError, CodecError."""
        key = task_of(self._phases, message)
        wire, on = self.wire, message.copy_base
        memory = own_memory(self._memory, key) if wire.skip_unchanged or wire.up == "int8" else {}
        held = without_prefix(memory, HELD) if on else {}
        _refuse_other_copy(memory, on)
        came = message.state
        for name, tensor in came.items():
            # An 8-bit change of the copy, or a whole tensor; the scales are read with their codes.
            if name + SCALE in came and name in held:
                held[name] = codec.changed(name, tensor, came[name + SCALE], codec.widen(held[name]))
            elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in held):
                held[name] = tensor
        state = {name: codec.widen(tensor) for name, tensor in held.items()}
        remembered = with_prefix(HELD, held) | {LABEL: number(message.copy_label)} if wire.skip_unchanged else {}
        missed = {name: tensor for name, tensor in memory.items() if name.startswith(MISSED)}
        self._task = _Task(key, state, missed, remembered)
        return replace(message, state=state, copy_base=0, copy_label=0)

    def encode(self, update: Update) -> Update:
        """The update for the way up; what the next task needs is kept from now on."""
        current, self._task = self._task, None
        if current is None or current.key != task_of(self._phases, update):
            raise CodecError("the update belongs to no broadcast that was received")
        # What 8-bit codes left out of this update goes into the next one of the same model.
        own = self._missed(update.phase)
        missed = without_prefix(current.missed, own)
        state = codec.encode(update.state, current.base, self.wire, missed)
        memory = current.memory | current.missed | with_prefix(own, missed)
        if memory:
            self._memory.after(current.key, memory)
        return replace(update, state=state)

    def _missed(self, phase: str) -> str:
        """What the names begin with of what codes left out of the model that ``phase`` trains: each has its own."""
        model = self._method.trainee(phase)
        return f"{MISSED}/" if model == "model" else f"{MISSED}:{model}/"


def _refuse_other_copy(memory: State, on: int) -> None:
    """Raises NotHeldError unless the site holds the copy labelled ``on``; 0: the broadcast changes none."""
    if on and float(memory.get(LABEL, torch.zeros(()))) != on:
        raise NotHeldError(public="this site's copy of the model is not the one that the server knows of")


class EncodedSite:
    """A site behind its end of the wire: answers encoded broadcasts with encoded updates."""

    def __init__(self, site: Answering, end: SiteEnd) -> None:
        self.site = site
        self.end = end

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        return self.end.encode(self.site.handle(self.end.decode(message), should_stop))


def site_memory(folder: Path | None) -> SiteMemory:
    """Where a site whose own folder is ``folder`` keeps what the wire needs."""
    return SiteMemory(folder / "wire" if folder else None)


def own_memory(memory: SiteMemory, key: tuple[int, int]) -> State:
    """The memory before a task, to be changed in place."""
    before = memory.before(key)
    return before if memory.folder else {name: tensor.clone() for name, tensor in before.items()}


def number(value: int) -> Tensor:
    """A label as a tensor for an end's memory; labels are below 2^53, so that float64 holds them exactly."""
    return torch.tensor(value, dtype=torch.float64)


def digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def label(digests: Mapping[str, bytes]) -> int:
    """A name for a copy, from the tensors that it was made of: a whole number from 1 to 2^48."""
    whole = hashlib.sha256(repr(sorted(digests.items())).encode()).digest()
    return 1 + int.from_bytes(whole[:6], "big")
