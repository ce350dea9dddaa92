"""`minicache chat`: a conversation with a model, in the terminal."""

from __future__ import annotations

import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from gettext import gettext as _
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from minicache.engine.options import ReplicaOptions
from minicache.errors import RequestTooLargeError, UnsupportedModelError
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import asked, usage_errors, with_options

if TYPE_CHECKING:
    from io import TextIOWrapper

    from minicache.engine.llm import LLM
    from minicache.scheduler import Scheduler, SchedulerOutput

app = typer.Typer()

OF_THE_ENGINE = (
    *("scheduler", "num_blocks", "block_size", "max_model_len", "prefix_caching", "kv_cache_dtype", "dtype"),
    *("weight_dtype", "device", "speculative", "num_speculative_tokens", "num_threads"),
)
"""The engine's options that mean something to a single conversation."""


@dataclass(frozen=True)
class Wanted:
    """What the answers are to be."""

    system: str | None = asked(None, "System prompt; default: that of the model's chat template.", "TEXT")
    max_tokens: int = asked(512, "Maximum tokens of an answer.", "N", min=1)
    temperature: float = asked(0.0, "0: greedy decoding; 1: sample from the model's distribution.", "X", min=0.0)


@app.command()
@with_options(ReplicaOptions, "serve", OF_THE_ENGINE)
def chat(
    wanted: Wanted,
    model: Annotated[str, typer.Argument(help="A model with a chat template.")] = "smollm2",
    mine: Mine = False,
    **engine: Any,
) -> None:
    """Talk to a model. Earlier turns stay in the prefix cache, as the line under each answer shows.

    /reset begins a new conversation, /help lists the commands, Ctrl-C stops
    an answer, Ctrl-D quits. Without a terminal each line of stdin is a turn.
    """
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    with usage_errors(), Console(stderr=True).status(_("Loading {model}").format(model=model)):
        from minicache.engine.loading import find_model, load_tokenizer
        from minicache.scheduler import require_scheduler
        from minicache.serving.replica.llm import make_llm

        options = ReplicaOptions(model=model, **engine)
        require_scheduler(options.scheduler)
        found = find_model(model)
        tokenizer = load_tokenizer(found)
        if found.exists() and not getattr(tokenizer, "has_chat_template", False):
            message = _(
                "{model} has no chat template: complete a prompt with `minicache generate`, or chat with a model that "
                "has one: minicache chat smollm2"
            )
            raise UnsupportedModelError(message.format(model=model))
        conversation = Conversation(make_llm(options, tokenizer), wanted)
    for line in _lines(console, model, conversation):
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation.turns.clear()
                console.print(_("A new conversation"), style="dim")
            case command if command.startswith("/") and len(command.split()) == 1:
                console.print(_("/reset: a new conversation; /quit or Ctrl-D: leave; Ctrl-C: stop the answer"))
            case question:
                _answer(console, conversation, question)


