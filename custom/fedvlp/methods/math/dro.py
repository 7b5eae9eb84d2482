"""Distributionally robust client weights: exponentiated gradient, then projection onto an f-divergence ball.

The server half of FedDRA and FedRGB. One round, from weights w on the simplex of N clients and one loss v_i a client:

    wt_i = w_i exp(gamma v_i) / sum_j w_j exp(gamma v_j)
    p    = the point nearest to wt in  { p in simplex : D(p) <= rho },   D(p) = (1/N) sum_i f(N p_i)

``divergence`` is the ball, ``projection`` the meaning of "nearest". The papers leave both open:

    ball   chi2    f(t) = (t-1)^2/2   D = (N/2) |p - 1/N|^2        in [0, (N-1)/2]
           kl      f(t) = t log t     D = sum_i p_i log(N p_i)     in [0, log N]
    near   euclid  |p - wt|^2 / 2
           kl      sum_i p_i log(p_i / wt_i)    (mirror ascent's own geometry)

Where the ball binds, each of the four problems has its solution on a path p(s) from the uniform vector (s = 0) to wt
(s = 1), along which D increases. chi2/euclid: p(s) = 1/N + s (wt - 1/N), hence s = sqrt(rho / D(wt)). The other paths
are close to this one near the uniform vector; their s is found by Newton's iteration, to 1e-13 in D. rho = 0 is FedAvg:
exactly the uniform vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]

Path = Callable[[float], tuple[Vector, Vector]]
"""From s in (0, 1) to the point p(s) and its derivative dp/ds, [N] each."""

FLOOR = 1e-12  # smallest weight before the projection: a client at 0 could never come back (the update multiplies)
SLACK = 2e-15  # of a divergence; a rho that is not larger counts as 0
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
    uniform = 1.0 / old.size
    if rho <= SLACK:
        return np.full(old.size, uniform)
    # wt: clients with a high loss gain weight, by one step of exponentiated gradient.
    stepped = _floored(_exponentiated_gradient(_floored(old), loss, float(gamma)))
    # Inside of the ball nothing is to be done.
    ball = _chi2 if divergence == "chi2" else _kl
    reached, _ = ball(stepped)
    if reached <= rho + _tolerance(rho):
        return stepped
    # Outside of it, the point of the path p(s) at which D = rho. chi2/euclid has it in closed form.
    s = math.sqrt(rho / reached)  # line 6c
    if divergence == "chi2" and projection == "euclid":
        return uniform + s * (stepped - uniform)  # line 6c
    if divergence == "chi2":
        return _on_the_surface(_chi2_kl(stepped), ball, rho, s)
    return _on_the_surface(_kl_kl(stepped) if projection == "kl" else _kl_euclid(stepped), ball, rho, s)


def divergence(weights: ArrayLike, kind: str = "chi2") -> float:
    """D(p) of weights [N] from the uniform vector, in the units of rho: ``chi2`` in [0, (N-1)/2], ``kl`` in nats."""
    if kind not in KINDS:
        raise ValueError(f"divergence: kind is {kind!r}; expected one of {KINDS}; correct the name.")
    point = _simplex(weights, "divergence")
    return _chi2(point)[0] if kind == "chi2" else _kl(point)[0]


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
    """w_i exp(gamma (v_i - max v)), normalised; equal losses give back w itself."""
    finite = np.isfinite(loss)
    if not finite.all():
        return _step_finite(old, loss, gamma, finite)
    high = loss.max()
    if gamma == 0 or loss.min() == high:
        return old
    with np.errstate(over="ignore", under="ignore"):  # 1e308 apart is -inf, whose exponential is 0
        new = np.exp((loss - high) * gamma) * old  # line 6b: exp(gamma (v - max v)), times w
    return new / new.sum()  # line 6b: at least FLOOR, since the largest loss has exponential 1


def _step_finite(old: Vector, loss: Vector, gamma: float, finite: NDArray[np.bool_]) -> Vector:
    """The step among the clients with a ``finite`` loss, whose total weight is kept."""
    first = np.flatnonzero(~finite)[:5].tolist()
    _log.warning("dro_weights: %d losses are not finite, their weights stay; clients %s", (~finite).sum(), first)
    new = old.copy()
    if finite.any():
        mass = old[finite].sum()
        new[finite] = mass * _exponentiated_gradient(old[finite] / mass, loss[finite], gamma)
    return new


def _floored(point: Vector) -> Vector:
    """A copy with no weight below FLOOR; the same bits where there was none."""
    raised = np.maximum(point, FLOOR)
    return raised / raised.sum() if point.min() < FLOOR else raised


def _chi2(point: Vector) -> tuple[float, Vector]:
    """D and its gradient [N]."""
    deviation = point - 1.0 / point.size
    return 0.5 * point.size * float(deviation @ deviation), point.size * deviation


def _kl(point: Vector) -> tuple[float, Vector]:
    """D and its gradient [N], with t - 1 taken off f, which changes nothing on the simplex: no large terms cancel."""
    t = point.size * point
    logs = np.log(np.maximum(t, 1e-300))  # 0 log 0 = 0
    return float((t * logs - (t - 1.0)).mean()), logs


def _tolerance(rho: float) -> float:
    """Slack in D at which the ball counts as reached. A projection ends within 0.4 of it: a second one does nothing."""
    return 1e-13 * rho + SLACK


def _on_the_surface(path: Path, ball: Callable[[Vector], tuple[float, Vector]], rho: float, start: float) -> Vector:
    """The point of ``path`` whose divergence by ``ball`` is rho; ``start``: a guess of its s.

    Newton's iteration for sqrt(D) = sqrt(rho): sqrt(D) is proportional to s near the uniform vector.
    """

    def residual(s: float) -> tuple[float, float, Vector]:
        point, velocity = path(s)
        reached, gradient = ball(point)
        return reached - math.sqrt(rho * reached), 0.5 * float(gradient @ velocity), point  # both times sqrt(D)

    # |D - rho| is about twice the residual where it is small
    return _newton(residual, 0.0, start, 1.0, 0.2 * _tolerance(rho))


def _kl_kl(stepped: Vector) -> Path:
    """B: p_i ~ wt_i^s, s = 1/(1 + multiplier)."""
    logs = np.log(stepped)  # at least log FLOOR: its exponential neither overflows nor vanishes

    def path(s: float) -> tuple[Vector, Vector]:
        point = np.exp(s * logs)
        point /= point.sum()
        return point, point * (logs - point @ logs)

    return path


def _kl_euclid(stepped: Vector) -> Path:
    """C: p_i + m log(N p_i) = wt_i - nu with m N = 1/s - 1. So p_i = m q_i, q_i = W(exp((wt_i - nu)/m) / (m N))."""
    count = stepped.size

    def path(s: float) -> tuple[Vector, Vector]:
        ratio = 1.0 / s - 1.0
        m = ratio / count

        def missing(nu: float) -> tuple[float, float, Vector]:
            q = _lambert((stepped - nu) / m - math.log(ratio))
            total = m * float(q.sum())
            return -math.log(total), float((q / (1.0 + q)).sum()) / total, q

        # the mean of the conditions is nu = m KL(1/N, p) >= 0; that of the largest client, nu <= max wt - 1/N < 1
        q = _newton(missing, 0.0, 0.0, 1.0, 1e-14)
        point, slope = q / q.sum(), q / (1.0 + q)
        logs = np.log(point)
        return point, slope * (logs - (slope @ logs) / slope.sum()) / (count * s**2)

    return path


def _chi2_kl(stepped: Vector) -> Path:
    """D: log(p_i/wt_i) + a p_i = k, so p_i = q_i / a, q_i = W(exp(log wt_i + k)), a = sum_i q_i.

    Any increasing k(r), r = 1/s - 1, gives the path; k = r + log(N r), a = N r is the solution at the uniform vector.
    """
    logs = np.log(stepped)

    def path(s: float) -> tuple[Vector, Vector]:
        ratio = 1.0 / s - 1.0
        q = _lambert(logs + ratio + math.log(logs.size * ratio))
        point, slope = q / q.sum(), q / (1.0 + q)
        return point, (point * slope.sum() - slope) / (q.sum() * ratio * s**3)

    return path


def _newton(
    residual: Callable[[float], tuple[float, float, Vector]], low: float, x: float, high: float, tolerance: float
) -> Vector:
    """What ``residual`` gives third where its first, increasing between ``low`` and ``high``, is 0 (to ``tolerance``).

    Its second is the derivative: Newton's iteration from ``x``, with bisection where a step leaves the bracket.
    """
    for _ in range(100):
        # The bracket around the solution shrinks from the side on which x lies.
        value, slope, point = residual(x)
        if value < -tolerance:
            low = x
        elif value > tolerance:
            high = x
        else:
            break
        # Newton, or the middle of the bracket where that would leave it.
        x -= value / slope
        if not low < x < high:
            x = 0.5 * (low + high)
    return point


def _lambert(y: Vector) -> Vector:
    """W(exp(y)) [N], the x > 0 with x + log x = y, for any y up to 1e300; four Newton steps from log(1 + e^y)."""
    y = np.maximum(y, -700.0)  # exp(-700) is as good as 0 and its logarithm exists
    x = np.logaddexp(0.0, y)
    for _ in range(4):
        x *= (1.0 + y - np.log(x)) / (1.0 + x)
    return x
