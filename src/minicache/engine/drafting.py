"""Draft tokens for a whole batch of an engine, which its step verifies in one forward pass.

The scheduler reserves the draft tokens' slots (`minicache.scheduler.speculative`). An n-gram drafter proposes them
while the step is scheduled. A draft model, a smaller model over the same blocks, fills them in afterwards. Then the
model runs once, over each request's newest token and its draft tokens, and gives logits for all of them; `verify`,
phase 9's, returns the tokens that each request gains. Draft tokens change the speed of an answer, never its tokens. No
phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import Tensor

from minicache.engine.kv import Memory, Model, PagedMemory, kv_token_nbytes
from minicache.engine.loading import find_model, load_model
from minicache.engine.runners.find import ModelRunner, find_runner
from minicache.engine.runners.verify import (
    EagerRunner,
    FindSampler,
    SpeculativeRunner,
    StepDrafter,
    lookahead,
    sampler_of,
)
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.engine.speculative import NgramDrafter
from minicache.errors import require_count
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.speculative import SpeculativeScheduler, placeholders


@dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates.

    Attributes:
        model: "ngram": draft tokens come from the request's own text. Or a draft model, as `LLM` takes its model:
            "minigpt-draft", a checkpoint, a folder, a hub name, or a model. It must have the model's vocabulary, and
            take as many tokens.
        num_speculative_tokens: k, the most draft tokens of a request in one step, ≥ 1. A scheduler that is given has
            its own.
        prompt_lookup_max: for "ngram", the longest ending to search for, in tokens, ≥ 1.

    Raises:
        TypeError: a number is not an int.
        ValueError: it is below 1.
    """

    model: str | Path | Model = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3

    def __post_init__(self) -> None:
        require_count("num_speculative_tokens", self.num_speculative_tokens)
        require_count("prompt_lookup_max", self.prompt_lookup_max)


Speculative = str | Path | Model | SpeculativeConfig
"""An engine's argument: a config, or the `model` of one."""


def load_speculative(speculative: Speculative, target: Model) -> SpeculativeConfig:
    """The config of an engine, with its draft model loaded.

    Args:
        speculative: as above. A draft model that is loaded gets the target's dtype and device.
        target: the model that verifies.

    Raises:
        ValueError: the draft model has another vocabulary than the target.
        Exception: as `minicache.engine.loading.load_model`.
    """
    config = speculative if isinstance(speculative, SpeculativeConfig) else SpeculativeConfig(speculative)
    if config.model == "ngram":
        return config
    weights: Tensor = next(iter(target.parameters()))
    found = find_model(config.model)
    loaded = (weights.dtype, weights.device) if isinstance(found, Path) else (None, None)
    draft = load_model(found, *loaded)
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the draft model has {draft.config.vocab_size} tokens in its vocabulary, the model "
            f"{target.config.vocab_size}: take a draft model with the same tokenizer"
        )
    return replace(config, model=draft)


def share_of_target(config: SpeculativeConfig, target: Model, kv_cache_dtype: str | None) -> float:
    """The target's share of the memory for keys and values: a draft model has as many blocks."""
    if isinstance(config.model, str | Path):
        return 1.0
    sizes = [kv_token_nbytes(model, kv_cache_dtype) for model in (target, config.model)]
    return sizes[0] / sum(sizes)


class TextDrafter:
    """Draft tokens from a request's own text (`NgramDrafter`).

    Args:
        max_ngram: as for `NgramDrafter`.
    """

    def __init__(self, max_ngram: int) -> None:
        self._drafter = NgramDrafter(max_ngram)

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """The tokens that followed the end of the text at its previous occurrence."""
        return self._drafter.draft([*request.prompt_token_ids, *request.output_token_ids], num_tokens)

    def fill(self, output: SchedulerOutput) -> None:
        """Nothing to do: the tokens were known when the step was scheduled."""


