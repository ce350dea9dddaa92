# %% [markdown]
# # Phase 6: which request has to go
#
# A server admits forty requests, and their answers grow until memory is full. Then some have to give their blocks back
# and start again. How many, and what does it cost? Below, the same forty requests run in a pool that shrinks from what
# they use at their peak to 30 % of it. This notebook first follows single victims, then counts preemptions, and at the
# end an auditor watches broken schedulers.

# %% alt="Four panels against the pool's size from 100 to 30 per cent: preemptions rise from 0 to 25 at 70 per cent, then stay between 20 and 23; tokens computed again likewise rise to 3,100, then stay between 2,400 and 3,000; the mean batch falls from 24 to 8; steps rise from 200 to 560."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(6, mine=MINE)

import random

from minicache.request import Request
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.scheduler.paged import PagedScheduler


def serve(requests, **options):
    """Serve requests without a model: the trace, and what it cost."""
    steps = []
    return steps, drive(observe(PagedScheduler(**options), Recorder(steps.append)), requests)


def burst(seed=0):
    """Forty requests at once: prompts of 20 to 200 tokens, answers of 20 to 200."""
    rng = random.Random(seed)
    return [Request(n, [1] * rng.randint(20, 200), rng.randint(20, 200)) for n in range(40)]


peak = max(step.num_used_blocks for step in serve(burst(), num_blocks=10_000)[0])
percents = [100, 90, 80, 70, 60, 50, 40, 30]
runs = [serve(burst(), num_blocks=peak * percent // 100)[1] for percent in percents]
for ax, number in zip(
    nb.panels(2, 2, height=4.6),
    ("num_preemptions", "num_recomputed_tokens", "mean_batch_size", "num_steps"),
):
    values = {"": [getattr(run, number) for run in runs]}
    nb.lines(percents, values, "pool, % of the peak", number, ax=ax, xlim=(104, 26), ylim=(0, None))

# %% [markdown]
# ## 1. Two requests, ten blocks
#
# This is the case of the theory pages: prompts of 80 tokens, 20 to generate, blocks of 16. The grid shows when each
# request computes; the lines above it list the events of the steps.


# %% alt="Grid of two requests against steps. Both are prefilled in step 0; b loses its blocks, waits until a has finished, is prefilled again and goes on to its last token."
def two():
    """The two requests, new."""
    return [Request(name, [1] * 80, 20) for name in "ab"]


steps, tally = serve(two(), num_blocks=10)
nb.grid_of_steps(steps, "ab")
for step in steps:
    events = [f"{event.request_id} {event.kind}" for event in step.events if event.kind != "arrive"]
    if events:
        batch = {entry.request_id: entry.num_new_tokens for entry in step.batch}
        print(f"step {step.step:2}: {batch!s:20} {step.num_used_blocks:2} used  ", *events)
print(f"{tally.num_steps} steps, {tally.num_prefill_tokens} tokens prefilled")

# %% [markdown]
# **Question 1.** What is the smallest number of blocks with which no request is preempted? (Each ends with 99 KV entries.)

# %%
enough_blocks = None

# %%
preemptions = {n: serve(two(), num_blocks=n)[1].num_preemptions for n in range(10, 40)}
nb.check(enough_blocks, next(n for n, count in preemptions.items() if not count))

# %% [markdown]
# **Question 2.** With 11 blocks, in which step is `b` preempted?

# %%
step_of_preemption = None

# %%
steps, _ = serve(two(), num_blocks=11)
preempts = [step.step for step in steps for event in step.events if event.kind == "preempt"]
nb.check(step_of_preemption, preempts[0])

# %% [markdown]
# ## 2. Pressure
#
# Look at the first picture again. How many blocks do the forty requests use at their peak, and what happens with half
# of them?

# %%
print(f"peak: {peak} blocks of 16")
half = runs[percents.index(50)]
print(
    f"at half: {half.num_preemptions} preemptions, {half.num_recomputed_tokens:,} tokens again,",
    end="",
)
print(f" {half.num_steps} steps instead of {runs[0].num_steps}")

# %% [markdown]
# Requests that arrive all at once are the hardest case: none finishes while they are admitted.
#
# Which requests are preempted? The figure has a bar for each request, with half of the memory:

# %% alt="Bars of how often each of forty requests was preempted, by order of arrival, in half of the memory. The first seventeen never; of the later ones twelve once, two twice, one four times."
requests = burst()
serve(requests, num_blocks=peak // 2)
ax = nb.axes("request, in the order of arrival", "preemptions", height=2.6)
ax.bar(range(40), [request.num_preemptions for request in requests], color=nb.color("end"))
ax.grid(visible=False, axis="x")

# %% [markdown]
# **Question 3.** How often is the request that arrived first preempted, in a pool of any size in which it fits?

# %%
preemptions_of_the_first = None

# %%
nb.check(preemptions_of_the_first, requests[0].num_preemptions)

# %% [markdown]
# ## 3. Recompute and swap, the same schedule
#
# The choice between recompute and swap does not change which request runs when. The cell compares the batches of both
# runs, step by step, and counts what each run costs.

# %%
_, recomputed = serve(burst(), num_blocks=peak // 2)
_, swapped = serve(burst(), num_blocks=peak // 2, preemption="swap", num_host_blocks=peak)
assert recomputed.order == swapped.order
print(f"{'':12}{'steps':>8}{'preempted':>11}{'computed again':>16}{'blocks moved':>14}")
for name, run in (("recompute", recomputed), ("swap", swapped)):
    counts = run.num_steps, run.num_preemptions, run.num_recomputed_tokens, run.num_swapped_blocks
    print(f"{name:12}{counts[0]:8,}{counts[1]:11,}{counts[2]:16,}{counts[3]:14,}")

# %% [markdown]
# If the swap space is too small, the victims that do not fit are recomputed.

# %% alt="Tokens' worth of blocks moved, and tokens computed again, against the size of the swap space: with one block all is recomputed, from 80 blocks on all is moved."
sizes = [1, 5, 10, 20, 40, 60, 80, 120, 160]
mixed = []
for size in sizes:
    options = {"preemption": "swap", "num_host_blocks": size}
    mixed.append(serve(burst(), num_blocks=peak // 2, **options)[1])
curves = {  # out and in are one return
    "tokens' worth of blocks moved, out and in": [8 * run.num_swapped_blocks for run in mixed],
    "tokens recomputed": [run.num_recomputed_tokens for run in mixed],
}
nb.lines(sizes, curves, "CPU blocks", "tokens", roles=("shared", "generated"), ylim=(0, None))

# %% [markdown]
# ## 4. The watermark
#
# **Question 4.** Take two requests as in part 1, ten blocks, and a watermark of 0.1. How many tokens are prefilled in
# all?

# %%
prefilled = None

# %%
nb.check(prefilled, serve(two(), num_blocks=10, watermark=0.1)[1].num_prefill_tokens)

# %% alt="Two panels against the watermark: preemptions fall from 20 to none at 30 per cent; the mean step of the first token rises from 59 to 147 at 40 per cent."
watermarks = [0, 1, 2, 5, 10, 15, 20, 30, 40]  # per cent
runs = [serve(burst(), num_blocks=peak // 2, watermark=each / 100)[1] for each in watermarks]
first = [sum(run.first_token.values()) / len(run.first_token) for run in runs]
preemptions = [run.num_preemptions for run in runs]
left, right = nb.panels(1, 2, height=2.8)
look = {"roles": ["end"], "ylim": (0, None)}
nb.lines(watermarks, {"": preemptions}, "watermark, %", "preemptions", ax=left, **look)
nb.lines(watermarks, {"": first}, "watermark, %", "mean step of the first token", ax=right, **look)

# %% [markdown]
# ## 5. With a model: the same text
#
# MiniGPT answers twelve prompts, once with plenty of blocks and once with so few that eight of them are preempted. The
# texts must not change, with greedy decoding or with sampling.

# %%
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import sample_text
from minicache.scheduler.audit import Auditor

rng = random.Random(0)
prompts = [" ".join(sample_text(rng)[: rng.randint(4, 30)]) for _ in range(12)]
sixty = {"max_tokens": 60, "ignore_eos": True}
sampled = [SamplingParams(temperature=0.8, top_p=0.9, seed=n, **sixty) for n in range(12)]


def answers(params, **options):
    """The texts, and the number of preemptions. An auditor watches."""
    steps = []
    llm = LLM(scheduler="paged", observers=[Recorder(steps.append), Auditor()], **options)
    texts = [completion.text for completion in llm.generate(prompts, params)]
    return texts, sum(event.kind == "preempt" for step in steps for event in step.events)


# %%
for name, params in (("greedy", SamplingParams(**sixty)), ("sampled", sampled)):
    alone, none = answers(params, num_blocks=512)
    for way, swap_space in (("recompute", 0), ("swap", 16)):
        few = {"num_blocks": 24, "preemption": way, "num_host_blocks": swap_space}
        texts, preemptions = answers(params, **few)
        same = sum(map(str.__eq__, texts, alone))
        print(f"{name:8} {way:10} {preemptions:3} preemptions, {same} of 12 texts are the same")
        assert texts == alone
        assert preemptions > none == 0
print(f"\n{prompts[0]} …{alone[0][:120]}")

# %% [markdown]
# ## 6. What a copy costs here
#
# One sequence of 512 tokens, with the shape of MiniGPT's cache, goes out to the CPU blocks and back, for each block
# size. Both memories are this machine's, so this measures the work of copying, without a bus.

# %% alt="Milliseconds to swap a sequence of 512 tokens out and in against block sizes from 1 to 256: highest at block size 1, then falling, ever more slowly."
from minicache.cache.paged import PagedStorage
from minicache.cache.swap import HostStorage
from minicache.memory.blocks import BlockPool


def there_and_back(block_size):
    """A function that moves 512 tokens, in blocks that lie anywhere, out and in."""
    num_blocks = 512 // block_size
    storage = PagedStorage(BlockPool(2 * num_blocks, block_size), 4, 2, 32)
    host = HostStorage(storage, num_blocks)
    blocks = random.Random(0).sample(range(2 * num_blocks), num_blocks)
    out, back = list(zip(blocks, range(num_blocks))), list(zip(range(num_blocks), blocks))
    return lambda: (host.swap_out(out), host.swap_in(back))


block_sizes = [2**power for power in range(9)]
milliseconds = nb.fastest({size: there_and_back(size) for size in block_sizes}, repeats=20)
curve = {"": list(milliseconds.values())}
look = {"roles": ["shared"], "doubling": True, "yscale": "log"}
nb.lines(block_sizes, curve, "tokens a block", "ms, out and in", **look)

# %% [markdown]
# **Question 5.** The KV cache of OPT-13B takes 819,200 bytes a token. A victim of 1,000 tokens in blocks of 16 is
# swapped out and in over a bus that moves 25 · 10⁹ bytes a second. How many whole milliseconds do its bytes take, at
# least? (Whole blocks move.)

# %%
bus_milliseconds = None

# %%
nb.check(bus_milliseconds, int(1e3 * 2 * -(-1000 // 16) * 16 * 819_200 / 25e9))

# %% [markdown]
# ## 7. The auditor at work
#
# There are five schedulers here, each with one bug. How does an unwatched run end, and what does the auditor report?


# %%
class KeepsItsRows(PagedScheduler):
    """A victim whose tokens still count as computed."""

    def preempt(self, request, output):
        num_computed_tokens = request.num_computed_tokens
        super().preempt(request, output)
        request.num_computed_tokens = num_computed_tokens


class TakesOneTooMany(PagedScheduler):
    """A request of the batch gets its next block one token too early."""

    def blocks_missing(self, request):
        early = 1 if request.block_ids else 0
        return max(
            0, -(-(request.num_tokens + early) // self.pool.block_size) - len(request.block_ids)
        )


class SendsToTheEnd(PagedScheduler):
    """A victim goes to the end of the queue."""

    def priority_key(self, request):
        return request.num_preemptions, request.arrival_index


# %%
class Leaks(PagedScheduler):
    """Forgets the blocks of a request that leaves the batch."""

    def release(self, request):
        request.block_ids = []


class CopiesToTheWrongPlace(PagedScheduler):
    """Brings blocks back one block too far."""

    def swap_in(self, request, output):
        super().swap_in(request, output)
        host_blocks = [host for host, _ in output.swapped_in[request.request_id]]
        output.swapped_in[request.request_id] = list(zip(host_blocks, request.block_ids[1:]))


def three():
    """Three requests for ten blocks: one is preempted, and one waits."""
    return [Request(name, [1] * num, 20) for name, num in (("a", 80), ("b", 64), ("c", 30))]


# %%
from minicache.errors import InvariantError

for broken in (KeepsItsRows, TakesOneTooMany, SendsToTheEnd, Leaks, CopiesToTheWrongPlace):
    options = {"num_blocks": 10}
    if broken is CopiesToTheWrongPlace:
        options |= {"preemption": "swap", "num_host_blocks": 8}
    try:
        tally = drive(broken(**options), three(), max_steps=500)
        unwatched = f"{len(tally.finished)} of 3 end"
    except Exception as error:
        unwatched = f"{type(error).__name__}"
    try:
        drive(observe(broken(**options), Auditor()), three(), max_steps=500)
        found = "nothing"
    except InvariantError as error:
        found = str(error)
    print(f"{broken.__name__}\n  unwatched: {unwatched}\n  auditor:   {found}")

# %% [markdown]
# Most of these schedulers finish all requests, and the bug would have gone unnoticed.
#
# **Question 6.** When `KeepsItsRows` serves the two requests of part 1, how many tokens of prefill are missing,
# compared with the right scheduler?

# %%
missing_tokens = None

# %%
right, wrong = (drive(kind(num_blocks=10), two()) for kind in (PagedScheduler, KeepsItsRows))
nb.check(missing_tokens, right.num_prefill_tokens - wrong.num_prefill_tokens)

# %% [markdown]
# What would a better order of admission change, and what may it not change? [Phase
# 7](../phase-07-fairness/index.md) opens the incident room.
#
# ## Your experiment: how much memory, and how careful?
#
# Your pool has a fixed size. A watermark keeps part of it free at admission, for the running requests to grow into. Too
# small a watermark wastes work, too large a one wastes memory. Which is best?
#
# Choose the pool (per cent of the peak) and the requests. **Write down the watermark that takes the least time**, then
# run the cell. Then try short prompts with long answers, and long prompts with short answers.

# %% alt="Two panels against the watermark from 0 to 60 per cent, for your pool and your requests: prefill tokens fall from 12,200 without a watermark almost to the 7,000 of the prompts at 10 per cent, and to exactly those from 20 per cent on; the seconds are least at 10 per cent, then rise."
YOUR_POOL = 40  # per cent of what the requests want at most
YOUR_PROMPTS, YOUR_ANSWERS = (20, 200), (20, 200)  # tokens: fewest, most
YOUR_MS_PER_STEP, YOUR_MS_PER_PREFILL_TOKEN = 10, 0.1  # a decode step, and what a prompt adds
YOUR_PREDICTION = None  # per cent


def yours():
    rng = random.Random(1)
    return [
        Request(n, [1] * rng.randint(*YOUR_PROMPTS), rng.randint(*YOUR_ANSWERS)) for n in range(60)
    ]


wanted = max(step.num_used_blocks for step in serve(yours(), num_blocks=10_000)[0])
watermarks = list(range(0, 65, 5))
options = {"num_blocks": wanted * YOUR_POOL // 100}
runs = [serve(yours(), watermark=each / 100, **options)[1] for each in watermarks]
tokens = [run.num_prefill_tokens for run in runs]
seconds = [
    (run.num_steps * YOUR_MS_PER_STEP + run.num_prefill_tokens * YOUR_MS_PER_PREFILL_TOKEN) / 1e3
    for run in runs
]
left, right = nb.panels(1, 2)
nb.lines(watermarks, {"": tokens}, "watermark, %", "tokens of prefill", ax=left, ylim=(0, None))
nb.lines(watermarks, {"": seconds}, "watermark, %", "seconds", ax=right, ylim=(0, None))
best = watermarks[seconds.index(min(seconds))]
print(f"the least time at a watermark of {best} %; you predicted {YOUR_PREDICTION}")

# %% [markdown]
# **What to look for.** Prefill tokens above those of the prompts are work done twice. This work vanishes at a watermark
# that depends on how much a request grows after its admission: long answers need more. Beyond that, a larger watermark
# only makes the batch smaller and adds steps. How much does a prefilled token have to cost before 20 % is best?
