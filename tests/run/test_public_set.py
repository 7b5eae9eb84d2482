"""The public set and sites of differing modality: who holds what, and that server and sites agree on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.short_jobs import committed
from support.toy import clone, forked, same_bytes

from fedvlp.core.checkpoint import load_tensors, save_tensors
from fedvlp.core.client import named_state
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import GROUPS, Broadcast, State, group
from fedvlp.data.cohort import PUBLIC, SPLITS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.exchange import SequentialExchange, answer
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds
from fedvlp.flare.jobs import job_files
from fedvlp.methods import CreamFL
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.run.assembly import Assembly, public_id
from fedvlp.run.config import from_config, to_config
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.training.settings import Training
from studies.rivals import FedIoT

MODEL = ModelConfig(embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, head_hidden=16, head_norm="layer",
                    text_layers=1)  # fmt: skip


@dataclass(frozen=True)
class Public(Method):
    """FedAvg that also trains the server's model on the public set before every phase."""

    uses_public: ClassVar[bool] = True
    local_steps: int = 1

    def prepare(self, server: Server) -> None:
        assert server.trainer is not None
        server.trainer.train(self, server, "own")


SMALL = Experiment("small", Public(), MODEL, data=SyntheticCohort(sites=5, size=200, image_size=36),
                   partition=Partition(image_only=1, text_only=2, public=0.25), training=Training(batch_size=4),
                   rounds=Rounds(rounds=1, quorum=1, evaluate_every=0))  # fmt: skip


def test_sites_stand_in_the_order_paired_images_texts() -> None:
    assembly = Assembly(SMALL)
    both = ("image", "text")
    expected = {"site-1": both, "site-2": both, "site-3": ("image",), "site-4": ("text",), "site-5": ("text",)}
    assert {site: assembly.data(site).modalities for site in assembly.sites()} == expected
    assert assembly.server(assembly.sites()).modalities == expected
    (batch,) = assembly.data("site-3").train_batches(1, 4, torch.Generator())
    assert not batch.keys() & {"text", "text_mask"}
    (batch,) = assembly.data("site-4").train_batches(1, 4, torch.Generator())
    assert "image" not in batch
    with pytest.raises(ValueError, match="image_only 4 and text_only 2 are more than the 5 sites"):
        _ = Assembly(replace(SMALL, partition=Partition(image_only=4, text_only=2))).cohort


def test_the_public_patients_are_nobody_elses() -> None:
    cohort = Assembly(SMALL).cohort
    sites, patients, splits = (np.asarray(column) for column in (cohort.sites, cohort.patients, cohort.splits))
    public = sites == PUBLIC
    assert not set(patients[public]) & set(patients[~public])
    for split in SPLITS:
        everybody, chosen = (set(patients[(splits == split) & rows]) for rows in (np.full(len(sites), True), public))
        assert len(chosen) == round(0.25 * len(everybody))
    assert cohort.has_report()[public].all()
    assert cohort.has_image()[public].all()
    again = Assembly(SMALL).cohort
    assert again.sites == cohort.sites
    assert Assembly(replace(SMALL, rounds=Rounds(seed=1))).cohort.sites != cohort.sites


def test_without_a_public_set_nothing_changes() -> None:
    plain = replace(SMALL, method=Method(), partition=Partition())
    assert Assembly(plain).cohort.sites == SMALL.data.build().sites
    server = Assembly(plain).server(("site-1",))
    assert server.trainer is None
    assert server.modalities == {}
    assert Assembly(plain).site("site-1").client.public is None
    with pytest.raises(ValueError, match="this method needs a public set"):
        Assembly(replace(SMALL, partition=Partition())).server(("site-1",))


def test_server_and_sites_hold_the_same_public_records() -> None:
    assembly = Assembly(SMALL)
    host = assembly.server(assembly.sites()).trainer
    assert host is not None
    assert host.client.data.num_train == len(assembly.cohort.rows("train", PUBLIC)) > 0
    for site in assembly.sites():
        client = assembly.site(site).client
        assert client.public is host.client.data, "one architecture, one copy"
        assert client.public_id == host.client.public_id == public_id(assembly.cohort) < 2**48


