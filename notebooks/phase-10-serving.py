# %% [markdown]
# # Phase 10: a server, and its clients
#
# You start a server inside this notebook, read what it writes on the wire, leave in the middle of a sentence and watch the
# blocks come back, fill the line until somebody is refused, and put it under a load that does not wait for it.
#
# Set `MINE = True` in the first cell to serve with your own files in `labs/phase-10-serving/`, then restart the kernel
# and run all cells. A function that you have not written yet says so where it is first called.

# %%
MINE = False

if MINE:
    from minicache.course.finder import install
    from minicache.course.workspace import find_workspace

    workspace = find_workspace()
    install(workspace.lab_files(workspace.course.phase(10)))

from minicache.engine.async_engine import AsyncEngine
from minicache.server.app import create_app
from minicache.server.running import Server

print("Engine and event streams are", "yours." if MINE else "the reference's.")

# %%
import asyncio
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

import matplotlib.pyplot as plt
import torch

from minicache.engine.llm import LLM
from minicache.engine.logprobs import ServedLLM
from minicache.palette import color
from minicache.engine.sampling import SamplingParams

torch.set_num_threads(1)
HALF, SLOWEST = color("generated"), color("end")


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


def in_a_loop(coroutine):
    """Run a coroutine in an event loop of its own, in a thread: a notebook's own loop is running already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


# %% [markdown]
# ## 1. A heartbeat
#
# A coroutine sleeps for 1 ms at a time and notes how much longer it took. Beside it 48 requests are answered: once by a
# coroutine that calls `step()` itself, once by the thread of an `AsyncEngine`.


# %% alt="How late the beats were, as the share of the beats against milliseconds on a logarithmic axis. Beside a thread most beats are late by a small part of a step; beside a coroutine that calls step, most are late by several steps."
async def beat(late):
    """Note how late each beat is, in milliseconds."""
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append(1e3 * (time.perf_counter() - due))


PROMPT, PARAMS = "Yesterday I", SamplingParams(max_tokens=40, ignore_eos=True)


async def beside_a_coroutine(late, durations):
    """The coroutine steps."""
    llm = LLM()
    for _ in range(48):
        llm.add_request(PROMPT, PARAMS)
    heart = asyncio.create_task(beat(late))
    while llm.has_unfinished:
        start = time.perf_counter()
        llm.step()
        durations.append(1e3 * (time.perf_counter() - start))
        await asyncio.sleep(0)
    heart.cancel()


async def beside_a_thread(late):
    """The engine's thread steps; 48 coroutines read."""

    async def read():
        async for _ in await engine.add_request(PROMPT, PARAMS):
            pass

    async with AsyncEngine(LLM()) as engine:
        heart = asyncio.create_task(beat(late))
        await asyncio.gather(*(read() for _ in range(48)))
        heart.cancel()


coroutine_late, thread_late, durations = [], [], []
in_a_loop(beside_a_coroutine(coroutine_late, durations))
in_a_loop(beside_a_thread(thread_late))
_, ax = plt.subplots(figsize=(7.2, 3), layout="constrained")
for late, name, shade in (
    (coroutine_late, "a coroutine steps", SLOWEST),
    (thread_late, "a thread steps", HALF),
):
    ordered = sorted(max(each, 0.01) for each in late)
    ax.step(
        ordered,
        [(place + 1) / len(ordered) for place in range(len(ordered))],
        color=shade,
        label=name,
    )
ax.set(xscale="log", xlabel="late by, ms", ylabel="share of the beats", ylim=(0, 1.02))
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
print(f"A step took {median(durations):.1f} ms.")
print(
    f"Half of the beats were late by {median(coroutine_late):.1f} ms or more beside a coroutine that steps,"
)
print(f"and by {median(thread_late):.2f} ms or more beside a thread.")

# %% [markdown]
# Beside a coroutine that steps, a beat is late by about three steps: the loop looks at its timers once a turn, with a step
# in each; in the first the millisecond is not over, in the second the timer goes off, in the third the coroutine runs.
#
# The event loop is what reads bytes, sends them and notices that somebody has left. Late beats are late clients.
#
# ## 2. A server, and what it writes
#
# The whole server in a thread of this process, on a port that is free. Then one request over a plain socket, so that
# nothing of the answer is hidden.


