"""`minicache sweep`, and what it is made of: points, results that are kept, processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import minicache_cli as cli
from minicache.errors import ResultsError, WorkerDiedError
from minicache.scheduler import SCHEDULERS
from minicache.simulator.fleet import FleetSimulation
from minicache.simulator.fleet.replica import Replica
from minicache.simulator.sweep import LONGEST_STEP, Point, ResultsFile, grid, in_processes
from minicache.simulator.traffic import TRAFFIC, Traffic

SMALL = Point(count=12, rate=20.0, num_blocks=2000)


def sweep(folder, *arguments):
    return CliRunner().invoke(cli.app, ["sweep", "--out", str(folder), "--jobs", "1", *arguments])


def one_run(folder, *arguments):
    return sweep(
        folder, "--count", "5", "--rates", "20", "--policies", "round_robin", "--sizes", "2", "--jobs", "1", *arguments
    )


# --- requests and points ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_is_the_same_each_time_and_in_order(name):
    traffic = Traffic(name, 50.0, 20, seed=3)
    first, second = ([vars_of(each) for each in traffic] for _ in range(2))
    assert first == second
    assert len(first) == 20
    times = [time for time, *_ in first]
    assert times == sorted(times)
    assert all(prompt + output <= traffic.max_model_len for _, prompt, output in first)


def vars_of(arrival):
    time = arrival.time if hasattr(arrival, "time") else arrival.arrival_time
    output = arrival.num_output_tokens if hasattr(arrival, "time") else arrival.max_tokens
    return time, arrival.num_prompt_tokens, output


def test_chats_arrive_at_the_rate_once_they_are_under_way():
    times = [request.arrival_time for request in Traffic("chats", 5.0, 2600)]
    late = [moment for moment in times if 350 <= moment < 500]
    assert len(late) / 150 == pytest.approx(5.0, rel=0.15)


def test_a_rate_that_is_none():
    with pytest.raises(ValueError, match="rate"):
        Traffic("chats", 0.0, 5)
    with pytest.raises(ValueError, match="no workload 'chat'"):
        Traffic("chat", 1.0, 5)


def test_a_grid_has_every_combination_once():
    points = grid(SMALL, [1.0, 2.0, 1.0], ["round_robin", "power_of_two"], ["fair", "chunked"], [1, 3], [0])
    assert len(points) == len(set(points)) == 2 * 3 * 2
    assert {(each.num_replicas, each.policy, each.scheduler) for each in points if each.rate == 2.0} == {
        (1, "round_robin", "fair"),  # with one replica, every policy is the same
        (1, "round_robin", "chunked"),
        (3, "round_robin", "fair"),
        (3, "round_robin", "chunked"),
        (3, "power_of_two", "fair"),
        (3, "power_of_two", "chunked"),
    }


def test_one_replica_needs_no_router():
    results = [replace(SMALL, policy=policy, rate=60.0).run() for policy in ("round_robin", "prefix_affinity")]
    assert results[0] == results[1]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_takes_every_prompt(scheduler):
    """Prompts of a request longer than `LONGEST_STEP` too, though all but one compute a prompt in one step."""
    point = Point(workload="azure-code", scheduler=scheduler, count=40, rate=4.0, seed=1)
    assert max(each.num_prompt_tokens for each in Traffic("azure-code", 4.0, 40, seed=1)) > LONGEST_STEP
    result = point.run()
    assert (result["num_finished"], result["num_refused"]) == (40, 0)


def test_a_thousand_replicas_are_checked_without_being_made(monkeypatch):
    made, make = [], Replica.__init__
    monkeypatch.setattr(Replica, "__init__", lambda *arguments: (made.append(1), make(*arguments))[1])
    replace(SMALL, num_replicas=1000).check()
    assert len(made) == 1
    with pytest.raises(ValueError, match="num_replicas"):
        replace(SMALL, num_replicas=0).check()


def test_a_point_is_a_run_of_the_simulated_fleet():
    point = replace(SMALL, num_replicas=2, policy="prefix_affinity")
    simulation = point.simulation()
    assert isinstance(simulation, FleetSimulation)
    report, result = simulation.run(), point.run()
    assert result["num_finished"] == report.num_finished == 12
    assert result["ttft_p99"] == report.ttft.p99
    assert result["hit_rate"] == report.hit_rate
    assert result == point.run()  # no time of this machine is in it
    json.dumps(result)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_results_are_there_when_the_file_is_opened_again(tmp_path):
    file, point = tmp_path / "results.jsonl", replace(SMALL, seed=4)
    with ResultsFile(file) as results:
        results.add(point, {"ttft_p50": 0.25})
    with ResultsFile(file) as results:
        assert point in results
        assert results[point] == {"ttft_p50": 0.25}
        assert replace(point, code="another") not in results


def test_a_line_whose_writer_was_ended_is_cut_off(tmp_path):
    file = tmp_path / "results.jsonl"
    whole = json.dumps({"point": asdict(SMALL), "result": {"a": 1}}) + "\n"
    file.write_text(whole + whole[:20])
    with ResultsFile(file) as results:
        assert results[SMALL] == {"a": 1}
        results.add(replace(SMALL, seed=1), {"a": 2})
    assert [json.loads(line)["result"]["a"] for line in file.read_text().splitlines()] == [1, 2]


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("my notes\n")
    with pytest.raises(ResultsError, match="line 1"):
        ResultsFile(file)
    assert file.read_text() == "my notes\n"


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_give_what_one_does():
    points = grid(SMALL, [10.0, 30.0], ["round_robin", "prefix_affinity"], ["chunked"], [2], [0])
    assert dict(in_processes(points, 2, os.getpid)) == {point: point.run() for point in points}


@pytest.mark.slow
def test_a_process_that_dies_is_told_of():
    with pytest.raises(WorkerDiedError):
        list(in_processes([SMALL], 1, os.abort))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was(tmp_path):
    first = one_run(tmp_path)
    assert first.exit_code == 0, first.output
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    again = one_run(tmp_path, "--seeds", "0,1")
    assert "1 of 2 runs are in" in again.output
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    third = one_run(tmp_path, "--seeds", "0,1")
    assert "2 of 2 runs are in" in third.output
    assert "round_robin" in third.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rates", "1,x"], "--rates must be a list such as 1,2,4"),
        (["--sizes", ","], "--sizes must be a list such as 1,2,4"),
        (["--sizes", "0"], "num_replicas"),
        (["--schedulers", "fastest"], "no scheduler 'fastest'"),
        (["--policies", "fastest"], "fastest"),
        (["--model", "opt-13b", "--accelerator", "l4"], "memory"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(tmp_path, arguments, told):
    result = sweep(tmp_path / "new", *arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_ctrl_c_stops_at_once_and_keeps_what_is_done(tmp_path):
    # Anyone who runs tests in the background may have SIGINT ignored, and so would the command.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from minicache_cli import main; main()"
    command = [sys.executable, "-c", code, "sweep", "--out", str(tmp_path), "--jobs", "2"]
    command += ["--rates", "20", "--policies", "round_robin", "--sizes", "2", "--count", "20"]
    command += ["--seeds", ",".join(map(str, range(2000)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        file = tmp_path / "results.jsonl"
        end = time.monotonic() + 60
        while not (file.exists() and file.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < end, "no results in a minute"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "runs are kept" in told
    assert "Traceback" not in told
    with ResultsFile(file):  # whole, to the last line
        pass


@pytest.mark.slow
def test_the_pages_tables():
    text = (Path(__file__).parents[2] / "docs/en/reference/running-a-fleet.md").read_text(encoding="utf-8")
    figures = r"([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|"
    of_fleets = re.findall(rf"^\| (\d) \| (\w+) \| {figures}", text, re.MULTILINE)
    of_servers = re.findall(rf"^\| (\w+) \| {figures}", text, re.MULTILINE)
    assert (len(of_fleets), len(of_servers)) == (4, 3)
    fleets = [Point(num_replicas=int(size), policy=policy, count=1500) for size, policy, *_ in of_fleets]
    servers = [Point(scheduler=scheduler, count=1500) for scheduler, *_ in of_servers]
    for point, (rate, *written) in zip(fleets + servers, [row[-4:] for row in of_fleets + of_servers], strict=True):
        result = replace(point, rate=float(rate)).run()
        assert written == [
            f"{result['ttft_p50']:.3f}",
            f"{result['ttft_p99']:.2f}",
            f"{100 * result['hit_rate']:.0f}",
        ]
