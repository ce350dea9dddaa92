"""Log probabilities with the tokens: what a client of a served model may ask for. No phase builds this module.

They are the model's own: log_softmax of the logits in float32, before temperature, top-k and top-p; of a constrained
answer over the allowed tokens, as in vLLM. `LLM` reads them from the logits from which a step picks its tokens, for the
rows of requests that have asked, for no others.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minicache.engine.answers import TokenLogprobs

MAX_LOGPROBS = 20
"""The most tokens whose log probabilities a request can have for each token that it gets."""

PAIRS = np.dtype([("id", "<u4"), ("logprob", "<f4")])
"""`minicache.engine.answers.PAIR`, for arrays."""


def token_logprobs(logits: Tensor, token_ids: list[int], counts: tuple[int, ...]) -> list[TokenLogprobs]:
    """The log probability of each row's token, and of the likeliest tokens.

    Args:
        logits: `[B, vocab]`, as the model gave them; −inf for tokens that a constraint rules out.
        token_ids: B tokens, one of each row.
        counts: how many of the likeliest tokens to name for each row, ≥ 0; all of them if there are fewer.

    Returns:
        B of them. Among equally likely tokens the lower id is first.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(counts), logprobs.shape[-1]), dim=-1)
    ids, values = best.indices.cpu().numpy(), best.values.cpu().numpy()
    order = np.lexsort((ids, -values))
    pairs = np.empty(ids.shape, PAIRS)
    pairs["id"], pairs["logprob"] = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
    return [
        TokenLogprobs(token_id, logprob, row[:count].tobytes())
        for token_id, logprob, row, count in zip(token_ids, chosen, pairs, counts, strict=True)
    ]