def test_another_public_set_is_refused_by_the_site() -> None:
    assembly, other = Assembly(SMALL), Assembly(replace(SMALL, rounds=Rounds(rounds=1, quorum=1, seed=3)))
    server = assembly.server(assembly.sites())
    federation = Federation(SMALL.method, server, SMALL.rounds, SequentialExchange(other.site))
    expected = r"ids of this site's public set have the hash [0-9a-f]{12}, the server's [0-9a-f]{12}; both must hold"
    with pytest.raises(QuorumLostError, match=expected):
        federation.run()


def run(experiment: Experiment, forget: bool = False) -> Server:
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())

    def renewed(messages: Any) -> Any:
        for site, message in messages.items():
            yield site, answer(Assembly(experiment).site(site), message)

    exchange = renewed if forget else SequentialExchange(assembly.site)
    Federation(experiment.method, server, experiment.rounds, exchange).run()
    return server


def test_the_servers_training_is_deterministic_measured_and_recorded() -> None:
    torch.manual_seed(7)
    paired = replace(SMALL, partition=Partition(public=0.25), rounds=Rounds(rounds=2, evaluate_every=1))
    first = run(paired)
    torch.manual_seed(8)
    second = run(paired, forget=True)
    for name, tensor in first.state.items():
        assert torch.equal(second.state[name], tensor), name
    record = first.history[1]
    assert record["server"]["loss/own/contrastive"] > 0
    assert 0 <= record["server"]["val/all/mean/r1"] <= 100
    assert "test/all/mean/r1" in first.history[0]["server"]
    assert [r["server"] for r in first.history] == [r["server"] for r in second.history]


def test_sites_may_have_models_of_their_own() -> None:
    other = replace(MODEL, head_hidden=8)
    mixed = replace(SMALL, site_models=(("site-2", other), ("site-3", other)))
    assembly = Assembly(mixed)
    models = {site: assembly.site(site).client.model for site in assembly.sites()}
    assert models["site-2"] is models["site-3"]
    assert models["site-1"] is assembly.modules()[0]
    assert models["site-2"].config == other


def initial(experiment: Experiment, site: str) -> State:
    """The weights from which a site's own model starts."""
    client = Assembly(experiment).site(site).client
    for parameter in (*client.model.parameters(), *client.objective.parameters()):
        parameter.data.zero_()  # a task of another site may have left anything there
    assert client.initial is not None
    return client.initial()


def test_every_site_draws_its_own_model_from_its_own_seed(tmp_path: Path) -> None:
    """The same in any process, whatever other sites there are; class weights too. The server's is another."""
    objective = CreamFLTaskConfig(classes=6, dim=16)
    cohort = SyntheticCohort(sites=3, size=200, image_size=36)
    mine = replace(SMALL, method=CreamFL(), objective=objective, data=cohort)
    states = {site: initial(mine, site) for site in ("site-1", "site-2", "site-3")}
    states["server"] = named_state(*Assembly(mine).modules())
    drawn = [name for name, tensor in states["server"].items() if len(tensor.unique()) > 2]
    assert {"objective.image_weight", "objective.text_weight"} < set(drawn)
    assert {group(name) for name in drawn} >= set(GROUPS)
    for one, other in combinations(states.values(), 2):
        assert not any(torch.equal(one[name], other[name]) for name in drawn)
    fewer = replace(mine, data=replace(mine.data, sites=2), partition=Partition(text_only=1, public=0.25))
    same_bytes(initial(fewer, "site-2"), states["site-2"])
    reseeded = initial(replace(mine, rounds=replace(mine.rounds, seed=1)), "site-2")
    assert not any(torch.equal(reseeded[name], states["site-2"][name]) for name in drawn)

    def elsewhere() -> None:
        torch.manual_seed(5)
        save_tensors(tmp_path / "initial.safetensors", initial(from_config(to_config(mine)), "site-2"), {})

    assert forked(elsewhere) == 0
    same_bytes(load_tensors(tmp_path / "initial.safetensors")[0], states["site-2"])


