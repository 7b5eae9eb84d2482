"""Retrieval: ranks against a full stable sort, ties, independence of the tile, and the protocols built on them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from fedvlp.evaluation import retrieval as module
from fedvlp.evaluation.retrieval import across_sites, folded_retrieval, in_batch_retrieval, ranks, recall, retrieval

TILES = [(1024, 1024), (7, 5), (64, 32), (1, 1), (3, 1000), (1000, 3)]


def unit(rows, dimension, seed):
    return normalize(torch.randn(rows, dimension, generator=torch.Generator().manual_seed(seed)), dim=1)


def integers(rows, dimension, seed, low=-2, high=3):
    """Small integers: every score is exact in float32, in any order of summation, and many scores are equal."""
    return torch.randint(low, high, (rows, dimension), generator=torch.Generator().manual_seed(seed)).float()


def sorted_ranks(scores, owner):
    """Both directions by a full stable sort, from scores [N, M] and the image of each text [M]."""
    positive = owner[None, :] == torch.arange(scores.shape[0])[:, None]  # [N, M]
    results = []
    for table, hit in ((scores, positive), (scores.t(), positive.t())):
        order = torch.argsort(table, dim=1, descending=True, stable=True)
        results.append(hit.gather(1, order).int().argmax(dim=1))
    return tuple(results)


def assert_same(seen, expected):
    assert torch.equal(seen[0], expected[0])
    assert torch.equal(seen[1], expected[1])
    assert seen[0].dtype == seen[1].dtype == torch.int64


def test_equal_a_full_stable_sort_on_many_ties():
    for shuffled in [False, True]:
        for captions in [1, 5]:
            for tile in TILES:
                image, text = integers(30, 6, 0), integers(30 * captions, 6, 1)
                owner = torch.arange(30).repeat_interleave(captions)
                if shuffled:
                    owner = owner[torch.randperm(owner.numel(), generator=torch.Generator().manual_seed(2))]
                assert_same(ranks(image, text, image_of_text=owner, tile=tile), sorted_ranks(image @ text.t(), owner))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 10**6), st.integers(1, 35), st.integers(1, 50))
def test_equal_a_full_stable_sort_for_any_shape(images, more, seed, rows, columns):
    extra = torch.randint(0, images, (more,), generator=torch.Generator().manual_seed(seed))
    owner = torch.cat([torch.arange(images), extra])
    owner = owner[torch.randperm(owner.numel(), generator=torch.Generator().manual_seed(seed))]
    image, text = integers(images, 3, seed), integers(images + more, 3, seed + 1)
    expected = sorted_ranks(image @ text.t(), owner)
    assert_same(ranks(image, text, image_of_text=owner, tile=(rows, columns)), expected)


def test_near_ties_are_resolved_with_the_products_own_bits():
    """Competitors one float32 step from the positive. One tile is the full product: the sort sees the same bits."""
    for dimension in [1, 64, 512, 769]:
        image = unit(300, dimension, 0)
        text = image + 1e-7 * unit(300, dimension, 1)
        text[100:200] = text[:100]  # the same text again: equal scores, or nearly
        text[200:300] = torch.nextafter(text[:100], torch.tensor(math.inf))
        expected = sorted_ranks(image @ text.t(), torch.arange(300))
        assert_same(ranks(image, text, tile=(1024, 1024)), expected)


def test_equal_a_sort_of_the_same_tiles():
    """The full matrix put together from the products that ranks() makes: identical for every tile, near-ties or not."""
    for tile in [(1024, 1024), (96, 64), (50, 33)]:
        image = unit(300, 512, 0)
        text = (image + 1e-7 * unit(300, 512, 1))[torch.arange(300) // 2 * 2]  # every text twice
        tiles = module._Tiles(image, text, tile)
        scores = torch.empty(300, 300)
        for rows, columns in tiles:
            scores[rows, columns] = tiles.scores(rows, columns)
        assert_same(ranks(image, text, tile=tile), sorted_ranks(scores, torch.arange(300)))


def test_one_float_step_beside_the_positive_is_no_tie():
    """One dimension and images of 1: the scores are the texts, one of three neighbouring floats, for any tile."""
    for tile in TILES:
        one = torch.tensor(1.0)
        values = torch.stack([torch.nextafter(one, 0 * one), one, torch.nextafter(one, 2 * one)])
        text = values[integers(30, 1, 0, 0, 3).long()]  # [30, 1]
        shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(1))
        for owner in (torch.arange(30), shuffled, torch.arange(30) // 3):
            image = torch.ones(int(owner.max()) + 1, 1)
            assert_same(ranks(image, text, image_of_text=owner, tile=tile), sorted_ranks(image @ text.t(), owner))
            assert_same(ranks(text, text, tile=tile), sorted_ranks(text @ text.t(), torch.arange(30)))


def test_one_float_step_below_a_later_positive_is_not_ahead():
    """Scores of every image: 1 - ulp, 1, 1, 1; pairs by position. Text 0 is behind all others, in any tile.

    In tiles of two texts those of images 2 and 3 lie beyond the first tile, which holds the positives of 0 and 1.
    """
    one = torch.tensor(1.0)
    text = torch.stack([torch.nextafter(one, 0 * one), one, one, one])[:, None]
    for tile in ((4, 2), (4, 4), (1, 1)):
        forward, _ = ranks(torch.ones(4, 1), text, tile=tile)
        assert forward.tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(("room", "products"), [(0, 12), (1, 11), (2, 10), (2.9, 10), (3, 9), (99, 9)])
def test_tiles_with_positives_are_computed_once_as_far_as_there_is_room(room, products, monkeypatch):
    """3 x 3 tiles, of which the 3 on the diagonal hold the positives: all are counted, and those were looked at before.

    Of what does not fit, the products are made again.
    """
    made, product = [], torch.mm

    def counted(*arguments, **options):
        made.append(1)
        return product(*arguments, **options)

    image, text = integers(12, 3, 0), integers(12, 3, 1)
    expected = ranks(image, text)
    monkeypatch.setattr(module, "STORED", room * 4 * 4)
    monkeypatch.setattr(torch, "mm", counted)
    assert_same(ranks(image, text, tile=(4, 4)), expected)
    assert len(made) == products


def test_tiles_that_are_not_kept_share_their_memory():
    tiles = module._Tiles(integers(8, 3, 0), integers(8, 3, 1), (4, 4))
    assert len({tiles.scores(rows, columns).data_ptr() for rows, columns in tiles}) == 1


def test_a_perfect_model_scores_100_at_every_tile():
    """Trap: a positive's score computed apart lost half of these to its own last bit."""
    image = unit(500, 512, 3)
    for tile in (1024, 1024), (128, 64), (100, 33):
        forward, backward = ranks(image, image.clone(), tile=tile)
        assert forward.sum() == 0
        assert backward.sum() == 0
    assert retrieval(image, image) == {f"{way}/r{k}": 100.0 for k in (1, 5, 10) for way in ("i2t", "t2i", "mean")}


