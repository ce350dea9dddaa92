"""A fleet of our engines on Ray Serve: its router and its autoscaling policy are phase 11's. No phase builds this.

    client ── HTTP ──▶ ingress (the API, `FleetClient`) ──▶ `FleetRouter` ──▶ replicas (`AsyncEngine`)

Ray starts, watches and replaces the processes, carries requests and drains replicas that it ends. Everything that is
decided about requests is decided by `minicache.fleet`, by a learner's files if these stand in.

Ray Serve looks at annotations of deployments when it makes them: this module has nothing that it would look at.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

# isort: off
from minicache.plugins.ray_local import ray_running  # before Ray itself, which reads what this sets
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
# isort: on

from minicache.engine.options import ReplicaOptions
from minicache.errors import EngineDiedError, EngineStoppedError, NoReplicaError, require_count
from minicache.fleet import Autoscaler
from minicache.serving.replica.fleet import FleetClient, FleetRequest, Piece
from minicache.serving.replica.messages import EngineInfo, Update

APP: Final = "minicache"
ENGINES: Final = "Engine"
QUIET: Final = {"log_level": "ERROR", "enable_access_log": False}

logger = logging.getLogger("minicache")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The configuration of a fleet.

    Attributes:
        engine: of each replica.
        policy: `minicache.fleet.create_router`'s name.
        num_replicas: replicas, ≥ 1; the fewest, if their number changes.
        max_replicas: the most replicas; None: their number does not change.
        target_unfinished: as `minicache.fleet.Autoscaler`.
        downscale_delay: as `minicache.fleet.Autoscaler`, in seconds.
        max_waiting: answers that may wait, beyond those that the replicas have batch slots for, ≥ 0.
        drain_seconds: how long a replica that is to end may take to finish its answers.
        router: one of Ray's routers instead of ours, for comparison.

    Raises:
        TypeError, ValueError: a number has the wrong type or is out of its bounds.
    """

    engine: ReplicaOptions
    policy: str = "prefix_affinity"
    num_replicas: int = 2
    max_replicas: int | None = None
    target_unfinished: float = 8.0
    downscale_delay: float = 60.0
    max_waiting: int = 256
    drain_seconds: float = 30.0
    router: RequestRouterConfig | None = None

    def __post_init__(self) -> None:
        require_count("num_replicas", self.num_replicas)
        require_count("max_waiting", self.max_waiting, at_least=0)
        if self.max_replicas is not None:
            Autoscaler(**self.scaling())

    @property
    def max_unfinished(self) -> int:
        """Admission slots of the fleet."""
        return (self.max_replicas or self.num_replicas) * self.engine.max_num_seqs + self.max_waiting

    def scaling(self) -> dict[str, Any]:
        """What `Autoscaler` is made with."""
        return {
            "target_unfinished": self.target_unfinished,
            "min_replicas": self.num_replicas,
            "max_replicas": self.max_replicas,
            "downscale_delay": self.downscale_delay,
        }


# The router


