"""The copy beside: SGLang as it is but for the patched files, and the installed one untouched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from changeover.engines.patch.installed import Installed, find_sglang, model_files, patch_refusal
from changeover.engines.patch.overlay import MARKER, build_overlay, read_overlay, remove_overlay
from changeover.engines.patch.source import MARK, SourceState
from changeover.machine.errors import InvalidInput
from tests.engines.sglang_tree import as_made, contents, make_sglang


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return make_sglang(tmp_path_factory.mktemp("sglang") / "env")


def test_the_interpreter_says_where_and_which(installed: Installed) -> None:
    assert installed.version == "0.5.23"
    assert [(it.name, it.state, it.as_installed) for it in model_files(installed)] == [
        ("deepseek_v2.py", SourceState.UNKNOWN, True),
        ("llama.py", SourceState.ORIGINAL, True),
        ("qwen2.py", SourceState.ORIGINAL, True),
    ]


def test_an_interpreter_without_sglang_is_told_apart_from_none_at_all(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run(["python3", "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(InvalidInput, match="SGLang in the environment of"):
        find_sglang(str(bare / "bin/python"))
    with pytest.raises(InvalidInput, match="an answer of"):
        find_sglang(str(tmp_path / "no-python"))


def test_python_takes_the_copy_and_the_installed_files_stay(installed: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    assert build_overlay(installed, folder) == ["llama.py", "qwen2.py"] == read_overlay(folder)
    code = (
        "import sglang.srt.server, importlib.util as u; from pathlib import Path\n"
        "for name in ('llama', 'deepseek_v2'):\n"
        "    path = Path(u.find_spec('sglang.srt.models.' + name).origin)\n"
        f"    print(name, {MARK!r} in path.read_text(), path.is_symlink())"
    )
    said = subprocess.run(
        [installed.python, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert said.stdout.split("\n")[:2] == ["llama True False", "deepseek_v2 False True"], said.stderr
    assert contents(installed) == as_made()


def test_it_is_made_anew_and_removed_without_its_links_targets(installed: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    build_overlay(installed, folder)
    (folder / "sglang/srt/models/llama.py").write_text("broken")
    build_overlay(installed, folder)
    assert MARK in (folder / "sglang/srt/models/llama.py").read_text()
    assert remove_overlay(folder) and not remove_overlay(folder)
    assert os.listdir(tmp_path) == []
    assert contents(installed) == as_made()
    assert (installed.package / "srt/server.py").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_somebodys_folder_is_neither_replaced_nor_removed(
    installed: Installed, tmp_path: Path, kind: str
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "work.txt").write_text("mine")
    folder = theirs
    if kind == "link":
        (theirs / MARKER).write_text("{}")
        folder = tmp_path / "link"
        folder.symlink_to(theirs)
    for act in (lambda: build_overlay(installed, folder), lambda: remove_overlay(folder)):
        with pytest.raises(InvalidInput, match="something else"):
            act()
    assert (theirs / "work.txt").read_text() == "mine"


def test_what_the_patch_does_not_know_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    installed = make_sglang(tmp_path / "env")
    for name in ("llama.py", "qwen2.py"):
        (installed.models / name).unlink()
    with pytest.raises(InvalidInput, match=r"SGLang 0\.5\.23, with none"):
        build_overlay(installed, tmp_path / "overlay")
    assert not (tmp_path / "overlay").exists()


def test_an_architecture_is_looked_up_through_what_it_inherits(tmp_path: Path) -> None:
    installed = make_sglang(tmp_path / "env")
    (installed.models / "child.py").write_text(
        "import x\n\n\nclass ChildForCausalLM(\n    x.FooForCausalLM,\n):\n    pass\n"
    )
    python = installed.python
    assert patch_refusal(python, "FooForCausalLM") is None
    assert patch_refusal(python, "ChildForCausalLM") is None
    told = patch_refusal(python, "OldForCausalLM")
    assert told is not None and told.endswith("saw in SGLang 0.5.23: deepseek_v2.py, which it does not know")
    assert (patch_refusal(python, "NobodyForCausalLM") or "").endswith("saw in SGLang 0.5.23: none")
    assert "saw" in (patch_refusal(str(tmp_path / "none"), "FooForCausalLM") or "")