def test_collapsed_embeddings_score_chance():
    for tile in TILES:
        image = torch.zeros(40, 8)
        image[:, 0] = 1
        forward, backward = ranks(image, image, tile=tile)
        assert forward.tolist() == backward.tolist() == list(range(40))
        assert retrieval(image, image, ks=(1, 10)) == pytest.approx(
            {"i2t/r1": 2.5, "t2i/r1": 2.5, "mean/r1": 2.5, "i2t/r10": 25.0, "t2i/r10": 25.0, "mean/r10": 25.0}
        )
        owner = torch.arange(40).repeat_interleave(5)
        forward, backward = ranks(image, image[owner], image_of_text=owner, tile=tile)
        assert forward.tolist() == list(range(0, 200, 5))
        assert backward.tolist() == owner.tolist()
        assert in_batch_retrieval(image, image, batch_size=8)["mean/r1"] == 12.5


def test_the_tile_does_not_change_the_ranks_of_random_unit_vectors():
    """No two of these scores are within a rounding of each other at a threshold (seed fixed), so every tile agrees."""
    image, text, owner = unit(300, 64, 5), unit(600, 64, 6), torch.arange(300).repeat_interleave(2)
    text = normalize(text + image[owner], dim=1)
    expected = ranks(image, text, image_of_text=owner)
    for tile in TILES[1:3] + TILES[4:]:
        assert_same(ranks(image, text, image_of_text=owner, tile=tile), expected)


