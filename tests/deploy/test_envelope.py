"""What a site lets jobs do: limits that hold whatever the job says, in the executor and in the outgoing filter."""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import re
import resource
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from support.cases import cases
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.core.types import Batch, Broadcast, Update
from fedvlp.core.validate import BOUNDS, LARGEST
from fedvlp.data.sources.table import TableSource
from fedvlp.deploy.envelope import (
    Behind,
    Envelope,
    EnvelopeError,
    Watched,
    differences,
    effective,
)
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.deploy.site_config import SiteConfig, at_site, envelope_at
from fedvlp.evaluation.audit import one_update as audit_outgoing
from fedvlp.evaluation.audit.membership import MEMBERS, OTHERS, POOL
from fedvlp.evaluation.audit.one_update import UnmeasuredError
from fedvlp.flare import messages
from fedvlp.flare.executor import ChildExecutor, command
from fedvlp.flare.jobs import COMMITTED, experiment_of, write_job
from fedvlp.flare.messages import BEHIND
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.privacy_filters import RECEIVED, AllowMetrics, SendAsReceived
from fedvlp.flare.task_handler import RefusedError, TaskHandler
from fedvlp.methods import FedAvg
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint, identity, override
from fedvlp.run.experiment import Experiment, Partition

ROOT = Path(__file__).resolve().parents[2]
SITE = "st-anna"
LIGHT = {"model__image_size": 24, "model__max_tokens": 16, "model__init": ""}  # where the towers do not matter
METRICS = ["loss/*", "val/*", "test/*", "probe/*", "seconds"]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A provisioned site without a file of its own: the defaults hold."""
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    (tmp_path / "kit" / "startup" / "fed_client.json").write_text("{}")
    (tmp_path / "kit" / "local").mkdir()
    return tmp_path / "kit"


def limits(kit: Path, **values: Any) -> None:
    (kit / "local" / "fedvlp.json").write_text(json.dumps({"envelope": values}))


def asked(preset: str = "fedavg", **settings: Any) -> Experiment:
    """A preset over the site's built-in cohort, with settings as a job has them."""
    chosen = replace(presets.get(preset), data=NamedData("synthetic", presets.get(preset).data.image_size))
    for key, value in settings.items():
        chosen = override(chosen, key.replace("__", "."), str(value))
    return chosen


def answered(
    kit: Path, experiment: Experiment, phase: str = "train", evaluate: int = 0, lr_scale: float = 1.0
) -> tuple[Update, Behind]:
    """The site's answer to round 0, from the untrained model, and what was counted."""
    handler = TaskHandler(experiment, SitePaths(SITE, str(kit / "runs"), str(kit / "local")))
    run = identity(experiment, f"{experiment.name}/001")
    state = Assembly(at_site(experiment, SITE, kit / "local")).server((SITE,)).state
    message = Broadcast(0, phase, state, evaluate=evaluate, lr_scale=lr_scale)
    update = handler.answer(message, run, lambda: False)
    assert handler.behind is not None
    return update, handler.behind


# Spec security S3: few records behind an update


@pytest.mark.parametrize(
    "settings",
    [
        {"method__local_steps": 1, "training__batch_size": 2, "training__weight_decay": 0},  # the attack of S3
        {"method__local_steps": 1, "training__batch_size": 63},
        {"method__local_steps": 31, "training__batch_size": 2},
    ],
)
def test_no_update_of_a_few_records_leaves_the_site(settings: dict[str, Any], kit: Path) -> None:
    experiment = asked(**settings, **LIGHT)
    records = settings["method__local_steps"] * settings["training__batch_size"]
    with pytest.raises(EnvelopeError, match="records; this site sends none of fewer than 64") as refused:
        answered(kit, experiment)
    said = int(re.findall(r"update is (\d+) records", str(refused.value))[0])
    assert records / 2 < said <= records


@pytest.mark.parametrize(
    ("steps", "settings", "scale"),
    [
        (40, {"training__optimizer": "sgd", "training__lr": 10.0, "training__batch_size": 2}, 1.0),
        (4, {"training__batch_size": 32}, 1000.0),
    ],
)
def test_a_huge_learning_rate_does_not_hide_the_first_batch_among_many(
    steps: int, settings: dict[str, Any], scale: float, kit: Path
) -> None:
    """80 and 128 records are drawn, but after the first step nothing is left to learn: the change is that batch's.

    The job asks for the rate, or the server for so many times the rate of an experiment that the site knows. SGD's rate
    is far below the one (1000) at which some processors overflow: there the update is lost, and nothing is counted.
    """
    plain = {"training__weight_decay": 0, "training__warmup_steps": 0, **LIGHT}
    experiment = asked(method__local_steps=steps, **plain, **settings)
    with pytest.raises(EnvelopeError, match=r"update is \d+ records") as refused:
        answered(kit, experiment, lr_scale=scale)
    batch = experiment.training.batch_size
    assert batch <= int(re.findall(r"update is (\d+) records", str(refused.value))[0]) < 1.5 * batch


HONEST_NOISE = {"training__dp_noise": 8.0, "training__dp_clip": 0.5, "model__head_norm": "layer"}
"""As in studies/README.md."""


def test_next_to_no_noise_does_not_hide_the_first_batch_either(kit: Path) -> None:
    """Under record-level noise gradients weigh what they did before it: 20 steps of about two records, of one's effect.

    Batches are drawn by the operating system's generator, so the first with a pair in it has two records or some more.
    """
    pytest.importorskip("opacus", reason="pip install 'fedvlp[privacy]'")
    noise = {"training__dp_noise": 1e-5, "training__dp_clip": 40, "training__dp_group": 2, "model__head_norm": "layer"}
    steps = {"method__local_steps": 20, "training__batch_size": 2, "training__lr": 1}
    experiment = asked(training__weight_decay=0, training__warmup_steps=0, **noise, **steps, **LIGHT)
    with pytest.raises(EnvelopeError, match=r"update is \d+ records") as refused:
        answered(kit, experiment)
    assert int(re.findall(r"update is (\d+) records", str(refused.value))[0]) < 20


