"""The live page's pictures of the engine, its stream and its files. `test_live_page` opens the page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from minicache.palette import PALETTE
from minicache.request import Request
from minicache.scheduler import Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.observe import observe
from minicache.scheduler.sharing import SharingScheduler
from minicache.serving.http import live
from minicache.serving.http.live import AskPicture, live_routes, pictures
from minicache.serving.replica import view as replica_view
from minicache.serving.replica.view import LiveView

STATIC = Path(live.__file__).parent / "static"


def watched(scheduler: Scheduler) -> tuple[Scheduler, LiveView]:
    view = LiveView(scheduler)
    return observe(scheduler, view), view


def asking(view: LiveView) -> AskPicture:
    """As a server asks a view."""

    async def ask() -> bytes:
        return json.dumps(view.snapshot()).encode()

    return ask


def add(scheduler: Scheduler, names: Sequence[str], num_prompt: int = 10, max_tokens: int = 5) -> list[Request]:
    requests = [Request(name, [place] * num_prompt, max_tokens) for place, name in enumerate(names)]
    for request in requests:
        scheduler.add_request(request)
    return requests


def report(scheduler: Scheduler, output: SchedulerOutput) -> None:
    scheduler.update_from_output(output, {request.request_id: 7 for request in output.scheduled})


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of every step that someone looks at, however quickly they follow each other."""
    monkeypatch.setattr(replica_view, "PICTURE_SECONDS", 0.0)
    monkeypatch.setattr(replica_view, "MAX_SHARE", 1e9)


NAMES = ["static", "continuous", "paged", "fair", "chunked"]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_says_what_the_scheduler_says(every_step: None, name: str) -> None:
    scheduler, view = watched(create_scheduler(name, num_blocks=20, block_size=4, max_num_seqs=3))
    requests = add(scheduler, "abcde")
    while scheduler.has_unfinished:
        view.snapshot()
        output = scheduler.schedule()
        picture = view.snapshot()
        json.dumps(picture)
        assert [(row["id"], row["blocks"]) for row in picture["running"]] == [
            (each.request_id, each.block_ids) for each in scheduler.running
        ]
        assert [row["num_new"] for row in picture["running"]] == [
            output.num_scheduled_tokens.get(each.request_id, 0) for each in scheduler.running
        ]
        assert [row["id"] for row in picture["waiting"]] == list(scheduler.waiting)
        assert picture["num_waiting"] == len(scheduler.waiting)
        assert picture["pool"]["num_free"] == scheduler.pool.num_free
        assert picture["pool"]["shared"] == picture["pool"]["lost"] == picture["pool"]["cached"] == []
        report(scheduler, output)
    assert all(request.status.is_finished for request in requests)
    idle = view.snapshot()
    assert idle["running"] == idle["waiting"] == []
    assert idle["pool"]["num_free"] == 20
    assert idle["num_requests"] == 5
    assert sum(step["prefill"] for step in idle["steps"]) == 5 * 10
    assert sum(step["decode"] for step in idle["steps"]) == 5 * 4  # the first token of each comes of its prompt
    assert idle["ttft"]["count"] == idle["tpot"]["count"] == 5
    assert idle["tokens_per_second"] > 0


def test_two_steps_that_overlap_are_two_bars(every_step: None) -> None:
    """Each has its own tokens; what a request computes after its stop token counts as computed, and gives none."""
    scheduler, view = watched(create_scheduler("async", num_blocks=20, block_size=4))
    scheduler.add_request(Request("stops", [1] * 6, 9, stop_token_ids=[7]))
    add(scheduler, "a", num_prompt=10, max_tokens=3)
    view.snapshot()
    older = scheduler.schedule()
    while older.scheduled:
        newer = scheduler.schedule()
        report(scheduler, older)
        older = newer
    report(scheduler, older)
    steps = view.snapshot()["steps"]
    assert [(step["number"], step["prefill"], step["decode"]) for step in steps] == [(0, 16, 0), (1, 0, 2), (2, 0, 1)]
    assert [step.num_tokens for step in view._steps] == [2, 1, 1]
    assert all(before.ended <= after.begun for before, after in pairwise(view._steps))
    assert view.snapshot()["ttft"]["count"] == 2


