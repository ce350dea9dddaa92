"""Steps with draft tokens: filled in, verified in the one forward pass, and kept as far as they are accepted.

The drafts come from `minicache.engine.drafting`; what a row of logits makes of one is phase 9's `verify`. No phase
builds this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from minicache.engine.constraints import StepMasks
from minicache.engine.kv import Model, PagedMemory, logits_at
from minicache.engine.runners.find import ModelRunner
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.engine.speculative import rows_to_verify, verify
from minicache.request import Request, RequestId
from minicache.scheduler import SchedulerOutput
from minicache.scheduler.speculative import SpeculativeScheduler

FindSampler = Callable[[RequestId], TokenSampler | None]
"""The sampler of a request; None for one that is not to have draft tokens."""


class StepDrafter(Protocol):
    """Where an engine's draft tokens come from."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """As `minicache.scheduler.speculative.Propose`."""

    def fill(self, output: SchedulerOutput) -> None:
        """Put tokens into the reserved slots: into the lists of `output.draft_token_ids`.

        Called for every step, before the model runs: a draft model must also run on requests without draft tokens.
        """


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
        accepted: row of what `run_model` gave → the tokens that the step has recorded before the one of that row, and
            the logits `[n, vocab]` that they were picked from; only rows with at least one.
        masks: of constrained answers; None: there are none.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: SpeculativeScheduler, drafter: StepDrafter, find_sampler: FindSampler
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._drafter = drafter
        self._find_sampler = find_sampler
        self._picked: dict[int, tuple[int | None, TokenSampler]] = {}  # by row of what `run_model` gave
        self.accepted: dict[int, tuple[list[int], Tensor]] = {}
        self.masks: StepMasks | None = None

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """As `minicache.scheduler.speculative.Propose`."""
        return self._drafter.propose(request, num_tokens) if self._find_sampler(request.request_id) else []

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `LLM.run_model`: `[B, vocab]`, of each request those that its last token of the step is picked from."""
        self._picked, self.accepted = {}, {}
        self._drafter.fill(output)
        run = self._runner.run_model
        logits = run(output) if self.masks is None else self.masks.run(output, run)
        drafts = output.draft_token_ids
        if not drafts:
            return logits
        # The requests' own samplers stay where they are until the tokens are picked: the step may fail before.
        samplers = {
            each.request_id: lookahead(sampler_of(each, self._find_sampler))
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
                    self.accepted[at] = tokens[each][:num_accepted], logits[starts[at] : last_rows[at]]
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


class EagerRunner:
    """Runs any model, call by call, as `LLM.run_model` does, and gives logits for draft tokens too.

    Args:
        model: is run.
        memory: where the requests' keys and values are.
    """

    def __init__(self, model: Model, memory: PagedMemory) -> None:
        self._model = model
        self._memory = memory

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `minicache.engine.runners.find.ModelRunner.run_model`."""
        step, device = self._memory.begin(output), self._memory.storage.device
        token_ids = step.tensors().token_ids[None].to(device)
        rows = rows_to_verify(step.counts, [len(request.draft_token_ids) for request in step.requests])
        with torch.inference_mode():
            return logits_at(self._model, token_ids, self._memory.cache_of(step), torch.tensor(rows, device=device))

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `ModelRunner.pick_tokens`."""
        return pick_tokens(logits[list(rows)], samplers)


def lookahead(sampler: TokenSampler) -> TokenSampler:
    """A copy of a sampler, which makes the same next draws. The sampler itself does not change."""
    other = copy(sampler)
    if sampler.generator is not None:
        other.generator = sampler.generator.clone_state()
    return other


def sampler_of(request: Request, find_sampler: FindSampler) -> TokenSampler:
    """The sampler of a request that has draft tokens."""
    sampler = find_sampler(request.request_id)
    assert sampler is not None
    return sampler
