# %% [markdown]
# # Phase 9: one budget a step
#
# 32 requests are in decode, a token every 13 ms each, when a prompt of 8,000 tokens arrives. What happens to the 32? Below
# are the inter-token latencies (ITL) of one of them: once with the prompt computed in one step, once in chunks with a budget
# of 512 tokens. This notebook shows what a step costs, moves the budget, follows prompts chunk by chunk, and then spends the
# same budget on draft tokens.

# %% alt="Inter-token latency in milliseconds against seconds since the long prompt arrived, logarithmic. Whole: 13 or 14 throughout, except for one of 781. In chunks: 13, then seventeen of 39 to 56, then 13 or 14 again."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(9, mine=MINE)

from itertools import pairwise
from minicache.arithmetic.specs import A100_80GB, LLAMA_3_8B
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.fair import FairScheduler
from minicache.simulator.costs import RooflineCost
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import Arrival

cost = RooflineCost(LLAMA_3_8B, A100_80GB)


def itl_around(scheduler, late=3.0):
    """When request 0's tokens come, since the long prompt, and their ITL."""
    come = [Arrival(n, 0.0, 500, 300) for n in range(32)] + [Arrival(32, late, 8000, 8)]
    steps = []
    ServingSimulation(scheduler, cost, come, trace=steps.append).run()
    ends = [s.time + s.seconds for s in steps if any(entry.request_id == 0 for entry in s.batch)]
    itl = [(end - late, 1e3 * (end - before)) for before, end in pairwise(ends)]
    return zip(*(each for each in itl if -0.2 < each[0] < 1.2))


seconds, itl = {}, {}
for name, kind, budget in (
    ("whole", FairScheduler, 16_384),
    ("in chunks", ChunkedPrefillScheduler, 512),
):
    seconds[name], itl[name] = itl_around(kind(num_blocks=4096, max_num_batched_tokens=budget))
look = {"roles": ("end", "generated"), "yscale": "log", "legend": "the prompt", "joined": False}
nb.lines(seconds, itl, "seconds since the prompt arrived", "ITL, ms", **look)

# %% [markdown]
# ## 1. What a step costs
#
# The cell computes how long a step of Llama-3-8B takes on an A100, by the roofline of phase 0. 32 requests decode, with
# 500 tokens of context each; in addition the step computes some tokens of a prompt.

# %% alt="Milliseconds of a step against prompt tokens in addition to 32 decodes, on logarithmic axes. Flat at about 13 up to some 100 tokens, then in proportion, to about 800 at 8,192."
from minicache.simulator.costs import StepLoad

decodes = [(1, 500)] * 32
PROMPT_TOKENS = [2**power for power in range(14)]
alone = 1e3 * cost.step_seconds(StepLoad.of(decodes))
milliseconds = [1e3 * cost.step_seconds(StepLoad.of([*decodes, (n, 0)])) for n in PROMPT_TOKENS]
curves = {"decodes and a chunk": milliseconds, "decodes alone": [alone] * len(PROMPT_TOKENS)}
look = {"doubling": True, "yscale": "log"}
nb.lines(PROMPT_TOKENS, curves, "prompt tokens in the step", "ms of the step", **look)

# %% [markdown]
# As long as the step waits for the weights, prompt tokens are free. Beyond that they cost their full compute time.
#
# **Question 1.** How long does a step of 32 decodes and 8,192 prompt tokens take, to the nearest ten milliseconds? (By
# hand it is 8,224 · 0.0858 ms and the attention; or call `cost.step_seconds`.)

# %%
ms_of_8192 = None

# %%
nb.check(ms_of_8192, round(round(milliseconds[-1]), -1))

# %% [markdown]
# ## 2. The stall
#
# Look at the first picture again. `FairScheduler` computes the prompt in one step, `ChunkedPrefillScheduler` in chunks.

# %%
for name, each in itl.items():
    print(f"{name}: the longest ITL is {max(each):.0f} ms")

# %% [markdown]
# The work is the same. In chunks the prompt takes about a tenth longer, and the other requests slow down for that time
# instead of stopping.
#
# **Question 2.** The budget is 512, the prompt has 8,000 tokens, and 32 requests are in decode all the time. In how
# many steps is the prompt computed? (It is not in ⌈8,000 / 512⌉.)

# %%
num_steps_of_the_prompt = None

