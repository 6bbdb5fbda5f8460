"""SGLang as one interpreter would import it: where it is, its version, its model files, and who has it loaded.

Nothing of SGLang is imported to learn that, and the interpreter is asked with a deadline.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from changeover.engines.patch.source import MARK, TELLS, SourceState, source_state
from changeover.machine.bounded import Answer, run_bounded
from changeover.machine.errors import InvalidInput
from changeover.machine.processes import PROC, read_command, read_pids, redacted

FAMILIES = ("deepseek_v2.py", "llama.py", "qwen2.py", "qwen2_moe.py", "qwen3.py", "qwen3_moe.py")
"""Said to be unknown where they are; other files are ours only where they have what the patch holds on to."""
USABLE = (SourceState.ORIGINAL, SourceState.PATCHED)
_TIMEOUT_S = 60.0
_ASK = """
import importlib.metadata, importlib.util, json, sys, sysconfig
sys.path.pop(0)  # the folder that we stand in is not the environment's
spec = importlib.util.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
try:
    told = importlib.metadata.distribution("sglang")
except importlib.metadata.PackageNotFoundError:
    told = None
files = [] if told is None else told.files or []
print(json.dumps({
    "package": places[0] if places else None,
    "version": told.version if told else None,
    "roots": [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
    "recorded": {str(one): one.hash.value for one in files
                 if one.hash and one.hash.mode == "sha256" and "/srt/models/" in str(one)},
}))
"""


@dataclass(frozen=True)
class Installed:
    """``recorded``: the name of a model file -> the sha256 with which the installer wrote it; empty where unknown.

    ``roots``: the folders of its environment's packages.
    """

    python: str
    version: str
    package: Path
    roots: tuple[Path, ...]
    recorded: Mapping[str, str]

    @property
    def models(self) -> Path:
        return self.package / "srt" / "models"


@dataclass(frozen=True)
class ModelFile:
    """``as_installed``: whether it still is what the installer wrote; None where that is not recorded."""

    path: Path
    state: SourceState
    as_installed: bool | None

    @property
    def name(self) -> str:
        return self.path.name


def find_sglang(python: str) -> Installed:
    """Raises InvalidInput where the interpreter does not answer, or has no SGLang."""
    result = run_bounded([python, "-c", _ASK], timeout_s=_TIMEOUT_S, env={"PATH": "/usr/bin:/bin"})
    todo = (
        "Give the interpreter of the environment that SGLang is installed in: --python /path/to/bin/python."
    )
    if result.answer is not Answer.GIVEN:
        raise InvalidInput(expected=f"an answer of {python}", seen=result.note, todo=todo)
    answer = json.loads(result.output)
    package = Path(answer["package"] or "/nowhere")
    if not (package / "srt" / "models").is_dir():
        raise InvalidInput(
            expected=f"SGLang in the environment of {python}", seen=str(answer["package"]), todo=todo
        )
    return Installed(
        python=python,
        version=answer["version"] or "unknown",
        package=package,
        roots=tuple({Path(root).resolve(): None for root in [*answer["roots"], package.parent]}),
        recorded={Path(name).name: _hex(value) for name, value in answer["recorded"].items()},
    )


def model_files(installed: Installed) -> list[ModelFile]:
    """The files that the patch knows or is in, and the families' where it does not know them."""
    found = []
    for path in sorted(installed.models.glob("*.py")):
        content = path.read_bytes()
        if path.name not in FAMILIES and TELLS.encode() not in content and MARK.encode() not in content:
            continue
        state = state_of(content)
        if state is SourceState.UNKNOWN and path.name not in FAMILIES:
            continue
        recorded = installed.recorded.get(path.name)
        same = None if recorded is None else hashlib.sha256(content).hexdigest() == recorded
        found.append(ModelFile(path, state, same))
    return found


def patch_refusal(python: str, architecture: str) -> str | None:
    """Why the states of a model of this architecture (``LlamaForCausalLM``) cannot come through the patch, or None."""
    try:
        installed = find_sglang(python)
    except InvalidInput as error:
        return f"capture_through patch: expected {error.expected}; saw {error.seen}"
    usable = {it.name for it in model_files(installed) if it.state in USABLE}
    name = _file_with_forward(installed.models, architecture)
    if name in usable:
        return None
    seen = f"{name}, which it does not know" if name is not None else "none"
    return (
        f"capture_through patch: expected a source of {architecture} that the patch knows; "
        f"saw in SGLang {installed.version}: {seen}"
    )


def _file_with_forward(models: Path, architecture: str) -> str | None:
    """The file of the class, or of the one that it inherits ``forward`` from (``Mistral`` from ``Llama``)."""
    sources = {path.name: path.read_text(errors="replace") for path in sorted(models.glob("*.py"))}
    seen: set[str] = set()
    while architecture not in seen:
        seen.add(architecture)
        found = _class_of(sources, architecture)
        if found is None:
            return None
        name, declared = found
        if any(isinstance(it, ast.FunctionDef) and it.name == "forward" for it in declared.body):
            return name
        if not declared.bases:
            return None
        architecture = ast.unparse(declared.bases[0]).split(".")[-1]
    return None


def _class_of(sources: Mapping[str, str], name: str) -> tuple[str, ast.ClassDef] | None:
    for file, text in sources.items():
        if re.search(rf"^class {re.escape(name)}\b", text, re.MULTILINE) is None:
            continue  # a look at the text is a thousandth of reading it as Python
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return file, node
    return None


def state_of(content: bytes) -> SourceState:
    try:
        return source_state(content.decode())
    except UnicodeDecodeError:
        return SourceState.UNKNOWN


def holders(roots: Collection[Path], proc: Path = PROC) -> list[str]:
    """Processes that have something of these folders mapped, or call themselves SGLang: they may have it loaded.

    SGLang itself is Python alone, which leaves no trace in a process; what it loads beside it does (torch, its
    kernels). Another user's process shows its title only. Each as ``pid 12 (python -m sglang...)``.
    """
    prefixes = tuple(f"{root}{os.sep}".encode() for root in roots)
    found = []
    for pid in read_pids(proc):
        command = read_command(pid, proc)
        if pid != os.getpid() and (_is_named_sglang(command) or _maps(pid, prefixes, proc)):
            found.append(f"pid {pid} ({redacted(command)})")
    return found


def _is_named_sglang(command: tuple[str, ...]) -> bool:
    """``sglang::scheduler``, ``python -m sglang.launch_server``; not an editor of a file that has the word in it."""
    is_module = "-m" in command[1:-1] and command[command.index("-m") + 1].split(".")[0] == "sglang"
    return bool(command) and (command[0].startswith("sglang::") or is_module)


def _maps(pid: int, prefixes: tuple[bytes, ...], proc: Path) -> bool:
    try:
        raw = (proc / str(pid) / "maps").read_bytes()
    except OSError:
        return False
    return any(prefix in raw for prefix in prefixes)


def _hex(value: str) -> str:
    """A RECORD's hash: URL-safe base64 without its padding (PEP 376)."""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
