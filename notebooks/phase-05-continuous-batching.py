# %% [markdown]
# # Phase 5: continuous batching at work
#
# What do two schedulers do with the same requests, what is it worth on a clock, and what does a request's random
# generator have to do with the rest of its batch? Here you watch them, count and measure.
#
# Set `MINE = True` in the first cell to run everything on your own files in `labs/phase-05-continuous-batching/`, then
# restart the kernel and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(5)))

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.scheduler import create_scheduler

print("Schedulers, sampling and engine are", "yours." if MINE else "the reference's.")

# %%
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch

from minicache.engine.decoding import decode
from minicache.grammar import Tokenizer, sample_text
from minicache.model import load_minigpt
from minicache.palette import color
from minicache.request import Request
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.simulator.workload import ALPACA, LengthDistribution, generate
from minicache.trace import to_chrome_trace

torch.set_num_threads(1)  # a second thread makes steps this small slower, and their times noisy
tokenizer = Tokenizer()
model = load_minigpt()
STAGES = {"static": "wasted", "continuous": "generated"}


def axes(xlabel, ylabel, width=7.2, height=3.4):
    """Axes with labels and a grid."""
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.3)
    return ax


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
# ## 1. Two grids
#
# Six requests, three batch slots. `run` serves them without a model and keeps the trace; `show` draws it: a row for each
# request, a column for each step.

# %% alt="Two grids of six requests against steps. Static batching: D, E and F wait for 8 steps, and the last ends after 14. Continuous batching: D waits for 3 steps, E and F for 5, and the last ends after 11."
SIX = {"A": (4, 3), "B": (3, 8), "C": (2, 5), "D": (5, 2), "E": (3, 4), "F": (2, 6)}


def run(name, lengths, **options):
    """Serve requests, id → (prompt tokens, tokens to generate), and return the trace and the tally."""
    steps = []
    scheduler = observe(create_scheduler(name, **{"num_blocks": 4096} | options), Recorder(steps.append))
    requests = [Request(request_id, [0] * prompt, output) for request_id, (prompt, output) in lengths.items()]
    return steps, drive(scheduler, requests)


def show(ax, steps, tally):
    """A trace as a grid."""
    for row, (request_id, end) in enumerate(sorted(tally.finished.items())):
        for step in steps[: end + 1]:
            entry = next((entry for entry in step.batch if entry.request_id == request_id), None)
            role = "free" if entry is None else "prompt" if entry.is_prefill else "generated"
            role = "end" if step.step == end else role
            ax.barh(row, 0.94, left=step.step, height=0.9, color=color(role))
    ax.set_yticks(range(len(tally.finished)), sorted(tally.finished))
    ax.invert_yaxis()


_, both = plt.subplots(2, 1, figsize=(7.2, 4.8), layout="constrained", sharex=True)
for ax, name in zip(both, STAGES, strict=True):
    steps, tally = run(name, SIX, max_num_seqs=3)
    show(ax, steps, tally)
    used = sum(tally.batch_sizes) / (3 * tally.num_steps)
    ax.set_title(f"{name}: {tally.num_steps} steps, {used:.0%} of the slots used", loc="left")
roles = {"prompt": "prefill", "generated": "decode", "end": "last token", "free": "waits"}
both[0].legend(handles=[Patch(color=color(role), label=label) for role, label in roles.items()], ncols=2, frameon=False)
both[1].set_xlabel("step")
plt.show()

# %% [markdown]
# **Question 1.** With two slots instead of three, how many steps does static batching take? The batches are then A B,
# C D, E F, with 3, 8, 5, 2, 4 and 6 tokens.
#
# **Question 2.** And continuous batching, with two slots? Draw the grid on paper first.

# %%
static_steps_with_two_slots = None
continuous_steps_with_two_slots = None

# %%
check(static_steps_with_two_slots, run("static", SIX, max_num_seqs=2)[1].num_steps)
check(continuous_steps_with_two_slots, run("continuous", SIX, max_num_seqs=2)[1].num_steps)

# %% [markdown]
# ## 2. The share that a batch uses
#
# Static batching uses mean / longest of its slots. Here are 256 answers whose lengths spread as chats do, all of them
# there from the start, with more and more slots.

# %% alt="Share of the slots used against the number of slots, from 1 to 64. Static batching falls from 100 per cent to below 20. Continuous batching stays close to 100 per cent until the slots are so many that a few long answers are left at the end."
workload = replace(ALPACA, output=LengthDistribution.from_mean(40, ALPACA.output.cv), max_model_len=400)
lengths = {
    each.request_id: (each.num_prompt_tokens, each.num_output_tokens) for each in generate(workload, 256, seed=0)
}
slots = [2**power for power in range(7)]
ax = axes("slots", "share of the slots used")
num_steps = {}
for name, role in STAGES.items():
    shares = []
    for count in slots:
        _, tally = run(name, lengths, max_num_seqs=count)
        num_steps[name, count] = tally.num_steps
        shares.append(sum(tally.batch_sizes) / (count * tally.num_steps))
    ax.plot(slots, shares, "o-", color=color(role), label=name)
