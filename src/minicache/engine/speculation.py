"""Speculation in an engine: drafts for a whole batch, verified in the step's one forward pass.

The scheduler reserves the draft tokens' slots (`minicache.scheduler.speculative`). An n-gram drafter proposes them
while the step is scheduled. A draft model, a smaller model over the same blocks, fills them in afterwards. Then the
model runs once, over each request's newest token and its draft tokens, and gives logits for all of them; `verify`,
phase 9's, returns the tokens that each request gains. Draft tokens change the speed of an answer, never its tokens. No
phase builds this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from minicache.engine.model_runner import ModelRunner, find_runner
from minicache.engine.runner import (
    Memory,
    Model,
    PagedMemory,
    find_model,
    kv_token_nbytes,
    load_model,
    logits_at,
)
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.engine.speculative import NgramDrafter, rows_to_verify, verify
from minicache.errors import require_count
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.speculative import SpeculativeScheduler, placeholders

FindSampler = Callable[[RequestId], TokenSampler | None]
"""The sampler of a request; None for one that is not to have draft tokens."""


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


Speculative = str | Path | Model | SpeculativeConfig | None
"""An engine's argument: a config, or the `model` of one; None: no speculation."""


def load_speculative(speculative: Speculative, target: Model) -> SpeculativeConfig | None:
    """The config of an engine, with its draft model loaded.

    Args:
        speculative: as above. A draft model that is loaded gets the target's dtype and device.
        target: the model that verifies.

    Raises:
        ValueError: the draft model has another vocabulary than the target.
        Exception: as `minicache.engine.runner.load_model`.
    """
    if speculative is None:
        return None
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


def share_of_target(config: SpeculativeConfig | None, target: Model, kv_cache_dtype: str | None) -> float:
    """The target's share of the memory for keys and values: a draft model has as many blocks."""
    if config is None or isinstance(config.model, str | Path):
        return 1.0
    sizes = [kv_token_nbytes(model, kv_cache_dtype) for model in (target, config.model)]
    return sizes[0] / sum(sizes)


