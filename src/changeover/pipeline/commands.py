"""From the user's words about a server to what an engine needs to know to start it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from changeover.engines.models import ModelFacts, weight_files
from changeover.engines.patch.installed import find_sglang
from changeover.engines.patch.overlay import build_overlay
from changeover.engines.protocol import LaunchSpec, ServerCommand
from changeover.engines.registry import get_engine
from changeover.pipeline.context import RunContext
from changeover.pipeline.spec import PipelineSpec, ServerSpec, is_path
from changeover.states.conventions import default_boundaries

CAPTURE = "capture"


def server_command(context: RunContext, index: int, server: ServerSpec) -> ServerCommand:
    """The command of a phase's server, for now: its port is free, its capture folder exists."""
    folder = context.folder.server(index, context.spec.phases[index].name)
    if server.profile == "capture":
        capture_dir(context, index).mkdir(parents=True, exist_ok=True)
    drafter = context.made(server.drafter, "drafter") if server.drafter is not None else None
    launch = launch_spec(context.spec, server, context.model, folder, drafter, server.port or free_port())
    if launch.overlay is not None:
        build_overlay(find_sglang(launch.python), launch.overlay)
    return get_engine(context.spec.engine.kind).server_command(launch)


def planned_launch(spec: PipelineSpec, server: ServerSpec, model: ModelFacts) -> LaunchSpec:
    """The same before a run exists: folders that the run will make are named by what makes them."""
    drafter = None
    if server.drafter is not None:
        drafter = (
            Path(server.drafter) if is_path(server.drafter) else Path("RUN") / server.drafter / "drafter"
        )
    return launch_spec(spec, server, model, Path("RUN"), drafter, server.port or free_port())


def launch_spec(
    spec: PipelineSpec,
    server: ServerSpec,
    model: ModelFacts,
    folder: Path,
    drafter: Path | None,
    port: int,
) -> LaunchSpec:
    """What an engine is told; ``folder`` is the server's own."""
    engine = spec.engine
    capturing = server.profile == "capture"
    return LaunchSpec(
        profile=server.profile,
        model_path=Path(model.path),
        port=port,
        python=engine.python or sys.executable,
        served_name=spec.name,
        device=engine.device,
        dtype=engine.dtype,
        tensor_parallel=engine.tensor_parallel,
        memory_fraction=engine.memory_fraction,
        context_length=engine.context_length,
        max_concurrency=engine.max_concurrency,
        capture_dir=folder / CAPTURE if capturing else None,
        aux_boundaries=aux_boundaries(server, model) if capturing else (),
        overlay=folder / "overlay" if server.capture_through == "patch" else None,
        layers=model.layers,
        drafter=drafter,
        draft_tokens=server.draft_tokens,
        draft_top_k=server.draft_top_k,
        verify_tokens=server.verify_tokens,
        attention_backend=engine.attention_backend,
        continuous_decode_steps=engine.continuous_decode_steps,
        flags=engine.flags + server.flags,
        env={**engine.nccl.environment(), **engine.env, **server.env},
    )


def server_files(context: RunContext, server: ServerSpec) -> list[Path]:
    """What a server will load: the target's weights, and the drafter's where it is there already."""
    files = weight_files(context.model.path)
    if server.drafter is not None:
        files += weight_files(context.made(server.drafter, "drafter"))
    return files


def capture_dir(context: RunContext, index: int) -> Path:
    """Where the capture server of this phase puts its files."""
    return context.folder.server(index, context.spec.phases[index].name) / CAPTURE


def aux_boundaries(server: ServerSpec, model: ModelFacts) -> tuple[int, ...]:
    """The boundaries to record: the user's, else EAGLE-3's usual three."""
    return server.aux_boundaries or default_boundaries(model.layers)


def free_port() -> int:
    """A port that nobody listens on now; the server that gets it is expected to bind it within seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
