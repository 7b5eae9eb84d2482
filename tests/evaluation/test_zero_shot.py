"""Zero-shot by prompt ensembles (spec 10.4, 7.3, 7.6): keyed by name, seeded, selected once an image, no leak."""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import Client, named_state
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, State, VLOutput
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.zero_shot import (
    GLOBAL,
    NAMED,
    PROMPTS,
    SELECTED,
    Result,
    SelectorChoices,
    ZeroShot,
    _judge,
    choose,
    class_scores,
    class_texts,
    over_sites,
    pick,
    prompts,
    site_probabilities,
    write_results,
    zero_shot,
)
from fedvlp.federation.loop import Rounds
from fedvlp.methods import PMSFM, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run.evaluate import EVALUATIONS
from fedvlp.run.evaluate import Choices as Options
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training

D = 6
CLASSES = ("Edema", "Pneumonia", "Consolidation")
PROTOCOL = ZeroShot(CLASSES, threshold=0.4, prompts=4, seeds=(0, 1))
SELECTOR = SelectorConfig(sites=2, classes=CLASSES, hidden=8)


class Reader(nn.Module):
    """Images [B, 6] and words, whose features follow from each word; one Linear layer for each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.image_head, self.text_head = nn.Linear(D, D), nn.Linear(D, D)

    def tokenizer(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        def features(text: str) -> Tensor:
            words = [torch.Generator().manual_seed(zlib.crc32(word.encode())) for word in text.lower().split()]
            return torch.stack([torch.randn(D, generator=g) for g in words]).mean(0)

        return torch.stack([features(text) for text in texts]), torch.ones(len(texts), 1).bool()

    def forward(self, batch: Batch) -> VLOutput:
        image = F.normalize(self.image_head(batch["image"]), dim=-1) if "image" in batch else None
        return VLOutput(image, F.normalize(self.text_head(batch["text"]), dim=-1) if "text" in batch else None)


class Records:
    """Test records: images [n, 6], labels [n, 3]; the first of every four has two findings."""

    def __init__(self, seed: int, count: int = 24) -> None:
        self.image = torch.randn(count, D, generator=torch.Generator().manual_seed(seed))
        self.labels = F.one_hot(torch.arange(count) % 3, 3).float()
        self.labels[::4] = torch.tensor([1.0, 1.0, math.nan])
        self.labels[5, 0] = -1.0
        self.sizes = {"test": count}

    def batches(self, split: str, size: int, *, drop_last: bool, rows: Tensor | None = None) -> Iterator[Batch]:
        for some in (torch.arange(len(self.image)) if rows is None else rows).split(size):
            yield {"image": self.image[some], "labels": self.labels[some], "row": some}


def trainee(config: SelectorConfig | None = SELECTOR) -> Client:
    objective = ConVIRT()
    if config is not None:
        objective.add_module("extra", config.build(ModelConfig(embedding_dim=D), 3))
    return Client("x", 0, Reader(0), objective, None)  # type: ignore[arg-type]


def three_models(client: Client) -> dict[str, State]:
    """A global model and two others; the selector, untrained, is made to differ more between images."""
    rest = {n: t.clone() for n, t in named_state(client.model, client.objective).items() if n.startswith("objective")}
    for name in ("objective.extra.out.1.weight", "objective.extra.out.5.weight"):
        if name in rest:
            rest[name] *= 10
    return {
        name: {**{n: t.clone() for n, t in Reader(seed).state_dict().items()}, **rest}
        for seed, name in enumerate((GLOBAL, "site-1", "site-2"))
    }


def data() -> dict[str, Any]:
    return {"site-1": Records(1), "site-2": Records(2)}


def table(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    return {(result.model, result.site): result for result in results}


def run(protocol: ZeroShot = PROTOCOL, config: SelectorConfig | None = SELECTOR, **given: Any) -> tuple[Any, Any]:
    client = trainee(config)
    states = given.get("states") or three_models(client)
    return zero_shot(protocol, client, states, given.get("data") or data(), CLASSES)


def test_each_site_judges_with_the_model_as_it_has_it() -> None:
    """At site-2 the model has other weights, for its prompts too; each row is that of a run of this site alone."""
    client = trainee(None)
    states = three_models(client)
    known = {"site-1": states[GLOBAL], "site-2": states["site-2"]}

    def load(client: Client, state: State, site: str) -> None:
        client.load(known[site])

    seen, _ = zero_shot(PROTOCOL, client, {GLOBAL: states[GLOBAL]}, data(), CLASSES, load=load)
    alone = [
        zero_shot(PROTOCOL, client, {GLOBAL: known[site]}, {site: records}, CLASSES)[0][0]
        for site, records in data().items()
    ]
    assert seen == alone
    assert alone[1] != zero_shot(PROTOCOL, client, {GLOBAL: states[GLOBAL]}, data(), CLASSES)[0][1]


# Prompts


def test_a_model_among_others_has_the_figures_that_it_has_alone() -> None:
    """The global model and two sites' own, of unlike weights: none is judged with another's."""
    client = trainee(None)
    states = three_models(client)
    together = table(zero_shot(PROTOCOL, client, states, data(), CLASSES)[0])
    figures: dict[str, tuple[Any, ...]] = {}
    for name, state in states.items():
        alone = table(zero_shot(PROTOCOL, client, {GLOBAL: state}, data(), CLASSES)[0])
        for (_, site), result in alone.items():
            beside = together[name, site]
            assert (beside.accuracy, beside.auc) == (result.accuracy, result.auc), (name, site)
        figures[name] = tuple(result.auc for result in alone.values())
    assert len(set(figures.values())) == len(states), "a test of equal figures would show nothing"


def test_prompts_follow_from_name_and_seed_alone() -> None:
    assert prompts("Edema", 10, 3) == prompts("Edema", 10, 3)
    assert prompts("Edema", 10, 3) != prompts("Edema", 10, 4)
    assert prompts("Edema", 5, 3) == prompts("Edema", 10, 3)[:5]
    assert len(set(prompts("Edema", 10, 0))) == 10
    assert len(prompts("Cardiomegaly", 1000, 0)) == 9


def test_prompts_are_sentences_of_their_class() -> None:
    for name in PROMPTS:
        last = {"Cardiomegaly": ("cardiomegaly", "heart", "cardiac enlargement")}.get(name, (name.lower().split()[-1],))
        for sentence in prompts(name, 1000, 0):
            assert any(word in sentence for word in last)
            assert sentence == " ".join(sentence.split())


def test_both_class_lists_have_prompts() -> None:
    competition = {"Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion"}
    assert competition | set(FINDINGS) <= PROMPTS.keys()
    assert prompts("Normal", 10, 0) == ("Normal",), "its own prompt, as a class that a person names"


def test_a_disease_and_its_absence_have_prompts_where_they_are_named() -> None:
    """They are no findings that are told apart by default: a film with a finding has neither."""
    for name, words in [("COVID-19", ("covid-19",)), ("No Finding", ("clear", "normal", "no "))]:
        sentences = prompts(name, 10, 0)
        assert len(set(sentences)) == 10
        assert all(any(word in sentence for word in words) for sentence in sentences)
        assert name in NAMED
        assert name not in PROMPTS


# Scores


def test_class_scores_by_hand() -> None:
    """Image e1 against the prompts (e1, e2) and (e2): cosines (1, 0) and (0): mean 1/2 and 0, max 1 and 0."""
    eye = torch.eye(2)
    texts = {"a": eye, "b": 3 * eye[1:]}
    assert class_scores(eye[:1], texts).tolist() == [[0.5, 0.0]]
    assert class_scores(2 * eye[:1], texts, "max").tolist() == [[1.0, 0.0]]


def test_the_length_of_an_images_vector_does_not_count() -> None:
    """(3, 4) and (1, 0) against (1, 0): cosines 0.6 and 1."""
    scores = class_scores(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), {"a": torch.tensor([[2.0, 0.0]])})
    torch.testing.assert_close(scores, torch.tensor([[0.6], [1.0]], dtype=torch.float64))


def test_a_diverged_model_has_no_scores() -> None:
    """Its accuracy was that of the class that comes first."""
    image = torch.tensor([[3.0, 4.0], [float("nan"), 0.0]])
    with pytest.raises(ValueError, match="zero-shot: 2 of 4 scores are nan; expected numbers; look for a diverged"):
        class_scores(image, {"a": torch.eye(2), "b": torch.eye(2)})


def test_uncertain_labels_count_in_no_auc() -> None:
    """Finding a: positive at 0.9, negatives at 0.1 and 0.2; the uncertain record, at 0.95, would lower its area."""
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 1.0]])
    scores = torch.tensor([[[0.9, 0.1], [0.1, 0.9], [0.95, 0.2], [0.2, 0.8]]], dtype=torch.float64)
    result = _judge(ZeroShot(CLASSES[:2]), "m", "s", scores, labels)
    assert (result.auc, result.accuracy, result.single) == ((1.0, 0.0), (100.0, 0.0), 3)


def test_the_mean_over_sites_is_of_means_and_not_of_deviations() -> None:
    results = [Result("m", site, 9, 9, (a, 1.0), (b, 0.5)) for site, a, b in (("x", 50.0, 0.6), ("y", 70.0, 0.8))]
    assert over_sites(results)["m"] == pytest.approx((60.0, 0.7))


def test_a_site_without_test_records_is_left_out() -> None:
    empty = Records(3)
    empty.sizes = {"train": 24}
    assert {result.site for result in run(data={**data(), "site-3": empty})[0]} == {"site-1", "site-2"}


def test_the_model_is_chosen_by_the_global_models_view_of_an_image() -> None:
    """The shares follow from the global model's vectors of images, prompts and words; a prompt names its one class."""
    client = trainee()
    states = three_models(client)
    _, choices = run(replace(PROTOCOL, seeds=(0,), threshold=0.0), states=states)
    client.load(states[GLOBAL])
    sentences = {name: prompts(name, PROTOCOL.prompts, 0) for name in CLASSES}
    reports, fused, words = class_texts(client, sentences)
    selector: Any = client.objective.extra
    for place, name in enumerate(CLASSES):
        present = F.one_hot(torch.tensor(place), 4).bool().expand(len(reports[name]), -1)
        torch.testing.assert_close(fused[name], selector.fused(reports[name], words, present))
    for choice in choices:
        with torch.no_grad():
            image = client.model({"image": data()[choice.site].image}).image
        sites = choose(site_probabilities(selector, image, reports, words)[:, :2], 0.0)
        assert choice.shares == {f"site-{i + 1}": float((sites == i).double().mean()) for i in (0, 1)} | {GLOBAL: 0.0}


