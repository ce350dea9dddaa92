# %% [markdown]
# # Phase 2: where the memory goes
#
# A server's memory is full. How many of its slots hold a token? Below, OPT-13B serves ten minutes of chats from 15,728
# slots, under four reservation policies. Under the first three, less than half of the slots hold a token. This notebook
# divides the waste into its parts: reserved for later, never needed, too scattered to use.

# %% alt="Four stacked bars of shares of memory. Used: about 17 per cent under max, 29 under pow2, 41 under oracle, 77 when paged; the rest is reserved, internal, external or free."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(2, mine=MINE)

from itertools import takewhile
from minicache.simulator.memory_use import MemorySimulation
from minicache.simulator.workload import SHAREGPT, generate

NUM_SLOTS, MAX_MODEL_LEN = 15_728, 2048  # OPT-13B in 12 GiB of cache


def serve(policy, workload=SHAREGPT, seconds=600, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS):
    """A run in steps of 45 ms; every tenth step is looked at."""
    coming = generate(workload, int(2 * workload.rate * seconds) + 100, seed=0)
    server = MemorySimulation(coming, policy, num_slots, max_model_len, seconds_per_step=0.045)
    return list(takewhile(lambda sample: sample.time < seconds, server.run(every=10)))


def mean_shares(samples):
    """Per cent of each part of memory, once the first two minutes have filled it."""
    memories = [sample.memory for sample in samples if sample.time >= 120]
    total = sum(memory.total for memory in memories)
    return {part: 100 * sum(getattr(m, part) for m in memories) / total for part in nb.PARTS}


runs = {policy: serve(policy) for policy in ("max", "pow2", "oracle", "paged")}
nb.shares({policy: mean_shares(samples) for policy, samples in runs.items()})

# %% [markdown]
# *Used* slots hold a token. *Reserved* ones will hold one before their request finishes. *Internal* ones lie inside a
# reservation and never will. *External* ones are free but too scattered for the waiting reservation. The rest is
# *free*.
#
# ## 1. Padding grows with the batch
#
# Draw a batch of chats at random, pad it to a rectangle, and see how much of it is padding. Then draw larger batches.

# %% alt="Share of padding against batch size: from 0 per cent for one sequence the median rises to 72 per cent for 128."
from random import Random
from minicache.memory.reservation import padded_rows, padding_share

arrivals = generate(SHAREGPT, 20_000, seed=0)
tokens = [each.num_prompt_tokens + each.num_output_tokens for each in arrivals]
rng = Random(0)
batch_sizes = [1, 2, 4, 8, 16, 32, 64, 128]
shares = [
    [100 * padding_share(rng.sample(tokens, size)) for _ in range(300)] for size in batch_sizes
]

nb.boxes(shares, batch_sizes, "sequences in the batch", "% padding", ylim=(0, 100))

# %% [markdown]
# **Question 1.** Seven sequences have 100 tokens, the eighth has `n`. What is the smallest `n` for which three
# quarters of the rectangle are padding? Work it out: 8 n rows, 700 + n tokens.

# %%
smallest_n = None

# %%
right = next(n for n in range(100, 10_000) if padding_share([100] * 7 + [n]) >= 0.75)
nb.check(smallest_n, right)
if smallest_n is not None:
    print("rows then:", padded_rows([100] * 7 + [smallest_n]))

# %% [markdown]
# ## 2. Buddies
#
# The figure shows a strip of 64 slots at five moments. Blue is allocated, grey is free, and a gap separates two runs.

# %% alt="Five strips of 64 slots, after allocating 5, 12, 3 and 17 slots and freeing them one by one. Runs are halved by allocations and merge when they are freed."
from minicache.memory.reservation import BuddyAllocator

allocator = BuddyAllocator(64)
starts = [allocator.allocate(count) for count in (5, 12, 3, 17)]
strips = {"5, 12, 3, 17": (allocator.allocations(), allocator.free_runs())}
for start in starts:
    allocator.free(start)
    allocator.check()
    strips[f"free({start})"] = (allocator.allocations(), allocator.free_runs())
nb.strips(strips, 64)
print("starts", starts)

# %% [markdown]
# **Question 2.** In a memory of 64 slots, 16 requests of 4 slots each fill everything. Then every second one finishes:
# 32 slots are free. What is the largest number of slots that can be allocated?

