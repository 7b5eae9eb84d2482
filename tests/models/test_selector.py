"""Text fusion and selector: one study at a time, each embedding switchable, the formulas by hand, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import EMBEDDINGS, FUSIONS, Selector, SelectorConfig
from fedvlp.run.config import from_config, to_config

D, K, ROWS = 16, 3, 6
CLASSES = ("Edema", "Pneumonia")
MODEL = ModelConfig(embedding_dim=D)
CONFIG = SelectorConfig(sites=K, classes=CLASSES, hidden=8)
LABELS = torch.tensor([[1.0, 0.0], [math.nan, 1.0], [1.0, 1.0], [0.0, 0.0], [-1.0, math.nan], [1.0, -1.0]])


def units(rows: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)), dim=1)


IMAGE, REPORT, WORDS = units(ROWS, 1), units(ROWS, 2), units(len(CLASSES) + 1, 3)


def selector(**settings: object) -> Selector:
    return replace(CONFIG, **settings).build(MODEL, 0)  # type: ignore[arg-type]


def logits(one: Selector, image: Tensor = IMAGE, report: Tensor = REPORT, labels: Tensor = LABELS) -> Tensor:
    return one(image, report, WORDS, one.present(labels))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_study_is_told_from_itself_alone(fusion: str) -> None:
    """A row's logits do not depend on the other rows of its batch (the released cross attention does)."""
    one = selector(fusion=fusion).eval()
    together = logits(one)
    for row in range(ROWS):
        alone = logits(one, IMAGE[row : row + 1], REPORT[row : row + 1], LABELS[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
    assert together.shape == (ROWS, K)


SOME = [kept for count in (1, 2, 3) for kept in combinations(EMBEDDINGS, count)]


def test_exactly_the_embeddings_switched_on_matter() -> None:
    for fusion in FUSIONS:
        for kept in SOME:
            one = selector(embeddings=kept, fusion=fusion).eval()
            before = logits(one)
            changed = {
                "image": logits(one, image=units(ROWS, 11)),
                "report": logits(one, report=units(ROWS, 12)),
                "token": logits(one, labels=LABELS.flip(0)),
            }
            for name, after in changed.items():
                assert torch.equal(after, before) == (name not in kept), name


def test_every_parameter_learns() -> None:
    for fusion in FUSIONS:
        for kept in SOME:
            one = selector(embeddings=kept, fusion=fusion)
            one.loss(IMAGE, REPORT, WORDS, LABELS, 1).backward()
            assert [name for name, parameter in one.named_parameters() if parameter.grad is None] == []


def test_the_words_of_a_study() -> None:
    """Present findings; an uncertain one where none is present; "No Finding" where there is neither."""
    expected = [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0], [1, 0, 0]]
    present = selector().present(LABELS)
    assert present is not None
    assert present.int().tolist() == expected
    assert selector().words == ("Edema", "Pneumonia", "No Finding")


def test_words_of_other_findings_do_not_matter() -> None:
    """Attention is masked: the embedding of a finding that a study lacks has no influence on its e_a."""
    one = selector().text
    present = torch.tensor([[True, False, False]])
    other = WORDS.clone()
    other[1:] = units(2, 20)
    assert torch.equal(one.augment(WORDS, present), one.augment(other, present))
    assert not torch.equal(one.augment(WORDS, present), one.augment(WORDS, ~present))


def test_fusion_by_hand() -> None:
    """e_f = lambda_a e_r + lambda_b e_a."""
    one = selector(report_weight=0.8, token_weight=0.2)
    present = one.present(LABELS)
    augmented = one.text.augment(WORDS, present)
    torch.testing.assert_close(one.fused(REPORT, WORDS, present), 0.8 * REPORT + 0.2 * augmented)


@pytest.mark.parametrize("weight", [0.1, 0.8, 3.0])
def test_without_the_token_the_cosine_does_not_depend_on_lambda_a(weight: float) -> None:
    """Spec 7.6: lambda_b = 0 gives e_f = lambda_a e_r."""
    one = selector(report_weight=weight, token_weight=0.0)
    fused = one.fused(REPORT, WORDS, one.present(LABELS))
    torch.testing.assert_close(fused, weight * REPORT)
    torch.testing.assert_close(F.cosine_similarity(IMAGE, fused), F.cosine_similarity(IMAGE, REPORT))
    off = selector(embeddings=("image", "report"))
    assert torch.equal(off.fused(REPORT, WORDS, None), REPORT)


def test_the_enhanced_embedding_is_a_setting_apart_from_the_selectors_input() -> None:
    """PMS-FM's table 4: e_f without words among the inputs, and words among the inputs without e_f."""
    seen, compared = selector(enhanced=False), selector(embeddings=("image", "report"), enhanced=True)
    present = seen.present(LABELS)
    assert torch.equal(seen.fused(REPORT, WORDS, present), REPORT)
    assert not torch.equal(logits(seen), logits(seen, labels=LABELS.flip(0)))
    assert not torch.equal(compared.fused(REPORT, WORDS, compared.present(LABELS)), REPORT)
    assert torch.equal(logits(compared), logits(compared, labels=LABELS.flip(0)))
    compared.loss(IMAGE, REPORT, WORDS, LABELS, 1).backward()
    assert [name for name, parameter in compared.named_parameters() if parameter.grad is None] == []


def test_the_loss_by_hand() -> None:
    """Cross entropy with the site + mean over the batch of |e_r - e_a|^2, whose target has no gradient."""
    one = selector()
    present = one.present(LABELS)
    distance = (REPORT - one.text.augment(WORDS, present)).square().sum(1).mean()
    expected = -logits(one).log_softmax(1)[:, 2].mean() + distance
    report = REPORT.clone().requires_grad_()
    image = IMAGE.clone().requires_grad_()
    torch.testing.assert_close(one.loss(image, report, WORDS, LABELS, 2), expected)
    only = selector(embeddings=("image", "token"))
    only.loss(image, report, WORDS, LABELS, 2).backward()
    assert report.grad is None, "stop-gradient: the report is the target alone"


def test_the_gradient_over_all_is_the_mean_over_parts() -> None:
    """Nothing couples the records of a batch: what makes one full-batch step possible in pieces."""
    one = selector()
    parameters = list(one.parameters())

    def gradient(rows: slice) -> tuple[Tensor, ...]:
        loss = one.loss(IMAGE[rows], REPORT[rows], WORDS, LABELS[rows], 0)
        return torch.autograd.grad(loss, parameters)

    halves = zip(gradient(slice(0, 3)), gradient(slice(3, 6)), strict=True)
    for whole, (first, second) in zip(gradient(slice(None)), halves, strict=True):
        torch.testing.assert_close(whole, (first + second) / 2, rtol=1e-4, atol=1e-7)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = CONFIG.build(MODEL, 5), CONFIG.build(MODEL, 5)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(next(CONFIG.build(MODEL, 6).parameters()), next(one.parameters()))


def test_config_comes_back_from_json_and_from_flares_lists() -> None:
    assert from_config(json.loads(json.dumps(to_config(CONFIG)))) == CONFIG
    assert SelectorConfig(sites=K, classes=list(CLASSES), hidden=8) == CONFIG  # type: ignore[arg-type]


def test_refuses() -> None:
    for wrong, said in [
        ({"embeddings": ()}, "expected some of image, report, token"),
        ({"embeddings": ("image", "image")}, "once"),
        ({"embeddings": ("pixels",)}, "pixels"),
        ({"fusion": "sum"}, "fusion 'sum'"),
        ({"sites": 0}, "sites 0"),
        ({"classes": ()}, "no classes"),
    ]:
        with pytest.raises(ValueError, match=said):
            replace(CONFIG, **wrong)  # type: ignore[arg-type]


def test_errors_name_the_remedy() -> None:
    one = selector()
    with pytest.raises(ValueError, match=r"this is site 4 of 3; set extra\.sites"):
        one.loss(IMAGE, REPORT, WORDS, LABELS, 3)
    with pytest.raises(ValueError, match=r"3 labels, the selector knows 2 classes; extra\.classes"):
        one.present(torch.ones(2, 3))
    with pytest.raises(ValueError, match="no labels"):
        one.present(None)
    with pytest.raises(ValueError, match=r"no report embedding .* extra\.embeddings"):
        one(IMAGE, None, WORDS, one.present(LABELS))