# %%
nb.check(num_steps_of_the_prompt, -(-8000 // (512 - 32)))

# %% [markdown]
# ## 3. Chunk by chunk
#
# With three prompts of 800 tokens and a budget of 1,024, the cell prints how many tokens of each prompt are computed in
# each step. Change the numbers, and predict the splits before you run the cell.


# %%
from minicache.request import Request


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
# **Question 3.** There are three prompts, of 1,000, 100 and 100 tokens, and a budget of 512, without a threshold. In
# which step (from 0) is the first token of the last prompt computed?

# %%
step_of_the_last = None

# %%
found = splits([1000, 100, 100], 512)
nb.check(step_of_the_last, next(step for step, tokens in enumerate(found) if 2 in tokens))

# %% [markdown]
# ## 4. Moving the budget
#
# 4 requests arrive a second for two minutes, with the lengths of the conversations in Azure's trace of phase 2, and
# budgets from 128 to 8,192 are tried. The plots have the time to the first token, and the time per output token (TPOT);
# 99 of 100 requests are below the curves.

# %% alt="Two panels against the budget, 128 to 8,192, logarithmic. Time per token, p99: rises from 14 ms to 43, which is what whole prompts have. Time to first token, p99: falls from 1.2 s at 128 to just below 1 s at 1,024, then rises a little; whole prompts have 1 s."
from dataclasses import replace

from minicache.simulator.workload import AZURE_CONVERSATION, stream

BUDGETS = [128, 256, 512, 1024, 2048, 4096, 8192]


def served(budget, rate=4.0, kind=ChunkedPrefillScheduler):
    """A report on two minutes of conversations."""
    arrivals = stream(replace(AZURE_CONVERSATION, rate=rate), round(120 * rate), 0)
    scheduler = kind(num_blocks=29_000, max_num_batched_tokens=budget)
    return ServingSimulation(scheduler, cost, arrivals).run()


reports = [served(budget) for budget in BUDGETS]
whole = served(16_640, kind=FairScheduler)
left, right = nb.panels(1, 2)
for ax, what, scale, label in (
    (left, "tpot", 1e3, "time per token, p99, ms"),
    (right, "ttft", 1, "TTFT, p99, s"),
):
    chunks = [scale * getattr(report, what).p99 for report in reports]
    curves = {"in chunks": chunks, "whole": [scale * getattr(whole, what).p99] * len(BUDGETS)}
    nb.lines(BUDGETS, curves, "budget", label, doubling=True, ax=ax, ylim=(0, None))

# %% [markdown]
# A small budget keeps the time per token short and makes new requests wait: the decodes take a part of the 128 tokens
# of each step, a long prompt takes many steps of the rest, and the others queue behind it. Above 1,024 the slowest
# first tokens come no sooner, because a short prompt waits for the step of a long one; the median still falls a little.
#
# **Question 4.** With three quarters more requests, `served(…, rate=7.0)`: which budget of `BUDGETS` cannot keep up with the
# arriving prompts, with a p99 time to the first token above 10 s?

# %%
budget_that_cannot_keep_up = None

# %%
slow = [budget for budget in BUDGETS if served(budget, rate=7.0).ttft.p99 > 10]
nb.check(budget_that_cannot_keep_up, slow[0])

# %% [markdown]
# ## 5. A lost chunk, and the protected request
#
# A arrives first, with the lowest priority. B and C take its blocks in the middle of its prompt. D arrives, and waits
# although there are free blocks for it, because A is protected.

# %% alt="Grid of four requests against steps. A computes chunks, loses them, waits while B and C finish, and computes them again; D arrives in step 4 and waits until A's whole prompt has been computed."
from minicache.scheduler.audit import Auditor
from minicache.scheduler.observe import Recorder, observe

options = {"block_size": 4, "max_num_batched_tokens": 12, "long_prefill_threshold": 4}
scheduler = ChunkedPrefillScheduler(num_blocks=8, **options)
steps = []
watched = observe(scheduler, Recorder(steps.append), Auditor())
later = {0: ("A", 24, 2, 1), 1: ("B", 6, 5, 0), 2: ("C", 6, 5, 0), 4: ("D", 4, 3, 0)}
number = 0
while watched.has_unfinished or number < 5:
    if number in later:
        name, prompt, output, priority = later[number]
        request = Request(name, [0] * prompt, output, priority=priority, arrival_time=float(number))
        watched.add_request(request)
    result = watched.schedule()
    held = scheduler.protected.request_id if scheduler.protected else "–"
    print(f"step {number:2}: {result.num_scheduled_tokens}", end="")
    print(f", preempted {result.preempted}, protected {held}")
    watched.update_from_output(result, {r.request_id: 9 for r in result.scheduled})
    number += 1
nb.grid_of_steps(steps, "ABCD")

# %% [markdown]
# **Question 5.** For how many steps does D wait?

# %%
steps_that_d_waits = None

# %%
first = next(s.step for s in steps if any(entry.request_id == "D" for entry in s.batch))
nb.check(steps_that_d_waits, first - 4)

# %% [markdown]
# ## 6. One ragged step
#
# There are three requests, as in the lab: one computes the last chunk of its prompt, one has three draft tokens behind
# its newest token, one has none. MiniGPT runs once. `rows_to_verify` gives the rows of logits to read, `verify` the
# tokens that result. Change a text, or the draft tokens, and predict the rows.

# %%
import torch

from minicache.cache import PagedKVCache, SelectiveStep
from minicache.engine import LLM, SamplingParams
from minicache.engine.sampling import TokenSampler
from minicache.engine.speculative import NgramDrafter, rows_to_verify, verify
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt

model, tokenizer = load_minigpt(), Tokenizer()
shape = (model.config.num_layers, 1, model.config.num_kv_heads, 64, model.config.head_dim)
texts = [
    tokenizer.encode("Did the children read the book yesterday?"),
    tokenizer.encode("Later my sister will not be ready, and then she will not be ready,"),
    tokenizer.encode("Yesterday I did not eat"),
]
computed = [4, 15, 4]
drafts = [[], NgramDrafter().draft(texts[1], 3), []]
caches = [PagedKVCache(*shape) for _ in texts]
with torch.inference_mode():
    for tokens, cache, count in zip(texts, caches, computed):
        model(torch.tensor([tokens[:count]]), cache)
    new = [text[count:] + draft for text, count, draft in zip(texts, computed, drafts)]
    counts = [len(its_new) for its_new in new]
    rows = rows_to_verify(counts, [len(its_drafts) for its_drafts in drafts])
    logits = model(torch.tensor([sum(new, [])]), SelectiveStep(caches, counts))[0, rows]
found = verify(logits, drafts, [TokenSampler(SamplingParams()) for _ in texts])


# %%
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
nb.check(num_rows, sum(1 + k for k in (0, 0, 5, 2)))

# %% [markdown]
# ## 7. In the engine
#
# MiniGPT answers a prompt; then it gets this prompt, its answer, and this prompt again as one new prompt. The drafter
# proposes tokens from the text; each step verifies them and yields one more token. Each of the first twelve lines is a
# step: how many of the draft tokens were accepted, then these tokens, and after the bar the rejected ones.


# %%
import random
import time

from minicache.engine.drafting import SpeculativeConfig
from minicache.grammar import sample_text


def text_tokens(count, seed):
    """So many tokens of MiniGPT's language."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < count:
        tokens += tokenizer.encode_words(sample_text(rng))
    return tokens[:count]


def engine(num_drafts, *observers):
    """An engine with at most so many draft tokens of a request in a step; 0: none."""
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


# %%
from minicache.scheduler.observe import Observer


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
    kept, rejected = its_drafts[:accepted], its_drafts[accepted:]
    print(f"{accepted} of {len(its_drafts)}: {words_of(kept)} | {words_of(rejected)}")
print(f"100 tokens in {num_steps} steps, the same as in {steps_without} without draft tokens")

# %% [markdown]
# The cell runs a batch of eight such repeated prompts, at temperature 0 and sampled with a seed. The tokens do not
# change.

# %%
eight = [text_tokens(100, seed) for seed in range(8)]
answers, _ = answers_of(engine(0), eight, hundred)
prompts = [text + answer + text for text, answer in zip(eight, answers)]
for temperature in (0.0, 0.5, 1.0):
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=temperature, seed=7)
    plain, steps_without = answers_of(engine(0), prompts, params)
    llm = engine(4)
    tokens, num_steps = answers_of(llm, prompts, params)
    assert tokens == plain
    stats = llm.scheduler.draft_stats
    print(
        f"temperature {temperature}: {num_steps} steps, {steps_without} without draft tokens; ",
        end="",
    )
    print(f"{stats.acceptance_rate:.0%} of the draft tokens accepted")

# %% [markdown]
# The slowest request of the batch determines the number of steps. At a higher temperature an answer repeats less of its
# prompt, and a proposed token is drawn less often: fewer draft tokens are accepted, but no token of an answer changes.
#
# ## 8. How many draft tokens?
#
# The plots have the tokens a step, and the share of draft tokens that was accepted, on the repeated prompt and on one
# that repeats nothing.

# %% alt="Two panels against draft tokens a step, 0 to 16. Tokens a step: on the repeated prompt from 1 to more than 8 with sixteen, on new text barely above 1. Accepted: on the repeated prompt it falls from 87 per cent to 65; on new text from 11 per cent to 1."
DRAFTS = [0, 1, 2, 4, 8, 12, 16]
per_step, accepted = {}, {}
for name, prompt in (("asked again", again), ("new text", text_tokens(300, 1))):
    plain, _ = answers_of(engine(0), [prompt], hundred)
    per_step[name], accepted[name] = [], []
    for num_drafts in DRAFTS:
        llm = engine(num_drafts)
        tokens, num_steps = answers_of(llm, [prompt], hundred)
        assert tokens == plain
        per_step[name].append(100 / num_steps)
        if num_drafts:
            accepted[name].append(100 * llm.scheduler.draft_stats.acceptance_rate)
left, right = nb.panels(1, 2)
look = {"roles": ("shared", "wasted"), "ylim": (0, None)}
nb.lines(DRAFTS, per_step, "draft tokens a step", "tokens a step", ax=left, **look)
nb.lines(DRAFTS[1:], accepted, "draft tokens a step", "% accepted", ax=right, **look)

# %% [markdown]
# The tokens are always those without speculation: a rejected draft token costs work, but changes no answer.
#
# **Question 7.** If each draft token is right with probability 0.8, independently of the others, how many tokens does a
# step with four of them yield on average? Give it to one decimal place.

# %%
tokens_a_step = None

# %%
nb.check(tokens_a_step, round(sum(0.8**n for n in range(5)), 1))

# %% [markdown]
# ## 9. On a real model
#
# SmolLM2-135M-Instruct writes freely in its first answer, and copies most of its second one from the prompt. Which of the
# two do draft tokens from the text make faster?

# %%
real_model = nb.real_model()
if real_model is not None:
    copied = "Repeat word for word: The ship left Lima on Monday with forty sacks of rice."
    for name, text in {"free": "Why is the sky blue?", "copy": copied}.items():
        for num_drafts in (0, 4):
            speculative = SpeculativeConfig("ngram", num_drafts) if num_drafts else None
            llm = LLM(real_model, num_blocks=128, speculative=speculative)
            token_ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            start = time.perf_counter()
            (tokens,), num_steps = answers_of(llm, [token_ids], SamplingParams(max_tokens=64))
            seconds = time.perf_counter() - start
            print(f"{name}, {num_drafts} draft tokens a step: {len(tokens)} tokens", end="")
            print(f" in {num_steps} steps, {seconds:.1f} s")

# %% [markdown]
# ## Your experiment: the load that meets an SLO
#
# Your SLO is a first token within two seconds and a token every 50 ms, for 99 of 100 requests. How many requests
# a second can one A100 serve within it? It depends on the budget.
#
# Choose two budgets. **Write down for each the highest rate that meets both limits**, then run the cell. Which of the two
# limits is exceeded first, and does that depend on the budget? Then look for the budget that allows the highest rate.

# %% alt="Two panels against requests a second, from 1 to 6, for two budgets, with the limits of the SLO as dashed lines. Time per token: higher with the larger budget. Time to first token: rises steeply between 5 and 6 requests a second with both."
YOUR_BUDGETS = [256, 2048]
YOUR_LIMITS = {"tpot": 50, "ttft": 2000}  # ms, p99
YOUR_PREDICTION = {256: None, 2048: None}  # requests a second

RATES = [1, 2, 3, 4, 5, 6]
found = {budget: [served(budget, float(rate)) for rate in RATES] for budget in YOUR_BUDGETS}
for ax, (what, limit) in zip(nb.panels(1, 2), YOUR_LIMITS.items()):
    curves = {
        f"budget {budget:,}": [1e3 * getattr(report, what).p99 for report in reports]
        for budget, reports in found.items()
    }
    curves["your limit"] = [limit] * len(RATES)
    names = ("requests a second", f"{what.upper()}, p99, ms")
    nb.lines(RATES, curves, *names, ax=ax, ylim=(0, 3 * limit))
for budget, reports in found.items():
    kept = [
        rate
        for rate, report in zip(RATES, reports)
        if all(1e3 * getattr(report, what).p99 <= limit for what, limit in YOUR_LIMITS.items())
    ]
    predicted = YOUR_PREDICTION.get(budget)
    print(f"budget {budget:,}: up to {max(kept, default=0)} a second; you predicted {predicted}")

# %% [markdown]
# **What to look for.** A large budget makes steps long while prompts are computed: TPOT exceeds its limit first. A small one
# leaves prompts waiting: TTFT exceeds its limit first. The best budget is where both do so at the same rate.
