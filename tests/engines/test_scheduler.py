"""Continuous batching in-process on the tiny model: answers do not depend on company, chunks or drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from changeover.engines.embedded.capture import CaptureRows, write_capture
from changeover.engines.embedded.eagle3 import load_drafter
from changeover.engines.embedded.metrics import Counters, render
from changeover.engines.embedded.sampling import SamplingParams, sample
from changeover.engines.embedded.scheduler import Scheduler
from changeover.engines.embedded.sequence import Sequence
from changeover.engines.embedded.target import TargetModel, load_target
from tests.engines.drafters import write_drafter

PROMPTS = ([5, 6, 7], list(range(10, 90)), [300, 200, 100, 50], [42] * 17, [9], list(range(400, 330, -1)))


@dataclass
class Bench:
    """A scheduler stepped by hand."""

    model_dir: Path
    target: TargetModel
    tokenizer: Any
    drafter_dir: Path | None = None
    max_concurrency: int = 16
    prefill_chunk_tokens: int = 64
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        drafter = load_drafter(self.drafter_dir, self.target, draft_tokens=4) if self.drafter_dir else None
        self.scheduler = Scheduler(
            self.target,
            drafter,
            max_concurrency=self.max_concurrency,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            counters=self.counters,
            deliver=lambda deliveries: None,
        )

    def sequence(self, prompt: SequenceType[int], tokens: int = 40, **params: Any) -> Sequence:
        settings = {"temperature": 0.0, "ignore_eos": True, **params}
        capture = CaptureRows((0, 4, 8)) if settings.pop("capture", False) else None
        return Sequence(
            prompt_ids=list(prompt),
            params=SamplingParams(max_tokens=tokens, **settings),
            tokenizer=self.tokenizer,
            eos_token_ids=self.target.eos_token_ids,
            capture=capture,
        )

    def run(self, sequences: SequenceType[Sequence]) -> list[str]:
        texts: dict[int, str] = defaultdict(str)
        for sequence in sequences:
            self.scheduler.submit(sequence)
        for _ in range(2000):
            self.scheduler._admit()
            for sequence, event in self.scheduler.step():
                texts[id(sequence)] += event.text
            if self.scheduler.running == 0 and self.scheduler.waiting == 0:
                return [texts[id(sequence)] for sequence in sequences]
        raise AssertionError("still running after 2000 steps")


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path) -> Bench:
    from transformers import AutoTokenizer

    target = load_target(tiny_model_dir, device="cpu", dtype="auto")
    target.watch_boundaries([0, 4, 8])
    return Bench(tiny_model_dir, target, AutoTokenizer.from_pretrained(tiny_model_dir))


def drafting(plain: Bench, folder: Path, **drafter: Any) -> Bench:
    target = load_target(plain.model_dir, device="cpu", dtype="auto")
    return Bench(plain.model_dir, target, plain.tokenizer, write_drafter(folder, plain.model_dir, **drafter))


def answers(bench: Bench, tokens: int = 40) -> list[list[int]]:
    sequences = [bench.sequence(prompt, tokens) for prompt in PROMPTS]
    bench.run(sequences)
    return [one.token_ids[len(one.prompt_ids) :] for one in sequences]


@pytest.fixture(scope="module")
def alone(plain: Bench) -> list[list[int]]:
    """Each prompt's greedy answer with nothing beside it, from Hugging Face's own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain.model_dir, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40,
            min_new_tokens=40, do_sample=False, eos_token_id=None,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


def test_together_gives_what_hugging_face_gives_alone(plain: Bench, alone: list[list[int]]) -> None:
    assert answers(plain) == alone


def test_a_place_for_two_serves_all_in_order(plain: Bench, alone: list[list[int]]) -> None:
    narrow = Bench(plain.model_dir, plain.target, plain.tokenizer, max_concurrency=2, prefill_chunk_tokens=7)
    sequences = [narrow.sequence(prompt) for prompt in PROMPTS]
    for sequence in sequences:
        narrow.scheduler.submit(sequence)
    narrow.scheduler._admit()
    assert (narrow.scheduler.running, narrow.scheduler.waiting) == (2, 4)
    narrow.run([])
    assert [one.token_ids[len(one.prompt_ids) :] for one in sequences] == alone


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_drafter_changes_no_token(
    plain: Bench, alone: list[list[int]], tmp_path: Path, seed: int
) -> None:
    bench = drafting(plain, tmp_path / "drafter", seed=seed)
    assert answers(bench) == alone
    assert bench.counters.spec_drafts > 0
    assert bench.counters.spec_draft_tokens > 2 * bench.counters.spec_drafts


