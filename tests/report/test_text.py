"""The run as Markdown and as JSON, and the command that writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from changeover.cli.report import report
from changeover.machine.errors import InvalidInput
from changeover.pipeline.journal import Event, encode_event
from changeover.report.text import render_text, summary
from tests.report import journals


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "laptop-1"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_bytes(b"".join(map(encode_event, journals.finished())))
    return folder.parent


def command(*words: str):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_text_of_a_finished_run():
    text = render_text(journals.finished())
    assert text.startswith("# laptop: done\n")
    assert "**1.38×** the baseline's output tok/s, single-stream (95 % interval" in text
    assert "Changeovers: 4 of 4 proved the machine clean" in text
    assert "| speculative | 8 | 66.1 |" in text


def test_text_of_a_failed_run_names_what_failed_and_what_was_seen():
    text = render_text(journals.failed())
    assert text.startswith("# laptop: FAILED\n")
    assert "Job capture/collect failed: exit code 1" in text
    assert "port:41000: foreign_holder; expected bindable; saw held by pid 999" in text
    assert "<script>" not in text


@pytest.mark.parametrize("make", [journals.finished, journals.failed, journals.interrupted, journals.resumed])
def test_every_prefix_of_a_journal_has_a_text_and_a_summary(make):
    events = make()
    for end in range(0, len(events) + 1, 7):
        assert render_text(events[:end]).startswith("# ")
        json.dumps(summary(events[:end]), allow_nan=False)


def test_cells_with_bars_and_line_breaks_keep_the_table_whole():
    events = [Event(0, 1.0, 1.0, "phase.started", {"phase": "a|b\nc", "index": 0})]
    assert "| a\\|b c |" in render_text(events)


def test_summary_of_a_resumed_run():
    found = summary(journals.resumed())
    assert found["state"] == "done"
    assert len(found["changeovers"]) == 5
    assert found["speed"]["concurrency"] == 1
    assert found["speed"]["ratio"] == pytest.approx(1.38)
    assert found["acceptance_length"]["simulated"] == 1.498


def test_command_writes_the_page_into_the_run(runs: Path):
    result = command("laptop-1", "--runs-dir", str(runs))
    assert result.exit_code == 0
    assert (runs / "laptop-1" / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in (runs / "laptop-1").iterdir() if path.name.startswith(".")] == []


def test_command_takes_a_folder_and_prints_text(runs: Path):
    result = command(str(runs / "laptop-1"), "--text")
    assert result.stdout == render_text(journals.finished())
    assert not (runs / "laptop-1" / "report.html").exists()


def test_command_prints_one_json_object(runs: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    result = command("--runs-dir", str(runs), "--json", "--out", str(out))
    found = json.loads(result.stdout)
    assert (found["state"], found["written"]) == ("done", str(out))
    assert out.exists()


def test_command_refuses_an_unknown_run_and_a_missing_folder(runs: Path):
    with pytest.raises(InvalidInput, match="laptop-1"):
        command("nothing", "--runs-dir", str(runs))
    with pytest.raises(InvalidInput, match="to write"):
        command("laptop-1", "--runs-dir", str(runs), "--out", str(runs / "missing" / "page.html"))