def test_records_weigh_what_their_steps_do_by_hand() -> None:
    """Two batches of two, twice, with lengths 6 and 2: (2 * 6 + 2 * 2)^2 / (2 * 6^2 + 2 * 2^2)."""
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3])] * 2
    assert effective(rows, [torch.tensor(5.0)] * 4) == pytest.approx(4.0)
    assert effective(rows, [torch.tensor(length) for length in (6.0, 2.0, 6.0, 2.0)]) == pytest.approx(256 / 80)
    assert effective(rows, [torch.tensor(length) for length in (1.0, 0.0, 0.0, 0.0)]) == pytest.approx(2.0)
    assert effective(rows, [torch.tensor(0.0)] * 4) == 4


def test_where_steps_cannot_be_told_apart_all_records_count() -> None:
    """A public set's steps are among them."""
    watched = Watched(Toy())
    list(watched.train_batches(3, 1, torch.Generator()))
    watched.weigh([torch.tensor(1.0)] * 4)
    assert watched.behind().update == 3


def test_under_noise_the_records_of_each_group_weigh_what_its_gradient_does() -> None:
    """Batches are read and not drawn: of 4 records 2 had a gradient, or all an even one, or, with nothing told, none.

    (2 + 2)^2 / (2^2 + 2^2) = 2 records for two of a weight, and 2 / EVENNESS is 2.35.
    """

    def counted(lengths: list[float], rows: list[list[int]]) -> int:
        read = Watched(Toy())
        list(read.batches("train", 2, rows=4))
        read.weigh([torch.tensor(length) for length in lengths], [torch.tensor(row) for row in rows])
        return read.behind().update

    assert counted([4.0, 0.0], [[0, 1], [2, 3]]) == 2
    assert counted([4.0], [[0, 1]]) == 2
    assert counted([4.0, 4.0], [[0, 1], [2, 3]]) == 4
    assert counted([], []) == 0


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        pytest.param(
            4,
            {"training__dp_noise": 1.0, "training__batch_size": 64, "model__head_norm": "layer"},
            marks=pytest.mark.slow(seconds=3),
        ),
        (8, HONEST_NOISE),
    ],
)
def test_an_update_under_record_level_noise_leaves(steps: int, settings: dict[str, Any], kit: Path) -> None:
    """Its records are drawn one by one, and its gradients are mostly noise: what they were before it is even."""
    pytest.importorskip("opacus", reason="pip install 'fedvlp[privacy]'")
    update, behind = answered(kit, asked(method__local_steps=steps, **settings, **LIGHT))
    assert update.state
    assert behind.update > 100


def test_the_records_are_counted_once_each(kit: Path) -> None:
    """Three steps of 140 at a site of 280 training records, half of which are drawn twice."""
    update, behind = answered(kit, asked(method__local_steps=3, training__batch_size=140, **LIGHT))
    assert behind.update == 280
    assert update.state
    limits(kit, least_records=281)
    with pytest.raises(EnvelopeError, match="update is 280 records"):
        answered(kit, asked(method__local_steps=2, training__batch_size=140, **LIGHT))


def test_reading_all_records_does_not_hide_that_two_are_trained_on(kit: Path) -> None:
    """FedDRA's probe over every record, its training on two."""
    experiment = asked("feddra", method__align_steps=1, training__batch_size=2, method__dro_fraction=1, **LIGHT)
    with pytest.raises(EnvelopeError, match="update is 2 records"):
        answered(kit, experiment, "align")


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_the_words_of_an_update_stay_where_the_site_wants_that(decay: float, kit: Path) -> None:
    """Rows of the word embedding that move otherwise than the rest are those of words that occurred in the reports."""
    experiment = asked(
        method__local_steps=1, training__batch_size=64, training__weight_decay=decay, model__image_size=24,
        model__init="",
    )  # fmt: skip
    update, _ = answered(kit, experiment)
    before = Assembly(at_site(experiment, SITE, kit / "local")).server((SITE,)).state
    words = "text_encoder.words.weight"
    untouched = 1 - experiment.training.lr / experiment.training.warmup_steps * decay
    occurred = (update.state[words] - untouched * before[words]).abs().amax(1) > 1e-5
    assert 20 < int(occurred.sum()) < 1000, "of 4096: an observer reads the words off the plain update"
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, Engine(kit), private=True, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, SITE, private=False, sticky=False)
    context.set_prop(BEHIND, Behind(64, {"loss": 64}), private=True, sticky=False)
    context.set_prop(RECEIVED, before, private=True, sticky=False)
    reply = SendAsReceived(["text_encoder*word*"]).process(messages.send_update(update), context)
    left = messages.receive_update(reply, SITE)
    assert torch.equal(left.state[words], before[words])
    others = [name for name in update.state if name != words]
    assert all(torch.equal(left.state[name], update.state[name]) for name in others)
    reply = SendAsReceived(["text_encoder*wrd*"]).process(messages.send_update(update), context)
    assert "matches no tensor of this model" in str(messages.failure(reply))
    context.set_prop(RECEIVED, {words: before[words]}, private=True, sticky=False)
    reply = SendAsReceived(["*"]).process(messages.send_update(update), context)
    assert "was not received, so it cannot be sent as it came" in str(messages.failure(reply))


# S4: few records behind a figure


def test_no_figure_of_a_few_records_leaves_the_site(kit: Path) -> None:
    """The attack of S4: the exact loss of eight records, which is the fewest, as FedDRA's v_i.

    The server hears that it is unknown here.
    """
    update, behind = answered(kit, asked("feddra", method__dro_batch=2, method__dro_fraction=1e-9, **LIGHT), "align")
    assert behind.figures["probe"] == 8
    assert update.scalars.keys() == {"loss"}
    assert math.isnan(update.scalars["loss"])
    assert [name for name in update.metrics if name.startswith("loss/")]
    update, behind = answered(kit, asked("feddra", **LIGHT), "align")
    assert behind.figures["probe"] == 256, "of 280, the whole batches of 32"
    assert update.scalars["loss"] > 0
    assert update.metrics["probe/loss_error"] > 0


def test_recall_on_a_small_split_stays_at_the_site(kit: Path) -> None:
    """400 studies, 60 of them for validation and 60 for test."""
    few = asked(method__local_steps=2, **LIGHT)
    update, behind = answered(kit, few, evaluate=1)
    assert behind.figures == {"loss": 64, "probe": 280, "val": 60, "test": 0}
    assert "val/mean/r1" in update.metrics
    limits(kit, least_per_figure=61)
    update, _ = answered(kit, few, evaluate=2)
    assert not [name for name in update.metrics if name.startswith(("val/", "test/"))]
    assert [name for name in update.metrics if name.startswith("loss/")]


