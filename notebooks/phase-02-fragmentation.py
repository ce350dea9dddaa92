# %% [markdown]
# # Phase 2: where the memory goes
#
# How many slots of a full memory hold a token, who has the others, and what would help? Here a server runs, with no
# model in it, and you look at its memory while it does.
#
# Set `MINE = True` in the first cell to run everything on your own file in `labs/phase-02-fragmentation/`, then
# restart the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(2)))

from minicache.memory.reservation import (
    BuddyAllocator,
    ContiguousReservation,
    padded_rows,
    padding_share,
    reservation,
)

print("Padding, buddies and reservation are", "yours." if MINE else "the reference's.")

# %%
from dataclasses import replace
from itertools import takewhile
from random import Random

import matplotlib.pyplot as plt

from minicache.errors import OutOfSlotsError
from minicache.palette import color
from minicache.simulator.memory_use import MemorySimulation
from minicache.simulator.workload import AZURE_CODE, AZURE_CONVERSATION, SHAREGPT, generate

NUM_SLOTS = 15_728  # OPT-13B in 12 GiB of cache
MAX_MODEL_LEN = 2048
SECONDS_PER_STEP = 0.045
PARTS = {  # part of memory: role of its colour, hatching
    "used": ("generated", ""),
    "reserved": ("generated", "////"),
    "internal": ("wasted", ""),
    "external": ("free", "xxxx"),
    "free": ("free", ""),
}


def look(part):
    """How a part of memory is drawn."""
    role, hatch = PARTS[part]
    outlined = part == "reserved"
    edge = color(role) if outlined else "black" if hatch else "none"
    return {"facecolor": "white" if outlined else color(role), "edgecolor": edge, "hatch": hatch, "linewidth": 0}


def check(answer, right):
    """Compare an answer with the right one, if there is one to compare."""
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
        return
    direction = "high" if answer > right else "low"
    assert answer == right, f"{answer:,} is too {direction}"
    print("Right.")


# %% [markdown]
# ## 1. Padding grows with the batch
#
# Draw a batch of chats at random, make it rectangular, and see how much of it is padding. Then larger batches.

# %% alt="Share of padding against batch size: from 0 per cent for one sequence the median rises to 75 per cent for 128."
arrivals = generate(SHAREGPT, 20_000, seed=0)
tokens = [each.num_prompt_tokens + each.num_output_tokens for each in arrivals]
rng = Random(0)
batch_sizes = [1, 2, 4, 8, 16, 32, 64, 128]
shares = [[100 * padding_share(rng.sample(tokens, size)) for _ in range(300)] for size in batch_sizes]

_, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
ax.boxplot(shares, tick_labels=batch_sizes, sym="", medianprops={"color": color("end"), "linewidth": 2})
ax.set(xlabel="sequences in the batch", ylabel="% padding", ylim=(0, 100))
ax.grid(axis="y", alpha=0.3)
plt.show()

# %% [markdown]
# **Question 1.** Seven sequences have 100 tokens, the eighth has `n`. What is the smallest `n` for which three
# quarters of the rectangle are padding? Work it out: 8 n rows, 700 + n tokens.

# %%
smallest_n = None

# %%
check(smallest_n, next(n for n in range(100, 10_000) if padding_share([100] * 7 + [n]) >= 0.75))
if smallest_n is not None:
    print("rows then:", padded_rows([100] * 7 + [smallest_n]))

# %% [markdown]
# ## 2. Buddies
#
# A strip of 64 slots. Blue is taken, grey is free, and a line stands between two runs.


# %% alt="Five strips of 64 slots, after allocating 5, 12, 3 and 17 slots and freeing them one by one. Runs are halved on the way down and merge on the way up."
def draw_runs(ax, row, allocator):
    """One strip: taken runs and free runs."""
    for runs, role in ((allocator.allocations(), "generated"), (allocator.free_runs(), "free")):
        for start, size in runs:
            ax.barh(row, size, left=start, height=0.7, color=color(role), edgecolor="white", linewidth=1.5)
            ax.text(start + size / 2, row, size, ha="center", va="center", color="white" if role != "free" else "black")


allocator = BuddyAllocator(64)
starts = [allocator.allocate(count) for count in (5, 12, 3, 17)]
_, ax = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
labels = ["5, 12, 3, 17"]
draw_runs(ax, 0, allocator)
for row, start in enumerate(starts, start=1):
    allocator.free(start)
    allocator.check()
    draw_runs(ax, row, allocator)
    labels.append(f"free({start})")
