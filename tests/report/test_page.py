"""The page: complete, closed, self-contained, escaped, and never silent about what is missing."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from changeover.pipeline.journal import Event
from changeover.report.page import render_page
from changeover.report.results import read_bench
from tests.report import journals
from tests.report.pages import Page

RUNS = {
    "finished": journals.finished,
    "failed": journals.failed,
    "interrupted": journals.interrupted,
    "resumed": journals.resumed,
    "empty": list,
}


def plot_data(found: dict[str, str | None]) -> dict[str, Any]:
    return json.loads(found["data-series"] or "")


SECTIONS = ["timeline", "changeovers", "benchmarks", "drafter", "states", "servers", "provenance"]


@pytest.mark.parametrize("name", RUNS)
def test_page_is_well_formed_and_has_every_section(name: str):
    page = Page(render_page(RUNS[name]()))
    assert page.mismatched == []
    assert page.unclosed == []
    assert [section.get("id") for section in page.tags("section")] == SECTIONS
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    links = [(link.get("href") or "")[1:] for link in page.tags("a")]
    assert set(links) <= set(ids)


@pytest.mark.parametrize("name", RUNS)
def test_page_needs_nothing_from_elsewhere(name: str):
    source = render_page(RUNS[name]())
    page = Page(source)
    assert all("src" not in found for _, found in page.elements)
    assert [link["href"] for link in page.tags("link")] == ["data:,"]
    assert "@import" not in source
    assert "url(" not in source
    policy = next(
        found for found in page.tags("meta") if found.get("http-equiv") == "Content-Security-Policy"
    )
    assert (policy["content"] or "").startswith("default-src 'none'")
    addresses = re.findall(r"https?://[^\s\"'<&]+", source)
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)


@pytest.mark.parametrize("name", RUNS)
def test_hostile_text_stays_text(name: str):
    page = Page(render_page(RUNS[name]()))
    assert len(page.tags("script")) == 1
    assert all(not key.startswith("on") for _, found in page.elements for key in found)


def test_measured_acceptance_is_shown_with_its_interval():
    assert "1.410 to 1.540" in Page(render_page(journals.finished())).words


def test_measured_acceptance_of_a_single_level_keeps_its_interval():
    one = journals.bench_result(1.0, 1.47)
    assert read_bench(one).acceptance.interval is None  # three levels: no interval of their sum
    one["levels"] = one["levels"][:1]
    assert read_bench(one).acceptance.interval == pytest.approx((1.41, 1.54))


def test_log_tail_is_shown_word_for_word():
    words = Page(render_page(journals.failed())).words
    assert " ".join(journals.HOSTILE.split()) in words
    assert "RuntimeError: no space left" in words


def test_one_article_a_changeover_with_all_its_evidence():
    page = Page(render_page(journals.finished()))
    assert [found.get("id") for found in page.with_class("changeover") if found.get("id")] == [
        f"changeover-{number}" for number in (1, 2, 3, 4)
    ]
    for said in ("none of 2 left", "bindable", "as at the baseline (0 segments)", "no GPU present"):
        assert page.words.count(said) >= 4
    assert page.words.count("Ours because: forked by this run; pidfd held") == 4


def test_headline_figures_are_those_of_the_results():
    words = Page(render_page(journals.finished())).words
    assert "1.38×" in words
    assert "4 of 4" in words
    assert "1.47" in words
    assert "training expected 1.50 (-1.9 %)" in words
    assert "A is baseline/bench, B is speculative/bench" in words


def test_states_and_training_say_what_vouches_for_them():
    words = Page(render_page(journals.finished())).words.replace("\u202f", " ")
    assert "372 stored, 0 failed, 37 held out from training" in words
    assert "passed: 5 114 of 5 120 rows give the token generated (99.9 %); without near ties 5 090" in words
    assert "372 of 372 samples there" in words
    assert "480 in 4 epochs" in words
    assert "8 192 tokens, 99.0 % of the held-out tokens" in words


def test_refusals_and_foreign_holder_are_named():
    words = Page(render_page(journals.failed())).words
    assert "did not prove the machine clean" in words
    assert "foreign holder" in words
    assert "pid 1 is never signalled" in words
    assert "1 of 2" in words


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("failed", "The run failed."),
        ("interrupted", "The run was interrupted."),
        ("resumed", "Resumed 1 time."),
        ("empty", "No end is recorded."),
    ],
)
def test_a_run_that_did_not_go_through_says_so(name: str, said: str):
    assert said in Page(render_page(RUNS[name]())).words


def test_changeover_under_way_is_open_and_not_called_dirty():
    words = Page(render_page(journals.gpu_box())).words
    assert "Changeover 1 after baseline has no verdict in the journal." in words
    assert "did not prove" not in words
    assert "0 of 1" in words


def test_missing_parts_are_named():
    words = Page(render_page([])).words
    for said in (
        "Unnamed run",
        "Timeline: not shown, no phase has started",
        "Changeovers: not shown, none has begun",
        "Comparison: not shown, no compare job has finished",
        "Measurements: not shown, no bench job has finished",
        "Drafter: not shown, no train job has started",
        "Hidden states: not shown, no collect job has started",
        "Pipeline: not shown, the journal does not have it",
    ):
        assert said in words


def test_loss_of_a_training_that_did_not_finish_comes_from_its_progress():
    page = Page(render_page(journals.interrupted()))
    assert "Training loss from the job's progress lines" in page.words
    curves = {
        found["unit"]: found["series"][0]["points"] for found in map(plot_data, page.with_class("plot"))
    }
    assert curves["loss"][0] == [0, 6]
    assert curves["tokens a verify step"] == [[0, 1], [10, 1.1]]
    assert "Result of the training: not shown, the job has left none" in page.words


def test_charts_carry_their_values_and_axes():
    page = Page(render_page(journals.finished()))
    plots = [plot_data(found) for found in page.with_class("plot")]
    assert {plot["unit"] for plot in plots} == {"processes", "MiB", "tok/s", "loss", "tokens a verify step"}
    assert all(plot["x"]["label"] and plot["series"] for plot in plots)
    throughput = next(plot for plot in plots if plot["unit"] == "tok/s")
    assert [one["label"] for one in throughput["series"]] == ["baseline", "speculative"]
    assert throughput["series"][0]["points"] == [[1.0, 13.1], [4.0, 33.8], [8.0, 47.9]]


def test_gpu_memory_is_drawn_per_gpu_and_a_long_changeover_keeps_the_page_small():
    source = render_page(journals.gpu_box())
    assert len(source.encode()) < 1_000_000
    plots = [plot_data(found) for found in Page(source).with_class("plot")]
    assert [one["label"] for one in plots[-1]["series"]] == [f"GPU-{gpu:08x}" for gpu in range(8)]


def test_normal_run_is_far_below_a_megabyte():
    assert len(render_page(journals.finished()).encode()) < 300_000


FINISHED = journals.resumed()
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**12),
    st.floats(),
    st.sampled_from([1e308, -1e308, 10**400, 5e-324, 1e18]),
    st.sampled_from([journals.HOSTILE, "", [], {}, [None], [[1]], {"x": None}, [math.nan, 1], {"low": 1}]),
)


def corrupt(value: Any, data: st.DataObject) -> Any:
    """The value with one part of it, at any depth, replaced by junk or left out."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    if not keys or data.draw(st.integers(0, 3)) == 0:
        return data.draw(JUNK)
    key = data.draw(st.sampled_from(keys))
    if isinstance(value, dict):
        return {name: corrupt(part, data) if name == key else part for name, part in value.items()}
    return [corrupt(part, data) if index == key else part for index, part in enumerate(value)]


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking whole pages would take minutes
)
@given(st.data())
def test_no_journal_makes_the_page_fail(data: st.DataObject):
    """The runner writes the page at the end of a run: it must come whatever the events hold or lack."""
    events = FINISHED[: data.draw(st.integers(0, len(FINISHED)))]
    for _ in range(data.draw(st.integers(0, 4))):
        if events:
            at = data.draw(st.integers(0, len(events) - 1))
            old = events[at]
            found = corrupt(old.data, data)
            events = [
                *events[:at],
                Event(old.seq, old.t_wall, old.t_mono, old.event, found),
                *events[at + 1 :],
            ]
    page = Page(render_page(events))
    assert page.mismatched == []
    assert len(page.tags("script")) == 1