def test_identical_prompts_are_one_prompt_and_one_prompt_makes_mean_and_max_the_same() -> None:
    image, text = torch.randn(5, D), torch.randn(1, D)
    one = class_scores(image, {"a": text})
    torch.testing.assert_close(class_scores(image, {"a": text.expand(7, -1)}), one)
    assert torch.equal(class_scores(image, {"a": text}, "max"), one)


@pytest.mark.parametrize("threshold", [0.4, 0.0])
def test_permuting_the_classes_permutes_columns_and_changes_no_figure(threshold: float) -> None:
    client = trainee()
    order = CLASSES[::-1]
    sentences = {name: prompts(name, 4, 0) for name in CLASSES}
    image = Records(1).image
    plain = class_scores(image, class_texts(client, sentences)[1])
    turned = class_scores(image, class_texts(client, {name: sentences[name] for name in order})[1])
    torch.testing.assert_close(turned, plain.flip(1))
    protocol = replace(PROTOCOL, threshold=threshold)
    assert [r.accuracy for r in run(protocol)[0]] == [r.accuracy for r in run(replace(protocol, classes=order))[0]]


def test_accuracy_and_auc_by_hand() -> None:
    """Images that are the class texts: every single-finding record is right; the shuffled ones are not."""
    client = trainee(None)
    sentences = {name: prompts(name, 1, 0) for name in CLASSES}
    texts = torch.cat(list(class_texts(client, sentences)[0].values()))  # [3, d]
    records = Records(3)
    with torch.no_grad():
        wanted = texts[torch.arange(24) % 3] - client.model.image_head.bias
        records.image = torch.linalg.solve(client.model.image_head.weight, wanted.T).T
    protocol = ZeroShot(CLASSES, prompts=1, seeds=(0,))
    states = {GLOBAL: named_state(client.model, client.objective)}
    found = zero_shot(protocol, client, states, {"s": records}, CLASSES)[0]
    assert [(r.model, r.records, r.single, r.accuracy) for r in found] == [(GLOBAL, 24, 18, (100.0, 0.0))]
    records.labels = records.labels.roll(1, dims=1)
    assert zero_shot(protocol, client, states, {"s": records}, CLASSES)[0][0].accuracy == (0.0, 0.0)


