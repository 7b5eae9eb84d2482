"""A run whose sites keep their batch normalisation: what is measured, served, evaluated and reported (spec Z3)."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.presets import SMALL

from fedvlp import load_model
from fedvlp.core import norm_statistics
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, FedAvg, Local
from fedvlp.report.run_page import write
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import Choices, models_at_sites, zero_shot
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import by_site
from fedvlp.run.simulate import simulate
from studies.protocols.distortion import Retrained, distort

SITES = ("site-1", "site-2")


def experiment(method: Any) -> Experiment:
    """Two unlike sites, one round, heads with batch normalisation."""
    return replace(
        SMALL, method=method, model=replace(SMALL.model, head_norm="batch"), norm_statistics="site",
        data=SyntheticCohort(sites=2, size=160, image_size=36), rounds=Rounds(rounds=1, evaluate_every=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment(FedAvg(local_steps=2)))
    simulate(folder.experiment(), folder)
    return folder


def last(run: RunFolder) -> dict[str, dict[str, float]]:
    """Site -> figures of the last evaluation."""
    record = run.history()[-1]
    assert record["phase"] == EVALUATE
    return by_site(record)


def test_statistics_that_nothing_reads_are_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg's training normalises by its batches: with a pass for every task the model has the same bytes."""
    three = replace(experiment(FedAvg(local_steps=2)), rounds=Rounds(rounds=3, evaluate_every=3))
    passes: list[str] = []
    estimate, complete = norm_statistics.estimate, norm_statistics.complete
    monkeypatch.setattr(norm_statistics, "estimate", lambda client: (passes.append(client.name), estimate(client))[1])
    servers = []
    for name, always in (("as needed", False), ("always", True)):
        if always:
            monkeypatch.setattr(norm_statistics, "complete", lambda *received: complete(*received[:3]))
        folder = RunFolder.create(tmp_path / name, three)
        simulate(three, folder, workers=1)
        servers.append((folder.server()[0].state, last(folder), len(passes)))  # type: ignore[index]
        passes.clear()
    (saved, figures, few), (whole, expected, many) = servers
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[key], whole[key]) for key in saved)
    assert {site: {k: v for k, v in of.items() if k.startswith("test/")} for site, of in figures.items()} == {
        site: {k: v for k, v in of.items() if k.startswith("test/")} for site, of in expected.items()
    }
    assert few < many


def test_the_server_holds_nobodys_normalisation(run: RunFolder) -> None:
    server, _ = Server.load(run.checkpoint)
    names = set(server.state) | {name.rpartition("/")[2] for name in server.memory}
    model = run.experiment().model.build(0).state_dict()
    assert names == model.keys() - norm_statistics.normalisation(model)


@pytest.mark.parametrize("site", SITES)
def test_a_site_is_served_with_what_it_was_measured_with(run: RunFolder, site: str) -> None:
    """The model from the folder with a site's own statistics has the figures of the site's last evaluation."""
    assembly = Assembly(run.experiment(), run.path)
    figures = Retrieval().measure(load_model(run.path, statistics=site), assembly.data(site), "test")
    assert figures.items() <= last(run)[site].items()
    other = next(name for name in SITES if name != site)
    figures = Retrieval().measure(load_model(run.path, statistics=other), assembly.data(site), "test")
    assert figures["test/similarity"] != last(run)[site]["test/similarity"]


def test_re_training_begins_at_what_a_site_has(run: RunFolder) -> None:
    """Before re-training, every column of the distortion table is the site's last evaluation, whoever re-trains."""
    table, _ = distort(run, Retrained(steps=1))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    for row in rows:
        if row["similarity_before"]:
            expected = last(run)[row["measured_on"]]["test/similarity"]
            assert float(row["similarity_before"]) == pytest.approx(expected, abs=1e-9)
            assert float(row["distortion"]) != 0
    assert len([row for row in rows if row["similarity_before"]]) == 4


def test_zero_shot_judges_the_model_that_each_site_has(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statistics are those that the site keeps, not the initial ones of the file."""
    seen: list[torch.Tensor] = []
    real = norm_statistics.complete

    def complete(client: Any, state: Any, known: Any) -> Any:
        whole = real(client, state, known)
        seen.append(whole["image_head.1.running_mean"])
        return whole

    monkeypatch.setattr(norm_statistics, "complete", complete)
    files = zero_shot(run, Choices())
    assert files[0].exists()
    memories = [Assembly(run.experiment(), run.path).site(site).memory.newest() for site in SITES]
    served = [norm_statistics.own(memory, norm_statistics.SERVED)["image_head.1.running_mean"] for memory in memories]
    assert [torch.equal(*pair) for pair in zip(seen, served, strict=True)] == [True, True]


def test_the_report_says_whose_statistics_were_used(run: RunFolder, tmp_path: Path) -> None:
    page = write(run).read_text(encoding="utf-8")
    said = "heads: batch; batch statistics, if any: each site&#x27;s own, estimated on its training records; in the "
    assert said + "model&#x27;s file: initial, of no records: each site keeps its own" in page
    plain = RunFolder.create(tmp_path, SMALL)
    assert "heads: layer; batch statistics, if any: averaged over the sites<" in write(plain).read_text("utf-8")


def test_a_pooled_model_is_measured_with_statistics_of_each_site(tmp_path: Path) -> None:
    """No site has trained: they are estimated on its training records, with the pooled affine weights."""
    folder = RunFolder.create(tmp_path, experiment(Centralized(local_steps=2)))
    simulate(folder.experiment(), folder)
    assembly = Assembly(folder.experiment(), folder.path)
    pooled = assembly.site("pooled")
    own = norm_statistics.own(pooled.memory.newest(), norm_statistics.SERVED)
    state = Server.load(folder.checkpoint)[0].state
    for site in SITES:
        client = replace(pooled.client, data=assembly.data(site))
        client.load(state | own)
        norm_statistics.estimate(client)
        figures = Retrieval().measure(client.model, client.data, "test")
        assert figures.items() <= last(folder)[site].items()
    client.load(state | own)
    assert Retrieval().measure(client.model, client.data, "test")["test/similarity"] != figures["test/similarity"]


def test_a_model_that_stayed_at_its_site_is_read_with_what_it_was_measured_with(tmp_path: Path) -> None:
    """The model in the site's memory has the statistics of its training; what it is used with are those estimated."""
    folder = RunFolder.create(tmp_path, experiment(Local(local_steps=2)))
    simulate(folder.experiment(), folder)
    assembly = Assembly(folder.experiment(), folder.path)
    own = models_at_sites(assembly, Server.load(folder.checkpoint)[0].state)
    for site in SITES:
        client = assembly.client(site, assembly.data(site))
        for state, same in ((own[site], True), (assembly.memory(site).newest(), False)):
            client.load(state)
            figures = Retrieval().measure(client.model.eval(), client.data, "test")
            assert (figures.items() <= last(folder)[site].items()) == same
