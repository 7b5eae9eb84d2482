"""The two ends of the wire: what goes down and up is encoded, and the bytes are counted.

What a site's 8-bit codes left out is in its memory, versioned by task, so that a repeated task sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fedvlp.core.aggregation import payload
from fedvlp.core.method import Schedule
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update, with_prefix, without_prefix
from fedvlp.federation import codec
from fedvlp.federation.codec import CodecError, Wire
from fedvlp.federation.site_memory import SiteMemory, task_of

MISSED = "missed"
"""Beginning of names in a site's memory of the wire: what 8-bit codes left out."""


class Exchange(Protocol):
    """Sends ``messages`` and yields (site, reply), each site at most once, in any order: best as they come."""

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]: ...


class Answering(Protocol):
    """A site (federation/site.py)."""

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = ...) -> Update: ...


class ServerEnd:
    """An exchange of models over an exchange of encoded messages. ``bytes`` are those of the last phase's tensors."""

    def __init__(self, wire: Wire, exchange: Exchange) -> None:
        self.wire = wire
        self.bytes: dict[str, int] = {}
        self._exchange = exchange

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        self.bytes = {BYTES_DOWN: 0, BYTES_UP: 0}
        return self._replies(messages)

    def _replies(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        sent = self._encoded(messages)
        for site, reply in self._exchange(sent):
            if isinstance(reply, Update):
                reply = self._decoded(reply, sent[site].state)
            yield site, reply
            del reply  # one update is resident at a time

    def _encoded(self, messages: Mapping[str, Broadcast]) -> dict[str, Broadcast]:
        """Encode what each site is sent; sites that are sent one state share the encoded one."""
        made: dict[int, State] = {}
        encoded = {}
        for site, message in messages.items():
            if id(message.state) not in made:
                made[id(message.state)] = self._narrowed(message.state)
            encoded[site] = replace(message, state=made[id(message.state)])
            self.bytes[BYTES_DOWN] += payload(encoded[site])
        return encoded

    def _narrowed(self, state: State) -> State:
        if not self.wire.plain and any(tensor.dtype in codec.HALVES for tensor in state.values()):
            raise ValueError("the options of wire are for models in float32; this one has half precision tensors")
        if self.wire.down == "float32":
            return state
        return {name: codec.cast(name, tensor, self.wire.down) for name, tensor in state.items()}

    def _decoded(self, update: Update, sent: State) -> Reply:
        """Decode an update of a site that was ``sent`` this model."""
        try:
            self.bytes[BYTES_UP] += payload(update)
            return update if self.wire.plain else replace(update, state=codec.decode(update.state, sent, self.wire))
        except Exception as error:  # garbage may be wrong in any way, and costs its site this phase, not the run
            why = str(error) if isinstance(error, CodecError) else f"its tensors raise {type(error).__name__}"
            return Failure(FailureKind.UNREADABLE, why)


@dataclass
class _Task:
    """What a site keeps from the broadcast until its update: what it received, and what codes left out so far."""

    key: tuple[int, int]
    base: State
    missed: State = field(default_factory=dict)  # of every model, by its name in the memory


class SiteEnd:
    """Decodes a site's broadcasts and encodes its updates; ``memory`` is apart from the method's."""

    def __init__(self, wire: Wire, method: Schedule, memory: SiteMemory) -> None:
        self.wire = wire
        self._method = method
        self._memory = memory
        self._task: _Task | None = None

    def decode(self, message: Broadcast) -> Broadcast:
        """The broadcast as the method knows it."""
        key = task_of(self._method.phases, message)
        state = {name: codec.widen(tensor) for name, tensor in message.state.items()}
        self._task = _Task(key, state, own_memory(self._memory, key) if self.wire.up == "int8" else {})
        return replace(message, state=state)

    def encode(self, update: Update) -> Update:
        """The update for the way up; what the next task needs is kept from now on."""
        current, self._task = self._task, None
        if current is None or current.key != task_of(self._method.phases, update):
            raise CodecError("the update belongs to no broadcast that was received")
        # What 8-bit codes left out of this update goes into the next one of the same model.
        own = self._missed(update.phase)
        missed = without_prefix(current.missed, own)
        state = codec.encode(update.state, current.base, self.wire, missed)
        memory = current.missed | with_prefix(own, missed)
        if memory:
            self._memory.after(current.key, memory)
        return replace(update, state=state)

    def _missed(self, phase: str) -> str:
        """What the names begin with of what codes left out of the model that ``phase`` trains: each has its own."""
        model = self._method.trainee(phase)
        return f"{MISSED}/" if model == "model" else f"{MISSED}:{model}/"


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
