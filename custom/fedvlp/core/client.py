"""What a method's site half works on: the model, the objective, the data and the declared memory of one site."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import MODALITIES, Batch, State, VLOutput, group

OBJECTIVE = "objective."
EXTRA = OBJECTIVE + "extra."
"""Tensors of what a method trains beside model and objective (``Experiment.extra``)."""
PREDICTOR, TARGET = OBJECTIVE + "predictor.", OBJECTIVE + "target."
"""Tensors of an objective's predictor, and of its target network, which is not trained but follows the model."""


class Data(Protocol):
    """One site's records, decoded and tokenised (data/loader.py)."""

    @property
    def num_train(self) -> int: ...

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the records have, of "image" and "text"; batches lack the keys of the other."""
        ...

    def modalities_in(self, split: str) -> tuple[str, ...]:
        """The same of one split."""
        ...

    def having(self, split: str, modalities: Sequence[str] = MODALITIES) -> Tensor:
        """Positions [n] int64 of the records of a split that have these of "image" and "text", and no other."""
        ...

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]: ...

    def batches(
        self, split: str, batch_size: int, *, drop_last: bool, rows: Tensor | None = None
    ) -> Iterator[Batch]: ...

    @property
    def label_names(self) -> tuple[str, ...]:
        """The findings of the columns of a batch's ``labels``."""
        ...

    def report_batches(self, batch_size: int) -> Iterator[Batch] | None:
        """All reports of training records that have several, each with its record's ``row``; None where none has."""
        ...

    def share_images(self, share: Callable[[int], slice] | None) -> None:
        """Of a training batch's images, reads those of ``share`` (of their number) alone, where it can."""


class GradientObserver(Protocol):
    """Observes the gradients of a task, for a site's limits on an update's effective sample size."""

    def weigh(self, lengths: list[Tensor], rows: list[Tensor] | None = None) -> None:
        """Lengths of the gradients in the order of the steps; with ``rows``, of groups of records, and which."""
        ...


class MicroBatching(Protocol):
    """How the towers see a batch (training/grad_cache.py)."""

    def map(self, towers: Callable[[Batch], VLOutput], batch: Batch) -> VLOutput:
        """``towers(batch)``, computed micro-batch by micro-batch."""
        ...


class Trainee:
    """What training asks of a model beside its forward pass: base class of fedvlp's models, with defaults."""

    micro_batches: MicroBatching | None = None  # None: the towers see whole batches

    @staticmethod
    def of(model: Any) -> Trainee:
        """The model; for a plain module one that has the defaults."""
        return model if isinstance(model, Trainee) else Trainee()

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """What the names of frozen tensors begin with: the same at every site, and no part of a State."""
        return ()

    def set_attention(self, kind: str) -> None:
        """Chooses how attention is computed (``Training.attention``)."""


class StateMismatchError(SiteError, ValueError):
    """A state does not have the tensors that this model has."""


class EncoderFeatures(Protocol):
    """What encoders that do not change make of a client's training records (training/frozen_features.py)."""

    def encoded(self, client: Client, batch: Batch, state: State, own: State | None) -> Batch:
        """As :meth:`Client.encoded`."""
        ...

    def pooled(self, client: Client, batch: Batch, state: State, own: State | None) -> VLOutput | None:
        """Pooled features [B, W], from which the anchor's heads make vectors; None where they are not kept."""
        ...

    def release(self, client: Client) -> None:
        """A task has ended."""
        ...


class NoLossError(SiteError, ValueError):
    """The objective has no loss, or not the one that a method needs, for the records of a site."""


