"""What the page and the text say first: the results of the jobs put side by side, and what is absent."""

from __future__ import annotations

from dataclasses import dataclass

from changeover.report.findings import Training, facts, read_training
from changeover.report.reading import dig, mappings, text
from changeover.report.results import Acceptance, Bench, Comparison, Ratio, read_bench, read_comparison
from changeover.report.view import ChangeoverView, JobView, PhaseView, RunView

_KNOWN_KINDS = ("bench", "compare", "train", "collect")


@dataclass(frozen=True)
class Side:
    """One benchmark of the run. ``role``: baseline or candidate of a comparison, else its profile."""

    label: str
    role: str
    colour: str
    job: JobView
    bench: Bench


@dataclass(frozen=True)
class Digest:
    """A run with its results read; what the page needs beyond the view."""

    run: RunView
    sides: tuple[Side, ...]
    comparisons: tuple[tuple[JobView, Comparison], ...]
    trainings: tuple[tuple[JobView, Training], ...]
    collections: tuple[tuple[JobView, tuple[tuple[str, str], ...]], ...]
    others: tuple[tuple[JobView, tuple[tuple[str, str], ...]], ...]
    failed_jobs: tuple[JobView, ...]
    failed_phases: tuple[PhaseView, ...]
    dirty: tuple[ChangeoverView, ...]
    without_verdict: tuple[ChangeoverView, ...]

    @property
    def speed(self) -> tuple[int, Ratio] | None:
        """Concurrency and ratio of output tok/s at the lowest level of the last comparison."""
        for _, comparison in reversed(self.comparisons):
            for level in comparison.levels:
                return level.concurrency, level.ratios["output_tok_s"]
        return None

    @property
    def measured(self) -> Acceptance | None:
        """What the last benchmarked speculative server counted, over all levels."""
        found = [side.bench.acceptance for side in self.sides if side.bench.acceptance is not None]
        return found[-1] if found else None

    @property
    def measured_acceptance(self) -> float | None:
        """The acceptance length of ``measured``."""
        return self.measured.length if self.measured is not None else None

    @property
    def simulated_acceptance(self) -> float | None:
        """Acceptance length that the last training expected on held-out samples."""
        lengths = [training.acceptance_length for _, training in self.trainings]
        return next((length for length in reversed(lengths) if length is not None), None)

    @property
    def changeover_seconds(self) -> float | None:
        """Seconds in changeovers; None when one of them has no end."""
        lengths = [changeover.seconds for changeover in self.run.changeovers]
        return (
            None
            if not lengths or None in lengths
            else sum(length for length in lengths if length is not None)
        )

    @property
    def not_clean(self) -> tuple[ChangeoverView, ...]:
        return self.dirty + self.without_verdict

    @property
    def clean_count(self) -> int:
        return sum(changeover.is_clean for changeover in self.run.changeovers)

    @property
    def total_seconds(self) -> float:
        """The run's own figure; the span of its events where it has no end or was resumed."""
        run = self.run
        return run.seconds if run.seconds is not None and len(run.sessions) == 1 else run.span_s


def digest(run: RunView) -> Digest:
    """Read every job's result and put them side by side."""
    return Digest(
        run=run,
        sides=_sides(run),
        comparisons=tuple((job, read_comparison(job.result or {})) for job in run.finished("compare")),
        trainings=tuple((job, read_training(job)) for job in run.jobs_of_kind("train")),
        collections=tuple((job, facts(job.result or {})) for job in run.jobs_of_kind("collect")),
        others=tuple((job, facts(job.result or {})) for job in run.jobs if job.kind not in _KNOWN_KINDS),
        failed_jobs=tuple(job for job in run.jobs if job.state == "failed"),
        failed_phases=tuple(phase for phase in run.phases if phase.state == "failed"),
        dirty=tuple(c for c in run.changeovers if c.clearance is not None and not c.is_clean),
        without_verdict=tuple(c for c in run.changeovers if c.clearance is None),
    )


def _sides(run: RunView) -> tuple[Side, ...]:
    roles = _roles(run)
    profiles = {phase.name: phase.servers[-1].profile for phase in run.phases if phase.servers}
    colours = {"baseline": "c-1", "candidate": "c-2"}
    spare = iter(("c-1", "c-2", "c-4", "c-5", "c-3") if not roles else ("c-4", "c-5", "c-3"))
    sides = []
    for job in run.finished("bench"):
        reference = f"{job.phase}/{job.name}"
        role = roles.get(reference) or profiles.get(job.phase) or "benchmark"
        several = sum(other.phase == job.phase for other in run.finished("bench")) > 1
        colour = colours[role] if role in colours else next(spare, "c-5")
        sides.append(
            Side(reference if several else job.phase, role, colour, job, read_bench(job.result or {}))
        )
    return tuple(sides)


def _roles(run: RunView) -> dict[str, str]:
    """Which benchmark (``phase/job``) is the baseline and which the candidate, as the pipeline says."""
    asked = [job for phase in mappings(dig(run.spec, "phases")) for job in mappings(phase.get("jobs"))]
    asked = [job for job in asked if job.get("kind") == "compare"]
    asked += [dict(job.params) for job in run.jobs_of_kind("compare")]
    roles: dict[str, str] = {}
    for job in asked:
        for role in ("baseline", "candidate"):
            reference = text(job.get(role))
            if reference:
                roles.setdefault(reference, role)
    return roles
