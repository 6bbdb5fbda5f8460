"""Against numpy, closed forms, printed tables, and how often an interval really holds the truth."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.bench.statistics import (
    mean,
    mean_interval,
    percentile,
    ratio_interval,
    student_t,
    student_t_cdf,
    variance,
)

positive = st.floats(1e-6, 1e6)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_mean_and_variance_are_numpys(values: list[float]) -> None:
    assert mean(values) == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-6)
    assert variance(values) == pytest.approx(float(np.var(values, ddof=1)), rel=1e-6, abs=1e-6)


@given(st.floats(0.5, 0.9999))
def test_student_t_closed_forms(p: float) -> None:
    assert student_t(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-7, abs=1e-9)
    x = 2 * p - 1
    assert student_t(p, 2) == pytest.approx(x * math.sqrt(2 / (1 - x * x)), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (3, 3.182446),
        (4, 2.776445),
        (5, 2.570582),
        (10, 2.228139),
        (30, 2.042272),
        (120, 1.979930),
        (1e7, 1.959964),
    ],
)
def test_student_t_printed_table(freedom: float, quantile: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(quantile, abs=2e-6)


@given(st.floats(0.5, 0.999), st.floats(0.3, 500))
def test_student_t_inverts_its_distribution(p: float, freedom: float) -> None:
    assert student_t_cdf(student_t(p, freedom), freedom) == pytest.approx(p, abs=1e-9)


def test_mean_interval_by_hand() -> None:
    # s = 1, n = 3: half width = 4.302653 / sqrt(3)
    estimate = mean_interval([9.0, 10.0, 11.0])
    assert estimate.low is not None and estimate.high is not None
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx(
        (7.515862, 10.0, 12.484138), abs=1e-5
    )


def test_one_run_has_no_interval() -> None:
    assert mean_interval([3.0]).low is None
    estimate = ratio_interval([2.0], [3.0, 3.1])
    assert (estimate.low, estimate.high) == (None, None)
    assert estimate.value == pytest.approx(math.sqrt(3.0 * 3.1) / 2.0)


@given(st.lists(positive, min_size=2, max_size=6), st.lists(positive, min_size=2, max_size=6))
def test_ratio_the_other_way_round_is_the_inverse(a: list[float], b: list[float]) -> None:
    there, back = ratio_interval(a, b), ratio_interval(b, a)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low is not None and there.high is not None and back.low is not None and back.high is not None
    assert math.log(there.low) == pytest.approx(-math.log(back.high), rel=1e-6, abs=1e-9)
    assert there.low <= there.value * (1 + 1e-12) and there.value <= there.high * (1 + 1e-12)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.floats(0.01, 100))
def test_ratio_follows_a_change_of_unit(a: list[float], factor: float) -> None:
    b = [value * factor for value in a]
    assert ratio_interval(a, b).value == pytest.approx(factor)


def test_runs_without_any_spread_give_a_point() -> None:
    estimate = ratio_interval([2.0, 2.0], [3.0, 3.0])
    assert estimate.low == estimate.high == estimate.value == pytest.approx(1.5)


def test_welch_interval_holds_the_truth_about_95_times_in_100() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(600):
        a = [math.exp(draw.gauss(0.0, 0.05)) for _ in range(4)]
        b = [1.4 * math.exp(draw.gauss(0.0, 0.02)) for _ in range(5)]
        estimate = ratio_interval(a, b)
        assert estimate.low is not None and estimate.high is not None
        held += estimate.low <= 1.4 <= estimate.high
    assert 0.92 < held / 600 < 0.98