def test_hand_computed():
    """Scores [[3, 1, 2], [0, 5, 5], [4, 2, 1]], pairs on the diagonal.

    Row ranks of the diagonal: 3 is first (0); 5 ties with text 2, of higher index, (0); 1 is behind 4 and 2 (2).
    Column ranks: 3 is behind 4 (1); 5 is first (0); 1 is behind 2 and 5 (2).
    """
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 5.0], [4.0, 2.0, 1.0]])
    forward, backward = ranks(torch.eye(3), scores.t().contiguous())
    assert forward.tolist() == [0, 0, 2]
    assert backward.tolist() == [1, 0, 2]
    assert recall(forward, 1) == pytest.approx(200 / 3)
    assert recall(backward, 2) == pytest.approx(200 / 3)


def test_random_embeddings_score_chance_and_recall_grows_with_k():
    result = retrieval(unit(2000, 32, 7), unit(2000, 32, 8), ks=(1, 10, 100, 2000))
    for k in (10, 100):
        sigma = 100 * math.sqrt(k / 2000 * (1 - k / 2000) / 2000)
        assert abs(result[f"i2t/r{k}"] - k / 20) < 3 * sigma
        assert abs(result[f"t2i/r{k}"] - k / 20) < 3 * sigma
    assert result["i2t/r1"] <= result["i2t/r10"] <= result["i2t/r100"] <= result["i2t/r2000"] == 100


def test_captions_twice_cannot_lower_a_hit():
    """Duplicating all captions at most doubles a rank, and leaves every Recall@1."""
    image, text = unit(200, 16, 9), unit(200, 16, 10) + unit(200, 16, 9)
    owner = torch.arange(200)
    once, _ = ranks(image, text)
    twice, _ = ranks(image, torch.cat([text, text]), image_of_text=torch.cat([owner, owner]))
    assert recall(twice, 1) >= recall(once, 1)
    assert torch.equal(twice, 2 * once)


def test_dtypes():
    for dtype in [torch.float16, torch.bfloat16, torch.float64]:
        image, text = integers(30, 4, 0).to(dtype), integers(30, 4, 1).to(dtype)
        assert_same(ranks(image, text), sorted_ranks(image.double() @ text.double().t(), torch.arange(30)))


def test_strided_inputs_and_gradients():
    image, text = integers(4, 30, 0).t(), integers(30, 8, 1)[:, ::2].requires_grad_()
    assert_same(ranks(image, text, tile=(8, 8)), sorted_ranks((image @ text.t()).detach(), torch.arange(30)))


def test_folds():
    image, text = integers(20, 5, 0), integers(60, 5, 1)
    owner = torch.arange(20).repeat_interleave(3)
    parts = [retrieval(image[i : i + 5], text[3 * i : 3 * i + 15], (1, 2), owner[:15]) for i in (0, 5, 10, 15)]
    folded = folded_retrieval(image, text, owner, folds=4, ks=(1, 2))
    assert folded == pytest.approx({key: sum(part[key] for part in parts) / 4 for key in parts[0]})
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    distinct = unit(60, 16, 3)  # no ties: the order of the texts cannot matter
    assert folded_retrieval(unit(20, 16, 4), distinct[order], owner[order], 4) == pytest.approx(
        folded_retrieval(unit(20, 16, 4), distinct, owner, 4)
    )
    assert folded_retrieval(image, text, owner, folds=1) == retrieval(image, text, image_of_text=owner)
    assert folded_retrieval(image, text, owner, folds=20)["mean/r1"] == 100, "alone, every image is found"
    assert folded_retrieval(image, text, owner) == folded_retrieval(image, text, owner, folds=5), "CreamFL's"
    for folds in (0, 3, 21):
        with pytest.raises(ValueError, match=f"20 images, {folds} folds"):
            folded_retrieval(image, text, owner, folds=folds)


