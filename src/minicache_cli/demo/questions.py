"""The demo's fourth part: a real model. Sixteen questions at once, their answers side by side above the block map."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from gettext import gettext as _
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import track
from rich.table import Table
from rich.text import Text

from minicache.errors import MissingExtraError, PullError
from minicache.palette import PALETTE, color

if TYPE_CHECKING:
    from minicache.engine.llm import LLM
    from minicache.scheduler import Scheduler, SchedulerOutput

MODEL = "smollm2"
QUESTIONS = (
    "Why is the sky blue?",
    "What is a prime number?",
    "Name three fruits.",
    "Who wrote Hamlet?",
    "How do bees make honey?",
    "What is 12 times 12?",
    "Why do cats purr?",
    "What does a compiler do?",
    "Where is the Amazon river?",
    "How is bread made?",
    "What is a haiku?",
    "Why is the sea salty?",
    "What is photosynthesis?",
    "How far away is the moon?",
    "What is a transistor?",
    "Why do we sleep?",
)
MAX_TOKENS = 24
NUM_BLOCKS, BLOCK_SIZE = 96, 16

Held = Mapping[int, tuple[int, str]]
"""Block id → the number of the question that has it, and its colour role: "generated" if a part of the answer is there,
else "prompt"."""


def show(model: str, console: Console) -> None:
    """Ask a model all questions at once and then one by one; print answers, block map, speeds and blocks in use.

    Args:
        model: its name; if it is not on this machine, a line says how to get it, and that is all.
        console: where to. In a terminal the answers appear as they are generated.
    """
    from minicache.engine.llm import LLM
    from minicache.engine.sampling import SamplingParams

    params = SamplingParams(max_tokens=MAX_TOKENS)
    try:
        with console.status(_("Loading {model}").format(model=model)):
            llm = LLM(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=len(QUESTIONS))
            tokenizer: Any = llm.tokenizer
            prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
            llm.generate(prompts, SamplingParams(max_tokens=2))  # the first steps prepare what later ones use
    except PullError:
        message = _("{model} is not on this machine. To see this part: minicache pull {model}")
        console.print(message.format(model=model), soft_wrap=True)
        return
    except MissingExtraError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return
    together, num_used = _together(llm, prompts, params, console)
    start, num_tokens = time.perf_counter(), 0
    quiet = not console.is_terminal  # or it would leave an empty line
    for prompt in track(prompts, _("One by one"), console=console, transient=True, disable=quiet):
        num_tokens += len(llm.generate([prompt], params)[0].token_ids)
    alone = num_tokens / (time.perf_counter() - start)
    console.print(
        _("Tokens a second: {together:.0f} all together, {alone:.0f} one question after the other.").format(
            together=together, alone=alone
        ),
        style="bold",
        soft_wrap=True,
    )
    message = _("At most {used} of {all} blocks were in use, {size} tokens each.")
    console.print(message.format(used=num_used, all=NUM_BLOCKS, size=BLOCK_SIZE), style="bold", soft_wrap=True)


def _together(llm: LLM, prompts: Sequence[list[int]], params: Any, console: Console) -> tuple[float, int]:
    """Ask all questions at once and print them, with the block map: tokens a second, and the most blocks in use."""
    from minicache.scheduler.observe import Observer, observe  # late: with --mine, learners' files take places

    class Blocks(Observer):
        def __init__(self) -> None:
            self.now: Held = {}
            self.most: Held = {}

        def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
            self.now = held_blocks(scheduler)
            self.most = max(self.now, self.most, key=len)

    blocks, answers, num_tokens = Blocks(), [""] * len(prompts), 0
    llm.scheduler = observe(llm.scheduler, blocks)
    num_lines = max(2, (console.height - 6) // 4 - 2)  # four rows of cells: a question, its answer, an empty line
    with Live(
        console=console,
        transient=True,
        get_renderable=lambda: Group(_cells(answers, console.width, num_lines), _map(blocks.now)),
    ):
        start = time.perf_counter()
        for chunk in llm.stream(prompts, params):
            answers[chunk.index] += chunk.text
            num_tokens += chunk.token_id is not None
        seconds = time.perf_counter() - start
    console.print(_cells(answers, console.width))
    console.print(_map(blocks.most))
    return num_tokens / seconds, len(blocks.most)


def held_blocks(scheduler: Scheduler) -> Held:
    """Who has which block. The requests of the batch are numbered in the order of their arrival."""
    held = {}
    for request in scheduler.running:
        number = request.arrival_index % len(QUESTIONS)
        num_full = request.num_prompt_tokens // scheduler.pool.block_size
        for index, block_id in enumerate(request.block_ids):
            held[block_id] = number, "prompt" if index < num_full else "generated"
    return held


def _cells(answers: Sequence[str], width: int, num_lines: int | None = None) -> Table:
    """Questions and answers, four in a row; of each answer the last lines that there is room for, or all."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _column in range(4):
        table.add_column(ratio=1)
    cells = []
    for letter, question, answer in zip(ascii_lowercase, QUESTIONS, answers, strict=False):
        said = Text(" ".join(answer.split()), style=color("generated", "dark"))
        lines = said.wrap(Console(width=width), max(8, width // 4 - 3))
        shown = Text("\n").join(lines if num_lines is None else lines[-num_lines:])
        shown.append("\n" * max(0, (num_lines or 0) - len(lines)))
        asked = Text(f"{letter} {question}", style=color("prompt", "dark"), no_wrap=True, overflow="ellipsis")
        cells.append(Group(asked, shown, ""))
    for start in range(0, len(cells), 4):
        table.add_row(*cells[start : start + 4])
    return table


def _map(held: Held) -> Text:
    """The blocks: a character for each, the letter of the question that has it, on the colour of what is in it."""
    text = Text()
    for block_id in range(NUM_BLOCKS):
        if block_id in held:
            number, role = held[block_id]
            text.append(ascii_lowercase[number], style=f"{PALETTE[role].on_dark} on {color(role, 'dark')}")
        else:
            text.append("·", style="dim")
        if block_id % 48 == 47:
            text.append("\n")
    for role, said in {"prompt": _("a block of a prompt"), "generated": _("with tokens of the answer")}.items():
        text.append("  ", style=f"on {color(role, 'dark')}")
        text.append(f" {said}   ", style="dim")
    return text.append(_("· free"), style="dim")
