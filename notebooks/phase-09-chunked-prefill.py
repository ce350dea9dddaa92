# %% [markdown]
# # Phase 9: one budget a step
#
# A long prompt among requests in decode: you watch it stall them, cut it into chunks, move the budget, follow a prompt
# chunk by chunk, and see one preempted in the middle. Then draft tokens: MiniGPT generates several tokens in one step,
# for a whole batch, and the same ones.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-09-chunked-prefill/`, then
# restart the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(9)))

from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.engine.speculative import NgramDrafter, rows_to_verify, verify

print("Scheduler, drafter and verification are", "yours." if MINE else "the reference's.")

# %%
import random
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from minicache.cache import PagedKVCache, SelectiveStep
from minicache.engine import LLM, SamplingParams
from minicache.engine.sampling import TokenSampler
from minicache.engine.speculation import SpeculativeConfig
from minicache.grammar import Tokenizer, sample_text
from minicache.model import load_minigpt
from minicache.palette import color
from minicache.request import Request
from minicache.scheduler.audit import Auditor
from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.simulator.costs import RooflineCost, StepLoad
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import AZURE_CONVERSATION, Arrival, stream
from minicache.arithmetic.specs import A100_80GB, LLAMA_3_8B

torch.set_num_threads(1)
CHUNKED, WHOLE = color("generated"), color("end")
cost = RooflineCost(LLAMA_3_8B, A100_80GB)


def plain_ticks(ax):
    """Numbers beside a logarithmic axis as people write them."""
    ax.set_yticks(
        [10, 20, 50, 100, 200, 500, 1000], ["10", "20", "50", "100", "200", "500", "1,000"]
    )
    ax.minorticks_off()


def check(answer, right):
    """Compare an answer with the right one, if there is one to compare."""
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
        return
    if isinstance(right, int):
        direction = "high" if answer > right else "low"
        assert answer == right, f"{answer:,} is too {direction}"
    assert answer == right, f"{answer} is not right"
    print("Right.")


# %% [markdown]
# ## 1. What a step costs
#
# Llama-3-8B on an A100, by the roofline of phase 0. 32 requests decode, with 500 tokens each behind them; beside them the
# step computes so many tokens of a prompt.

