# %% [markdown]
# # Phase 5: continuous batching at work
#
# Six requests share three batch slots. Static batching starts the next three when the longest of a batch has finished;
# continuous batching fills a slot as soon as it is free. Which requests wait, and for how long? Below is every step of
# both. This notebook measures the difference in steps and in seconds, and checks that the tokens do not depend on it.

# %% alt="Two grids of six requests against steps. Static batching: D, E and F wait for 8 steps, and the last ends after 14. Continuous batching: D waits for 3 steps, E and F for 5, and the last ends after 11."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(5, mine=MINE)

from minicache.request import Request
from minicache.scheduler import create_scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe

SIX = {"A": (4, 3), "B": (3, 8), "C": (2, 5), "D": (5, 2), "E": (3, 4), "F": (2, 6)}


def run(stage, lengths, **options):
    """Serve requests, id → (prompt tokens, tokens to generate): the trace, and the tally."""
    steps = []
    scheduler = observe(create_scheduler(stage, num_blocks=4096, **options), Recorder(steps.append))
    return steps, drive(scheduler, [Request(name, [0] * p, n) for name, (p, n) in lengths.items()])


def show(lengths, num_slots):
    """Both stages, step by step."""
    for stage, ax in zip(("static", "continuous"), nb.panels(2, 1, height=4.4, sharex=True)):
        steps, tally = run(stage, lengths, max_num_seqs=num_slots)
        used = sum(tally.batch_sizes) / (num_slots * tally.num_steps)
        title = f"{stage}: {tally.num_steps} steps, {used:.0%} of the slots used"
        nb.grid_of_steps(steps, list(lengths), ax=ax, title=title, legend=stage == "static")


show(SIX, 3)

# %% [markdown]
# ## 1. Two grids
#
# A row is a request, a column is a step. Yellow is a prefill, blue a decode, red the last token, grey waiting.
#
# **Question 1.** With two slots instead of three, how many steps does static batching take? The batches are then A B,
# C D, E F, with 3, 8, 5, 2, 4 and 6 tokens.
#
# **Question 2.** And continuous batching, with two slots? Draw the grid on paper first.

# %%
static_steps_with_two_slots = None
continuous_steps_with_two_slots = None

# %%
nb.check(static_steps_with_two_slots, run("static", SIX, max_num_seqs=2)[1].num_steps)
nb.check(continuous_steps_with_two_slots, run("continuous", SIX, max_num_seqs=2)[1].num_steps)

# %% [markdown]
# ## 2. The share that a batch uses
#
# Static batching uses the fraction mean length / longest length of its slots. Here are 256 answers with the length
# distribution of chats, all waiting from the start, with a growing number of slots.

# %% alt="Share of the slots used against the number of slots, from 1 to 64. Static batching falls from 100 per cent to about 25. Continuous batching stays close to 100 per cent until the slots are so many that a few long answers are left at the end: 82 with 32 slots, 68 with 64."
from dataclasses import replace

from minicache.simulator.workload import ALPACA, LengthDistribution, generate

forty = LengthDistribution.from_mean(40, ALPACA.output.cv)
workload = replace(ALPACA, output=forty, max_model_len=400)
drawn = generate(workload, 256, seed=0)
lengths = {each.request_id: (each.num_prompt_tokens, each.num_output_tokens) for each in drawn}
slots = [2**power for power in range(7)]
num_steps, shares = {}, {"static": [], "continuous": []}
for stage, line in shares.items():
    for count in slots:
        _, tally = run(stage, lengths, max_num_seqs=count)
        num_steps[stage, count] = tally.num_steps
        line.append(100 * sum(tally.batch_sizes) / (count * tally.num_steps))
look = {"roles": ("wasted", "generated"), "ylim": (0, 105)}
nb.lines(slots, shares, "slots", "% of the batch slots used", doubling=True, **look)
for count in (8, 32, 64):
    static, continuous = (num_steps[stage, count] for stage in shares)
    print(f"{count} slots: {static:,} and {continuous:,} steps")

# %% [markdown]
# **Question 3.** These answers have `total` tokens. What is the smallest number of steps in which 32 slots can generate
# them, under any scheduler?