@pytest.mark.parametrize("name", cases(COMMITTED, often=("creamfl", "car-mfl"), seconds=8))
def test_a_committed_job_keeps_to_the_default_limits(name: str) -> None:
    """At each of its sites, in every phase of the first round: what it draws, without training on it."""
    experiment = presets.get(name)
    Envelope().admit(experiment)
    assembly = Assembly(experiment)
    for site_name in assembly.sites():
        client = assembly.site(site_name).client
        assert min(client.data.sizes["val"], client.data.sizes["test"]) >= Envelope().least_per_figure
        for phase in experiment.method.phases(0):
            client.data = Watched(client.data)
            message = Broadcast(0, phase, client.state())
            generator = torch.Generator().manual_seed(0)
            for _ in experiment.method.batches(client, message, experiment.training.batch_size, generator):
                pass
            assert client.data.behind().update >= Envelope().least_records
            client.data = client.data.unwatched


def test_a_site_measures_only_what_its_engineer_names(kit: Path) -> None:
    """The executor does not even read the other records."""
    few = asked(method__local_steps=2, **LIGHT)
    limits(kit, evaluate=["synthetic/val/retrieval", "pretrain/*/*"])
    update, behind = answered(kit, few, evaluate=2)
    assert behind.data == "synthetic"
    assert (behind.figures["val"], behind.figures["test"]) == (60, 0), "test was not read"
    assert {name.split("/")[0] for name in update.metrics} == {"loss", "val", "seconds"}
    limits(kit, evaluate=["synthetic/val/classification"])
    update, behind = answered(kit, few, evaluate=2)
    assert {name.split("/")[0] for name in update.metrics} == {"loss", "seconds"}
    limits(kit, evaluate=[])
    update, behind = answered(kit, few, evaluate=2)
    assert behind.figures["val"] == behind.figures["test"] == 0


def test_both_classes_of_a_finding_are_counted(kit: Path) -> None:
    """As the objective takes them: uncertain findings count for nothing, and what a report leaves out is absent."""
    classifier = asked("mfedavg", **LIGHT)
    experiment = replace(classifier, method=FedAvg(local_steps=2), partition=Partition())
    limits(kit, least_per_class=2)
    update, behind = answered(kit, experiment, evaluate=1)
    cohort = at_site(experiment, SITE, kit / "local").data.build()
    labels = cohort.labels[cohort.rows("val")]
    positive = dict(zip(cohort.label_names, (labels == 1).sum(0).tolist(), strict=True))
    absent = dict(zip(cohort.label_names, (60 - (abs(labels) == 1).sum(0)).tolist(), strict=True))
    assert behind.classes == {f"val/{name}": min(n, absent[name]) for name, n in positive.items()}
    few, common = min(positive, key=lambda name: positive[name]), max(positive, key=lambda name: positive[name])
    assert 2 < positive[few] < positive[common] < 40
    assert {f"val/auc/{few}", "val/auc/macro"} < update.metrics.keys()
    limits(kit, least_per_class=positive[few] + 1)
    update, _ = answered(kit, experiment, evaluate=1)
    assert f"val/auc/{common}" in update.metrics
    assert not {f"val/auc/{few}", "val/auc/macro"} & update.metrics.keys()


class Toy:
    """Data of 6 training and 4 validation records, read two at a time, with two findings each."""

    num_train = 6
    label_names = ("Edema", "Rare")
    labels = torch.tensor([[1, 0], [1, 1], [0, 0], [0, math.nan], [-1, 0], [1, 0]])

    def train_batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        return ({"row": torch.tensor([step]), "labels": self.labels[:1]} for step in range(steps))

    def batches(self, split: str, batch_size: int, rows: int = 4, labels: bool = True) -> Iterator[Batch]:
        for row in torch.arange(rows).split(2):
            yield {"row": row, **({"labels": self.labels[row]} if labels else {})}


def counted(*readings: tuple[str, int], steps: int = 0, labels: bool = True) -> Behind:
    """What is behind a task that reads so many records of these splits, one after the other, and takes steps."""
    watched = Watched(Toy())
    list(watched.train_batches(steps, 1, torch.Generator()))
    for split, rows in readings:
        list(watched.batches(split, 2, rows=rows, labels=labels))
    return watched.behind()


def test_the_smallest_reading_of_a_split_counts() -> None:
    """A figure of all and one of two records: the second is what the server could learn from."""
    assert counted(("val", 4), ("val", 2), ("test", 3), ("val", 4)).figures == {
        "loss": 0, "probe": 6, "val": 2, "test": 3,
    }  # fmt: skip
    assert counted().figures == {"loss": 0, "probe": 6, "val": 0, "test": 0}, "nothing was measured"
    assert counted(("train", 6), ("train", 2), ("val", 0), ("val", 4)).figures["probe"] == 2
    assert counted(("train", 6), ("val", 0), ("val", 4)).figures["val"] == 4, "a reading of nothing measures nothing"


def test_a_method_that_trains_on_what_it_reads_is_counted_by_that() -> None:
    """A selector's gradient takes no training step; validation records are nothing that it trains on."""
    assert counted(("train", 2), ("train", 3), ("val", 4)).update == 3
    assert counted(("train", 6), steps=2).update == 2, "with steps they alone count"


def test_the_fewer_of_those_with_and_without_a_finding_of_every_reading() -> None:
    """Uncertain (-1) and unknown (nan) are neither, and training records, which are read first, do not count.

    Of the first four records two have an edema and two have none; one has the rare finding and two lack it. Of the
    first three it is 2 : 1 and 1 : 2, and of all six, 3 : 2 and 1 : 4.
    """
    assert counted(("train", 4), ("val", 4), ("test", 6)).classes == {
        "val/Edema": 2, "val/Rare": 1, "test/Edema": 2, "test/Rare": 1,
    }  # fmt: skip
    assert counted(("val", 3), ("val", 4)).classes == {"val/Edema": 1, "val/Rare": 1}
    assert counted(("val", 4), ("val", 2)).classes == {"val/Edema": 0, "val/Rare": 1}
    assert counted(("val", 4), labels=False).classes == {}