def test_sites_whose_weights_are_averaged_start_from_the_servers() -> None:
    """The own seeds are for models that stay at the sites: they would average to nothing."""
    mine = replace(SMALL, method=FedIoT(local_steps=1), objective=CreamFLTaskConfig(classes=6, dim=16))
    assembly = Assembly(mine)
    server = assembly.server(assembly.sites())
    server.phase = "train"
    for name in ("site-1", "site-3", "site-5"):
        client = assembly.site(name).client
        mine.method.receive(client, mine.method.broadcast(server, name))
        same_bytes(clone(client.state()), server.state)


def test_models_for_sites_that_do_not_exist_are_refused() -> None:
    """When the experiment is assembled, before anything is trained; at a hospital only its own records are there."""
    models = (("site-2", MODEL), ("site-7", MODEL), ("clinic", MODEL))
    mixed = replace(SMALL, method=CreamFL(), site_models=models)
    expected = r"site_models names site-7, clinic; the sites are site-1, site-2, site-3, site-4, site-5\. Name sites of"
    with pytest.raises(ValueError, match=expected):
        Assembly(mixed).sites()
    with pytest.raises(ValueError, match=expected):
        job_files(mixed)
    with pytest.raises(ValueError, match=r"site_models names site-7, clinic; the sites are a, site-2\."):
        job_files(mixed, sites=["site-2", "a"])
    job_files(mixed, sites=["site-2", "clinic", "site-7"])
    at_one_site = replace(mixed, site_models=(("site-1", MODEL), ("elsewhere", MODEL)))
    assert Assembly(at_one_site).site("site-1").client.name == "site-1"


def test_site_models_come_back_from_json_and_from_flares_builder() -> None:
    mixed = replace(SMALL, method=Method(), site_models=(("site-2", replace(MODEL, head_hidden=8)),))
    assert from_config(to_config(mixed)) == mixed
    parts = {name: from_config(part) for name, part in to_config(mixed)["args"].items() if name != "site_models"}
    assert Experiment(**parts, site_models=to_config(mixed)["args"]["site_models"]) == mixed


@dataclass(frozen=True)
class Alternating(Method):
    """Asks one site a round."""

    local_steps: int = 1

    def asks(self, server: Server) -> tuple[str, ...]:
        return (server.sites[server.round % len(server.sites)],)


def test_only_the_sites_that_are_asked_count() -> None:
    """One site a round: its reply is a quorum, the others are neither dropped nor missed; everybody is evaluated."""
    experiment = replace(SMALL, method=Alternating(), partition=Partition(), rounds=Rounds(rounds=2))
    server = run(experiment)
    assert [list(record["sites"]) for record in server.history] == [["site-1"], ["site-2"], list(server.sites)]
    assert all(record["dropped"] == {} for record in server.history)
    assert set(server.missed.values()) == {0}


def test_a_message_without_a_public_set_is_answered_by_any_site() -> None:
    assembly = Assembly(SMALL)
    update = assembly.site("site-1").handle(Broadcast(0, "train", Assembly(SMALL).server(("site-1",)).state))
    assert update.num_samples == len(assembly.cohort.rows("train", "site-1"))


def test_a_site_whose_held_out_records_alone_have_reports_is_one_of_images() -> None:
    """What the server is told before the first reply is what the site says in it: CAR-MFL lends reports at once."""
    experiment = committed("car-mfl", data__size=300, training__batch_size=16, partition__image_only=0)
    experiment = replace(experiment, rounds=replace(experiment.rounds, rounds=1, evaluate_every=0, quorum=0))
    made = Assembly(experiment)
    cohort = made.cohort
    bare = (np.asarray(cohort.sites) == "site-1") & (np.asarray(cohort.splits) == "train")
    made._cohort = cohort.without(reports=bare, images=np.zeros(len(bare), dtype=bool))
    server = made.server(made.sites())
    assert server.modalities["site-1"] == ("image",)
    Federation(experiment.method, server, experiment.rounds, SequentialExchange(made.site)).run()
    assert [record["dropped"] for record in server.history] == [{}]
