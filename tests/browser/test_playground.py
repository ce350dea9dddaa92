"""The playground's Python, in CPython: frames are what schedulers did; changed code is run, or its error told."""

import json
from collections import Counter
from importlib import import_module

import pytest
from scripts.browser.playground.edited import source_of
from scripts.browser.playground.frames import Frames
from scripts.browser.playground.run import run
from scripts.browser.playground.schedulers import PACKAGE, SCHEDULERS
from scripts.browser.playground.site import ROOT, catalogue, files, recording
from scripts.browser.playground.workloads import WORKLOADS, Settings

from minicache.palette import PALETTE
from minicache.scheduler import create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.drive import drive
from minicache.scheduler.paged import PagedScheduler
from minicache.simulator.serving import ServingSimulation
from minicache.verifier.cases import cases
from minicache.verifier.explore import explore
from minicache.verifier.link import fragment, read, written
from minicache.verifier.world import Action
from minicache_course.starters import starter
from minicache_course.table import load_course
from minicache_course.workspace import TABLE

FAIR = SCHEDULERS["fair"].module


def played(workload, scheduler, settings=None, sources=None):
    frames = []
    result = run(workload, scheduler, settings or WORKLOADS[workload].settings, frames.append, sources)
    return frames, result


def changed(find, replace):
    source = source_of(FAIR)
    assert find in source
    return {FAIR: source.replace(find, replace)}


# --- what is drawn is what happened ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static", "continuous"])
def test_the_six_requests_of_phase_5(name: str) -> None:
    frames, result = played("six", name)
    tally = drive(create_scheduler(name, num_blocks=64, max_num_seqs=3), WORKLOADS["six"].requests())
    assert result == {"refused": 0, "refusal": None, "audit": None, "error": None}
    assert [sorted(request for _, request, _, _ in frame["slots"]) for frame in frames] == list(
        map(sorted, tally.order)
    )
    last = {}
    for step, frame in enumerate(frames):
        last |= {request: step for _, request, role, _ in frame["slots"] if role == "end"}
    assert last == tally.finished
    slots = {request: slot for frame in frames for slot, request, _, _ in frame["slots"]}
    if name == "continuous":  # as the grid of phase 5: D takes A's slot, E D's, F C's
        assert slots == {"A": 0, "B": 1, "C": 2, "D": 0, "E": 0, "F": 2}


@pytest.mark.parametrize("workload", ["six", "thrash", "burst"])
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_every_scheduler_serves_every_request(workload: str, scheduler: str) -> None:
    check_whole_run(workload, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["chats", "prefix"])
@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name != "thrash"])
def test_every_scheduler_serves_long_workloads(workload: str, scheduler: str) -> None:
    check_whole_run(workload, scheduler)


def check_whole_run(workload: str, scheduler: str) -> None:
    chosen = WORKLOADS[workload]
    frames, result = played(workload, scheduler)
    assert result["error"] is None
    assert frames[-1]["finished"] + result["refused"] == len(list(chosen.requests()))
    json.dumps(frames, allow_nan=False)
    blocks = {}
    for frame in frames:
        slots = [slot for slot, *_ in frame["slots"]]
        assert len(set(slots)) == len(slots) <= chosen.settings.slots
        assert all(0 <= slot < chosen.settings.slots for slot in slots)
        blocks |= {block: (role, request) for block, role, request in frame["blocks"]}
        assert all(role in PALETTE for role, _ in blocks.values())
        assert sum(role != "free" for role, _ in blocks.values()) == frame["used"]
        computed = sum(tokens for *_, tokens in frame["slots"])
        assert computed == frame["prompt"] + frame["generated"]


@pytest.mark.parametrize(("workload", "scheduler"), [("burst", "paged+swap"), ("prefix", "fair+prefix")])
def test_frames_agree_with_the_report_and_the_auditor(workload: str, scheduler: str) -> None:
    chosen, frames, steps = WORKLOADS[workload], Frames(), []
    created = SCHEDULERS[scheduler].create(chosen.settings, import_module)
    told = []

    def trace(step) -> None:
        steps.append(step)
        told.append(frames.frame(step))

    watched = (frames, SharingAuditor())
    report = ServingSimulation(created, chosen.cost, chosen.requests(), observers=watched, trace=trace).run()
    assert [(frame["time"], frame["waiting"], frame["used"]) for frame in told] == [
        (step.time, step.num_waiting, step.num_used_blocks) for step in steps
    ]
    assert told[-1]["ttft"] == pytest.approx(report.ttft.mean)
    assert told[-1]["tpot"] == pytest.approx(report.tpot.mean)
    assert told[-1]["preemptions"] == report.num_preemptions
    assert told == played(workload, scheduler)[0]


def test_a_preempted_request_loses_its_slot_and_its_prompt_is_computed_again() -> None:
    frames, _ = played("thrash", "thrash")
    assert (len(frames), frames[-1]["preemptions"], frames[-1]["prefill"]) == (200, 100, 17_000)
    assert frames[1]["slots"] == [(0, "B", "free", 0), (1, "A", "prompt", 120)]
    assert frames[2]["lost"] == [1]
    assert len(played("thrash", "fair")[0]) == 100


