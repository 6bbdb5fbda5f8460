"""The embedded server seen from outside: its command line, its gauges. Imports neither torch nor the
server.
"""

from __future__ import annotations

from changeover.engines.protocol import (
    LaunchSpec,
    LoadReading,
    ServerCommand,
    SpeculationMetrics,
    is_healthy,
    load_or_none,
)
from changeover.teardown.drains import drain_for, embedded_load
from changeover.teardown.footprint import Drain, StopPolicy


class EmbeddedEngine:
    kind = "embedded"
    server_module = None
    default_stop = (
        StopPolicy.GRACEFUL
    )  # ends in well under a second by itself, and writes captured states before it does
    speculation = SpeculationMetrics(
        drafts="changeover:spec_decode_num_drafts_total",
        draft_tokens="changeover:spec_decode_num_draft_tokens_total",
        accepted_tokens="changeover:spec_decode_num_accepted_tokens_total",
    )

    def refusals(self, launch: LaunchSpec) -> list[str]:
        found = []
        if launch.overlay is not None:
            found.append("capture_through: expected hook; saw patch, which is of SGLang's source alone")
        if launch.tensor_parallel != 1:
            found.append(
                f"tensor_parallel: the embedded engine runs on one device; saw {launch.tensor_parallel}"
            )
        if launch.memory_fraction is not None:
            found.append("memory_fraction: the embedded engine's caches grow with its requests; remove it")
        if launch.attention_backend is not None:
            found.append("attention_backend: the embedded engine has one; remove it")
        if launch.continuous_decode_steps is not None:
            found.append("continuous_decode_steps: is of SGLang; remove it")
        if launch.draft_top_k > 1:
            found.append(
                f"draft_top_k: expected 1, the embedded engine drafts chains alone; saw {launch.draft_top_k}"
            )
        if launch.profile == "capture" and launch.capture_dir is None:
            found.append("profile capture: expected a folder for the captured states; saw none")
        if launch.profile == "speculative" and launch.drafter is None:
            found.append("profile speculative: expected a drafter's folder; saw none")
        return found

    def server_command(self, launch: LaunchSpec) -> ServerCommand:
        argv = [launch.python, "-m", "changeover.engines.embedded"]
        argv += ["--model", str(launch.model_path), "--host", launch.host, "--port", str(launch.port)]
        if launch.served_name is not None:
            argv += ["--served-model-name", launch.served_name]
        argv += ["--device", launch.device, "--dtype", launch.dtype]
        if launch.context_length is not None:
            argv += ["--max-model-len", str(launch.context_length)]
        if launch.max_concurrency is not None:
            argv += ["--max-concurrency", str(launch.max_concurrency)]
        if launch.profile == "capture":
            argv += ["--capture-dir", str(launch.capture_dir)]
            if launch.aux_boundaries:
                argv += ["--aux-boundaries", ",".join(map(str, launch.aux_boundaries))]
        if launch.profile == "speculative":
            argv += ["--drafter", str(launch.drafter), "--draft-tokens", str(launch.draft_tokens)]
        argv += launch.flags
        return ServerCommand(
            argv=tuple(argv),
            env={"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **launch.env},
            ports=(launch.port,),
            url=f"http://{launch.host}:{launch.port}",
        )

    def claimed_share(self, launch: LaunchSpec) -> float | None:
        return None

    def is_ready(self, url: str) -> bool:
        return is_healthy(url)

    def load(self, url: str) -> LoadReading | None:
        return load_or_none(embedded_load, url)

    def drain(self, command: ServerCommand) -> Drain | None:
        return drain_for(self.kind, command.url)
