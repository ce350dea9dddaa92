"""Constrained answers: JSON of a schema, a match of a regular expression, or one of several texts.

`llguidance` does the work: it turns a constraint into a parser over bytes, and says in each of its states which tokens
may come next. Here a constraint is compiled once and copied for each answer, the masks of a step are computed while the
model runs, and tokens that are not allowed get the logit −inf before any is picked: what is picked is drawn from the
model's distribution over the allowed tokens. An end token is allowed only where the text may end. No phase builds this
module.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicache.engine.grammar_check import GrammarCheck
from minicache.engine.masking import mask_rows
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer, end_token_ids
from minicache.errors import ConstraintError, MissingExtraError
from minicache.request import RequestId
from minicache.scheduler import SchedulerOutput

logger = logging.getLogger("minicache")

MAX_COMPILED: Final = 64
"""So many constraints are kept compiled, those that were used last."""

WHITESPACE: Final = r"[ \t\n]{0,16}"
"""What may stand between two parts of a JSON text. A small model may otherwise write spaces until max_tokens."""

MAX_STEP_FUEL: Final = 50_000
MAX_STEP_ITEMS: Final = 20_000
"""What one mask may cost, in llguidance's units: some milliseconds. An answer that needs more ends with an error."""


class Constraint:
    """Which tokens one answer may have next.

    Args:
        matcher: an `llguidance.LLMatcher` that has read nothing.
        ends: bits of the end tokens `[W]` int32; they are left out as long as anything else is allowed. None: they are
            allowed wherever the text may end.
    """

    def __init__(self, matcher: Any, ends: NDArray[np.int32] | None) -> None:
        self.matcher = matcher
        self._ends = ends
        self._num_read = 0
        self._has_failed = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Read an answer's tokens so far, of which it may have read some; tokens that were taken back are unread."""
        if self._num_read > len(token_ids):
            self.matcher.rollback(self._num_read - len(token_ids))
        elif new := token_ids[self._num_read :]:
            self.matcher.consume_tokens(list(new))
        self._num_read = len(token_ids)

    def finish(self, masks: NDArray[np.int32]) -> None:
        """Correct what llguidance has written: nothing is allowed after an error, and end tokens as `ends` says.

        Args:
            masks: `[1 + k, W]`, after the answer's newest token and each of its k draft tokens.
        """
        if self.matcher.is_error():
            masks[:] = 0
            if not self._has_failed:
                reason = self.matcher.get_error().partition("\n")[0] or self.matcher.stop_reason()
                logger.error("a constraint allows no token, or its mask costs too much: %s", reason)
            self._has_failed = True
        elif self._ends is not None:
            others = masks & ~self._ends
            masks[:] = np.where(others.any(axis=1, keepdims=True), others, masks)


