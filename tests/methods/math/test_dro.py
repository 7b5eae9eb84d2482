"""DRO weights: the vectors of the derivation, checks A1 to A11, every edge case, and certificates of optimality."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedvlp.methods.math import dro
from fedvlp.methods.math.dro import FLOOR, KINDS, PROJECTIONS, SLACK, divergence, dro_weights, step_multiplier

COMBINATIONS = [(ball, near) for ball in KINDS for near in PROJECTIONS]
U5 = np.full(5, 0.2)
V5 = np.array([2, 1, 1.5, 0.5, 3])
EG_HALF = (0.221906, 0.134593, 0.172820, 0.104821, 0.365861)
EG_ONE = (0.203425, 0.074836, 0.123383, 0.045390, 0.552966)
B_SMALL = (0.211285, 0.179709, 0.194859, 0.165737, 0.248410)


def step(weights, losses, gamma):
    """Exponentiated gradient in extended precision."""
    logs = np.log(np.asarray(weights, dtype=np.longdouble)) + np.longdouble(gamma) * np.asarray(losses, np.longdouble)
    grown = np.exp(logs - logs.max())
    return (grown / grown.sum()).astype(np.float64)


def objective(point, wt, near):
    if near == "euclid":
        return 0.5 * float(np.sum((point - wt) ** 2))
    return float(np.sum(point * np.log(np.maximum(point, 1e-300) / wt)))


def certificate(point, wt, ball, near):
    """How far -grad(objective) is from multiplier * grad(D) + constant with multiplier >= 0: 0 proves the optimum.

    The problem is convex and ``point`` is positive, so these conditions are sufficient, not only necessary.
    """
    descent = wt - point if near == "euclid" else -np.log(point / wt)
    ascent = len(wt) * point if ball == "chi2" else np.log(point)
    descent, ascent = descent - descent.mean(), ascent - ascent.mean()
    multiplier = float(descent @ ascent) / float(ascent @ ascent)
    return multiplier, float(np.abs(descent - multiplier * ascent).max() / max(np.abs(descent).max(), 1e-300))


def test_published_vectors():  # A4
    for gamma, rho, ball, near, expected in [
        (0.5, 0.01, "chi2", "euclid", (0.206755, 0.179831, 0.191619, 0.170650, 0.251146)),
        (0.5, 0.01, "kl", "kl", B_SMALL),
        (0.5, 0.1, "chi2", "euclid", (0.221361, 0.136219, 0.173496, 0.107187, 0.361737)),
        (0.5, 0.1, "kl", "kl", EG_HALF),
        (1.0, 0.01, "kl", "kl", B_SMALL),
        (1.0, 0.1, "chi2", "euclid", (0.201661, 0.139293, 0.162840, 0.125011, 0.371195)),
        (1.0, 0.1, "kl", "kl", (0.221919, 0.133829, 0.172334, 0.103927, 0.367991)),
        (1.0, 0.1, "kl", "euclid", (0.192150, 0.137551, 0.156928, 0.126553, 0.386819)),
        (1.0, 0.1, "chi2", "kl", (0.232299, 0.135142, 0.180172, 0.097770, 0.354616)),
        *[(0.5, 1.0, ball, near, EG_HALF) for ball, near in COMBINATIONS],
        *[(1.0, 1.0, ball, near, EG_ONE) for ball, near in COMBINATIONS],
        *[(1.0, math.inf, ball, near, EG_ONE) for ball, near in COMBINATIONS],
    ]:
        np.testing.assert_allclose(dro_weights(U5, V5, gamma, rho, ball, near), expected, rtol=0, atol=1e-6)


def test_vector_divergences_of_the_unconstrained_step():
    for gamma, chi2, kl in ((0.5, 0.105164, 0.097748), (1.0, 0.425093, 0.365332)):
        stepped = dro_weights(U5, V5, gamma, math.inf)
        assert divergence(stepped, "chi2") == pytest.approx(chi2, abs=1e-6)
        assert divergence(stepped, "kl") == pytest.approx(kl, abs=1e-6)


def test_vertex():
    vertex = np.eye(5)[0]
    expected = (0.378885, 0.155279, 0.155279, 0.155279, 0.155279)
    np.testing.assert_allclose(dro_weights(vertex, U5, 1.0, 0.1), expected, rtol=0, atol=1e-6)
    assert dro_weights(vertex, U5, 1.0, 1.0).max() == pytest.approx(0.765685, abs=1e-6)
    assert dro_weights(vertex, U5, 1.0, 0.1, "kl").max() == pytest.approx(0.3952, abs=1e-4)
    assert dro_weights(vertex, U5, 1.0, 1.0, "kl", "kl").max() == pytest.approx(0.8567, abs=1e-4)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_rho_zero_is_the_constant_vector(ball, near):  # A1
    for count in [1, 2, 5, 49]:
        weights = np.arange(1.0, count + 1) / np.arange(1.0, count + 1).sum()
        point = dro_weights(weights, np.arange(count), 3.0, 0, ball, near)
        assert point.tobytes() == np.full(count, 1 / count).tobytes()
        assert step_multiplier(point).tobytes() == np.ones(count).tobytes()


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_rho_next_to_zero_is_next_to_uniform(ball, near):
    for rho in [5e-324, 1e-300, 1e-40, 1e-17, 1e-15]:
        point = dro_weights(U5, V5, 1.0, rho, ball, near)
        np.testing.assert_allclose(point, U5, atol=1e-7)
        assert point.sum() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_rho_up_to_the_slack_is_uniform_and_beyond_it_is_not(ball, near):
    assert dro_weights(U5, V5, 1.0, SLACK, ball, near).tobytes() == U5.tobytes()
    point = dro_weights(U5, V5, 1.0, 4 * SLACK, ball, near)
    assert divergence(point, ball) == pytest.approx(4 * SLACK, abs=SLACK)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_large_rho_is_exponentiated_gradient(ball, near):  # A2
    for rho in (2.0, math.log(5) if ball == "kl" else 2.0, 1e9, math.inf):
        point = dro_weights(U5, V5, 1.0, rho, ball, near)
        np.testing.assert_allclose(point, step(U5, V5, 1.0), rtol=1e-15, atol=1e-15)


def test_chi2_of_two_clients_never_binds_at_a_half():
    point = dro_weights([0.5, 0.5], [0.0, 9.0], 1.0, 0.5)
    np.testing.assert_allclose(point, step([0.5, 0.5], [0.0, 9.0], 1.0), atol=1e-15)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_one_client(ball, near):  # A3
    for loss in [0.0, 1e308, math.nan]:
        for rho in (0, 0.1, math.inf):
            assert dro_weights([1.0], [loss], 1.0, rho, ball, near).tolist() == [1.0]


def test_ten_thousand_random_inputs_stay_in_the_simplex_and_the_ball():  # A5
    rng = np.random.default_rng(0)
    for trial in range(10_000):
        ball, near = COMBINATIONS[trial % 4]
        count = int(rng.integers(2, 30))
        weights = rng.dirichlet(np.full(count, 10.0 ** rng.uniform(-2, 1)))
        losses = rng.normal(size=count) * 10.0 ** rng.uniform(-2, 3)
        rho = 10.0 ** rng.uniform(-9, 0) * ((count - 1) / 2 if ball == "chi2" else math.log(count))
        gamma = 10.0 ** rng.uniform(-2, 1)
        point = dro_weights(weights, losses, gamma, rho, ball, near)
        assert point.min() > 0
        assert abs(point.sum() - 1) <= 1e-12
        assert divergence(point, ball) <= rho + 1e-9
        if divergence(dro_weights(weights, losses, gamma, math.inf), ball) > rho:
            assert divergence(point, ball) >= rho - 1e-9  # and on its surface when it binds


@st.composite
def problems(draw):
    count = draw(st.integers(2, 12))
    numbers = st.floats(0.001, 1)
    weights = np.array(draw(st.lists(numbers, min_size=count, max_size=count)))
    losses = np.array(draw(st.lists(st.floats(-10, 10), min_size=count, max_size=count)))
    ball, near = draw(st.sampled_from(COMBINATIONS))
    return weights / weights.sum(), losses, draw(st.floats(0, 3)), draw(st.floats(1e-6, 2)), ball, near


@settings(max_examples=200, deadline=None)
@given(problems())
def test_projection_is_idempotent(problem):  # A6
    weights, losses, gamma, rho, ball, near = problem
    once = dro_weights(weights, losses, gamma, rho, ball, near)
    again = dro_weights(once, losses, 0, rho, ball, near)
    np.testing.assert_allclose(again, once, rtol=1e-11, atol=1e-13)
    if once.min() >= FLOOR:
        assert again.tobytes() == once.tobytes()


@settings(max_examples=200, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_permutation_equivariance(problem, random):  # A7
    weights, losses, *rest = problem
    order = list(range(len(weights)))
    random.shuffle(order)
    expected = dro_weights(weights, losses, *rest)[order]
    np.testing.assert_allclose(dro_weights(weights[order], losses[order], *rest), expected, rtol=1e-9, atol=1e-13)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_higher_loss_never_weighs_less(problem):  # A8
    weights, losses, *rest = problem
    uniform = np.full(len(weights), 1 / len(weights))
    point = dro_weights(uniform, losses, *rest)[np.argsort(losses, kind="stable")]
    assert (np.diff(point) >= -1e-14).all()


def test_kl_geometry_forgets_gamma_when_the_ball_binds():  # A9
    points = [dro_weights(U5, V5, gamma, 0.05, "kl", "kl") for gamma in (0.5, 1.0, 7.0)]
    np.testing.assert_allclose(points[1], points[0], atol=1e-12)
    np.testing.assert_allclose(points[2], points[0], atol=1e-12)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
@pytest.mark.parametrize("seed", range(2))
def test_not_worse_than_slsqp(ball, near, seed):  # A10; SLSQP can stop short on the KL ball, so: never better than us
    from scipy.optimize import minimize

    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 8))
    weights, losses, rho = rng.dirichlet(np.ones(count)), rng.normal(size=count), 0.05 * (seed + 1) / 2
    wt, point = step(weights, losses, 1.0), dro_weights(weights, losses, 1.0, rho, ball, near)
    constraints = (
        {"type": "eq", "fun": lambda p: p.sum() - 1},
        {"type": "ineq", "fun": lambda p: rho - float(_divergence(p, ball))},
    )
    solved = minimize(
        objective,
        np.full(count, 1 / count),
        (wt, near),
        "SLSQP",
        bounds=[(1e-14, 1)] * count,
        constraints=constraints,
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert objective(point, wt, near) <= objective(solved.x, wt, near) + 1e-8
    if ball == "chi2" and near == "euclid":
        np.testing.assert_allclose(point, solved.x, atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_equal_to_an_independent_solution(problem):
    """The conditions of optimality solved as they stand, by scipy's Wright omega function and Brent's method.

    The outer unknown is log(multiplier), the inner one the multiplier of the sum.
    """
    from scipy.optimize import brentq
    from scipy.special import wrightomega

    weights, losses, gamma, rho, ball, near = problem
    wt, count = np.maximum(step(weights, losses, gamma), FLOOR), len(weights)
    wt /= wt.sum()

    def minimiser(log_multiplier):
        m = math.exp(log_multiplier)
        if (ball, near) == ("chi2", "euclid"):
            return (wt + m) / (1 + m * count)
        if (ball, near) == ("kl", "kl"):
            grown = wt ** (1 / (1 + m))
            return grown / grown.sum()
        if near == "euclid":  # p + m log p = wt - nu

            def point(nu):
                return m * wrightomega((wt - nu) / m - log_multiplier)
        else:  # log p + m N p = log wt - nu

            def point(nu):
                return wrightomega(np.log(wt) - nu + math.log(m * count)) / (m * count)

        low, high = -1.0 - 2 * m * count, 1.0 + m * (count + math.log(count)) + 40
        return point(brentq(lambda nu: point(nu).sum() - 1, low, high, xtol=1e-15, rtol=1e-15))

    reached = _divergence(wt, ball)
    assume(not rho < reached < 1.0001 * rho)  # the multiplier can be as small as it likes
    expected = wt
    if reached > rho:
        expected = minimiser(brentq(lambda x: _divergence(minimiser(x), ball) - rho, -12.0, 15.0, xtol=1e-13))
    np.testing.assert_allclose(dro_weights(*problem), expected, rtol=1e-6, atol=1e-8)


def _divergence(point, ball):
    count = len(point)
    if ball == "chi2":
        return 0.5 * count * np.sum((point - 1 / count) ** 2)
    return np.sum(point * np.log(count * np.maximum(point, 1e-300)))


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_optimality_conditions_hold(ball, near):
    rng = np.random.default_rng(3)
    for _ in range(200):
        count = int(rng.integers(2, 40))
        weights, losses = rng.dirichlet(np.full(count, 2.0)), rng.normal(size=count) * 2
        wt = step(weights, losses, 1.0)
        rho = float(_divergence(wt, ball)) * rng.uniform(0.01, 0.99)
        point = dro_weights(weights, losses, 1.0, rho, ball, near)
        assert abs(float(_divergence(point, ball)) - rho) <= 1e-12 * max(1, rho)
        multiplier, residual = certificate(point, wt, ball, near)
        assert multiplier > 0
        assert residual < 1e-6


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_agrees_with_50_digit_arithmetic(ball, near):
    mpmath = pytest.importorskip("mpmath")
    weights, losses, rho = (0.3, 0.05, 0.4, 0.25), (0.5, 2.0, -1.0, 1.0), 0.07
    with mpmath.workdps(50):
        grown = [mpmath.mpf(w) * mpmath.exp(mpmath.mpf(v)) for w, v in zip(weights, losses, strict=True)]
        wt = [g / sum(grown) for g in grown]

        def conditions(*unknown):
            *point, multiplier, constant = unknown
            pull = [(p - w) if near == "euclid" else mpmath.log(p / w) for p, w in zip(point, wt, strict=True)]
            push = [4 * p if ball == "chi2" else mpmath.log(p) for p in point]
            size = sum((4 * p - 1) ** 2 / 8 if ball == "chi2" else p * mpmath.log(4 * p) for p in point)
            stationary = [a + multiplier * b + constant for a, b in zip(pull, push, strict=True)]
            return [*stationary, sum(point) - 1, size - rho]

        start = [mpmath.mpf(p) for p in dro_weights(weights, losses, 1.0, rho, ball, near)]
        start = [p + mpmath.mpf(10) ** -5 * (-1) ** i for i, p in enumerate(start)]
        exact = mpmath.findroot(conditions, (*start, 0.1, 0.1), tol=1e-40, maxsteps=100)
    expected = np.array([float(exact[i]) for i in range(4)])
    np.testing.assert_allclose(dro_weights(weights, losses, 1.0, rho, ball, near), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_a_constant_added_to_the_losses_changes_nothing(ball, near):  # A11
    for constant in (-64.0, 1024.0):
        np.testing.assert_allclose(
            dro_weights(U5, V5 + constant, 1.0, 0.1, ball, near), dro_weights(U5, V5, 1.0, 0.1, ball, near), atol=1e-14
        )


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_equal_losses_or_gamma_zero_leave_a_feasible_weight_bit_for_bit(ball, near):
    weights = np.array([0.15, 0.25, 0.2, 0.21, 0.19])
    assert dro_weights(weights, np.full(5, 2.5), 1.0, 0.1, ball, near).tobytes() == weights.tobytes()
    assert dro_weights(weights, V5, 0.0, 0.1, ball, near).tobytes() == weights.tobytes()
    assert divergence(dro_weights(np.eye(5)[0], V5, 0.0, 0.1, ball, near), ball) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_a_zero_weight_is_floored_and_comes_back(ball, near):
    for rho in (1e-3, 0.1, 1.0, math.inf):
        point = dro_weights([0.5, 0.5, 0, 0, 0], U5, 1.0, rho, ball, near)
        assert point.min() >= FLOOR * 0.99
        assert divergence(point, ball) <= rho + 1e-9
    weights = np.array([1.0, 0, 0])
    for _ in range(40):
        weights = dro_weights(weights, [0.0, 1.0, 1.0], 1.0, math.inf)
    assert weights[0] < 1e-3


@pytest.mark.parametrize(("ball", "near"), COMBINATIONS)
def test_huge_losses_neither_overflow_nor_leave_the_ball(ball, near):
    for losses in [[0.0, 1e308, -1e308, 0, 0], [1e9, 0, 0, 0, 0], [-800.0, 800.0, 0, 0, 0]]:
        with np.errstate(all="raise", under="ignore", over="ignore"):
            for gamma in (1.0, 1e6):
                point = dro_weights(U5, losses, gamma, 0.1, ball, near)
                assert np.argmax(point) == np.argmax(losses)
                assert divergence(point, ball) == pytest.approx(0.1, abs=1e-9)


def test_a_weight_at_the_floor_is_left_alone():
    weights = np.array([FLOOR, 0.1, 0.3, 0.6])  # their sum is not 1 to the bit: nothing divides by it
    assert dro_weights(weights, np.zeros(4), 1.0, math.inf).tobytes() == weights.tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_client_with_a_bad_loss_keeps_its_weight(bad, caplog):
    weights = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    losses = np.array([2, bad, 1.5, 0.5, 3])
    with caplog.at_level(logging.WARNING):
        point = dro_weights(weights, losses, 1.0, math.inf)
    assert "clients [1]" in caplog.text
    others = [0, 2, 3, 4]
    expected = 0.8 * step(weights[others] / 0.8, losses[others], 1.0)
    assert point[1] == 0.2
    np.testing.assert_allclose(point[others], expected, atol=1e-15)
    assert divergence(dro_weights(weights, losses, 1.0, 0.01), "chi2") <= 0.01 + 1e-12


def test_the_warning_counts_bad_losses_and_names_the_first_five(caplog):
    with caplog.at_level(logging.WARNING):
        dro_weights(np.full(9, 1 / 9), [0, *[math.nan] * 7, 1], 1.0, 0.1)
    assert "7 losses are not finite" in caplog.text
    assert "clients [1, 2, 3, 4, 5]" in caplog.text


def test_all_losses_bad_leaves_the_weights():
    weights = np.array([0.1, 0.2, 0.7])
    assert dro_weights(weights, [math.nan] * 3, 1.0, math.inf).tobytes() == weights.tobytes()


def test_inputs_are_not_written_to():
    weights, losses = U5.copy(), V5.copy()
    for ball, near in COMBINATIONS:
        for rho in (0, 0.01, 0.1, math.inf):
            dro_weights(weights, losses, 1.0, rho, ball, near)[:] = 0
            dro_weights(weights, losses, 0.0, rho, ball, near)[:] = 0
    assert weights.tobytes() == U5.tobytes()
    assert losses.tobytes() == V5.tobytes()


@pytest.mark.slow(seconds=5)
def test_a_million_clients():
    rng = np.random.default_rng(1)
    uniform, losses = np.full(1_000_000, 1e-6), rng.normal(size=1_000_000)
    for ball, near in COMBINATIONS:
        point = dro_weights(uniform, losses, 1.0, 0.1, ball, near)
        assert divergence(point, ball) == pytest.approx(0.1, abs=1e-12)
        assert point.sum() == pytest.approx(1, abs=1e-12)


def test_refusals_state_what_was_seen_and_the_remedy():
    for change, words in [
        ({"gamma": -0.1}, "gamma is -0.1"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"gamma": math.inf}, "gamma is inf"),
        ({"rho": -1e-9}, "rho is -1e-09"),
        ({"rho": math.nan}, "rho is nan"),
        ({"divergence": "js"}, "divergence is 'js'; expected one of"),
        ({"projection": "chi2"}, "projection is 'chi2'; expected one of"),
        ({"losses": [1.0, 2.0]}, r"losses have shape \(2,\); expected \(3,\)"),
        ({"losses": [[1.0, 2.0, 3.0]]}, "losses have shape"),
        ({"weights": [[0.5, 0.5]]}, "weights have shape"),
        ({"weights": []}, "weights have shape"),
        ({"weights": [0.5, 0.5, 0.5]}, "sum 1.5"),
        ({"weights": [-0.5, 1.0, 0.5]}, "minimum -0.5"),
        ({"weights": [math.nan, 0.5, 0.5]}, "simplex"),
        ({"weights": [math.inf, 0.5, 0.5]}, "simplex"),
    ]:
        good = {"weights": [0.2, 0.3, 0.5], "losses": [1.0, 2.0, 3.0], "gamma": 1.0, "rho": 0.1}
        with pytest.raises(ValueError, match=words) as caught:
            dro_weights(**{**good, **change})
        assert str(caught.value).startswith("dro_weights: ")
        assert "; expected " in str(caught.value)


def test_a_sum_may_be_off_by_a_millionth():
    for off in (9e-7, -9e-7):
        assert divergence([0.5, 0.5 + off]) == pytest.approx(0, abs=1e-6)
    for off in (1.1e-6, -1.1e-6):
        with pytest.raises(ValueError, match="sum 1 to 1e-6"):
            divergence([0.5, 0.5 + off])


def test_divergence():
    assert divergence(U5, "chi2") == 0
    assert divergence(U5, "kl") == pytest.approx(0, abs=1e-15)
    near = 0.25 * np.array([1 + 3e-9, 1 - 1e-9, 1 - 1e-9, 1 - 1e-9])
    assert divergence(near, "kl") == pytest.approx((9 + 3) / 8 * 1e-18, rel=1e-6, abs=0), "the mean of x^2 / 2"
    vertex = np.eye(5)[0]
    assert divergence(vertex, "chi2") == pytest.approx(2.0)
    assert divergence(vertex, "kl") == pytest.approx(math.log(5))
    with pytest.raises(ValueError, match="kind is 'tv'"):
        divergence(U5, "tv")


def test_step_multiplier():
    np.testing.assert_allclose(step_multiplier([0.1, 0.2, 0.3, 0.4]), [0.4, 0.8, 1.2, 1.6])
    assert step_multiplier([0.1, 0.2, 0.3, 0.4]).sum() == pytest.approx(4)


# How the solution is found

PATHS = [("kl", "kl", dro._kl_kl), ("kl", "euclid", dro._kl_euclid), ("chi2", "kl", dro._chi2_kl)]
LOPSIDED = np.array([0.4, 0.05, 0.25, 0.001, 0.299])


@pytest.fixture
def tried(monkeypatch):
    """How many points every search for a root took."""
    newton, counts = dro._newton, []

    def counted(residual, *rest):
        place = len(counts)
        counts.append(0)

        def one_more(x):
            counts[place] += 1
            return residual(x)

        return newton(one_more, *rest)

    monkeypatch.setattr(dro, "_newton", counted)
    return counts


@pytest.mark.parametrize(("ball", "near", "path"), PATHS)
def test_a_path_has_the_derivative_that_it_says(ball, near, path):
    follow = path(LOPSIDED)
    for s in (0.01, 0.2, 0.5, 0.9, 0.999):
        point, velocity = follow(s)
        h = 1e-6 * min(s, 1 - s)
        np.testing.assert_allclose(velocity, (follow(s + h)[0] - follow(s - h)[0]) / (2 * h), rtol=1e-5, atol=1e-6)
        assert point.sum() == pytest.approx(1, abs=1e-15)
        _, residual = certificate(point, LOPSIDED, ball, near)
        assert residual < 1e-10, "every point of the path solves the problem for some rho"


@pytest.mark.parametrize(("ball", "near", "path"), PATHS)
def test_a_path_leads_from_the_uniform_vector_to_the_step(ball, near, path):
    np.testing.assert_allclose(path(LOPSIDED)(1e-9)[0], U5, atol=1e-8)
    np.testing.assert_allclose(path(LOPSIDED)(1 - 1e-12)[0], LOPSIDED, atol=1e-9)


@pytest.mark.parametrize(("ball", "near", "path"), PATHS)
def test_near_the_uniform_vector_a_path_is_straight_and_the_first_guess_right(ball, near, path, tried):
    """p = 1/N + s (wt - 1/N) up to the square of the distance, 1e-8 here."""
    wt = U5 + 1e-4 * np.array([0.3, -0.2, 0.1, -0.5, 0.3])
    for s in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(path(wt)(s)[0], U5 + s * (wt - U5), atol=5e-8)
    tried.clear()
    dro_weights(wt, U5, 0.0, divergence(wt, ball) / 4, ball, near)
    assert max(tried) <= 2


@pytest.mark.parametrize(("ball", "near", "path"), PATHS)
def test_a_solution_takes_few_points(ball, near, path, tried):
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(2, 30))
        weights = rng.dirichlet(np.full(count, 10.0 ** rng.uniform(-2, 3)))
        losses = rng.normal(size=count) * 10.0 ** rng.uniform(-6, 2)
        rho = 10.0 ** rng.uniform(-12, 0) * math.log(count)
        dro_weights(weights, losses, 1.0, rho, ball, near)
    assert len(tried) > 200
    assert max(tried) <= 16
    assert np.median(tried) <= 3


def test_the_search_for_nu_is_given_the_derivative(monkeypatch):
    """A wrong one would lead to the same weights, only later."""
    newton, slopes = dro._newton, []

    def checked(residual, *rest):
        for nu in (-0.1, 0.0, 0.2):
            differences = (residual(nu + 1e-6)[0] - residual(nu - 1e-6)[0]) / 2e-6
            slopes.append((residual(nu)[1], differences))
        return newton(residual, *rest)

    monkeypatch.setattr(dro, "_newton", checked)
    for s in (0.1, 0.5, 0.9):
        dro._kl_euclid(LOPSIDED)(s)
    assert len(slopes) == 9
    np.testing.assert_allclose(*zip(*slopes, strict=True), rtol=1e-6)


@pytest.mark.parametrize(("off", "ends"), [(0.3, True), (-0.3, True), (0.5, False), (-0.5, False)])
def test_the_search_ends_within_four_tenths_of_the_tolerance(off, ends, tried):
    """So a second projection finds the ball reached, and does nothing."""
    rho = 0.1

    def ball(point):
        reached = rho + off * dro._tolerance(rho) if tried == [1] else rho
        return reached, np.array([1.0])

    dro._on_the_surface(lambda s: (np.array([s]), np.array([1.0])), ball, rho, 0.5)
    assert tried == [1 if ends else 2]


def newton(function, low, start, high, tolerance=0.0):
    """The root, and all points tried; ``function`` gives value and derivative."""
    points = []

    def residual(x):
        points.append(x)
        return *function(x), np.array([x])

    return float(dro._newton(residual, low, start, high, tolerance)[0]), points


def test_newtons_steps_by_hand():
    """x^2 - 2 from 2: 2 - 2/4 = 1.5, then 1.5 - 0.25/3 = 17/12, then 17/12 - (1/144)/(17/6) = 577/408, off by 2e-6."""
    root, points = newton(lambda x: (x * x - 2, 2 * x), 0.0, 2.0, 9.0, 1e-5)
    assert points == pytest.approx([2, 1.5, 17 / 12, 577 / 408], rel=1e-15)
    assert root == points[-1]


def test_a_step_out_of_the_bracket_is_a_bisection():
    """At 1, arctan(9 x - 0.9) is so flat that the step leads to -9.7; halfway to the lower end is 0."""
    root, points = newton(lambda x: (math.atan(9 * x - 0.9), 9 / (1 + (9 * x - 0.9) ** 2)), -1.0, 1.0, 2.0, 1e-15)
    assert points[:2] == [1.0, 0.0]
    assert root == pytest.approx(0.1, abs=1e-15)
    root, points = newton(lambda x: (math.atan(9 * x - 0.9), 9 / (1 + (9 * x - 0.9) ** 2)), -1.0, -0.8, 2.0, 1e-15)
    assert points[:2] == [-0.8, 0.6]
    assert root == pytest.approx(0.1, abs=1e-15)


def test_a_step_of_nothing_is_a_bisection():
    """A slope of infinity: the brackets by hand are (0, 1), (0, 1/2), (1/4, 1/2), (1/4, 3/8)."""
    _, points = newton(lambda x: (x - 0.3, math.inf), 0.0, 0.5, 1.0, 0.02)
    assert points == [0.5, 0.25, 0.375, 0.3125]


@pytest.mark.parametrize("value", [0.25, -0.25])
def test_the_tolerance_is_enough_and_a_hundred_tries_are_the_most(value):
    assert newton(lambda x: (value, 1.0), 0.0, 0.5, 1.0, 0.25) == (0.5, [0.5])
    _, points = newton(lambda x: (value, 1.0), 0.0, 0.5, 1.0, 0.24)
    assert len(points) == 100


def test_lambert():
    """Against scipy's Wright omega function; near exp(y) an ulp of y = -700 is 1e-13."""
    from scipy.special import wrightomega

    y = np.concatenate([np.linspace(-700, 700, 2001), np.linspace(-3, 3, 601), [1e5, 1e16, 1e300]])
    np.testing.assert_allclose(dro._lambert(y), wrightomega(y), rtol=2e-13)
    assert dro._lambert(np.array([1.0])) == pytest.approx(1, abs=1e-15), "1 + log 1 = 1"
    lowest = dro._lambert(np.array([-701.0, -1e9]))
    np.testing.assert_allclose(lowest, math.exp(-700), rtol=2e-13)
