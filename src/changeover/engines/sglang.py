"""SGLang: its command lines, and what cannot work.

Read in SGLang 0.5.17 to 0.5.23: ``server_args.py`` (flags), ``hook_manager.py``; in 0.5.23 also
``tokenizer_manager.py`` (the drain on SIGTERM) and ``http_server.py``. Run with 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import json

from changeover.engines.flags import conflicts, value_after
from changeover.engines.protocol import (
    LaunchSpec,
    LoadReading,
    ServerCommand,
    SpeculationMetrics,
    is_healthy,
    load_or_none,
    side_environment,
)
from changeover.teardown.drains import drain_for, sglang_load
from changeover.teardown.footprint import Drain, StopPolicy

MAX_PORT = 65535
NCCL_PORT_OFFSET = 1000
"""Where we put ``--nccl-port``, so that the port is known and can be proven free afterwards."""

NOT_WITH_CAPTURE = {
    "--speculative-algorithm": "states are captured from the target alone",
    "--speculative-draft-model-path": "states are captured from the target alone",
    "--cuda-graph-max-bs": "CUDA graphs are off, hooks do not run in them",
    "--cuda-graph-bs": "CUDA graphs are off, hooks do not run in them",
    "--chunked-prefill-size": "a prompt in chunks is not captured",
    "--forward-hooks": "ours is set by it, and a second one would replace it",
}


class SglangEngine:
    kind = "sglang"
    server_module = "sglang.srt.entrypoints.http_server"
    default_stop = (
        StopPolicy.FAST
    )  # its own shutdown takes 4.2 to 4.6 s from idle to 0 MiB (H200), the kernel's 0.1 to 0.7 s
    # Its gauge is tokens / verify steps of late. Each answer says what was drafted for it from 0.5.19 on
    # (sglext.spec_tokens_details, asked for by return_spec_tokens_details); before, its counter of verify steps and the
    # tokens generated do (observability/metrics_collector.py, 0.5.15 on).
    speculation = SpeculationMetrics(
        None,
        None,
        None,
        acceptance_length="sglang:spec_accept_length",
        by_request=True,
        verify_steps="sglang:spec_verify_calls_total",
    )

    def refusals(self, launch: LaunchSpec) -> list[str]:
        found = []
        if launch.port + NCCL_PORT_OFFSET > MAX_PORT:
            found.append(f"port: expected at most {MAX_PORT - NCCL_PORT_OFFSET}; saw {launch.port}")
        if launch.profile == "capture":
            if launch.capture_dir is None or not launch.aux_boundaries:
                found.append("profile capture: expected a folder and aux_boundaries; saw none")
            if "PYTHONPATH" in launch.env:
                found.append("profile capture: PYTHONPATH carries our hook; remove it from env")
            if "CHANGEOVER_CAPTURE" in launch.env:
                found.append("profile capture: CHANGEOVER_CAPTURE is ours to set; remove it from env")
            found += conflicts(launch.flags, "capture", NOT_WITH_CAPTURE)
        algorithm = value_after(launch.flags, "--speculative-algorithm")
        if algorithm is not None and algorithm != "EAGLE3":
            # An EAGLE-3 drafter under EAGLE loads without an error and accepts nothing (sglang PR #21272).
            found.append(f"--speculative-algorithm: expected EAGLE3; saw {algorithm}")
        # the root, its branches, and as many of each of the best at every further step (eagle_utils.py)
        most = 1 + launch.draft_top_k + (launch.draft_tokens - 1) * launch.draft_top_k**2
        if launch.verify_tokens is not None and launch.verify_tokens > most:
            found.append(
                f"verify_tokens: expected at most {most}, the tree of {launch.draft_tokens} tokens with "
                f"{launch.draft_top_k} branches; saw {launch.verify_tokens}"
            )
        if launch.profile == "speculative" and launch.drafter is None:
            # Without a draft path SGLang loads the target twice (sglang #36528).
            found.append("profile speculative: expected a drafter's folder; saw none")
        return found

    def server_command(self, launch: LaunchSpec) -> ServerCommand:
        nccl_port = launch.port + NCCL_PORT_OFFSET
        argv = [launch.python, "-m", "sglang.launch_server", "--model-path", str(launch.model_path)]
        argv += ["--host", launch.host, "--port", str(launch.port), "--nccl-port", str(nccl_port)]
        argv += ["--tp-size", str(launch.tensor_parallel), "--enable-metrics"]
        if launch.served_name is not None:
            argv += ["--served-model-name", launch.served_name]
        if launch.dtype != "auto":
            argv += ["--dtype", launch.dtype]
        if launch.memory_fraction is not None:
            argv += ["--mem-fraction-static", str(launch.memory_fraction)]
        if launch.context_length is not None:
            argv += ["--context-length", str(launch.context_length)]
        if launch.max_concurrency is not None:
            argv += ["--max-running-requests", str(launch.max_concurrency)]
        if launch.attention_backend is not None:
            argv += ["--attention-backend", launch.attention_backend]
        if launch.continuous_decode_steps is not None:
            argv += ["--num-continuous-decode-steps", str(launch.continuous_decode_steps)]
        if launch.profile == "capture":
            # The radix cache hides rows of shared prefixes, chunked prefill splits rows, graphs skip hooks.
            argv += ["--disable-radix-cache", "--disable-cuda-graph", "--chunked-prefill-size", "-1"]
            if launch.overlay is None:
                argv += ["--forward-hooks", json.dumps([_hook(launch)])]
        if launch.profile == "speculative":
            argv += ["--speculative-algorithm", "EAGLE3"]
            argv += ["--speculative-draft-model-path", str(launch.drafter)]
            argv += ["--speculative-num-steps", str(launch.draft_tokens)]
            argv += ["--speculative-eagle-topk", str(launch.draft_top_k)]
            argv += ["--speculative-num-draft-tokens", str(launch.verify_tokens or launch.draft_tokens + 1)]
        argv += launch.flags
        return ServerCommand(
            argv=tuple(argv),
            # Worker titles would otherwise overwrite the environment that proves whose they are.
            env={
                **(_capture_environment(launch) if launch.profile == "capture" else {}),
                "SPT_NOENV": "1",
                "HF_HUB_OFFLINE": "1",
                **launch.env,
            },
            ports=(launch.port, nccl_port),
            url=f"http://{launch.host}:{launch.port}",
            notes=("SIGTERM drains without a bound and refuses no new request: stop the senders first",),
        )

    def claimed_share(self, launch: LaunchSpec) -> float | None:
        """None: ``--mem-fraction-static`` is a share of what is free when it starts."""
        return None

    def is_ready(self, url: str) -> bool:
        return is_healthy(url)

    def load(self, url: str) -> LoadReading | None:
        return load_or_none(sglang_load, url)

    def drain(self, command: ServerCommand) -> Drain | None:
        return drain_for(self.kind, command.url)


def _capture_environment(launch: LaunchSpec) -> dict[str, str]:
    if launch.overlay is None:
        return side_environment()
    return {**side_environment(launch.overlay), "CHANGEOVER_CAPTURE": json.dumps(_capture(launch))}


def _capture(launch: LaunchSpec) -> dict[str, object]:
    return {"folder": str(launch.capture_dir), "boundaries": list(launch.aux_boundaries)}


def _hook(launch: LaunchSpec) -> dict[str, object]:
    """On the logits processor, which every model calls with the rows after the final norm and the captured ones."""
    return {
        "name": "changeover",
        "target_modules": ["*logits_processor"],
        "hook_factory": "changeover_hooks:capture",
        "config": _capture(launch),
    }
