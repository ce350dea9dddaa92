"""The tokenizer of a Hugging Face folder: tokenizer.json, and the chat template next to it.

`transformers` does the work; it is asked for when a folder has a tokenizer, and not before. What this adds is what the
engine asks of a tokenizer (`minicache.engine.stopping.Tokenizer`). No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minicache.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from minicache.model.folder import end_token_ids

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")


class FolderTokenizer:
    """A folder's tokenizer, as the engine uses one.

    Args:
        folder: of the model.

    Attributes:
        end_token_ids: the tokens that end a text: the model's (generation_config.json, else config.json), and the
            tokenizer's own.
        end_token_id: the first of them; −1 if there is none.
        max_token_chars: the most characters of a text that one token stands for. A vocabulary writes a token with one
            letter for each of its characters, or for each of its bytes, so with no fewer.
        has_chat_template: whether conversations can be turned into prompts (`apply_chat_template`).

    Raises:
        MissingExtraError: `transformers` is not installed.
        CheckpointError: the tokenizer's files cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise MissingExtraError(
                f"the tokenizer of {folder} needs transformers: pip install 'minicache-course[hf]'; or give another, "
                "LLM(…, tokenizer=…)"
            ) from error
        ids = end_token_ids(Path(folder))
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}") from error
        own = self._tokenizer.eos_token_id
        self.end_token_ids: tuple[int, ...] = ids if own is None or own in ids else (*ids, own)
        self.end_token_id = next(iter(self.end_token_ids), -1)
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()))
        self.has_chat_template = bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """A text as token ids, with what the tokenizer puts before every text (Llama's <|begin_of_text|>)."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int], /) -> str:
        """Token ids as a text, in which end tokens and other special tokens do not show.

        Bytes that are no whole letter yet are U+FFFD, and so are those that never become one.
        """
        shown = [token_id for token_id in ids if token_id not in self.end_token_ids]
        return str(self._tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as the token ids of a prompt, up to where the model is to answer.

        Args:
            messages: each with "role" and "content", in their order.

        Raises:
            ValueError: the folder has no chat template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ValueError("this model has no chat template: give a prompt")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's authors, and may raise what it likes
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        # The template has written all special tokens that belong there.
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """The tokenizer of a folder; None if it has none.

    Raises:
        UnsupportedModelError: it has one, but no tokenizer.json.
        MissingExtraError, CheckpointError: as `FolderTokenizer`.
    """
    if (folder / "tokenizer.json").is_file():
        return FolderTokenizer(folder)
    other = next((name for name in _OTHER_TOKENIZERS if (folder / name).is_file()), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{folder} has its tokenizer as {other}, and only tokenizer.json is read: save it anew with "
            "`AutoTokenizer.from_pretrained(…).save_pretrained(…)` of transformers"
        )
    return None
