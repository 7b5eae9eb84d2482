"""The epsilon that is printed, against the exact value; and a ledger that survives what sites go through."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedvlp.core.checkpoint import save_json
from fedvlp.core.privacy import PrivacyError
from fedvlp.flare import privacy_budget
from fedvlp.flare.privacy_budget import Ledger, epsilon

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'")


FILES = ("ledger.json", "marker.json")


def ledger(folder: Path) -> Ledger:
    return Ledger(folder / FILES[0], folder / FILES[1])


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


def test_the_price_that_the_page_names() -> None:
    page = " ".join((Path(__file__).parents[2] / "provisioning" / "PRIVACY.md").read_text(encoding="utf-8").split())
    assert (
        f"`clip` 2.5 and `noise_multiplier` 8 (epsilon {epsilon({8: 25}, 1e-5):.1f} after 25 rounds, delta 1e-5)"
        in page
    )
    assert f"a site's noise has a norm of {round(8 * 2.5 * 1.5e6**0.5, -2):,.0f}" in page
    assert f"(0.0003) spends an epsilon of {epsilon({0.0003: 1}, 1e-5) / 1e6:.0f} million a round" in page


def test_epsilon_is_an_upper_bound_close_to_the_exact_one() -> None:
    for releases in [{2.0: 1}, {8.0: 1}, {8.0: 25}, {40.0: 25}, {20.0: 3, 8.0: 2}, {400.0: 10}, {100.0: 1000}]:
        for delta in [1e-5, 1e-7]:
            truth = exact(releases, delta)
            assert truth <= epsilon(releases, delta) <= 1.2 * truth


def test_epsilon_is_that_of_another_accountant() -> None:
    """Google's dp-accounting 0.6.0, RdpAccountant over GaussianDpEvent(noise / 2), at delta 1e-5."""
    for releases, theirs in [
        ({2.0: 1}, 4.728507067217623),
        ({8.0: 25}, 6.122757864599009),
        ({20.0: 3, 8.0: 2}, 1.6637176062087544),
    ]:
        assert epsilon(releases, 1e-5) == pytest.approx(theirs, rel=1e-9)


def test_nothing_released_costs_nothing() -> None:
    assert epsilon({}, 1e-5) == 0


def test_the_budget_stops_and_survives_restarts_and_is_per_data_set(tmp_path: Path) -> None:
    """At noise 8, delta 1e-5 a budget of 3 holds as many releases as the accountant says, whoever opens the file."""
    count = max(n for n in range(1, 100) if epsilon({8.0: n}, 1e-5) <= 3)
    assert count > 3
    for made in range(1, count + 1):
        assert ledger(tmp_path).spend("chest", 8.0, 3.0, 1e-5) == (made, epsilon({8.0: made}, 1e-5))
    before = (tmp_path / "ledger.json").read_bytes()
    for _ in range(2):
        with pytest.raises(PrivacyError, match="budget of 'chest' is used up"):
            ledger(tmp_path).spend("chest", 8.0, 3.0, 1e-5)
    assert (tmp_path / "ledger.json").read_bytes() == before
    with pytest.raises(PrivacyError, match="used up"):  # nor does a job with another noise begin anew
        ledger(tmp_path).spend("chest", 7.0, 3.0, 1e-5)
    assert ledger(tmp_path).spend("retina", 8.0, 3.0, 1e-5)[0] == 1


def test_the_very_last_of_the_budget_may_be_spent_and_little_noise_is_read_back(tmp_path: Path) -> None:
    """A limit of exactly what two releases at noise 1/2 cost; the ledger of the first is read for the second."""
    book, limit = ledger(tmp_path / "privacy" / "site"), epsilon({0.5: 2}, 1e-5)
    assert [book.spend("chest", 0.5, limit, 1e-5)[0] for _ in range(2)] == [1, 2]


def test_a_multiplier_without_a_decimal_point_is_read_back(tmp_path: Path) -> None:
    """JSON has 8 and 8.0, and PRIVACY.md shows 8: one number, so one hash."""
    for count, multiplier in enumerate((8, 8.0, 8), start=1):
        assert ledger(tmp_path).spend("pretrain", multiplier, 10.0, 1e-5)[0] == count


def test_without_the_accountant_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis.rdp", None)
    with pytest.raises(PrivacyError, match="pip install"):
        epsilon({8.0: 1}, 1e-5)


def first_of(folder: Path, releases: int = 3) -> list[dict[str, Any]]:
    """Makes some releases; returns the ledger's entries."""
    for _ in range(releases):
        ledger(folder).spend("chest", 100.0, 50.0, 1e-5)
    entries: list[dict[str, Any]] = json.loads((folder / "ledger.json").read_text())
    return entries


def refused(folder: Path, why: str) -> None:
    """The next release is refused, and neither file is touched, so that restoring the right copy heals the site."""
    before = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    with pytest.raises(PrivacyError, match=why) as error:
        ledger(folder).spend("chest", 100.0, 50.0, 1e-5)
    assert str(folder) not in str(error.value)
    assert {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()} == before


DAMAGED = [
    "", "{", "[1]", "7", "null", '{"chest": {"8.0": 40}}', '[{"data": "chest"}]',
    '[{"data": 1, "noise_multiplier": 8.0, "link": "x"}]', '[{"data": "chest", "noise_multiplier": 0, "link": "x"}]',
    '[{"data": "chest", "noise_multiplier": Infinity, "link": "x"}]',
]  # fmt: skip