# Which experiments


def test_a_site_that_names_its_presets_runs_no_other_setting(kit: Path) -> None:
    envelope = Envelope(presets=("fedavg",))
    envelope.admit(asked())
    envelope.admit(presets.get("fedavg"))
    Envelope(accepted=("0" * 16, fingerprint(asked("fedprox")))).admit(asked("fedprox"))
    for other in (asked("fedprox"), asked(method__local_steps=49), asked(training__lr=1), replace(asked(), name="x")):
        with pytest.raises(EnvelopeError, match=f"experiment {fingerprint(other)} is not on this site's accept list"):
            envelope.admit(other)
    limits(kit, presets=["fedprox"])
    with pytest.raises(EnvelopeError, match="not on this site's accept list"):
        answered(kit, asked())


OTHER_DATA = (
    ("data.size", str(2**31 - 1)), ("data.size", "2001"), ("data.seed", "1"), ("data.beta", "1e-9"),
    ("data.sites", "6"), ("data.image_size", "73"),
)  # fmt: skip


def test_a_preset_runs_on_its_own_data_or_on_the_sites() -> None:
    """The name of a preset says nothing of the size of what the synthetic cohort draws at the site."""
    envelope, fedavg = Envelope(presets=("fedavg",)), presets.get("fedavg")
    envelope.admit(override(fedavg, "data.size", "1000"))
    for size in (64, 72):
        envelope.admit(replace(fedavg, data=NamedData("pretrain", size)))
    for size in (63, 73, 1024):
        with pytest.raises(EnvelopeError, match="not on this site's accept list"):
            envelope.admit(replace(fedavg, data=NamedData("pretrain", size)))
    for setting in OTHER_DATA:
        with pytest.raises(ValueError, match=r"not on this site's accept list|at most 1,000,000"):
            envelope.admit(override(fedavg, *setting))


EXTREMES: list[tuple[str, Any, str]] = [
    ("training", {"lr": 1e300}, r"training\.lr is beyond 1000000;"),
    ("training", {"warmup_steps": 2**40}, r"training\.warmup_steps is beyond"),
    ("training", {"weight_decay": math.inf}, r"training\.weight_decay is beyond"),
    ("training", {"compile": math.inf}, r"training\.compile is a float"),
    ("training", {"micro_batch": 7.5}, r"training\.micro_batch is a float"),
    ("method", {"local_steps": True}, r"method\.local_steps is a bool"),
    ("model", {"embedding_dim": 2**31}, r"model\.embedding_dim is beyond"),
    ("rounds", {"seed": 2**64}, r"rounds\.seed is beyond 9223372036854775808"),
    ("partition", {"label_code": 7}, r"partition\.label_code is a int"),
]


def test_no_job_with_a_number_that_no_honest_job_has_runs() -> None:
    """Also where any experiment may run: FLARE builds a job's classes from whatever values it gives."""
    for group, values, why in EXTREMES:
        fedavg = presets.get("fedavg")
        experiment = replace(fedavg, **{group: replace(getattr(fedavg, group), **values)})
        with pytest.raises(EnvelopeError, match=why):
            Envelope().admit(experiment)


def test_the_limits_themselves_are_allowed_and_one_more_is_not_wherever_it_stands() -> None:
    """Also in the model of one site, which stands in a tuple of tuples."""
    fedavg = presets.get("fedavg")

    def with_(lr: float, threads: int, dim: int) -> Experiment:
        training = replace(fedavg.training, lr=lr, threads=threads)
        model = replace(fedavg.model, embedding_dim=dim)
        return replace(fedavg, training=training, site_models=(("st-anna", model),))

    Envelope().admit(with_(lr=1e6, threads=16, dim=4096))
    with pytest.raises(EnvelopeError, match=r"embedding_dim is beyond 4096"):
        Envelope().admit(with_(lr=1e6, threads=16, dim=4097))
    with pytest.raises(EnvelopeError, match=r"training\.threads is 17"):
        Envelope().admit(with_(lr=1e6, threads=17, dim=4096))


def settings_of_jobs() -> list[tuple[type, str, bool]]:
    """(class, setting, whether it is a whole number) of every number in the classes that a site lets FLARE build."""
    named = json.loads((ROOT / "provisioning" / "site" / "resources.json").read_text())["class_allow_list"]
    ours = [name.rpartition(".") for name in named if name.startswith("fedvlp.")]
    kinds = [getattr(importlib.import_module(module), name) for module, _, name in ours]
    hints = [(kind, typing.get_type_hints(kind)) for kind in kinds if is_dataclass(kind)]
    found = [(kind, f.name, str(hint[f.name])) for kind, hint in hints for f in fields(kind)]
    return [(kind, name, "int" in hint) for kind, name, hint in found if "int" in hint or "float" in hint]


def test_every_number_of_a_job_has_a_bound_and_one_more_is_refused() -> None:
    """Of every class that FLARE may build at a site, whatever the class itself checks."""
    settings = settings_of_jobs()
    assert len(settings) > 150
    experiment = replace(presets.get("fedavg"))
    for kind, name, whole in settings:
        assert not whole or name in BOUNDS, f"{kind.__name__}.{name} needs a bound in core/validate.py"
        most = BOUNDS.get(name, LARGEST)
        for value in (most + 1, -most - 1) if whole else (most + 0.5, -math.inf, math.nan):
            object.__setattr__(experiment, "extra", with_value(kind, name, value))
            with pytest.raises(EnvelopeError, match=rf"extra\.{name} is beyond {most};"):
                Envelope(image_size=BOUNDS["image_size"]).admit(experiment)


def with_value(kind: type, name: str, value: float) -> Any:
    """Settings of this class at their defaults, but for one that no check has seen."""
    made = object.__new__(kind)
    for f in fields(kind):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        object.__setattr__(made, f.name, "x" if default is MISSING else default)
    object.__setattr__(made, name, value)
    return made


SIZES = ("adapter_rank", "embedding_dim", "head_hidden", "image_size", "max_tokens", "vocabulary", "batch_size")