ax.set(yticks=range(len(labels)), yticklabels=labels, xticks=range(0, 65, 8), xlabel="slot", ylim=(4.6, -0.6))
plt.show()
print("starts", starts)

# %% [markdown]
# **Question 2.** In a memory of 64 slots, 16 requests of 4 slots each fill everything. Then every second one leaves:
# 32 slots are free. What is the largest count that can be allocated?

# %%
largest_count = None

# %%
allocator = BuddyAllocator(64)
fours = [allocator.allocate(4) for _ in range(16)]
for start in fours[::2]:
    allocator.free(start)
check(largest_count, allocator.largest_free)

# %% [markdown]
# ## 3. What a policy asks for, and what it gets
#
# The same 20,000 chats under three policies. *Asked* is `reservation`, *run* is what the buddy allocator makes of it,
# *tokens* is what will be there in the end.

# %%
lines = ["policy     asked     run  tokens   tokens / run"]
for policy in ("max", "pow2", "oracle"):
    asked = [reservation(policy, each.num_prompt_tokens, each.num_output_tokens, MAX_MODEL_LEN) for each in arrivals]
    runs = [1 << (count - 1).bit_length() for count in asked]
    means = [sum(counts) / len(arrivals) for counts in (asked, runs, tokens)]
    lines.append(f"{policy:8} {means[0]:7.0f} {means[1]:7.0f} {means[2]:7.0f} {means[2] / means[1]:14.0%}")
print("\n".join(lines))

# %% [markdown]
# Even at the very end of its life, when all of its tokens are there, an average request fills only a part of its run.
# While it is being written it is less.
#
# **Question 3.** A prompt of 300 tokens, an answer of 213, `oracle`. The request asks for 513 slots. How many of its
# run will never hold a token?

# %%
never_used = None

# %%
memory = ContiguousReservation(MAX_MODEL_LEN, "oracle", MAX_MODEL_LEN)
memory.admit("A", 300, 213)
check(never_used, memory.memory_use().internal)

# %% [markdown]
# ## 4. A server
#
# Ten minutes of ShareGPT at 2 requests a second, from the memory of an A100 with OPT-13B. A step takes 45 ms.
# `MemorySimulation` admits in the order of arrival and gives every running request a token a step. Every tenth step is
# looked at. The first two minutes fill the memory and do not count.


# %%
def serve(policy, workload=SHAREGPT, seconds=600, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS):
    """A run, of which every tenth step is looked at."""
    coming = generate(workload, int(2 * workload.rate * seconds) + 100, seed=0)
    simulation = MemorySimulation(coming, policy, num_slots, max_model_len, seconds_per_step=SECONDS_PER_STEP)
    return list(takewhile(lambda sample: sample.time < seconds, simulation.run(every=10)))


def percent(samples, part):
    """Mean share of a part of memory, in percent, after two minutes."""
    counted = [getattr(sample.memory, part) / sample.memory.total for sample in samples if sample.time >= 120]
    return 100 * sum(counted) / len(counted)


def batched(samples):
    """Mean number of running requests, after two minutes."""
    running = [sample.num_running for sample in samples if sample.time >= 120]
    return sum(running) / len(running)


runs = {policy: serve(policy) for policy in ("max", "pow2", "oracle", "paged")}
lines = [f"{'':8}" + "".join(f"{name:>10}" for name in (*PARTS, "requests"))]
for policy, samples in runs.items():
    shares = "".join(f"{percent(samples, part):9.1f}%" for part in PARTS)
    lines.append(f"{policy:8}{shares}{batched(samples):10.1f}")
print("\n".join(lines))

# %% alt="Four stacked bars of shares of memory. Used: about 20 per cent under max, 30 under pow2, 40 under oracle, about 80 when paged; the rest is reserved, internal, external or free."
_, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
left = dict.fromkeys(runs, 0.0)
for part in PARTS:
    widths = [percent(samples, part) for samples in runs.values()]
    ax.barh(list(runs), widths, left=list(left.values()), label=part, **look(part))
    left = {policy: left[policy] + width for policy, width in zip(runs, widths, strict=True)}
ax.set(xlabel="% of the slots", xlim=(0, 100))
ax.invert_yaxis()
ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
plt.show()

# %% [markdown]
# The paper's numbers for *used* are 20.4, 26.8, 38.2 and 96.3. [The theory](theory/04-reservation-policies.md) says
# where ours differ and why; above all, ten minutes at 2 requests a second do not fill a paged memory.
#
# **Question 4.** `max` serves 7 requests at once, never more. Why 7? And how many slots can it never use, whoever
# comes? (Both can be worked out from 15,728 and 2,048.)