class FleetRouter(RequestRouter):  # type: ignore[misc]  # mypy has no types of Ray
    """`minicache.fleet`'s router and membership, in place of Ray's.

    A replica's name is Ray's, which no later replica gets again. A request counts as sent from when its replica is
    chosen, not from when the replica has confirmed it: a burst would otherwise find all counts at zero. Ray retries
    what a replica refuses, and waits when all are full.

    It is no `FIFOMixin`: that may send another request than the one that `choose` has seen.
    """

    def initialize_state(self, policy: str = "prefix_affinity") -> None:
        """Ray calls it once, with `request_router_kwargs`."""
        from minicache.fleet import Membership, create_router

        self.policy = create_router(policy)
        self.membership = Membership()
        self._sent: dict[str, tuple[int, Any, str]] = {}  # Ray's id of a request → attempt, our id, replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica that our router chooses; none if all are full: then Ray retries, with backoff."""
        if pending_request is None or not pending_request.args or not isinstance(pending_request.args[0], FleetRequest):
            return [candidate_replicas]  # not a request for tokens: any replica can answer it
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.internal_request_id
        self._forget(name)  # a replica refused it, and it is retried
        routed = pending_request.args[0].routed
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        try:
            for replica_id, each in by_name.items():
                if replica_id in self.membership.members:
                    self.membership.on_report(self.membership.on_probed(replica_id), each.routing_stats or {})
            chosen = self.policy.choose(
                routed, [view for view in self.membership.views() if view.replica_id in by_name]
            )
            replica = by_name[chosen]
            self._sent[name] = (self.membership.on_sent(routed.request_id, chosen), routed.request_id, chosen)
            self.policy.on_sent(routed, chosen)
        except NoReplicaError:
            return []
        except Exception as error:  # in a learner's router: the request fails instead of hanging
            logger.exception("the router has failed")
            pending_request.future.set_exception(RuntimeError(f"the router has failed: {error!r}"))
            return [candidate_replicas]
        pending_request.future.add_done_callback(lambda future: self._forget(name) if future.cancelled() else None)
        return [[replica]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls it when a request is over, in any way."""
        self._forget(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray calls it when a request finds its replica dead, before the fleet's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._update_membership()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls it with the replicas that take requests."""
        super().update_replicas(replicas)
        self._update_membership()

    def _update_membership(self) -> None:
        now = {each.unique_id: replica for each, replica in self.curr_replicas.items()}
        for gone in self.membership.members.keys() - now.keys():
            self.membership.leave(gone)
            self.policy.on_left(gone)
        for new in now.keys() - self.membership.members.keys():
            self.membership.join(new, max_unfinished=now[new].max_ongoing_requests)

    def _forget(self, name: str) -> None:
        """A request is over, or was not taken."""
        if (sent := self._sent.pop(name, None)) is not None:
            attempt, request_id, replica_id = sent
            self.membership.on_finished(attempt)
            self.policy.on_finished(request_id, replica_id)


# The number of replicas


class ScalingPolicy:
    """`minicache.fleet`'s autoscaler as Ray's `policy_function`: its controller makes one, and calls it periodically.

    When there should be fewer replicas, Ray chooses which end; they finish their answers.

    Args:
        options: of `Autoscaler`.
    """

    def __init__(self, **options: Any) -> None:
        from minicache.fleet import Autoscaler

        self._autoscaler = Autoscaler(**options)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and the state for the next call."""
        from minicache.fleet import FleetView

        num_waiting = round(context.total_queued_requests or 0)
        view = FleetView(
            now=context.current_time,
            num_ready=context.current_num_replicas,
            num_starting=max(0, context.target_num_replicas - context.current_num_replicas),
            num_unfinished=max(0, round(context.total_num_requests) - num_waiting),
            num_waiting=num_waiting,
        )
        return self._autoscaler.decide(view, context.policy_state or {})


def number_of_replicas(options: FleetOptions) -> dict[str, Any]:
    """The options of Ray's deployment for the number of replicas. The delays are our autoscaler's, so Ray's are 0."""
    if options.max_replicas is None:
        return {"num_replicas": options.num_replicas}
    scaling = AutoscalingConfig(
        min_replicas=options.num_replicas,
        max_replicas=options.max_replicas,
        metrics_interval_s=0.5,
        look_back_period_s=1.0,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=ScalingPolicy, policy_kwargs=options.scaling()),
    )
    return {"num_replicas": "auto", "autoscaling_config": scaling}


# A replica