class Conversation:
    """The turns so far, as many of the newest as fit into the model, and the engine that continues them.

    When a prompt leaves too little room for an answer, the oldest turns are dropped until half of the model's length is
    free: what follows then finds a prefix that stays the same for several turns.

    Args:
        llm: the engine; it has no other requests.
        wanted: what its answers are to be.

    Attributes:
        llm: as above.
        longest: the most tokens of a prompt and its answer.
        turns: the questions and their answers.
    """

    def __init__(self, llm: LLM, wanted: Wanted) -> None:
        from minicache.scheduler.observe import Observer, observe  # late: with --mine, learners' files take places

        class Blocks(Observer):
            most = 0

            def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
                self.most = max(self.most, scheduler.pool.num_used)

        self.llm = llm
        self._wanted = wanted
        self._blocks = Blocks()
        llm.scheduler = observe(llm.scheduler, self._blocks)
        pool = llm.scheduler.pool
        self.longest = min(llm.max_model_len, pool.num_blocks * pool.block_size)
        self.turns: list[tuple[str, str]] = []
        with suppress(ValueError):
            self._token_ids([], "")  # imports what fills in the template, so the first answer does not wait for it

    def prompt(self, question: str) -> tuple[list[int], int]:
        """The token ids of a question and what came before it, and how many of the oldest turns do not fit.

        Raises:
            RequestTooLargeError: the question alone leaves no room for an answer.
            ValueError: the chat template refuses the messages.
        """
        from minicache.engine.answers import check_prompt_length

        room = min(self._wanted.max_tokens, self.longest // 4)
        token_ids, num_dropped = self._token_ids(self.turns, question), 0
        if len(token_ids) + room > self.longest:
            while num_dropped < len(self.turns) and len(token_ids) > self.longest // 2:
                num_dropped += 1
                token_ids = self._token_ids(self.turns[num_dropped:], question)
        check_prompt_length(token_ids, self.longest, None)
        return token_ids, num_dropped

    def answer(self, token_ids: list[int], begun: float, stop: threading.Event) -> Iterator[str | Figures]:
        """The answer to a prompt, piece by piece, then its figures. It ends early when `stop` is set.

        Args:
            token_ids: of the prompt.
            begun: when it was asked for, in seconds of `perf_counter`.
            stop: is looked at after each step.

        Raises:
            Exception: what a step raises.
        """
        from minicache.engine.sampling import SamplingParams

        llm = self.llm
        max_tokens = min(self._wanted.max_tokens, self.longest - len(token_ids))
        params = SamplingParams(max_tokens=max_tokens, temperature=self._wanted.temperature)
        self._blocks.most = 0
        name = llm.add_request(token_ids, params)
        request, reason = llm.answers[name].request, None
        times: list[float] = []
        try:
            while reason is None and not stop.is_set():
                for chunk in llm.step():
                    times.append(time.perf_counter())
                    reason = chunk.finish_reason
                    yield chunk.text
        finally:
            llm.abort_request(name)
        pool = llm.scheduler.pool
        num_cached = request.num_cached_tokens if llm.scheduler.prefix_caching else None
        yield Figures(begun, times, reason, self._blocks.most, pool.num_blocks, len(token_ids), num_cached)

    def _token_ids(self, turns: list[tuple[str, str]], question: str) -> list[int]:
        messages = [] if self._wanted.system is None else [{"role": "system", "content": self._wanted.system}]
        for asked_before, answered in turns:
            messages += [{"role": "user", "content": asked_before}, {"role": "assistant", "content": answered}]
        tokenizer: Any = self.llm.tokenizer
        token_ids: list[int] = tokenizer.apply_chat_template([*messages, {"role": "user", "content": question}])
        return token_ids


@dataclass(frozen=True)
class Figures:
    """What an answer took.

    Attributes:
        begun: when it was asked for, in seconds of `perf_counter`.
        times: when each of its tokens came.
        finish_reason: as the chunks'; None: it was stopped.
        num_used: the most blocks in use.
        num_blocks: blocks that there are.
        num_prompt: tokens of its prompt.
        num_cached: those of them that the prefix cache had; None: there is none.
    """

    begun: float
    times: list[float]
    finish_reason: str | None
    num_used: int
    num_blocks: int
    num_prompt: int
    num_cached: int | None

    def __str__(self) -> str:
        """One line."""
        num = len(self.times)
        parts = [_("{num} tokens").format(num=num)]
        if num > 1:
            rate = (num - 1) / (self.times[-1] - self.times[0])
            parts.append(_("{rate:.0f} tokens/s").format(rate=rate))
        if num:
            parts.append(_("first after {seconds:.2f} s").format(seconds=self.times[0] - self.begun))
        parts.append(_("{used} of {all} blocks").format(used=self.num_used, all=self.num_blocks))
        if self.num_cached is not None:
            parts.append(
                _("prompt: {cached} of {prompt} cached").format(cached=self.num_cached, prompt=self.num_prompt)
            )
        if self.finish_reason != "stop":
            parts.append(_("stopped") if self.finish_reason is None else _("cut off"))
        return ", ".join(parts)


def _answer(console: Console, conversation: Conversation, question: str) -> None:
    """Print the answer to a question as it comes, and keep it; or say why there is none."""
    begun = time.perf_counter()
    try:
        token_ids, num_dropped = conversation.prompt(question)
    except (RequestTooLargeError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return
    if num_dropped:
        message = _("The oldest turns no longer fit into {longest} tokens, and are left out: {num}")
        console.print(message.format(longest=conversation.longest, num=num_dropped), style="dim", soft_wrap=True)
        del conversation.turns[:num_dropped]
    text = ""
    with _stopping() as stop:
        for piece in conversation.answer(token_ids, begun, stop):
            if isinstance(piece, Figures):
                typer.echo()
                console.print(str(piece), style="dim", soft_wrap=True)
            else:
                text += piece
                typer.echo(_shown(piece), nl=False)  # rich would expand its tabs
    if text:
        conversation.turns.append((question, text))


def _shown(text: str) -> str:
    """A text without what would control the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")


def _lines(console: Console, model: str, conversation: Conversation) -> Iterator[str]:
    """What is typed, line by line, until there is no more. Bytes that are no UTF-8 are U+FFFD."""
    if sys.stdin is None:  # closed before the start
        return
    cast("TextIOWrapper", sys.stdin).reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  # lines can be edited, and found again
    console.print(
        _("{model}, {longest} tokens; /help lists the commands").format(model=model, longest=conversation.longest),
        style="dim",
    )
    while True:
        try:
            yield input("> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:  # the line is given up
            console.print()


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Have Ctrl-C set an event, so the engine's step is completed and its prefix cache stays; for a terminal only."""
    stop = threading.Event()
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
