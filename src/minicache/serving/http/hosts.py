"""Which names a server that needs no API key answers to. No phase builds this module.

A web page can have its own name point to 127.0.0.1 ("DNS rebinding"): the browser then takes a server on the user's
machine for the page's own, and lets the page read its answers. The name is in the request's Host header.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from minicache.serving.http.errors import ApiError
from minicache.serving.http.logs import request_log


class HostCheck:
    """Refuses (421) a Host that is no address, not localhost, and not a given name.

    Args:
        app: what is behind it.
        names: that are given.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_ours(host := value.decode("latin-1")):
                    message = f"this server does not answer to the name {host!r}: use its address, "
                    message += "or start it with --allow-host NAME or --api-key KEY"
                    refusal = ApiError(421, message, code="host_not_allowed")
                    request_log(scope).error = refusal.reason
                    await refusal.response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = host.lower().rpartition("]")[0].removeprefix("[") or host.lower().partition(":")[0]
        name = name.removesuffix(".")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return name == ""
        return True
