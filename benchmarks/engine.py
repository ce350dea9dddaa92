"""How fast the engine serves, next to vLLM, llama.cpp and `transformers`.

Two models. SmolLM2-135M-Instruct (`minicache pull smollm2`) answers 32 questions, `prompts.json`, with 64 tokens each:
all of them at once, the first 8 at once, and the first 4 one after the other; and "prompt" is a text of 1,500 tokens
with one token to come. A random Llama (6 layers, hidden size 256, 8 query over 2 KV heads, 4,096 tokens), whose linear
layers are tiny, gives 32 requests of 50 to 100 prompt tokens 100 tokens each: all at once, the first 8, and the first 2
one after the other; and "ragged" is 64 requests that want 1 to 199 tokens, with 32 batch slots. There `generate` goes
on to the longest of a batch, and only the tokens that are wanted count.

The engines serve greedily: ours with its defaults, and with weights in int8; vLLM's CPU backend; `transformers`'
`generate`, in batches padded on the left; llama.cpp with weights in float32 and in Q8_0. Each is a process with one
thread (`benchmarks/_contestant.py`). Those that scripts/peers_env.sh has not made are left out; their figures are null.

After a run of a few tokens that is not counted, for each engine and work, they take turns in another order each round.
Recorded are the tokens per second of CPU time, of the fastest round and of the median, and the ratios of our engine to
each other: of the one with weights in int8 to Q8_0, of the one in float32 to the rest. No engine may share a prompt's
KV entries with an earlier round. All answers are compared: an engine in float32 whose token is not the likeliest by
more than rounding fails the benchmark.

    python -m benchmarks.engine

It takes about 20 minutes with all of them.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks._contestant import ENGINES, MODEL_GGUF, ROOT, Contestant, Run, Work, is_here
from benchmarks._record import record
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.model.decoder import DecoderConfig
from minicache.model.gguf import load_gguf
from minicache.model.shelf import pull
from minicache.model.tokenizer import gguf_tokenizer

OURS: Final = {
    "vllm": "minicache",
    "llama_f32": "minicache",
    "transformers": "minicache",
    "llama_q8_0": "minicache_int8",
}
"""With which of our engines each other is compared."""
FLOAT32: Final = ("minicache", "vllm", "llama_f32", "transformers")
NUM_WARM_UP: Final = 4
NEAR_TIE: Final = 1e-3
"""The most by which a token's logit may be below the largest: rounding differs from engine to engine."""

SHORTEST, LONGEST = 50, 100
NUM_REQUESTS, NUM_NEW = 32, 100
SHAPE = MiniGPTConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=688,
    max_seq_len=512,
)
NUM_RAGGED, MOST_RAGGED = 64, 199

NUM_ANSWER, NUM_LONG = 64, 1500

transformers: Any = import_module("transformers")  # Any: much of it has no types


class Row(NamedTuple):
    """Work, and how many of its requests an engine gets at once."""

    work: Work
    at_once: int

    @property
    def num_tokens(self) -> int:
        """The tokens that count: the new ones; where they are one a prompt, the prompts'."""
        return sum(self.work.num_new) if max(self.work.num_new) > 1 else sum(map(len, self.work.prompts))


class Model(NamedTuple):
    """A model to serve.

    Attributes:
        about: its name and kind.
        make: writes it into a folder, and returns it as `transformers` has it, and the rows of the table.
        engines: those that serve it.
        rounds: how often each does.
    """

    about: str
    make: Callable[[Path], tuple[Any, dict[str, Row]]]
    engines: tuple[str, ...]
    rounds: int


Runs = Mapping[str, Mapping[str, list[Run]]]
"""Row → engine → its counted runs; an engine that is not measured is missing."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    record("engine", {"threads": 1} | {name: measure(model) for name, model in MODELS.items()})


def measure(model: Model) -> dict[str, Any]:
    """What is recorded of one model."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        llama, rows = model.make(folder)
        engines = [stack.enter_context(closing(Contestant(name, folder))) for name in model.engines if is_here(name)]
        runs = take_turns(engines, rows, model.rounds)
    figures = {name: results_of(runs[name], row) for name, row in rows.items()}
    show(model.about, figures)
    agreement = {name: agreement_of(name, llama, runs, rows) if name in runs["1"] else None for name in ENGINES}
    about = {
        "model": f"{model.about}, {llama.num_parameters():,} parameters, float32",
        "rounds": model.rounds,
        "rows": figures,
    }
    return about | {"agreement": agreement}


