"""``changeover patch`` as a user types it, on an interpreter that has a SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from changeover.cli.patch import app
from changeover.engines.patch import in_place
from changeover.engines.patch.installed import Installed
from changeover.engines.patch.overlay import read_overlay
from changeover.machine.errors import InvalidInput, NotSupported
from tests.engines.sglang_tree import MODEL, as_made, contents, make_sglang


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(in_place, "_who_holds", lambda _: [])  # other servers of this machine are not meant
    return make_sglang(tmp_path / "env")


def run(installed: Installed, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--python", installed.python], catch_exceptions=False)


def test_a_copy_is_made_said_and_removed(installed: Installed) -> None:
    said = json.loads(run(installed, "apply", "--json").stdout)
    assert said["version"] == "0.5.23" and said["version_read"] is True
    assert [(it["name"], it["note"]) for it in said["files"]] == [
        ("llama.py", "patched in the copy"),
        ("qwen2.py", "patched in the copy"),
        ("deepseek_v2.py", "left alone"),
    ]
    overlay, side = map(Path, said["environment"]["PYTHONPATH"].split(":"))
    assert read_overlay(overlay) == ["llama.py", "qwen2.py"] and (side / "changeover_hooks.py").exists()
    assert contents(installed) == as_made()
    status = json.loads(run(installed, "status", "--json").stdout)
    assert status["overlay"] == {"folder": str(overlay), "files": ["llama.py", "qwen2.py"]}
    assert run(installed, "restore").exit_code == 0
    assert not overlay.exists() and contents(installed) == as_made()


def test_in_place_and_back(installed: Installed) -> None:
    said = run(installed, "apply", "--in-place")
    assert "patched" in said.stdout and "CHANGEOVER_CAPTURE" in said.stdout
    assert "patched, not as it was installed" in run(installed, "status").stdout
    assert run(installed, "restore").exit_code == 0
    assert contents(installed) == as_made()
    assert "original, as it was installed" in run(installed, "status").stdout


def test_an_edited_file_is_left_and_the_exit_code_says_that_it_is_not_done(installed: Installed) -> None:
    run(installed, "apply", "--in-place")
    path = installed.models / "llama.py"
    path.write_text(path.read_text() + "# mine\n")
    said = run(installed, "restore")
    assert said.exit_code == 6 and "edited since" in said.stdout
    assert path.read_text().endswith("# mine\n")


def test_an_unknown_version_is_said_plainly(installed: Installed) -> None:
    for name in ("llama.py", "qwen2.py"):
        (installed.models / name).write_text(MODEL.replace("self.logits_processor", "self.head"))
    with pytest.raises(NotSupported, match=r"llama\.py unknown to the patch; qwen2\.py unknown"):
        run(installed, "apply")
    assert "llama.py                 unknown to the patch" in run(installed, "status").stdout


def test_a_version_that_nobody_tried_it_on_is_said(installed: Installed) -> None:
    [told] = installed.package.parent.glob("sglang-*.dist-info")
    told.rename(told.with_name("sglang-0.9.0.dist-info"))
    metadata = installed.package.parent / "sglang-0.9.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.23", "0.9.0"))
    assert "not one of the versions that the patch was tried on" in run(installed, "status").stdout


def test_no_sglang_there(installed: Installed, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--python /path/to/bin/python"):
        CliRunner().invoke(app, ["status", "--python", str(tmp_path / "none")], catch_exceptions=False)