def test_accepted_drafts_change_no_token_and_save_steps(
    plain: Bench, alone: list[list[int]], tmp_path: Path
) -> None:
    flat = [token for answer in alone for token in answer]
    frequent = max(set(flat), key=flat.count)
    bench = drafting(plain, tmp_path / "drafter", only_token=frequent)
    assert answers(bench) == alone
    counters = bench.counters
    assert counters.spec_accepted_tokens > 0
    # every answer's first token comes from its prompt; verify steps gave drafts + accepted; a few steps drafted nothing
    by_steps = len(flat) - len(PROMPTS)
    assert 0 <= by_steps - (counters.spec_drafts + counters.spec_accepted_tokens) <= len(PROMPTS)


@pytest.mark.parametrize("drafter", [{"seed": 0}, {"only_token": 0}])
def test_figures_of_the_requests_add_up_to_the_counters(
    plain: Bench, tmp_path: Path, drafter: dict[str, int]
) -> None:
    bench = drafting(plain, tmp_path / "drafter", **drafter)
    if "only_token" in drafter:
        bench.target.model.lm_head.weight.zero_()  # every draft is accepted, up to the end of an answer
    sequences = [bench.sequence(prompt, 10 + 7 * n) for n, prompt in enumerate(PROMPTS)]
    sampled = bench.sequence(PROMPTS[0], 20, temperature=1.0, seed=5)
    bench.run([*sequences, sampled])
    told = [sequence.speculation for sequence in sequences]
    counters = bench.counters
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        figures = [one[name] for one in told if one is not None]
        assert len(figures) == len(PROMPTS) and sum(figures) == getattr(counters, f"spec_{name}")
    for sequence, one in zip(sequences, told, strict=True):
        # the first token comes from the prompt; a few verify steps drafted nothing
        assert one is not None and 0 < one["drafts"] + one["accepted_tokens"] <= sequence.generated - 1
    assert sampled.speculation is None


def test_the_end_of_an_answer_inside_accepted_drafts_cuts_it(plain: Bench, tmp_path: Path) -> None:
    """A target that always says token 0, and a drafter that always drafts it."""
    bench = drafting(plain, tmp_path / "drafter", only_token=0)
    bench.target.model.lm_head.weight.zero_()  # every logit is equal: argmax takes the first
    bench.target.eos_token_ids = frozenset({0})
    ended = bench.sequence([5, 6], 30, ignore_eos=False)
    ignored = bench.sequence([5, 6], 30)
    bench.run([ended, ignored])
    assert ended.token_ids == [5, 6, 0] and ended.finish_reason == "stop"
    assert ignored.token_ids == [5, 6] + [0] * 30 and ignored.finish_reason == "length"
    # 29 tokens after the first one: five steps give five each, the sixth drafts three and gives four
    assert bench.counters.spec_drafts == 6
    assert bench.counters.spec_draft_tokens == 23
    assert bench.counters.spec_accepted_tokens == 23


def test_the_drafters_cache_holds_target_features_for_committed_slots(plain: Bench, tmp_path: Path) -> None:
    """What it drafts after many verify steps is what it drafts when it sees the same text for the first time."""
    bench = drafting(plain, tmp_path / "drafter", seed=3)
    grown = bench.sequence(PROMPTS[1], 25)
    bench.scheduler.submit(grown)
    bench.scheduler._admit()
    while grown.generated < 20:
        bench.scheduler.step()
    bench.scheduler.cancel(grown)
    fresh = bench.sequence(grown.token_ids[:-1], 25)
    bench.scheduler.submit(fresh)
    bench.scheduler._admit()
    while fresh.generated == 0:
        bench.scheduler.step()
    assert fresh.token_ids == grown.token_ids
    assert grown.draft is not None and fresh.draft is not None
    assert fresh.draft.drafted == grown.draft.drafted and len(grown.draft.drafted) == 4


def test_sampling_requests_beside_a_drafter_are_served_without_it(plain: Bench, tmp_path: Path) -> None:
    bench = drafting(plain, tmp_path / "drafter")
    with_drafter = bench.sequence(PROMPTS[0], 20, temperature=1.0, seed=5)
    without = plain.sequence(PROMPTS[0], 20, temperature=1.0, seed=5)
    bench.run([with_drafter])
    plain.run([without, plain.sequence(PROMPTS[1], 20, temperature=0.8, top_p=0.5)])
    assert with_drafter.token_ids == without.token_ids
    assert bench.counters.spec_drafts == 0


