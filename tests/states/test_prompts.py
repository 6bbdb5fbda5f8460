"""Reading prompts: the usual shapes, stable ids, a stable split, and bad lines by their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.machine.errors import InvalidInput
from changeover.states.prompts import Message, is_held_out, read_prompts

EXAMPLES = Path(__file__).parents[2] / "examples/prompts"


def written(tmp_path: Path, *values: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def test_the_usual_shapes_mean_the_same(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "id": "a",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hey"}]},
        {"id": 3, "text": "Once upon a time"},
        {"prompt": "2 + 2 ="},
    )
    a, b, c, d = read_prompts(path)
    assert a.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert b.messages == (Message("user", "Hello"),), "the answer of another model is dropped"
    assert (c.id, c.text, c.messages) == ("3", "Once upon a time", None)
    assert d.text == "2 + 2 =" and len(d.id) == 64


def test_only_trailing_answers_are_dropped(tmp_path: Path) -> None:
    (prompt,) = read_prompts(written(tmp_path, chat("one", "two", "three", "four")))
    assert prompt.messages is not None
    assert [message.content for message in prompt.messages] == ["one", "two", "three"]


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Why?\n\n  How?  \nWhy?\n")
    assert [prompt.text for prompt in read_prompts(path)] == ["Why?", "How?"]


def test_the_same_content_is_asked_once(tmp_path: Path) -> None:
    path = written(tmp_path, chat("one"), {"id": "x", **chat("one", "an answer")}, chat("two"))
    assert len(read_prompts(path)) == 2


def test_limit_counts_prompts_and_does_not_read_on(tmp_path: Path) -> None:
    path = written(tmp_path, chat("one"), chat("one"), chat("two"), "{broken")
    assert len(read_prompts(path, limit=2)) == 2
    with pytest.raises(InvalidInput, match="line 4"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "list, not an object"),
        ({"question": "x"}, "keys: question"),
        ({"messages": "x"}, "not a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content is list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no turn to answer"),
        ({"messages": []}, "no turn to answer"),
        ({"conversations": [{"from": ["x"], "value": "x"}]}, "from"),
        ({"id": "x" * 300, "text": "x"}, "256"),
        ({"id": {"a": 1}, "text": "x"}, "id"),
        ({"id": "a\nb", "text": "x"}, "printable"),
        ({"id": "first", "text": "other content"}, "used by line 1"),
        ({"text": "  "}, "none of"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = written(tmp_path, {"id": "first", "text": "good"}, line, {"text": "good too"})
    with pytest.raises(InvalidInput, match="line 2") as raised:
        read_prompts(path)
    assert reason in raised.value.seen


def test_bad_lines_are_all_named_up_to_ten(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as raised:
        read_prompts(written(tmp_path, *["{"] * 12))
    assert "line 10" in raised.value.seen and "2 more" in raised.value.seen


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(InvalidInput, match="none"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidInput, match="No such file"):
        read_prompts(tmp_path / "absent.jsonl")


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(InvalidInput, match="line 2: not UTF-8"):
        read_prompts(tmp_path / "p.txt")


@given(st.lists(st.text(min_size=1), unique=True, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_out_the_same_prompts_and_more(ids: list[str], a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert {i for i in ids if is_held_out(i, low)} <= {i for i in ids if is_held_out(i, high)}
    assert not any(is_held_out(i, 0.0) for i in ids)


def test_the_share_is_about_the_one_asked_for() -> None:
    held = sum(is_held_out(f"id-{i}", 0.1) for i in range(10_000))
    assert 850 < held < 1150


def test_the_shipped_prompts() -> None:
    laptop, bench = read_prompts(EXAMPLES / "laptop.jsonl"), read_prompts(EXAMPLES / "bench.jsonl")
    assert (len(laptop), len(bench)) == (280, 24)
    assert not {p.messages for p in laptop} & {p.messages for p in bench}
    assert max(p.characters for p in laptop) < 200
    # the share that examples/laptop.yaml holds out: enough for an interval, most left to train on
    assert 25 <= sum(is_held_out(p.id, 0.15) for p in laptop) <= 60
