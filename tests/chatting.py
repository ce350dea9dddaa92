"""A Hugging Face folder whose model always gives the same answer, letter by letter in UTF-8, and then its end token.

A Llama without attention or MLP: the embeddings are the unit vectors, and the output layer leads from each token to the
one that follows it. So no token may stand twice in what it says.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SAID = "日🙂é!"
"""Letters of three, four, two bytes and one. Each byte is a token."""

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_folder(
    folder: Path, said: str = SAID, *, template: str | None = TEMPLATE, loops: bool = False, max_len: int = 256
) -> Path:
    """Write model, tokenizer and chat template.

    Args:
        folder: is there.
        said: the answer to every conversation.
        template: None: the folder has none.
        loops: begin the answer again instead of ending it.
        max_len: the model's.

    Returns:
        The folder.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END, *ROLES, *alphabet]
    bpe = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    bpe.add_special_tokens(names[:4])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tokens = tokenizer.encode(said)
    assert len({*tokens}) == len(tokens), "a token stands twice in it"
    sizes = {"vocab_size": len(names), "hidden_size": 272, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 17, "num_key_value_heads": 17, "max_position_embeddings": max_len}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=0))
    chain = [names.index("<|assistant|>"), *tokens]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
        model.model.embed_tokens.weight[:, : len(names)] = torch.eye(len(names))
        for token, following in zip(chain, [*tokens, tokens[0] if loops else 0], strict=True):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)
    return folder