@dataclass
class Client:
    """One site's trainee. The modules may be shared by several sites of one process: every task loads its state first.

    ``memory`` holds what the method keeps at this site between tasks, as named tensors; nothing else survives a task.
    ``public`` are the records that the server and every site hold; ``public_id`` (below 2^53) stands for their ids.
    """

    name: str
    seed: int  # of the whole run
    model: Any  # DualEncoder: forward, encode, project
    objective: nn.Module
    data: Data
    memory: State = field(default_factory=dict)
    public: Data | None = None
    public_id: int = 0
    initial: Callable[[], State] | None = None  # the untrained weights, for sites that keep some of their own
    site_only: frozenset[str] = frozenset()  # tensors of the model that never leave the site (core/norm_statistics.py)
    own_norm: frozenset[str] = frozenset()  # of a model that is the site's whole: the normalisation that it estimates
    counted: Callable[[], None] = lambda: None  # called after every optimiser step
    observer: GradientObserver | None = None  # gets the gradients' norms
    fixed: EncoderFeatures | None = None  # keeps what fixed encoders make of a record; None: they are run at every step
    _anchor: Any = None
    _anchored: tuple[State, State | None] | None = None

    @property
    def hooks(self) -> ObjectiveModule:
        """What the objective does beside its terms."""
        return ObjectiveModule.of(self.objective)

    @property
    def extra(self) -> Any:
        """What the method trains beside model and objective (``Experiment.extra``); None: nothing."""
        return dict(self.objective.named_children()).get("extra")

    @property
    def device(self) -> torch.device:
        """Where the model is; the batches come there, states travel and rest on the CPU."""
        return next((parameter.device for _, parameter in self.parameters()), torch.device("cpu"))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of the training records, "image" and "text": what this client can train, and tells the server."""
        return self.data.modalities_in("train")

    def here(self, state: State) -> State:
        """The tensors on this client's device; those that are there already are not copied."""
        return {name: tensor.to(self.device) for name, tensor in state.items()}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of the model and the objective, by its name in a State."""
        yield from self.model.named_parameters()
        for name, parameter in self.objective.named_parameters():
            yield OBJECTIVE + name, parameter

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this phase trains."""
        return ((name, parameter) for name, parameter in self.parameters() if parameter.requires_grad)

    def state(self) -> State:
        """The live tensors (not copies) of model and objective, buffers included."""
        return named_state(self.model, self.objective)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies ``state`` into model and objective. Raises StateMismatchError unless names and shapes agree."""
        mine = self.state()
        wrong = [n for n in mine if n not in state or state[n].shape != mine[n].shape]
        if wrong or len(state) != len(mine):
            unknown = sorted(set(state) - set(mine))
            raise StateMismatchError(
                f"{self.name}: the received state does not fit this model: {len(wrong)} tensors missing or of another "
                f"shape (e.g. {wrong[:3]}), {len(unknown)} unknown (e.g. {unknown[:3]}). "
                "Server and site must run the same experiment.",
                public=(
                    "the received state does not fit this model: {count} tensors missing or of another shape, "
                    "{count2} unknown. Server and site must run the same experiment"
                ),
                count=len(wrong),
                count2=len(unknown),
            )
        for name, tensor in mine.items():
            tensor.copy_(state[name])

    def divergences(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The objective's terms, of soft targets without their entropy, which no model can lower (spec Z4)."""
        terms: dict[str, Tensor] = self.objective(output, batch)
        least = self.hooks.entropy(output, batch)
        return {name: term - least[name] if name in least else term for name, term in terms.items()}

    def anchor(self, state: State, own: State | None = None) -> Any:
        """The model with the weights of ``state`` as a target of training: frozen, yet the model's own function.

        Where the model normalises by the batch, so does the anchor, and touches no running statistics; in eval mode it
        would be another function, and pull a model away from its own weights (spec Z1). Dropout is off.
        """
        anchor = self.frozen(state, own)
        for mine, its in zip(self.model.modules(), anchor.modules(), strict=True):
            if isinstance(its, BatchNorm):
                its.training = mine.training
        return anchor

    def frozen(self, state: State, own: State | None = None) -> Any:
        """The model with the weights of ``state``: eval mode, no gradient, sharing the given tensors (no copy).

        ``own`` (this site's memory, say) takes the place of the tensors of ``state`` that it names. The next call of
        this method or of :meth:`anchor` changes the same module.
        """
        if self._anchor is None:
            self._anchor = skeleton(self.model)
            compile_alike(self.model, self._anchor)
            for module in self._anchor.modules():
                if isinstance(module, BatchNorm):
                    module.track_running_stats = False  # in train mode they would be updated: they are the state's
        if self._anchored is None or self._anchored[0] is not state or self._anchored[1] is not own:
            weights = {name: t for name, t in {**state, **(own or {})}.items() if not name.startswith(OBJECTIVE)}
            self._anchor.load_state_dict(frozen_tensors(self.model) | weights, assign=True)
            self._anchor.requires_grad_(False)
            self._anchored = state, own
        self._anchor.eval()
        self._anchor.micro_batches = Trainee.of(self.model).micro_batches
        return self._anchor

    def encoded(self, batch: Batch, state: State, own: State | None = None) -> Batch:
        """A training batch for a model with the encoders of ``state``, which do not change: with tokens where kept."""
        return batch if self.fixed is None else self.fixed.encoded(self, batch, state, own)

    @torch.no_grad()
    def target(self, batch: Batch, state: State, own: State | None = None, encoded: Any = None) -> VLOutput:
        """What :meth:`anchor` makes of a training batch; vectors alone, where no objective reads tokens.

        ``encoded``: what its encoders make of the batch, where that is known.
        """
        anchor = self.anchor(state, own)
        pooled = None if self.fixed is None else self.fixed.pooled(self, batch, state, own)
        if pooled is not None:
            return anchor.heads(pooled)
        return anchor.project(anchor.encode(self.encoded(batch, state, own)) if encoded is None else encoded)

    @contextmanager
    def in_micro_batches(self, how: MicroBatching) -> Iterator[None]:
        """Lets the towers of the model, and of its anchor, see micro-batches. Raises ValueError if they cannot."""
        takes = isinstance(self.model, Trainee)  # by a name of its own: the type checker goes on knowing a module
        if not takes:
            raise ValueError(f"{self.name}: this model cannot take micro-batches; set training.micro_batch to 0")
        for name, module in self.model.named_modules():
            normalises = isinstance(module, BatchNorm) and module.training
            if normalises and group(name) in ("encoder", "alignment"):
                raise ValueError(
                    f"{self.name}: {name} normalises over the batch, which it would see in micro-batches only; set "
                    "training.accumulation to 'plain' (or training.gather_negatives to false), or take another tower"
                )
        self.model.micro_batches = how
        try:
            yield
        finally:
            self.model.micro_batches = None

    def release(self) -> None:
        """Lets go of the tensors of :meth:`anchor`, at the end of a task."""
        if self.fixed is not None:
            self.fixed.release(self)
        if self._anchored is not None:
            empty = {name: t.to("meta") for name, t in self._anchor.state_dict().items()}
            self._anchor.load_state_dict(empty, assign=True)
            self._anchored = None

    def drawn(self, batches: Iterator[Batch], generator: Generator) -> Iterator[Batch]:
        """The batches with what the objective draws for each (``draw``): views of the images, a mask.

        It draws for whole batches and from ``generator`` alone, so that neither micro-batches, nor several processes,
        nor a restart in the middle of a phase change what is drawn.
        """
        hooks = self.hooks
        return (hooks.draw(batch, generator) for batch in batches)

    def stepped(self) -> None:
        """Tells the objective, and who counts, that an optimiser step is done."""
        self.counted()
        self.hooks.after_step()
        self.hooks.follow(self.model)

    def restart_target(self) -> None:
        """The objective's target network, if it has one, becomes a copy of the model as it is."""
        restart_target(self.model, self.objective)

    def set_trainable(self, trains: Any) -> None:
        """Freezes every parameter whose name ``trains`` refuses; a module with nothing to train goes to eval mode.

        What the model says is frozen stays so.
        """
        always = Trainee.of(self.model).frozen_prefixes
        for name, parameter in self.parameters():
            parameter.requires_grad_(trains(name) and not name.startswith(always))
        for child in [*self.model.children(), self.objective]:
            parameters = list(child.parameters())
            child.train(not parameters or any(p.requires_grad for p in parameters))