def bounded(said: Any) -> None:
    """Of each size at its bound: whether its training fits into 3 GB more than this process has, or is refused."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30,) * 2)
    for name in SIZES:
        lora = override(override(presets.get("fedavg"), "model.init", "tiny-pool"), "model.adapters", "lora")
        group = "training" if name == "batch_size" else "model"
        job = override(lora if name == "adapter_rank" else presets.get("fedavg"), f"{group}.{name}", str(BOUNDS[name]))
        job = override(job, "data.size", "200")
        try:
            Envelope(memory_gb=2).refuse_large(job, "site-1")
        except EnvelopeError:
            said.put((name, "refused"))
            continue
        client = Assembly(job).site("site-1").client
        (batch,) = client.data.train_batches(1, job.training.batch_size, torch.Generator())
        output = client.model(batch)
        (output.image.sum() + output.text.sum()).backward()
        said.put((name, "fits"))


def test_a_job_at_a_bound_fits_into_the_sites_memory_or_is_refused_before_it_is_built() -> None:
    """In a process whose memory the system limits."""
    forks = multiprocessing.get_context("fork")
    said = forks.SimpleQueue()
    process = forks.Process(target=bounded, args=(said,))
    process.start()
    process.join()
    assert process.exitcode == 0
    outcomes = dict(said.get() for _ in SIZES)
    assert outcomes.keys() == set(SIZES)
    assert {"fits", "refused"} == set(outcomes.values())


def test_a_site_refuses_training_beyond_its_memory_and_images_beyond_its_size(kit: Path) -> None:
    limits(kit, least_records=2, memory_gb=0.01)
    with pytest.raises(
        EnvelopeError, match=r"needs an estimated 0\.\d GB of memory in each process; .* 0\.0 GB"
    ) as seen:
        answered(kit, asked())
    assert "needs more memory than this site has" in seen.value.public
    limits(kit, image_size=71)
    with pytest.raises(EnvelopeError, match=r"data\.image_size is beyond 71"):
        answered(kit, asked())


def test_one_of_what_a_site_names_is_enough_and_one_is_needed() -> None:
    """Whether it names several presets, or an experiment and no preset."""
    fedavg, fedprox, feddra = map(presets.get, ("fedavg", "fedprox", "feddra"))
    several, single = Envelope(presets=("fedavg", "fedprox")), Envelope(accepted=(fingerprint(fedavg),))
    several.admit(fedprox)
    single.admit(fedavg)
    for envelope in (several, single):
        with pytest.raises(EnvelopeError, match="not on this site's accept list"):
            envelope.admit(feddra)


def test_the_engineer_is_shown_each_setting_that_is_not_the_presets_and_no_other() -> None:
    assert differences(asked(method__local_steps=2)) == [
        "method.local_steps = 2 (preset fedavg: 50)",
        "data = fedvlp.deploy.NamedData (preset fedavg: fedvlp.data.SyntheticCohort)",
        "data.name = synthetic",
    ]


def test_a_preset_on_data_of_another_kind_is_refused() -> None:
    """Files that a job brings are not the preset's cohort, and no data set that the site names."""
    brought = replace(presets.get("fedavg"), data=TableSource(path="pairs.csv"))
    with pytest.raises(EnvelopeError, match="not on this site's accept list"):
        Envelope(presets=("fedavg",)).admit(brought)


def test_the_numbers_of_every_preset_are_within() -> None:
    """Where a method shows single records, as FedFed's preset does, the site has accepted the experiment."""
    for experiment in presets.PRESETS.values():
        shows = bool(experiment.method.discloses())
        Envelope(accepted=(fingerprint(experiment),) if shows else ()).admit(experiment)


SHOWING = {"method__shared": 64, "method__noise": 0, "method__distil_phases": 0}
"""FedFed with as many films as ``least_records``, without noise."""


@pytest.mark.parametrize("named", [{}, {"presets": ("fedavg",)}, {"accepted": ("0" * 16,)}])
def test_a_method_that_shows_single_records_runs_only_where_its_experiment_was_accepted(named: dict[str, Any]) -> None:
    """64 films, each by itself, are an update of 64 records to the count; the name of a preset is not enough."""
    for experiment in (asked("fedfed", **SHOWING), presets.get("fedfed")):
        with pytest.raises(EnvelopeError, match=r"sends something of single records|not on this site's accept list"):
            Envelope(**named).admit(experiment)
        Envelope(accepted=(fingerprint(experiment),)).admit(experiment)
        Envelope().admit(override(experiment, "method.share", "false"))


def test_no_film_leaves_where_nobody_accepted_that(kit: Path) -> None:
    """The films were found pixel by pixel in the answer to FedFed's phase ``give``: residuals of a known distiller."""
    wanted = asked("fedfed", **SHOWING)
    with pytest.raises(EnvelopeError, match=r"sends something of single records.*method\.share=false") as refused:
        answered(kit, wanted, "give")
    assert refused.value.public == (
        f"EnvelopeError: the method of experiment {fingerprint(wanted)} sends something of single records "
        "beside weights, and this site's engineer has not accepted it with `fedvlp site accept`; choose settings that "
        "send none"
    )


def test_the_engineer_is_told_what_an_experiment_shows_before_it_is_accepted(kit: Path, tmp_path: Path) -> None:
    limits(kit)
    wanted = replace(asked("fedfed", **SHOWING, **LIGHT), partition=Partition())
    job = write_job(wanted, tmp_path / "job", sites=(SITE,), custom=False)
    done = CliRunner().invoke(app, ["site", "accept", str(job), "--kit", str(kit)], input="n\n")
    assert done.exit_code == 1
    assert wanted.method.discloses() in " ".join(done.output.split())
    done = CliRunner().invoke(app, ["site", "accept", str(job), "--kit", str(kit), "--yes"])
    assert done.exit_code == 0, done.output
    answered(kit, wanted, "give")


def test_an_encrypted_job_of_a_preset_is_that_preset() -> None:
    """Its export drops the limits that need readable updates; another setting of the rounds is another experiment."""
    envelope, fedavg = Envelope(presets=("fedavg",)), presets.get("fedavg")
    envelope.admit(replace(fedavg, rounds=fedavg.rounds.of_encrypted()))
    with pytest.raises(EnvelopeError, match="is not on this site's accept list"):
        envelope.admit(replace(fedavg, rounds=replace(fedavg.rounds, max_share=1.0)))