class StepDrafter(Protocol):
    """Where an engine's draft tokens come from."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """As `minicache.scheduler.speculative.Propose`."""

    def fill(self, output: SchedulerOutput) -> None:
        """Put tokens into the reserved slots: into the lists of `output.draft_token_ids`.

        Called for every step, before the model runs: a draft model must also run on requests without draft tokens.
        """


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
        samplers = [lookahead(_sampler_of(view.request, self._find_sampler)) for view in views]
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


def lookahead(sampler: TokenSampler) -> TokenSampler:
    """A copy of a sampler, which makes the same next draws. The sampler itself does not change."""
    other = copy(sampler)
    if sampler.generator is not None:
        other.generator = sampler.generator.clone_state()
    return other


def _sampler_of(request: Request, find_sampler: FindSampler) -> TokenSampler:
    """The sampler of a request that has draft tokens."""
    sampler = find_sampler(request.request_id)
    assert sampler is not None
    return sampler


def _picked(logits: Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """A draft token from each row; any, where a row gives none."""
    return [token or 0 for token in pick_tokens(logits, samplers)]


class EagerRunner:
    """Runs any model, call by call, as `LLM.run_model` does, and gives logits for draft tokens too.

    Args:
        model: is run.
        memory: where the requests' keys and values are.
    """

    def __init__(self, model: Model, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        self._device: torch.device = next(iter(model.parameters())).device

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `minicache.engine.model_runner.ModelRunner.run_model`."""
        counts = list(output.num_scheduled_tokens.values())
        tokens: list[int] = []
        for request, num_new in zip(output.scheduled, counts, strict=True):
            start = request.num_computed_tokens
            tokens += request.token_ids(start, start + num_new)
        rows = rows_to_verify(counts, [len(request.draft_token_ids) for request in output.scheduled])
        token_ids = torch.tensor([tokens], device=self._device)
        with torch.inference_mode():
            return logits_at(
                self._model, token_ids, self._memory.make_step(output), torch.tensor(rows, device=self._device)
            )

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `ModelRunner.pick_tokens`."""
        return pick_tokens(logits[list(rows)], samplers)


class SpeculativeRunner:
    """Runs an engine's steps with draft tokens: a `ModelRunner` in front of the one that runs the model.

    `run_model` has the draft tokens filled in, runs the model, and passes the accepted tokens to the scheduler
    (`SpeculativeScheduler.accept`). To the engine's loop the step then looks as if it had computed accepted tokens
    only: it picks a token for each request, which `pick_tokens` has already, and commits it.

    Args:
        runner: runs the model.
        scheduler: of the engine.
        drafter: where the draft tokens come from.
        find_sampler: of the requests with draft tokens.

    Attributes:
        accepted: id → the tokens that the last step has recorded before its last, and the logits `[n, vocab]` that they
            were picked from; only requests with at least one.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: SpeculativeScheduler, drafter: StepDrafter, find_sampler: FindSampler
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._drafter = drafter
        self._find_sampler = find_sampler
        self._picked: dict[int, tuple[int | None, TokenSampler]] = {}  # by row of what `run_model` gave
        self.accepted: dict[RequestId, tuple[list[int], Tensor]] = {}

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """As `minicache.scheduler.speculative.Propose`."""
        return self._drafter.propose(request, num_tokens) if self._find_sampler(request.request_id) else []

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `LLM.run_model`: `[B, vocab]`, of each request those that its last token of the step is picked from."""
        self._picked, self.accepted = {}, {}
        self._drafter.fill(output)
        logits = self._runner.run_model(output)
        drafts = output.draft_token_ids
        if not drafts:
            return logits
        # The requests' own samplers stay where they are until the tokens are picked: the step may fail before.
        samplers = {
            each.request_id: lookahead(_sampler_of(each, self._find_sampler))
            for each in output.scheduled
            if each.request_id in drafts
        }
        ids = [request.request_id for request in output.scheduled]
        starts = [0, *accumulate(1 + len(drafts.get(each, ())) for each in ids)]
        rows = [row for at, each in enumerate(ids) if each in drafts for row in range(starts[at], starts[at + 1])]
        found = verify(
            logits if len(rows) == len(logits) else logits[rows], list(drafts.values()), list(samplers.values())
        )
        tokens = dict(zip(drafts, found, strict=True))
        last_tokens = self._scheduler.accept(output, {each: given for each, given in tokens.items() if given})
        last_rows = starts[:-1]
        for at, each in enumerate(ids):
            if each in drafts:
                num_accepted = output.num_scheduled_tokens[each] - 1
                self._picked[at] = last_tokens.get(each), samplers[each]
                last_rows[at] += num_accepted
                if num_accepted:
                    self.accepted[each] = tokens[each][:num_accepted], logits[starts[at] : last_rows[at]]
        return logits[last_rows]

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `ModelRunner.pick_tokens`: of requests with draft tokens those that are picked already.

        On every device the samplers draw themselves, so a request's tokens do not depend on when it has draft tokens.
        """
        others = [at for at, row in enumerate(rows) if row not in self._picked]
        tokens: list[int | None] = [None] * len(rows)
        for at, row in enumerate(rows):
            if row in self._picked:
                tokens[at], drawn = self._picked[row]
                samplers[at].generator = drawn.generator  # consume the draws that were looked ahead
        if others:
            picked = pick_tokens(logits[[rows[at] for at in others]], [samplers[at] for at in others])
            for at, token in zip(others, picked, strict=True):
                tokens[at] = token
        return tokens


def speculate(
    config: SpeculativeConfig | None,
    runner: ModelRunner,
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
        runner: runs the model.
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
    speculation = SpeculativeRunner(runner, scheduler, drafter, find_sampler)
    scheduler.propose = speculation.propose
    return speculation