# %%
total = sum(output for _, output in lengths.values())
print(f"{total:,} tokens")
smallest_number_of_steps = None

# %%
nb.check(smallest_number_of_steps, -(-total // 32))

# %% [markdown]
# ## 3. A rising load
#
# Requests arrive at eight slots as a Poisson process. Up to which rate does a server keep up? Latency is counted in
# steps, from arrival to the last token, averaged over 250 requests.

# %% alt="Mean latency in steps against the arrival rate. Static batching rises steeply from a rate of about 0.05 requests a step on and leaves the picture, at 400 steps, before 0.15; continuous batching rises only from about 0.2 on and reaches 200 at 0.3."
rates = [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]


def mean_latency(stage, rate):
    """Steps from arrival to last token, on average."""
    arrivals = [
        (
            int(each.time),
            Request(each.request_id, [0] * each.num_prompt_tokens, each.num_output_tokens),
        )
        for each in generate(replace(workload, rate=rate), 250, seed=1)
    ]
    scheduler = create_scheduler(stage, num_blocks=4096, max_num_seqs=8)
    tally = drive(scheduler, arrivals=arrivals, max_steps=100_000)
    waits = [tally.finished[request.request_id] - step + 1 for step, request in arrivals]
    return sum(waits) / len(waits)


latencies = {stage: [mean_latency(stage, rate) for rate in rates] for stage in shares}
look = {"roles": ("wasted", "generated"), "ylim": (0, 400)}
nb.lines(rates, latencies, "requests a step", "steps until the last token, mean", **look)

# %% [markdown]
# **Question 4.** The answers have 40 tokens on average (a little less, because the limit cuts the longest). If no slot
# were ever idle, up to about which rate could eight slots keep up? Answer to one decimal place.

# %%
rate_that_eight_slots_can_bear = None

# %%
nb.check(rate_that_eight_slots_can_bear, round(8 / 40, 1))

# %% [markdown]
# ## 4. In seconds
#
# Steps are not seconds: a step with more requests takes longer. Here MiniGPT serves 32 prompts through `LLM`, with answers
# of 4 to 80 tokens. `ignore_eos` fixes the lengths.

# %%
import random
import time

import torch

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer, sample_text
from minicache.model import load_minigpt

tokenizer, model = Tokenizer(), load_minigpt()
rng = random.Random(0)
prompts = []
while len(prompts) < 32:
    words = sample_text(rng)[: rng.randint(3, 24)]
    prompts.append(tokenizer.encode(" ".join(words)))
outputs = [min(80, max(4, round(rng.lognormvariate(3.0, 0.9)))) for _ in prompts]
params = [SamplingParams(max_tokens=output, ignore_eos=True) for output in outputs]


def serve(stage="continuous", **options):
    """Answers, seconds and steps of all 32 requests."""
    steps = []
    recorder = Recorder(steps.append, time.perf_counter)
    llm = LLM(model, scheduler=stage, observers=[recorder], **options)
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    return answers, time.perf_counter() - start, steps


# %%
serve(max_num_seqs=8)  # the first run also loads what the library needs
answers = {}
for stage in ("static", "continuous"):
    answers[stage], seconds, steps = serve(stage, max_num_seqs=8)
    throughput = sum(outputs) / seconds
    print(f"{stage}: {len(steps)} steps, {seconds:.2f} s, {throughput:,.0f} tokens a second")

# %% [markdown]
# **The guarantee**: each request gets the same tokens as alone.

# %%
from minicache.engine.decoding import decode

for prompt, output, static, continuous in zip(prompts, outputs, *answers.values()):
    alone = [int(token) for token in decode(model, torch.tensor([prompt]), output)]
    assert static.token_ids == continuous.token_ids == alone
print("Alone, in static batches, in continuous ones: the same tokens for all 32.")

# %% [markdown]
# ## 5. How many slots?
#
# Now the same 32 requests are served with 1, 2, 4, 8, 16 and 32 slots. With more slots there are fewer steps, and each
# is slower. By how much?

# %% alt="Two plots against the number of slots, from 1 to 32. Left: tokens a second rise steeply at first and then flatten. Right: milliseconds of a step of decodes rise slowly, far less than in proportion to the slots."
counts = [1, 2, 4, 8, 16, 32]
throughputs, milliseconds = [], []
for count in counts:
    _, seconds, steps = serve(max_num_seqs=count)
    decodes = [
        step.seconds for step in steps if len(step.batch) == count and step.num_tokens == count
    ]
    throughputs.append(sum(outputs) / seconds)
    milliseconds.append(1e3 * sorted(decodes)[len(decodes) // 2] if decodes else float("nan"))

left, right = nb.panels(1, 2)
look = {"doubling": True, "ylim": (0, None)}
nb.lines(counts, {"": throughputs}, "slots", "tokens a second", ax=left, **look)
times = {"": milliseconds}
nb.lines(counts, times, "slots", "ms a step of decodes, median", roles=["end"], ax=right, **look)
for count, throughput, duration in zip(counts, throughputs, milliseconds):
    print(
        f"slots {count:2}: {throughput:6,.0f} tokens a second, {duration:.2f} ms a step of decodes"
    )

# %% [markdown]
# Where the two curves bend depends on your machine. MiniGPT is so small that a step is mostly call overhead, which a
# batch shares; in a large model it is mostly reading weights, which a batch also shares.
#
# **Question 5.** With one slot, how many steps do the 32 requests take?

# %%
steps_with_one_slot = None

# %%
nb.check(steps_with_one_slot, sum(outputs))

# %% [markdown]
# ## 6. The distribution of the next token
#
# This is MiniGPT's distribution after "Every day they", and what each parameter keeps of it. Change the numbers and
# look.

# %% alt="Four bar charts of the probabilities of the twelve most probable words after 'Every day they'. The first word has 0.47 at temperature 1, 0.71 at temperature 0.7, 0.68 with top_k 4 and 0.58 with top_p 0.8. With top_k 4 only four bars are left; top_p 0.8 keeps all twelve, and one more word."
from minicache.engine.sampling import TokenSampler

with torch.inference_mode():
    logits = model(torch.tensor([tokenizer.encode("Every day they")]))[0, -1]
order = logits.argsort(descending=True)[:12]
words = [tokenizer.decode([int(token)]) for token in order]
settings = [{"temperature": 1.0}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}]
for ax, setting in zip(nb.panels(2, 2, height=6.4, sharey=True), settings):
    sampler = TokenSampler(SamplingParams(**{"temperature": 1.0} | setting))
    probabilities = sampler.probabilities(logits)
    title = ", ".join(f"{key} = {value}" for key, value in setting.items())
    shares = dict(zip(words, probabilities[order].tolist()))
    nb.bars(shares, "probability", text="{:.2f}", ax=ax, title=title)
    print(f"{title}: {int((probabilities > 0).sum())} words")

# %% [markdown]
# **Question 6.** At temperature 2, does `top_p=0.8` leave more words than at temperature 1, fewer, or as many? Answer
# "more", "fewer" or "as many".

# %%
words_at_temperature_2 = None

# %%
left_at = {}
for temperature in (1.0, 2.0):
    sampler = TokenSampler(SamplingParams(temperature=temperature, top_p=0.8))
    left_at[temperature] = int((sampler.probabilities(logits) > 0).sum())
difference = left_at[2.0] - left_at[1.0]
nb.check(words_at_temperature_2, "more" if difference > 0 else "fewer" if difference else "as many")

# %% [markdown]
# Does the sampler draw with the probabilities of `top_p=0.8`? Compare them with 5,000 draws.

# %% alt="For eight words, two bars side by side: the percentage of 5,000 draws, and 100 times the probability. They agree to about a point."
from collections import Counter

sampler = TokenSampler(SamplingParams(temperature=1.0, top_p=0.8, seed=0))
probabilities = sampler.probabilities(logits)
drawn = Counter(sampler.draw(logits) for _ in range(5_000))
bars = {
    "share drawn": [100 * drawn[int(token)] / 5_000 for token in order[:8]],
    "probability": (100 * probabilities[order[:8]]).tolist(),
}
nb.groups(words[:8], bars, "%")
ruled_out = (probabilities == 0).nonzero().flatten().tolist()
assert not any(drawn[token] for token in ruled_out)

# %% [markdown]
# ## 7. A seed, alone and in a batch
#
# One request with a seed runs alone, and then among 15 others that sample too, in the first batch slot and in the last.

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
# **Question 7.** The request's generator advances once for each of its tokens. The 15 others draw 10, 13, 16, …, 52
# tokens at most. How often do they advance the generator of *this* request?

# %%
draws_by_others = None

# %%
nb.check(draws_by_others, 0)

# %% [markdown]
# ## 8. In a trace viewer
#
# Here is the continuous run of section 4 in Chrome's trace format. Open the file at https://ui.perfetto.dev: it has a
# track for each request, a slice for each step, and counters below. The wide slices are steps with prompts.

# %%
import json
import tempfile
from pathlib import Path

from minicache.trace import to_chrome_trace

_, _, steps = serve(max_num_seqs=8)
path = Path(tempfile.gettempdir()) / "minicache-phase-05.json"
path.write_text(json.dumps(to_chrome_trace(steps)), encoding="utf-8")
print(f"{path}: {len(steps)} steps, {path.stat().st_size // 1024} KiB")
slowest = max(steps[1:], key=lambda step: step.seconds)
milliseconds = 1e3 * slowest.seconds
print(f"slowest step after the first: {milliseconds:.1f} ms for {slowest.num_tokens} tokens")

# %% [markdown]
# ## 9. On a real model
#
# SmolLM2-135M-Instruct answers twelve questions in four slots. The model ends its answers itself, so their lengths are
# not known in advance. Which stage takes fewer steps, and how much of that advantage is left in seconds?

# %%
real_model = nb.real_model()
if real_model is not None:
    ask = ["Name three fruits.", "Who wrote Hamlet?", "Why do cats purr?", "What is 12 times 12?"]
    ask += ["How is bread made?", "What is a haiku?", "Is seven prime?", "Where is Peru?"]
    ask += ["What is a compiler?", "Name a planet.", "Why do we sleep?", "What is 2 + 2?"]
    for stage in ("static", "continuous"):
        llm = LLM(real_model, scheduler=stage, max_num_seqs=4, num_blocks=128)
        for text in ask:
            messages = [{"role": "user", "content": text}]
            token_ids = llm.tokenizer.apply_chat_template(messages)
            llm.add_request(token_ids, SamplingParams(max_tokens=48))
        start, chunks, num_steps = time.perf_counter(), [], 0
        while llm.has_unfinished:
            chunks += llm.step()
            num_steps += 1
        seconds = time.perf_counter() - start
        print(f"{stage}: {num_steps} steps, {len(chunks)} tokens, {seconds:.1f} s")

# %% [markdown]
# ## Your experiment: how bad can static batching get?
#
# With the six requests of the first figure, static batching takes 14 steps and continuous batching 11. Find six
# requests of at most 8 tokens each, for three slots, with the largest possible ratio of the two numbers of steps.
# **Draw both grids on paper and write down their steps first**. Then find six for which both stages take equally many
# steps.

# %% alt="Two grids of your six requests against steps, for static and continuous batching, with the number of steps of each above it."
YOUR_SIX = {"A": (4, 8), "B": (3, 7), "C": (2, 6), "D": (5, 5), "E": (3, 4), "F": (2, 3)}
YOUR_SLOTS = 3
YOUR_PREDICTION = {"static": None, "continuous": None}  # steps

show(YOUR_SIX, YOUR_SLOTS)
for stage, predicted in YOUR_PREDICTION.items():
    num_steps = run(stage, YOUR_SIX, max_num_seqs=YOUR_SLOTS)[1].num_steps
    print(f"{stage}: {num_steps} steps; you predicted {predicted}")

# %% [markdown]
# **What to look for.** A static batch takes as long as its longest request. The worst case is one long request in each
# batch among short ones, because the long ones could have run at the same time. The order of arrival matters too: the same
# six requests sorted by length suit static batching. A server cannot choose the order of arrival.