def test_blocks_are_reserved_shared_and_free() -> None:
    frames, _ = played("six", "continuous")
    first = Counter(role for _, role, _ in frames[0]["blocks"])
    assert first == {"prompt": 3, "wasted": 4}  # blocks of 4 for 4 + 3, 3 + 8 and 2 + 5 tokens
    reserved = played("thrash", "continuous")[0][0]["blocks"]
    assert Counter(role for _, role, _ in reserved) == {"prompt": 8 + 4, "wasted": 14 + 10 - 12}
    assert any(role == "shared" for frame in played("prefix", "fair+prefix")[0] for _, role, _ in frame["blocks"])


def test_prompts_of_different_requests_share_nothing() -> None:
    assert played("burst", "paged")[0][-1]["prefill"] >= played("burst", "paged+prefix")[0][-1]["prefill"]
    assert not any(role == "shared" for frame in played("burst", "paged+prefix")[0] for _, role, _ in frame["blocks"])


# --- what a link says, action by action ------------------------------------------------------------------------------


def told(link: str, **more):
    """A run of what the playground reads from a link."""
    said, frames = dict(pair.split("=", 1) for pair in link.split("&")), []
    settings = Settings(*(int(said[name]) for name in ("blocks", "block_size", "slots", "budget")))
    result = run(said["workload"], said["a"], settings, frames.append, actions=said["do"], **more)
    return frames, result


class SwapsTheWrongWay(PagedScheduler):
    def swap_out(self, request, num_blocks, output):
        super().swap_out(request, num_blocks, output)
        output.swapped_out[request.request_id].reverse()


def test_a_counterexample_opens_on_the_reference() -> None:
    case = next(each for each in cases(SwapsTheWrongWay, 2, 3) if each.name.endswith("swap"))
    link = fragment(case, explore(case).violation.actions)
    frames, result = told(link)
    assert result == {"refused": 0, "refusal": None, "audit": None, "error": None}
    assert [frame["slots"] for frame in frames] == [
        [(0, "0", "prompt", 2), (1, "1", "prompt", 3)],
        [(0, "0", "generated", 1)],
    ]
    assert frames[1]["events"] == [["preempt", "1"], ["swap_out", "1"]]
    paged = SCHEDULERS["paged"].module
    wrong = source_of(paged).replace(
        "list(zip(request.block_ids, host_block_ids, strict=False))",
        "list(zip(request.block_ids, host_block_ids, strict=False))[::-1]",
    )
    assert told(link, sources={paged: wrong})[1]["audit"].startswith("step 1, swaps:")


def test_steps_that_fail_are_shown_and_aborts_and_stop_tokens_happen() -> None:
    frames, result = played("replay", "fair")
    assert result["error"] is None
    assert len(frames) == 5
    assert frames[3]["lost"] == [0]
    assert ["preempt", "0", "the step failed"] in frames[3]["events"]
    stopped, _ = told("workload=replay&a=chunked&blocks=4&block_size=2&slots=3&budget=3&do=a00.3.0,s,c0")
    assert [frame["events"][-1] for frame in stopped] == [["finish", "0", "stop"]]


@pytest.mark.parametrize("text", ["z", "a00", "x7", "o:magic.1", "a00.3.0,s,c,c"])
def test_a_link_that_means_nothing_is_an_error_that_is_told(text: str) -> None:
    _, result = told(f"workload=replay&a=paged&blocks=4&block_size=2&slots=3&budget=8&do={text}")
    assert result["error"] is not None


@pytest.mark.parametrize("stage", ["paged", "chunked"])
def test_what_is_written_is_read(stage: str) -> None:
    case = next(each for each in cases(stage) if each.name.endswith("classes" if stage == "chunked" else "swap"))
    actions = [
        Action("arrive", 1),
        Action("schedule"),
        Action("commit", None, (0,)),
        Action("retry"),
        Action("abort", 0),
    ]
    options = {"preemption": "swap", "watermark": 0.5, "prefix_caching": True}
    read_options, shapes, read_actions = read(written(options, case.shapes, actions))
    assert read_options == options
    assert shapes == [case.shapes[1]]
    assert read_actions == [Action("arrive", 0), *actions[1:]]


# --- what cannot be served ------------------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_the_schedulers_own_error() -> None:
    frames, result = played("thrash", "fair", Settings(blocks=4, block_size=16, slots=8, budget=8192))
    assert result["refused"] == 1
    assert "request 'A' needs 8 blocks and the whole pool has 4" in result["refusal"]
    assert frames[0]["events"][0][:2] == ["refuse", "A"]
    assert played("six", "paged", Settings(64, 16, 3, 1))[1]["refused"] == 6


def test_options_that_no_scheduler_takes_are_told() -> None:
    _, result = played("six", "fair", Settings(blocks=0, block_size=16, slots=3, budget=64))
    assert result["error"]["kind"] == "ValueError"
    assert "num_blocks" in result["error"]["message"]


# --- changed code ---------------------------------------------------------------------------------------------------


