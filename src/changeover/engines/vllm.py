"""vLLM: its command lines, and what cannot work.

Read in vLLM 0.32 and 0.33: ``entrypoints/launcher.py`` and ``v1/engine/utils.py`` (shutdown), ``v1/worker/gpu``
(``extract_hidden_states``, EAGLE-3 layer ids). Run with 0.32 on a CPU.
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
from changeover.teardown.drains import drain_for, vllm_load
from changeover.teardown.footprint import Drain, StopPolicy

SHUTDOWN_TIMEOUT_S = 60
LEAST_DEFAULT_SHARE = 0.9
"""0.92 in 0.32 (``config/cache.py``), 0.9 before."""
NOT_WITH_CAPTURE = {
    "--enable-prefix-caching": "rows of a cached prefix are not computed again, and would be missing",
    "--enable-chunked-prefill": "chunks drop or repeat rows (vllm #39949)",
    "--kv-transfer-config": "ours is set by it, and a second one would replace it",
}


class VllmEngine:
    kind = "vllm"
    server_module = "vllm.entrypoints.openai.api_server"
    default_stop = StopPolicy.GRACEFUL  # ends in 0.5 to 0.7 s by itself and removes its segments
    speculation = SpeculationMetrics(
        drafts="vllm:spec_decode_num_drafts_total",
        draft_tokens="vllm:spec_decode_num_draft_tokens_total",
        accepted_tokens="vllm:spec_decode_num_accepted_tokens_total",
    )

    def refusals(self, launch: LaunchSpec) -> list[str]:
        found = []
        if launch.overlay is not None:
            found.append("capture_through: expected hook; saw patch, which is of SGLang's source alone")
        if launch.profile != "production":
            found += conflicts(
                launch.flags, launch.profile, {"--speculative-config": "it is set by the profile"}
            )
        if launch.profile == "capture":
            found += conflicts(launch.flags, "capture", NOT_WITH_CAPTURE)
        if launch.profile == "capture" and launch.capture_dir is None:
            found.append("profile capture: expected a folder for the captured states; saw none")
        if launch.profile == "capture" and (launch.layers is None or launch.layers in launch.aux_boundaries):
            found.append(
                "profile capture: the last layer's output is always captured; leave it out of aux_boundaries"
            )
        if launch.profile == "capture" and "PYTHONPATH" in launch.env:
            found.append("profile capture: PYTHONPATH carries our connector; remove it from env")
        if launch.profile == "capture" and not launch.aux_boundaries:
            found.append("profile capture: expected aux_boundaries; saw none")
        if launch.profile == "speculative" and launch.drafter is None:
            found.append("profile speculative: expected a drafter's folder; saw none")
        if launch.continuous_decode_steps is not None:
            found.append("continuous_decode_steps: is of SGLang; remove it")
        if launch.draft_top_k > 1:
            found.append("draft_top_k: expected 1, vLLM drafts chains alone; saw " + str(launch.draft_top_k))
        if launch.device != "auto":
            found.append("device: chosen by vLLM's own build; remove it")
        return found

    def server_command(self, launch: LaunchSpec) -> ServerCommand:
        argv = [launch.python, "-m", "vllm.entrypoints.cli.main", "serve", str(launch.model_path)]
        argv += ["--host", launch.host, "--port", str(launch.port)]
        argv += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        # The default 0 gives workers on CUDA no time to free their memory before SIGKILL.
        argv += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
        if launch.served_name is not None:
            argv += ["--served-model-name", launch.served_name]
        if launch.dtype != "auto":
            argv += ["--dtype", launch.dtype]
        if launch.memory_fraction is not None:
            argv += ["--gpu-memory-utilization", str(launch.memory_fraction)]
        if launch.context_length is not None:
            argv += ["--max-model-len", str(launch.context_length)]
        if launch.max_concurrency is not None:
            argv += ["--max-num-seqs", str(launch.max_concurrency)]
        if launch.attention_backend is not None:
            argv += ["--attention-backend", launch.attention_backend]
        if launch.profile == "capture":
            ids = _layer_ids(launch)
            argv += ["--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"]
            argv += ["--speculative-config", json.dumps(_extraction(ids)), "--kv-transfer-config"]
            argv += [json.dumps(_connector(str(launch.capture_dir)))]
        if launch.profile == "speculative":
            config = {
                "method": "eagle3",
                "model": str(launch.drafter),
                "num_speculative_tokens": launch.draft_tokens,
            }
            argv += ["--speculative-config", json.dumps(config)]
        argv += launch.flags
        return ServerCommand(
            argv=tuple(argv),
            env={
                **(side_environment() if launch.profile == "capture" else {}),
                "SPT_NOENV": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(SHUTDOWN_TIMEOUT_S),
                **launch.env,
            },
            ports=(launch.port,),
            url=f"http://{launch.host}:{launch.port}",
        )

    def claimed_share(self, launch: LaunchSpec) -> float | None:
        """It ends where less is free than ``--gpu-memory-utilization`` of the whole (``v1/worker/utils.py``)."""
        given = value_after(launch.flags, "--gpu-memory-utilization")
        try:
            return float(given) if given is not None else launch.memory_fraction or LEAST_DEFAULT_SHARE
        except ValueError:
            return None  # its own argument parser says what is wrong with it

    def is_ready(self, url: str) -> bool:
        return is_healthy(url)

    def load(self, url: str) -> LoadReading | None:
        return load_or_none(vllm_load, url)

    def drain(self, command: ServerCommand) -> Drain | None:
        return drain_for(self.kind, command.url)


def _layer_ids(launch: LaunchSpec) -> list[int]:
    """The boundaries, and the last layer's output, before the final norm, always as one more at the end.

    vLLM gives each layer once and in the model's order; so the last boundary must not be the last layer's own.
    """
    assert launch.layers is not None  # refused otherwise
    return [*launch.aux_boundaries, launch.layers]


def _extraction(boundaries: list[int]) -> dict[str, object]:
    """``extract_hidden_states`` counts layers as boundaries: id L is the last layer's output, before the
    final norm.
    """
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}},
    }


def _connector(folder: str) -> dict[str, object]:
    return {
        "kv_connector": "ChangeoverConnector",
        "kv_connector_module_path": "changeover_connector",
        "kv_role": "kv_producer",
        # a file comes by a rename, and needs no lock beside it
        "kv_connector_extra_config": {"shared_storage_path": folder, "use_synchronization_lock": False},
    }
