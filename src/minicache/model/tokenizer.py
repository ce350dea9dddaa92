"""The tokenizers of published models: of a Hugging Face folder or a GGUF file, and the chat template that comes along.

`tokenizers` and `transformers` do the work; they are asked for when a model has a tokenizer, and not before. What this
adds is what the engine asks of a tokenizer (`minicache.engine.stopping.Tokenizer`), and that a template ends
(`minicache.model.chat_template`). No phase builds this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from minicache.errors import CheckpointError, MinicacheError, MissingExtraError, UnsupportedModelError
from minicache.model.chat_template import ChatTemplate
from minicache.model.fields import Fields, one_of
from minicache.model.folder import end_token_ids
from minicache.model.gguf import gguf_end_token_ids, gguf_token_ids
from minicache.model.gguf_file import GGUFFile

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")


class ModelTokenizer:
    """A published model's tokenizer, as the engine uses one.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        chat_template: the model's; None: it has none.
        end_token_ids: as below.

    Attributes:
        end_token_ids: the tokens that end a text.
        end_token_id: the first of them; −1 if there is none.
        max_token_chars: the most characters of a text that one token stands for. A vocabulary writes a token with one
            letter for each of its characters, or for each of its bytes, so with no fewer.
        has_chat_template: whether conversations can be turned into prompts (`apply_chat_template`).
    """

    def __init__(self, tokenizer: Any, chat_template: ChatTemplate | None, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self.end_token_ids = end_token_ids
        self.end_token_id = next(iter(self.end_token_ids), -1)
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """A text as token ids, with what the tokenizer puts before every text (Llama's <|begin_of_text|>).

        What is no letter, half of a pair of UTF-16, is U+FFFD: so are bytes that are no UTF-8 in an argument or a line.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], /) -> str:
        """Token ids as a text, in which end tokens and other special tokens do not show.

        Bytes that are no whole letter yet are U+FFFD, and so are those that never become one.
        """
        shown = [token_id for token_id in ids if token_id not in self.end_token_ids]
        return str(self._tokenizer.decode(shown, skip_special_tokens=True))

    def to_json(self) -> str:
        """All of it, as a `tokenizer.json` holds it: for libraries that read one."""
        return str(self._tokenizer.to_str())

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text; nothing for special tokens. A token may begin or end inside a letter.

        Raises:
            UnsupportedModelError: its tokens are not written byte by byte, as GPT-2's are.
        """
        decoder = json.loads(self.to_json())["decoder"] or {}
        if "ByteLevel" not in (decoder.get("type"), *(each["type"] for each in decoder.get("decoders", ()))):
            raise UnsupportedModelError(
                "the tokens of this tokenizer are not byte-level: their bytes are not known here"
            )
        tokens = [b""] * self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id not in added:
                tokens[token_id] = bytes(map(_BYTES.__getitem__, token))
            elif not added[token_id].special:
                tokens[token_id] = token.encode()
        return tokens

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as the token ids of a prompt, up to where the model is to answer.

        Args:
            messages: each with "role" and "content", in their order.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages, or takes too long for them.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template: give a prompt")
        try:
            text = self._chat_template.render(messages)
        except ValueError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        # The template has written all special tokens that belong there.
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        letters = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._tokenizer.encode(letters, add_special_tokens=add_special_tokens).ids)


_VISIBLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES: Final = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))
}
"""How a byte-level vocabulary writes bytes: as the letter of Latin-1, if one can see it, the others from U+0100 on."""


def folder_tokenizer(folder: Path) -> ModelTokenizer | None:
    """The tokenizer of a folder: tokenizer.json, and the chat template next to it; None if it has none.

    Its end tokens are the model's (generation_config.json, else config.json), and the tokenizer's own.

    Raises:
        UnsupportedModelError: it has one, but no tokenizer.json.
        MissingExtraError: `transformers` is not installed.
        CheckpointError: the tokenizer's files cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        other = next((name for name in _OTHER_TOKENIZERS if (folder / name).is_file()), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{folder} has its tokenizer as {other}, and only tokenizer.json is read: save it anew with "
                "`AutoTokenizer.from_pretrained(…).save_pretrained(…)` of transformers"
            )
        return None
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing(folder) from error
    ids = end_token_ids(folder)
    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}") from error
    own = tokenizer.eos_token_id
    ids = ids if own is None or own in ids else (*ids, own)
    template = None
    if tokenizer.chat_template:
        try:
            template = ChatTemplate(tokenizer.get_chat_template(), _plain(tokenizer.special_tokens_map))
        except ValueError as error:
            raise CheckpointError(f"the chat template of {folder} cannot be read: {error}") from error
    return ModelTokenizer(tokenizer.backend_tokenizer, template, ids)