def take_turns(engines: list[Contestant], rows: Mapping[str, Row], rounds: int) -> dict[str, dict[str, list[Run]]]:
    """Have every engine do every row's work in every round, and return the counted runs."""
    pairs = [(name, engine) for name in rows for engine in engines]
    runs: dict[str, dict[str, list[Run]]] = {name: {engine.name: [] for engine in engines} for name in rows}
    for name, engine in track(pairs, description="Warming up"):
        (prompts, num_new), at_once = rows[name]
        engine.serve(Work(prompts, [min(NUM_WARM_UP, num) for num in num_new]), at_once)
    rng = random.Random(0)
    for _ in range(rounds):
        for name, engine in track(rng.sample(pairs, len(pairs)), description="Serving"):
            runs[name][engine.name].append(engine.serve(*rows[name]))
    return runs


# The models and their work


def as_llama(shape: MiniGPTConfig | DecoderConfig) -> Any:
    """A random Llama of `transformers`, of that shape, whose output layer is its embedding."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def the_same_model(shape: MiniGPTConfig = SHAPE) -> tuple[Any, MiniGPT]:
    """A random Llama of that shape, twice: `transformers`' and ours, with the same weights."""
    torch.manual_seed(0)
    llama = as_llama(shape)
    model = MiniGPT(shape).eval()
    model.load_state_dict(llama.model.state_dict())
    return llama, model


def random_llama(folder: Path) -> tuple[Any, dict[str, Row]]:
    """The model, and the rows of its table."""
    llama, _ = the_same_model()
    llama.save_pretrained(folder)
    return llama, make_rows()


def smollm2(folder: Path) -> tuple[Any, dict[str, Row]]:
    """The model, and the rows of its table. Its weights have four bits in the file; in the folder they are float32."""
    path = pull("smollm2")
    (folder / MODEL_GGUF).parent.mkdir()
    (folder / MODEL_GGUF).symlink_to(path)
    model, tokenizer = load_gguf(path), gguf_tokenizer(path)
    assert tokenizer is not None
    llama = as_llama(model.config)
    llama.model.load_state_dict(model.state_dict())
    llama.save_pretrained(folder)
    questions = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
    long = tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:NUM_LONG]
    return llama, {
        "1": Row(Work(prompts[:4], [NUM_ANSWER] * 4), 1),
        "8": Row(Work(prompts[:8], [NUM_ANSWER] * 8), 8),
        "32": Row(Work(prompts, [NUM_ANSWER] * len(prompts)), 32),
        "prompt": Row(Work([long], [1]), 1),
    }


MODELS: Final = {
    "smollm2": Model("SmolLM2-135M-Instruct", smollm2, tuple(ENGINES), 3),
    "random": Model("random Llama", random_llama, ("minicache", "vllm", "transformers"), 7),
}


def make_work(num_requests: int = NUM_REQUESTS) -> Work:
    """The first of the 32 requests: 2,415 prompt tokens all together, and 100 new tokens each."""
    rng = random.Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(NUM_REQUESTS)]
    prompts = [[rng.randrange(SHAPE.vocab_size) for _ in range(length)] for length in lengths]
    return Work(prompts[:num_requests], [NUM_NEW] * num_requests)