def test_a_seed_repeats_an_answer_and_another_changes_it(plain: Bench) -> None:
    same = [plain.sequence(PROMPTS[0], 30, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    plain.run(same)
    assert same[0].token_ids == same[1].token_ids != same[2].token_ids


def test_top_p_samples_from_the_nucleus_only() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.7)
    generator = torch.Generator().manual_seed(0)
    drawn = [sample(logits, params, generator) for _ in range(300)]
    assert set(drawn) == {0, 1}
    assert 0.5 < drawn.count(0) / 300 < 0.75  # 0.625 expected


def test_an_end_token_ends_and_is_counted(plain: Bench, alone: list[list[int]]) -> None:
    end = alone[0][6]
    bench = Bench(plain.model_dir, plain.target, plain.tokenizer)
    sequence = bench.sequence(PROMPTS[0], ignore_eos=False)
    sequence.eos_token_ids = frozenset({end})
    bench.run([sequence])
    expected = alone[0][: alone[0].index(end) + 1]
    assert sequence.token_ids[3:] == expected
    assert sequence.finish_reason == "stop"
    assert bench.counters.generation_tokens == len(expected)
    assert bench.counters.prompt_tokens == 3


def test_a_stop_string_ends_an_answer(plain: Bench) -> None:
    whole = plain.sequence(PROMPTS[2])
    [text] = plain.run([whole])
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = plain.sequence(PROMPTS[2], stop=(stop,))
    assert plain.run([stopped]) == [text[: text.index(stop)]]
    assert stopped.finish_reason == "stop"


def test_a_cancelled_request_leaves_its_place(plain: Bench) -> None:
    bench = Bench(plain.model_dir, plain.target, plain.tokenizer, max_concurrency=1)
    running, waiting, last = (bench.sequence(prompt) for prompt in PROMPTS[:3])
    for sequence in (running, waiting, last):
        bench.scheduler.submit(sequence)
    bench.scheduler._admit()
    bench.scheduler.step()
    bench.scheduler.cancel(waiting)
    bench.scheduler.cancel(running)
    bench.run([])
    assert running.generated == 1 and waiting.generated == 0
    assert last.finish_reason == "length"


def test_captured_rows_are_those_of_one_plain_forward(plain: Bench, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    sequences = [plain.sequence(prompt, 12, capture=True) for prompt in PROMPTS]
    plain.run([*sequences, plain.sequence(PROMPTS[0], 30)])
    model = AutoModelForCausalLM.from_pretrained(plain.model_dir, dtype=torch.float32)
    for sequence in sequences:
        assert sequence.capture is not None
        told = write_capture(
            tmp_path, "one.safetensors", sequence.capture, sequence.token_ids, len(sequence.prompt_ids)
        )
        fed = len(sequence.prompt_ids) + 11
        assert told["tokens"] == fed and told["bytes"] == (tmp_path / "one.safetensors").stat().st_size
        assert told["output_token_ids"] == sequence.token_ids[len(sequence.prompt_ids) :]
        tensors = load_file(tmp_path / "one.safetensors")
        assert tensors["input_ids"].tolist() == sequence.token_ids[:-1]
        assert tensors["aux"].shape == (fed, 3, 64) and tensors["aux"].dtype == torch.bfloat16
        with torch.inference_mode():
            states = model(tensors["input_ids"][None], output_hidden_states=True).hidden_states
            normed_last = states[8][0]
            # Hugging Face gives the last one only after the norm; before it, feed layer 8's input through that layer.
        torch.testing.assert_close(tensors["aux"][:, 0].float(), states[0][0], rtol=0.01, atol=0.01)
        torch.testing.assert_close(tensors["aux"][:, 1].float(), states[4][0], rtol=0.01, atol=0.01)
        with torch.inference_mode():
            renormed = model.model.norm(tensors["aux"][:, 2].float())
        torch.testing.assert_close(renormed, normed_last, rtol=0.03, atol=0.03)
        torch.testing.assert_close(tensors["last"].float(), normed_last, rtol=0.01, atol=0.01)
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"]  # no temporary file stays


def test_a_capture_that_cannot_be_written_leaves_nothing(plain: Bench, tmp_path: Path) -> None:
    sequence = plain.sequence(PROMPTS[0], 3, capture=True)
    plain.run([sequence])
    assert sequence.capture is not None
    with pytest.raises(RuntimeError, match="captured rows"):
        write_capture(tmp_path, "x.safetensors", sequence.capture, [*sequence.token_ids, 1], 3)
    assert not list(tmp_path.iterdir())


def test_metrics_are_prometheus_text() -> None:
    text = render(Counters(prompt_tokens=3, spec_drafts=2), running=1, waiting=0, model='a"b')
    assert 'changeover:prompt_tokens_total{model_name="a\\"b"} 3' in text
    assert "# TYPE changeover:num_requests_running gauge" in text
    assert text.endswith("\n")