ax.set_xscale("log", base=2)
ax.set_xticks(slots, [str(count) for count in slots])
ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
ax.set_ylim(0, 1.05)
ax.legend(frameon=False)
plt.show()
for count in (8, 32, 64):
    print(f"{count} slots: {num_steps['static', count]:,} and {num_steps['continuous', count]:,} steps")

# %% [markdown]
# **Question 3.** These answers have `total` tokens. What is the smallest number of steps in which 32 slots could
# generate them, whatever the scheduler?

# %%
total = sum(output for _, output in lengths.values())
print(f"{total:,} tokens")
smallest_number_of_steps = None

# %%
check(smallest_number_of_steps, -(-total // 32))

# %% [markdown]
# ## 3. A load that rises
#
# Poisson arrivals on eight slots. Up to which rate does a server keep up? Latency is counted in steps, from arrival to
# the last token, and averaged over 250 requests.

# %% alt="Mean latency in steps against the arrival rate. Static batching rises steeply from a rate of about 0.1 requests a step on, continuous batching only beyond 0.2."
rates = [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]


def mean_latency(name, rate):
    """Steps from arrival to last token, on average."""
    drawn = generate(replace(workload, rate=rate), 250, seed=1)
    arrivals = [
        (int(each.time), Request(each.request_id, [0] * each.num_prompt_tokens, each.num_output_tokens))
        for each in drawn
    ]
    scheduler = create_scheduler(name, num_blocks=4096, max_num_seqs=8)
    tally = drive(scheduler, arrivals=arrivals, max_steps=100_000)
    return sum(tally.finished[request.request_id] - step + 1 for step, request in arrivals) / len(arrivals)


ax = axes("requests a step", "steps until the last token, mean")
for name, role in STAGES.items():
    ax.plot(rates, [mean_latency(name, rate) for rate in rates], "o-", color=color(role), label=name)
ax.set_ylim(0, 400)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Question 4.** The answers have 40 tokens on average (a little less, for the limit cuts the longest). Were no slot
# ever idle, up to about which rate could eight slots keep up? One digit behind the point.

# %%
rate_that_eight_slots_can_bear = None

# %%
check(rate_that_eight_slots_can_bear, round(8 / 40, 1))

# %% [markdown]
# ## 4. On a clock
#
# Steps are not seconds: a step with more requests takes longer. So: MiniGPT through `LLM`, 32 prompts, answers of 4 to
# 80 tokens. `ignore_eos` makes the lengths those that we want.

# %%
rng = random.Random(0)
prompts = []
while len(prompts) < 32:
    words = sample_text(rng)[: rng.randint(3, 24)]
    prompts.append(tokenizer.encode(" ".join(words)))
outputs = [min(80, max(4, round(rng.lognormvariate(3.0, 0.9)))) for _ in prompts]
params = [SamplingParams(max_tokens=output, ignore_eos=True) for output in outputs]


def serve(scheduler="continuous", observers=(), **options):
    """Answers, seconds and steps of all 32 requests."""
    steps = []
    recorder = Recorder(steps.append, time.perf_counter)
    llm = LLM(model, scheduler=scheduler, observers=(recorder, *observers), **options)
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    return answers, time.perf_counter() - start, steps


serve(max_num_seqs=8)  # the first run also loads what the library needs
answers = {}
for name in STAGES:
    answers[name], seconds, steps = serve(name, max_num_seqs=8)
    print(f"{name}: {len(steps)} steps, {seconds:.2f} s, {sum(outputs) / seconds:,.0f} tokens a second")

# %% [markdown]
# **The promise**: the tokens are those that each request gets alone.

# %%
for prompt, output, static, continuous in zip(prompts, outputs, answers["static"], answers["continuous"], strict=True):
    alone = [int(token) for token in decode(model, torch.tensor([prompt]), output)]
    assert static.token_ids == continuous.token_ids == alone
print("Alone, in static batches, in continuous ones: the same tokens for all 32.")

# %% [markdown]
# ## 5. How many slots?
#
# The same 32 requests with 1 to 32 slots. More slots make fewer steps, and each step slower: by how much?

# %% alt="Two plots against the number of slots, from 1 to 32. Left: tokens a second rise steeply at first and then flatten. Right: milliseconds of a step of decodes rise slowly, far less than in proportion to the slots."
counts = [1, 2, 4, 8, 16, 32]
throughputs, milliseconds = [], []
for count in counts:
    _, seconds, steps = serve(max_num_seqs=count)
    decodes = [step.seconds for step in steps if len(step.batch) == count and step.num_tokens == count]
    throughputs.append(sum(outputs) / seconds)
    milliseconds.append(1e3 * sorted(decodes)[len(decodes) // 2] if decodes else float("nan"))

_, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
left.plot(counts, throughputs, "o-", color=color("generated"))
left.set(xlabel="slots", ylabel="tokens a second", ylim=(0, None))
right.plot(counts, milliseconds, "o-", color=color("end"))
right.set(xlabel="slots", ylabel="ms a step of decodes, median", ylim=(0, None))
for ax in (left, right):
    ax.grid(alpha=0.3)
plt.show()
for count, throughput, duration in zip(counts, throughputs, milliseconds, strict=True):
    print(f"slots {count:2}: {throughput:6,.0f} tokens a second, {duration:.2f} ms a step of decodes")

# %% [markdown]
# Where both curves bend depends on your machine. MiniGPT is so small that a step is mostly calls, which a batch shares;
# in a large model it is mostly weights, which a batch shares too.
#
# **Question 5.** With one slot, how many steps do the 32 requests take?

# %%
steps_with_one_slot = None

# %%
check(steps_with_one_slot, sum(outputs))

# %% [markdown]
# ## 6. What a token is drawn from
#
# MiniGPT after "Every day they", and what is left of its distribution. Change the numbers and look.

# %% alt="Four bar charts of the probabilities of twelve words after Every day they: as they are, with temperature 0.7, with top_k 4, with top_p 0.8. The cut ones have fewer bars, and those that are left are longer."
with torch.inference_mode():
    logits = model(torch.tensor([tokenizer.encode("Every day they")]))[0, -1]
order = logits.argsort(descending=True)[:12]
settings = [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}]
_, panels = plt.subplots(1, 4, figsize=(7.2, 3.4), layout="constrained", sharey=True)
for ax, setting in zip(panels, settings, strict=True):
    probabilities = TokenSampler(SamplingParams(**{"temperature": 1.0} | setting)).probabilities(logits)
    ax.barh(range(12), probabilities[order], color=color("generated"))
    ax.set(title=", ".join(f"{key} = {value}" for key, value in setting.items()) or "as it is", xlim=(0, 0.85))
    ax.set_yticks(range(12), [tokenizer.decode([int(token)]) for token in order])
    print(setting or "as it is", int((probabilities > 0).sum()), "words")
panels[0].invert_yaxis()
plt.show()

# %% [markdown]
# **Question 6.** At temperature 2, does `top_p=0.8` leave more words than at temperature 1, fewer, or as many? Answer
# "more", "fewer" or "as many".

# %%
words_at_temperature_2 = None

# %%
left_at = {
    temperature: int((TokenSampler(SamplingParams(temperature=temperature, top_p=0.8)).probabilities(logits) > 0).sum())
    for temperature in (1.0, 2.0)
}
difference = left_at[2.0] - left_at[1.0]
check(words_at_temperature_2, "more" if difference > 0 else "fewer" if difference else "as many")

# %% [markdown]
# Does the sampler draw what it says? 5,000 draws, against the probabilities.

# %% alt="For eight words, the share of 5,000 draws as a bar and the probability as a mark. They agree."
sampler = TokenSampler(SamplingParams(temperature=1.0, top_p=0.8, seed=0))
probabilities = sampler.probabilities(logits)
drawn = Counter(sampler.draw(logits) for _ in range(5_000))
ax = axes("share", "", height=2.8)
names = [tokenizer.decode([int(token)]) for token in order[:8]]
ax.barh(names, [drawn[int(token)] / 5_000 for token in order[:8]], color=color("generated"), label="drawn")
ax.plot(probabilities[order[:8]], names, "|", color=color("end"), markersize=16, markeredgewidth=3, label="probability")
ax.invert_yaxis()
ax.legend(frameon=False)
plt.show()
ruled_out = (probabilities == 0).nonzero().flatten().tolist()
assert not any(drawn[token] for token in ruled_out)

# %% [markdown]
# ## 7. A seed, alone and in a batch
#
# One request with a seed: alone, and among 15 others that draw too, at two places in the batch.

# %%
mine = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, seed=7)
others = [SamplingParams(max_tokens=10 + 3 * number, temperature=1.2) for number in range(15)]
llm = LLM(model, tokenizer=tokenizer, scheduler="continuous", max_num_seqs=16)
alone = llm.generate(["Yesterday I"], mine)[0]
first = llm.generate(["Yesterday I"] + ["Tomorrow she will"] * 15, [mine, *others])[0]
last = llm.generate(["Tomorrow she will"] * 15 + ["Yesterday I"], [*others, mine])[-1]
print("Yesterday I" + alone.text)
assert alone.token_ids == first.token_ids == last.token_ids
print("The same, alone and in a batch.")

# %% [markdown]
# **Question 7.** The request's generator is moved on once for each of its tokens. The 15 others draw 10, 13, 16, …, 52
# tokens at most. How often do they move *its* generator on?

# %%
draws_by_others = None

# %%
check(draws_by_others, 0)

# %% [markdown]
# ## 8. In a trace viewer
#
# The run of section 4 once more, in Chrome's format. Open the file at https://ui.perfetto.dev: a track for each
# request, a slice for each step, and counters below. The wide slices are steps with prompts in them.

# %%
_, _, steps = serve(max_num_seqs=8)
path = Path(tempfile.gettempdir()) / "minicache-phase-05.json"
path.write_text(json.dumps(to_chrome_trace(steps)), encoding="utf-8")
print(f"{path}: {len(steps)} steps, {path.stat().st_size // 1024} KiB")
slowest = max(steps[1:], key=lambda step: step.seconds)
print(f"slowest step after the first: {slowest.seconds * 1e3:.1f} ms for {slowest.num_tokens} tokens")