# %% alt="Milliseconds of a step against prompt tokens beside 32 decodes, on logarithmic axes. Flat at about 13 up to some 100 tokens, then in proportion, to about 800 at 8,192."
BESIDE = [0, 1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
decodes = [(1, 500)] * 32
milliseconds = [
    1e3 * cost.step_seconds(StepLoad.of([*decodes, (n, 0)] if n else decodes)) for n in BESIDE
]
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
ax.plot(BESIDE[1:], milliseconds[1:], "o-", color=CHUNKED)
ax.axhline(milliseconds[0], color=WHOLE, linestyle=":", label="decodes alone")
ax.set(
    xscale="log", yscale="log", xlabel="prompt tokens beside the decodes", ylabel="ms of the step"
)
ax.set_xticks([1, 10, 100, 1000, 8192], ["1", "10", "100", "1,000", "8,192"])
plain_ticks(ax)
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# As long as the step waits for the weights, prompt tokens are free. Beyond that they cost what they cost anywhere.
#
# **Question 1.** How long does a step of 32 decodes and 8,192 prompt tokens take, to the nearest ten milliseconds? (By
# hand it is 8,224 · 0.0858 ms and the attention; or call `cost.step_seconds`.)

# %%
ms_of_8192 = None

# %%
check(ms_of_8192, round(round(milliseconds[-1]), -1))

# %% [markdown]
# ## 2. The stall
#
# The 32 are in decode when a prompt of 8,000 tokens comes. The time from each token of one of them to its next, once with
# `FairScheduler`, which computes the prompt in one step, and once in chunks with a budget of 512.


# %% alt="Milliseconds between tokens against seconds since the long prompt came, logarithmic. Whole: 13 throughout, but for one gap of 781. In chunks: 13, then a row of gaps of 46 to 56, then 13 again."
def gaps_around(scheduler, late=3.0):
    """When request 0's tokens come, and the gaps before them; when the long prompt's first token comes."""
    come = [Arrival(n, 0.0, 500, 300) for n in range(32)] + [Arrival(32, late, 8000, 8)]
    steps = []
    report = ServingSimulation(scheduler, cost, come, trace=steps.append).run()
    ends = [
        step.time + step.seconds
        for step in steps
        if any(entry.request_id == 0 for entry in step.batch)
    ]
    gaps = [(end - late, 1e3 * (end - before)) for before, end in zip(ends, ends[1:])]
    return [each for each in gaps if -0.2 < each[0] < 1.2], report.ttft.max


runs = {
    "whole": (
        gaps_around(FairScheduler(num_blocks=4096, max_num_batched_tokens=16_384)),
        WHOLE,
        "s",
    ),
    "in chunks of 512": (
        gaps_around(ChunkedPrefillScheduler(num_blocks=4096, max_num_batched_tokens=512)),
        CHUNKED,
        "o",
    ),
}
_, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
for name, ((gaps, _), shade, marker) in runs.items():
    ax.plot(*zip(*gaps), marker, color=shade, markersize=3, label=name)
ax.axvline(0, color="gray", linestyle=":")
ax.set(
    yscale="log", xlabel="seconds since the long prompt came", ylabel="ms since the token before"
)
plain_ticks(ax)
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
for name, ((gaps, _), _, _) in runs.items():
    print(f"{name}: the longest gap is {max(gap for _, gap in gaps):.0f} ms")

# %% [markdown]
# The work is the same. In chunks it takes a few per cent longer, and all requests are slowed down a little instead of stopped.
#
# **Question 2.** A budget of 512, 8,000 tokens, and 32 requests in decode all the while. In how many steps is the prompt
# computed? (Not in ⌈8,000 / 512⌉.)

# %%
num_steps_of_the_prompt = None

# %%
check(num_steps_of_the_prompt, -(-8000 // (512 - 32)))

# %% [markdown]
# ## 3. Chunk by chunk
#
# Three prompts of 800 tokens, a budget of 1,024: how many tokens of each are computed in which step. Change the numbers, and
# predict the splits before you run the cell.


# %%
def splits(prompts, budget, num_steps=4, **options):
    """How many tokens of each request are computed, step by step."""
    scheduler = ChunkedPrefillScheduler(num_blocks=1024, max_num_batched_tokens=budget, **options)
    for name, num_tokens in enumerate(prompts):
        scheduler.add_request(Request(name, [0] * num_tokens, 9))
    found = []
    for _ in range(num_steps):
        output = scheduler.schedule()
        found.append(output.num_scheduled_tokens)
        done = {r.request_id: 0 for r in output.scheduled}
        scheduler.update_from_output(output, done)
    return found


for step, found in enumerate(splits([800, 800, 800], 1024)):
    print(f"step {step}: {found}, {sum(found.values())} tokens")
print("with long_prefill_threshold=300:")
for step, found in enumerate(splits([800, 800, 800], 1024, long_prefill_threshold=300)):
    print(f"step {step}: {found}, {sum(found.values())} tokens")

# %% [markdown]
# **Question 3.** Three prompts of 1,000, 100 and 100 tokens and a budget of 512, without a threshold. In which step
# (from 0) does the last one compute its first token?

# %%
step_of_the_last = None

# %%
check(
    step_of_the_last, next(n for n, found in enumerate(splits([1000, 100, 100], 512)) if 2 in found)
)

# %% [markdown]
# ## 4. Moving the budget
#
# Azure's conversations, 4 a second for two minutes, on budgets from 128 to 8,192: the time to the first token, and the
# time per token after it. 99 of 100 requests are below the curves.

# %% alt="Two panels against the budget, 128 to 8,192, logarithmic. Time per token, p99: rises from 15 ms to 66, which is what whole prompts have. Time to first token, p99: falls from 1.75 s at 128 to 1.3 s at 1,024, then rises a little; whole prompts have 1.7."
BUDGETS = [128, 256, 512, 1024, 2048, 4096, 8192]


def served(scheduler, rate=4.0):
    """A report on two minutes of conversations."""
    return ServingSimulation(
        scheduler, cost, stream(replace(AZURE_CONVERSATION, rate=rate), round(120 * rate), 0)
    ).run()


reports = [
    served(ChunkedPrefillScheduler(num_blocks=29_000, max_num_batched_tokens=budget))
    for budget in BUDGETS
]
whole = served(FairScheduler(num_blocks=29_000, max_num_batched_tokens=16_640))
_, panels = plt.subplots(1, 2, figsize=(7.2, 3), layout="constrained")
for ax, values, at, label in (
    (
        panels[0],
        [1e3 * r.tpot.p99 for r in reports],
        1e3 * whole.tpot.p99,
        "time per token, p99, ms",
    ),
    (panels[1], [r.ttft.p99 for r in reports], whole.ttft.p99, "time to first token, p99, s"),
):
    ax.plot(BUDGETS, values, "o-", color=CHUNKED, label="in chunks")
    ax.axhline(at, color=WHOLE, linestyle="--", label="whole")
    ax.set_xscale("log", base=2)
    ax.set_xticks(BUDGETS[::2], [f"{budget:,}" for budget in BUDGETS[::2]])
    ax.set(xlabel="budget", ylim=(0, 1.15 * max(*values, at)))
    ax.set_title(label, loc="left", fontsize=10)
    ax.grid(alpha=0.3)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# A small budget keeps the readers' gaps short and makes new requests wait: of 128 tokens a step the decodes take a part, a long prompt takes many steps of what is left, and the others queue behind it. Above 1,024 the slowest
# first tokens come no sooner, for a short prompt waits for the step of a long one; the median still falls a little.
#
# **Question 4.** Half as many requests again, `served(…, rate=6.0)`. Which budget of `BUDGETS` cannot keep up with the
# prompts that come, so that the p99 of the time to the first token is above 10 s?

# %%
budget_that_cannot_keep_up = None

# %%
busy = {
    b: served(ChunkedPrefillScheduler(num_blocks=29_000, max_num_batched_tokens=b), rate=6.0)
    for b in BUDGETS
}
check(
    budget_that_cannot_keep_up,
    next(budget for budget, report in busy.items() if report.ttft.p99 > 10),
)

# %% [markdown]
# ## 5. A chunk that is lost, and the protected request
#
# A arrives first, with the lowest priority. B and C take its blocks in the middle of its prompt. D arrives, and waits,
# although there is room: A is protected.

# %%
steps = []
scheduler = ChunkedPrefillScheduler(
    num_blocks=8, block_size=4, max_num_batched_tokens=12, long_prefill_threshold=4
)
watched = observe(scheduler, Recorder(steps.append), Auditor())
later = {0: ("A", 24, 2, 1), 1: ("B", 6, 5, 0), 2: ("C", 6, 5, 0), 4: ("D", 4, 3, 0)}
number = 0
while watched.has_unfinished or number < 5:
    if number in later:
        name, prompt, output, priority = later[number]
        watched.add_request(
            Request(name, [0] * prompt, output, priority=priority, arrival_time=float(number))
        )
    result = watched.schedule()
    protected = scheduler.protected.request_id if scheduler.protected else "–"
    print(
        f"step {number:2}: {result.num_scheduled_tokens}, preempted {result.preempted}, protected {protected}"
    )
    watched.update_from_output(result, {r.request_id: 9 for r in result.scheduled})
    number += 1

# %% [markdown]
# **Question 5.** For how many steps does D wait?

# %%
steps_that_d_waits = None

# %%
check(
    steps_that_d_waits, next(s.step for s in steps if any(e.request_id == "D" for e in s.batch)) - 4
)

# %% [markdown]
# ## 6. One ragged step
#
# Three requests, as in the lab: one computes the last chunk of its prompt, one has three draft tokens behind its newest
# token, one has none. MiniGPT runs once. `rows_to_verify` says which rows of logits are read, `verify` what comes of them.
# Change a text, or the draft tokens, and predict the rows.

# %%
model, tokenizer = load_minigpt(), Tokenizer()
config = model.config
texts = [
    tokenizer.encode("Did the children read the book yesterday?"),
    tokenizer.encode("Later my sister will not be ready, and then she will not be ready,"),
    tokenizer.encode("Yesterday I did not eat"),
]
computed = [4, 15, 4]
drafts = [[], NgramDrafter().draft(texts[1], 3), []]
caches = [
    PagedKVCache(config.num_layers, 1, config.num_kv_heads, 64, config.head_dim) for _ in texts
]
with torch.inference_mode():
    for tokens, cache, count in zip(texts, caches, computed):
        model(torch.tensor([tokens[:count]]), cache)
    new = [
        tokens[count:] + its_drafts for tokens, count, its_drafts in zip(texts, computed, drafts)
    ]
    counts = [len(its_new) for its_new in new]
    rows = rows_to_verify(counts, [len(its_drafts) for its_drafts in drafts])
    logits = model(torch.tensor([sum(new, [])]), SelectiveStep(caches, counts))[0, rows]
found = verify(logits, drafts, [TokenSampler(SamplingParams()) for _ in texts])


def words_of(tokens):
    """Tokens as words, a space between them."""
    return " ".join(tokenizer.words[token] for token in tokens)


print(f"{sum(counts)} tokens, {len(rows)} rows of logits: {rows}")
for its_new, its_drafts, tokens in zip(new, drafts, found):
    shown = words_of(its_new[: len(its_new) - len(its_drafts)])
    print(f"{shown} [{words_of(its_drafts)}]  →  {words_of(tokens)}")

# %% [markdown]
# **Question 6.** Four requests bring 512, 1, 6 and 3 tokens, of which 0, 0, 5 and 2 are draft tokens. How many rows of
# logits does the step need?

# %%
num_rows = None

# %%
check(num_rows, sum(1 + k for k in (0, 0, 5, 2)))

# %% [markdown]
# ## 7. In the engine
#
# MiniGPT is asked, answers, and is asked the same again. The drafter proposes tokens from the text; each step verifies
# them and yields a token more. Each row is a step: what was accepted, and behind the bar what was rejected.


# %%
def text_tokens(count, seed):
    """So many tokens of MiniGPT's language."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < count:
        tokens += tokenizer.encode_words(sample_text(rng))
    return tokens[:count]


def engine(num_drafts, *observers):
    """An engine with at most so many draft tokens of a request in a step; 0: without speculation."""
    speculative = SpeculativeConfig("ngram", num_drafts) if num_drafts else None
    return LLM(model, num_blocks=256, speculative=speculative, observers=observers)


def answers_of(llm, prompts, params):
    """The tokens of each answer, and in how many steps they came."""
    ids, num_steps = [llm.add_request(prompt, params) for prompt in prompts], 0
    tokens = {request_id: [] for request_id in ids}
    while llm.has_unfinished:
        for chunk in llm.step():
            tokens[chunk.request_id].append(chunk.token_id)
        num_steps += 1
    return list(tokens.values()), num_steps


class Watching(Observer):
    """Notes what was proposed in each step, and how many of it were accepted."""

    def __init__(self):
        self.seen = []

    def on_update(self, scheduler, output, finished):
        for request_id, its_drafts in output.draft_token_ids.items():
            self.seen.append((its_drafts, output.num_scheduled_tokens[request_id] - 1))


hundred = SamplingParams(max_tokens=100, ignore_eos=True)
asked = text_tokens(100, 0)
again = asked + answers_of(engine(0), [asked], hundred)[0][0] + asked
expected, steps_without = answers_of(engine(0), [again], hundred)
watching = Watching()
tokens, num_steps = answers_of(engine(5, watching), [again], hundred)
assert tokens == expected
for its_drafts, accepted in watching.seen[:12]:
    print(
        f"{accepted} of {len(its_drafts)}: {words_of(its_drafts[:accepted])} | {words_of(its_drafts[accepted:])}"
    )
print(f"100 tokens in {num_steps} steps, the same as without draft tokens in {steps_without}")

# %% [markdown]
# A batch of eight, each asked again like this one: at temperature 0, and drawn with a seed. The same tokens again.

# %%
eight = [text_tokens(100, seed) for seed in range(8)]
prompts = [
    text + tokens + text for text, tokens in zip(eight, answers_of(engine(0), eight, hundred)[0])
]
for temperature in (0.0, 0.5, 1.0):
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=temperature, seed=7)
    plain, steps_without = answers_of(engine(0), prompts, params)
    llm = engine(4)
    tokens, num_steps = answers_of(llm, prompts, params)
    assert tokens == plain
    stats = llm.scheduler.draft_stats
    print(
        f"temperature {temperature}: {num_steps} steps, {steps_without} without draft tokens; "
        f"{stats.acceptance_rate:.0%} of the draft tokens accepted"
    )

# %% [markdown]
# The last request of the batch decides how many steps there are. With a temperature an answer repeats less of its prompt,
# and what is proposed is drawn less often: fewer draft tokens are accepted, and no token is another.
#
# ## 8. How many draft tokens?
#
# Tokens a step, and the part of the draft tokens that was accepted, on the prompt that is asked again and on one that
# repeats nothing.

# %% alt="Two panels against draft tokens a step, 0 to 16. Tokens a step: on the repeated prompt from 1 to more than 8 with sixteen, on new text hardly above 1. Accepted: on the repeated prompt it falls from 0.87 to 0.65; on new text from 0.1 to nearly nothing."
DRAFTS = [0, 1, 2, 4, 8, 12, 16]
fresh = text_tokens(300, 1)
_, panels = plt.subplots(1, 2, figsize=(7.2, 3), layout="constrained")
for name, prompt, shade in (
    ("asked again", again, color("shared")),
    ("new text", fresh, color("wasted")),
):
    plain, _ = answers_of(engine(0), [prompt], hundred)
    per_step, accepted = [], []
    for num_drafts in DRAFTS:
        llm = engine(num_drafts)
        tokens, num_steps = answers_of(llm, [prompt], hundred)
        assert tokens == plain
        per_step.append(100 / num_steps)
        accepted.append(llm.scheduler.draft_stats.acceptance_rate if num_drafts else 0)
    panels[0].plot(DRAFTS, per_step, "o-", color=shade, label=name)
    panels[1].plot(DRAFTS[1:], accepted[1:], "o-", color=shade)
for ax, title in zip(panels, ("tokens a step", "part of the draft tokens accepted")):
    ax.set(xlabel="draft tokens a step", ylim=(0, None))
    ax.set_title(title, loc="left", fontsize=10)
    ax.grid(alpha=0.3)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The tokens are always those of the engine without: a rejected draft token costs work, never an answer.
#
# **Question 7.** If each draft token is right with probability 0.8, whatever came before, how many tokens does a step with
# four of them yield on average? To one place.

# %%
tokens_a_step = None

# %%
check(tokens_a_step, round(sum(0.8**n for n in range(5)), 1))
