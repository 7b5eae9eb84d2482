"""What never leaves a site: private adapters, and batch normalisation where each site has its own (FedBN).

FedBN (Li et al., 2021, https://arxiv.org/abs/2102.07623): running statistics, and affine weights if any, never leave a
site. The server then has none of these tensors: they are not in its state, its checkpoints and its messages, and the
gate refuses an update that holds one. A site completes every model that it receives: with its own affine weights, and
with statistics that it estimates on its training records (Li et al., 2017, https://arxiv.org/abs/1603.04779).
Differs from FedBN: there a site's running statistics are those of its last training, of other weights than the
received mean (``studies/programs/norm_statistics.py`` measures both).
A site that keeps a whole model of its own (``Local``) estimates the statistics of that in the same way. Otherwise a
comparison of the two would be one of estimated statistics with running ones.

Private adapters (models/adapters.py) are kept in the same way, whatever is done with the normalisation: a site begins
with initial ones, which change nothing, and continues with those of its last training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedvlp.core.client import OBJECTIVE, TARGET
from fedvlp.core.method import sends
from fedvlp.core.seeds import seed
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import Batch, State, is_private, is_statistic

if TYPE_CHECKING:
    from fedvlp.core.client import Client, Data
    from fedvlp.core.method import Schedule

AVERAGED, SITE = "averaged", "site"
CHOICES = (AVERAGED, SITE)

OWN = "norm/"
"""In a memory, ``norm/<model>/<name>``: what its site keeps, of each model that the method trains."""

SERVED = "served"
"""The model of the last evaluation, in ``norm/served/<name>``: what the site uses the trained model with."""

OF_SERVER = "the server's: the mean over the sites where their weights are averaged, else of its own training"
PUBLIC_SET = "estimated on the public set: each site keeps its own"
INITIAL = "initial, of no records: each site keeps its own"
"""What the folder of a saved model says of its running statistics."""

BATCH, BATCHES = 32, 50
"""Records in a batch, and batches at most, on which statistics are estimated: 1,600 records are enough for a mean."""


class NormalisationError(SiteError, ValueError):
    """The server sent what only a site has."""


def normalisation(names: Iterable[str]) -> frozenset[str]:
    """Of the names of a state, those of its batch normalisations: running statistics and affine weights."""
    names = list(names)
    layers = {name.rpartition(".")[0] for name in names if is_statistic(name)}
    return frozenset(name for name in names if name.rpartition(".")[0] in layers)


def site_only(choice: str, method: Schedule, names: Iterable[str]) -> frozenset[str]:
    """Of the names of a model those that stay at the sites; none where no weights travel anyway."""
    names = list(names)
    if not sends(method, names):
        return frozenset()
    private = frozenset(filter(is_private, names))
    return private | (normalisation(names) if choice == SITE else frozenset())


def of_own_model(choice: str, method: Schedule, names: Iterable[str]) -> frozenset[str]:
    """Of the names of a model the normalisation that its site estimates though it lacks nothing: no weights travel."""
    names = list(names)
    return normalisation(names) if choice == SITE and not sends(method, names) else frozenset()


def split(memory: State) -> tuple[State, State]:
    """The method's part of a site's memory, and the normalisation that the site keeps."""
    mine = {name: tensor for name, tensor in memory.items() if not name.startswith(OWN)}
    return mine, {name: tensor for name, tensor in memory.items() if name.startswith(OWN)}


def own(memory: Mapping[str, Tensor], model: str) -> State:
    """What a memory holds of the normalisation of ``model`` (``Schedule.trainee``)."""
    prefix = f"{OWN}{model}/"
    return {name.removeprefix(prefix): t for name, t in memory.items() if name.startswith(prefix)}


def remembered(tensors: Mapping[str, Tensor], model: str) -> State:
    """The tensors by their names in a memory."""
    return {f"{OWN}{model}/{name}": tensor for name, tensor in tensors.items()}


def complete(client: Client, state: State, known: Mapping[str, Tensor], measured: bool = True) -> State:
    """A received model with the normalisation of this client's site; as it is where nothing is missing.

    Affine weights are those ``known`` from the last training, or initial ones; statistics are estimated. The model
    is then loaded. A state without any tensor (a method that sends no model) stays empty. With ``measured`` false
    nothing will read the statistics of this model: those of the last training stay, where there are any, which saves
    a pass over up to ``BATCH * BATCHES`` records. Raises NormalisationError where the sender sent what stays at the
    sites.
    """
    if not client.site_only or not state:
        return state
    sent = sorted(client.site_only & state.keys())
    if sent:
        raise NormalisationError(
            f"{client.name}: the server sent {len(sent)} tensors of batch normalisation or private adapters, e.g. "
            f"{sent[0]}; under these settings it has none. Server and site must run the same experiment",
            public=(
                "the server sent {count} tensors of batch normalisation or private adapters; under these "
                "settings it has none. Server and site must run the same experiment"
            ),
            count=len(sent),
        )
    # 1. The missing tensors: of the last training, else initial ones.
    known_whole = client.site_only <= known.keys()
    first = known if known_whole else _initial(client) | dict(known)
    whole = {**state, **{name: first[name] for name in client.site_only}}
    target = {name: t for name, t in client.state().items() if name.startswith(TARGET)}
    client.load({**target, **whole})  # a method may keep target networks at the sites: they are not estimated
    # 2. Running statistics of these very weights, where anything reads them.
    if measured or not known_whole:
        estimate(client)
    mine = client.state()
    return {**state, **{name: mine[name].clone() for name in sorted(client.site_only)}}


def _initial(client: Client) -> State:
    assert client.initial is not None
    return client.here(client.initial())


def estimate(client: Client) -> None:
    """Sets the running statistics that are its site's own to the means over batches of its training records.

    These are the ones that stay there, or all of a model that is the site's (``of_own_model``). All others stay as they
    are: those of a frozen tower are what it has learned. A layer that these records do not reach (the site lacks its
    modality) reads the public set, if there is one; else it keeps what it has. Leaves model and objective in eval mode,
    so dropout is off.
    """
    own = client.site_only | client.own_norm
    layers = normalising(client.model, own)
    of_objective = normalising(client.objective, own, OBJECTIVE)
    layers += of_objective

    def run(batch: Batch) -> None:
        output = client.model(batch)
        if of_objective:
            client.objective(output, batch)

    for module in (client.model, client.objective):
        module.eval()
    for data in (client.data, client.public):
        if data is not None and layers:
            layers = set_statistics(layers, run, _batches(client, data))


def normalising(module: nn.Module, statistics: Collection[str], prefix: str = "") -> list[BatchNorm]:
    """The batch normalisations of a module whose running means are named in ``statistics``, after ``prefix``."""
    return [
        layer
        for name, layer in module.named_modules(prefix=prefix.rstrip("."))
        if isinstance(layer, BatchNorm) and f"{name}.running_mean" in statistics
    ]


@torch.no_grad()
def set_statistics(
    layers: list[BatchNorm], run: Callable[[Batch], object], batches: Iterable[Batch]
) -> list[BatchNorm]:
    """Sets the running statistics of ``layers`` to their means over the batches that ``run`` sends through them.

    Returns the layers that no batch reached, their statistics untouched. All are left in eval mode.
    """
    # Noted first, since a layer that nothing reaches must end as it was.
    before = [(layer, layer.momentum, [b.clone() for b in layer.buffers()]) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over the batches
        layer.train()
    for batch in batches:
        run(batch)
    # A layer that no batch reached has its old statistics back.
    missed = []
    for layer, momentum, buffers in before:
        layer.momentum = momentum
        layer.eval()
        assert layer.num_batches_tracked is not None
        if not int(layer.num_batches_tracked):
            missed.append(layer)
            for buffer, old in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(old)
    return missed


def _batches(client: Client, data: Data) -> Iterator[Batch]:
    """A fixed part of the training records; a batch of one has no variance."""
    count = data.num_train
    if count < 2:
        return iter(())
    generator = torch.Generator().manual_seed(seed(client.seed, client.name, "statistics"))
    rows = torch.randperm(count, generator=generator)[: BATCH * BATCHES]
    return data.batches("train", BATCH, drop_last=len(rows) >= BATCH, rows=rows)
