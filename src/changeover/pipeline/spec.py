"""What a user writes: the pipeline file. Unknown keys are refused; the published JSON Schema is made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from changeover.machine.errors import InvalidInput
from changeover.pipeline.secrets import Arguments, Environment
from changeover.pipeline.spec_server import (
    EngineSpec,
    Name,
    NcclSpec,
    PositiveFloat,
    PositiveInt,
    Section,
    ServerSpec,
)

__all__ = ["EngineSpec", "Name", "NcclSpec", "PositiveFloat", "PositiveInt", "Section", "ServerSpec"]


class ModelFactsSpec(Section):
    """What ``plan`` needs to know of a model whose folder is not on this machine."""

    layers: PositiveInt
    hidden: PositiveInt
    vocab: PositiveInt
    weights_gib: PositiveFloat
    model_type: str = Field(
        "", description="As its config.json says; some families number layers differently."
    )


class ModelSpec(Section):
    """The target model."""

    path: str = Field(
        description="A local Hugging Face folder, or the built-in name `smollm2-135m-instruct`."
    )
    facts: ModelFactsSpec | None = Field(
        None, description="Used by `plan` when the folder is not on this machine."
    )


class BenchJob(Section):
    """Load the phase's server, closed loop, one level of concurrency after the other."""

    kind: Literal["bench"]
    name: Name = "bench"
    prompts: str | None = Field(None, description="Default: the pipeline's prompts.")
    concurrency: tuple[PositiveInt, ...] = (1, 4)
    requests: PositiveInt | Literal["all"] = Field(
        8, description="Requests per level and repeat; `all`: every prompt that is left, once."
    )
    max_tokens: PositiveInt = 64
    repeats: PositiveInt = 3
    warmup: Annotated[int, Field(ge=0)] = Field(
        2, description="Requests sent before measuring, with other prompts."
    )
    held_out_only: bool = Field(False, description="Use only prompts that training never sees.")


class CollectJob(Section):
    """Let the model answer the prompts and store the hidden states of prompt and answer."""

    kind: Literal["collect"]
    name: Name = "collect"
    prompts: str | None = Field(None, description="Default: the pipeline's prompts.")
    samples: PositiveInt | None = Field(None, description="How many prompts; default: all.")
    max_tokens: PositiveInt = 128
    concurrency: PositiveInt = 16
    expected_tokens: PositiveInt | None = Field(
        None, description="Tokens in all, for `plan`; default: an estimate."
    )
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="Share of prompts kept from training."
    )
    disk_reserve_gib: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Stop cleanly when less is free."
    )
    staging_budget_mib: PositiveInt = Field(
        512, description="Bytes of captured files that may wait to be stored."
    )