def embedded_texts(client: Client, sentences: Sequence[str], model: nn.Module | None = None) -> Tensor:
    """Unit vectors [N, d] of N sentences by the client's model, or by ``model`` in its place."""
    ids, mask = client.model.tokenizer(sentences)
    embedded: Tensor = (model or client.model)(client.here({"text": ids, "text_mask": mask})).text
    return embedded


def named_state(model: nn.Module, objective: nn.Module) -> State:
    """Model and objective as one State, without frozen tensors; the objective's are named ``objective.<path>``."""
    frozen = Trainee.of(model).frozen_prefixes
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(frozen)}
    state.update({OBJECTIVE + name: tensor for name, tensor in objective.state_dict().items()})
    return state


def frozen_tensors(model: Any) -> State:
    """A model's frozen tensors, by their names in it."""
    prefixes = Trainee.of(model).frozen_prefixes
    return {name: t for name, t in model.state_dict().items() if name.startswith(prefixes)} if prefixes else {}


def digest(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> str:
    """SHA-256 over names, shapes and bytes of the tensors whose names begin so."""
    hashed = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(tuple(prefixes))):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        hashed.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return hashed.hexdigest()


def restart_target(model: nn.Module, objective: nn.Module) -> None:
    """The target network of ``objective``, if it has one, becomes a copy of ``model``."""
    ObjectiveModule.of(objective).restart(model)


def compile_alike(model: nn.Module, copied: nn.Module) -> None:
    """Compiles the modules of a copy whose originals are compiled: copying a module does not."""
    for mine, its in zip(model.modules(), copied.modules(), strict=True):
        if mine._compiled_call_impl is not None:
            its.compile()


def skeleton(model: nn.Module) -> Any:
    """A copy of the module whose weights are placeholders without memory, to be assigned by ``load_state_dict``."""
    memo: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