def test_the_module_as_it_is_changes_nothing() -> None:
    before = create_scheduler("fair", num_blocks=8).__class__
    assert played("burst", "fair", sources={FAIR: source_of(FAIR)}) == played("burst", "fair")
    assert create_scheduler("fair", num_blocks=8).__class__ is before


def test_changed_code_is_what_runs() -> None:
    shortest_first = changed("return request.priority,", "return request.max_tokens,")
    frames, result = played("six", "fair", sources=shortest_first)
    assert result["error"] is None
    assert [request for _, request, _, _ in frames[0]["slots"]] == ["D", "A", "E"]
    assert [request for _, request, _, _ in played("six", "fair")[0][0]["slots"]] == ["A", "B", "C"]


def test_an_error_is_told_with_its_line() -> None:
    lines = source_of(FAIR).splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "return request.priority," in line)
    error = played("six", "fair", sources=changed("return request.priority,", "return request.prio,"))[1]["error"]
    assert (error["kind"], error["line"]) == ("AttributeError", number)
    assert error["traceback"].startswith(f'Traceback (most recent call last):\n  File "fair.py", line {number}, in ')
    error = played("six", "fair", sources=changed("return request.priority,", "return request.,"))[1]["error"]
    assert (error["kind"], error["line"], error["message"]) == ("SyntaxError", number, "invalid syntax")


def test_an_error_over_what_the_code_gave_is_told_with_the_place_that_used_it() -> None:
    gives_none = {BASE: source_of(BASE).replace("self.outstanding = output\n        return output", "return None")}
    error = played("six", "fair", sources=gives_none)[1]["error"]
    assert (error["module"], error["line"]) == (None, None)
    assert "output.num_scheduled_tokens" in error["traceback"]
    assert error["traceback"].count("File ") == 1


def test_a_scheduler_that_schedules_nothing_or_never_ends_is_stopped() -> None:
    idle = changed("return super().head()", "return None")
    assert "nothing was scheduled" in played("six", "fair", sources=idle)[1]["error"]["message"]


def test_the_auditor_complains_and_the_run_goes_on() -> None:
    leaking = changed(
        "        super().admit(request, output, found)",
        "        super().admit(request, output, found)\n        self.pool.allocate(1)",
    )
    frames, result = played("six", "fair", sources=leaking)
    assert result["audit"].startswith("step 0, blocks:")
    assert frames[-1]["finished"] == 6


# --- a learner's files ----------------------------------------------------------------------------------------------

BASE, PAGED = f"{PACKAGE}.base", f"{PACKAGE}.paged"
FILES = {BASE: source_of(BASE), PAGED: source_of(PAGED)}


def test_files_of_several_phases_run_together() -> None:
    assert played("burst", "fair", sources=FILES) == played("burst", "fair")


@pytest.mark.parametrize("module", list(FILES))
def test_an_error_is_told_with_its_file_and_line(module: str) -> None:
    """Of the starters, which raise what is to be written, the first line that a run comes to."""
    phase = next(each for each in load_course(ROOT / TABLE) if module in each.files)
    text = starter(phase, module)
    error = played("six", "paged", sources=FILES | {module: text})[1]["error"]
    assert (error["kind"], error["module"]) == ("NotImplementedError", module)
    assert "raise NotImplementedError" in text.splitlines()[error["line"] - 1]


def test_a_file_that_cannot_be_imported_or_lacks_its_class_is_named() -> None:
    broken = FILES | {PAGED: "from minicache.errors import Nothing\n"}
    error = played("six", "paged", sources=broken)[1]["error"]
    assert (error["kind"], error["module"], error["line"]) == ("ImportError", PAGED, 1)
    error = played("six", "paged", sources=FILES | {PAGED: "x = 1\n"})[1]["error"]
    assert (error["kind"], error["module"], error["line"]) == ("ImportError", PAGED, None)
    assert error["message"].endswith("from 'minicache.scheduler.paged' (paged.py)")


def test_a_stage_is_built_from_its_own_file_and_those_that_it_extends() -> None:
    built = catalogue()["schedulers"]
    assert built["fair"]["built_from"] == [f"{PACKAGE}.{name}" for name in ("fair", "paged", "base", "queue")]
    assert built["thrash"]["built_from"] == []
    assert {module for each in built.values() for module in each["built_from"]} == files().keys()
    assert all((ROOT / path).is_file() for path in files().values())


# --- what the site has of it ----------------------------------------------------------------------------------------


def test_the_site_knows_what_can_be_chosen() -> None:
    told = json.loads(json.dumps(catalogue()))
    assert told["workloads"].keys() == WORKLOADS.keys()
    for workload in told["workloads"].values():
        assert set(workload["schedulers"]) <= told["schedulers"].keys()
    for scheduler in told["schedulers"].values():
        assert "class" in source_of(scheduler["module"])


def test_the_recording_is_small() -> None:
    panes = recording()["panes"]
    assert [len(pane["frames"]) for pane in panes] == [14, 11]
    assert len(json.dumps(recording(), separators=(",", ":"))) < 12_000