def test_a_split_without_single_findings_or_with_one_class_has_no_figure() -> None:
    records = Records(1)
    records.labels = torch.ones(24, 3)
    result = run(data={"s": records})[0][0]
    assert (result.accuracy, result.auc, result.single) == (None, None, 0)
    assert math.isnan(over_sites([result])[GLOBAL][0])


def test_figures_are_mean_and_population_deviation_over_the_prompt_seeds() -> None:
    each = [table(run(replace(PROTOCOL, seeds=(seed,)))[0])[GLOBAL, "site-1"] for seed in (0, 1)]
    both = table(run()[0])[GLOBAL, "site-1"]
    for name in ("accuracy", "auc"):
        low, high = sorted(getattr(one, name)[0] for one in each)
        assert getattr(both, name) == pytest.approx(((low + high) / 2, (high - low) / 2))


# Selection


def test_choose_and_pick_by_hand() -> None:
    choice = choose(torch.tensor([[0.5, 0.5], [0.3, 0.7], [0.9, 0.1]]), 0.6)
    assert choice.tolist() == [-1, 1, 0], "not above the threshold: the global model"
    assert choose(torch.tensor([[0.5, 0.5]]), 0.5).tolist() == [-1], "nor at it"
    scores = torch.arange(3.0)[:, None, None, None].expand(3, 1, 3, 2)  # model m says m
    assert pick(scores, choice[None])[0, :, 0].tolist() == [2.0, 1.0, 0.0]


