"""The table of presets, and how an experiment becomes a server and sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.presets import SMALL
from support.toy import clone, differs, same_bytes

from fedvlp.core.norm_statistics import site_only
from fedvlp.core.optimizers import Adam
from fedvlp.core.types import Broadcast
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.partition import PUBLISHED, published_columns
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import METHODS, PMSFM, Centralized, FedAvg, FedDRA, FedNova, FedRGB
from fedvlp.methods.ensemble import PublicEnsemble
from fedvlp.models.selector import SelectorConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import POOLED, Partition
from fedvlp.run.presets import PRESETS, get
from fedvlp.run.terms import terms


def test_every_method_has_a_preset_of_its_name() -> None:
    for name, kind in METHODS.items():
        assert type(PRESETS[name].method) is kind
    assert all(name == experiment.name for name, experiment in PRESETS.items())


def test_the_paper_presets_are_the_papers() -> None:
    """Spec 4.4: 25 rounds, batch 388, AdamW 2e-5, weight decay 0.05, 20 and 50 steps, mu 5, rho 0.1, gamma 0.5."""
    paper = get("feddra-paper")
    method = paper.method
    assert isinstance(method, FedDRA)
    assert (method.align_steps, method.local_steps, method.mu, method.rho, method.gamma) == (20, 50, 5.0, 0.1, 0.5)
    assert (method.weighting, method.divergence, method.projection) == ("uniform", "chi2", "euclid")
    training = paper.training
    assert (training.batch_size, training.optimizer, training.lr, training.weight_decay) == (388, "adamw", 2e-5, 0.05)
    assert (paper.rounds.rounds, paper.partition.sites) == (25, 5)
    model = paper.model
    assert (model.image_size, model.text_layers, model.max_tokens, model.head_hidden) == (224, 6, 112, 2048)
    assert (model.embedding_dim, model.head_norm, model.pretrained) == (128, "batch", True)


STEPS = {  # optimiser steps a round: of encoders, of alignment modules and heads, of all phases
    "fedavg": (50, 50, 50), "fedprox": (50, 50, 50), "local": (50, 50, 50), "centralized": (50, 50, 50),
    "feddra": (40, 50, 50), "fedrgb": (40, 40, 80),
    "scaffold": (50, 50, 50), "fedmoon": (50, 50, 50),
}  # fmt: skip


def test_the_terms_on_which_methods_are_compared_are_known() -> None:
    """The demos on paired sites differ in their method alone: one start, one schedule, one batch size.

    FedDRA takes as many steps as FedAvg, and fewer of the encoders; FedRGB takes more. So a comparison shows both axes
    (spec 4.4), and counts sites alike, which FedAvg's and FedProx's presets do not: those can be encrypted.
    Centralized sees as many records a step as the five sites together: spec 9's same number of steps. FedNova's sites
    pass over their records six times, in 36 to 54 steps.
    """
    demos = {name: PRESETS[name] for name in METHODS if PRESETS[name].partition == Partition()}
    first, nova = PRESETS["fedavg"], demos.pop("fednova")
    for name in ("prompt-learning", "clip-adapter"):  # they train what stands beside a frozen pair
        assert (
            replace(demos.pop(name), name=first.name, method=first.method, extra=None, training=first.training) == first
        )
    assert not demos.pop("one-round-cca").method.steps("moments"), (
        "its first round has no steps, and its heads are linear"
    )
    assert demos.keys() == STEPS.keys()
    assert replace(nova, name=first.name, method=first.method) == first
    assert isinstance(nova.method, FedNova)
    assembly = Assembly(nova)
    sizes = [len(assembly.cohort.rows("train", site)) for site in assembly.sites()]
    assert [nova.method.taken(size) for size in sizes] == [54, 54, 54, 36, 54]
    with pytest.raises(ValueError, match="the steps of FedNova depend on a site's records"):
        terms(nova)
    for name, demo in demos.items():
        batch = 5 * 32 if name == "centralized" else 32
        assert demo.training == replace(first.training, batch_size=batch)
        same = replace(demo, name=first.name, method=first.method, training=first.training)
        assert same == first
        seen, averaged = terms(demo), name in ("feddra", "fedrgb", "scaffold")
        encoder, head, total = STEPS[name]
        phases = len(demo.method.phases(0))
        assert seen.steps == {"encoder": encoder, "alignment": head, "head": head}
        assert seen.full_rate["encoder"] == encoder - 4.5, "one warm-up of ten steps"
        assert (seen.total, seen.total_full_rate) == (total, total - 4.5 * phases)
        assert seen.schedule == ("adamw", 5e-4, 10, False, "reset")
        assert seen.weighting == ("uniform" if averaged else "samples")


def test_fedbn_is_fedavg_where_normalisation_stays_at_the_sites() -> None:
    """Of the demo's layers only the heads normalise by the batch; all of those tensors stay."""
    demo, plain = PRESETS["fedbn"], PRESETS["fedavg"]
    assert demo.method == FedAvg(local_steps=50)
    model = replace(plain.model, head_norm="batch")
    assert replace(plain, name="fedbn", model=model, norm_statistics="site") == demo
    kept = site_only(demo.norm_statistics, demo.method, model.build(0).state_dict())
    assert {name.rpartition(".")[2] for name in kept} >= {"weight", "bias", "running_mean", "running_var"}


