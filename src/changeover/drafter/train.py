"""Train a drafter from stored states, from the first step to the exported folder.

Everything that decides a run is in TrainParams and the store: the order of samples comes from (seed, epoch),
so a checkpoint's position is (epoch, batch), and a run that was killed and resumed ends with the same
weights, bit for bit on CPU, as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from changeover.drafter.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from changeover.drafter.corpus import Corpus, open_corpus
from changeover.drafter.data import pack, plan_epoch, read_ahead
from changeover.drafter.evaluate import Judge, frozen_for, summarise
from changeover.drafter.export import export_drafter, target_identity
from changeover.drafter.model import Drafter, shape_for_target
from changeover.drafter.optimizer import Optimizer, learning_rate_factor
from changeover.drafter.params import TrainParams
from changeover.drafter.replay import acceptance_length
from changeover.drafter.start import fit_start
from changeover.drafter.step import Frozen, ttt_loss
from changeover.drafter.stop import stop_requests
from changeover.drafter.target import (
    TargetFacts,
    TargetWeights,
    forced_token_ids,
    read_target_facts,
    read_target_weights,
)
from changeover.drafter.vocabulary import DraftVocabulary, choose_vocabulary, count_supervised
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.progress import Progress, ProgressSink
from changeover.states.store import Sample

__all__ = ["TrainParams", "TrainingStopped", "train"]

CLIP_NORM = 1.0
# fp32 on processors: bf16 products are emulated where there is no AVX512-BF16 or AMX
COMPUTE_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
STEP_DECAY = 0.8
CHUNK_TARGETS = {"cpu": 128, "cuda": 1024}  # a chunk's logits stay in the CPU's cache, fill the GPU
CURVE_POINTS = 300
START_SAMPLES = 2000  # more do not move the starting point


class TrainingStopped(ChangeoverError):  # noqa: N818 - read as a sentence, as its siblings are
    """SIGTERM came: the checkpoint is written, and the run can be resumed."""

    exit_code = 130


@dataclass
class Curves:
    """What the run has seen so far; part of the checkpoint."""

    loss: list[list[float]] = field(default_factory=list)  # [step, loss], every step
    step_kl: list[float] = field(default_factory=list)  # of the last step
    held_out: list[list[float]] = field(default_factory=list)  # [step, simulated acceptance length]
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What a run is made of, before its first step."""

    corpus: Corpus
    facts: TargetFacts
    target: TargetWeights
    vocabulary: DraftVocabulary
    coverage: dict[str, float | None]
    batches: list[list[int]]  # of all epochs, one after the other; positions in the reader
    device: str


