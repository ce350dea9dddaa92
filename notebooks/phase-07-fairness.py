# %% [markdown]
# # Phase 7: the incident room, measured
#
# Eight schedulers pass every simple test, and each has a bug from a production engine. What does a bug cost when the right
# workload arrives? Below is each incident's counter, with the bug and without. This notebook finds out which test exposes
# which bug, measures the two worst on a clock, and then measures what a guarantee of fairness costs, and which requests pay
# for it.

# %% alt="Eight small bar charts, one for each incident, with the bug and right: largest batch 0 and 1; place of the first request 2 and 1; prefill tokens 17,000 and 170; tokens without a block 74 and 0, and 10 and 0; requests that never finished 2 and 0; feasible requests that failed 1 and 0; requests that never finished 2 and 0."
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(7, mine=MINE)

from minicache_course.incidents.table import INCIDENTS, measure

COUNTERS = {
    "cap": ("largest batch", lambda c: c.max_batch_size),
    "order": ("place of the first", lambda c: 1 + c.finished.index("0")),
    "thrash": ("prefill tokens", lambda c: c.num_prefill_tokens),
    "victim": ("tokens, no block", lambda c: c.num_unbacked_tokens),
    "ignore": ("tokens, no block", lambda c: c.num_unbacked_tokens),
    "livelock": ("never finished", lambda c: c.num_unfinished),
    "feasible": ("failed, feasible", lambda c: c.num_capacity),
    "copy": ("never finished", lambda c: c.num_unfinished),
}
for ax, incident in zip(nb.panels(4, 2, height=5.2), INCIDENTS):
    label, count = COUNTERS[incident.slug]
    kinds = {"bug": incident.broken, "right": incident.fixed}
    values = {name: count(measure(incident.workload, kind)) for name, kind in kinds.items()}
    title = f"{incident.number}. {incident.slug}: {label}"
    nb.bars(values, "", roles=("wasted", "generated"), ax=ax, title=title, xticks=[])

# %% [markdown]
# ## 1. Eight workloads, eight counters
#
# `INCIDENTS` has for each incident the broken scheduler, the fix, and the smallest workload; `measure` runs one and
# counts. (With `MINE`, the fixes are yours.)

# %%
for incident in INCIDENTS:
    print(f"{incident.number}. {incident.name}")

# %% [markdown]
# **Question 1.** `Scheduler.check()` compares the books: blocks and references, queues and states. If it is called
# after every step, how many of the eight broken schedulers would it catch? (The two that raise another error do not
# count.)

# %%
caught_by_check = None


# %%
from minicache.errors import InvariantError
from minicache.scheduler.observe import Observer, observe


class Checking(Observer):
    """Calls check() after every step."""

    def on_update(self, scheduler, output, finished):
        scheduler.check()


def fails_check(incident):
    """Whether the books of the broken scheduler disagree at some time on its workload."""
    watched = measure(
        incident.workload, lambda **opts: observe(incident.broken(**opts), Checking())
    )
    return watched.error == InvariantError.__name__


nb.check(caught_by_check, sum(map(fails_check, INCIDENTS)))

# %% [markdown]
# ## 2. Which test exposes which bug?
#
# Each of the eight `expose` functions runs on each of the eight broken schedulers. On the scheduler with its bug it
# must fail. And on the others? Some pairs do not apply: only one of the schedulers can fork a request, and those based
# on phase 6's scheduler refuse the impossible request of incident 5 at once.

# %% alt="A grid of eight tests against eight broken schedulers. The diagonal is all exposed. Test 7 exposes scheduler 4 too. All other pairs are passed, except in row 8, where only the test's own scheduler can be asked, and in row 5, where schedulers 2, 3, 6 and 8 cannot."
import importlib

from minicache.errors import MinicacheError, RequestTooLargeError

OUTCOMES = {"end": "exposed", "free": "passed", "": "not applicable"}


