"""What the loss of a replica costs: the request that it served, and the requests that the others then have to serve.

One request of Llama 3 8B on an A100-40GB (roofline) loses its replica in the middle of its answer: how long until the
next token if another replica gets prompt and received tokens, and if it gets the prompt alone. And a fleet of four, at
four fifths of its capacity, that loses one replica for a minute: how many answers come in time when clients repeat what
takes too long, and what aborting or refusing requests changes. A replica serves one request at a time there, in 40 ms.

    python -m benchmarks.replica_loss
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from rich.console import Console

from benchmarks._record import record
from minicache.arithmetic.specs import A100_40GB, LLAMA_3_8B
from minicache.simulator.costs import RooflineCost, StepLoad

NUM_PROMPT_TOKENS, NUM_RECEIVED, MAX_TOKENS = 512, 120, 300

NUM_REPLICAS, SERVICE_SECONDS, RATE = 4, 0.04, 80.0
LOST_AT, BACK_AT, END = 60.0, 120.0, 300.0
TIMEOUT, NUM_RETRIES = 3.0, 3
MAX_WAITING = 150
"""Of the bounded queue: two seconds' work for three replicas."""
WINDOW = 5.0
"""Seconds over which answers in time are counted."""


def main() -> None:
    modes = {
        "no_retries": Fleet(num_retries=0),
        "retries": Fleet(num_retries=NUM_RETRIES),
        "aborting": Fleet(num_retries=NUM_RETRIES, aborts=True),
        "bounded": Fleet(num_retries=NUM_RETRIES, max_waiting=MAX_WAITING),
    }
    figures = {
        "request": one_request(),
        "fleet": {
            "num_replicas": NUM_REPLICAS,
            "rate": RATE,
            "rate_of_a_replica": 1 / SERVICE_SECONDS,
            "lost_at": LOST_AT,
            "back_at": BACK_AT,
            "timeout": TIMEOUT,
            "num_retries": NUM_RETRIES,
            "max_waiting": MAX_WAITING,
            "window": WINDOW,
            "modes": {name: fleet.run() for name, fleet in modes.items()},
        },
    }
    Console(highlight=False).print_json(data=figures)
    record("replica_loss", figures)


# --- the request ------------------------------------------------------------------------------------------------------


def one_request() -> dict[str, Any]:
    """Milliseconds until the next new token, on an idle replica that has nothing of the request."""
    cost = RooflineCost(LLAMA_3_8B, A100_40GB)

    def step(num_new: int, num_computed: int) -> float:
        return 1e3 * cost.step_seconds(StepLoad.of([(num_new, num_computed)]))

    again = step(NUM_PROMPT_TOKENS, 0) + sum(step(1, NUM_PROMPT_TOKENS + done) for done in range(NUM_RECEIVED))
    return {
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "num_received": NUM_RECEIVED,
        "max_tokens": MAX_TOKENS,
        "decode_ms": round(step(1, NUM_PROMPT_TOKENS + NUM_RECEIVED), 1),
        "continued_ms": round(step(NUM_PROMPT_TOKENS + NUM_RECEIVED, 0), 1),
        "restarted_ms": round(again, 1),
    }


# --- the fleet --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Call:
    """One question of a client, however often it is sent.

    Attributes:
        num_tries: how often it was sent.
        sent_at: when, the last time.
        is_over: it has an answer, or its client has given up.
    """

    num_tries: int = 0
    sent_at: float = 0.0
    is_over: bool = False


@dataclass
class Fleet:
    """Replicas with one queue, which serve all that is in it, and clients that repeat what takes too long.

    Attributes:
        num_retries: how often a client repeats a question.
        max_waiting: requests in the queue beyond which one is refused; its client tries again after a while.
        aborts: a request whose client has stopped waiting leaves the queue.
    """

    num_retries: int
    max_waiting: float = float("inf")
    aborts: bool = False
    queue: deque[tuple[Call, float]] = field(default_factory=deque)
    num_busy: int = 0
    num_sent: int = 0
    answers: list[float] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Answers in time per second, window by window, and how often a question was sent."""
        rng, order = Random(0), count()
        events: list[tuple[float, int, str, Any]] = []

        def at(time: float, what: str, about: Any = None) -> None:
            heapq.heappush(events, (time, next(order), what, about))

        at(rng.expovariate(RATE), "asks")
        num_calls = 0
        while events[0][0] < END:
            now, _, what, about = heapq.heappop(events)
            if what == "asks":
                num_calls += 1
                at(now, "sends", Call())
                at(now + rng.expovariate(RATE), "asks")
            elif what == "sends" and not about.is_over:
                about.num_tries += 1
                about.sent_at = now
                self.num_sent += 1
                if len(self.queue) < self.max_waiting:
                    self.queue.append((about, now))
                    at(now + TIMEOUT, "times out", (about, now))
                elif about.num_tries <= self.num_retries:
                    at(now + 2**about.num_tries * rng.uniform(0.5, 1.5), "sends", about)
            elif what == "times out" and not about[0].is_over and about[0].sent_at == about[1]:
                if self.aborts and about in self.queue:
                    self.queue.remove(about)
                if about[0].num_tries <= self.num_retries:
                    at(now, "sends", about[0])
                else:
                    about[0].is_over = True
            elif what == "done":
                self.num_busy -= 1
                call, sent_at = about
                if not call.is_over and call.sent_at == sent_at:  # its client waits for this one
                    call.is_over = True
                    self.answers.append(now)
            num_replicas = NUM_REPLICAS - (LOST_AT <= now < BACK_AT)
            while self.queue and self.num_busy < num_replicas:
                self.num_busy += 1
                at(now + SERVICE_SECONDS, "done", self.queue.popleft())
        windows = [0] * round(END / WINDOW)
        for time in self.answers:
            windows[int(time / WINDOW)] += 1
        return {
            "answers_per_second": [round(each / WINDOW, 1) for each in windows],
            "sent_per_question": round(self.num_sent / num_calls, 2),
            "answered": round(len(self.answers) / num_calls, 3),
            "at_the_end": round(windows[-1] / WINDOW, 1),
        }


if __name__ == "__main__":
    main()