def prepare(params: TrainParams) -> Setting:
    """Read the target and the store, choose the draft vocabulary, plan every batch of the run."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if params.device == "auto" else params.device
    facts = read_target_facts(params.model)
    corpus = open_corpus(params.states, facts)
    target = read_target_weights(params.model, dtype=torch.float32, device=device)
    counts = count_supervised(corpus.token_pairs(corpus.train), facts.vocab)
    vocabulary = choose_vocabulary(counts, params.draft_vocab_size, forced_token_ids(params.model, facts))
    held_out_counts = count_supervised(corpus.token_pairs(corpus.held_out), facts.vocab)
    rows = corpus.train_rows()
    batches = [
        [corpus.train[index] for index in batch]
        for epoch in range(params.epochs)
        for batch in plan_epoch(rows, params.batch_tokens, seed=params.seed, epoch=epoch)
    ]
    coverage = {
        "train": vocabulary.coverage(counts),
        "held_out": vocabulary.coverage(held_out_counts) if corpus.held_out else None,
    }
    return Setting(corpus, facts, target, vocabulary, coverage, batches, device)


def train(params: TrainParams, on_progress: ProgressSink) -> dict[str, Any]:
    """Train and export to ``params.out/drafter``; returns the result as JSON.

    Raises InvalidInput for states, model or parameters that do not fit together, TrainingStopped after
    SIGTERM.
    """
    if params.threads:
        torch.set_num_threads(params.threads)
    setting = prepare(params)
    run = Run(params, setting)
    with stop_requests() as stop_asked:
        run.steps(stop_asked, on_progress)
    out = export_drafter(
        params.out / "drafter",
        run.drafter,
        setting.vocabulary,
        setting.facts,
        provenance={"states": str(params.states), "steps": len(setting.batches), "seed": params.seed},
    )
    evaluation = summarise(run.judge.replays(run.drafter, run.frozen), draft_tokens=params.eval_draft_tokens)
    return _result(params, setting, run, evaluation if run.judge.samples else None, str(out))


class Run:
    """The moving parts: weights, optimizer, curves; from the newest checkpoint if there is one."""

    def __init__(self, params: TrainParams, setting: Setting) -> None:
        self.params = params
        self.setting = setting
        self.frozen: Frozen = frozen_for(setting.target, setting.vocabulary, COMPUTE_DTYPES[setting.device])
        self.drafter = Drafter(
            shape_for_target(setting.facts, setting.vocabulary.size, setting.corpus.boundaries)
        )
        self.curves = Curves()
        self.done = 0
        self.judge = Judge(
            setting.corpus.read(setting.corpus.held_out),
            setting.target,
            setting.vocabulary,
            setting.facts.eos_token_ids,
            params.eval_draft_tokens,
        )
        self._root = params.out / "checkpoints"
        checkpoint = newest_checkpoint(self._root) if params.resume else None
        if checkpoint is None:
            samples = setting.corpus.read(setting.corpus.train[:START_SAMPLES])
            fit_start(self.drafter, setting.target, setting.vocabulary, samples, seed=params.seed)
        self.drafter.to(setting.device)
        self.optimizer = Optimizer(self.drafter, params.learning_rate)
        if checkpoint is not None:
            self._restore(checkpoint)

    def steps(self, stop_asked: Callable[[], bool], on_progress: ProgressSink) -> None:
        """All steps that are left, with evaluations and checkpoints between them."""
        total, first = len(self.setting.batches), self.done
        judge_at = {round(total * (i + 1) / self.params.evaluations) for i in range(self.params.evaluations)}
        if first == 0:
            self._judge()
        began = saved_at = time.monotonic()
        tokens_before = self.curves.tokens
        for samples in read_ahead(self.setting.corpus.reader, self.setting.batches[first:]):
            started, cpu_started = time.monotonic(), time.process_time()
            loss = self._step(samples)
            if self.done in judge_at:
                self._judge()
            now = time.monotonic()
            self.curves.seconds += now - started
            self.curves.cpu_seconds += time.process_time() - cpu_started
            detail = {
                "loss": loss,
                "tokens_per_s": (self.curves.tokens - tokens_before) / max(now - began, 1e-9),
                "eta_s": (now - began) / (self.done - first) * (total - self.done),
                "acceptance_length": self.curves.held_out[-1][1] if self.curves.held_out else None,
            }
            on_progress(Progress("train", self.done, total, "steps", detail))
            stop = stop_asked() and self.done < total
            if stop or self.done == total or now - saved_at >= self.params.checkpoint_every_s:
                self._save()
                saved_at = time.monotonic()
            if stop:
                raise TrainingStopped(
                    expected=f"{total} steps",
                    seen=f"SIGTERM after step {self.done}; the checkpoint is written",
                    todo="Start the same training again: it resumes there.",
                )

    def _step(self, samples: list[Sample]) -> float:
        """One optimizer step on one packed batch; returns its loss."""
        device = self.setting.device
        batch = pack(samples, steps=self.params.ttt_steps, dtype=torch.float32, device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=COMPUTE_DTYPES[device] is torch.bfloat16):
            step = ttt_loss(
                self.drafter, self.frozen, batch, step_decay=STEP_DECAY, chunk_targets=CHUNK_TARGETS[device]
            )
        step.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), CLIP_NORM)
        loss = float(step.loss.detach())
        if not bool(torch.isfinite(norm)):
            raise InvalidInput(
                expected=f"a finite gradient after step {self.done}",
                seen=f"loss {loss}, gradient norm {float(norm)}",
                todo="Lower the learning rate, or run 'changeover states verify' on the states.",
            )
        self.optimizer.step(learning_rate_factor(self.done, len(self.setting.batches)))
        self.done += 1
        self.curves.tokens += batch.rows
        self.curves.step_kl = [float(value) for value in step.kl]
        self.curves.loss.append([self.done, loss])
        return loss

    def _judge(self) -> None:
        if self.judge.samples:
            length = acceptance_length(self.judge.replays(self.drafter, self.frozen))
            self.curves.held_out.append([self.done, length])

    def _save(self) -> None:
        save_checkpoint(
            self._root,
            self.done,
            model={**self.drafter.state_dict(), "d2t": torch.from_numpy(self.setting.vocabulary.d2t)},
            optimizer={"optimizer": self.optimizer.state_dict(), "torch_rng": torch.get_rng_state()},
            state={"run": _identity(self.params, self.setting), "curves": asdict(self.curves)},
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        wanted, seen = _identity(self.params, self.setting), checkpoint.state["run"]
        if seen != wanted:
            differing = [name for name in wanted if wanted[name] != seen.get(name)]
            raise InvalidInput(
                expected="a checkpoint of this very training",
                seen="; ".join(f"{name} {seen.get(name)} there, {wanted[name]} asked" for name in differing),
                todo=f"Train into another folder, or remove {self._root}.",
            )
        weights = {name: tensor for name, tensor in checkpoint.model.items() if name != "d2t"}
        self.drafter.load_state_dict(weights)
        self.optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        torch.set_rng_state(checkpoint.optimizer["torch_rng"])
        self.curves = Curves(**checkpoint.state["curves"])
        self.done = checkpoint.step


def _identity(params: TrainParams, setting: Setting) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued: all that decides the weights."""
    names = ("epochs", "learning_rate", "batch_tokens", "ttt_steps", "draft_vocab_size", "seed")
    return {
        **{name: getattr(params, name) for name in names},
        "steps": len(setting.batches),
        "vocabulary": setting.vocabulary.sha256,
        "boundaries": list(setting.corpus.boundaries),
        "target": target_identity(setting.facts),
        "states": str(params.states),
    }


