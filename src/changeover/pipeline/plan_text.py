"""A plan for people to read."""

from __future__ import annotations

import shlex

from changeover.pipeline.estimates import Estimate, gib
from changeover.pipeline.plan import Plan, PlannedJob, PlannedServer


def plan_text(plan: Plan) -> str:
    """The whole plan in lines: what will happen, what it needs, what speaks against it."""
    model = plan.model
    lines = [
        f"{plan.name}: {model.path}",
        f"  {model.layers} layers, hidden {model.hidden}, vocabulary {model.vocab}, "
        f"weights {gib(model.weights_bytes)}",
    ]
    for phase in plan.phases:
        lines += ["", f"phase {phase.name}", *_server_lines(phase.server)]
        lines += [line for job in phase.jobs for line in _job_lines(job)]
        lines.append(
            "  then      changeover: drain, stop, verify; the next phase starts only when it is clean"
        )
    known = [
        estimate.value
        for phase in plan.phases
        for estimate in (
            *(job.minutes for job in phase.jobs),
            *((phase.server.load_minutes,) if phase.server is not None else ()),
        )
    ]
    total = sum(value for value in known if value is not None)
    unknown = " (some parts unknown)" if None in known else ""
    lines += ["", f"disk      {gib(plan.disk_bytes)}", f"time      {total:.0f} min{unknown}"]
    lines += [f"REFUSED   {refusal}" for refusal in plan.refusals]
    return "\n".join(lines)


def _server_lines(server: PlannedServer | None) -> list[str]:
    if server is None:
        return ["  server    none"]
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(server.env.items()))
    return [
        f"  server    {server.engine}, profile {server.profile}, ports {', '.join(map(str, server.ports))}, "
        f"{gib(server.weights_bytes_per_device)} of weight files a device",
        f"  command   {(env + ' ') if env else ''}{shlex.join(server.argv)}",
        f"  load      {_minutes(server.load_minutes)}",
    ]


def _job_lines(job: PlannedJob) -> list[str]:
    size = f", {gib(job.bytes)}" if job.bytes else ""
    return [f"  {job.kind:<9} {job.does}{size}", f"            {_minutes(job.minutes)}"]


def _minutes(estimate: Estimate) -> str:
    if estimate.value is None:
        return f"time {estimate.basis}"
    return f"{estimate.value:.1f} min ({estimate.basis})" if estimate.value else "no time to speak of"
