"""Distortion tables: exactly 0 without re-training, drops as computed by hand, only the asked layers move."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.toy import SGD, Toy, World, clone, differs, pairs, same_bytes

from fedvlp.core.client import Client
from fedvlp.core.types import Broadcast, State, group
from fedvlp.evaluation.retrieval import Retrieval, paired_similarity, retrieval
from fedvlp.methods import FedAvg, FedDRA, FedRGB, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.image import timm_tower
from studies.protocols import distortion
from studies.protocols.distortion import Entry, Retraining, Trial, cross_table, encoder_layers, encoder_phase

pytestmark = pytest.mark.slow(seconds=5)

SIGNATURE = b"\x89PNG"


def world() -> World:
    data = {name: pairs(index, 12) for index, name in enumerate("abc")}
    for index, site in enumerate(data.values()):
        other = pairs(10 + index, 6)
        site.content["test"] = other.content["train"]
    return World(FedAvg(local_steps=3), data=data)


def trials(one: World, state: State) -> list[Trial]:
    return [Trial(site, state, one.client(site)) for site in one.data]


def test_zero_retraining_is_exactly_zero() -> None:
    one = world()
    state = clone(one.server().state)
    entries = cross_table(trials(one, state), one.data, Retraining(local_steps=0), SGD)
    assert [(e.trained_on, e.measured_on) for e in entries] == [(i, j) for i in "abc" for j in "abc"]
    assert [e.distortion for e in entries] == [0.0] * 9


def test_an_entry_is_the_drop_of_the_paired_cosine() -> None:
    """Computed again by hand: train on a from the same weights, measure on c."""
    one = world()
    state = clone(one.server().state)
    entries = cross_table(trials(one, state), one.data, Retraining(local_steps=3), SGD, round=5)
    client = one.client("a")

    def cosine() -> float:
        image, text = one.data["c"].content["test"]
        with torch.no_grad():
            output = client.model.eval()({"image": image, "text": text})
        return torch.nn.functional.cosine_similarity(output.image, output.text).mean().item()

    client.load(state)
    before = cosine()
    from fedvlp.federation.site import Site
    from fedvlp.federation.site_memory import SiteMemory

    Site(client, FedAvg(local_steps=3), SGD, SiteMemory(None)).handle(Broadcast(5, "train", state))
    entry = next(e for e in entries if (e.trained_on, e.measured_on) == ("a", "c"))
    assert entry.distortion == pytest.approx(before - cosine(), abs=1e-6)
    assert entry.distortion != 0


def test_recall_is_measured_where_there_is_a_whole_batch() -> None:
    """Recall@1 in the one batch of 32 pairs of site a, before and after; site b has too few."""
    one = world()
    one.data["a"].content["test"] = pairs(20, 32).content["train"]
    state = clone(one.server().state)
    (at_a, at_b) = cross_table(
        [Trial("a", state, one.client("a"))], {site: one.data[site] for site in "ab"}, Retraining(local_steps=9), SGD
    )
    image, text = one.data["a"].content["test"]

    def at_1(model: torch.nn.Module) -> float:
        with torch.no_grad():
            output = model.eval()({"image": image, "text": text})
        return retrieval(output.image, output.text, (1,))["mean/r1"]

    trained = at_1(one.client("a").model)
    initial = World(one.method, data=one.data).client("a")
    initial.load(state)
    assert (at_a.recall_before, at_a.recall_after) == pytest.approx((at_1(initial.model), trained))
    assert at_a.recall_before != at_a.recall_after
    assert (at_b.recall_before, at_b.recall_after) == (None, None)


def test_trials_do_not_disturb_each_other_or_the_weights_they_start_from() -> None:
    one = world()
    state = clone(one.server().state)
    kept = clone(state)
    together = cross_table(trials(one, state), one.data, Retraining(local_steps=3), SGD)
    alone = cross_table(trials(one, state)[2:], one.data, Retraining(local_steps=3), SGD)
    assert together[6:] == alone
    same_bytes(state, kept)


def test_models_of_their_own_start_from_their_own_weights() -> None:
    """Decentralised models on the union: each trial is measured against its own start."""
    one = world()
    starts = {site: clone(Toy(seed).state_dict()) for seed, site in enumerate("abc")}
    own = [Trial(site, start, one.client("a")) for site, start in starts.items()]
    entries = cross_table(own, {"b": one.data["b"]}, Retraining(local_steps=0), SGD)
    assert [e.distortion for e in entries] == [0.0] * 3
    assert len({e.similarity_before for e in entries}) == 3


def test_a_trial_starts_from_what_its_site_remembers() -> None:
    """In round 0 too, as of a phase before it."""
    seen = []

    class Told(Retraining):
        def receive(self, client: Client, message: Broadcast) -> None:
            seen.append({name: tensor.item() for name, tensor in client.memory.items()})

    one = world()
    state = clone(one.server().state)
    remembered = [{"x": torch.tensor(3.0)}, {}]
    both = [Trial(site, state, one.client(site), own) for site, own in zip("ab", remembered, strict=True)]
    cross_table(both, one.data, Told(local_steps=1), SGD)
    assert seen == [{"x": 3.0}, {}]


def test_what_one_site_makes_of_the_model_does_not_reach_the_next() -> None:
    """a measures with weights of its own; b's figures are those of the model as it was trained."""
    one = world()
    state = clone(one.server().state)

    def own(client: Client, state: State, site: str) -> None:
        client.load(state)
        if site == "a":
            with torch.no_grad():
                for parameter in client.model.parameters():
                    parameter.mul_(-3)

    there = {site: one.data[site] for site in "ab"}
    plain = cross_table(trials(one, state)[:1], there, Retraining(local_steps=3), SGD)
    changed = cross_table(trials(one, state)[:1], there, Retraining(local_steps=3), SGD, load=own)
    assert changed[0] != plain[0]
    assert changed[1] == plain[1]