def test_a_threshold_above_one_is_the_evaluation_of_the_global_model() -> None:
    """Spec 7.6: always global; and without a token embedding that is FedAvg's, which has no selector at all."""
    results, choices = run(replace(PROTOCOL, threshold=1.01))
    seen = table(results)
    for site in data():
        chosen, shared = seen[SELECTED, site], seen[GLOBAL, site]
        assert (chosen.accuracy, chosen.auc) == (shared.accuracy, shared.auc)
    assert all(one.shares == {"site-1": 0.0, "site-2": 0.0, GLOBAL: 1.0} for one in choices)


@pytest.mark.parametrize("config", [replace(SELECTOR, token_weight=0.0), replace(SELECTOR, embeddings=("image",))])
def test_without_the_token_the_global_figures_are_fedavgs(config: SelectorConfig) -> None:
    """lambda_b = 0: e_f = lambda_a e_r, and the cosine does not know lambda_a. By the phrases of presence alone."""
    protocol = replace(PROTOCOL, absence=False)
    plain = trainee(None)
    states = {GLOBAL: {n: t.clone() for n, t in named_state(plain.model, plain.objective).items()}}
    fedavg = table(zero_shot(protocol, plain, states, data(), CLASSES)[0])
    seen = table(run(replace(protocol, threshold=1.01), config)[0])
    for site in data():
        assert seen[SELECTED, site].accuracy == fedavg[GLOBAL, site].accuracy
        assert seen[SELECTED, site].auc == pytest.approx(fedavg[GLOBAL, site].auc)


@pytest.mark.parametrize("place", [0, 1])
def test_a_selector_forced_to_one_site_gives_that_sites_figures(place: int, caplog: pytest.LogCaptureFixture) -> None:
    client = trainee()
    states = three_models(client)
    for state in states.values():
        state["objective.extra.out.5.weight"].zero_()
        state["objective.extra.out.5.bias"].copy_(50.0 * F.one_hot(torch.tensor(place), 2))
    results, choices = run(states=states)
    seen, owner = table(results), f"site-{place + 1}"
    for site in data():
        assert (seen[SELECTED, site].accuracy, seen[SELECTED, site].auc) == (
            seen[owner, site].accuracy,
            seen[owner, site].auc,
        )
    assert all(one.shares[owner] == 1.0 for one in choices)
    assert f"the selector names site-{2 - place} for at most 0 % of their own images" in caplog.text