class TrainJob(Section):
    """Train an EAGLE-3 drafter on collected states."""

    kind: Literal["train"]
    name: Name = "train"
    states: str = Field(description="A collect job (`phase/job`) or a states folder.")
    epochs: PositiveInt = 3
    learning_rate: PositiveFloat = 2e-4
    batch_tokens: PositiveInt = 512
    ttt_steps: PositiveInt = Field(3, description="Length of training-time test.")
    draft_vocab_size: PositiveInt = 4096
    eval_draft_tokens: PositiveInt = Field(3, description="Draft length of the simulated acceptance length.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every_s: PositiveFloat = 60.0


class CompareJob(Section):
    """Compare two benchmarks of this run."""

    kind: Literal["compare"]
    name: Name = "compare"
    baseline: str = Field(description="A bench job as `phase/job`.")
    candidate: str = Field(description="A bench job as `phase/job`.")


class CommandJob(Section):
    """Any command of the user's; the server's address is in CHANGEOVER_SERVER_URL."""

    kind: Literal["command"]
    name: Name
    argv: Annotated[Arguments, Field(min_length=1)]
    env: Environment = Field(default_factory=dict)


class HoldJob(Section):
    """Keep the phase's server up until the run is stopped (Ctrl-C, `changeover stop`)."""

    kind: Literal["hold"]
    name: Name = "hold"


JobSpec = Annotated[
    BenchJob | CollectJob | TrainJob | CompareJob | CommandJob | HoldJob, Field(discriminator="kind")
]


class PhaseSpec(Section):
    """One server with the jobs against it, or jobs alone."""

    name: Name
    server: ServerSpec | None = None
    jobs: Annotated[tuple[JobSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _jobs_fit_the_server(self) -> PhaseSpec:
        names = ["server", "ahead", *(job.name for job in self.jobs)]
        if len(set(names)) != len(names):
            raise ValueError(
                f"phase `{self.name}` has two processes of one name (`server` and `ahead` are ours): {', '.join(names)}"
            )
        for job in self.jobs:
            if job.kind in ("bench", "collect", "hold") and self.server is None:
                raise ValueError(f"job `{job.name}` ({job.kind}) needs a `server:` in phase `{self.name}`")
            if job.kind == "collect" and self.server is not None and self.server.profile != "capture":
                raise ValueError(f"job `{job.name}` (collect) needs a server with profile `capture`")
        return self


class TeardownSpec(Section):
    """How long each stage of a changeover may take; each ends earlier by proof. All draw from the total."""

    total_timeout_s: PositiveFloat = 600.0
    drain_timeout_s: PositiveFloat = 60.0
    drain_cap_s: PositiveFloat = Field(
        300.0, description="While requests go on ending, a drain may last longer than its time, up to this."
    )
    terminate_timeout_s: PositiveFloat = 60.0
    kill_timeout_s: PositiveFloat = 60.0


class EstimatesSpec(Section):
    """Rates from which `plan` makes minutes; what is not given is said to be unknown."""

    generated_tokens_per_s: PositiveFloat | None = None
    captured_tokens_per_s: PositiveFloat | None = None
    trained_tokens_per_s: PositiveFloat | None = None
    load_mib_per_s: PositiveFloat | None = None


class PipelineSpec(Section):
    """The whole file."""

    name: Name
    model: ModelSpec
    prompts: str = Field(
        description="JSONL (`messages` or ShareGPT `conversations`, or `text`) or plain text."
    )
    seed: int = 0
    engine: EngineSpec = Field(default_factory=lambda: EngineSpec.model_validate({}))
    teardown: TeardownSpec = TeardownSpec()
    estimates: EstimatesSpec = EstimatesSpec()
    phases: Annotated[tuple[PhaseSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _references_point_backwards(self) -> PipelineSpec:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"two phases have one name: {', '.join(names)}")
        seen: dict[str, str] = {}
        for phase in self.phases:
            if phase.server is not None and phase.server.drafter is not None:
                _check_reference(
                    phase.server.drafter, seen, ("train",), f"phases.{phase.name}.server.drafter"
                )
            for job in phase.jobs:
                where = f"phases.{phase.name}.jobs.{job.name}"
                if isinstance(job, TrainJob):
                    _check_reference(job.states, seen, ("collect",), f"{where}.states")
                if isinstance(job, CompareJob):
                    for field in ("baseline", "candidate"):
                        reference = getattr(job, field)
                        if reference not in seen:
                            raise ValueError(
                                f"{where}.{field}: expected an earlier bench job, one of "
                                f"{_known(seen, ('bench',))}; saw `{reference}`"
                            )
                        _check_reference(reference, seen, ("bench",), f"{where}.{field}")
                seen[f"{phase.name}/{job.name}"] = job.kind
        return self


def held_out_share(spec: PipelineSpec) -> float:
    """The share of prompts that the pipeline's collection keeps from training, for a bench job's `held_out_only`.

    Raises InvalidInput when the pipeline has no collection.
    """
    shares = [job.held_out for phase in spec.phases for job in phase.jobs if isinstance(job, CollectJob)]
    if not shares:
        raise InvalidInput(
            expected="a collect job in the pipeline, for `held_out_only`",
            seen="none",
            todo="Remove `held_out_only`, or give the bench job a file of prompts of its own.",
        )
    return shares[0]


def _known(seen: dict[str, str], kinds: tuple[str, ...]) -> str:
    return (
        ", ".join(f"`{name}`" for name, kind in seen.items() if kind in kinds)
        or "none (there is none before it)"
    )


def is_path(reference: str) -> bool:
    """Whether a reference names a folder (absolute, or starting with a dot) rather than a job as ``phase/job``."""
    return reference.startswith(("/", "./", "../", "~"))


def _check_reference(reference: str, seen: dict[str, str], kinds: tuple[str, ...], where: str) -> None:
    if is_path(reference):
        return
    if seen.get(reference) not in kinds:
        raise ValueError(
            f"{where}: expected an earlier {' or '.join(kinds)} job, one of {_known(seen, kinds)}, or a folder "
            f"(starting with / or ./); saw `{reference}`"
        )