def make_ragged_work() -> Work:
    """64 requests, the 32 prompts twice, that want 1 to 199 tokens: some are done long before others."""
    rng = random.Random(1)
    prompts = make_work().prompts * (NUM_RAGGED // NUM_REQUESTS)
    return Work(prompts, [rng.randint(1, MOST_RAGGED) for _ in prompts])


def make_rows() -> dict[str, Row]:
    """What is served: "1", "8" and "32" requests at once, and "ragged"."""
    return {
        "1": Row(make_work(2), 1),
        "8": Row(make_work(8), 8),
        "32": Row(make_work(), 32),
        "ragged": Row(make_ragged_work(), NUM_RAGGED),
    }


# Are they the same tokens?


def agreement_of(name: str, llama: Any, runs: Runs, rows: Mapping[str, Row]) -> dict[str, Any]:
    """`agrees` for all answers of an engine's last round; and how many of them are not our engine's, token by token.

    Raises:
        RuntimeError: a token of an engine in float32 is not the likeliest by more than NEAR_TIE.
    """
    prompts, answers, ours = [], [], []
    for row, (work, _) in rows.items():
        prompts += work.prompts
        answers += runs[row][name][-1].token_ids
        ours += runs[row]["minicache"][-1].token_ids
    agreement = agrees(llama, prompts, answers)
    if name in FLOAT32 and agreement["largest_gap"] > NEAR_TIE:
        raise RuntimeError(f"{name} generates other tokens than the likeliest: {agreement}")
    num_that_differ = sum(answer != our for answer, our in zip(answers, ours, strict=True))
    return {"num_answers": len(answers), "num_answers_that_differ": num_that_differ} | agreement


def agrees(llama: Any, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """How many of an engine's tokens are those that `transformers` finds likeliest after the same tokens.

    Where they differ, `largest_gap` is by how much the token's logit is below the largest: a near tie, or an error.
    """
    gap = torch.cat([gaps(llama, tuple(prompt), tuple(its)) for prompt, its in zip(prompts, answers, strict=True)])
    return {
        "num_tokens": len(gap),
        "num_tokens_that_differ": int((gap > 0).sum()),
        "share_that_agrees": float((gap == 0).float().mean()),
        "largest_gap": float(gap.max()),
    }


@cache
def gaps(llama: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """By how much each token's logit is below the largest: `[len(answer)]`."""
    with torch.inference_mode():
        logits: Tensor = llama(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits[0]
    return logits.amax(dim=1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]


# What is recorded


def results_of(runs: Mapping[str, list[Run]], row: Row) -> dict[str, Any]:
    """One row of a table.

    Returns:
        `tokens_per_second` of each engine (`rates`), and the ratios of our engines to the others; null if one was not
        measured.
    """
    rate = {name: rates(runs[name], row.num_tokens) if name in runs else None for name in ENGINES}
    ratio = {name: _ratio(rate[ours], rate[name]) for name, ours in OURS.items()}
    return {
        "num_requests": len(row.work.prompts),
        "num_tokens": row.num_tokens,
        "at_once": row.at_once,
        "tokens_per_second": {
            name: its and {kind: round(value, 1) for kind, value in its.items()} for name, its in rate.items()
        },
        "ratio_to": ratio,
    }


def rates(runs: Iterable[Run], num_tokens: int) -> dict[str, float]:
    """Tokens per second of CPU time, of the fastest run and of the median."""
    seconds = [run.cpu for run in runs]
    return {"fastest": num_tokens / min(seconds), "median": num_tokens / statistics.median(seconds)}


def _ratio(ours: dict[str, float] | None, its: dict[str, float] | None) -> dict[str, float] | None:
    return None if ours is None or its is None else {kind: ours[kind] / its[kind] for kind in ours}


def show(title: str, rows: Mapping[str, Any]) -> None:
    """Print the tokens per CPU second of every engine, and the ratios of ours to the others."""
    table = Table("tokens per CPU second", *rows, box=SIMPLE_HEAD, title=title)
    for name in ENGINES:
        its = [row["tokens_per_second"][name] for row in rows.values()]
        table.add_row(name, *("–" if rate is None else f"{rate['fastest']:,.1f}" for rate in its))
    for name, ours in OURS.items():
        ratios = [row["ratio_to"][name] for row in rows.values()]
        table.add_row(f"{ours} / {name}", *("–" if ratio is None else f"{ratio['fastest']:.2f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
