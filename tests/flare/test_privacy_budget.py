"""The epsilon that is printed, against the exact value; and a ledger that survives what sites go through."""

from __future__ import annotations

import math
import multiprocessing
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedvlp.core.privacy import PrivacyError
from fedvlp.flare.privacy_budget import Ledger, epsilon

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'")


def exact(releases: dict[float, int], delta: float) -> float:
    """Balle and Wang (2018, Theorem 8) at sensitivity 2: k Gaussians are one whose squared ratio is the sum of theirs.

    delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), mu = sqrt(sum k (2 / noise)^2).
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    mu = math.sqrt(sum(count * (2 / noise) ** 2 for noise, count in releases.items()))

    def gap(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return float(brentq(gap, 0, 200))


@pytest.mark.parametrize(
    "releases", [{2.0: 1}, {8.0: 1}, {8.0: 25}, {40.0: 25}, {20.0: 3, 8.0: 2}, {400.0: 10}, {100.0: 1000}]
)
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_epsilon_is_an_upper_bound_close_to_the_exact_one(releases: dict[float, int], delta: float) -> None:
    truth = exact(releases, delta)
    assert truth <= epsilon(releases, delta) <= 1.2 * truth


@pytest.mark.parametrize(
    ("releases", "theirs"),
    [({2.0: 1}, 4.728507067217623), ({8.0: 25}, 6.122757864599009), ({20.0: 3, 8.0: 2}, 1.6637176062087544)],
)
def test_epsilon_is_that_of_another_accountant(releases: dict[float, int], theirs: float) -> None:
    """Google's dp-accounting 0.6.0, RdpAccountant over GaussianDpEvent(noise / 2), at delta 1e-5."""
    assert epsilon(releases, 1e-5) == pytest.approx(theirs, rel=1e-9)


def test_nothing_released_costs_nothing() -> None:
    assert epsilon({}, 1e-5) == 0


def test_the_budget_stops_and_survives_restarts_and_is_per_data_set(tmp_path: Path) -> None:
    """At noise 8, delta 1e-5 a budget of 3 holds as many releases as the accountant says, whoever opens the file."""
    count = max(n for n in range(1, 100) if epsilon({8.0: n}, 1e-5) <= 3)
    assert count > 3
    for made in range(1, count + 1):
        assert Ledger(tmp_path / "ledger.json").spend("chest", 8.0, 3.0, 1e-5) == (made, epsilon({8.0: made}, 1e-5))
    before = (tmp_path / "ledger.json").read_bytes()
    for _ in range(2):
        with pytest.raises(PrivacyError, match="budget of 'chest' is used up"):
            Ledger(tmp_path / "ledger.json").spend("chest", 8.0, 3.0, 1e-5)
    assert (tmp_path / "ledger.json").read_bytes() == before
    with pytest.raises(PrivacyError, match="used up"):  # nor does a job with another noise begin anew
        Ledger(tmp_path / "ledger.json").spend("chest", 7.0, 3.0, 1e-5)
    assert Ledger(tmp_path / "ledger.json").spend("retina", 8.0, 3.0, 1e-5)[0] == 1


def test_the_very_last_of_the_budget_may_be_spent_and_little_noise_is_read_back(tmp_path: Path) -> None:
    """A limit of exactly what two releases at noise 1/2 cost; the ledger of the first is read for the second."""
    ledger, limit = Ledger(tmp_path / "privacy" / "site" / "ledger.json"), epsilon({0.5: 2}, 1e-5)
    assert [ledger.spend("chest", 0.5, limit, 1e-5)[0] for _ in range(2)] == [1, 2]


def test_without_the_accountant_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis.rdp", None)
    with pytest.raises(PrivacyError, match="pip install"):
        epsilon({8.0: 1}, 1e-5)


DAMAGED = [
    "", "{", "[1]", '{"chest": 5}', '{"chest": {"8.0": -1}}', '{"chest": {"8.0": 0}}', '{"chest": {"0": 1}}',
    '{"chest": {"Infinity": 1}}', '{"chest": {"8.0": 1, "0": 1}}', '{"chest": {"8.0": 1.5}}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_ledger_stops_everything(tmp_path: Path, content: str) -> None:
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(PrivacyError, match="damaged"):
        Ledger(tmp_path / "ledger.json").spend("chest", 8.0, 3.0, 1e-5)
    assert (tmp_path / "ledger.json").read_text() == content


def _spend(path: Path) -> None:
    for _ in range(5):
        Ledger(path).spend("chest", 100.0, 50.0, 1e-5)


def test_a_release_waits_while_another_is_booked(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    thread = threading.Thread(target=_spend, args=(path,), daemon=True)
    with Ledger(path)._locked():
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not path.exists()
    thread.join(60)
    assert not thread.is_alive()
    assert Ledger(path).spend("chest", 100.0, 50.0, 1e-5)[0] == 6


def test_jobs_that_run_at_once_lose_no_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(path).spend("chest", 100.0, 50.0, 1e-5)
    workers = [multiprocessing.get_context("fork").Process(target=_spend, args=(path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert Ledger(path).spend("chest", 100.0, 50.0, 1e-5)[0] == 17