class DraftModel:
    """Draft tokens from a smaller model, which keeps its keys and values in the blocks of the same ids.

    In each step it first runs over all tokens that it has not seen: prompts, chunk by chunk with the model, and for a
    request in decode the newest token and the accepted ones of its last draft tokens. That gives the first draft token
    of each request. Then it runs on one token of each request at a time, k − 1 times. Blocks are copied and swapped as
    the model's are. Errors in its cache only make its draft tokens worse.

    For a request with temperature 0 a draft token is the likeliest. Otherwise it is drawn from the draft model's
    distribution, with the random numbers that the request's sampler will draw next, without consuming them: so both
    tend to pick the same token (Daliri, Musco and Suresh 2024).

    Args:
        model: the draft model.
        scheduler: whose blocks.
        kv_cache_dtype: what they hold, as `LLM` takes it.
        find_sampler: of the requests with draft tokens.
        enforce_eager: on a GPU, no CUDA graphs.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        kv_cache_dtype: str | None,
        find_sampler: FindSampler,
        *,
        enforce_eager: bool,
    ) -> None:
        self._memory = PagedMemory(model, scheduler, kv_cache_dtype)
        found = find_runner(model, self._memory, scheduler.max_num_seqs, enforce_eager=enforce_eager)
        self._runner = found or EagerRunner(model, self._memory)
        self._find_sampler = find_sampler
        self._seen: dict[RequestId, int] = {}  # of the last step's requests, how many tokens it has run on

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """All slots, to be filled in the step."""
        return placeholders(request, num_tokens)

    def fill(self, output: SchedulerOutput) -> None:
        """As `StepDrafter.fill`."""
        self._memory.move_blocks(output)
        drafts, views = output.draft_token_ids, []
        seen: dict[RequestId, int] = {}
        for request in output.scheduled:
            request_id, computed = request.request_id, request.num_computed_tokens
            its_drafts = drafts.get(request_id, ())
            end = computed + output.num_scheduled_tokens[request_id] - len(its_drafts)
            # A request that it does not know has found a prefix, or was swapped in: then its blocks have come with it.
            start = min(self._seen.get(request_id, computed), computed)
            views.append(_View(request, start, end))
            seen[request_id] = end + max(0, len(its_drafts) - 1)
        logits = self._run(views)
        self._seen = seen
        rows = [row for row, view in enumerate(views) if view.request.request_id in drafts]
        if not rows:
            return
        views = [views[row] for row in rows]
        logits = logits[rows]
        samplers = [lookahead(sampler_of(view.request, self._find_sampler)) for view in views]
        position = 0
        while True:
            for view, token in zip(views, _picked(logits, samplers), strict=True):
                drafts[view.request.request_id][position] = token
            position += 1
            going_on = [i for i, view in enumerate(views) if len(drafts[view.request.request_id]) > position]
            if not going_on:
                return
            views = [_View(views[i].request, views[i].end, views[i].end + 1) for i in going_on]
            samplers = [samplers[i] for i in going_on]
            logits = self._run(views)

    def _run(self, views: list[_View]) -> Tensor:
        """The logits after the last token of each view."""
        counts = {view.request.request_id: view.end - view.num_computed_tokens for view in views}
        return self._runner.run_model(SchedulerOutput(counts, cast("list[Request]", views)))


class _View:
    """Some tokens of a request as a step's work: the attributes that runners read of a `Request`, for a draft model."""

    __slots__ = ("block_ids", "draft_token_ids", "end", "num_computed_tokens", "request", "token_ids")

    def __init__(self, request: Request, start: int, end: int) -> None:
        self.request = request
        self.block_ids = request.block_ids
        self.num_computed_tokens = start
        self.end = end
        self.draft_token_ids = ()  # whose logits are needed
        self.token_ids = request.token_ids


def _picked(logits: Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """A draft token from each row; any, where a row gives none."""
    return [token or 0 for token in pick_tokens(logits, samplers)]


def speculate(
    config: SpeculativeConfig | None,
    model: Model,
    runner: ModelRunner | None,
    memory: Memory,
    scheduler: Scheduler,
    find_sampler: FindSampler,
    max_model_len: int,
    *,
    enforce_eager: bool,
) -> SpeculativeRunner:
    """Make an engine speculate: its scheduler proposes draft tokens from now on, and its steps verify them.

    Args:
        config: of `load_speculative`.
        model: the engine's.
        runner: runs it; None: it is run as any model.
        memory: the engine's.
        scheduler: the engine's, not observed.
        find_sampler: of the engine's requests.
        max_model_len: the most tokens of a request.
        enforce_eager: on a GPU, no CUDA graphs for the draft model.

    Returns:
        The runner to use in place of `runner`.

    Raises:
        ValueError: config and scheduler do not go together, the cache is not paged, or the draft model takes fewer
            tokens than max_model_len.
    """
    if config is None:
        raise ValueError('a SpeculativeScheduler needs draft tokens: give speculative="ngram", or a draft model')
    if not isinstance(scheduler, SpeculativeScheduler):
        raise ValueError(
            "this scheduler computes no draft tokens: leave out speculative, or give it a SpeculativeScheduler"
        )
    if not isinstance(memory, PagedMemory):
        raise ValueError('a dense cache keeps the entries of rejected draft tokens: take cache="paged"')
    drafter: StepDrafter
    if isinstance(config.model, str | Path):
        drafter = TextDrafter(config.prompt_lookup_max)
    else:
        longest = config.model.config.max_seq_len
        if longest < max_model_len:
            raise ValueError(
                f"the draft model takes {longest} tokens, and max_model_len is {max_model_len}: lower it, or take "
                f"another draft model"
            )
        held = memory.kv_cache_dtype
        drafter = DraftModel(config.model, scheduler, held, find_sampler, enforce_eager=enforce_eager)
    speculation = SpeculativeRunner(runner or EagerRunner(model, memory), scheduler, drafter, find_sampler)
    scheduler.propose = speculation.propose
    return speculation