def test_the_methods_on_representations_are_compared_on_equal_terms() -> None:
    """Two paired sites, two with images, one with reports, three architectures; as many steps for everybody."""
    demos = [experiment for experiment in PRESETS.values() if isinstance(experiment.method, PublicEnsemble)]
    demos = [demo for demo in demos if not demo.name.endswith("-paper")]
    names = {"creamfl", *(f"reamfl-{n}" for n in ("mean", "avg", "iot", "gca", "inter"))}
    assert names <= {demo.name for demo in demos}
    first = demos[0]
    for demo in demos:
        assert replace(demo, name=first.name, method=first.method) == first
        method = demo.method
        assert isinstance(method, PublicEnsemble)
        assert (method.local_steps, method.local_epochs, method.server_steps, method.distil_steps) == (0, 1, 0, 0)
        assert (method.kd_norm, method.kd_weight) == ("squared", 3.0)
        assert method.server_rounds == demo.rounds.rounds
    assert first.partition == Partition(image_only=2, text_only=1, public=0.25)


def test_presets_of_papers_have_their_schedule_and_weights() -> None:
    """PMS-FM's cosine ends with its run; nothing shortens what FedRGB's rho of 1 lengthens."""
    pms, fedrgb = PRESETS["pms-fm-paper"], PRESETS["fedrgb-paper"]
    assert isinstance(pms.method, PMSFM)
    assert isinstance(fedrgb.method, FedRGB)
    assert pms.training.cosine_rounds == pms.rounds.rounds == 100
    assert (fedrgb.method.rho, fedrgb.rounds) == (1.0, Rounds(rounds=25, clip_to_median=0))


def test_the_demo_of_representations_is_the_papers_setting() -> None:
    """A public set as large as any site's records, label spaces apart, and a server that is the largest model."""
    demo = PRESETS["creamfl"]
    assembly = Assembly(demo)
    public = len(assembly.cohort.rows("train", PUBLIC))
    assert all(len(assembly.cohort.rows("train", site)) <= public for site in assembly.sites())
    assert demo.objective.label_spaces == "disjoint"  # type: ignore[attr-defined]
    models = dict(demo.site_models)
    assert models.keys() == set(assembly.sites())
    sizes = {config: sum(p.numel() for p in config.build(0).parameters()) for config in (demo.model, *models.values())}
    assert len(sizes) == 3
    assert all(sizes[config] < sizes[demo.model] for config in models.values())


def test_the_methods_with_personalised_models_are_compared_on_equal_terms() -> None:
    """The same four sites, one with poor films and one without reports, and as many steps for the global model."""
    demos = [PRESETS[name] for name in ("pms-fm", "fedsm")]
    first = demos[0]
    for demo in demos:
        assert replace(demo, name=first.name, method=first.method, extra=first.extra) == first
        assert demo.method.steps("train") == 30
    cohort = Assembly(first).cohort
    assert Assembly(first).sites() == ("site-1", "site-2", "site-3", "site-4")
    assert cohort.report_from is not None
    retrieved = {site for site, source in zip(cohort.sites or (), cohort.report_from, strict=True) if source}
    assert retrieved == {"site-4"}


