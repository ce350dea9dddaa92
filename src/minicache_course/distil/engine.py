"""Written by hand for `minicache distil`: the engine around a learner's files in the one file.

Prompts in, answers out, over the loop of phase 5. Nothing imports this module: it is read.
"""

# mypy: ignore-errors
# It is checked as part of the file that it becomes: a class here stands in for another of the package.

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.cache.swap import HostStorage, copy_blocks
from minicache.engine.kv import RequestTable
from minicache.engine.loop import EngineLoop
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.errors import MinicacheError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache_course.distil.llama import Llama, load_llama


def logits_at(model: Llama, token_ids: Tensor, cache: RaggedStep, rows: Tensor) -> Tensor:
    """As `Llama.forward`."""
    return model(token_ids, cache, rows)


class PagedMemory:
    """The contents of the scheduler's blocks, for all requests."""

    def __init__(self, model: Llama, scheduler: ChunkedPrefillScheduler) -> None:
        config, weights = model.config, next(model.parameters())
        sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
        self.storage = PagedStorage(scheduler.pool, *sizes, dtype=weights.dtype, device=weights.device)
        host_pool = scheduler.host_pool
        self.host_storage = None if host_pool is None else HostStorage(self.storage, host_pool.num_blocks)

    def move_blocks(self, output: SchedulerOutput) -> None:
        """First out, then in, then on the device, as one block may be in all three."""
        if self.host_storage is not None:
            for pairs in output.swapped_out.values():  # one request at a time: two may share a block
                self.host_storage.swap_out(pairs)
            self.host_storage.swap_in([pair for pairs in output.swapped_in.values() for pair in pairs])
        copy_blocks(self.storage, output.blocks_to_copy)

    def make_step(self, output: SchedulerOutput) -> RaggedStep:
        """The cache of one step, on which the model runs."""
        tables = [RequestTable(self.storage, request) for request in output.scheduled]
        return RaggedStep(self.storage, tables, list(output.num_scheduled_tokens.values()))


class FolderTokenizer:
    """The tokenizer.json of a folder, by the `tokenizers` library."""

    def __init__(self, folder: str, end_token_ids: Sequence[int]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self._end_token_ids = frozenset(end_token_ids)

    def encode(self, text: str) -> list[int]:
        """A text as token ids."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as a text, in which end tokens do not show."""
        return self._tokenizer.decode([token_id for token_id in ids if token_id not in self._end_token_ids])


class TextStream:
    """The text of an answer, shown as its tokens come: no half letters, and nothing that may begin a stop string."""

    def __init__(self, tokenizer: FolderTokenizer, prompt_token_ids: list[int], stop: Sequence[str]) -> None:
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._token_ids = prompt_token_ids.copy()
        self._stop = stop
        self._num_shown = len(tokenizer.decode(prompt_token_ids))

    def push(self, token_id: int) -> str:
        """Take the next token; returns what can be shown now."""
        self._token_ids.append(token_id)
        return self._show(max(map(len, self._stop), default=1) - 1)

    def finish(self) -> str:
        """The request has finished: returns what was held back."""
        return self._show(0)

    def _show(self, num_held: int) -> str:
        text = self._tokenizer.decode(self._token_ids)
        if num_held or not self._stop:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes of a letter that is not complete yet
        ends = [end for stop in self._stop if (end := text.find(stop, self._num_shown)) >= 0]
        end = min(ends, default=max(self._num_shown, len(text) - num_held))
        piece, self._num_shown = text[self._num_shown : end], end
        self.is_stopped = bool(ends)
        self.text += piece
        return piece


@dataclass(slots=True)
class Chunk:
    """A token of an answer, and the text that can be shown since."""

    index: int
    token_id: int | None
    text: str
    finish_reason: str | None
    request_id: RequestId


@dataclass(slots=True, eq=False)
class Answer:
    """A request that the engine serves, with the engine's state for it."""

    request: Request
    sampler: TokenSampler
    text: TextStream | None
    chunks: list[Chunk]
    index: int = 0
    first: Request | None = None
    num_chunks: int = 0

    @property
    def finish_reason(self) -> str | None:
        """Why it is finished; None while it is not."""
        return "stop" if self.text is not None and self.text.is_stopped else self.request.finish_reason


class Engine(EngineLoop):
    """Serves many requests at once, step by step.

    A prompt is a text, if there is a tokenizer, or a list of token ids.
    """

    def __init__(self, model: Llama, tokenizer: FolderTokenizer | None, num_blocks: int = 2048, **options: Any) -> None:
        options = {"max_model_len": model.config.max_seq_len, "prefix_caching": True, **options}
        scheduler = ChunkedPrefillScheduler(num_blocks=num_blocks, **options)
        memory = PagedMemory(model, scheduler)
        super().__init__(model, scheduler, memory)
        self.tokenizer = tokenizer
        self._names = count()
        self._waiting_to_fork: list[Answer] = []

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams) -> list[Answer]:
        """Have a prompt answered by the steps to come, `params.n` times: the others are forks of the first answer."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise MinicacheError("a prompt has at least one token: this one is empty")
        ends = () if params.ignore_eos else self.model.config.end_token_ids
        max_tokens = min(params.max_tokens, self.scheduler.max_model_len - len(token_ids))
        stops = (*params.stop_token_ids, *ends)
        request = Request(next(self._names), token_ids, max_tokens, stop_token_ids=stops)
        answers = []
        for turn in range(params.n):
            its = request.child(next(self._names)) if turn else request
            text = None if self.tokenizer is None else TextStream(self.tokenizer, token_ids, params.stop)
            first = request if turn else None
            answers.append(Answer(its, TokenSampler(params.of_answer(turn)), text, self._chunks, turn, first))
        self.scheduler.add_request(request)
        self._waiting_to_fork += answers[1:]
        self.answers |= {answer.request.request_id: answer for answer in answers}
        return answers

    def collect(self) -> list[Chunk]:
        """The chunks that were not returned yet; and forks begin whose first answer has a token."""
        for answer in self._waiting_to_fork.copy():
            first, name, scheduler = answer.first, answer.request.request_id, self.scheduler
            has_slot = len(scheduler.running) < scheduler.max_num_seqs
            if first.status.is_finished:
                scheduler.add_request(answer.request)
            elif first.status is RequestStatus.RUNNING and first.output_token_ids and has_slot:
                answer.request = scheduler.fork_request(first.request_id, name, [])
            else:
                continue
            self._waiting_to_fork.remove(answer)
        return super().collect()

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Answer]:
        """Answer all prompts; of each, `request.output_token_ids` and `text.text`."""
        answers = [answer for prompt in prompts for answer in self.add_request(prompt, params)]
        while self.answers:
            self.step()
        return answers


def main() -> None:
    """Answer prompts: `python FILE FOLDER PROMPT …`."""
    folder, *prompts = sys.argv[1:] or [""]
    if not prompts:
        sys.exit(__doc__)
    try:
        model = load_llama(folder, dtype=torch.float32)
        engine = Engine(model, FolderTokenizer(folder, model.config.end_token_ids))
        answers = engine.generate(prompts, SamplingParams(max_tokens=64))
    except MinicacheError as error:
        sys.exit(str(error))
    for prompt, answer in zip(prompts, answers, strict=True):
        print(prompt + answer.text.text)
    print(f"{engine.scheduler.stats.hit_rate:.0%} of the prompts' tokens were cached", file=sys.stderr)


if __name__ == "__main__":
    main()
