"""What every phase of a run works with, and the failures that end a phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from changeover.engines.models import ModelFacts
from changeover.machine.errors import ChangeoverError
from changeover.machine.protocol import Machine
from changeover.pipeline.folder import RunFolder
from changeover.pipeline.journal import Journal
from changeover.pipeline.spec import PipelineSpec, is_path
from changeover.pipeline.state import RunState, read_state
from changeover.teardown.clearance import Clearance


@dataclass(frozen=True)
class RunContext:
    """One run being done. ``check`` raises ``Interrupted`` where somebody has asked the run to stop."""

    folder: RunFolder
    spec: PipelineSpec
    model: ModelFacts
    machine: Machine
    journal: Journal
    check: Callable[[], None]

    def state(self) -> RunState:
        return read_state(self.journal.events)

    def job_folder(self, reference: str) -> Path:
        """Folder of a job named as ``phase/job``."""
        phase, _, job = reference.partition("/")
        index = next(i for i, candidate in enumerate(self.spec.phases) if candidate.name == phase)
        return self.folder.job(index, phase, job)

    def made(self, reference: str, name: str) -> Path:
        """A folder that the user named, or what the job ``phase/job`` made under ``name``."""
        if is_path(reference):
            return Path(reference).expanduser().resolve()
        return self.job_folder(reference) / name


class PhaseFailed(ChangeoverError):  # noqa: N818
    """A server or a job of a phase failed; the machine is cleared before this is told."""


class PortTaken(PhaseFailed):
    """A foreign holder has the port that a server is to listen on; nothing was started."""

    exit_code = 5


class MachineNotClear(ChangeoverError):  # noqa: N818
    """A changeover ended without a clean verdict; its exit code is the clearance's."""

    def __init__(self, phase: str, clearance: Clearance) -> None:
        bad = [item for item in clearance.evidence if item.verdict != "clean"]
        super().__init__(
            expected=f"the machine clean after phase {phase}",
            seen=f"{clearance.verdict.value}: " + "; ".join(f"{item.item}: {item.seen}" for item in bad),
            todo="Look with `changeover check`; when it is clean, `changeover run --resume` goes on from here.",
        )
        self.exit_code = clearance.exit_code
