"""CreamFL's task losses by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedvlp.core.types import VLOutput
from fedvlp.objectives.creamfl_tasks import CreamFLTask, CreamFLTaskConfig, soft_contrastive


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_soft_contrastive_by_hand() -> None:
    """Images (1,0), (0,1), texts the same: distance 0 on the diagonal (1e-3 with the root's guard), sqrt 2 beside it.

    With a = 2, b = 1: s = 1 - 0.002 = 0.998 and 1 - 2 sqrt(2 + 1e-6); both directions are the same sum, so twice it.
    """
    eye = torch.eye(2, dtype=torch.float64)
    seen = soft_contrastive(eye, eye, torch.tensor(2.0), torch.tensor(1.0)).item()
    near, far = 1 - 2 * 1e-3, 1 - 2 * math.sqrt(2 + 1e-6)
    assert seen == pytest.approx(2 * (2 * softplus(-2 * near) + 2 * softplus(2 * far)))


def test_soft_contrastive_is_the_loop_over_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    total = 0.0
    for i in range(4):
        for j in range(4):
            score = 15 - 15 * math.sqrt(float((image[i] - text[j]).square().sum()) + 1e-6)
            total += softplus(-2 * (1 if i == j else -1) * score)
    seen = soft_contrastive(image, text, torch.tensor(15.0), torch.tensor(15.0)).item()
    assert seen == pytest.approx(2 * total)


def test_identical_inputs_have_a_finite_gradient() -> None:
    image = torch.ones(2, 3, requires_grad=True)
    soft_contrastive(image, torch.ones(2, 3), torch.tensor(15.0), torch.tensor(15.0)).backward()
    assert image.grad is not None
    assert torch.isfinite(image.grad).all()


def test_rounding_makes_no_distance_of_equal_vectors_imaginary() -> None:
    """|x|^2 + |x|^2 - 2 x.x is not 0 in float32 but a little above or below it; of 256 long vectors some are below.

    Of 768 values, which every processor adds up in the product and in the sum in two different orders.
    """
    image = 1000 * torch.randn(256, 768, generator=torch.Generator().manual_seed(0))
    assert (image.square().sum(1) + image.square().sum(1) - 2 * (image @ image.T).diagonal()).min() < -1e-6
    assert torch.isfinite(soft_contrastive(image, image, torch.tensor(1.0), torch.tensor(1.0)))


def task(classes: int = 2, **settings: float) -> CreamFLTask:
    """Class weights (1, 0) and (-3, 1), of which the negative entry counts as 0; then zeros. One space for all."""
    settings = {"feature_scale": 2.0, "margin": 4.0, **settings}
    made = CreamFLTaskConfig(classes=classes, dim=2, label_spaces="shared", **settings).build()
    with torch.no_grad():
        made.weight.zero_()
        made.weight[:2] = torch.tensor([[1.0, 0.0], [-3.0, 1.0]])
    assert isinstance(made, CreamFLTask)
    return made


def test_classification_by_hand() -> None:
    """Feature (1, 0) of class 0: logits 2 * (1, 0) - (4, 0) = (-2, 0), loss log(1 + e^2). W W^T is the identity:

    each row costs log(1 + e^-1).
    """
    losses = task().classify(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), "image")
    assert losses["classification"].item() == pytest.approx(softplus(2))
    assert losses["centre"].item() == pytest.approx(0.5 * softplus(-1))


def test_the_loss_is_the_mean_over_records() -> None:
    losses = task().classify(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[1.0, 0.0]] * 3), "image")
    assert losses["classification"].item() == pytest.approx(softplus(2))


def test_computed_in_float32_under_autocast() -> None:
    """In bfloat16 a score of up to 15 would be off by up to 2^-8 of it."""
    task = CreamFLTaskConfig(classes=6, dim=8).build(None, 0)
    generator = torch.Generator().manual_seed(0)
    image, text = torch.nn.functional.normalize(torch.randn(2, 6, 8, generator=generator), dim=2)
    batch = {"labels": (torch.rand(6, 6, generator=generator) < 0.5).float()}
    for output in (VLOutput(image, text), VLOutput(image, None), VLOutput(None, text)):
        plain = task(output, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lowered = task(output, batch)
        assert {name: loss.item() for name, loss in lowered.items()} == {n: loss.item() for n, loss in plain.items()}


def test_several_positive_labels_share_the_target() -> None:
    """Both positive: logits (2 - 4, 0 - 4), the mean of both cross entropies."""
    losses = task().classify(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), "image")
    assert losses["classification"].item() == pytest.approx((softplus(-2) + softplus(2)) / 2)


def test_a_record_without_a_positive_label_is_left_out_or_of_the_class_none() -> None:
    """Labels 0, -1 (uncertain) and nan are no positive ones."""
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    labels = torch.tensor([[1.0, torch.nan], [0.0, -1.0]])
    assert task().classify(features, labels, "image")["classification"].item() == pytest.approx(softplus(2))
    assert task().classify(features[1:], labels[1:], "image")["classification"].item() == 0.0
    none = task(classes=3).classify(features[1:], labels[1:], "image")["classification"].item()  # logits (2, 0, 0 - 4)
    assert none == pytest.approx(math.log(math.exp(2) + 1 + math.exp(-4)) + 4)


def test_what_a_batch_has_decides_the_terms() -> None:
    made, unit, batch = task(), torch.tensor([[1.0, 0.0]]), {"labels": torch.tensor([[1.0, 0.0]])}
    assert made(VLOutput(unit, unit), batch).keys() == {"contrastive"}
    assert made(VLOutput(image=unit), batch).keys() == {"classification", "centre"}
    assert made(VLOutput(text=unit), batch).keys() == {"classification", "centre"}
    assert made(VLOutput(image=unit), {}) == {}
    assert made(VLOutput(), batch) == {}


@pytest.mark.parametrize("spaces", ["disjoint", "shared"])
def test_class_weights_are_those_of_the_seed(spaces: str) -> None:
    """Else every site would start from the prototypes of all others."""
    config = CreamFLTaskConfig(label_spaces=spaces)
    one, again, other = (config.build(seed=seed).state_dict() for seed in (3, 3, 4))
    weights = [name for name in one if name.endswith("weight")]
    assert weights == (["weight"] if spaces == "shared" else ["image_weight", "text_weight"])
    for name in weights:
        assert torch.equal(one[name], again[name])
        assert not (one[name] == other[name]).any()


def test_images_and_reports_that_stand_alone_are_classified_in_label_spaces_of_their_own() -> None:
    """Labels a, b, c and "none": images know a and c, reports b; what is only in the other's space is "none" here.

    All class weights are 0, so each class has the same logit but for the margin of 4 on the positive one.
    """
    made = CreamFLTaskConfig(classes=4, dim=2, margin=4.0).build()
    assert isinstance(made, CreamFLTask)
    with torch.no_grad():
        made.image_weight.zero_()
        made.text_weight.zero_()
    features = torch.tensor([[1.0, 0.0]])
    of_three, of_two = math.log(2 + math.exp(-4)) + 4, softplus(4)
    for labels in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
        image = made.classify(features, torch.tensor([labels]), "image")
        text = made.classify(features, torch.tensor([labels]), "text")
        assert image["classification"].item() == pytest.approx(of_three)
        assert text["classification"].item() == pytest.approx(of_two)
        assert image["centre"].item() == pytest.approx(0.5 * math.log(3))
        assert text["centre"].item() == pytest.approx(0.5 * math.log(2))


def test_each_data_set_has_its_own_classes_where_several_are_joined() -> None:
    """Labels a, b, c are of images, d and e of texts; blank in the other's records. All class weights are 0.

    An image is one of three, a text one of two, as if each data set were alone; no weight of the other's is trained.
    """
    made = CreamFLTaskConfig(classes=5, dim=2, margin=4.0, label_spaces="own").build()
    assert isinstance(made, CreamFLTask)
    with torch.no_grad():
        made.image_weight.fill_(0.5)
        made.text_weight.zero_()
    features, nan = torch.tensor([[0.6, 0.8]]), math.nan
    image = made.classify(features, torch.tensor([[0.0, 1.0, 0.0, nan, nan]]), "image")
    assert image["classification"].item() == pytest.approx(math.log(2 + math.exp(-4)) + 4)
    assert image["centre"].item() == pytest.approx(0.5 * math.log(3))
    image["classification"].backward()
    assert made.image_weight.grad is not None
    assert made.image_weight.grad.any(dim=1).tolist() == [True, True, True, False, False]
    text = made.classify(features, torch.tensor([[nan, nan, nan, 1.0, 0.0]]), "text")
    assert text["classification"].item() == pytest.approx(softplus(4))
    alone = made.classify(features, torch.tensor([[1.0, 0.0]]), "text")
    assert alone["classification"].item() == text["classification"].item(), "a data set that was not joined"
    with pytest.raises(ValueError, match="0 of 5 labels for sites with text alone"):
        made.classify(features, torch.full((1, 5), nan), "text")
    with pytest.raises(ValueError, match=r"labels \[1, 6\]; set objective.dim"):
        made.classify(features, torch.zeros(1, 6), "text")


def test_what_a_record_trains() -> None:
    """``idle`` says which own parameters a record leaves without a gradient; a row of the other's space has none."""
    for spaces in ("disjoint", "shared"):
        for modalities in (("image", "text"), ("image",), ("text",)):
            made = CreamFLTaskConfig(classes=4, dim=2, label_spaces=spaces).build()
            assert isinstance(made, CreamFLTask)
            made.add_module("extra", torch.nn.Linear(1, 1))  # of the method: none of its own
            unit = torch.tensor([[0.6, 0.8], [0.8, 0.6]])
            output = VLOutput(**dict.fromkeys(modalities, unit))
            losses = made(output, {"labels": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])})
            torch.stack(list(losses.values())).sum().backward()
            moved = {name for name, p in made.named_parameters(recurse=False) if p.grad is not None}
            assert made.idle(modalities) == {name for name, _ in made.named_parameters(recurse=False)} - moved
    assert CreamFLTaskConfig().build().idle(("image",)) == {"scale", "shift", "text_weight"}  # type: ignore[operator]