def test_an_engineer_accepts_one_experiment(kit: Path, tmp_path: Path) -> None:
    """By the job folder that the lead sent: its fingerprint is what the server's job must have."""
    limits(kit, least_records=32)
    wanted = asked(method__local_steps=2, **LIGHT)
    job = write_job(wanted, tmp_path / "job", sites=(SITE,), custom=False)
    runner = CliRunner()
    done = runner.invoke(app, ["site", "accept", str(job), "--kit", str(kit)], input="n\n")
    assert done.exit_code == 1
    assert json.loads((kit / "local" / "fedvlp.json").read_text()) == {"envelope": {"least_records": 32}}
    done = runner.invoke(app, ["site", "accept", str(job), "--kit", str(kit)], input="y\n")
    assert done.exit_code == 0, done.output
    assert "method.local_steps = 2 (preset fedavg: 50)" in done.output
    assert "data = fedvlp.deploy.NamedData (preset fedavg: fedvlp.data.SyntheticCohort)" in done.output
    assert "training.lr" not in done.output, "as in the preset"
    assert SiteConfig.load(kit / "local").envelope == Envelope(accepted=(fingerprint(wanted),), least_records=32)
    answered(kit, wanted)  # of 64 records
    with pytest.raises(EnvelopeError, match="not on this site's accept list"):
        answered(kit, asked(method__local_steps=3))


@pytest.mark.parametrize(("round", "phase"), [(6, "train"), (1000, "train"), (7, "evaluate")])
def test_an_experiment_has_no_more_rounds_than_it_says(round: int, phase: str, kit: Path) -> None:
    """Whatever the server asks for: the engineer has read how many updates will leave."""
    experiment = asked(**LIGHT)
    handler = TaskHandler(experiment, SitePaths(SITE, str(kit / "runs"), str(kit / "local")))
    run = identity(experiment, "fedavg/001")
    assert experiment.rounds.rounds == 6
    with pytest.raises(RefusedError, match=f"it is for round {round}, and the run has 6, from 0 on"):
        handler.answer(Broadcast(round, phase, {}), run, lambda: False)