def outcome(test, kind):
    """What a test finds in a scheduler."""
    try:
        test(kind)
    except (AttributeError, RequestTooLargeError):
        return ""
    except (AssertionError, MinicacheError):
        return "end"
    return "free"


tests = [importlib.import_module(incident.module).expose for incident in INCIDENTS]
found = [[outcome(test, incident.broken) for incident in INCIDENTS] for test in tests]
assert all(found[number][number] == "end" for number in range(8))
names = [f"{incident.number} {incident.slug}" for incident in INCIDENTS]
nb.cells(found, "broken scheduler", "test", rows=names, legend=OUTCOMES)

# %% [markdown]
# A bug that breaks a broad guarantee may be found by more than one test: scheduler 4 also finishes a request for lack of
# capacity. That is no fault of test 7. Exposing a *correct* scheduler would be one.
#
# ## 3. The thrash
#
# Two requests run, with memory for both. The plot has the prompt tokens that are computed, against the number N of
# tokens to generate: with the bug, right, and by the formula N·P + N(N − 1)/2 + the short prompt, where P is the length
# of the long prompt.

# %% alt="Prefill tokens against tokens to generate, from 10 to 200. With the bug a curve that bends upwards to 44,000, on which the formula's marks lie. Right: flat at 170."
from minicache.request import Request
from minicache.scheduler.drive import drive
from minicache_course.incidents.broken import StarvingScheduler, ThrashScheduler

LONG, SHORT = 120, 50
sizes = list(range(10, 201, 10))


def prefilled(kind, num_new):
    """Prefill tokens of the two requests."""
    requests = [Request("long", [1] * LONG, num_new), Request("short", [1] * SHORT, num_new)]
    return drive(kind(num_blocks=256), requests).num_prefill_tokens


