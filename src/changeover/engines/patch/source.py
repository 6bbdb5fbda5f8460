"""The capture patch of one SGLang model file, as text: what is inserted where, and how it is taken out again.

Anchored on the structure of the code, not on line numbers: a class that can be told what to capture
(``set_eagle3_layers_to_capture``) and whose ``forward`` calls ``self.logits_processor``. Into that ``forward`` goes one
line; it does nothing unless ``CHANGEOVER_CAPTURE`` is set (``engines/side/changeover_hooks.py``). Read in SGLang 0.5.5
to 0.5.23; ``deepseek_v2.py`` of 0.5.4 and older has no such class.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
from enum import StrEnum

MARK = "# changeover-patch"
TELLS = "set_eagle3_layers_to_capture"
PROCESSES = "logits_processor"
_HEADER = re.compile(rf"^{MARK} 1: original sha256 ([0-9a-f]{{64}})", re.MULTILINE)
_PREAMBLE = (
    "from os import environ as _changeover_environ",
    'if "CHANGEOVER_CAPTURE" in _changeover_environ:',
    "    from changeover_hooks import attach as _changeover_attach",
    "else:",
    "    _changeover_attach = None",
)
_CALL = "if _changeover_attach is not None: _changeover_attach(self)"


class SourceState(StrEnum):
    """What a model file is to the patch."""

    ORIGINAL = "original"
    PATCHED = "patched"
    EDITED = "edited since it was patched"
    UNKNOWN = "unknown to the patch"


class PatchRefused(ValueError):  # noqa: N818
    """This text is not what the patch knows; says why."""


def source_state(text: str) -> SourceState:
    """What the text is; never raises."""
    if MARK in text:
        try:
            original(text)
        except PatchRefused:
            return SourceState.EDITED
        return SourceState.PATCHED
    try:
        _anchors(text)
    except PatchRefused:
        return SourceState.UNKNOWN
    return SourceState.ORIGINAL


def patched(text: str) -> str:
    """The text with the patch in it; line ends as they are. Raises PatchRefused where the anchors are not there, or
    the patch already is.
    """
    if MARK in text:
        raise PatchRefused("it is patched already")
    first, forwards = _anchors(text)
    lines = _lines(text)
    end = "\r\n" if lines[0].endswith("\r\n") else "\n"
    for forward in sorted(forwards, key=lambda one: one.lineno, reverse=True):
        lines.insert(forward.lineno - 1, f"{' ' * forward.col_offset}{_CALL}  {MARK}{end}")
    header = (
        f"{MARK} 1: original sha256 {sha256_of(text)}; `changeover patch restore` takes these lines out{end}"
    )
    lines[first:first] = [header, *(f"{line}  {MARK}{end}" for line in _PREAMBLE)]
    result = "".join(lines)
    _expect_sound(result, text)
    return result


def original(text: str) -> str:
    """What a patched text was made of, byte for byte. Raises PatchRefused where it is not what its hash says."""
    found = _HEADER.search(text)
    if found is None:
        raise PatchRefused("it has no line that says what it was")
    rest = "".join(
        line for line in _lines(text) if not line.rstrip().endswith(MARK) and not _HEADER.match(line)
    )
    if sha256_of(rest) != found[1]:
        raise PatchRefused(
            f"without the patch it has sha256 {sha256_of(rest)[:12]}, and it was {found[1][:12]} before"
        )
    return rest


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expect_sound(result: str, text: str) -> None:
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise PatchRefused(f"with the patch in it, it would be no Python: {error}") from error
    if original(result) != text:
        raise PatchRefused("the patch could not be taken out of it again")


def _lines(text: str) -> list[str]:
    """As Python counts them: a form feed ends none."""
    return io.StringIO(text, newline="").readlines()


def _anchors(text: str) -> tuple[int, list[ast.stmt]]:
    """How many lines stand before the preamble, and the first statement of each ``forward``. Raises PatchRefused."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PatchRefused(f"it is no Python: {error}") from error
    forwards = [
        _first_statement(forward)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and _method(node, TELLS) is not None
        if (forward := _method(node, "forward")) is not None and _calls_processor(forward)
    ]
    if not forwards:
        raise PatchRefused(f"it has no class with {TELLS}() whose forward() calls self.{PROCESSES}()")
    return _lines_before_code(tree), forwards


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((it for it in node.body if isinstance(it, ast.FunctionDef) and it.name == name), None)


def _calls_processor(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == PROCESSES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        for node in ast.walk(function)
    )


def _first_statement(function: ast.FunctionDef) -> ast.stmt:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or body[0].lineno == function.lineno:
        raise PatchRefused(f"{function.name}() has no line of its own to put ours before")
    return body[0]


def _lines_before_code(tree: ast.Module) -> int:
    """The docstring and ``from __future__`` must stay first."""
    before = 0
    for at, node in enumerate(tree.body):
        is_docstring = at == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not is_docstring and not is_future:
            return before
        before = node.end_lineno or before
    return before