# %%
@contextmanager
def a_server(max_num_seqs=16, max_waiting=64):
    """A server on 127.0.0.1: its port and its engine."""
    app = create_app(AsyncEngine(ServedLLM(max_num_seqs=max_num_seqs), max_waiting=max_waiting))
    listening, port = threading.Event(), []
    server = Server(
        app, port=0, drain_seconds=1, on_listening=lambda at: (port.append(at), listening.set())
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    listening.wait(30)
    try:
        yield port[0], app.state.served.engine
    finally:
        server.stop()
        thread.join(30)


def ask(port, max_tokens=8, **options):
    """POST /v1/completions; the response, whose body has not been read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {
        "prompt": "Yesterday I",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **options,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    return connection.getresponse()


with a_server() as (port, _):
    response = ask(port, max_tokens=3)
    print(response.status, response.headers["content-type"], response.headers["transfer-encoding"])
    chunks = []
    while size := int(
        response.fp.readline(), 16
    ):  # below http.client, which would take HTTP's chunks away
        chunks.append(response.fp.read(size))
        response.fp.readline()
for chunk in chunks:
    print(len(chunk), chunk)

# %% [markdown]
# **Question 1.** The answer has three tokens. How many events has the stream, all of them counted?

# %%
num_events = None

# %%
check(num_events, b"".join(chunks).count(b"\n\n"))

# %% [markdown]
# ## 3. Leaving
#
# A client asks for 400 tokens, reads 100 events and hangs up. Meanwhile a thread notes how many blocks are taken, every
# half millisecond.

# %% alt="Blocks taken against milliseconds since the client hung up. Before, the number climbs by one block every sixteen tokens, to seven or eight; soon after, it falls to none."
taken = []
with a_server() as (port, engine):

    def watch():
        while not stop.is_set():
            taken.append((time.perf_counter(), engine.llm.scheduler.pool.num_used))
            time.sleep(0.0005)

    stop = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    response = ask(port, max_tokens=400, ignore_eos=True)
    for _ in range(2 * 100):  # an event is a line and an empty one
        response.readline()
    left = time.perf_counter()
    response.close()
    time.sleep(0.3)
    stop.set()
    watcher.join()
    still_running = engine.num_unfinished
times = [1e3 * (at - left) for at, _ in taken]
free_at = next((at for at, (_, count) in zip(times, taken) if at > 0 and not count), None)
assert not still_running and free_at is not None
_, ax = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
ax.step(times, [count for _, count in taken], where="post", color=HALF)
ax.axvline(0, color="gray", linestyle=":")
ax.set(
    xlabel="ms since the client hung up", ylabel="blocks taken", xlim=(None, max(60, 1.2 * free_at))
)
ax.grid(alpha=0.3)
plt.show()
print(
    f"All blocks were free {free_at:.1f} ms after it hung up. Unfinished answers: {still_running}."
)

# %% [markdown]
# That time has three parts: the event loop sees that the socket was closed; the step that runs comes to its end; the
# command is obeyed.
#
# **Question 2.** The prompt has 2 tokens, and 100 had come when the client hung up. With blocks of 16, how many did the
# request hold? (The picture says the same, if the engine was not far ahead of the client.)

# %%
blocks_held = None

# %%
check(blocks_held, -(-(2 + 100) // 16))

# %% [markdown]
# ## 4. The line
#
# Two batch slots and two places behind them. Of six clients, the two that find no place get a 429 at once.

# %%
with a_server(max_num_seqs=2, max_waiting=2) as (port, engine):
    responses = []
    for number in range(1, 7):
        start = time.perf_counter()
        response = ask(port, max_tokens=300, ignore_eos=True)
        responses.append(response)
        told = (
            f"client {number}: {response.status} after {1e3 * (time.perf_counter() - start):.1f} ms"
        )
        if response.status != 200:
            told += f", Retry-After: {response.headers['retry-after']}, {json.loads(response.read())['error']['message']}"
        print(told)
    statuses = [response.status for response in responses]
    for response in responses:
        response.close()
assert statuses == [200] * 4 + [429] * 2

# %% [markdown]
# **Question 3.** Four batch slots, three places behind them. Two requests with `n=2` and one with `n=1` run, and four
# come that want one answer each. How many of the four are refused?

# %%
num_refused = None

# %%
check(num_refused, 4 - (4 + 3 - (2 * 2 + 1)))

# %% [markdown]
# ## 5. A load that does not wait
#
# `minicache bench serve` in a process of its own sends requests at the times of a Poisson process, whether or not earlier
# ones were answered. First 48 at once: what the server can do. Then parts of that rate, from a third to twice as much.
# 16 batch slots, 16 places behind them; prompts of 24 tokens, answers of 48.


# %%
def bench(port, *options):
    """What `minicache bench serve --json` reports."""
    words = [
        "bench",
        "serve",
        "--url",
        f"http://127.0.0.1:{port}",
        "--json",
        "--num-output-tokens",
        "48",
        *map(str, options),
    ]
    command = [sys.executable, "-c", "from minicache.cli import app; app()", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["report"]


def metrics(port):
    """The samples of /metrics without their labels, summed by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    samples = {}
    for name, value in re.findall(
        r"^(\w[\w:]*)(?:\{.*\})? (\S+)$", connection.getresponse().read().decode(), re.M
    ):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


PARTS, NUM_REQUESTS, reports = (0.3, 0.6, 0.9, 2.0), (12, 30, 60, 120), []
with a_server(max_num_seqs=16, max_waiting=48) as (port, _):
    at_most = bench(port, "--num-requests", 48)["requests_per_second"]
with a_server(max_num_seqs=16, max_waiting=16) as (port, engine):
    for part, num_requests in zip(PARTS, NUM_REQUESTS):
        reports.append(
            bench(port, "--rate", f"{part * at_most:.3f}", "--num-requests", num_requests)
        )
    counted = metrics(port)
print(f"At once: {at_most:.0f} requests a second.")
print("part of it   answered   refused   TTFT p50, p99 in ms   TPOT p50, p99 in ms")
for part, r in zip(PARTS, reports):
    latencies = [
        1e3 * r[what][statistic] for what in ("ttft", "tpot") for statistic in ("p50", "p99")
    ]
    print(
        f"{part:10.1f} {r['num_ok']:10} {r['num_refused']:9}   {latencies[0]:9.1f} {latencies[1]:9.1f}   {latencies[2]:10.2f} {latencies[3]:9.2f}"
    )

# %% alt="Two panels against the rate as a part of what the server can do. The time to the first token is short at low rates, and many times as long at twice what the server can do, where requests wait in line. The time per output token grows with the batch, which has 16 batch slots at most."
_, panels = plt.subplots(1, 2, figsize=(7.2, 3), layout="constrained")
for ax, what, label in (
    (panels[0], "ttft", "time to first token, ms"),
    (panels[1], "tpot", "time per output token, ms"),
):
    for statistic, shade, marker in (("p50", HALF, "o"), ("p99", SLOWEST, "s")):
        values = [1e3 * report[what][statistic] for report in reports]
        ax.plot(PARTS, values, marker=marker, color=shade, label=statistic)
    ax.axvline(1, color="gray", linestyle=":")
    ax.set(xlabel="rate, as a part of what it can do", ylim=(0, None), xlim=(0, None))
    ax.set_title(label, loc="left", fontsize=10)
    ax.grid(alpha=0.3)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# In the last row requests come faster than they are answered. The batch and the line take up 32 of them. After that,
# whoever finds the line full is told so at once: the column *refused* counts them. Who is let in waits no longer than 16
# others take. If the line had no end, the wait would grow for as long as the load goes on.
#
# What the server answers with all 48 at once is not quite what it can do with requests that come one by one: those begin
# while others are in the middle of their answers. So somebody may be refused in an earlier row, too.
#
# **Question 4.** Little's law: a server answers 60 requests a second, each 0.4 s after it came. How many are under way, on
# average?

# %%
under_way = None

# %%
check(under_way, round(60 * 0.4))

# %% [markdown]
# The same for what you measured, at the second rate: answered requests a second times their mean latency.

# %%
report = reports[1]
print(
    f"{report['requests_per_second']:.1f} a second · {report['latency']['mean']:.3f} s = ", end=""
)
print(f"{report['requests_per_second'] * report['latency']['mean']:.1f} under way on average")

# %% [markdown]
# ## 6. What the server says of itself
#
# `/metrics` after the four loads: it counts what the clients counted.

# %%
num_ok = sum(report["num_ok"] for report in reports)
num_turned_away = sum(report["num_refused"] for report in reports)
print(f"the clients: {num_ok} answers, {num_turned_away} refusals, {48 * num_ok:,} tokens")
for name in (
    "vllm:request_success_total",
    "minicache:requests_refused_total",
    "vllm:generation_tokens_total",
):
    print(f"{name} {counted[name]:,.0f}")
assert counted["vllm:request_success_total"] == num_ok
assert counted["minicache:requests_refused_total"] == num_turned_away
assert counted["vllm:generation_tokens_total"] == 48 * num_ok

# %% [markdown]
# **Question 5.** A histogram has a sum and a count. `vllm:time_to_first_token_seconds` counts once for each answer. How
# often has `vllm:inter_token_latency_seconds` counted, for one answer of 48 tokens?

# %%
gaps_of_an_answer = None

# %%
check(gaps_of_an_answer, round(counted["vllm:inter_token_latency_seconds_count"] / num_ok))

# %% [markdown]
# The server's mean time to the first token is a little below the clients': it begins when the engine has the request, and
# ends when the engine has the token. What lies between is HTTP, twice.

# %%
server_side = (
    counted["vllm:time_to_first_token_seconds_sum"]
    / counted["vllm:time_to_first_token_seconds_count"]
)
client_side = sum(report["ttft"]["mean"] * report["num_ok"] for report in reports) / num_ok
print(
    f"mean time to first token: {1e3 * server_side:.1f} ms in the server, {1e3 * client_side:.1f} ms at the clients"
)