def _plain(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens, of which some may be `AddedToken`s, as texts."""
    return {
        name: list(map(str, token)) if isinstance(token, list | tuple) else str(token)
        for name, token in special_tokens.items()
    }


# GGUF files

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS: Final = {"smollm": None, "llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
"""By what a file calls it, how a text is split before its parts become tokens: as in the models' own tokenizer.json.
SmolLM's has digits one by one, and splits what is between them as GPT-2's does."""

_CONTROL: Final = 3  # kinds of tokens that are found in a text before it is split
_USER_DEFINED: Final = 4


def gguf_tokenizer(path: Path) -> ModelTokenizer | None:
    """The tokenizer of a GGUF file, and its chat template; None if it has none.

    Raises:
        UnsupportedModelError: it makes tokens in a way that is not known here; the message says which.
        MissingExtraError: `tokenizers` or `gguf` is not installed.
        CheckpointError: the file is broken, or lacks what its tokenizer needs.
    """
    file = GGUFFile(path)
    if "tokenizer.ggml.model" not in file.fields:
        return None
    fields = Fields(file.fields, f"{path}: ")
    try:
        begin, ends = gguf_token_ids(file, "bos"), gguf_end_token_ids(file)
        tokenizer = _byte_level_bpe(fields, begin)
    except ImportError as error:
        raise _missing(path) from error
    except MinicacheError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error!r}") from error

    names = {"bos": begin, "eos": gguf_token_ids(file, "eos")}
    special = {f"{name}_token": tokenizer.id_to_token(token_id) for name, each in names.items() for token_id in each}
    source = fields.get("tokenizer.chat_template")
    if not isinstance(source, str | None):
        raise CheckpointError(f"{path}: tokenizer.chat_template must be a text")
    return ModelTokenizer(tokenizer, ChatTemplate(source, special) if source else None, ends)


def _byte_level_bpe(fields: Fields, begin: tuple[int, ...]) -> Any:
    """The `tokenizers.Tokenizer` of a file's fields; `begin`: the token that goes before every text, if it is there."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    fields.require("tokenizer.ggml.model", "gpt2")
    split_by = fields.get("tokenizer.ggml.pre")
    if split_by not in _SPLITS:
        raise fields.unsupported("tokenizer.ggml.pre", split_by, one_of(_SPLITS))
    fields.require("tokenizer.ggml.add_space_prefix", False, default=False)
    fields.require("tokenizer.ggml.add_eos_token", False, default=False)
    tokens, kinds = fields.sequence("tokenizer.ggml.tokens", str), fields.sequence("tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in fields.sequence("tokenizer.ggml.merges", str)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise ValueError(f"the token {twice!r} is there twice")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split_by == "llama-bpe"))
    if split_by == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    pattern = _SPLITS[split_by]
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern is None
        else pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        of_kind = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in of_kind])
    if fields.flag("tokenizer.ggml.add_bos_token", default=split_by == "llama-bpe"):
        [token_id] = begin
        token = tokens[token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, token_id)]
        )
    return tokenizer


def _missing(model: Path) -> MissingExtraError:
    return MissingExtraError(
        f"the tokenizer of {model} needs transformers: pip install 'minicache-course[hf]'; or give another, "
        "LLM(…, tokenizer=…)"
    )
