"""A small random Llama with a tokenizer and a chat template of its own: made in a second, needs no download.

Eight layers, because engines refuse EAGLE-3 on fewer (their three default boundaries would coincide).
Weights are drawn wide (std 0.2) so that greedy decoding seldom hangs on near ties.
"""

from __future__ import annotations

from pathlib import Path

LAYERS = 8
HIDDEN = 64
VOCAB = 448

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Explain why the sky is blue. Sunlight is scattered by the air, and blue light is scattered most.",
    "def add(left, right):\n    return left + right\n",
    "List three fruits: apples, pears and plums. Compare a cat with a dog in one sentence.",
    "Write a short letter to a friend about the weather, the garden and the books that you have read.",
    "What is 12 times 12? It is 144. What is the opposite of early? It is late.",
]


def build_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a float32 Hugging Face folder (config, weights, tokenizer) into `folder` and return it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    assert len(fast) == VOCAB, f"the corpus is too short for {VOCAB} tokens: {len(fast)}"
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