class Grammars:
    """Compiles constraints, for one engine. Threads may share it.

    Args:
        find_tokenizer: as below.
        vocab_size: of the model.
        end_token_ids: those that the model's config names, besides the tokenizer's.

    Attributes:
        find_tokenizer: gives the engine's tokenizer; called once, when the first constraint is compiled.
    """

    def __init__(
        self, find_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self.find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._named_ends = tuple(end_token_ids)
        self._lock = Lock()
        self._check = GrammarCheck()
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def compile(self, params: SamplingParams) -> Any:
        """The `LLMatcher` of a constraint, to be copied. It may take a second; a second time none.

        Args:
            params: with a constraint.

        Raises:
            MissingExtraError: llguidance is not installed.
            ConstraintError: what is asked for cannot be followed; the message names the keyword or the construct. Or
                the engine's tokenizer does not say what its tokens are, or has no end token.
        """
        if params.json_schema is not None:
            return self._compiled("json_schema", params.json_schema)
        if params.regex is not None:
            return self._compiled("regex", params.regex)
        return self._compiled("choice", params.choice)

    def constraint(self, params: SamplingParams, read: Sequence[int] = ()) -> Constraint:
        """A new answer's; raises what `compile` raises.

        Args:
            params: with a constraint.
            read: tokens that the answer begins with.
        """
        matcher = self.compile(params).deep_copy()
        if read:
            matcher.consume_tokens(list(read))
        return Constraint(matcher, self._end_bits if params.ignore_eos else None)

    def _compile(self, kind: str, text: Any) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise MissingExtraError(f"{kind} needs llguidance: pip install 'minicache-course[structured]'") from error
        with self._lock:
            vocabulary = self._vocabulary
        try:
            grammar = vocabulary.grammar(kind, text)
        except ValueError as reason:
            raise ConstraintError(f"{kind} cannot be read: {reason}") from reason
        limits = LLParserLimits(step_lexer_fuel=MAX_STEP_FUEL, step_max_items=MAX_STEP_ITEMS, verbose_errors=False)
        try:
            problem = self._check.problem(grammar)
        except ValueError as reason:
            raise ConstraintError(f"{kind} cannot be compiled: {reason}") from reason
        if problem:
            raise ConstraintError(f"{kind}: {_reason(problem)}")
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()  # what it finds out, all copies know
        if first.is_error():
            raise ConstraintError(f"{kind}: no token can begin such a text ({_reason(first.get_error())})")
        return matcher

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        tokenizer = self.find_tokenizer()
        if tokenizer is None:
            raise ConstraintError("a constraint needs a tokenizer: give the engine one")
        ends = tuple(dict.fromkeys((*end_token_ids(tokenizer), *self._named_ends)))
        if not ends:
            raise ConstraintError("a constrained answer ends with an end token, and this tokenizer has none")
        return _vocabulary(tokenizer, self._vocab_size, ends)

    @cached_property
    def _end_bits(self) -> NDArray[np.int32]:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[list(self._vocabulary.end_token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as llguidance knows it.

    Attributes:
        tokenizer: an `llguidance.LLTokenizer`.
        end_token_ids: the tokens that end a text.
        has_all_bytes: whether its tokens can write any text.
        begins_with_space: whether the first token of an answer brings the space that parts it from the prompt; it
            belongs to no constraint.
    """

    tokenizer: Any
    end_token_ids: tuple[int, ...]
    has_all_bytes: bool = True
    begins_with_space: bool = False

    def grammar(self, kind: str, text: Any) -> str:
        """A constraint as `llguidance.LLMatcher` takes it, its compilation still to come.

        Args:
            kind: the field of `SamplingParams`.
            text: its value.

        Raises:
            ValueError: it is no JSON object, or no Unicode.
        """
        from llguidance import LLMatcher

        if kind == "json_schema":
            how: Any = {"whitespace_pattern": WHITESPACE}
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=how)
        else:
            pattern = text if kind == "regex" else "|".join(map(_escaped, text))
            grammar = LLMatcher.grammar_from_regex(f" ?(?:{pattern})" if self.begins_with_space else pattern)
        return grammar if self.has_all_bytes else _unforced(grammar)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> _Vocabulary:
    """A tokenizer of the `tokenizers` library goes over whole; of any other, the bytes of its tokens.

    Raises:
        ConstraintError: it does not say what its tokens are.
    """
    from llguidance import LLTokenizer

    as_json: Callable[[], str] | None = getattr(tokenizer, "to_json", None)
    if as_json is not None:
        return _Vocabulary(LLTokenizer(as_json(), n_vocab=vocab_size, eos_token=list(ends)), ends)
    token_bytes: Callable[[], list[bytes]] | None = getattr(tokenizer, "token_bytes", None)
    if token_bytes is None:
        raise ConstraintError("a constraint needs a tokenizer that has token_bytes()")
    words: Any = _Words(token_bytes(), ends[0])
    begins_with_space = getattr(tokenizer, "begins_with_space", False)
    return _Vocabulary(
        LLTokenizer(words, n_vocab=vocab_size, eos_token=list(ends), slices=[]), ends, False, begins_with_space
    )


class _Words:
    """Tokens by their bytes, with the attributes that `llguidance.LLTokenizer` asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Final[list[int]] = []

    def __init__(self, tokens: list[bytes], end_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_token_id

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; never asked for (`_unforced`)."""
        raise NotImplementedError


def _unforced(grammar: str) -> str:
    """The grammar without forced tokens.

    Where a constraint leaves one text only, llguidance tokenizes it, and allows its first token alone. A vocabulary of
    words has no tokens for a part of a word.
    """
    [only] = json.loads(grammar)["grammars"]
    start = only.get("lark_grammar") or f"start: %json {json.dumps(only['json_schema'])}"
    return json.dumps({"grammars": [{"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{start}'}]})


def _escaped(text: str) -> str:
    """A regular expression that matches this text. (`re.escape` escapes letters that Rust's syntax does not know.)"""
    return re.sub(r"[][\\^$.|?*+(){}&~#-]", lambda letter: "\\" + letter[0], text)


def _reason(error: str) -> str:
    """What is wrong, in one line; a keyword by its name."""
    if unimplemented := re.search(r"Unimplemented keys: (\[.*?\])", error):
        names = json.loads(unimplemented[1])
        verb, what = ("is", "it") if len(names) == 1 else ("are", "them")
        return f"{', '.join(map(json.dumps, names))} {verb} not supported: leave {what} out"
    of_regex = re.search(r"^error: (.+)$", error, re.MULTILINE)
    line = of_regex[1] if of_regex else error.strip().partition("\n")[0]
    line = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", line)  # the place is in its own grammar
    return line.partition(". Enable ")[0]  # an option of llguidance


class StepMasks:
    """The masks of a step, computed in a thread while the model runs: llguidance does not hold the GIL.

    Args:
        vocab_size: of the model.
        find_constraint: of a request; None: it has none.
    """

    def __init__(self, vocab_size: int, find_constraint: Callable[[RequestId], Constraint | None]) -> None:
        from llguidance import LLExecutor

        self._vocab_size = vocab_size
        self._find_constraint = find_constraint
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, "minicache-masks")

    def run(self, output: SchedulerOutput, run_model: Callable[[SchedulerOutput], Tensor]) -> Tensor:
        """Run the model, and mask the rows from which the tokens of constrained answers are picked.

        Args:
            output: of `schedule()`, with its draft tokens filled in.
            run_model: gives `[Σ (1 + k), vocab]`, for each request of the step the rows after its newest token and each
                of its k draft tokens.

        Returns:
            The same, −inf where a token is not allowed. A row is −inf throughout if none is.
        """
        rows, jobs = self._jobs(output)
        if not jobs:
            return run_model(output)
        computing = self._thread.submit(self._compute, jobs, len(rows))
        try:
            logits = run_model(output)
        finally:
            wait([computing])
        return mask_rows(logits, rows, torch.from_numpy(computing.result()))

    def _jobs(self, output: SchedulerOutput) -> tuple[list[int], list[_Job]]:
        """The rows to be masked, and whose they are. A request that is still in its prompt gets no token."""
        drafts = [output.draft_token_ids.get(request.request_id, []) for request in output.scheduled]
        starts = accumulate((1 + len(each) for each in drafts), initial=0)
        rows: list[int] = []
        jobs: list[_Job] = []
        for request, its_drafts, start in zip(output.scheduled, drafts, starts, strict=False):
            num_new = output.num_scheduled_tokens[request.request_id] - len(its_drafts)
            if request.num_computed_tokens + num_new == request.num_tokens:
                constraint = self._find_constraint(request.request_id)
                if constraint is not None:
                    jobs.append(_Job(constraint, request.output_token_ids, its_drafts, len(rows)))
                    rows += range(start, start + 1 + len(its_drafts))
        return rows, jobs

    def _compute(self, jobs: list[_Job], num_rows: int) -> NDArray[np.bool_]:
        """In the thread: which tokens are allowed, `[num_rows, vocab]`."""
        masks = np.full((num_rows, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for job in jobs:
            job.constraint.follow(job.token_ids)
        where = masks.ctypes.data, masks.shape[1] * masks.itemsize, num_rows
        if plain := [(job.constraint.matcher, job.row) for job in jobs if not job.draft_token_ids]:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        drafted = [(job.constraint.matcher, job.row, job.draft_token_ids) for job in jobs if job.draft_token_ids]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for job in jobs:
            job.constraint.finish(masks[job.row : job.row + 1 + len(job.draft_token_ids)])
        return np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True)
class _Job:
    """One answer's masks of a step: after these tokens, and after each draft token; from this row on."""

    constraint: Constraint
    token_ids: list[int]
    draft_token_ids: list[int]
    row: int
