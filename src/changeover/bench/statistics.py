"""The statistics of a benchmark: percentiles, Student's t, intervals of means and of ratios.

Pure functions of lists of floats; no third-party library, so that a result can be compared anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; ``low`` and ``high`` are None where the data cannot give one."""

    value: float
    low: float | None
    high: float | None


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """Sample variance (n - 1)."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The ``share`` (0 to 1) quantile of sorted values, linear between neighbours (as numpy)."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low + (high - low) * (position - below)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent runs with its Student-t interval; without interval for fewer than two runs."""
    centre = mean(values)
    if len(values) < 2:
        return Estimate(centre, None, None)
    half = student_t(0.5 + confidence / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(centre, centre - half, centre + half)


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """How many times ``a`` is ``b``: ratio of geometric means with a Welch interval on the logarithms.

    ``a`` and ``b`` are run means, all positive, taken as independent; the two may spread differently (Welch's
    degrees of freedom, by Satterthwaite). Without interval when either side has a single run.
    """
    log_a = [math.log(value) for value in a]
    log_b = [math.log(value) for value in b]
    difference = mean(log_b) - mean(log_a)
    ratio = math.exp(difference)
    if len(a) < 2 or len(b) < 2:
        return Estimate(ratio, None, None)
    error_a, error_b = variance(log_a) / len(a), variance(log_b) / len(b)
    total = error_a + error_b
    if total == 0.0:
        return Estimate(ratio, ratio, ratio)
    # Each share is at most 1, so that neither square can underflow to a division by zero.
    share_a, share_b = error_a / total, error_b / total
    freedom = 1.0 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))
    half = student_t(0.5 + confidence / 2, freedom) * math.sqrt(total)
    return Estimate(ratio, math.exp(difference - half), math.exp(difference + half))


def ratio_bootstrap(
    clusters: Sequence[tuple[int, int]], resamples: int, seed: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of (sum of the second numbers) / (sum of the first ones, each positive) of independent clusters.

    The percentile bootstrap: whole clusters are drawn with replacement, as many as there are (Efron and
    Tibshirani 1993, chapters 8 and 13). With few clusters it is somewhat too narrow. The same clusters and seed
    give the same interval.
    """
    chance = random.Random(seed)  # noqa: S311 - statistics, not secrets
    ratios = []
    for _ in range(resamples):
        drawn = chance.choices(clusters, k=len(clusters))
        ratios.append(sum(second for _, second in drawn) / sum(first for first, _ in drawn))
    ratios.sort()
    tail = (1.0 - confidence) / 2
    return percentile(ratios, tail), percentile(ratios, 1.0 - tail)


def student_t(probability: float, freedom: float) -> float:
    """The quantile of Student's t, for ``probability`` in [0.5, 1) and ``freedom`` > 0, by bisection."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if student_t_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_t_cdf(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0, from the regularised incomplete beta function (Abramowitz and Stegun 26.7.1)."""
    square = t * t
    if square < freedom:  # the small argument is the exact one
        return 0.5 + 0.5 * _incomplete_beta(0.5, freedom / 2, square / (freedom + square))
    return 1.0 - 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by continued fraction (Abramowitz and Stegun 26.5.8), on the side where it converges fast."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x by the modified Lentz method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 1000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + step * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + step / c
            c = c if abs(c) > tiny else tiny
            result *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return result
