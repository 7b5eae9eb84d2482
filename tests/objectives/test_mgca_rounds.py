"""MGCA in a federation: the freeze of its prototypes over rounds, phases, micro-batches, restarts; how it is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import ADAMW, SGD, Pairs, World, same_bytes
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.exchange import SequentialExchange, answer
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedDRA, FedRGB
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training

MODEL = ModelConfig(
    embedding_dim=6, image_size=16, vocabulary=16, max_tokens=8, text_layers=1, head_hidden=8, head_norm="layer"
)


class Studies(Pairs):
    """Eight random pairs for ``MODEL``."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        super().__init__(torch.randn(8, 1, 16, 16, generator=draw), torch.randint(2, 16, (8, 8), generator=draw))

    def _batch(self, split: str, rows: Tensor) -> Batch:
        return {**super()._batch(split, rows), "text_mask": torch.ones(len(rows), 8, dtype=torch.bool)}


def world(method: Method, folder: Path | None = None, rounds: int = 4, norm: str = "layer") -> World:
    """Two sites, ``freeze_steps`` 5, heads with this norm."""

    def model() -> DualEncoder:
        built = replace(MODEL, head_norm=norm).build(0)
        built.attention = True
        return built

    config = MGCAConfig(prototypes=7, freeze_steps=5)
    return World(
        method, {"a": Studies(0), "b": Studies(1)}, ADAMW, Rounds(rounds=rounds, evaluate_every=0), model,
        lambda: config.build(model(), 0), folder,
    )  # fmt: skip


def directions(server: Server) -> Tensor:
    return F.normalize(server.state["objective.prototypes"])


def test_the_freeze_counts_steps_over_rounds() -> None:
    """Two steps a round: 5 are over in the middle of round 2. A trainer that counts anew would never thaw."""
    start = directions(world(FedAvg(local_steps=2)).server())
    servers = [world(FedAvg(local_steps=2), rounds=rounds).run() for rounds in (1, 2, 3, 4)]
    assert [round(server.state["objective.thawed"].item(), 6) for server in servers] == [0.4, 0.8, 1.0, 1.0]
    moved = [(directions(server) - start).abs().max().item() for server in servers]
    assert max(moved[:2]) < 1e-6 < 1e-4 < moved[2] < moved[3]


def test_the_freeze_counts_the_steps_of_every_phase_that_trains_it() -> None:
    """FedDRA: one step aligns, two are joint."""
    server = world(FedDRA(align_steps=1, local_steps=2, dro_batch=4), rounds=1).run()
    assert server.state["objective.thawed"].item() == pytest.approx(3 / 5)


def test_micro_batches_are_one_step() -> None:
    small = replace(ADAMW, micro_batch=2, accumulation="plain")
    counted = replace(world(FedAvg(local_steps=2), rounds=1), training=small).run()
    assert counted.state["objective.thawed"].item() == pytest.approx(2 / 5)


def test_gradient_caching_is_exact() -> None:
    """All that the objective reads goes through in parts: weights as of the whole batch."""
    whole, cached = (
        replace(world(FedAvg(local_steps=2), rounds=1), training=training).run().state
        for training in (SGD, replace(SGD, micro_batch=2))
    )
    for name in whole:
        torch.testing.assert_close(cached[name], whole[name], rtol=0, atol=1e-5)


PHASES = FedRGB(local_steps=2, aligner_steps=1, dro_batch=4)


@pytest.mark.parametrize("method", [FedAvg(local_steps=2), pytest.param(PHASES, marks=pytest.mark.slow(seconds=5))])
def test_a_resumed_run_goes_on_with_the_freeze(method: Method, tmp_path: Path) -> None:
    whole = world(method).run()
    broken = world(method, tmp_path)
    inner, asked = SequentialExchange(broken.site), 0

    def stops(messages: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise KeyboardInterrupt
        yield from inner(messages)

    with pytest.raises(KeyboardInterrupt):
        broken.run(stops)
    same_bytes(world(method, tmp_path).run().state, whole.state)


@pytest.mark.slow(seconds=3)
def test_measuring_leaves_the_batch_statistics_of_its_heads_alone(tmp_path: Path) -> None:
    """A site that keeps its modules, whose objective the last phase froze, and one that builds them anew for each task:
    the same bytes, although both measure the received model first.
    """
    method = FedRGB(local_steps=2, aligner_steps=1, dro_batch=4)
    kept, renewed = (world(method, tmp_path / name, 2, "batch") for name in ("kept", "renewed"))

    def forgetful(messages: Any) -> Any:
        for site, message in messages.items():
            renewed._modules = None
            yield site, answer(renewed.site(site), message)

    same_bytes(renewed.run(forgetful).state, kept.run().state)


def test_an_experiment_builds_it_for_its_model() -> None:
    """Every site's objective has the widths of its own model, whose outputs tell attention; the same bytes anywhere."""
    small = replace(MODEL, embedding_dim=4, text_tower="gru")
    experiment = Experiment(
        "mgca", FedAvg(local_steps=1), MODEL, MGCAConfig(prototypes=7),
        data=SyntheticCohort(sites=2, size=24, image_size=32), rounds=Rounds(rounds=1, evaluate_every=0),
        training=Training(batch_size=4), site_models=(("site-2", small),),
    )  # fmt: skip
    one, other = Assembly(experiment), Assembly(experiment)
    model, objective = one.modules("site-2")
    assert model.attention
    assert objective.prototypes.shape == (7, 4)
    assert one.modules()[1].prototypes.shape == (7, 6)
    same_bytes(one.server(one.sites()).state, other.server(other.sites()).state)
    update = one.site("site-1").handle(Broadcast(0, "train", one.server(one.sites()).state))
    assert {"loss/contrastive", "loss/local", "loss/prototype"} <= update.metrics.keys()
    assert not Assembly(replace(experiment, objective=GLoRIAConfig())).modules()[0].attention
