"""Ray's own prefix-aware router, for our engines: Ray Serve imports it by its name, in the ingress' process.

It is private to `ray.llm`; the public one needs more packages. It compares characters: here each token is one.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


class OnTokens(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Reads the tokens of a `FleetRequest`, where Ray's looks for a prompt."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        return "".join(chr(0x4E00 + token_id) for token_id in pending_request.args[0].token_ids)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        if pending_request is not None and not pending_request.args:  # it asks what the engine is like
            return [candidate_replicas]
        return await super().choose_replicas(candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        if pending_request.args:
            super().on_request_routed(pending_request, replica_id, result)
