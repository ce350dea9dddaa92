"""Tokens picked on a GPU: all rows of a batch together, and one copy back.

`minicache.engine.sampling.pick_tokens`, phase 5's, draws row by row on the CPU. On a GPU that would wait for the device
and copy whole rows of logits. Here only a few numbers a request travel: what it asks for, and a random number of its
own, which says where in the cumulative distribution its token lies. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minicache.engine.sampling import SamplingParams, TokenSampler

LEAST_TEMPERATURE = 1e-20
"""Less is taken for this much: in float32 it would be 0. The likeliest token is still drawn."""


class GPUSampler:
    """Picks the tokens of a batch on the device that has its logits.

    A request's random numbers come from a generator of its own on the host, so its n-th draw is the same whatever else
    is in the batch. It draws other tokens than `TokenSampler.draw` does with the same seed: that one compares as many
    random numbers as there are tokens, and they would all have to be copied.
    """

    def __init__(self) -> None:
        self._generators: WeakKeyDictionary[TokenSampler, Random] = WeakKeyDictionary()

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """Pick a token from some rows, each for its own request. Waits for the device once, for the tokens.

        Args:
            logits: `[B, vocab]`.
            rows: which rows, rising.
            samplers: one for each of `rows`. Only their params are read.

        Returns:
            A token id for each of `rows`; None where the largest logit is NaN or infinite.
        """
        if not rows:
            return []
        # Those that keep all tokens come first: the others' rows have to be sorted.
        drawn = [index for index, sampler in enumerate(samplers) if not sampler.params.is_greedy]
        drawn.sort(key=lambda index: _rules_out(samplers[index].params))
        params = [samplers[index].params for index in drawn]
        num_whole = sum(not _rules_out(each) for each in params)
        with torch.inference_mode():
            if drawn or len(rows) < len(logits):
                vocab_size = logits.shape[-1]
                numbers = [
                    *rows,
                    *drawn,
                    *(max(each.temperature, LEAST_TEMPERATURE) for each in params),
                    *(min(each.top_k or vocab_size, vocab_size) for each in params),
                    *(each.top_p if each.top_p < 1 else 2.0 for each in params),
                    *(1.0 - self._generator(samplers[index]).random() for index in drawn),  # 0 < u ≤ 1
                ]
                on_device = _copied(numbers, logits.device)
                row_ids, *columns = torch.split(on_device, [len(rows), *[len(drawn)] * 5])
                logits = logits.index_select(0, row_ids.long())
            likeliest = logits.argmax(dim=-1)  # finds NaN before anything else
            token_ids = likeliest
            for start, end in ((0, num_whole), (num_whole, len(drawn))):
                if start < end:
                    index, temperature, top_k, top_p, uniform = (column[start:end] for column in columns)
                    kept = None if end == num_whole else (top_k.long(), top_p)
                    token_ids = token_ids.index_copy(
                        0, index.long(), draw(logits.index_select(0, index.long()), temperature, kept, uniform)
                    )
            is_good = logits.gather(-1, likeliest[:, None])[:, 0].isfinite()
            found: list[int] = token_ids.where(is_good, -1).tolist()
        return [None if token_id < 0 else token_id for token_id in found]

    def _generator(self, sampler: TokenSampler) -> Random:
        """The generator of a sampler's request: made when it draws first, and gone with the request."""
        if sampler not in self._generators:
            self._generators[sampler] = Random(sampler.params.seed)
        return self._generators[sampler]


def draw(logits: Tensor, temperature: Tensor, kept: tuple[Tensor, Tensor] | None, uniform: Tensor) -> Tensor:
    """Draw a token from each row: temperature first, then top-k, then top-p.

    The token is the first at which the cumulative probability reaches `uniform` of the whole. Tokens are in the order
    of their ids; where some are ruled out, the likeliest first. A token of probability 0 is never drawn.

    Args:
        logits: `[R, vocab]`.
        temperature: `[R]`, > 0.
        kept: None, or for each row k `[R]` int64, 1 … vocab, and p `[R]`; p > 1 keeps all. As
            `minicache.engine.sampling.keep_top_k` and `keep_top_p`.
        uniform: `[R]` float64, 0 < u ≤ 1.

    Returns:
        `[R]` int64. Some token or other for a row with NaN.
    """
    rows = logits.float()
    rows = (rows - rows.amax(dim=-1, keepdim=True)) / temperature[:, None].float()
    order = None
    if kept is not None:
        top_k, top_p = kept
        rows, order = rows.sort(dim=-1, descending=True, stable=True)
        rows = rows.masked_fill(rows < rows.gather(-1, top_k[:, None] - 1), -torch.inf)
    probabilities = torch.softmax(rows, dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    if kept is not None:
        before = cumulative - probabilities
        before[:, 0] = 0.0  # exactly, whatever the rounding
        probabilities = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    # Sums in parallel may grow a little, or shrink, where nothing is added.
    cumulative = cumulative.masked_fill(probabilities == 0, 0.0)
    reached = cumulative >= uniform[:, None] * cumulative.amax(dim=-1, keepdim=True)
    token_ids = reached.to(torch.int8).argmax(dim=-1, keepdim=True)
    return (token_ids if order is None else order.gather(-1, token_ids))[:, 0]


def _rules_out(params: SamplingParams) -> bool:
    """Whether top-k or top-p can rule a token out."""
    return params.top_k > 0 or params.top_p < 1


def _copied(numbers: list[float], device: torch.device) -> Tensor:
    """The numbers as float64 on the device, without waiting for it. Ids below 2⁵³ are exact."""
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=torch.cuda.is_available())
    return host.to(device, non_blocking=True)
