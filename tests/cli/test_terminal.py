from dataclasses import dataclass, field
from typing import Any

import pytest

from changeover.cli import progress as progress_module
from changeover.cli.progress import PLAIN_PROGRESS_PERIOD_S, ProgressLine, progress_text
from changeover.cli.terminal import PlainView, RichView, describe, summarise
from changeover.machine.progress import Progress


@dataclass
class Seen:
    event: str
    data: dict[str, Any] = field(default_factory=dict)
    t_wall: float = 0.0


CLEARANCE = {
    "verdict": "dirty",
    "seconds": 2.5,
    "evidence": [
        {"item": "processes", "seen": "none alive", "verdict": "clean"},
        {"item": "port:8000", "seen": "held by pid 7", "verdict": "dirty"},
    ],
}
PROGRESS = {
    "stage": "train",
    "done": 3,
    "total": 10,
    "unit": "steps",
    "detail": {"loss": 1.23456, "eta_s": 61.0},
}


def test_a_clearance_is_shown_with_every_item_and_what_is_not_clean_is_said():
    text = describe(Seen("changeover.cleared", {"phase": "train", "clearance": CLEARANCE}))
    assert text.splitlines() == [
        "  clearance after train: dirty in 2.5 s",
        "    processes: none alive",
        "    port:8000: held by pid 7 (dirty)",
    ]


def test_what_only_the_journal_needs_is_not_shown():
    assert describe(Seen("changeover.sample", {"phase": "x"})) is None


def test_progress_has_amount_figures_and_time_left():
    assert progress_text("train", PROGRESS) == "train: 3 of 10 steps, loss 1.235, 1:01 left"
    loading = {
        "stage": "reading",
        "done": 2**20,
        "total": 2**28,
        "unit": "bytes",
        "detail": {"bytes_per_s": 2**21},
    }
    assert progress_text("server", loading) == "server: reading, 1.0 MiB of 256.0 MiB, 2.0 MiB a second"


@pytest.mark.parametrize("kind", ["bench", "train", "collect", "compare", "command", "unheard of"])
def test_a_result_without_its_figure_gives_no_figure(kind):
    assert summarise(kind, {}) == ""


def test_a_bench_is_summed_up_by_level():
    summary = {"output_tok_s": {"mean": 12.34}, "acceptance": {"length": 1.5}}
    assert (
        summarise("bench", {"levels": [{"concurrency": 4, "summary": summary}]})
        == "12.3 tok/s at 4, acceptance length 1.50"
    )


def test_plain_lines_carry_the_time_and_progress_is_thinned(capsys):
    view = PlainView()
    view(Seen("run.started", {"run_id": "r"}, t_wall=100.0))
    for t_wall in (100.5, 101.0, 100.5 + PLAIN_PROGRESS_PERIOD_S):
        view(Seen("job.progress", {"job": "train", "progress": PROGRESS}, t_wall=t_wall))
    out = capsys.readouterr()
    assert out.out == ""
    assert [line[:6].strip() for line in out.err.splitlines()] == ["0:00", "0:00", "0:10"]


def test_the_live_view_takes_every_event_and_leaves_lines_behind(capsys):
    view = RichView()
    view(Seen("run.started", {"run_id": "r[bold]"}))
    view(Seen("job.progress", {"job": "train", "progress": PROGRESS}))
    view(Seen("changeover.stage", {"phase": "p", "stage": "drain", "seconds": 1.0, "outcome": "proved"}))
    view(Seen("changeover.cleared", {"phase": "p", "clearance": CLEARANCE}))
    view.close()
    err = capsys.readouterr().err
    assert "run r[bold]" in err
    assert "clearance after p: dirty" in err


def test_a_command_in_a_log_tells_its_first_and_its_last_progress(capsys):
    with ProgressLine("train") as show:
        for done in range(4):
            show(Progress("train", done, 3, "steps"))
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.splitlines() == ["train: 0 of 3 steps", "train: 3 of 3 steps"]


def test_a_command_on_a_terminal_has_a_bar_and_leaves_the_screen_clean(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "is_terminal", lambda: True)
    with ProgressLine("collect") as show:
        show(Progress("collect", 1, 3, "samples", {"tokens_per_s": 96.0}))
    assert capsys.readouterr().out == ""