@pytest.mark.parametrize("file", ["ledger.json", "marker.json"])
def test_a_damaged_file_stops_everything(tmp_path: Path, file: str) -> None:
    first_of(tmp_path)
    for content in DAMAGED:
        (tmp_path / file).write_text(content)
        refused(tmp_path, "damaged")


@pytest.mark.parametrize("change", [{"releases": -1}, {"releases": 3.0}, {"releases": True}, {"site": "a" * 31}])
def test_a_marker_with_an_impossible_value_is_damaged(tmp_path: Path, change: dict[str, object]) -> None:
    first_of(tmp_path)
    mark = json.loads((tmp_path / "marker.json").read_text())
    assert (len(mark["site"]), len(mark["link"]), mark["releases"]) == (32, 32, 3), "32 hexadecimal digits: 128 bits"
    (tmp_path / "marker.json").write_text(json.dumps({**mark, **change}))
    refused(tmp_path, "marker of this site's privacy ledger is damaged")


def test_a_ledger_that_is_gone_is_no_empty_book(tmp_path: Path) -> None:
    first_of(tmp_path)
    kept = (tmp_path / "ledger.json").read_bytes()
    (tmp_path / "ledger.json").unlink()
    refused(tmp_path, "is gone, and its marker says that 3 releases were made")
    (tmp_path / "ledger.json").write_bytes(kept)
    assert ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)[0] == 4


def test_a_ledger_without_its_marker_is_not_trusted(tmp_path: Path) -> None:
    first_of(tmp_path)
    (tmp_path / "marker.json").unlink()
    refused(tmp_path, "marker of this site's privacy ledger is gone")


def test_a_ledger_that_was_cut_or_is_an_older_copy_is_refused(tmp_path: Path) -> None:
    entries = first_of(tmp_path)
    for fewer in (entries[:2], entries[:1], []):
        (tmp_path / "ledger.json").write_text(json.dumps(fewer))
        refused(tmp_path, f"holds {len(fewer)} releases and its marker says 3")


@pytest.mark.parametrize(
    "alter",
    [
        lambda e: e[:1] + e[2:],  # one left out
        lambda e: [e[1], e[0], e[2]],
        lambda e: [{**e[0], "noise_multiplier": 1e9}, *e[1:]],  # nearly free
        lambda e: [{**e[0], "data": "other"}, *e[1:]],  # booked on another account
        lambda e: [*e[:2], {**e[2], "link": e[1]["link"]}],
    ],
)
def test_an_altered_ledger_is_refused(alter: Any, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text(json.dumps(alter(first_of(tmp_path))))
    refused(tmp_path, "altered")


def test_another_sites_ledger_is_refused(tmp_path: Path) -> None:
    """Of as many releases of the same kind."""
    first_of(tmp_path / "here")
    first_of(tmp_path / "there")
    shutil.copy(tmp_path / "there" / "ledger.json", tmp_path / "here")
    refused(tmp_path / "here", "another site's")


def test_another_history_of_the_same_site_is_refused(tmp_path: Path) -> None:
    """Rolled back, and gone on with on another machine: as long, rightly chained, and not what the marker knows."""
    first_of(tmp_path, 1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    first_of(tmp_path, 2)
    ledger(tmp_path / "copy").spend("retina", 100.0, 50.0, 1e-5)
    ledger(tmp_path / "copy").spend("retina", 100.0, 50.0, 1e-5)
    shutil.copy(tmp_path / "copy" / "ledger.json", tmp_path)
    refused(tmp_path, "an older copy")


@pytest.mark.parametrize("made", [0, 2])
def test_a_kill_between_ledger_and_marker_loses_nothing(
    made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is written last; one that is behind is caught up with at the next release."""
    if made:
        first_of(tmp_path, made)
    written: list[str] = []

    def save(path: Path, value: Any) -> None:
        written.append(path.name)
        if written[-2:] == ["ledger.json", "marker.json"]:
            raise KeyboardInterrupt
        save_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(privacy_budget, "save_json", save)
        with pytest.raises(KeyboardInterrupt):
            ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)
    assert ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)[0] == made + 2


def test_a_kill_before_the_first_entry_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker of a ledger that was never written: there was no release."""

    def save(path: Path, value: Any) -> None:
        if path.name == "ledger.json":
            raise KeyboardInterrupt
        save_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(privacy_budget, "save_json", save)
        with pytest.raises(KeyboardInterrupt):
            ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)
    assert (tmp_path / "marker.json").exists()
    assert ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)[0] == 1


def _spend(folder: Path) -> None:
    for _ in range(5):
        ledger(folder).spend("chest", 100.0, 50.0, 1e-5)


def test_a_release_waits_while_another_is_booked(tmp_path: Path) -> None:
    thread = threading.Thread(target=_spend, args=(tmp_path,), daemon=True)
    with ledger(tmp_path)._locked():
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not (tmp_path / "ledger.json").exists()
    thread.join(60)
    assert not thread.is_alive()
    assert ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)[0] == 6


def test_jobs_that_run_at_once_lose_no_release(tmp_path: Path) -> None:
    ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)
    workers = [multiprocessing.get_context("fork").Process(target=_spend, args=(tmp_path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert ledger(tmp_path).spend("chest", 100.0, 50.0, 1e-5)[0] == 17
