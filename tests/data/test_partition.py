"""The Dirichlet partition: the checks of spec 12.1 and the assignment file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedvlp.data.partition import class_codes, dirichlet_partition, write_assignment


def table(rows: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels [N, 5] of all 32 mention classes, one study per row."""
    rng = np.random.default_rng(seed)
    labels = rng.choice([1, 0, -1, np.nan], size=(rows, 5), p=[0.2, 0.2, 0.1, 0.5]).astype(np.float32)
    return labels, np.arange(rows)


def test_class_code_by_hand():
    """mention: cells 0 and 2 not blank = 1 + 4 = 5; positive: cell 2 alone = 4."""
    labels = np.array([[0, np.nan, 1, np.nan, np.nan], [np.nan, -1, np.nan, np.nan, 1]], dtype=np.float32)
    assert class_codes(labels).tolist() == [5, 2 + 16]
    assert class_codes(labels, "positive").tolist() == [4, 16]
    with pytest.raises(ValueError, match="'mention' or 'positive'"):
        class_codes(labels, "any")


def test_every_row_goes_to_exactly_one_site():
    for beta in [0.1, 1.0, 5.0]:
        labels, groups = table()
        site = dirichlet_partition(labels, groups, 5, beta, seed=1)
        assert site.shape == (4000,)
        assert set(site.tolist()) == set(range(5))  # one index per row: the union is all, disjoint by construction
        codes = class_codes(labels)
        for code in range(32):  # per-class counts are preserved
            assert sum(((site == k) & (codes == code)).sum() for k in range(5)) == (codes == code).sum()


def test_deterministic_for_a_seed_and_blind_to_the_spelling_of_groups():
    labels, groups = table()
    first = dirichlet_partition(labels, groups, 5, 1.0, seed=3)
    assert np.array_equal(first, dirichlet_partition(labels, groups, 5, 1.0, seed=3))
    assert np.array_equal(first, dirichlet_partition(labels, [f"study {9999 - g}" for g in groups], 5, 1.0, seed=3))
    assert not np.array_equal(first, dirichlet_partition(labels, groups, 5, 1.0, seed=4))


def test_large_beta_is_a_uniform_split_of_every_class():
    labels, groups = table(16000)
    site, codes = dirichlet_partition(labels, groups, 5, 1e6, seed=0), class_codes(labels)
    assert np.abs(np.bincount(site) / len(site) - 0.2).max() < 0.05
    early = codes < 16  # the last classes meet the balance cap
    for code in np.unique(codes[early]):
        share = np.bincount(site[codes == code], minlength=5) / (codes == code).sum()
        assert np.abs(share - 0.2).max() < 0.05


def test_small_beta_skews_more_than_large():
    labels, groups = table()
    codes = class_codes(labels)

    def skew(beta: float) -> float:
        site = dirichlet_partition(labels, groups, 5, beta, seed=0)
        counts = np.stack([np.bincount(codes[site == k], minlength=32) for k in range(5)])
        return float((counts / counts.sum(axis=0)).std(axis=0).mean())

    assert skew(0.1) > 2 * skew(5.0)


def test_one_client_returns_everything():
    labels, groups = table(100)
    assert dirichlet_partition(labels, groups, 1, 1.0, seed=0).tolist() == [0] * 100


def test_rows_of_a_group_stay_together():
    labels, _ = table(900)
    groups = np.repeat(np.arange(300), 3)[np.random.default_rng(5).permutation(900)]
    site = dirichlet_partition(labels, groups, 4, 0.5, seed=0)
    assert all(len(set(site[groups == g])) == 1 for g in range(300))


def test_a_full_site_gets_no_further_class():
    """No site can pass n/N by more than what one class brought it."""
    labels, groups = table()
    site, biggest = dirichlet_partition(labels, groups, 5, 0.1, seed=2), np.bincount(class_codes(labels)).max()
    assert np.bincount(site).max() < 4000 / 5 + biggest


def test_min_size_holds_and_retries_are_bounded():
    labels, groups = table(400)
    site = dirichlet_partition(labels, groups, 8, 0.1, seed=0, min_size=20)
    assert np.bincount(site).min() >= 20
    with pytest.raises(ValueError, match="after 3 tries"):
        dirichlet_partition(np.zeros((400, 5)), groups, 8, 0.01, seed=0, min_size=45, max_tries=3)
    with pytest.raises(ValueError, match="400 rows cannot give each of 8 sites the asked 60"):
        dirichlet_partition(labels, groups, 8, 1.0, seed=0, min_size=60)


def test_nonsense_is_refused():
    for change in [{"sites": 0}, {"beta": 0.0}, {"beta": float("nan")}]:
        labels, groups = table(100)
        with pytest.raises(ValueError, match="must be positive"):
            dirichlet_partition(labels, groups, **{"sites": 2, "beta": 1.0, "seed": 0, **change})


def test_the_assignment_file(tmp_path):
    path, site, ids = tmp_path / "assignment.json", np.array([1, 0, 1]), ["a", "b", "c"]
    sha = write_assignment(path, site, ids, 7, beta=0.5, label_code="mention")
    body = json.loads(path.read_text())
    assert (body["seed"], body["sha256"], body["counts"]) == (7, sha, [1, 2])
    assert body["settings"] == {"beta": 0.5, "label_code": "mention"}
    assert (body["ids"], body["assignment"]) == (ids, [1, 0, 1])
    assert write_assignment(path, site, ids, 7, beta=0.5, label_code="mention") == sha
    with pytest.raises(ValueError, match="3 sites for 1 ids"):
        write_assignment(path, site, ["a"], 7)