def test_the_pms_fm_preset_is_the_papers() -> None:
    """Spec 7.4: 100 rounds, batch 48, AdamW 2e-5, weight decay 1e-4, 77 tokens, lambda 0.65, threshold 0.4."""
    paper = get("pms-fm-paper")
    method, training, model, extra = paper.method, paper.training, paper.model, paper.extra
    assert isinstance(method, PMSFM)
    assert isinstance(extra, SelectorConfig)
    assert (method.softpull, method.threshold, method.weighting) == (0.65, 0.4, "samples")
    assert (extra.report_weight, extra.token_weight, extra.sites) == (0.8, 0.2, 4)
    assert (training.batch_size, training.optimizer, training.lr, training.weight_decay) == (48, "adamw", 2e-5, 1e-4)
    assert paper.rounds.rounds * training.local_epochs == 100  # epochs, at every site
    assert (model.image_tower, model.text_tower) == ("swin_tiny_patch4_window7_224", "emilyalsentzer/Bio_ClinicalBERT")
    assert (model.embedding_dim, model.head_hidden, model.alignment, model.text_pooling) == (512, None, False, "mean")
    assert (model.image_size, model.max_tokens, model.pretrained) == (224, 77, True)
    assert paper.data.image_size == model.image_size, "padded and scaled, nothing is cropped"  # type: ignore[attr-defined]


def test_the_paper_presets_selector_learns_separable_sites_within_its_own_steps() -> None:
    """One full-batch step a round, sites of the paper's sizes; 100 of the released 1e-5 never named two of four."""
    paper = get("pms-fm-paper")
    sizes = torch.tensor([223_415, 270_791, 47_209, 16_564])
    classes = FINDINGS[:2]
    extra: Any = replace(paper.extra, classes=classes, templates=tuple((name,) for name in classes))  # type: ignore[type-var]
    selector = extra.build(paper.model, 0)
    generator = torch.Generator().manual_seed(1)

    def units(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, 512, generator=generator), dim=-1)

    centres, words, templates = units(4), units(3), units(2)
    sites = [torch.nn.functional.normalize(centre + 0.5 * units(16), dim=-1) for centre in centres]
    present = selector.present(selector.template_labels)
    adam = Adam(selector.parameters(), lr=paper.method.selector_lr)  # type: ignore[attr-defined]
    for _ in range(paper.rounds.rounds):
        adam.zero_grad()
        for number, (images, weight) in enumerate(zip(sites, sizes / sizes.sum(), strict=True)):
            (weight * selector.loss_on_templates(images, templates, words, number)).backward()
        adam.step()
        with torch.no_grad():
            named = [selector(one, templates[:1].expand(16, -1), words, present[:1].expand(16, -1)) for one in sites]
        right = [float((logits.argmax(dim=1) == number).float().mean()) for number, logits in enumerate(named)]
        if min(right) > 0.95:
            return
    pytest.fail(f"share of images whose site is named: {right}")


def test_get_names_the_nearest() -> None:
    assert get("fedavg") is PRESETS["fedavg"]
    with pytest.raises(ValueError, match=r"unknown preset 'lokal'; did you mean 'local'\?; there are: fedavg, "):
        get("lokal")


def test_server_and_sites_start_from_the_same_weights_everywhere() -> None:
    one, other = Assembly(SMALL), Assembly(SMALL)
    torch.manual_seed(5)
    same_bytes(one.server(one.sites()).state, other.server(other.sites()).state)
    third = Assembly(replace(SMALL, rounds=Rounds(rounds=1, seed=1)))
    assert differs(one.server(one.sites()).state, third.server(third.sites()).state)


def test_the_server_does_not_share_the_sites_tensors() -> None:
    assembly = Assembly(SMALL)
    server = assembly.server(assembly.sites())
    before = clone(server.state)
    assembly.site("site-1").handle(Broadcast(0, "train", server.state))
    same_bytes(server.state, before)