def test_in_batch_is_the_mean_over_full_batches():
    image, text = integers(107, 4, 0), integers(107, 4, 1)
    parts = [retrieval(image[i : i + 32], text[i : i + 32]) for i in (0, 32, 64)]
    expected = {key: sum(part[key] for part in parts) / 3 for key in parts[0]}
    assert in_batch_retrieval(image, text) == pytest.approx(expected)


def test_a_batch_larger_than_is_scored_at_a_time_is_scored_whole():
    image, text = integers(1100, 3, 0), integers(1100, 3, 1)
    assert in_batch_retrieval(image, text, batch_size=1100) == pytest.approx(retrieval(image, text))


def test_in_batches_of_one_everything_is_found():
    assert in_batch_retrieval(integers(5, 4, 0), integers(5, 4, 1), batch_size=1)["mean/r1"] == 100


def test_in_batch_of_random_embeddings_is_chance():
    result = in_batch_retrieval(unit(32 * 200, 16, 0), unit(32 * 200, 16, 1))
    for k, chance in ((1, 3.125), (5, 15.625)):
        sigma = math.sqrt(chance * (100 - chance) / 6400)
        assert abs(result[f"i2t/r{k}"] - chance) < 3 * sigma
        assert abs(result[f"t2i/r{k}"] - chance) < 3 * sigma


def test_in_batch_groups_are_positives():
    """Two images of one study with one report: text 0 = text 1, so image 1 ties and loses to index 0 without groups."""
    image, text = torch.eye(4), torch.eye(4)
    text[1] = text[0]
    image[1] = image[0]
    assert in_batch_retrieval(image, text, 4, (1,))["i2t/r1"] == 75
    for groups in (["a", "a", "b", "c"], torch.tensor([7, 7, 8, 9])):
        assert in_batch_retrieval(image, text, 4, (1,), groups)["mean/r1"] == 100
    plain = in_batch_retrieval(integers(64, 3, 0), integers(64, 3, 1))
    assert in_batch_retrieval(integers(64, 3, 0), integers(64, 3, 1), groups=range(64)) == plain


def test_ranks_of_best_by_hand():
    """Of two queries and four candidates: the first has its best positive, 4, behind 5; the second a tie before it."""
    scores = torch.tensor([[[1.0, 4.0, 5.0, 0.0], [1.0, 0.0, 2.0, 2.0]]])
    positive = torch.tensor([[[True, True, False, False], [True, False, False, True]]])
    assert module._ranks_of_best(scores, positive).tolist() == [[1, 1]]


def test_in_batch_groups_against_a_full_sort():
    image, text, groups = integers(64, 3, 0), integers(64, 3, 1), torch.arange(64) // 3
    expected = []
    for start in (0, 32):
        part = slice(start, start + 32)
        hit = groups[part, None] == groups[None, part]
        order = torch.argsort(image[part] @ text[part].t(), dim=1, descending=True, stable=True)
        expected.append(recall(hit.gather(1, order).int().argmax(dim=1), 5))
    assert in_batch_retrieval(image, text, groups=groups)["i2t/r5"] == pytest.approx(sum(expected) / 2)


def test_across_sites():
    """Mean (10 + 30 + 20)/3 = 20, minimum 10, population std sqrt((100 + 100 + 0)/3) = 8.1650."""
    sites = {"a": {"i2t/r1": 10.0}, "b": {"i2t/r1": 30.0}, "c": {"i2t/r1": 20.0}}
    assert across_sites(sites) == pytest.approx(
        {"i2t/r1/average": 20.0, "i2t/r1/worst": 10.0, "i2t/r1/disparity_population_std": math.sqrt(200 / 3)}
    )
    assert across_sites({"a": {"x": 4.0}})["x/disparity_population_std"] == 0


def test_across_sites_refuses_what_it_cannot_average():
    for sites in [{}, {"a": {"x": 1.0}, "b": {"y": 1.0}}, {"a": {"x": math.nan}}, {"a": {"x": 1.0}, "b": {}}]:
        with pytest.raises(ValueError, match=r"across_sites: .*; *expected"):
            across_sites(sites)


