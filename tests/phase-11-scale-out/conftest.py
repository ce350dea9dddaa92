"""What the tests of phase 11 share: views and requests that read well, and what was done before a failure."""

from __future__ import annotations

import pytest

from minicache.arithmetic.arithmetic import cache_bytes_per_token
from minicache.fleet.affinity import PrefixAffinityRouter
from minicache.fleet.autoscaling import Autoscaler
from minicache.fleet.disaggregation import MovingCosts
from minicache.fleet.membership import Membership, Probe
from minicache.fleet.power_of_two import PowerOfTwoRouter
from minicache.fleet.views import ReplicaView, RoutedRequest
from minicache_course.follow import following


@pytest.fixture(autouse=True)
def _scenario():
    """A failure tells the router or the membership, and what has been done so far."""
    of_membership = "join leave drain on_sent on_finished"
    with (
        following(PowerOfTwoRouter, "__init__"),
        following(PrefixAffinityRouter, "__init__", "on_left", on_sent=_sent),
        following(
            Membership, "__init__", *of_membership.split(), on_probed=_probed, on_report=_report, on_failed=_failed
        ),
        following(Autoscaler, "__init__", "decide"),
        following(MovingCosts, __init__=_costs),
    ):
        yield


def _costs(costs, model, seconds_per_token, bandwidth, latency=0.0, dtype="float16"):
    nbytes = cache_bytes_per_token(model, dtype)
    told = f"MovingCosts of {model.num_layers} layers, {nbytes} bytes and {seconds_per_token} s a token:"
    return told, f"bandwidth {bandwidth} and latency {latency}" if latency else f"bandwidth {bandwidth}"


def _sent(result, request, replica_id):
    blocks = getattr(request, "block_hashes", ())
    return f"on_sent to {replica_id!r}: {blocks[-1] if blocks else 'a prompt without blocks'!r}", ""


def _probed(probe, replica_id):
    return f"on_probed({replica_id!r}) → {_brief(probe)}", ""


def _report(result, probe, stats):
    return f"on_report({_brief(probe)}, {stats})", ""


def _failed(result, probe):
    return f"on_failed({_brief(probe)})", ""


def _brief(probe):
    """A learner's probe may be anything."""
    return f"probe {probe.number} of {probe.replica_id!r}" if isinstance(probe, Probe) else repr(probe)


@pytest.fixture(scope="session")
def fleet():
    """`fleet(a=3, b=(5, 8))`: views of replicas with 3 unfinished requests of 64, and 5 of 8."""

    def create(**replicas):
        pairs = {name: load if isinstance(load, tuple) else (load, 64) for name, load in replicas.items()}
        return [ReplicaView(name, num_unfinished, most) for name, (num_unfinished, most) in pairs.items()]

    return create


class Prompt(bytes):
    """A block's hash, printed as the letters of the blocks from the first to this one."""

    def __repr__(self):
        return self.decode()


@pytest.fixture(scope="session")
def prompt():
    """`prompt("ABC")`: a request whose prompt is three blocks, one a letter. "ABD" has the first two in common."""

    def create(letters, request_id="r"):
        hashes = tuple(Prompt(letters[: count + 1].encode()) for count in range(len(letters)))
        return RoutedRequest(request_id, hashes, 16 * len(letters) + 3)

    return create
