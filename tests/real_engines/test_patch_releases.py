"""``changeover patch`` on the model files of seven releases of SGLang: in, imported, out, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from changeover.engines.patch.installed import FAMILIES
from tests.real_engines.conftest import Changeover

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
INSTALLED = "0.5.23"
RELEASES = [*(HERE / "sglang-releases.txt").read_text().split(), INSTALLED]
MODULES = [name.removesuffix(".py") for name in FAMILIES]
# Seen with the files as they were released too, in the environment of 0.5.23: no GPU's packages are there, and older
# releases ask for names that theirs had.
STOOD_IN = {"vllm", "sgl_kernel.kvcacheio"}


@pytest.mark.parametrize("version", RELEASES)
def test_patched_in_place_it_imports_and_comes_out_byte_for_byte(
    version: str, engines: Path, tmp_path: Path, changeover: Changeover
) -> None:
    python, site = environment(engines, version, tmp_path)
    before = digests(site)

    applied = changeover("patch", "apply", "--in-place", "--python", python)
    assert applied.code == 0, applied.text
    assert applied.json["version"].startswith(version)
    states = {it["name"]: it["state"] for it in applied.json["files"]}
    assert {name: states[name] for name in FAMILIES} == dict.fromkeys(FAMILIES, "patched")
    assert set(states.values()) == {"patched"}

    imported = imports(engines, site, applied.json["environment"])
    assert sorted(imported["attached"]) == sorted(MODULES)
    assert all(Path(path).is_relative_to(site) for path in imported["files"].values())

    restored = changeover("patch", "restore", "--python", python)
    assert restored.code == 0, restored.text
    assert digests(site) == before


@pytest.mark.parametrize("version", [RELEASES[0], INSTALLED])  # what is patched is tried on all of them above
def test_patched_in_a_copy_it_imports_and_the_release_stays(
    version: str, engines: Path, tmp_path: Path, changeover: Changeover
) -> None:
    python, site = environment(engines, version, tmp_path)
    before = digests(site)
    applied = changeover("patch", "apply", "--python", python)
    assert applied.code == 0, applied.text
    copy = Path(applied.json["environment"]["PYTHONPATH"].split(os.pathsep)[0])
    imported = imports(engines, copy, {})
    assert imported["attached"] == [], "it captures without being asked to"
    assert all(Path(path).is_relative_to(copy) for path in imported["files"].values())
    status = changeover("patch", "status", "--python", python)
    assert {it["as_installed"] for it in status.json["files"]} == {True}
    assert digests(site) == before
    assert changeover("patch", "restore", "--python", python).code == 0
    assert not copy.exists()


def environment(engines: Path, version: str, folder: Path) -> tuple[str, Path]:
    """An interpreter that has this release as its installer left it, and the folder that it is in."""
    [installed] = (engines / "sglang").glob("lib/python3*/site-packages")
    source = installed if version == INSTALLED else engines / "releases" / version
    home = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    [site] = home.glob("lib/python3*/site-packages")
    for found in (source / "sglang", *source.glob("sglang-*.dist-info")):
        shutil.copytree(found, site / found.name, ignore=shutil.ignore_patterns("__pycache__"))
    return str(home / "bin" / "python"), site


def imports(engines: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What ``import_models.py`` says; ``environment`` as ``patch apply`` said it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    if environment:
        capture = json.dumps({"folder": str(folder), "boundaries": [2]})
        env |= {**environment, "CHANGEOVER_CAPTURE": capture}
    argv = [str(engines / "sglang" / "bin" / "python"), str(HERE / "import_models.py"), str(folder), *MODULES]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(said["stood_in"]) <= STOOD_IN
    return said


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