def test_a_folder_that_is_no_job_is_not_accepted(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no job of fedvlp"):
        experiment_of(tmp_path)
    limits(kit, least=1)
    job = write_job(asked(), tmp_path / "job", sites=(SITE,), custom=False)
    before = (kit / "local" / "fedvlp.json").read_text()
    done = CliRunner().invoke(app, ["site", "accept", str(job), "--kit", str(kit), "--yes"])
    assert done.exit_code != 0
    assert isinstance(done.exception, SiteConfigError)
    assert (kit / "local" / "fedvlp.json").read_text() == before, "a file with a mistake in it is left alone"


def test_a_job_without_a_presets_name_is_shown_whole() -> None:
    shown = differences(replace(asked(), name="mine"))
    assert "training.batch_size = 32" in shown
    assert "method = fedvlp.methods.FedAvg" in shown


# What the receiver of an update learns of single records


@pytest.fixture
def few_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record costs a gradient of the model."""
    monkeypatch.setattr(audit_outgoing, "MOST", 64)


def leak(kit: Path, steps: int, records: int) -> tuple[TaskHandler, Broadcast, dict[str, str]]:
    """A site that trains so many steps on so few records from towers that have learned."""
    chosen = asked(method__local_steps=steps, training__lr=1e-3, training__warmup_steps=0, training__batch_size=16)
    chosen = override(chosen, "model.head_norm", "layer")
    handler = TaskHandler(chosen, SitePaths(SITE, str(kit / "runs"), str(kit / "local")))
    assembly = Assembly(at_site(chosen, SITE, kit / "local"))
    site = handler._prepared({"folder": "fedavg/001"})
    rows = {split: assembly.cohort.rows(split, SITE) for split in ("train", "val", "test")}
    site.client.data = assembly.serve(assembly.cohort, {**rows, "train": rows["train"][:records]})
    run = identity(chosen, "fedavg/001")
    return handler, Broadcast(0, "train", assembly.server((SITE,)).state), run


@pytest.mark.usefixtures("few_compared")
def test_an_update_that_gives_records_away_does_not_leave(kit: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A planted leak: sixteen records, again and again. The log has the area and nothing of a record."""
    limits(kit, least_records=2, most_membership=60)
    handler, message, run = leak(kit, steps=40, records=16)
    with (
        caplog.at_level("INFO"),
        pytest.raises(EnvelopeError, match="AUC of this update is") as said,
    ):
        handler.answer(message, run, lambda: False)
    assert float(str(said.value).partition("update is ")[2].split()[0]) > 75
    assert "limit of 60 %" in said.value.public
    (line,) = [one for one in caplog.messages if "membership of the update" in one]
    assert 14 <= int(line.rpartition(" ")[2]) <= 16, "those that others are like"


@pytest.mark.usefixtures("few_compared")
def test_an_honest_update_leaves_as_it_was_trained(kit: Path) -> None:
    """Measuring changes no byte of it, although the update's tensors are the model's own."""
    limits(kit, most_membership=70)
    handler, message, run = leak(kit, steps=4, records=400)
    measured = {name: t.clone() for name, t in handler.answer(message, run, lambda: False).state.items()}
    limits(kit)
    plain = handler.answer(message, run, lambda: False).state
    assert measured.keys() == plain.keys()
    assert all(torch.equal(measured[name], plain[name]) for name in plain)
    assert any(not torch.equal(plain[name], message.state[name]) for name in plain)


def test_what_cannot_be_measured_does_not_leave(kit: Path) -> None:
    limits(kit, least_records=2, most_membership=70)
    handler, message, run = leak(kit, steps=1, records=16)
    site = handler._prepared({"folder": "fedavg/001"})
    site.client.data._rows = {"train": site.client.data._rows["train"]}
    with pytest.raises(UnmeasuredError, match="too few held-out records"):
        handler.answer(message, run, lambda: False)


def test_of_many_records_a_fixed_sample_is_attacked_and_not_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides: a table's first rows may be of one year. The same records every time, each once."""
    monkeypatch.setattr(audit_outgoing, "MOST", 40)
    client = Assembly(presets.get("fedavg")).site("site-1").client
    sizes = client.data.sizes  # type: ignore[attr-defined]
    trained = range(10, sizes["train"])

    def read() -> dict[str, list[int]]:
        chosen = audit_outgoing._batches(client, trained)
        return {side: torch.cat([batch["row"] for batch in batches]).tolist() for side, batches in chosen.items()}

    first = read()
    assert read() == first
    members, held = first[MEMBERS], first[POOL] + first[OTHERS]
    assert len(members) == len(set(members)) == 40
    assert set(members) <= set(trained)
    assert max(members) > sizes["train"] * 3 // 4, "not the first rows"
    assert len(held) == 40
    assert max(held) > 40, "nor of a held-out split"


def test_a_job_that_needs_too_few_sites_is_refused(kit: Path) -> None:
    """By number: 0 would be all sites but one, which a site cannot count. A preset stays one with a quorum."""
    envelope, fedavg = Envelope(least_quorum=4, presets=("fedavg",)), presets.get("fedavg")

    def needing(quorum: int) -> Experiment:
        return replace(fedavg, rounds=replace(fedavg.rounds, quorum=quorum))

    for few in (0, 3):
        with pytest.raises(EnvelopeError, match=f"quorum is {few}; this site takes part only where .* at least 4"):
            envelope.admit(needing(few))
    envelope.admit(needing(4))
    assert "membership" not in envelope.in_words()
    assert "needs the updates of 4 sites" in envelope.in_words()
    assert "membership of an update up to 60 %" in Envelope(most_membership=60).in_words()
    for wrong in (
        {"most_membership": 40},
        {"most_membership": 101},
        {"least_quorum": -1},
        {"memory_gb": -1},
        {"image_size": 0},
        {"cache_gb": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Envelope(**wrong)  # type: ignore[arg-type]


# Processes, threads, hours


def test_threads_and_hours_are_the_sites_to_give(kit: Path) -> None:
    with pytest.raises(EnvelopeError, match=r"training\.threads is 17; this site lets a job have at most 16"):
        answered(kit, asked(training__threads=17))
    many = replace(asked(), server_training=replace(asked().training, threads=17))
    with pytest.raises(EnvelopeError, match=r"training\.threads is 17"):
        Envelope().admit(many)
    limits(kit, hours=1e-9)
    with pytest.raises(EnvelopeError, match=r"took longer than the 1e-09 hours"):
        answered(kit, asked())


def test_a_task_has_its_hours_from_the_moment_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours are 7,200 seconds; until then the task stops when it is told to, and only then."""
    now = 1000.0
    monkeypatch.setattr("fedvlp.deploy.envelope.time.monotonic", lambda: now)
    told = False
    stop = Envelope(hours=2).in_time(lambda: told)
    now = 8200.0
    assert stop() is False
    told = True
    assert stop() is True
    now = 8200.5
    with pytest.raises(EnvelopeError, match="took longer than the 2 hours"):
        stop()


def test_a_job_gets_no_more_processes_than_the_site_gives(kit: Path) -> None:
    fields = {name: getattr(asked(), name) for name in ("name", "method", "data")}
    executor = ChildExecutor(processes=64, **fields)
    assert executor._processes_here(kit / "local") == 8
    limits(kit, processes=2)
    assert executor._processes_here(kit / "local") == 2
    assert ChildExecutor(processes=1, **fields)._processes_here(kit / "local") == 1
    (kit / "startup" / "fed_client.json").unlink()
    assert executor._processes_here(kit / "local") == 64, "on one's own machine"
    assert command(2) != command(1)


# The file


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"least": 1}, "unknown limit 'least'"),
        ({"least_records": 1}, "a figure of one record is that record's"),
        ({"least_per_figure": 0}, "a figure of one record is that record's"),
        ({"least_records": "64"}, "least_records is '64'"),
        ({"hours": 0}, "hours is 0"),
        ({"presets": ["fedavgg"]}, "names fedavgg"),
        ({"presets": "fedavg"}, "presets is 'fedavg'"),
        ({"accepted": [1]}, "accepted is no list of texts"),
        ({"evaluate": ["pretrain"]}, r"evaluate has 'pretrain'; write \"<data set>/<split>/<evaluation>\""),
        ({"evaluate": ["*/train/*"]}, r"evaluate has '\*/train/\*'"),
        ({"evaluate": ["*/val/zero_shot"]}, "an evaluation of retrieval, classification, or"),
        ({"least_per_class": 1}, "least_per_class is 1"),
    ],
)
def test_a_mistake_in_the_limits_lets_no_job_run(values: dict[str, Any], why: str, kit: Path) -> None:
    limits(kit, **values)
    with pytest.raises(SiteConfigError, match=why):
        envelope_at(kit)
    with pytest.raises(SiteConfigError, match=why):
        answered(kit, replace(asked(), data=presets.get("fedavg").data))


def test_nobodys_own_machine_has_limits(tmp_path: Path) -> None:
    assert envelope_at(tmp_path) is None


def test_the_engineer_reads_them_in_words() -> None:
    assert Envelope(presets=("fedavg",), accepted=("abc",)).in_words() == (
        "jobs may run preset fedavg, experiment abc; an update rests on at least 64 distinct records, a figure on 20, "
        "one of a finding on 10 with it and as many without; measured may be anything on the val records of any data "
        "set, and anything on the test records of any data set; at most 8 processes of 16 threads, 24 hours a task; "
        "the memory of this machine, images of 1024 pixels, 500 GB of them decoded"
    )
    named = Envelope(evaluate=("pretrain/*/retrieval",)).in_words()
    assert "measured may be retrieval on the held-out records of pretrain;" in named
    assert "measured may be nothing;" in Envelope(evaluate=()).in_words()
    assert Envelope().in_words().startswith("jobs may run any experiment;")


# Once more on the way out


class Engine:
    def __init__(self, kit: Path) -> None:
        self.kit = kit

    def get_workspace(self) -> Engine:
        return self

    def get_root_dir(self) -> str:
        return str(self.kit)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None: ...


FIGURES = {"loss/contrastive": 1.0, "probe/loss": 2.0, "val/mean/r1": 3.0, "seconds": 4.0}


def sent(kit: Path, behind: Behind | None, state: bool = True, metrics: dict[str, float] = FIGURES) -> Update | str:
    """What the plain policy lets go of an update that somebody's executor made."""
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, Engine(kit), private=True, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, SITE, private=False, sticky=False)
    if behind is not None:
        context.set_prop(BEHIND, behind, private=True, sticky=False)
    update = Update(SITE, 0, "train", 300, {"w": torch.zeros(3)} if state else {}, metrics=metrics)
    reply = AllowMetrics(METRICS).process(messages.send_update(update), context)
    failed = messages.failure(reply)
    return failed.text if failed else messages.receive_update(reply, SITE)


def test_the_filter_lets_go_what_was_counted_and_is_enough(kit: Path) -> None:
    whole = sent(kit, Behind(64, {"loss": 64, "probe": 20, "val": 20}))
    assert isinstance(whole, Update)
    assert whole.metrics.keys() == {"loss/contrastive", "probe/loss", "val/mean/r1", "seconds"}
    few = sent(kit, Behind(64, {"loss": 64, "probe": 19, "val": 0}))
    assert isinstance(few, Update)
    assert few.metrics.keys() == {"loss/contrastive", "seconds"}


def test_the_filter_holds_back_what_is_too_little_or_was_never_counted(kit: Path) -> None:
    """An executor of another make counts nothing; a job cannot say a number."""
    said = "EnvelopeError: the effective sample size of the update is"
    assert str(sent(kit, Behind(63, {"loss": 63}))).startswith(f"{said} 63 records")
    assert str(sent(kit, None)).startswith(f"{said} 0 records")
    measured = sent(kit, None, state=False)
    assert isinstance(measured, Update)
    assert measured.metrics.keys() == {"seconds"}
    limits(kit, least_records="x")
    assert "SiteConfigError" in str(sent(kit, Behind(1000, {})))


def test_tensors_beside_the_model_rest_on_records_too() -> None:
    """CreamFL's mean representations, say, leave in an update without a model."""
    aux = Update(SITE, 0, "train", 300, {}, aux={"image": torch.zeros(3)})
    with pytest.raises(EnvelopeError, match="of the update is 63 records"):
        Envelope().passed(aux, Behind(63))
    assert Envelope().passed(aux, Behind(64)).aux == aux.aux


def test_a_methods_scalars_are_unknown_where_its_probe_was_small() -> None:
    update = Update(SITE, 0, "align", 300, {}, scalars={"loss": 1.25})
    assert Envelope().passed(update, Behind(64, {"probe": 20})).scalars == {"loss": 1.25}
    hidden = Envelope().passed(update, Behind(64, {"probe": 19})).scalars
    assert hidden.keys() == {"loss"}
    assert math.isnan(hidden["loss"])


def test_a_split_that_nobody_may_measure_is_not_even_asked_for() -> None:
    asked_for: list[tuple[str, ...]] = []

    def evaluate(client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        asked_for.append(splits)
        return {f"{split}/{figure}": 0.5 for split in splits for figure in ("mean/r1", "auc/Edema")}

    envelope = Envelope(evaluate=("pretrain/val/retrieval",))
    measured = envelope.only_allowed(evaluate, "pretrain")
    assert measured is not None
    assert measured(None, ("val", "test")) == {"val/mean/r1": 0.5}  # type: ignore[arg-type]
    assert asked_for == [("val",)]
    assert envelope.only_allowed(None, "pretrain") is None, "a site without an evaluation"


def test_the_filter_holds_back_figures_that_nobody_may_measure_here(kit: Path) -> None:
    """Whatever executor measured them."""
    counted = Behind(64, {"loss": 64, "val": 100, "test": 100}, {"val/Edema": 50}, "pretrain")
    figures = {"loss/x": 1.0, "val/mean/r1": 2.0, "val/auc/Edema": 0.5, "val/x": 3.0, "test/similarity": 0.1}

    def left(*patterns: str) -> set[str]:
        limits(kit, evaluate=patterns)
        update = sent(kit, counted, metrics=figures)
        assert isinstance(update, Update)
        return set(update.metrics) - {"loss/x"}

    assert left("*/*/*") == {"val/mean/r1", "val/auc/Edema", "val/x", "test/similarity"}
    assert left("*/*/retrieval") == {"val/mean/r1", "test/similarity"}
    assert left("pretrain/val/classification") == {"val/auc/Edema"}
    assert left("pretrain/val/*", "other/test/*") == {"val/mean/r1", "val/auc/Edema", "val/x"}
    assert left("other/*/*") == left() == set()


AREAS = ("Edema", "Pneumonia", "macro", "rare", "macro without image", "rare without text")


def test_the_filter_holds_back_a_figure_of_a_few_with_a_finding(kit: Path) -> None:
    """And the means over findings: with the other findings' areas they would tell the one that is missing."""
    areas = {
        f"{split}/auc/{name}": 0.5 for split in ("val", "test") for name in ("Edema", "Pneumonia", "macro", "rare")
    }
    enough = {f"{split}/{name}": 10 for split in ("val", "test") for name in ("Edema", "Pneumonia")}

    def left(**few: int) -> set[str]:
        classes = enough | {f"val/{name}": count for name, count in few.items()}
        update = sent(kit, Behind(64, {"val": 100, "test": 100}, classes), metrics=areas)
        assert isinstance(update, Update)
        return set(update.metrics)

    of_test = {name for name in areas if name.startswith("test/")}
    assert left() == set(areas)
    assert left(Edema=9) == of_test | {"val/auc/Pneumonia"}
    assert left(Edema=0, Pneumonia=0) == of_test
    limits(kit, least_per_class=2)
    assert left(Edema=2) == set(areas)
    update = sent(kit, Behind(64, {"val": 100, "test": 100}), metrics=areas)
    assert isinstance(update, Update)
    assert not update.metrics, "nobody counted"


def test_what_a_child_process_counted_reaches_the_filter() -> None:
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    from fedvlp.flare import child_protocol

    counted = Behind(70, {"loss": 70, "val": 25}, {"val/Edema": 12}, "pretrain")
    update = Update(SITE, 0, "train", 300, {"w": torch.zeros(3)})
    for behind in (counted, None):
        reply = FLModelUtils.to_shareable(child_protocol.answer(update, behind))
        assert child_protocol.behind(reply) == behind


def test_watched_data_are_the_sites_own_in_all_else() -> None:
    site = Assembly(presets.get("fedavg")).site("site-1")
    data = Watched(site.client.data)
    assert data.num_train == site.client.data.num_train
    assert data.modalities == ("image", "text")
    with pytest.raises(ValueError, match="expected batch_size"):
        data.train_batches(1, 1, torch.Generator())