def test_the_true_site_of_a_record_is_no_input() -> None:
    """The released code adds 0.4 to the true site's probability; here records moved to the other site choose alike."""
    swapped = {"site-1": data()["site-2"], "site-2": data()["site-1"]}
    straight, moved = (run(replace(PROTOCOL, threshold=0.0), data=given) for given in (data(), swapped))
    other = {"site-1": "site-2", "site-2": "site-1"}
    for one in straight[0]:
        twin = table(moved[0])[one.model, other[one.site]]
        assert (twin.accuracy, twin.auc) == (one.accuracy, one.auc)
    shares = {choice.site: choice.shares for choice in moved[1]}
    assert all(shares[other[one.site]] == one.shares for one in straight[1])
    assert any(0 < share < 1 for one in straight[1] for share in one.shares.values()), "the choice depends on the image"


def test_probabilities_are_the_mean_over_all_prompts_and_do_not_depend_on_the_batch() -> None:
    client = trainee()
    reports, _, words = class_texts(client, {name: prompts(name, 3, 0) for name in CLASSES})
    selector, image = client.objective.extra, F.normalize(Records(1).image, dim=1)
    found = site_probabilities(selector, image, reports, words)
    torch.testing.assert_close(found.sum(1), torch.ones(24, dtype=torch.float64))
    torch.testing.assert_close(site_probabilities(selector, image[3:4], reports, words), found[3:4])
    each = [
        site_probabilities(selector, image, {name: text[None]}, words)
        for name, texts in reports.items()
        for text in texts
    ]
    torch.testing.assert_close(torch.stack(each).mean(0), found)


def test_a_class_that_the_selector_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="not trained with class 'Consolidation'"):
        run(config=replace(SELECTOR, classes=CLASSES[:2]))
    with pytest.raises(ValueError, match="not trained with class 'Consolidation'"):
        class_texts(trainee(replace(SELECTOR, classes=CLASSES[:2])), {name: prompts(name, 3, 0) for name in CLASSES})


def test_a_new_class_has_the_token_of_its_name_where_that_is_allowed() -> None:
    """Its token is the attention over the one word; the words that the selector knows keep theirs, and so e_f."""
    client = trainee(replace(SELECTOR, classes=CLASSES[:2]))
    sentences = {name: prompts(name, 3, 0) for name in CLASSES}
    reports, fused, words = class_texts(client, sentences, new_words=True)
    known = class_texts(client, {name: sentences[name] for name in CLASSES[:2]})
    assert (len(words), len(known[2])) == (4, 3)  # two classes, No Finding; and the new one behind them
    torch.testing.assert_close(words[:3], known[2])
    torch.testing.assert_close(fused["Edema"], known[1]["Edema"])
    selector = client.objective.extra
    token = selector.text.augment(words[3:], torch.ones(1, 1, dtype=torch.bool))
    expected = selector.text.fuse(reports["Consolidation"], token)
    torch.testing.assert_close(fused["Consolidation"], expected)
    probabilities = site_probabilities(selector, F.normalize(Records(1).image, dim=1), reports, words)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(24, dtype=torch.float64))
    every = run(replace(PROTOCOL, new_words=True), replace(SELECTOR, classes=CLASSES[:2]))[0]
    assert {one.site for one in every if one.model == "selected"} == {"site-1", "site-2"}


def test_refuses() -> None:
    for wrong in [{"classes": ("Edema",)}, {"classes": ("Edema", "Edema")}, {"ensemble": "sum"}]:
        with pytest.raises(ValueError, match="zero-shot"):
            replace(PROTOCOL, **wrong)