def listen_on_loopback() -> None:
    """Keep a process of Ray Serve off the network: called before Ray opens the process's port for other deployments.

    Ray 2.60 opens it on all addresses, asks for no token there and unpickles what comes. No setting prevents it.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")


class EngineReplica:
    """An engine, as Ray Serve runs it in a process of its own: token ids in, token ids out.

    Args:
        options: of the engine.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        from minicache.engine.async_engine import AsyncEngine
        from minicache.scheduler.observe import observe
        from minicache.serving.replica.llm import info_of, make_llm
        from minicache.serving.replica.stats import SchedulerStats

        listen_on_loopback()
        llm = make_llm(options)
        self._info = info_of(llm)
        self._stats: deque[Update] = deque()  # filled by the engine's thread
        llm.scheduler = observe(llm.scheduler, SchedulerStats(llm.scheduler, self._stats.extend))
        # Ray sends no more than there are batch slots, but a request that is being aborted may still hold one.
        self._engine = AsyncEngine(llm, max_waiting=llm.scheduler.max_num_seqs)
        self._is_started = False
        self._name = serve.get_replica_context().replica_id.unique_id

    async def info(self) -> EngineInfo:
        """The engine's properties."""
        return self._info

    async def generate(self, request: FleetRequest) -> AsyncGenerator[Piece, None]:
        """Answer a request: a piece when the engine has taken it, then one for each step, or for several."""
        if not self._is_started:  # here, in the event loop that will use it
            self._engine.start()
            self._is_started = True
        options: dict[str, Any] = {"priority": request.priority, "cache_salt": request.cache_salt}
        if request.num_logprobs is not None:
            options["num_logprobs"] = request.num_logprobs
        if request.params.is_constrained:
            await asyncio.to_thread(self._engine.llm.grammars.compile, request.params)  # steps go on meanwhile
            options["num_answer_tokens"] = request.num_answer_tokens
        with await self._engine.add_request(list(request.token_ids), request.params, **options) as stream:
            yield Piece(self._name, [], self._updates())
            while chunks := await stream.take():
                tokens = [(chunk.token_id, chunk.finish_reason, chunk.logprobs) for chunk in chunks]
                yield Piece(self._name, tokens, self._updates())

    def record_routing_stats(self) -> dict[str, float]:
        """Ray polls it; routers see it as `ReplicaView.stats`."""
        scheduler = self._engine.llm.scheduler
        return {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "kv_cache_usage": scheduler.pool.num_used / scheduler.pool.num_blocks,
        }

    def check_health(self) -> None:
        """Ray replaces a replica that raises."""
        if self._engine.error is not None:
            raise EngineStoppedError(f"the engine has ended: {self._engine.error}")

    def _updates(self) -> list[Update]:
        """The changes since the last call."""
        return [self._stats.popleft() for _ in range(len(self._stats))]


# The ingress


def connect(handle: Any, options: FleetOptions) -> FleetClient:
    """The client that the API uses, in the ingress.

    Args:
        handle: of the replicas' deployment.
        options: of the fleet.
    """
    from minicache.engine.loading import find_model, load_tokenizer

    async def send(request: FleetRequest) -> AsyncGenerator[Piece, None]:
        pieces = handle.options(stream=True).generate.remote(request)
        try:
            async for piece in pieces:
                yield piece
        except RayTaskError as error:  # the replica's own
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayActorError as error:
            raise EngineDiedError("the replica has died") from error
        finally:
            pieces.cancel()  # no effect on a finished answer

    async def describe() -> EngineInfo:
        info: EngineInfo = await handle.info.remote()
        return info

    tokenizer = load_tokenizer(find_model(options.engine.model))
    return FleetClient(send, describe, tokenizer, max_unfinished=options.max_unfinished)


MakeApp = Callable[[FleetClient], Any]
"""Makes the ASGI application of a fleet, in the ingress: a module-level function, since it is sent there by name."""


def application(options: FleetOptions, make_app: MakeApp) -> Any:
    """The fleet as Ray Serve deploys it: an ingress, and the replicas behind it."""
    router = options.router or RequestRouterConfig(
        request_router_class=FleetRouter,
        request_router_kwargs={"policy": options.policy},
        request_routing_stats_period_s=1.0,
    )
    engines = serve.deployment(EngineReplica, name=ENGINES).options(
        **number_of_replicas(options),
        max_ongoing_requests=options.engine.max_num_seqs,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=router,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=2,
        health_check_timeout_s=10,
    )

    def build() -> Any:
        listen_on_loopback()
        return make_app(connect(serve.get_deployment_handle(ENGINES, APP), options))

    ingress = serve.deployment(serve.ingress(build)(), name="Ingress").options(
        num_replicas=1,  # one, so its count is complete
        max_ongoing_requests=2 * options.max_unfinished + 64,  # refusals come from the API
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=options.drain_seconds,
    )
    return ingress.bind(engines.bind(options.engine))


# Start and stop


@contextmanager
def ray_started(
    *, host: str = "127.0.0.1", port: int = 8000, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Run Ray Serve for the duration of the block, as `ray_running` runs Ray.

    Args:
        host: where fleets listen.
        port: where fleets listen.
        runtime_env: as for `ray_running`.

    Raises:
        EngineDiedError: Ray could not be started.
    """
    with ray_running(max(4, os.cpu_count() or 1), runtime_env=runtime_env):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        yield


@contextmanager
def fleet_running(options: FleetOptions, make_app: MakeApp) -> Iterator[None]:
    """Run a fleet for the duration of the block, and finish its answers. Ray must be running.

    Args:
        options: of the fleet.
        make_app: its API.
    """
    try:
        serve.run(application(options, make_app), name=APP, route_prefix="/", logging_config=QUIET)
        yield
    finally:
        serve.delete(APP)