# %%
largest_count = None

# %%
allocator = BuddyAllocator(64)
fours = [allocator.allocate(4) for _ in range(16)]
for start in fours[::2]:
    allocator.free(start)
nb.check(largest_count, allocator.largest_free)

# %% [markdown]
# ## 3. What a policy asks for, and what it gets
#
# The table compares three policies on the same 20,000 chats. *Asked* is the result of `reservation`, *run* is the
# length of the run after the buddy allocator's rounding, and *tokens* is the final number of tokens.

# %%
from minicache.memory.reservation import reservation

lines = ["policy     asked     run  tokens   tokens / run"]
for policy in ("max", "pow2", "oracle"):
    asked = [
        reservation(policy, each.num_prompt_tokens, each.num_output_tokens, MAX_MODEL_LEN)
        for each in arrivals
    ]
    rounded = [1 << (count - 1).bit_length() for count in asked]
    means = [sum(counts) / len(arrivals) for counts in (asked, rounded, tokens)]
    lines.append(
        f"{policy:8} {means[0]:7.0f} {means[1]:7.0f} {means[2]:7.0f} {means[2] / means[1]:14.0%}"
    )
print("\n".join(lines))

# %% [markdown]
# Even at the end, when all of its tokens are there, an average request fills only a part of its run. During generation
# it fills less.
#
# **Question 3.** Under `oracle`, a request with a prompt of 300 tokens and an answer of 213 asks for 513 slots. How
# many slots of its run will never hold a token?

# %%
never_used = None

# %%
from minicache.memory.reservation import ContiguousReservation

memory = ContiguousReservation(MAX_MODEL_LEN, "oracle", MAX_MODEL_LEN)
memory.admit("A", 300, 213)
nb.check(never_used, memory.memory_use().internal)

# %% [markdown]
# ## 4. A server
#
# These are the numbers of the first picture: ten minutes of ShareGPT's chats at 2 requests a second, in the memory of
# an A100 with OPT-13B. A step takes 45 ms. `MemorySimulation` admits in arrival order and gives every running request a
# token per step. The first two minutes fill the memory and do not count.

# %%
print(f"{'':8}" + "".join(f"{name:>10}" for name in (*nb.PARTS, "requests")))
for policy, samples in runs.items():
    percents = "".join(f"{percent:9.1f}%" for percent in mean_shares(samples).values())
    running = [sample.num_running for sample in samples if sample.time >= 120]
    print(f"{policy:8}{percents}{sum(running) / len(running):10.1f}")

# %% [markdown]
# In the PagedAttention paper, *used* is 20.4, 26.8, 38.2 and 96.3 %. [A whole server](further/03-a-whole-server.md)
# explains where ours differ and why; above all, ten minutes at 2 requests a second do not fill a paged memory.
#
# **Question 4.** `max` serves at most 7 requests at once. Why 7? And how many slots can it never use, for any workload?
# (Both follow from 15,728 and 2,048.)

# %%
slots_never_used = None

# %%
from minicache.errors import OutOfSlotsError

allocator = BuddyAllocator(NUM_SLOTS)
try:
    while True:
        allocator.allocate(MAX_MODEL_LEN)
except OutOfSlotsError:
    pass
nb.check(slots_never_used, allocator.num_free)

# %% [markdown]
# ## 5. Memory over time
#
# The means hide the movement. Here is `oracle` over ten minutes: whenever a large reservation waits at the head of the
# waiting queue, free slots accumulate and no request can use them.

# %% alt="Stacked shares of memory over ten minutes under oracle. Used moves around 40 per cent; reserved, internal and external waste fill the rest; external peaks when a large request waits."
samples = runs["oracle"][::4]
minutes = [sample.time / 60 for sample in samples]
parts = {
    part: [100 * getattr(sample.memory, part) / NUM_SLOTS for sample in samples]
    for part in nb.PARTS
}
nb.shares_over_time(minutes, parts)