def test_sites_without_test_records_are_left_out() -> None:
    one = world()
    del one.data["b"].content["test"]
    entries = cross_table(trials(one, clone(one.server().state)), one.data, Retraining(local_steps=0), SGD)
    assert {e.measured_on for e in entries} == {"a", "c"}
    assert len(entries) == 6


def test_a_site_needs_two_test_records() -> None:
    """Of one pair no retrieval can be measured; of two it can."""
    one = world()
    for site, count in (("b", 1), ("c", 2)):
        image, text = one.data[site].content["test"]
        one.data[site].content["test"] = image[:count], text[:count]
    entries = cross_table(trials(one, clone(one.server().state)), one.data, Retraining(local_steps=0), SGD)
    assert {e.measured_on for e in entries} == {"a", "c"}


def test_paired_similarity_by_hand() -> None:
    """Cosines 1, 0 and 0.6: mean 1.6 / 3."""
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    assert paired_similarity(image, text) == pytest.approx(1.6 / 3, rel=1e-6)
    one = world()
    metrics = Retrieval()(one.client("a"), ("test",))
    assert -1 <= metrics["test/similarity"] <= 1


# Which layers


def test_first_and_last_layers_of_each_encoder() -> None:
    names = ModelConfig(head_norm="layer").build().state_dict()
    first, last = encoder_layers(names, 1), encoder_layers(names, 1, deep=True)
    assert {name.split(".")[0] for name in first | last} == {"image_encoder", "text_encoder"}
    assert all(".blocks.0." in name for name in first)
    assert all(".blocks.1." in name for name in last)
    assert encoder_layers(names) == first  # a third of two layers is one
    assert encoder_layers(names, 2) == {name for name in names if ".blocks." in name}
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"2 layers, {count} asked"):
            encoder_layers(names, count)


