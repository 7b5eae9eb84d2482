"""A federation small enough to compute by hand: towers of Linear layers, pairs in memory, milliseconds a round."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import Client, named_state
from fedvlp.core.method import Method
from fedvlp.core.norm_statistics import AVERAGED, of_own_model, site_only
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Batch, Broadcast, Reply, State, Update, VLOutput
from fedvlp.federation.codec import PLAIN, Wire
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.server_trainer import ServerTrainer
from fedvlp.federation.site import Evaluate, Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.federation.wire import EncodedSite, SiteEnd, site_memory
from fedvlp.models.multimodal import fused
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.training.settings import Training

IMAGE, TEXT, DIM = 6, 5, 4
SGD = Training(batch_size=4, optimizer="sgd", lr=0.1, weight_decay=0.0)
TWO_ROUNDS = Rounds(rounds=2, evaluate_every=0)
ADAMW = Training(batch_size=4, optimizer="adamw", lr=0.01, weight_decay=0.1)


KNOBS = {
    "local_steps": 2, "align_steps": 1, "aligner_steps": 1, "distil_phases": 1, "distil_steps": 1, "dro_batch": 4,
    "gamma": 2.0, "mu": 0.5, "frozen": False,
}  # fmt: skip


def small(kind: type[Method]) -> Method:
    """The method at toy size: every knob of ``KNOBS`` that it has."""
    return kind(**{f.name: KNOBS[f.name] for f in fields(kind) if f.name in KNOBS})  # type: ignore[arg-type]


class Toy(nn.Module):
    """image [B, 6], text [B, 5] -> vectors [B, 4], of unit length unless ``unit=False``; every layer is Linear."""

    def __init__(
        self, seed: int = 0, *, norm: bool = False, dropout: float = 0.0, unit: bool = True,
        image: int = IMAGE, text: int = TEXT, dim: int = DIM, labels: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.unit, self.dim = unit, dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.image_encoder, self.text_encoder = (self._tower(n, dim, norm, dropout) for n in (image, text))
            self.image_alignment, self.text_alignment = nn.Linear(dim, dim), nn.Linear(dim, dim)
            self.image_head, self.text_head = nn.Linear(dim, dim), nn.Linear(dim, dim)
            self.classifier = nn.Linear(2 * dim, labels) if labels else None  # on [image; text]

    @staticmethod
    def _tower(width: int, dim: int, norm: bool, dropout: float) -> nn.Module:
        extra = [*([nn.BatchNorm1d(dim)] if norm else []), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(nn.Linear(width, dim), *extra)

    def encode(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        image = self.image_encoder(batch["image"]) if "image" in batch else None
        return image, self.text_encoder(batch["text"]) if "text" in batch else None

    def project(self, encoded: tuple[Tensor | None, Tensor | None]) -> VLOutput:
        image, text = encoded
        image = None if image is None else self.image_head(self.image_alignment(image))
        text = None if text is None else self.text_head(self.text_alignment(text))
        if self.unit:
            image, text = (None if v is None else F.normalize(v, dim=-1) for v in (image, text))
        return VLOutput(image, text, logits=self.classifier and self.classifier(fused(image, text)))

    def forward(self, batch: Batch) -> VLOutput:
        return self.project(self.encode(batch))


class Pairs:
    """One site's records in memory: image [n, .], text [n, .]; ``tick`` is called before every training batch.

    ``labels`` [n, L] are those of the training split; batches hold the ``modalities`` alone.
    """

    labels: Tensor | None = None
    label_names: tuple[str, ...] = ()
    several: tuple[Tensor, Tensor] | None = None
    modalities: tuple[str, ...] = ("image", "text")

    def __init__(self, image: Tensor, text: Tensor, tick: Callable[[], None] = lambda: None, **held_out: Any) -> None:
        self.content = {"train": (image, text), **held_out}
        self.tick = tick

    @property
    def num_train(self) -> int:
        return len(self.content["train"][0])

    @property
    def sizes(self) -> dict[str, int]:
        return {split: len(image) for split, (image, _) in self.content.items()}

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for _ in range(steps):
            self.tick()
            rows = torch.randperm(self.num_train, generator=generator)[:batch_size]
            yield self._batch("train", rows)

    def batches(self, split: str, batch_size: int, *, drop_last: bool, rows: Tensor | None = None) -> Iterator[Batch]:
        rows = torch.arange(self.sizes.get(split, 0)) if rows is None else rows
        for chosen in rows.split(batch_size):
            if len(chosen) == batch_size or not drop_last:
                yield self._batch(split, chosen)

    def modalities_in(self, split: str) -> tuple[str, ...]:
        return self.modalities

    def having(self, split: str, modalities: Sequence[str] = MODALITIES) -> Tensor:
        """All, or none: they are of one kind."""
        return torch.arange(self.sizes.get(split, 0) if {*modalities} == {*self.modalities_in(split)} else 0)

    def share_images(self, share: Any) -> None:
        """They are whole."""

    def report_batches(self, batch_size: int) -> Iterator[Batch] | None:
        """All texts of records that have ``several`` [m, .], each with its ``owner`` [m]."""
        if self.several is None:
            return None
        text, owner = self.several
        return ({"row": owner[some], "text": text[some]} for some in torch.arange(len(text)).split(batch_size))

    def _batch(self, split: str, rows: Tensor) -> Batch:
        there = dict(zip(("image", "text"), self.content[split], strict=True))
        if self.labels is not None and split == "train":
            there["labels"] = self.labels
        return {"row": rows} | {n: t[rows] for n, t in there.items() if n in (*self.modalities, "labels")}


def pairs(seed: int, count: int = 12, scale: float = 1.0) -> Pairs:
    """Random pairs, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(count, IMAGE, generator=generator), torch.randn(count, TEXT, generator=generator)
    return Pairs(scale * image, scale * text)


