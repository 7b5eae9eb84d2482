"""No test record is trained on, whatever its name; subsets; features of the frozen tower."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.probing import SIZE, SPLITS, cohort, model, one_hot

from fedvlp.evaluation.downstream import (
    VAL_SHARE,
    Subset,
    features,
    images,
    records,
    subsets,
    train_head,
)
from studies.protocols.vqa import VQA

LABELS = one_hot(np.arange(12) % 2, 2)


def test_a_test_film_under_another_name_is_left_out_of_training() -> None:
    """Row 10 is a test film; rows 1 (train) and 7 (val) are planted copies of it, of other patients."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, SIZE, SIZE), dtype=np.uint8)
    clean = records(cohort(LABELS, "ab", SPLITS, pixels.copy()))
    assert (clean.train.tolist(), clean.val.tolist(), clean.test.tolist()) == (
        [0, 1, 2, 3, 4, 5],
        [6, 7],
        [8, 9, 10, 11],
    )
    assert clean.left_out == 0
    pixels[1] = pixels[7] = pixels[10]
    found = records(cohort(LABELS, "ab", SPLITS, pixels))
    assert (found.train.tolist(), found.val.tolist(), found.left_out) == ([0, 2, 3, 4, 5], [6], 2)
    assert found.test.tolist() == [8, 9, 10, 11]


def test_data_without_a_validation_split_give_a_fifth_of_the_training_patients() -> None:
    data = cohort(one_hot(np.arange(60) % 2, 2), "ab", ("train",) * 40 + ("test",) * 20)
    found = records(data, seed=3)
    patients = np.asarray(data.patients)
    assert not set(patients[found.train]) & set(patients[found.val])
    assert len(set(patients[found.val])) == VAL_SHARE * 20
    assert sorted([*found.train, *found.val]) == list(range(40))
    assert found.val.tolist() == records(data, seed=3).val.tolist() != records(data, seed=4).val.tolist()


def test_rows_without_image_or_label_are_not_used() -> None:
    data = cohort(LABELS, "ab", SPLITS)
    data = replace(data, imaged=np.arange(12) != 4)
    found = records(data, usable=np.arange(12) != 9)
    assert found.train.tolist() == [0, 1, 2, 3, 5]
    assert found.test.tolist() == [8, 10, 11]
    with pytest.raises(ValueError, match="test 0 labelled images"):
        records(data, usable=np.arange(12) < 8)


def test_features_are_the_towers_own_in_order_and_change_no_byte() -> None:
    probed, data = model().train(), cohort(LABELS, "ab", SPLITS)
    before = {name: tensor.clone() for name, tensor in probed.state_dict().items()}
    rows = np.array([11, 0, 5])
    found = features(probed, data, rows)
    (batch,) = images(data, rows, SIZE)
    assert torch.equal(batch[1, 0], torch.from_numpy(data.images(np.array([0]))[0].astype(np.float32)) * (2 / 255) - 1)
    with torch.no_grad():
        encoded = probed.eval().encode({"image": batch})
        aligned = probed.image_alignment(encoded.image)[:, 0]  # type: ignore[union-attr, arg-type]
    assert torch.allclose(found, encoded.image[:, 0])  # type: ignore[union-attr, index]
    assert torch.allclose(features(probed, data, rows, aligned=True), aligned)
    assert not torch.allclose(found, aligned)
    assert all(torch.equal(tensor, before[name]) for name, tensor in probed.state_dict().items())


def test_a_head_is_left_as_it_was_after_its_best_epoch() -> None:
    """One weight that falls by about lr 0.1 a step, two steps an epoch; the third epoch is the best of five.

    Two epochs without a lower validation loss end it. Three steps alone end in the second epoch.
    """
    protocol, taken = VQA(lr=0.1, weight_decay=0.0, batch_size=2, epochs=9, patience=2), list[float]()

    def trained(steps: int | None) -> torch.nn.Linear:
        taken.clear()
        head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(head.weight)
        validation = iter([3.0, 2.0, 1.0, 2.0, 2.0])

        def held_out() -> float:
            taken.append(round(-head.weight.item(), 2))
            return next(validation)

        def loss(rows: torch.Tensor) -> torch.Tensor:
            return head.weight.sum() * len(rows)

        train_head(head, protocol, 4, loss, held_out, torch.Generator().manual_seed(0), steps)
        return head

    assert trained(None).weight.item() == pytest.approx(-0.6, abs=1e-4)
    assert taken == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert trained(3).weight.item() == pytest.approx(-0.3, abs=1e-4)
    assert taken == [0.2, 0.3]


def test_a_share_is_drawn_by_its_seed_and_is_never_empty() -> None:
    positives = torch.from_numpy(one_hot(np.arange(200) % 4, 4) == 1)
    small, again, other = (Subset(0.1).draw(positives, seed) for seed in (42, 42, 43))
    assert len(small) == 20 == len(set(small.tolist()))
    assert torch.equal(small, again)
    assert not torch.equal(small, other)
    assert Subset(1.0).draw(positives, 0).tolist() == list(range(200))
    assert len(Subset(0.001).draw(positives, 0)) == 1


def test_shots_are_so_many_of_each_class_and_of_none() -> None:
    classes = np.arange(90) % 3
    drawn = Subset(shots=5).draw(torch.from_numpy(one_hot(classes, 3) == 1), 1)
    assert Counter(classes[drawn].tolist()) == {0: 5, 1: 5, 2: 5}
    finding = torch.arange(90)[:, None] % 9 == 0  # one finding, ten have it
    drawn = Subset(shots=8).draw(finding, 1)
    assert Counter(finding[drawn, 0].tolist()) == {True: 8, False: 8}
    assert len(Subset(shots=50).draw(finding, 1)) == 10 + 50


def test_refuses_subsets_that_cannot_be() -> None:
    for fractions, shots in [((), ()), ((0.0,), ()), ((1.5,), ()), ((), (0,))]:
        with pytest.raises(ValueError, match="somebody: "):
            subsets(fractions, shots, "somebody")
        assert [str(subset) for subset in subsets((0.01, 1.0), (5,), "")] == ["1 %", "100 %", "5-shot"]