def test_refusals_state_what_was_seen_and_the_remedy():
    for change, words in [
        ({"text": torch.zeros(4, 3)}, r"image \(4, 2\) and text \(4, 3\)"),
        ({"image": torch.zeros(4)}, r"image \(4,\)"),
        ({"image": torch.zeros(0, 2)}, r"image \(0, 2\)"),
        ({"text": torch.ones(5, 2)}, "4 images and 5 texts"),
        ({"image": torch.tensor([[math.nan, 1], [0, math.inf], [1, 1], [1, 1]])}, "2 of 4 image embeddings"),
        ({"text": torch.tensor([[1, -math.inf], [0, 0], [1, 1], [1, 1]])}, "1 of 4 text embeddings"),
        ({"text": torch.tensor([[1, math.nan], [1, math.inf], [1, math.nan], [1, 1]])}, "3 of 4 text embeddings"),
        ({"image": torch.full((4, 2), 1e30), "text": torch.full((4, 2), 1e30)}, "overflow"),
        ({"image": torch.full((4, 2), -1e30), "text": torch.full((4, 2), 1e30)}, "overflow"),
        ({"image": torch.full((4, 2), -1e30), "text": torch.tensor([[1e30, -1e30]] * 4)}, "overflow"),
        ({"image": torch.full((4, 64), 1e18), "text": torch.full((4, 64), 1e19)}, r"up to 1e\+37 overflow"),
        ({"image_of_text": torch.zeros(4, 1, dtype=torch.int64)}, r"torch.int64 \(4, 1\)"),
        ({"image_of_text": torch.arange(4.0)}, "torch.float32"),
        ({"image_of_text": torch.tensor([0, 1, 2, 4])}, r"lies in \[0, 4\]"),
        ({"text": torch.ones(5, 2), "image_of_text": torch.arange(5)}, r"lies in \[0, 4\] and 4 of 4"),
        ({"image_of_text": torch.tensor([0, 1, 2, -1])}, r"lies in \[-1, 2\]"),
        ({"image_of_text": torch.tensor([0, 1, 2, 2])}, "1 of 4 images have no text"),
        ({"tile": (0, 5)}, r"tile is \(0, 5\)"),
        ({"tile": (5, 0)}, r"tile is \(5, 0\)"),
        ({"tile": (2**24 + 1, 5)}, r"tile is \(16777217, 5\)"),
        ({"tile": (5, 2**24 + 1)}, r"tile is \(5, 16777217\)"),
    ]:
        good = {"image": torch.ones(4, 2), "text": torch.ones(4, 2)}
        with pytest.raises(ValueError, match=words) as caught:
            ranks(**{**good, **change})
        assert str(caught.value).startswith("ranks: ")
        assert "; expected " in str(caught.value)


def test_scores_up_to_the_largest_number_are_taken():
    largest = torch.finfo(torch.float32).max
    forward, _ = ranks(torch.tensor([[largest], [largest]]), torch.tensor([[0.5], [1.0]]))
    assert forward.tolist() == [1, 0]


def test_the_largest_tile_is_taken():
    image, text = integers(5, 3, 0), integers(5, 3, 1)
    assert_same(ranks(image, text, tile=(2**24, 2**24)), sorted_ranks(image @ text.t(), torch.arange(5)))


def test_other_refusals():
    with pytest.raises(ValueError, match="31 pairs, batch_size 32; expected at least one full batch"):
        in_batch_retrieval(unit(31, 4, 0), unit(31, 4, 1))
    with pytest.raises(ValueError, match="batch_size 0"):
        in_batch_retrieval(unit(31, 4, 0), unit(31, 4, 1), 0)
    with pytest.raises(ValueError, match="32 images and 33 texts"):
        in_batch_retrieval(unit(32, 4, 0), unit(33, 4, 1))
    with pytest.raises(ValueError, match="2 groups for 32 pairs"):
        in_batch_retrieval(unit(32, 4, 0), unit(32, 4, 1), groups=["a", "b"])
    with pytest.raises(ValueError, match="k = 0"):
        recall(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="0 ranks"):
        recall(torch.zeros(0), 1)
