"""What a user writes about engines and servers; a part of the pipeline file (``spec``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from changeover.pipeline.secrets import Arguments, Environment

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the file: unknown keys are an error, values do not change after reading."""

    # a refused value may be the secret itself: it is not repeated
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class NcclSpec(Section):
    """How the ranks of a server talk (NCCL's own environment variables, under their own names in lower case)."""

    proto: Literal["LL", "LL128", "Simple"] | None = Field(None, description="NCCL_PROTO.")
    algo: str | None = Field(None, description="NCCL_ALGO, such as Ring, Tree, NVLS.")
    min_channels: PositiveInt | None = Field(None, description="NCCL_MIN_NCHANNELS.")
    max_channels: PositiveInt | None = Field(None, description="NCCL_MAX_NCHANNELS.")

    def environment(self) -> dict[str, str]:
        """The variables that are set."""
        names = {
            "NCCL_PROTO": self.proto,
            "NCCL_ALGO": self.algo,
            "NCCL_MIN_NCHANNELS": self.min_channels,
            "NCCL_MAX_NCHANNELS": self.max_channels,
        }
        return {name: str(value) for name, value in names.items() if value is not None}


class EngineSpec(Section):
    """Which program serves the model, and how it is started; a server may add flags and environment of its own."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    python: str | None = Field(
        None, description="Interpreter of the engine's own environment; default: this one."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Embedded engine only.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel: PositiveInt = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    context_length: PositiveInt | None = None
    max_concurrency: PositiveInt | None = Field(
        None, description="Requests at once; default: the engine's own."
    )
    attention_backend: str | None = Field(None, description="SGLang and vLLM: as the engine names it.")
    continuous_decode_steps: PositiveInt | None = Field(
        None, description="SGLang: decode steps between two looks at what waits."
    )
    nccl: NcclSpec = NcclSpec.model_validate({})
    flags: Arguments = Field((), description="Further arguments, passed as they are, one list item each.")
    env: Environment = Field(default_factory=dict, description="Further environment variables of the server.")

    @model_validator(mode="after")
    def _says_nothing_twice(self) -> EngineSpec:
        twice = sorted(self.nccl.environment().keys() & self.env.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)}: both in `engine.nccl` and in `engine.env`; remove one")
        return self


class ServerSpec(Section):
    """One server: the engine with a profile."""

    profile: Literal["production", "capture", "speculative"]
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(None, description="Default: a free one.")
    aux_boundaries: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="Profile `capture`: which boundaries to record; default 2, L//2, L-3."
    )
    capture_through: Literal["hook", "patch"] = Field(
        "hook",
        description="Profile `capture` of SGLang: its `--forward-hooks`, or our patch of the model's source, in a copy "
        "beside the installed package, for versions and models that no hook reaches.",
    )
    drafter: str | None = Field(
        None, description="Profile `speculative`: a train job (`phase/job`) or a folder."
    )
    draft_tokens: PositiveInt = Field(
        3, description="Profile `speculative`: tokens drafted before each verification."
    )
    draft_top_k: PositiveInt = Field(
        1, description="Profile `speculative` of SGLang: branches at each drafted token; 1 is a chain."
    )
    verify_tokens: PositiveInt | None = Field(
        None,
        description="Profile `speculative` with `draft_top_k` above 1: tokens of the tree that are verified.",
    )
    stall_s: PositiveFloat = Field(
        180.0, description="Loading counts as stalled when nothing has moved for so long."
    )
    stop: Literal["graceful", "fast"] | None = Field(
        None,
        description="How it is ended once it is proven idle: by its own shutdown, or at once; default: the engine's.",
    )
    flags: Arguments = ()
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_its_profile(self) -> ServerSpec:
        if self.profile == "speculative" and self.drafter is None:
            raise ValueError(
                "profile `speculative` needs `drafter:` (a train job as `phase/job`, or a folder)"
            )
        if self.profile != "speculative" and self.drafter is not None:
            raise ValueError(f"profile `{self.profile}` does not use a drafter; remove `drafter:`")
        if self.draft_top_k > 1 and self.verify_tokens is None:
            raise ValueError(
                "`draft_top_k` above 1 drafts a tree; say how much of it is verified: `verify_tokens:`"
            )
        if self.draft_top_k == 1 and self.verify_tokens is not None:
            raise ValueError("a chain is verified whole (`draft_tokens` + 1); remove `verify_tokens:`")
        if self.profile != "speculative" and self.draft_top_k > 1:
            raise ValueError(f"profile `{self.profile}` drafts nothing; remove `draft_top_k:`")
        if self.profile != "capture" and self.aux_boundaries is not None:
            raise ValueError(f"profile `{self.profile}` captures nothing; remove `aux_boundaries:`")
        if self.profile != "capture" and self.capture_through != "hook":
            raise ValueError(f"profile `{self.profile}` captures nothing; remove `capture_through:`")
        return self
