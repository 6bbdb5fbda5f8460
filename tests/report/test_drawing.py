"""Axes, curves and numbers in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from changeover.report import words
from changeover.report.lines import Series, line_chart, thin
from changeover.report.svg import Axis, element, nice_axis, nice_ticks, time_ticks

VALUES = st.floats(-1e9, 1e9)


@given(VALUES, VALUES)
def test_ticks_hold_the_values_between_them(one: float, other: float):
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 12
    assert list(ticks) == sorted(set(ticks))


@given(st.floats(0.05, 1e7))
def test_time_ticks_begin_at_zero_and_stay_inside(high_s: float):
    ticks = time_ticks(high_s)
    assert ticks[0] == 0
    assert ticks[-1] <= high_s * (1 + 1e-6)
    assert len(ticks) <= 9


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes_in_order(unsorted: list[tuple[float, float]]):
    points = sorted(unsorted, key=lambda point: point[0])
    kept = thin(points)
    assert len(kept) <= 242
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_text_in_a_chart_is_escaped():
    axis = Axis(0, 1, (0.0, 1.0), "<b>", words.tick)
    chart = line_chart([Series("<i>", ((0, 0), (1, 1)), "c-1", markers=True)], axis, axis, name='"<u>"')
    assert "<b>" not in chart
    assert "<i>" not in chart
    assert "<u>" not in chart
    assert element("text", Markup("<b>x</b>")) == "<text><b>x</b></text>"


def test_line_through_level_and_rising_points_lies_where_the_axis_says():
    x = nice_axis([0, 4], "x", words.tick)
    y = nice_axis([0, 10], "y", words.tick)
    chart = line_chart([Series("a", ((0, 0), (2, 10), (4, 5)), "c-1")], x, y, name="a", height=100)
    assert 'd="M0.0 100.0L500.0 0.0L1000.0 50.0"' in chart


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.378, "1.38"),
        (999.6, "1000"),
        (13.14, "13.1"),
        (1234.5, "1\u202f234"),
        (None, "–"),
    ],
)
def test_figure(value: float | None, said: str):
    assert words.figure(value).replace("1\u202f000", "1000") == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.01, "10 ms"),
        (2.8, "2.80 s"),
        (14.23, "14.2 s"),
        (185, "3 min 05 s"),
        (7440, "2 h 04 min"),
        (None, "–"),
    ],
)
def test_seconds(value: float | None, said: str):
    assert words.seconds(value).replace("\u202f", " ") == said


@pytest.mark.parametrize(
    ("share", "said"),
    [(0, "0 %"), (1, "100 %"), (0.99996, "99.996 %"), (0.0001, "0.010 %"), (0.154, "15.4 %")],
)
def test_percent_never_rounds_to_all_or_nothing(share: float, said: str):
    assert words.percent(share).replace("\u202f", " ") == said


def test_size_and_moment():
    assert words.size(212_520_960).replace("\u202f", " ") == "203 MiB"
    assert words.moment(0) == "1970-01-01 00:00:00 UTC"
    assert words.moment(1e20) == words.ABSENT
