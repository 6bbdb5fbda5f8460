"""The packed forward pass against plain Hugging Face models, in the architectures that users bring first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface

from changeover.engines.embedded.packed import ATTENTION_NAME, packed_attention
from changeover.engines.embedded.target import Segment, TargetModel, default_boundaries
from changeover.machine.errors import InvalidInput, NotSupported

COMMON = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral-window-8": ("Mistral", {"sliding_window": 8}),
    "gemma3": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
}


def build(name: str, attention: str) -> Any:
    family, extra = ARCHITECTURES[name]
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    config = config_class(**{**COMMON, **extra})
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(params=sorted(ARCHITECTURES))
def pair(request: pytest.FixtureRequest) -> tuple[Any, TargetModel]:
    """The same weights twice: plain, and with packed attention."""
    plain = build(request.param, "eager")
    packed = build(request.param, ATTENTION_NAME)
    packed.load_state_dict(plain.state_dict())
    return plain, TargetModel(packed, eos_token_ids=frozenset())


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, COMMON["vocab_size"], (length,), generator=generator).tolist()


@torch.inference_mode()
def reference(plain: Any, tokens: list[int]) -> torch.Tensor:
    return plain(torch.tensor([tokens])).logits[0]


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_prefill_decode_and_verify_mix_in_one_pass(pair: tuple[Any, TargetModel]) -> None:
    plain, target = pair
    one, two, three = ids(1, 30), ids(2, 21), ids(3, 12)
    first, second, third = target.new_cache(), target.new_cache(), target.new_cache()
    target.forward([Segment(one[:29], first), Segment(two[:17], second)], [0], want_last=False)
    # a decoded token, four tokens to verify, a whole prompt
    output = target.forward(
        [Segment(one[29:], first), Segment(two[17:], second), Segment(three, third)],
        list(range(17)),
        want_last=False,
    )
    expected = torch.cat([reference(plain, one)[29:], reference(plain, two)[17:], reference(plain, three)])
    close(output.logits, expected)


def test_a_rolled_back_sequence_goes_on_as_if_nothing_had_been_drafted(pair: tuple[Any, TargetModel]) -> None:
    plain, target = pair
    tokens = ids(4, 24)
    cache = target.new_cache()
    target.forward([Segment(tokens[:10], cache)], [0], want_last=False)
    target.forward([Segment([tokens[10], 7, 8, 9], cache)], [0], want_last=False)
    cache.length -= 3
    output = target.forward([Segment(tokens[11:], cache)], list(range(13)), want_last=False)
    close(output.logits, reference(plain, tokens)[11:])


def test_a_prompt_fed_in_chunks_gives_what_it_gives_at_once(pair: tuple[Any, TargetModel]) -> None:
    plain, target = pair
    tokens = ids(5, 300)  # beyond the first capacity of the cache, so that it grows
    cache = target.new_cache()
    for start in range(0, 300, 64):
        chunk = tokens[start : start + 64]
        output = target.forward([Segment(chunk, cache)], [len(chunk) - 1], want_last=False)
    assert cache.length == 300
    close(output.logits[0], reference(plain, tokens)[-1])


def test_hidden_states_are_those_of_output_hidden_states(pair: tuple[Any, TargetModel]) -> None:
    plain, target = pair
    layers = COMMON["num_hidden_layers"]
    target.watch_boundaries([0, 3, layers])
    tokens = ids(6, 20)
    other = ids(7, 9)
    output = target.forward(
        [Segment(other, target.new_cache()), Segment(tokens, target.new_cache())], [0], want_last=True
    )
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    rows = output.batch.rows(1)
    assert output.last is not None
    close(output.boundaries[0][rows], expected[0][0])
    close(output.boundaries[3][rows], expected[3][0])
    close(output.last[rows], expected[layers][0])  # Hugging Face norms the last one
    with torch.inference_mode():
        close(plain.model.norm(output.boundaries[layers][rows]), expected[layers][0])


def test_a_boundary_that_the_model_does_not_have_is_refused(pair: tuple[Any, TargetModel]) -> None:
    with pytest.raises(InvalidInput, match="0 to 6"):
        pair[1].watch_boundaries([7])


def test_attention_that_would_be_computed_wrongly_is_refused() -> None:
    config = transformers.Gemma2Config(**COMMON, attn_logit_softcapping=50.0)
    model = transformers.Gemma2ForCausalLM._from_config(config)
    with pytest.raises(NotSupported, match="soft-capped"):
        TargetModel(model, eos_token_ids=frozenset())


def test_default_boundaries_are_eagle3s() -> None:
    assert default_boundaries(30) == (2, 15, 27)
