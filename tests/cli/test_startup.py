"""The command line answers at once because it imports nothing heavy: that is tested, the time itself is not.

The time is a measured claim: ``benchmarks/startup.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "aiohttp",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "orjson",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
    "xxhash",
    "yaml",
}

_RUN = """
import json, sys
sys.argv = ["changeover", *json.loads(sys.argv[1])]
try:
    from changeover.cli.main import main
    main()
except SystemExit as end:
    code = end.code
else:
    code = 0
print(json.dumps({"code": code or 0, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def modules_after(*arguments: str, cwd: Path) -> set[str]:
    """The top-level modules that are imported once ``changeover ARGUMENTS`` has ended with 0."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["code"] == 0, done.stdout + done.stderr
    return set(said["modules"])


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["clear", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    assert modules_after(*arguments, cwd=tmp_path) & HEAVY == set()


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    code = _RUN.replace('"code": code or 0', '"code": 0')  # whether this machine is clean is not the question
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(["check"])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert set(json.loads(done.stdout.splitlines()[-1])["modules"]) & HEAVY == set()


def test_the_list_of_heavy_modules_is_looked_for_by_the_right_names(tmp_path: Path) -> None:
    """A twin: a program that imports one of them is seen by the same means."""
    code = "import json, sys, yaml; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert set(json.loads(done.stdout)) & HEAVY == {"yaml"}