def _result(
    params: TrainParams, setting: Setting, run: Run, evaluation: dict[str, Any] | None, out: str
) -> dict[str, Any]:
    curves = run.curves
    stride = max(1, -(-len(curves.loss) // CURVE_POINTS))
    return {
        "drafter": out,
        "steps": len(setting.batches),
        "epochs": params.epochs,
        "seconds": curves.seconds,
        "cpu_seconds": curves.cpu_seconds,
        "tokens": curves.tokens,
        "tokens_per_s": curves.tokens / max(curves.seconds, 1e-9),
        "loss_curve": [p for i, p in enumerate(curves.loss) if (len(curves.loss) - 1 - i) % stride == 0],
        "step_kl": curves.step_kl,
        "held_out_curve": curves.held_out,
        "evaluation": evaluation,
        "acceptance_length": None if evaluation is None else evaluation["acceptance_length"],
        "train_samples": len(setting.corpus.train),
        "held_out_samples": len(setting.corpus.held_out),
        "vocabulary": {
            "size": setting.vocabulary.size,
            "sha256": setting.vocabulary.sha256,
            "coverage_train": setting.coverage["train"],
            "coverage_held_out": setting.coverage["held_out"],
        },
        "trained_parameters": sum(p.numel() for p in run.drafter.parameters()),
        "boundaries": list(setting.corpus.boundaries),
        "device": setting.device,
        "params": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(params).items()},
    }