class NewestFirst(Scheduler):
    """A learner's own: one request at a time, the newest first."""

    def priority_key(self, request: Request) -> tuple[int, ...]:
        return (-request.arrival_index,)

    def blocks_to_admit(self, request: Request) -> int:
        return 5

    def schedule_running(self, output: SchedulerOutput) -> None:
        for request in self.running:
            self.schedule_tokens(request, output)

    def may_admit(self, output: SchedulerOutput) -> bool:
        return not self.running

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        if request := self.head():
            self.admit(request, output)


def test_a_scheduler_of_ones_own_is_drawn(every_step: None) -> None:
    scheduler, view = watched(NewestFirst(num_blocks=20, block_size=4))
    add(scheduler, "ab")
    view.snapshot()
    output = scheduler.schedule()
    (row,) = view.snapshot()["running"]
    assert (row["id"], row["number"], row["blocks"], row["num_new"]) == ("b", 2, [0, 1, 2, 3, 4], 10)
    assert view.snapshot()["scheduler"] == "NewestFirst"
    scheduler.pool.allocate(2)  # a leak
    report(scheduler, output)
    report(scheduler, scheduler.schedule())
    assert view.snapshot()["pool"]["lost"] == [5, 6]


def test_nothing_is_drawn_while_nobody_looks(every_step: None) -> None:
    scheduler, view = watched(create_scheduler("chunked", num_blocks=20, block_size=4))
    before = view._picture["version"]  # to ask for a picture is to look
    add(scheduler, "ab", max_tokens=4)
    for _ in range(3):
        report(scheduler, scheduler.schedule())
        assert view._picture["version"] == before
    report(scheduler, scheduler.schedule())
    assert view._picture["version"] == before + 1  # but it is drawn when the engine falls idle
    assert view.snapshot()["running"] == []
    assert view.snapshot()["num_steps"] == 4


def test_pictures_are_no_younger_than_100_ms() -> None:
    scheduler, view = watched(create_scheduler("chunked", num_blocks=200, block_size=4))
    add(scheduler, "ab", max_tokens=300)
    versions = set()
    for _ in range(20):
        versions.add(view.snapshot()["version"])
        report(scheduler, scheduler.schedule())
    assert len(versions) <= 3


def test_who_is_preempted_and_swapped_out_is_shown(every_step: None) -> None:
    scheduler, view = watched(
        create_scheduler("paged", num_blocks=10, block_size=4, preemption="swap", num_host_blocks=10)
    )
    add(scheduler, "ab", num_prompt=16, max_tokens=20)
    while not view.snapshot()["num_preemptions"]:
        report(scheduler, scheduler.schedule())
    view.snapshot()
    report(scheduler, scheduler.schedule())
    picture = view.snapshot()
    assert (picture["num_swapped"], picture["num_waiting"]) == (1, 0)
    (row,) = picture["waiting"]
    assert (row["id"], row["status"], row["num_preemptions"], row["blocks"]) == ("b", "swapped", 1, [])
    assert row["num_host_blocks"] > 0
    assert [step["preempted"] for step in picture["steps"] if step["preempted"]] == [[2]]
    scheduler.abort_request("b")
    scheduler.abort_request("a")
    assert view.snapshot()["num_swapped"] == 0


def test_shared_and_cached_blocks_are_told(every_step: None) -> None:
    scheduler, view = watched(SharingScheduler(num_blocks=20, block_size=4, prefix_caching=True))
    add(scheduler, "a", num_prompt=9, max_tokens=4)
    view.snapshot()
    report(scheduler, scheduler.schedule())
    scheduler.fork_request("a", "b", [])  # type: ignore[attr-defined]
    output = scheduler.schedule()
    picture = view.snapshot()
    assert picture["pool"]["shared"] == [0, 1]
    assert [row["number"] for row in picture["running"]] == [1, 2]
    report(scheduler, output)
    while scheduler.has_unfinished:
        report(scheduler, scheduler.schedule())
    pool = view.snapshot()["pool"]
    assert {0, 1} <= set(pool["cached"])
    assert pool["shared"] == []
    assert view.snapshot()["ttft"]["count"] == 2
    add(scheduler, "a", num_prompt=9)
    scheduler.schedule()
    assert [row["num_cached"] for row in view.snapshot()["running"]] == [8]


