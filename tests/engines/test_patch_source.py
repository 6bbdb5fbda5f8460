"""The capture patch as text: it goes in where the code is what it knows, and comes out byte for byte."""

from __future__ import annotations

import ast
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.engines.patch.source import (
    MARK,
    PatchRefused,
    SourceState,
    original,
    patched,
    source_state,
)
from tests.engines.sglang_tree import MODEL, OLD

CALL = "if _changeover_attach is not None: _changeover_attach(self)"


def inserted(text: str) -> list[str]:
    return [line for line in patched(text).splitlines() if MARK in line]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "# the last line has no end"])
def test_it_comes_out_byte_for_byte(end: str, tail: str) -> None:
    text = MODEL.replace("\n", end) + tail
    whole = patched(text)
    assert whole != text and original(whole) == text
    assert (source_state(text), source_state(whole)) == (SourceState.ORIGINAL, SourceState.PATCHED)
    assert whole.count("\r\n") == (whole.count("\n") if end == "\r\n" else 0)


def test_the_call_is_the_first_statement_of_that_forward_alone() -> None:
    tree = ast.parse(patched(MODEL))
    firsts = {
        f"{cls.name}.{method.name}": ast.unparse(method.body[1 if ast.get_docstring(method) else 0])
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }
    called = [name for name, first in firsts.items() if "_changeover_attach" in first]
    assert called == ["FooForCausalLM.forward"]


def test_docstring_and_future_import_stay_first() -> None:
    tree = ast.parse(patched(MODEL))
    assert ast.get_docstring(tree) == "A model."
    assert isinstance(tree.body[1], ast.ImportFrom) and tree.body[1].module == "__future__"
    compile(patched(MODEL), "model.py", "exec")


def run_model(monkeypatch: pytest.MonkeyPatch, attached: list[Any]) -> object:
    """The patched source as a module, with what it imports stood in for; its model's ``forward``, called once."""
    hooks = types.ModuleType("changeover_hooks")
    hooks.attach = attached.append  # type: ignore[attr-defined]
    torch = types.ModuleType("torch")
    torch.no_grad = lambda: lambda function: function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "changeover_hooks", hooks)
    monkeypatch.setitem(sys.modules, "torch", torch)
    module: dict[str, Any] = {}
    exec(compile(patched(MODEL), "model.py", "exec"), module)
    model = module["FooForCausalLM"]()
    model.model = lambda ids: ids * 2
    model.logits_processor = lambda ids, hidden: (ids, hidden)
    assert model.forward(3) == (3, 6)
    return model


def test_it_does_nothing_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHANGEOVER_CAPTURE", raising=False)
    attached: list[Any] = []
    run_model(monkeypatch, attached)
    assert attached == []


def test_asked_it_hands_over_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGEOVER_CAPTURE", "{}")
    attached: list[Any] = []
    assert attached == [run_model(monkeypatch, attached)]


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (OLD, "no class with set_eagle3_layers_to_capture"),
        (
            MODEL.replace("self.logits_processor(", "self.head("),
            "whose forward() calls self.logits_processor",
        ),
        (MODEL.replace("def forward", "def answer"), "whose forward() calls self.logits_processor"),
        (MODEL + "\n  !", "it is no Python"),
        (
            "class A:\n    def set_eagle3_layers_to_capture(self): pass\n"
            "    def forward(self): return self.logits_processor()\n",
            "no line of its own",
        ),
        ("", "no class"),
        ("\x00", "no Python"),
    ],
)
def test_what_it_does_not_know_it_refuses_and_says_why(text: str, because: str) -> None:
    assert source_state(text) is SourceState.UNKNOWN
    with pytest.raises(PatchRefused, match=because.replace("(", r"\(").replace(")", r"\)")):
        patched(text)


def test_a_patched_one_is_not_patched_twice() -> None:
    with pytest.raises(PatchRefused, match="already"):
        patched(patched(MODEL))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("ids * 2", "ids * 3").replace("self.model(ids)", "self.model(ids) + 1"),
        lambda text: text + "# added\n",
        lambda text: text.replace("original sha256 ", "original sha256 0000"),
        lambda text: text.replace(f"{MARK} 1: ", f"{MARK}: "),
    ],
)
def test_an_edited_one_is_never_restored_to_something_else(edit: Any) -> None:
    whole = edit(patched(MODEL))
    assert source_state(whole) is SourceState.EDITED
    with pytest.raises(PatchRefused):
        original(whole)


@given(st.text(max_size=300))
def test_any_text_has_a_state_and_a_patch_comes_out_of_it(text: str) -> None:
    state = source_state(text)
    assert state in (SourceState.UNKNOWN, SourceState.EDITED)
    with pytest.raises(PatchRefused):
        patched(text)


@given(
    st.lists(
        st.sampled_from(["", "# a word", "X = '''\n  two lines\n'''", "\f", "é = 'ü'", "Y = 'a\\\nb'"]),
        max_size=6,
    ),
    st.booleans(),
)
def test_whatever_stands_around_it_it_comes_out(around: list[str], crlf: bool) -> None:
    text = "\n".join(
        [*around, MODEL.replace('"""A model."""\n\nfrom __future__ import annotations\n', ""), *around]
    )
    text = text.replace("\n", "\r\n") if crlf else text
    assert original(patched(text)) == text


def test_every_line_of_it_says_whose_it_is() -> None:
    before, after = MODEL.splitlines(), patched(MODEL).splitlines()
    assert [line for line in after if line not in before] == inserted(MODEL)