# %%
slots_never_used = None

# %%
allocator = BuddyAllocator(NUM_SLOTS)
try:
    while True:
        allocator.allocate(MAX_MODEL_LEN)
except OutOfSlotsError:
    pass
check(slots_never_used, allocator.num_free)

# %% [markdown]
# ## 5. Memory over time
#
# The means hide the movement. Here is what `oracle` does in ten minutes: whenever a large reservation is waiting at
# the head of the queue, free slots collect behind it and are of no use to anybody.

# %% alt="Stacked shares of memory over ten minutes under oracle. Used moves around 40 per cent; reserved, internal and external waste fill the rest; external peaks when a large request waits."
samples = runs["oracle"][::4]
minutes = [sample.time / 60 for sample in samples]
_, ax = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
below = [0.0] * len(samples)
for part in PARTS:
    above = [low + 100 * getattr(each.memory, part) / NUM_SLOTS for low, each in zip(below, samples, strict=True)]
    ax.fill_between(minutes, below, above, label=part, **look(part))
    below = above
ax.set(xlabel="minutes", ylabel="% of the slots", xlim=(0, 10), ylim=(0, 100))
ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
plt.show()

# %% [markdown]
# ## 6. Would a finer allocator help?
#
# Some of `oracle`'s waste is the buddy allocator's: runs of powers of two only. Suppose that there were an allocator
# of contiguous runs that wasted nothing, and no holes either. Then memory would hold what is *used* and *reserved*,
# and nothing else.
#
# **Question 5.** What percentage of the slots would be used then? Take `used` and `reserved` of `oracle` from the
# table above: their ratio stays, and they fill everything. Round to a whole number.

# %%
best_possible = None

# %%
used, reserved = (percent(runs["oracle"], part) for part in ("used", "reserved"))
check(best_possible, round(100 * used / (used + reserved)))

# %% [markdown]
# So much can be had by a perfect oracle with a perfect allocator. Paging gets more with no oracle at all, because it
# does not reserve.
#
# ## 7. Another workload
#
# Azure's conversations have longer prompts and shorter answers, its code completions much longer prompts and hardly
# any answer. Which policy gains, and why? (The limit is 16,384 tokens here, and the memory eight times as large, so
# that `max` can serve seven requests again.)

# %% alt="Bars of the share of used slots for three workloads and four policies. Oracle uses 40 to 50 per cent in each, paged nearly all. Max falls to 10 per cent where the limit is 16,384."
workloads = {
    "ShareGPT": (replace(SHAREGPT, rate=8.0), MAX_MODEL_LEN, NUM_SLOTS),
    "Azure conversation": (replace(AZURE_CONVERSATION, rate=20.0), 16_384, 8 * NUM_SLOTS),
    "Azure code": (replace(AZURE_CODE, rate=100.0, arrival_cv=1.0), 16_384, 8 * NUM_SLOTS),
}
_, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
for column, (policy, role) in enumerate(
    {"max": "wasted", "pow2": "end", "oracle": "prompt", "paged": "generated"}.items()
):
    used = [
        percent(serve(policy, workload, 180, limit, num_slots), "used")
        for workload, limit, num_slots in workloads.values()
    ]
    places = [row + 0.2 * column - 0.3 for row in range(len(workloads))]
    ax.bar(places, used, width=0.18, color=color(role), label=policy)
    for place, share in zip(places, used, strict=True):
        ax.text(place, share + 1, f"{share:.0f}", ha="center", size=9)
ax.set(xticks=range(len(workloads)), xticklabels=workloads, ylabel="% of the slots used", ylim=(0, 110))
ax.legend(ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
plt.show()

# %% [markdown]
# Rates were chosen so that somebody is always waiting, and the bursts of the code completions were taken out: with a
# coefficient of variation of 13.2, three minutes hold one burst or none.
#
# A long prompt is used from the first moment. Where the answer is short beside it, nearly nothing is reserved for
# later, and `oracle` uses more; what it still loses is rounding and holes. `pow2` comes close to it, because a wrong
# guess about 23 tokens of answer costs little. `max` suffers most, since the limit is far above what people ask for.
#
# What would help all of them, on every workload? Not a better guess. [Phase
# 3](../phase-03-paged-cache/index.md) takes a block at a time, anywhere.
