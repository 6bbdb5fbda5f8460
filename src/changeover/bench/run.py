"""A benchmark from its parameters to its result: ask the server who it is, warm up, measure every repeat.

Repeats are the outer loop and levels the inner one, so that a drift of the machine falls on all levels alike.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import uvloop
from uvloop._version import __version__ as uvloop_version

from changeover import __version__
from changeover.bench.acceptance import (
    Acceptance,
    acceptance_between,
    acceptance_by_steps,
    acceptance_of,
    engine_of,
    generated_between,
    read_counters,
    speculation_names,
)
from changeover.bench.answer import Answer
from changeover.bench.checks import cache_warnings, refuse_if_all_failed, traffic_warnings
from changeover.bench.client import Client, public_url
from changeover.bench.load import ROUTES, Load, LoopLag, Sampling, build_requests, closed_loop, plan_load
from changeover.bench.metrics import (
    FORMULAS,
    METRIC_SCHEMA,
    Repeat,
    count_requests,
    summarise_level,
    summarise_repeat,
)
from changeover.bench.params import BenchParams
from changeover.bench.records import RequestRecords
from changeover.machine.clock import Clock, SystemClock
from changeover.machine.progress import Progress, ProgressSink
from changeover.states.prompts import is_held_out, read_prompts

__all__ = ["BenchParams", "bench"]

SCHEMA_VERSION = 1
PROGRESS_PERIOD_S = 0.25


def bench(params: BenchParams, on_progress: ProgressSink, clock: Clock | None = None) -> dict[str, Any]:
    """Load the server as ``params`` say; returns the result as JSON values.

    Writes ``requests.jsonl`` into ``params.out`` by rename when all is measured.

    Raises:
        InvalidInput: the parameters or prompts cannot be used.
        ChangeoverError: the server cannot be reached, or in some repeat no request succeeded.
    """
    prompts = read_prompts(params.prompts)
    if params.held_out is not None:
        prompts = [prompt for prompt in prompts if is_held_out(prompt.id, params.held_out)]
    load = plan_load(prompts, params.requests, params.warmup, params.api)
    measurement = _Measurement(params, load, on_progress, clock or SystemClock())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measurement.run())


class _Measurement:
    """One run of a benchmark: what its steps share."""

    def __init__(self, params: BenchParams, load: Load, on_progress: ProgressSink, clock: Clock) -> None:
        self.params = params
        self.load = load
        self.clock = clock
        self.now = clock.monotonic
        self.report = _Reporter(on_progress, self.now)

    async def run(self) -> dict[str, Any]:
        params = self.params
        started_wall, started_s = self.clock.wall(), self.now()
        load_average = os.getloadavg()[0]
        async with Client(params.url, ROUTES[params.api], params.timeout_s, self.now) as client:
            model = params.model or await client.model_id()
            text, _ = await client.metrics_text()
            engine = engine_of(read_counters(text or ""))
            sampling = Sampling(
                api=params.api,
                model=model,
                engine=engine,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                seed=params.seed,
                ignore_eos=params.ignore_eos,
            )
            warm = await self._warm_up(client, sampling, salt=f"{started_wall}")
            repeats: list[Repeat] = []
            warnings: list[str] = []
            with RequestRecords(params.out) as records:
                for number in range(1, params.repeats + 1):
                    for level in params.concurrency:
                        salt = f"{started_wall}:{level}:{number}"
                        repeat, warning = await self._measure(client, sampling, level, number, salt)
                        warnings += warning
                        records.add(repeat)
                        repeats.append(repeat)
                        refuse_if_all_failed(repeat)
        levels = [_level_json(level, repeats, self.load.distinct) for level in params.concurrency]
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench",
            "metric_schema": METRIC_SCHEMA,
            "formulas": FORMULAS,
            "started_wall": started_wall,
            "seconds": self.now() - started_s,
            "server": {"url": public_url(client.base), "model": model, "engine": engine},
            "client": _client_json(load_average),
            "load": self._load_json(sampling),
            "warm_up": warm,
            "levels": levels,
            "warnings": warnings + cache_warnings(levels) + self._load_warnings(),
            "requests_file": None if params.out is None else RequestRecords.NAME,
        }

    async def _warm_up(self, client: Client, sampling: Sampling, salt: str) -> dict[str, Any]:
        """The warm-up prompts once at each level; failures are shown, not fatal: measuring will tell."""
        answers: list[Answer] = []
        for level in self.params.concurrency:
            requests = build_requests(self.load.warm_up, sampling, f"{salt}:warm-up:{level}")
            stage = f"warm-up at {level}"
            answers += await closed_loop(
                client.ask, requests, level, self.now, self.report.stage(stage, len(requests))
            )
        return count_requests(answers)

    async def _measure(
        self, client: Client, sampling: Sampling, level: int, number: int, salt: str
    ) -> tuple[Repeat, list[str]]:
        requests = build_requests(self.load.measured, sampling, salt)
        where = f"repeat {number} of {self.params.repeats} at {level}"
        on_answer = self.report.stage(where, len(requests))
        before, no_metrics_before = await client.metrics_text()
        lag = LoopLag(self.now)
        watch = asyncio.create_task(lag.watch())
        cpu_s, started_s = time.process_time(), self.now()
        try:
            answers = await closed_loop(client.ask, requests, level, self.now, on_answer)
        finally:
            watch.cancel()
        cpu_s = time.process_time() - cpu_s
        seconds = max(answer.ended_s for answer in answers) - started_s
        after, no_metrics_after = await client.metrics_text()
        warnings = []
        if before is None or after is None:
            acceptance: Acceptance | None = None
            why: str | None = no_metrics_before or no_metrics_after
        else:
            counters = read_counters(before), read_counters(after)
            names = speculation_names(sampling.engine)
            if any(answer.speculation for answer in answers) and names.by_request:
                acceptance, why = acceptance_of([answer.speculation for answer in answers])
            elif names.verify_steps is not None:
                acceptance, why = acceptance_by_steps(
                    *counters, names, [answer.output_tokens for answer in answers]
                )
            else:
                acceptance, why = acceptance_between(*counters, names)
            warnings = traffic_warnings(generated_between(*counters), answers, where)
        return Repeat(
            repeat=number,
            concurrency=level,
            started_s=started_s,
            seconds=seconds,
            answers=tuple(answers),
            acceptance=acceptance,
            acceptance_missing=why,
            loop_lags_s=tuple(lag.lags_s),
            cpu_s=cpu_s,
        ), warnings

    def _load_json(self, sampling: Sampling) -> dict[str, Any]:
        params = self.params
        return {
            "prompts_sha256": self.load.sha256,
            "distinct_prompts": self.load.distinct,
            "api": params.api,
            "concurrency": list(params.concurrency),
            "requests": len(self.load.measured),
            "repeats": params.repeats,
            "warmup": params.warmup,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "held_out": params.held_out,
            "cache_salt": sampling.engine in ("vllm", "sglang"),
        }

    def _load_warnings(self) -> list[str]:
        requests = len(self.load.measured)
        if self.load.distinct == requests:
            return []
        return [
            f"only {self.load.distinct} prompts for {requests} requests: "
            "some were sent more than once in a repeat"
        ]


class _Reporter:
    """Turns answers into progress, at most four a second and always the last of a stage."""

    def __init__(self, sink: ProgressSink, now: Callable[[], float]) -> None:
        self._sink = sink
        self._now = now
        self._next_s = 0.0

    def stage(self, stage: str, total: int) -> Callable[[Answer], None]:
        done = failed = tokens = 0

        def on_answer(answer: Answer) -> None:
            nonlocal done, failed, tokens
            done += 1
            failed += answer.failure is not None
            tokens += answer.output_tokens or 0
            if done == total or self._now() >= self._next_s:
                self._next_s = self._now() + PROGRESS_PERIOD_S
                self._sink(
                    Progress(stage, done, total, "requests", {"failed": failed, "output_tokens": tokens})
                )

        return on_answer


def _level_json(level: int, repeats: Sequence[Repeat], distinct_prompts: int) -> dict[str, Any]:
    parts = [summarise_repeat(repeat) for repeat in repeats if repeat.concurrency == level]
    return {"concurrency": level, "repeats": parts, "summary": summarise_level(parts, distinct_prompts)}


def _client_json(load_average: float) -> dict[str, Any]:
    return {
        "changeover": __version__,
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "uvloop": uvloop_version,
        "cores": os.cpu_count(),
        "load_average_before": load_average,
    }