def test_rows_of_the_other_label_space_are_not_trained() -> None:
    made = CreamFLTaskConfig(classes=6, dim=2).build()
    assert isinstance(made, CreamFLTask)
    with torch.no_grad():
        made.image_weight.fill_(0.5)
    made.classify(torch.tensor([[0.6, 0.8]]), torch.tensor([[1.0] * 5]), "image")["classification"].backward()
    assert made.image_weight.grad is not None
    assert made.image_weight.grad.any(dim=1).tolist() == [True, False, True, False, True, True]
    assert made.text_weight.grad is None


def test_a_label_space_of_one_class_is_refused() -> None:
    """Three labels and no "none of them": reports would have the second label alone."""
    made = CreamFLTaskConfig(classes=3, dim=2).build()
    assert isinstance(made, CreamFLTask)
    features, labels = torch.ones(1, 2), torch.ones(1, 3)
    made.classify(features, labels, "image")
    with pytest.raises(ValueError, match="1 of 3 labels for sites with text alone, expected at least 2 classes; set"):
        made.classify(features, labels, "text")
    CreamFLTaskConfig(classes=3, dim=2, label_spaces="shared").build().classify(features, labels, "text")  # type: ignore[operator]
    with pytest.raises(ValueError, match="label_spaces 'even'; choose one of disjoint, shared, own"):
        CreamFLTaskConfig(label_spaces="even")


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights \[2, 2\].*features \[1, 3\].*set objective.dim"):
        task().classify(torch.ones(1, 3), torch.ones(1, 2), "image")
    with pytest.raises(ValueError, match=r"labels \[1, 4\]"):
        task().classify(torch.ones(1, 2), torch.ones(1, 4), "image")
    for wrong in ({"classes": 1}, {"dim": 0}):
        with pytest.raises(ValueError, match="expected at least 2 and 1"):
            CreamFLTaskConfig(**wrong)
    CreamFLTaskConfig(classes=2, dim=1)


def test_class_weights_start_uniform_within_one_over_the_root_of_the_width() -> None:
    """20,000 draws within 1/4: the largest and smallest lie within 1 % of the ends, the mean near 0."""
    weight = CreamFLTaskConfig(classes=1250, dim=16, label_spaces="shared").build().weight
    assert -0.25 <= weight.min() < -0.2475
    assert 0.2475 < weight.max() <= 0.25
    assert abs(weight.mean()) < 0.005


def test_the_mean_is_the_sum_per_pair_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(4, 2, generator=generator) for _ in range(2))
    losses = [
        CreamFLTaskConfig(dim=2, reduction=reduction).build()(VLOutput(image, text), {})["contrastive"].item()
        for reduction in ("sum", "mean")
    ]
    assert losses[0] == pytest.approx(4 * losses[1])
    with pytest.raises(ValueError, match="reduction 'max'"):
        CreamFLTaskConfig(reduction="max")