def three_sites() -> dict[str, Pairs]:
    """Sites a, b and c with 8, 12 and 16 records."""
    return {name: pairs(index, 8 + 4 * index) for index, name in enumerate("abc")}


@dataclass
class World:
    """A federation on toys; the modules are shared by its sites, as in ``presets.Assembly``."""

    method: Method
    data: Mapping[str, Any] = field(default_factory=three_sites)
    training: Training = SGD
    rounds: Rounds = TWO_ROUNDS
    model: Callable[[], nn.Module] = Toy
    objective: Callable[[], nn.Module] = ConVIRT
    folder: Path | None = None
    evaluate: Evaluate | None = None
    public: Any = field(default_factory=lambda: pairs(99, 8))  # the public set, of methods that use one
    norm_statistics: str = AVERAGED
    public_id: int = 0
    _modules: Any = None

    def modules(self) -> tuple[Any, nn.Module]:
        self._modules = self._modules or (self.model(), self.objective())
        return self._modules

    def site_only(self) -> frozenset[str]:
        """As ``Assembly.site_only`` does."""
        return site_only(self.norm_statistics, self.method, named_state(*self.modules()))

    def client(self, name: str) -> Client:
        data = self.data.get(name, self.public)
        client = Client(name, self.rounds.seed, *self.modules(), data, public=self.public, site_only=self.site_only())
        client.public_id = self.public_id
        client.own_norm = of_own_model(self.norm_statistics, self.method, client.state())
        client.initial = lambda: named_state(self.model(), self.objective())
        return client

    def site(self, name: str) -> Site:
        memory = SiteMemory(self.folder / "sites" / name if self.folder else None)
        return Site(self.client(name), self.method, self.training, memory, self.evaluate)

    def server(self) -> Server:
        initial, own = named_state(self.model(), self.objective()), self.site_only()
        state = {n: t.detach().clone() for n, t in initial.items() if n not in own}
        return self.equip(Server(tuple(sorted(self.data)), state))

    def equip(self, server: Server) -> Server:
        """As ``Assembly.equip`` does."""
        if self.method.uses_public:
            server.modalities = {name: data.modalities_in("train") for name, data in self.data.items()}
            memory = lambda: server.memory  # noqa: E731
            server.trainer = ServerTrainer(self.client("server"), self.training, self.evaluate, memory=memory)
        return server

    @property
    def checkpoint(self) -> Path | None:
        return self.folder / "server.safetensors" if self.folder else None

    def federation(self, exchange: Any = None, **options: Any) -> tuple[Federation, int]:
        """The round loop, resumed where the checkpoint stands, and the phase to resume it with."""
        server, phase = self.server(), 0
        if self.checkpoint and self.checkpoint.exists():
            server, phase = Server.load(self.checkpoint)
            self.equip(server)
        exchange = exchange or SequentialExchange(self.site)
        return Federation(self.method, server, self.rounds, exchange, checkpoint=self.checkpoint, **options), phase

    def run(self, exchange: Any = None, **options: Any) -> Server:
        """Runs to the end, resuming; the server as it is then."""
        federation, phase = self.federation(exchange, **options)
        federation.run(phase)
        return federation.server


@dataclass
class Wired(World):
    """A toy federation behind the wire (federation/wire.py)."""

    wire: Wire = PLAIN

    def site(self, name: str) -> Any:
        folder = self.folder / "sites" / name if self.folder else None
        return EncodedSite(super().site(name), SiteEnd(self.wire, self.method, site_memory(folder)))

    def federation(self, exchange: Any = None, **options: Any) -> tuple[Federation, int]:
        return super().federation(exchange, wire=self.wire, **options)


def aggregate(method: Method, server: Server, updates: Iterable[Update], phase: str) -> None:
    """Folds ``updates`` into the server as the federation does when the quorum holds."""
    aggregator = method.aggregator(server, phase)
    for update in updates:
        aggregator.add(update)
    aggregator.commit()


class Recorder:
    """An exchange that keeps copies of every message and reply, and may lose or change replies."""

    def __init__(self, one: World, change: Callable[[str, Broadcast, Reply], Reply] = lambda s, m, r: r) -> None:
        self.inner, self.change = SequentialExchange(one.site), change
        self.sent: list[tuple[str, Broadcast]] = []
        self.replies: list[tuple[str, Update]] = []

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        self.sent += [(site, replace(m, state=clone(m.state), aux=clone(m.aux))) for site, m in messages.items()]
        for site, reply in self.inner(messages):
            if isinstance(reply, Update):
                self.replies.append((site, replace(reply, state=clone(reply.state))))
            yield site, self.change(site, messages[site], reply)


def same_bytes(left: State, right: State) -> None:
    """Asserts that two states have the same names, dtypes and bits."""
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        assert raw(left[name]) == raw(right[name]), f"{name} differs"  # NaN included


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differs(left: State, right: State, names: Sequence[str] | None = None) -> bool:
    """Whether any of the named tensors (all) differs."""
    return any(not torch.equal(left[name], right[name]) for name in names or left)


def clone(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def fresh(module: nn.Module) -> nn.Module:
    """A copy of the module that shares nothing."""
    return copy.deepcopy(module)


class Fuse:
    """Kills this process with SIGKILL when called for the n-th time; counts on otherwise."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], None]) -> int | None:
    """Runs ``work`` in a forked process and returns its exit code (-9: killed)."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode
