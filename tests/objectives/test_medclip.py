"""MedCLIP: the checks of spec 2.4, label vectors by hand, the learned scale, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import VLOutput
from fedvlp.objectives.convirt import info_nce
from fedvlp.objectives.medclip import MedCLIP, MedCLIPConfig, finding_vectors, semantic_matching
from fedvlp.run.config import from_config, to_config

NAN = math.nan


def units(rows: int, d: int, seed: int) -> Tensor:
    noise = torch.randn(rows, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(noise, dim=-1)


def test_label_vectors_by_hand() -> None:
    """Present 1, denied -1, uncertain and blank 0; "No Finding" only where nothing is present or uncertain."""
    labels = torch.tensor([[1.0, 0.0, -1.0, NAN], [0.0, 0.0, NAN, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4])
    expected = [[1, -1, 0, 0, 0], [-1, -1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert finding_vectors(labels).tolist() == expected
    assert finding_vectors(labels, negative=0.0)[0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("scale", [1.0, 1 / 0.07])
def test_a_sharp_identity_is_the_mean_of_both_info_nce_directions(scale: float) -> None:
    image, text = units(6, 8, 1), units(6, 8, 2)
    i2t, t2i = info_nce(image, text, 1 / scale)
    found = semantic_matching(image, text, 1e4 * torch.eye(6, dtype=torch.float64), scale)
    torch.testing.assert_close(found, (i2t + t2i) / 2, rtol=0, atol=1e-12)


def test_a_constant_similarity_is_least_at_log_b() -> None:
    for rows in [1, 2, 7]:
        same = units(1, 8, 0).expand(rows, -1)
        flat = torch.full((rows, rows), 3.0, dtype=torch.float64)
        assert semantic_matching(same, same, flat, 10.0).item() == pytest.approx(math.log(rows), abs=1e-12)
        other = semantic_matching(units(rows, 8, 1), units(rows, 8, 2), flat, 10.0).item()
        assert other > math.log(rows) or rows == 1


def test_two_pairs_by_hand() -> None:
    """image = (e1, e2), text = (e1, e1), scale 1: logits [[1, 1], [0, 0]]; S = [[log 3, 0], [0, 0]].

    Targets: rows (3/4, 1/4) and (1/2, 1/2). Image side: both softmax rows are uniform, so log 2. Text side: columns
    (1, 0) twice, log softmax (-0.3132617, -1.3132617): 3/4 0.3132617 + 1/4 1.3132617 = 0.5632617 and 0.8132617.
    L = 1/2 (0.6931472 + 0.6882617) = 0.6907044.
    """
    eye = torch.eye(2, dtype=torch.float64)
    similarity = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert semantic_matching(eye, eye[[0, 0]], similarity, 1.0).item() == pytest.approx(0.6907044, abs=1e-6)


def test_its_entropy_is_the_least_that_it_can_be() -> None:
    """CE - H(target) is 0 where the scores are the log of the targets, and above 0 elsewhere; without labels H = 0."""
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    vectors = finding_vectors(labels)
    scores = torch.linalg.cholesky((vectors @ vectors.T).double() + 1e-9 * torch.eye(4))  # scores scores^T = S
    objective = MedCLIP(temperature=1.0)
    best, other = VLOutput(scores, scores), VLOutput(units(4, 8, 1), units(4, 8, 2))
    least = objective.entropy(best, {"labels": labels})["contrastive"].item()
    assert least > 0.5
    assert objective(best, {"labels": labels})["contrastive"].item() == pytest.approx(least, abs=1e-5)
    assert objective.entropy(other, {"labels": labels})["contrastive"].item() == least
    assert objective(other, {"labels": labels})["contrastive"].item() > least + 0.1
    assert objective.entropy(best, {})["contrastive"].item() == 0
    assert objective.entropy(VLOutput(image=scores), {"labels": labels}) == {}


def test_the_text_side_reads_the_transpose() -> None:
    image, text = units(5, 8, 3), units(5, 8, 4)
    similarity = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forward = semantic_matching(image, text, similarity, 5.0)
    torch.testing.assert_close(forward, semantic_matching(text, image, similarity.T, 5.0), rtol=0, atol=1e-12)
    assert abs(forward - semantic_matching(image, text, similarity.T, 5.0)) > 1e-4


def test_studies_with_the_same_findings_are_as_good_as_the_own_pair() -> None:
    """Rows 0 and 1 share their labels: swapping their reports changes nothing; swapping rows 0 and 2 does."""
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    image, text = units(3, 8, 5).float(), units(3, 8, 6).float()
    objective = MedCLIP()

    def loss(order: list[int]) -> float:
        return objective(VLOutput(image, text[order]), {"labels": labels})["contrastive"].item()

    assert loss([1, 0, 2]) == pytest.approx(loss([0, 1, 2]), abs=1e-6)
    assert loss([2, 1, 0]) != pytest.approx(loss([0, 1, 2]), abs=1e-3)


def test_without_labels_it_is_clip() -> None:
    image, text = units(4, 8, 7).float(), units(4, 8, 8).float()
    i2t, t2i = info_nce(image, text, 0.07)
    found = MedCLIP()(VLOutput(image, text), {})["contrastive"]
    torch.testing.assert_close(found, (i2t + t2i) / 2, rtol=1e-6, atol=1e-6)
    one = MedCLIP()(VLOutput(image[:1], text[:1]), {})["contrastive"]
    assert one.item() == 0


def test_cosine_and_dot_differ_as_they_should() -> None:
    """One finding each: the dot products are 1 on the diagonal for "dot" with and without normalising, so equal."""
    image, text = units(2, 8, 9).float(), units(2, 8, 10).float()
    one = {"labels": torch.tensor([[1.0, NAN], [NAN, 1.0]])}
    two = {"labels": torch.tensor([[1.0, 1.0], [NAN, 1.0]])}
    dot, cosine = MedCLIP(similarity="dot"), MedCLIP(similarity="cosine")
    output = VLOutput(image, text)
    assert torch.equal(dot(output, one)["contrastive"], cosine(output, one)["contrastive"])
    assert not torch.equal(dot(output, two)["contrastive"], cosine(output, two)["contrastive"])
    vectors = finding_vectors(two["labels"])
    for objective, found in ((dot, vectors), (cosine, F.normalize(vectors, dim=1))):
        expected = semantic_matching(image, text, found @ found.T, 1 / 0.07)
        torch.testing.assert_close(objective(output, two)["contrastive"], expected)


def test_the_scale_is_learned_and_clamped() -> None:
    objective = MedCLIP()
    assert objective.logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    output, batch = VLOutput(units(4, 8, 1).float(), units(4, 8, 2).float()), {"labels": torch.eye(4)}
    objective(output, batch)["contrastive"].backward()
    assert objective.logit_scale.grad is not None
    assert objective.logit_scale.grad.abs() > 0
    with torch.no_grad():
        objective.logit_scale.fill_(9.0)
        beyond = objective(output, batch)["contrastive"]
        objective.logit_scale.fill_(math.log(100.0))
        assert torch.equal(objective(output, batch)["contrastive"], beyond)
        similarity = finding_vectors(batch["labels"]) @ finding_vectors(batch["labels"]).T
        torch.testing.assert_close(beyond, semantic_matching(output.image, output.text, similarity, 100.0))  # type: ignore[arg-type]
        objective.logit_scale.fill_(-3.0)
        least = objective(output, batch)["contrastive"]
        torch.testing.assert_close(least, semantic_matching(output.image, output.text, similarity, 1.0))  # type: ignore[arg-type]


def test_a_scale_that_reached_its_limit_comes_back() -> None:
    """Twenty steps on pairs that agree take it beyond the limit; on pairs that do not it falls, at its own pace."""
    image = units(16, 8, 1).float()
    agree, differ = VLOutput(image, image), VLOutput(image, units(16, 8, 2).float())
    objective = MedCLIP(temperature=0.0101)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)

    def step(output: VLOutput) -> float:
        optimizer.zero_grad()
        objective(output, {})["contrastive"].backward()
        optimizer.step()
        objective.after_step()
        return objective.logit_scale.item()

    reached = [step(agree) for _ in range(20)][-1]
    assert reached == pytest.approx(math.log(100.0), abs=1e-6)
    falling = [step(differ) for _ in range(60)]
    assert falling[-1] < reached - 0.1
    with torch.no_grad():
        objective.logit_scale.fill_(-1.0)
    objective.after_step()
    assert objective.logit_scale.item() == 0


def test_absent_modalities_and_empty_batches() -> None:
    assert MedCLIP()(VLOutput(image=units(4, 8, 0)), {}) == {}
    assert MedCLIP()(VLOutput(text=units(4, 8, 0)), {}) == {}
    empty = torch.zeros(0, 8)
    assert MedCLIP()(VLOutput(empty, empty), {"labels": torch.zeros(0, 3)})["contrastive"].item() == 0


def test_config_comes_back_from_json() -> None:
    config = MedCLIPConfig(0.1, 0.0, "cosine")
    assert from_config(json.loads(json.dumps(to_config(config)))) == config
    objective = config.build()
    assert isinstance(objective, MedCLIP)
    assert (objective.negative, objective.similarity) == (0.0, "cosine")


def test_the_ends_of_the_ranges_are_taken_and_the_defaults_agree() -> None:
    for temperature, negative in ((0.01, -1.0), (1.0, 0.0)):
        MedCLIPConfig(temperature, negative)
    assert (MedCLIP().negative, MedCLIP().similarity) == (MedCLIPConfig().negative, MedCLIPConfig().similarity)


def test_refuses() -> None:
    for wrong in [
        {"temperature": 0.0},
        {"temperature": 1.1},
        {"negative": 0.1},
        {"negative": -1.1},
        {"similarity": "x"},
    ]:
        with pytest.raises(ValueError, match=f"MedCLIP: {next(iter(wrong))}"):
            MedCLIPConfig(**wrong)  # type: ignore[arg-type]


def test_refuses_shapes() -> None:
    with pytest.raises(ValueError, match=r"similarity \[3, 3\]; expected"):
        semantic_matching(units(4, 8, 0), units(4, 8, 1), torch.eye(3), 1.0)
    with pytest.raises(ValueError, match=r"image \[4\], text \[4\]"):
        semantic_matching(torch.ones(4), torch.ones(4), torch.eye(4), 1.0)


def test_a_sentence_has_labels_of_its_own_by_hand() -> None:
    """Images with a finding and without, image vectors (1, 0) and (0, 1); both sentences say nothing of it: (0, 1).

    S = [[0, 0], [1, 1]]. With image = (e1, e2), text = (e1, e1), scale 1, logits = [[1, 1], [0, 0]]. Image side: both
    targets and both softmax rows are uniform, log 2. Text side: targets (0.268941, 0.731059) twice, log softmax
    (-0.3132617, -1.3132617): 0.0842489 + 0.9600718 = 1.0443207. L = 1/2 (0.6931472 + 1.0443207) = 0.8687339. The least:
    1/2 (log 2 + 0.268941 1.3132617 + 0.731059 0.3132617) = 1/2 (0.6931472 + 0.5822028) = 0.6376750.
    """
    eye = torch.eye(2)
    batch = {"labels": torch.tensor([[1.0], [NAN]]), "text_labels": torch.tensor([[NAN], [NAN]])}
    objective, output = MedCLIP(temperature=1.0, sentences=True), VLOutput(eye, eye[[0, 0]])
    assert objective(output, batch)["contrastive"].item() == pytest.approx(0.8687339, abs=1e-6)
    assert objective.entropy(output, batch)["contrastive"].item() == pytest.approx(0.6376750, abs=1e-6)
    assert objective(output, {"labels": batch["labels"]})["contrastive"].item() != pytest.approx(0.8687339, abs=1e-3)


def test_sentences_are_asked_for_only_where_they_are_wanted() -> None:
    assert MedCLIP().needs == ("image", "text", "labels")
    assert MedCLIP(sentences=True).needs == ("image", "text", "labels", "sentences")
    assert MedCLIPConfig(sentences=True).build().needs == ("image", "text", "labels", "sentences")
