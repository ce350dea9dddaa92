"""Small random models that `transformers` itself writes, and a small byte-level tokenizer."""

from __future__ import annotations

import os

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # or `generate` would mask it
}


class Saved(NamedTuple):
    """A folder, and the model of `transformers` that wrote it."""

    folder: Path
    theirs: nn.Module

    def logits(self, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.theirs(token_ids).logits


Save = Callable[..., Saved]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """`save(family, dtype=…, max_shard_size=…, **config)`: write a random model. Same arguments, same folder.

    Anyone who is going to change the folder asks for a fresh one.
    """
    made: dict[str, Saved] = {}

    def save(
        family: str,
        *,
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "5GB",
        fresh: bool = False,
        **config: Any,
    ) -> Saved:
        key = repr((family, dtype, max_shard_size, sorted(config.items())))
        if key not in made or fresh:
            config_class, model_class = FAMILIES[family]
            torch.manual_seed(0)
            model = model_class(config_class(**{**SIZES, **config})).eval()
            for parameter in model.parameters():  # gains and biases too: what is 1 or 0 could be missing unnoticed
                nn.init.normal_(parameter, mean=1.0 if parameter.ndim < 2 else 0.02, std=0.25)
            folder = tmp_path_factory.mktemp(family)
            model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
            # Read again: in a model that was converted with `to`, theirs turns by frequencies of 16 bits.
            saved = Saved(folder, model_class.from_pretrained(folder, dtype=dtype).eval())
            if fresh:
                return saved
            made[key] = saved
        return made[key]

    return save


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + message['role']) }}{% endif %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def add_tokenizer() -> Callable[[Path], PreTrainedTokenizerFast]:
    """Write tokenizer.json and a chat template into a folder: 260 tokens, all bytes among them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the cat sat on the mat, hello hello"] * 4, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])

    def add(folder: Path) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
        return tokenizer

    return add