def test_an_abort_of_the_last_request_is_idle() -> None:
    scheduler, view = watched(create_scheduler("chunked", num_blocks=20, block_size=4))
    add(scheduler, "a")
    report(scheduler, scheduler.schedule())
    scheduler.abort_request("a")
    picture = view.snapshot()
    assert picture["running"] == []
    assert picture["tpot"] is None


def test_a_picture_can_be_read_while_the_engine_runs(every_step: None) -> None:
    scheduler, view = watched(create_scheduler("chunked", num_blocks=60, block_size=4, max_num_seqs=4))

    def run() -> None:
        for turn in range(60):
            add(scheduler, [f"{turn}-{place}" for place in range(6)])
            while scheduler.has_unfinished:
                report(scheduler, scheduler.schedule())

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        picture = view.snapshot()
        json.dumps(picture)
        held = {block for row in picture["running"] for block in row["blocks"]}
        assert len(held) == picture["pool"]["num_blocks"] - picture["pool"]["num_free"]
    assert view.snapshot()["num_requests"] == 360


# The stream and the files


def test_the_stream_shows_what_is_new_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_view, "PICTURE_SECONDS", 0.01)
    monkeypatch.setattr(live, "KEEP_ALIVE_SECONDS", 0.05)
    scheduler, view = watched(create_scheduler("chunked", num_blocks=20, block_size=4))

    async def look() -> list[bytes]:
        stopping = asyncio.Event()
        stream = pictures(asking(view), stopping, 0.01)
        events = [await anext(stream), await anext(stream)]
        add(scheduler, "a", max_tokens=1)
        report(scheduler, scheduler.schedule())
        events.append(await anext(stream))
        stopping.set()
        return events + [event async for event in stream]

    first, comment, second = asyncio.run(look())
    assert comment.startswith(b":")
    for event in (first, comment, second):
        assert event.endswith(b"\n\n")
        assert b"\r" not in event
    shown = [json.loads(event.removeprefix(b"data: ")) for event in (first, second)]
    assert [picture["num_requests"] for picture in shown] == [0, 1]


def get(paths: Sequence[str]) -> list[httpx.Response]:
    _, view = watched(create_scheduler("chunked", num_blocks=20, block_size=4))
    app = FastAPI()
    app.include_router(live_routes(asking(view), asyncio.Event()))
    assert app.openapi()["paths"] == {}

    async def fetch() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(fetch())


def test_the_page_and_its_files_come_from_here_alone() -> None:
    kinds = {"/": "text/html", "/static/live.js": "text/javascript", "/static/live.css": "text/css"}
    for response, kind in zip(get(list(kinds)), kinds.values(), strict=True):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "http" not in policy
        hosts = set(re.findall(r"https?://([^/'\"]+)", response.text)) - {"www.w3.org"}  # names of SVG's language
        assert not hosts


def test_the_page_has_nothing_inline_and_names_what_its_script_looks_for() -> None:
    page, script = ((STATIC / name).read_text(encoding="utf-8") for name in ("index.html", "live.js"))
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert set(re.findall(r'find\("([^"]+)"\)', script)) <= ids
    labelled = re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', page)
    assert {name for names in labelled for name in names.split()} <= ids


def test_the_page_has_the_palettes_colours() -> None:
    style = (STATIC / "live.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    for part, scheme in ((light, "light"), (dark, "dark")):
        colors: dict[str, Any] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
        for name in ("prompt", "generated", "end", "shared", "free"):
            assert colors[name] == PALETTE[name].shade(scheme).lower(), (name, scheme)
        assert colors["lost"] == PALETTE["wasted"].shade(scheme).lower()


def test_tables_of_several_groups_are_drawn_without_what_left_the_window(every_step: None) -> None:
    scheduler, view = watched(create_scheduler("chunked", num_blocks=20, block_size=4, windows=(None, 4)))
    add(scheduler, "a", num_prompt=10, max_tokens=10)
    for _ in range(3):
        view.snapshot()
        report(scheduler, scheduler.schedule())
    picture = view.snapshot()
    (row,) = picture["running"]
    (request,) = scheduler.running
    assert row["num_tables"] == 2
    assert row["blocks"] == request.block_ids + request.group_block_ids[1]
    assert row["blocks"].count(-1) == 2
    assert picture["pool"]["lost"] == []
    assert scheduler.pool.num_used == len(row["blocks"]) - 2