def test_layers_of_the_papers_towers_are_found_by_name() -> None:
    vit = [f"image_encoder.model.blocks.{i}.attn.qkv.weight" for i in range(12)]
    bert = [f"text_encoder.model.encoder.layer.{i}.output.dense.weight" for i in range(6)]
    rest = ["image_encoder.model.patch_embed.proj.weight", "text_encoder.model.embeddings.word.weight",
            "image_alignment.blocks.0.weight", "image_head.0.weight"]  # fmt: skip
    assert encoder_layers([*vit, *bert, *rest], 4) == {*vit[:4], *bert[:4]}
    assert encoder_layers([*vit, *bert, *rest], 4, deep=True) == {*vit[8:], *bert[2:]}
    assert encoder_layers([*vit, *bert, *rest]) == {*vit[:4], *bert[:2]}


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 4), ("vit_tiny_patch16_224", 12)])
def test_layers_of_timm_towers(name: str, layers: int) -> None:
    tower = timm_tower(name, 224, False)
    names = [f"image_encoder.{n}" for n in tower.state_dict()]
    assert encoder_layers(names, layers)
    with pytest.raises(ValueError, match=f"{layers} layers"):
        encoder_layers(names, layers + 1)


def test_only_the_asked_layers_are_retrained() -> None:
    one = world()
    state = clone(one.server().state)
    only = frozenset(name for name in state if name.startswith("text_encoder"))
    cross_table(trials(one, state)[:1], one.data, Retraining(local_steps=2, only=only), SGD)
    trained = one.client("a").state()
    assert {name for name in state if differs(state, trained, [name])} == only


def test_a_methods_own_local_training_is_the_phase_that_trains_encoders() -> None:
    names = world().server().state
    assert encoder_phase(FedDRA(), names, 0) == "joint"
    assert encoder_phase(FedRGB(), names, 0) == "local"
    assert encoder_phase(Local(), names, 0) == "train"
    one = world()
    state = clone(names)
    guided = cross_table(trials(one, state), one.data, FedRGB(local_steps=3, alpha=50.0, dro_batch=4), SGD)
    plain = cross_table(trials(one, state), one.data, Retraining(local_steps=3), SGD)
    assert [e.distortion for e in guided] != [e.distortion for e in plain]
    assert {group(name) for name in state} == {"encoder", "alignment", "head"}


# Files

ENTRIES = [Entry("a", "a", 0.5, 0.75, 10.0, 20.0, 30.0, 40.0), Entry("a", "b", 0.5, 0.25), Entry("b", "a", 0.5, 0.4375),
           Entry("b", "b", 0.5, 0.5)]  # fmt: skip


def test_the_table_is_written_with_its_column_means(tmp_path: Path) -> None:
    """Columns: a = (-0.25 + 0.0625) / 2, b = (0.25 + 0) / 2."""
    table, picture = distortion.write_table(ENTRIES, tmp_path / "evaluation" / "distortion", "title")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["trained_on"], r["measured_on"], float(r["distortion"])) for r in rows] == [
        ("a", "a", -0.25), ("a", "b", 0.25), ("b", "a", 0.0625), ("b", "b", 0.0),
        ("mean", "a", -0.09375), ("mean", "b", 0.125),
    ]  # fmt: skip
    assert (rows[0]["recall1_before"], rows[1]["recall1_before"], rows[0]["recall5_after"]) == ("10.0", "", "40.0")
    assert picture.read_bytes()[:4] == SIGNATURE