curves = {
    "with the bug": [prefilled(ThrashScheduler, n) for n in sizes],
    "the formula": [n * LONG + n * (n - 1) // 2 + SHORT for n in sizes],
    "right": [prefilled(INCIDENTS[2].fixed, n) for n in sizes],
}
look = {"roles": ("wasted", "end", "generated")}
nb.lines(sizes, curves, "tokens to generate, each", "prefill tokens", **look)

# %% [markdown]
# **Question 2.** Two prompts have 200 and 30 tokens, with 50 new tokens each. How many prefill tokens are computed with
# the bug?
#
# **Question 3.** There are three requests, with prompts of 30, 20 and 10 tokens, and 50 new tokens each. How many steps
# does it take with the bug?

# %%
prefill_tokens_with_the_bug = None
steps_with_the_bug = None

# %%
two = drive(ThrashScheduler(num_blocks=64), [Request(p, [1] * p, 50) for p in (200, 30)])
three = drive(ThrashScheduler(num_blocks=64), [Request(p, [1] * p, 50) for p in (30, 20, 10)])
nb.check(prefill_tokens_with_the_bug, two.num_prefill_tokens)
nb.check(steps_with_the_bug, three.num_steps)

# %% [markdown]
# ## 4. Starvation, on a clock
#
# 12 equal requests run through `LLM` and MiniGPT, with memory for four. *Before*, the scheduler has the bugs of
# incidents 2 and 3 at once; *after*, it is `FairScheduler`. The [page on starvation](further/01-starvation.md) has 40
# requests; this is a smaller version.

# %%
import statistics
import time

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import load_minigpt
from minicache.scheduler.fair import FairScheduler

COUNT, PROMPT, NEW = 12, 40, 60
model, params = load_minigpt(), SamplingParams(max_tokens=NEW, ignore_eos=True)


class Ends(Observer):
    """Notes when each request has finished."""

    def __init__(self):
        self.seconds = {}

    def on_update(self, scheduler, output, finished):
        self.seconds |= {request.arrival_index: time.perf_counter() for request in finished}


def serve(kind):
    """Answers, and for each request the seconds until its last token."""
    ends, blocks = Ends(), 4 * -(-(PROMPT + NEW) // 16)
    llm = LLM(model, scheduler=kind(num_blocks=blocks), observers=[ends])
    start = time.perf_counter()
    answers = llm.generate([[1 + number] * PROMPT for number in range(COUNT)], params)
    return answers, [end - start for _, end in sorted(ends.seconds.items())]


# %% alt="Seconds until the last token for 12 requests, before and after. Before, they are scattered, and the last ones take several times as long as the slowest after. After, a staircase in the order of arrival."
serve(FairScheduler)  # the first run also loads what the library needs
before, seconds_before = serve(StarvingScheduler)
after, seconds_after = serve(FairScheduler)
curves = {"before": seconds_before, "after": seconds_after}
look = {"roles": ("wasted", "generated"), "ylim": (0, None)}
nb.lines(
    range(COUNT), curves, "request, in the order of arrival", "seconds until its last token", **look
)
for name, seconds in curves.items():
    print(f"{name}: mean {statistics.fmean(seconds):.2f} s, slowest {max(seconds):.2f} s")

# %% [markdown]
# **The tokens are the same** in all answers. A comparison of the answers would have shown nothing.

# %%
assert [answer.token_ids for answer in before] == [answer.token_ids for answer in after]
print("The same tokens for all", COUNT, "requests.")

# %% [markdown]
# **Question 4.** In the run *after*, what is the mean batch size, to one decimal place, if the whole run takes `num_steps`
# steps? No step computes two tokens of an answer.

# %%
requests = [Request(n, [1] * PROMPT, NEW) for n in range(COUNT)]
num_steps = drive(FairScheduler(num_blocks=28), requests).num_steps
print(f"{num_steps} steps")
mean_batch = None

# %%
nb.check(mean_batch, round(COUNT * NEW / num_steps, 1))

# %% [markdown]
# ## 5. One order, or two
#
# There are three requests of low priority, an urgent one that arrives a step later, and memory for fewer than four.
# What if admission goes by priority and the victim is the newest?

# %% alt="Three grids of four requests against steps. By arrival the urgent one finishes last. Admitted by priority with the newest preempted, it is preempted three times and finishes in step 25. With one order it runs through and finishes in step 16."
from minicache.scheduler.fair import PriorityScheduler
from minicache.scheduler.observe import Recorder
from minicache.scheduler.paged import PagedScheduler


class TwoOrders(PriorityScheduler):
    """Admits by priority; `running` is in the order of admission, so the newest is preempted."""

    def admit(self, request, output, found=()):
        super().admit(request, output, found)
        self.running.remove(request)
        self.running.append(request)


def four(kind):
    """The trace, and the urgent request."""
    steps, urgent = [], Request("U", [1] * 6, 16, priority=0)
    arrivals = [(0, Request(name, [1] * 6, 16, priority=1)) for name in "ABC"] + [(1, urgent)]
    drive(observe(kind(num_blocks=8, block_size=4), Recorder(steps.append)), arrivals=arrivals)
    return steps, urgent


kinds = (PagedScheduler, TwoOrders, PriorityScheduler)
for ax, kind in zip(nb.panels(3, 1, height=5.6, sharex=True), kinds):
    steps, urgent = four(kind)
    last = max(step.step for step in steps for entry in step.batch if entry.request_id == "U")
    title = f"{kind.__name__}: U preempted {urgent.num_preemptions} times, finishes in step {last}"
    nb.grid_of_steps(steps, "ABCU", ax=ax, title=title, legend=kind is PagedScheduler)

# %% [markdown]
# ## 6. What a bound costs, and whom
#
# There is one batch slot, and every answer has 5 tokens. For 700 of every 1,000 steps an urgent request arrives in
# every fifth step, which fills the slot. Those of low priority arrive at random, one in 100 steps on average. The bound
# is the number of requests in a row that may be admitted ahead of the one that arrived first. How long do the two kinds
# wait, for bounds from 1 to 256? (This bound is the constant `STARVATION_BOUND` of the module; here it is varied.) The
# first cell is an observer that notes waits and bypasses.


# %%
class Waits(Observer):
    """Notes how many steps each request waited, and the most bypasses in a row."""

    def __init__(self):
        self.step, self.came, self.waited = 0, {}, {}
        self.bypasses = self.most = 0
        self.waiting = {}

    def on_add(self, scheduler, request):
        self.came[request.request_id] = self.step
        self.waiting[request.request_id] = request

    def on_schedule(self, scheduler, output):
        for request in output.scheduled:
            if self.waiting.pop(request.request_id, None):
                steps = self.step - self.came[request.request_id]
                self.waited.setdefault(request.request_id, steps)
                earlier = (each.arrival_index for each in self.waiting.values())
                bypassed = any(index < request.arrival_index for index in earlier)
                self.bypasses = self.bypasses + 1 if bypassed else 0
                self.most = max(self.most, self.bypasses)
        self.waiting = dict(scheduler.waiting)
        self.step += 1


# %% alt="Mean steps until admission against the bound, from 1 to 256. The requests of low priority wait longer with a larger bound: 17 steps at 1, 241 at 256. The urgent ones wait 18 steps at 1 and not at all at 256."
import random

from minicache.scheduler import fair

BOUNDS = [4**power for power in range(5)]


def with_bound(bound, num_steps=10_000):
    """Mean waits of those of low priority and of the urgent, with a bound of so many."""
    rng, waits = random.Random(0), Waits()
    busy = [step for step in range(0, num_steps, 5) if step % 1000 < 700]
    low = [step for step in range(num_steps) if rng.random() < 0.01]
    arrivals = [(step, Request(("urgent", step), [1] * 10, 5)) for step in busy]
    arrivals += [(step, Request(("low", step), [1] * 10, 5, priority=9)) for step in low]
    usual, fair.STARVATION_BOUND = fair.STARVATION_BOUND, bound
    try:
        scheduler = observe(FairScheduler(num_blocks=64, max_num_seqs=1), waits)
        drive(scheduler, arrivals=arrivals, max_steps=2 * num_steps)
    finally:
        fair.STARVATION_BOUND = usual
    assert waits.most <= bound
    for which in ("low", "urgent"):
        yield statistics.fmean(wait for (kind, _), wait in waits.waited.items() if kind == which)


low, urgent = zip(*map(with_bound, BOUNDS))
curves = {"low priority": low, "urgent": urgent}
look = {"roles": ("wasted", "generated"), "doubling": True, "ylim": (0, None)}
nb.lines(BOUNDS, curves, "bound", "steps until admission, mean", **look)
for bound, low_wait, urgent_wait in zip(BOUNDS, low, urgent):
    print(f"bound {bound:3}: low {low_wait:6.1f} steps, urgent {urgent_wait:5.1f} steps")

# %% [markdown]
# A busy time has 140 urgent requests, so beyond a bound of 140 nothing changes: those of low priority wait until the
# busy time is over. The urgent requests are many, so each waits little for the few others.
#
# Try this: let all 140 arrive at once, at the beginning of the busy time. The bound no longer has any effect. A request
# that arrived before another does not bypass it, however urgent it is. The bound is about later arrivals.
#
# **Question 5.** There is one batch slot, and every five steps an urgent request of 5 tokens arrives, without a gap.
# One of low priority waits from the start, and the bound is 10. In which step is it admitted?

# %%
step_of_admission = None

# %%
fair.STARVATION_BOUND, usual = 10, fair.STARVATION_BOUND
low = Request("low", [1] * 10, 5, priority=9)
urgent = [(5 * number, Request(number, [1] * 10, 5)) for number in range(100)]
tally = drive(FairScheduler(num_blocks=64, max_num_seqs=1), arrivals=[(0, low), *urgent])
fair.STARVATION_BOUND = usual
nb.check(step_of_admission, tally.first_token["low"])

# %% [markdown]
# ## 7. Test the guarantee
#
# The cell runs 40 random workloads that favour late arrivals: newer requests are mostly more urgent. There are three
# compatibility classes, some pools have only a few blocks, and preemption is by recompute or by swap. Phase 6's auditor
# watches every step, and `Waits` every admission.

# %%
from minicache.scheduler.audit import Auditor


def random_request(rng, number, step):
    request = Request(number, [1] * rng.randint(1, 9), rng.randint(1, 6), group=rng.choice("abc"))
    request.priority = -step if rng.random() < 0.8 else 5
    return request


most, num_steps = 0, 0
for seed in range(40):
    rng, waits = random.Random(seed), Waits()
    options = {"num_blocks": rng.randint(4, 10), "max_num_seqs": rng.randint(1, 4)}
    if rng.random() < 0.5:
        options |= {"preemption": "swap", "num_host_blocks": 8}
    scheduler = observe(FairScheduler(block_size=4, **options), waits, Auditor())
    steps = [rng.randrange(60) for _ in range(120)]
    arrivals = [(step, random_request(rng, number, step)) for number, step in enumerate(steps)]
    tally = drive(scheduler, arrivals=arrivals)
    assert len(tally.finished) == 120
    most, num_steps = max(most, waits.most), num_steps + tally.num_steps
print(f"{num_steps:,} steps, every request served, at most {most} bypasses in a row")
assert most <= fair.STARVATION_BOUND

# %% [markdown]
# **Question 6.** Is this a proof that no request waits forever? Write "yes" or "no".

# %%
is_it_a_proof = None

# %%
nb.check(is_it_a_proof, "no")

# %% [markdown]
# ## Your experiment: another order
#
# First come, first served is fair and slow: one long request delays many short ones. In which order would you serve?
#
# `priority_key` is the order: the smallest key first. The default below serves the shortest answer first, as if its length
# were known. **Write down what happens to the mean and to the worst latency, compared with first come, first served**,
# then run the cell. Then try an order of your own, and a bound of 2, and of 1,000.

# %% alt="Steps from arrival to the last token, requests sorted by it, for first come, first served and for your order. With the shortest answer first nearly all of the curve is lower, and the last few points at the right end, of long answers, are higher."
YOUR_BOUND = 64
YOUR_PREDICTION = "mean …, worst …"


class Yours(FairScheduler):
    def priority_key(self, request):
        return request.max_tokens, request.arrival_time, request.arrival_index, request.fork_index


def latencies(kind):
    """Steps from arrival to the last token, sorted: 300 requests, one in ten is long."""
    rng, step, arrivals = random.Random(0), 0, []
    for number in range(300):
        step += rng.randrange(9)
        num_new = rng.randint(60, 120) if rng.random() < 0.1 else rng.randint(1, 12)
        arrivals.append((step, Request(number, [1] * 10, num_new)))
    tally = drive(kind(num_blocks=256, max_num_seqs=4), arrivals=arrivals, max_steps=100_000)
    return sorted(tally.finished[request.request_id] - came for came, request in arrivals)


usual, fair.STARVATION_BOUND = fair.STARVATION_BOUND, YOUR_BOUND
found = {"first come, first served": latencies(FairScheduler), "yours": latencies(Yours)}
fair.STARVATION_BOUND = usual
look = {"roles": ("wasted", "generated"), "marks": False}
nb.lines(range(300), found, "requests, sorted", "steps until the last token", **look)
for name, steps in found.items():
    print(f"{name}: mean {statistics.fmean(steps):.0f} steps, worst {max(steps)}")
print("You predicted:", YOUR_PREDICTION)

# %% [markdown]
# **What to look for.** Serving the shortest first lowers the mean, and a few long requests pay for it. The bound limits
# how often one of them is bypassed: a small bound pulls both curves together. Real servers do not know how long an
# answer will be; what could your `priority_key` use instead?