def test_sites_have_their_own_records_and_all_of_them_once() -> None:
    assembly = Assembly(SMALL)
    assert assembly.sites() == ("site-1", "site-2", "site-3")
    for split in ("train", "val", "test"):
        rows = [assembly.cohort.rows(split, site) for site in assembly.sites()]
        together = np.concatenate(rows)
        assert sorted(together.tolist()) == assembly.cohort.rows(split).tolist()
    counts = [assembly.site(name).client.data.num_train for name in assembly.sites()]
    assert counts == [len(assembly.cohort.rows("train", name)) for name in assembly.sites()]


def test_the_cohort_and_the_modules_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = SyntheticCohort.build
    monkeypatch.setattr(SyntheticCohort, "build", lambda self: calls.append(1) or real(self))
    assembly = Assembly(SMALL)
    clients = [assembly.site(name).client for name in assembly.sites()]
    assert calls == [1]
    assert len({id(client.model) for client in clients}) == 1
    assert len({client.name for client in clients}) == 3


@dataclass(frozen=True)
class Given:
    cohort: Cohort

    def build(self) -> Cohort:
        return self.cohort


class Unpartitioned:
    """The built-in cohort without its sites."""

    def build(self) -> Any:
        return replace(SMALL.data.build(), sites=None)


def test_a_cohort_without_sites_is_dealt_to_the_sites_of_the_partition() -> None:
    def dealt(**settings: Any) -> tuple[Any, ...]:
        rounds = Rounds(seed=settings.pop("seed", 0))
        cohort = Assembly(replace(SMALL, data=Unpartitioned(), partition=Partition(**settings), rounds=rounds)).cohort
        return cohort.sites

    assert set(dealt(sites=2)) == {"site-1", "site-2"}
    assert dealt(sites=2) == dealt(sites=2) != dealt(sites=2, seed=1)
    assert set(dealt(sites=4)) == {"site-1", "site-2", "site-3", "site-4"}
    built = SMALL.data.build()
    by_study, by_patient = dealt(sites=3), dealt(sites=3, unit="patient")
    assert len(set(zip(built.studies, by_study, strict=True))) == len(set(built.studies))
    assert len(set(zip(built.patients, by_study, strict=True))) > len(set(built.patients))
    assert len(set(zip(built.patients, by_patient, strict=True))) == len(set(built.patients))
    with pytest.raises(ValueError, match=r"partition\.unit is 'image'; choose study or patient"):
        Partition(unit="image")


def test_data_with_more_findings_is_dealt_by_the_published_five() -> None:
    """Of fourteen, where the five stand in another order too; without one of the five, by all."""

    def owners(cohort: Cohort) -> tuple[str, ...]:
        return Assembly(replace(SMALL, data=Given(cohort), partition=Partition(sites=3, beta=0.1))).cohort.sites or ()

    many = replace(SyntheticCohort(sites=1, size=200, image_size=36, labels="fourteen").build(), sites=None)
    names = many.label_names
    five = [names.index(name) for name in PUBLISHED]
    turned = replace(many, labels=many.labels[:, ::-1].copy(), label_names=names[::-1])
    alone = replace(many, labels=many.labels[:, five].copy(), label_names=PUBLISHED)
    assert owners(many) == owners(turned) == owners(alone)
    assert published_columns(alone.labels[:, 1:], PUBLISHED[1:]).shape[1] == 4


def test_a_partition_that_cannot_be_made_is_refused() -> None:
    for wrong in [{"sites": 0}, {"sites": -1}, {"sites": 2, "beta": 0.0}, {"sites": 7}]:
        with pytest.raises(ValueError, match=r"site|beta"):
            _ = Assembly(replace(SMALL, data=Unpartitioned(), partition=Partition(**wrong))).cohort


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(ValueError, match="site 'site-9' has no records in this experiment; there are: site-1, site-2"):
        Assembly(SMALL).site("site-9")
    with pytest.raises(ValueError, match="there are: pooled"):
        Assembly(replace(SMALL, method=Centralized())).site("site-1")
    assert Assembly(replace(SMALL, method=Centralized())).sites() == (POOLED,)


def test_site_memories_are_under_the_run_folder(tmp_path: Any) -> None:
    assert Assembly(SMALL, tmp_path).site("site-1").memory.folder == tmp_path / "sites" / "site-1"
    assert Assembly(SMALL).site("site-1").memory.folder is None