def test_the_curves_are_written(tmp_path: Path) -> None:
    curves = {"a": {0: 0.1, 1: 0.2}, "b": {1: 0.3}}
    table, picture = distortion.write_curves(curves, tmp_path / "similarity", "title")
    assert table.read_text() == "round,site,similarity\n0,a,0.1\n1,a,0.2\n1,b,0.3\n"
    assert picture.read_bytes()[:4] == SIGNATURE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Folders of small runs by preset name: fedrgb, local, and creamfl with pairs, images alone and reports alone."""
    from fedvlp.run import presets
    from fedvlp.run.config import override
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.simulate import simulate

    folders = {}
    two = {"data.size": 200, "data.sites": 2}
    mixed = {"data.size": 300, "data.sites": 3, "partition.image_only": 1, "method.local_epochs": 1}
    for name, extra in (("fedrgb", {**two, "method.aligner_steps": 1}), ("local", two), ("creamfl", mixed)):
        experiment = presets.get(name)
        settings = {**extra, "rounds.rounds": 1, "method.local_steps": 1}
        for key, value in settings.items():
            experiment = override(experiment, key, str(value))
        there = tuple(own for own in experiment.site_models if own[0] in ("site-1", "site-2", "site-3"))
        experiment = replace(experiment, site_models=there)
        folders[name] = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment)
        simulate(experiment, folders[name])
    return folders


@pytest.mark.parametrize("what", ["distortion", "shallow", "deep", "similarity"])
@pytest.mark.slow(seconds=8)
def test_evaluate_writes_into_the_run(run, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from fedvlp.cli import app

    steps = [] if what == "similarity" else ["--steps", "1"]  # it trains nothing
    result = CliRunner().invoke(app, ["evaluate", str(run["fedrgb"].path), "--what", what, *steps])
    assert result.exit_code == 0, result.output
    for suffix in ("csv", "png"):
        assert (run["fedrgb"].path / "evaluation" / f"{what}.{suffix}").stat().st_size > 0


@pytest.mark.slow(seconds=8)
def test_evaluate_of_decentralised_models_trains_them_on_the_union(run) -> None:
    from studies.protocols.distortion import Layered, shallow

    table, _ = shallow(run["local"], Layered(steps=1))
    assert {row.split(",")[0] for row in table.read_text().splitlines()[1:]} == {
        "site-1's model on all", "site-2's model on all", "mean",
    }  # fmt: skip


@pytest.mark.slow(seconds=8)
def test_evaluate_own_and_zero_steps(run) -> None:
    from studies.protocols.distortion import Retrained, distort

    table, _ = distort(run["fedrgb"], Retrained(steps=0))
    assert {float(row.split(",")[2]) for row in table.read_text().splitlines()[1:]} == {0.0}
    assert distort(run["fedrgb"], Retrained(steps=1, own=True))[0].name == "distortion-own.csv"


@pytest.mark.slow(seconds=8)
def test_evaluate_takes_the_sites_that_hold_what_is_measured(run) -> None:
    """Of three sites the first holds pairs, the second images alone, the third reports alone."""
    from fedvlp.run.evaluate import EVALUATIONS as OURS
    from fedvlp.run.evaluate import choices_of
    from studies.protocols import EVALUATIONS

    sites = {
        "distortion": {"site-1"},
        "shallow": {"site-1"},
        "similarity": {"site-1"},
        "zero-shot": {"site-1", "site-2"},
    }
    for what, expected in sites.items():
        measure = {**OURS, **EVALUATIONS}[what]
        table = measure(run["creamfl"], choices_of(measure)(steps=1))[0]
        with table.open(newline="") as file:
            found = {value for row in csv.DictReader(file) for value in row.values()}
        assert {site for site in ("site-1", "site-2", "site-3") if site in found} == expected, what


def test_evaluate_refuses_what_it_does_not_know() -> None:
    from typer.testing import CliRunner

    from fedvlp.cli import app

    result = CliRunner().invoke(app, ["evaluate", "nowhere", "--what", "distorsion"])
    assert isinstance(result.exception, ValueError)
    assert "did you mean 'distortion'" in str(result.exception)


def test_options_that_a_re_training_does_not_read_are_refused(tmp_path: Path) -> None:
    """And its own options come by --set, as the type of its choices has them."""
    from typer.testing import CliRunner

    from fedvlp.cli import app

    (tmp_path / "config.json").write_text("{}")
    for words in (("--data", "synthetic"), ("--against", str(tmp_path)), ("--out", str(tmp_path))):
        for what in ("distortion", "shallow", "deep", "similarity"):
            done = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--what", what, *words])
            assert f"{words[0]} is not read by --what {what}; leave it out" in str(done.exception), what
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--what", "distortion", "--set", "probe.seeds=[0]"])
    assert "--set probe.seeds is not read by --what distortion" in str(done.exception)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--what", "deep", "--set", "layer=2"])
    assert "unknown setting 'layer'; did you mean 'layers'" in str(done.exception)
