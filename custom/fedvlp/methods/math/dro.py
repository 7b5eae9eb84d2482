"""Distributionally robust client weights: exponentiated gradient, then projection onto an f-divergence ball.

The server half of FedDRA and FedRGB. One round, from weights w on the simplex of N clients and one loss v_i a client:

    wt_i = w_i exp(gamma v_i) / sum_j w_j exp(gamma v_j)
    p    = the point nearest to wt in  { p in simplex : D(p) <= rho },   D(p) = (1/N) sum_i f(N p_i)

``divergence`` is the ball, ``projection`` the meaning of "nearest". The papers leave both open:

    ball   chi2    f(t) = (t-1)^2/2   D = (N/2) |p - 1/N|^2        in [0, (N-1)/2]
           kl      f(t) = t log t     D = sum_i p_i log(N p_i)     in [0, log N]
    near   euclid  |p - wt|^2 / 2
           kl      sum_i p_i log(p_i / wt_i)    (mirror ascent's own geometry)

The four KKT systems have one multiplier on the ball. chi2/euclid is solved in closed form, the others by a safeguarded
Newton iteration on the multiplier, to 1e-13 in D. rho = 0 is FedAvg: exactly the uniform vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]

FLOOR = 1e-12  # smallest weight before the projection: a client at 0 could never come back (the update multiplies)
KINDS = ("chi2", "kl")
PROJECTIONS = ("euclid", "kl")

_log = logging.getLogger(__name__)


def dro_weights(
    weights: ArrayLike,
    losses: ArrayLike,
    gamma: float,
    rho: float,
    divergence: str = "chi2",
    projection: str = "euclid",
) -> Vector:
    """The clients' weights for the next round.

    Args:
        weights: [N] this round's weights, on the simplex.
        losses: [N] one loss a client (nats for InfoNCE). A client whose loss is nan or infinite is not moved by the
            gradient step: it keeps its weight and the others share the rest (the projection still covers all).
        gamma: step of the exponentiated gradient, >= 0; 0 only projects.
        rho: radius of the ball, in [0, inf]; 0 is exactly uniform, the divergence's maximum or more is no constraint.
        divergence: ``chi2`` or ``kl``, the ball.
        projection: ``euclid`` or ``kl``, the distance that the projection minimises.

    Returns:
        float64 [N] on the simplex, divergence at most rho (to 1e-12 relative). Weights below 1e-12 are raised to it.
    """
    old, loss = _simplex(weights, "dro_weights"), np.asarray(losses, dtype=np.float64)
    _check(old, loss, gamma, rho, divergence, projection)
    count = old.size
    if rho == 0 or count == 1:
        return np.full(count, 1.0 / count)
    stepped = _exponentiated_gradient(old, loss, float(gamma))
    if math.isinf(rho):
        return stepped
    if divergence == "chi2" and projection == "euclid":
        return _chi2_euclid(stepped, rho)
    logs = np.log(stepped)
    reached = _kl(stepped, logs) if divergence == "kl" else _chi2(stepped)
    if reached <= rho + _tolerance(rho):
        return stepped
    scale = min(math.sqrt(reached / rho), 1e150)  # > 1; 1 + N multiplier if chi2/euclid, first guess for the others
    if divergence == "chi2":
        return _chi2_kl(logs, rho, scale)
    return _kl_kl(logs, rho, scale) if projection == "kl" else _kl_euclid(stepped, rho, scale)


def divergence(weights: ArrayLike, kind: str = "chi2") -> float:
    """D(p) of weights [N] from the uniform vector, in the units of rho: ``chi2`` in [0, (N-1)/2], ``kl`` in nats."""
    if kind not in KINDS:
        raise ValueError(f"divergence: kind is {kind!r}; expected one of {KINDS}; correct the name.")
    point = _simplex(weights, "divergence")
    if kind == "chi2":
        return _chi2(point)
    inside = point[point > 0]  # 0 log 0 = 0
    return max(0.0, float(inside @ np.log(inside)) + math.log(point.size))


def step_multiplier(weights: ArrayLike) -> Vector:
    """Factor m_i = N w_i on client i's learning rate, float64 [N]; exactly 1.0 everywhere for the uniform vector.

    N (1/N) is not 1.0 for some N (49 is one), and rho = 0 must equal FedAvg bit for bit.
    """
    point = _simplex(weights, "step_multiplier")
    return np.ones(point.size) if point.min() == point.max() else point * point.size


def _simplex(weights: ArrayLike, who: str) -> Vector:
    point = np.asarray(weights, dtype=np.float64)
    if point.ndim != 1 or point.size == 0:
        raise ValueError(f"{who}: weights have shape {point.shape}; expected [N], N >= 1; pass one weight a client.")
    low, total = float(point.min()), float(point.sum())
    if not (low >= 0 and abs(total - 1) <= 1e-6):
        raise ValueError(
            f"{who}: weights have minimum {low:g} and sum {total:.9g}; expected a point of the simplex, "
            "minimum >= 0 and sum 1 to 1e-6; divide non-negative weights by their sum."
        )
    return point


def _check(old: Vector, loss: Vector, gamma: float, rho: float, ball: str, projection: str) -> None:
    if loss.shape != old.shape:
        seen = f"losses have shape {loss.shape}; expected {old.shape}"
        raise ValueError(f"dro_weights: {seen}; pass one loss a client, nan for a client without one.")
    if not 0 <= gamma < math.inf:
        raise ValueError(f"dro_weights: gamma is {gamma}; expected a finite step >= 0; use 0 to project only.")
    if not rho >= 0:
        raise ValueError(f"dro_weights: rho is {rho}; expected a radius in [0, inf]; use 0 for uniform weights.")
    for name, value, known in (("divergence", ball, KINDS), ("projection", projection, PROJECTIONS)):
        if value not in known:
            raise ValueError(f"dro_weights: {name} is {value!r}; expected one of {known}; correct the name.")


def _exponentiated_gradient(old: Vector, loss: Vector, gamma: float) -> Vector:
    """w_i exp(gamma (v_i - max v)), normalised, no weight below FLOOR; equal losses give back w itself."""
    low, high = float(loss.min()), float(loss.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        return _floored(_step_finite(old, loss, gamma))
    if gamma == 0 or low == high:
        return _floored(old.copy())
    with np.errstate(over="ignore", under="ignore"):  # 1e308 apart is -inf, whose exponential is 0
        new = loss - high
        new *= gamma  # line 6b: gamma (v - max v)
        np.exp(new, out=new)  # line 6b
    new *= np.maximum(old, FLOOR) if old.min() < FLOOR else old  # line 6b: times w
    new /= new.sum()  # line 6b: at least FLOOR, since the largest loss has exponential 1
    return _floored(new)


def _step_finite(old: Vector, loss: Vector, gamma: float) -> Vector:
    """The step among the clients with a finite loss, whose total weight is kept."""
    finite = np.isfinite(loss)
    first = np.flatnonzero(~finite)[:5].tolist()
    _log.warning("dro_weights: %d losses are not finite, their weights stay; clients %s", (~finite).sum(), first)
    new, mass = old.copy(), float(old[finite].sum())
    if mass > 0:
        new[finite] = mass * _exponentiated_gradient(old[finite] / mass, loss[finite], gamma)
    return new


def _floored(point: Vector) -> Vector:
    """Overwrites ``point``."""
    if point.min() < FLOOR:
        np.maximum(point, FLOOR, out=point)
        point /= point.sum()
    return point


def _chi2(point: Vector) -> float:
    deviation = point - 1.0 / point.size
    return 0.5 * point.size * float(deviation @ deviation)


def _kl(point: Vector, logs: Vector) -> float:
    return max(0.0, float(point @ logs) + math.log(point.size))


def _tolerance(rho: float) -> float:
    """Slack in D at which the ball counts as reached; also what makes the projection idempotent to the bit."""
    return 1e-13 * rho + 2e-15


def _chi2_euclid(stepped: Vector, rho: float) -> Vector:
    """A: p = u + sqrt(rho / D(wt)) (wt - u). Exact: (wt + a u)/(1 + a) is already on the simplex."""
    uniform = 1.0 / stepped.size
    deviation = stepped - uniform
    reached = 0.5 * stepped.size * float(deviation @ deviation)
    if reached <= rho + _tolerance(rho):
        return stepped
    deviation *= math.sqrt(rho / reached)  # line 6c
    deviation += uniform  # line 6c
    return deviation


def _kl_kl(logs: Vector, rho: float, scale: float) -> Vector:
    """B: p_i ~ wt_i^t, t = 1/(1 + multiplier) in (0, 1]; dD/dt = t Var_p(log wt). Overwrites ``logs``."""
    logs -= logs.max()
    point, weighted, total = np.empty_like(logs), np.empty_like(logs), 1.0

    def evaluate(multiplier: float) -> tuple[float, float]:
        nonlocal total
        t = 1.0 / (1.0 + multiplier)
        np.multiply(logs, t, out=point)
        np.exp(point, out=point)
        total = float(point.sum())
        np.multiply(point, logs, out=weighted)
        mean = float(weighted.sum()) / total
        variance = float(weighted @ logs) / total - mean * mean
        return t * mean - math.log(total) + math.log(logs.size), -(t**3) * variance

    _solve_ball(evaluate, rho, scale - 1.0, 0.0)
    point /= total
    return point


def _kl_euclid(stepped: Vector, rho: float, scale: float) -> Vector:
    """C: p_i + m log p_i = wt_i - nu, so p_i = m W(exp((wt_i - nu)/m) / m); nu by an inner Newton iteration."""
    uniform, nu, point = 1.0 / stepped.size, 0.0, stepped
    low, high = float(stepped.min()) - uniform, float(stepped.max()) - uniform

    def evaluate(multiplier: float) -> tuple[float, float]:
        nonlocal nu, point
        # nu = candidate + shift; order is preserved and min p <= 1/N <= max p, which brackets the candidate
        shift, slope = multiplier * math.log(stepped.size), point

        def excess(candidate: float) -> tuple[float, float]:
            nonlocal point, slope
            root = _lambert((stepped - (candidate + shift)) / multiplier - math.log(multiplier))
            point = root * multiplier
            slope = root / (1.0 + root)  # = p/(p + m)
            total = float(point.sum())
            return -math.log(total), float(slope.sum()) / total  # increasing in nu

        nu = _newton(excess, min(max(nu, low), high), low, high, 2e-15)
        logs = np.log(point)
        centred = logs - float(slope @ logs) / float(slope.sum())
        return _kl(point, logs), -float(slope @ (centred * centred))

    _solve_ball(evaluate, rho, (scale - 1.0) * uniform, 0.0)
    point /= point.sum()
    return point


def _chi2_kl(logs: Vector, rho: float, scale: float) -> Vector:
    """D: log(p_i/wt_i) + a p_i = const, so p_i = W(exp(log wt_i + k))/a, a = sum_i W(.); k = -inf gives wt."""
    point = logs

    def evaluate(k: float) -> tuple[float, float]:
        nonlocal point
        root = _lambert(logs + k)
        slope = root / (1.0 + root)  # dW/dk
        total = float(root.sum())
        root /= total
        point = root
        slope -= point * float(slope.sum())
        deviation = point - 1.0 / point.size
        return _chi2(point), point.size * float(deviation @ slope) / total

    _solve_ball(evaluate, rho, math.log(scale - 1.0) + math.log(logs.size) + scale - 1.0, -math.inf)
    return point


def _solve_ball(evaluate: Callable[[float], tuple[float, float]], rho: float, start: float, low: float) -> None:
    """Leaves ``evaluate`` at the x > low where D(x) = rho; evaluate(x) returns D, decreasing in x, and dD/dx."""

    def residual(x: float) -> tuple[float, float]:
        reached, slope = evaluate(x)
        if abs(reached - rho) <= 0.4 * _tolerance(rho):
            return 0.0, 1.0
        if reached <= 0:
            return math.inf, math.inf
        ratio = math.sqrt(rho / reached)  # D falls as 1/(1 + multiplier)^2 near uniform: this is almost linear
        return ratio - 1.0, -0.5 * ratio * slope / reached

    _newton(residual, start, low, math.inf, 0.0)


def _newton(
    residual: Callable[[float], tuple[float, float]], start: float, low: float, high: float, tolerance: float
) -> float:
    """Root in (low, high) of an increasing function, given with its derivative: Newton, bisection where it leaves.

    The last call of ``residual`` is at the root returned. An open bracket is widened by doubling steps.
    """
    x, reach = start, 1.0
    for _ in range(200):
        value, slope = residual(x)
        if abs(value) <= tolerance:
            break
        low, high = (x, high) if value < 0 else (low, x)
        following = x - value / slope if slope > 0 else math.nan
        if not low < following < high or abs(following - x) > 8 * reach * (1 + abs(x)):
            reach *= 2
            closed = math.isfinite(low) and math.isfinite(high)
            following = 0.5 * (low + high) if closed else x + math.copysign(reach * (1 + abs(x)), -value)
        if following in (low, high, x):  # nothing representable is left in between
            break
        x = following
    return x


def _lambert(y: Vector) -> Vector:
    """W(exp(y)) [N], the x > 0 with x + log x = y: stable for any y; 4e-16 relative after three Newton steps."""
    y = np.maximum(y, -700.0)  # exp(-700) is as good as 0 and its logarithm exists
    soft = np.logaddexp(0.0, y)  # log(1 + e^y)
    x = soft * (1.0 - np.log1p(soft) / (2.0 + soft))  # within 2 % (Winitzki)
    for _ in range(3):
        x *= (1.0 + y - np.log(x)) / (1.0 + x)
    return x