def test_files(tmp_path: Path) -> None:
    results, choices = run()
    files = write_results(results, choices, tmp_path / "zero-shot", "a title")
    assert [file.name for file in files] == ["zero-shot.csv", "zero-shot.png", "zero-shot-choices.csv"]
    rows = list(csv.DictReader(files[0].open()))
    assert {(row["model"], row["site"]) for row in rows} == {
        (model, site) for model in (GLOBAL, "site-1", "site-2", SELECTED) for site in ("site-1", "site-2", "mean")
    }
    mean = next(row for row in rows if (row["model"], row["site"]) == (GLOBAL, "mean"))
    expected = [r.accuracy[0] for r in results if r.model == GLOBAL and r.accuracy]
    assert float(mean["accuracy"]) == pytest.approx(sum(expected) / 2)
    areas = {r.site: r.auc[0] for r in results if r.model == GLOBAL and r.auc}
    assert float(mean["macro_auc"]) == pytest.approx(sum(areas.values()) / 2)
    for row in rows:
        if row["model"] == GLOBAL and row["site"] in areas:
            assert float(row["macro_auc"]) == pytest.approx(areas[row["site"]])
    assert len(write_results(results, [SelectorChoices("s", {})][:0], tmp_path / "plain", "x")) == 2


SMALL = Experiment(
    "small", PMSFM(local_steps=1, selector_lr=0.01),
    ModelConfig(embedding_dim=8, image_size=32, max_tokens=16, vocabulary=256, head_hidden=8, text_layers=1),
    data=SyntheticCohort(sites=2, size=80, image_size=36), training=Training(batch_size=8),
    rounds=Rounds(rounds=1, evaluate_every=0), extra=SelectorConfig(sites=2, classes=FINDINGS, hidden=8),
)  # fmt: skip


def models_in(folder: RunFolder) -> list[str]:
    files = EVALUATIONS["zero-shot"](folder, Options())
    return list(dict.fromkeys(row["model"] for row in csv.DictReader(files[0].open())))


def test_a_finished_run_is_evaluated_with_everything_it_kept(tmp_path: Path) -> None:
    """``fedvlp evaluate --what zero-shot``: the sites' models come from the server's checkpoint, or their memories."""
    folder = RunFolder.create(tmp_path, SMALL)
    simulate(SMALL, folder)
    assert models_in(folder) == [GLOBAL, "site-1", "site-2", SELECTED]
    server = Server.load(folder.checkpoint)[0]
    assert "objective.extra.out.5.bias" in server.state
    alone = replace(SMALL, method=Local(local_steps=1), extra=None)
    folder = RunFolder.create(tmp_path / "local", alone)
    simulate(alone, folder)
    assert models_in(folder) == [GLOBAL, "site-1", "site-2"]


def test_presence_is_scored_against_absence_by_hand() -> None:
    """Cosines with "a" 1 and 0, with "b" 0 and 1; with absence 0.6 and 0.8: the order of an image's classes stays."""
    image = torch.eye(2)
    texts = {"a": torch.tensor([[2.0, 0.0]]), "b": torch.tensor([[0.0, 3.0]])}
    plain, against = (class_scores(image, texts, absent=absent) for absent in (None, torch.tensor([[3.0, 4.0]])))
    torch.testing.assert_close(plain, torch.eye(2).double())
    torch.testing.assert_close(against, torch.tensor([[0.4, -0.6], [-0.8, 0.2]]).double())
    assert torch.equal(plain.argmax(1), against.argmax(1))


def test_only_findings_that_a_report_can_deny_have_an_absence() -> None:
    """A normal image beside one disease is no finding, nor is a class of somebody's own table."""
    assert ZeroShot(CLASSES).denied
    assert not ZeroShot(CLASSES, absence=False).denied
    assert not ZeroShot(("No Finding", "COVID-19")).denied
    assert not ZeroShot((*CLASSES, "a class of mine")).denied


def test_absence_moves_the_auc_and_not_the_accuracy() -> None:
    with_it, without = (run(replace(PROTOCOL, absence=absence), config=None)[0] for absence in (True, False))
    assert [one.accuracy for one in with_it] == [one.accuracy for one in without]
    assert [one.auc for one in with_it] != [one.auc for one in without]
