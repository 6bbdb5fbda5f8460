"""Letting a model answer prompts and keeping the states it answered from.

Each prompt is one greedy request to a capture server; the file it leaves in staging is checked, stored,
deleted. What is stored already is not asked for again. The end is a gate: counts, checksums, staging empty,
probe passed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from changeover.machine.clock import Clock, SystemClock
from changeover.machine.errors import ChangeoverError, InvalidInput
from changeover.machine.progress import Progress, ProgressSink, ignore_progress
from changeover.states import captures
from changeover.states.ask import ByteBudget, RequestFailed, ask, request_body
from changeover.states.errors import CollectFailed, StoreFull
from changeover.states.params import CollectParams
from changeover.states.prompts import Prompt, is_held_out, read_prompts
from changeover.states.sealing import read_failures, seal
from changeover.states.sources import CaptureSource, capture_source
from changeover.states.staging import Staging, capture_name
from changeover.states.writer import StatesWriter

if TYPE_CHECKING:
    import aiohttp

__all__ = ["CollectParams", "collect"]

# A shard is committed when it is full or this old, so that a crash costs little where states come slowly.
COMMIT_EVERY_S = 10.0
# What a chat template adds at most, in tokens, for the estimate of a capture's size.
_TEMPLATE_TOKENS = 256


def collect(
    params: CollectParams, on_progress: ProgressSink = ignore_progress, *, clock: Clock | None = None
) -> dict[str, Any]:
    """Collect, probe and seal; returns the JSON result.

    Raises InvalidInput (prompts, folder of other states), StoreFull (disk or its reserve: resumable),
    CollectFailed (server gone or refusing everything, probe or gate failed), StoreBusy, StoreDamaged.
    """
    clock = clock or SystemClock()
    started_s = clock.monotonic()
    prompts = read_prompts(params.prompts, params.limit)
    if not params.capture_dir.is_dir():
        raise InvalidInput(
            expected=f"the capture server's folder at {params.capture_dir}",
            seen="no such folder",
            todo="Give the folder that the server got as --capture-dir.",
        )
    source = capture_source(params, clock)
    staging = Staging(params.capture_dir, [prompt.id for prompt in prompts])
    with StatesWriter.open(params.out, params.manifest()) as writer, staging.swept():
        had = len(writer.committed)
        missing = _to_ask(prompts, writer)
        if missing and writer.manifest.sealed:
            writer.write_end(probe={}, gate={}, sealed=False)
        collection = Collection(params, source, writer, len(prompts), len(missing), on_progress, clock)
        collection.run(missing)
        collect_seconds = clock.monotonic() - started_s
        return seal(params, writer, prompts, staging, on_progress) | {
            "schema_version": 1,
            "asked": len(missing),
            "samples_before": had,
            "tokens_per_s": collection.tokens_per_s(),
            "output_tokens_per_s": collection.output_tokens_per_s(),
            "collect_seconds": collect_seconds,
            "seconds": clock.monotonic() - started_s,
        }


class Collection:
    """The asking: ``concurrency`` requests at a time, one thread that checks and stores."""

    def __init__(
        self,
        params: CollectParams,
        source: CaptureSource,
        writer: StatesWriter,
        total: int,
        asked: int,
        on_progress: ProgressSink,
        clock: Clock,
    ) -> None:
        self._params = params
        self._source = source
        self._writer = writer
        self._total = total
        self._asked = asked
        self._on_progress = on_progress
        self._clock = clock
        self._stored = 0
        self._failed = 0
        self._tokens = 0
        self._output_tokens = 0
        self._bytes = 0
        self._consecutive_failures = 0
        self._started_s = clock.monotonic()
        self._last_commit_s = self._started_s
        self._last_s = self._started_s

    def run(self, prompts: list[Prompt]) -> None:
        """Ask for every prompt; returns when each is stored or listed as failed."""
        self._report()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="states-writer") as storing:
            try:
                asyncio.run(self._ask_all(prompts, storing))
            except BaseExceptionGroup as group:
                raise _first_error(group) from group
        self._writer.commit_shard()
        self._report()

    def tokens_per_s(self) -> float:
        """Rows of states per second, prompts included."""
        return self._tokens / max(1e-9, self._last_s - self._started_s)

    def output_tokens_per_s(self) -> float:
        return self._output_tokens / max(1e-9, self._last_s - self._started_s)

    async def _ask_all(self, prompts: list[Prompt], storing: ThreadPoolExecutor) -> None:
        import aiohttp

        waiting = iter(prompts)
        budget = ByteBudget(self._params.staging_budget_bytes)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._params.timeout_s)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(min(self._params.concurrency, len(prompts))):
                group.create_task(self._work(waiting, session, budget, storing))

    async def _work(
        self,
        waiting: Iterator[Prompt],
        session: aiohttp.ClientSession,
        budget: ByteBudget,
        storing: ThreadPoolExecutor,
    ) -> None:
        for prompt in waiting:
            async with budget.hold(largest_capture_bytes(prompt, self._params)):
                attempts, failure = await self._ask_with_retries(prompt, session, storing)
            if failure is None:
                self._consecutive_failures = 0
            else:
                self._note_failure(prompt, failure, attempts)
            self._report()

    async def _ask_with_retries(
        self, prompt: Prompt, session: aiohttp.ClientSession, storing: ThreadPoolExecutor
    ) -> tuple[int, RequestFailed | None]:
        path = self._params.capture_dir / capture_name(prompt.id)
        fields = self._source.request_fields(path.name)
        body = request_body(prompt, self._params.max_tokens, fields)
        for attempt in range(1, self._params.max_attempts + 1):
            try:
                answer = await ask(session, self._params.url, "/v1/chat/completions", body)
                then = self._source.second_request(answer, path)
                if then is not None:
                    await ask(session, self._params.url, *then)
                await asyncio.get_running_loop().run_in_executor(storing, self._store, prompt, answer)
            except captures.CaptureInvalid as error:
                return attempt, RequestFailed("invalid", str(error))
            except RequestFailed as failure:
                if failure.kind != "transport" or attempt == self._params.max_attempts:
                    return attempt, failure
                await asyncio.sleep(self._params.retry_delay_s * 2 ** (attempt - 1))
            else:
                break
        return attempt, None

    def _store(self, prompt: Prompt, body: object) -> None:
        """Check one answer and its file, store both, delete the file. Raises RequestFailed, StoreFull."""
        params = self._params
        path = params.capture_dir / capture_name(prompt.id)
        try:
            answer = self._source.answer(body, path.name)
            captured = self._source.read(path, answer)
            sample = captures.make_sample(prompt.id, answer, captured, self._writer.manifest)
        except captures.CaptureInvalid as error:
            path.unlink(missing_ok=True)
            raise RequestFailed("invalid", str(error)) from error
        size = sample.aux.nbytes + sample.last.nbytes
        _check_reserve(params.out, size, params.disk_reserve_bytes, len(self._writer.committed))
        self._writer.add(
            sample,
            {
                "id": prompt.id,
                "prompt_tokens": answer.prompt_tokens,
                "output_token_ids": list(answer.output_token_ids),
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "held_out": is_held_out(prompt.id, params.held_out_fraction),
            },
        )
        path.unlink()
        self._stored += 1
        self._tokens += sample.tokens
        self._output_tokens += len(answer.output_token_ids)
        self._bytes += size
        self._last_s = self._clock.monotonic()
        if self._last_s - self._last_commit_s > COMMIT_EVERY_S:
            self._writer.commit_shard()
            self._last_commit_s = self._last_s

    def _note_failure(self, prompt: Prompt, failure: RequestFailed, attempts: int) -> None:
        self._failed += 1
        self._consecutive_failures += 1
        self._writer.record_failure(
            {"id": prompt.id, "kind": failure.kind, "reason": failure.reason, "attempts": attempts}
        )
        if self._consecutive_failures >= max(8, 2 * self._params.concurrency):
            raise CollectFailed(
                expected=f"answers with captured states from {self._params.url}",
                seen=f"{self._consecutive_failures} failures in a row, the last: {failure.reason}",
                todo="See the server's log and failures.jsonl; resume when the server answers.",
            )

    def _report(self) -> None:
        elapsed_s = self._clock.monotonic() - self._started_s
        done = self._stored + self._failed
        left = self._asked - done
        self._on_progress(
            Progress(
                stage="collect",
                done=self._total - left,
                total=self._total,
                unit="samples",
                detail={
                    "tokens": self._tokens,
                    "tokens_per_s": round(self._tokens / elapsed_s, 1) if elapsed_s > 0 else 0.0,
                    "bytes": self._bytes,
                    "failed": self._failed,
                    "eta_s": round(left * elapsed_s / done, 1) if done else None,
                },
            )
        )


def largest_capture_bytes(prompt: Prompt, params: CollectParams) -> int:
    """What the capture of ``prompt`` can take at most: no tokenizer makes more tokens than there are UTF-8
    bytes.
    """
    texts = [prompt.text or "", *(message.content for message in prompt.messages or ())]
    prompt_tokens = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + _TEMPLATE_TOKENS
    per_token = 2 * params.hidden * (len(params.boundaries) + 1) + 8
    return (prompt_tokens + params.max_tokens) * per_token


def _check_reserve(out: Path, needed_bytes: int, reserve_bytes: int, committed: int) -> None:
    free = shutil.disk_usage(out).free
    if free - needed_bytes < reserve_bytes:
        raise StoreFull(
            expected=f"{needed_bytes + reserve_bytes} bytes free at {out} ({reserve_bytes} in reserve)",
            seen=f"{free} bytes free; {committed} samples are committed",
            todo="Free space (or lower the reserve) and resume: nothing stored is asked for again.",
        )


def _to_ask(prompts: list[Prompt], writer: StatesWriter) -> list[Prompt]:
    """What is neither stored nor known to fail always (refused, invalid: greedy repeats)."""
    hopeless = {i for i, failure in read_failures(writer.root).items() if failure["kind"] != "transport"}
    return [prompt for prompt in prompts if prompt.id not in writer.committed and prompt.id not in hopeless]


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the asking; ours first, since it says what to do."""
    errors = [error for error in group.exceptions if isinstance(error, ChangeoverError)]
    return errors[0] if errors else group.exceptions[0]