# %% [markdown]
# ## 6. Would a finer allocator help?
#
# Some of `oracle`'s waste comes from the buddy allocator, whose runs are powers of two. Suppose an allocator of
# contiguous runs that wasted nothing and left no holes. Then memory would hold what is *used* and *reserved*, and
# nothing else.
#
# **Question 5.** What percentage of the slots would be used then? Take `used` and `reserved` of `oracle` from the table
# above: their ratio stays, and they fill everything. Round to a whole number.

# %%
best_possible = None

# %%
oracle = mean_shares(runs["oracle"])
nb.check(best_possible, round(100 * oracle["used"] / (oracle["used"] + oracle["reserved"])))

# %% [markdown]
# That is the most that a perfect oracle with a perfect allocator can reach. Paging reaches more without an oracle,
# because it does not reserve.
#
# ## 7. Another workload
#
# Azure's conversations have longer prompts and shorter answers; its code completions have much longer prompts and very
# short answers. Which policy gains, and why? (For both the limit is 16,384 tokens, and the memory is eight times as
# large, to let `max` serve seven requests again.)

# %% alt="Bars of the share of used slots for three workloads and four policies. Oracle uses 43 to 54 per cent, paged nearly all. Max falls to 5 and 11 per cent where the limit is 16,384."
from dataclasses import replace
from minicache.simulator.workload import AZURE_CODE, AZURE_CONVERSATION

workloads = {
    "ShareGPT": (replace(SHAREGPT, rate=8.0), 180, MAX_MODEL_LEN, NUM_SLOTS),
    "Azure conversation": (replace(AZURE_CONVERSATION, rate=20.0), 180, 16_384, 8 * NUM_SLOTS),
    "Azure code": (replace(AZURE_CODE, rate=100.0, arrival_cv=1.0), 180, 16_384, 8 * NUM_SLOTS),
}
used = {
    policy: [mean_shares(serve(policy, *options))["used"] for options in workloads.values()]
    for policy in runs
}
nb.groups(
    list(workloads), used, "% of the slots used", roles=("wasted", "end", "prompt", "generated")
)

# %% [markdown]
# The rates are high enough that a request is always waiting, and the bursts of the code completions were removed: with
# a coefficient of variation of 13.2, three minutes hold one burst or none.
#
# A long prompt is used from the first moment. Where the answer is short in comparison, almost nothing is reserved for
# later, and `oracle` uses more; what it still loses is rounding and holes. `pow2` does as well on code, because a wrong
# estimate for 28 tokens of answer costs little. `max` suffers most: the limit is far above what requests need.
#
# What would help all of them, on every workload? A better estimate is not enough. [Phase
# 3](../phase-03-paged-cache/index.md) allocates one block at a time, anywhere.
#
# ## Your experiment: a workload that `max` likes
#
# On every workload above `max` is the worst. Is there one on which it is as good as paging?
#
# Choose the mean and the spread of prompts and answers and the model's limit. **Write down the percentage used under
# each of the four policies**, then run the cell. Then change one number at a time until `max` uses more than 80 %.

# %% alt="Four stacked bars of shares of memory for your workload: with prompts of 100 tokens and answers of 100, both of small spread, and a limit of 2,048, max uses 7 per cent, pow2 and oracle nearly 60 and paging 95."
from minicache.simulator.workload import LengthDistribution, Workload

YOUR_LIMIT = 2048
YOUR_PROMPTS = LengthDistribution.from_mean(100, cv=0.1)  # cv: standard deviation / mean
YOUR_OUTPUTS = LengthDistribution.from_mean(100, cv=0.1)
YOUR_PREDICTION = {"max": None, "pow2": None, "oracle": None, "paged": None}

yours = Workload("yours", YOUR_PROMPTS, YOUR_OUTPUTS, rate=30.0, max_model_len=YOUR_LIMIT)
found = {policy: mean_shares(serve(policy, yours, 180, YOUR_LIMIT)) for policy in YOUR_PREDICTION}
nb.shares(found)
for policy, predicted in YOUR_PREDICTION.items():
    print(f"{policy:8}{found[policy]['used']:5.1f}% used; you predicted {predicted}")

# %% [markdown]
# **What to look for.** `max` wastes the part of the limit that a request does not need, so requests must come close to
# it; and a slot is used only from the step that fills it, so the prompt must be long and the answer short. Both hold
# with a limit just above prompt + answer and a spread near 0. Paging does well there too, and on every other workload.
