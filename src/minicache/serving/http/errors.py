"""Errors in OpenAI's shape. No phase builds this module."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minicache.errors import (
    EngineDiedError,
    EngineNotReadyError,
    EngineStoppedError,
    QueueFullError,
    StepFailedError,
)

MAX_MESSAGE = 500
"""The most characters of an error's message, which may quote the client's request."""


class ApiError(Exception):
    """An error response.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do.
        kind: OpenAI's `type`: "invalid_request_error", "rate_limit_error", "server_error", …
        param: the field at fault.
        code: for programs: "model_not_found", "queue_full", …
        headers: of the response.

    Attributes:
        reason: the code; without one, kind. For the log.
        body: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} …"
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.reason = code or kind
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The response."""
        return json_response(self.status, self.body, self.headers)


def unavailable(message: str, code: str) -> ApiError:
    """503: come back in a second."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "1"})


def rate_limited(message: str, code: str, seconds: float) -> ApiError:
    """429: come back in so many seconds."""
    headers = {"Retry-After": str(max(math.ceil(seconds), 1))}
    return ApiError(429, message, kind="rate_limit_error", code=code, headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """Any error, as clients see it."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _what_is_invalid(error)
        case HTTPException():
            code = "body_too_large" if error.status_code == 413 else None
            return ApiError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))
        case QueueFullError():
            return rate_limited(str(error), "queue_full", error.retry_after)
        case EngineStoppedError():
            return unavailable(str(error), "stopping")
        case EngineNotReadyError():
            return unavailable(str(error), "not_ready")
        case EngineDiedError():
            return unavailable(str(error), "engine_died")
        case StepFailedError():
            return ApiError(500, str(error), kind="server_error", code="step_failed")
        case _:
            return ApiError(500, "the server has failed; see its log", kind="server_error")


def _what_is_invalid(error: RequestValidationError) -> ApiError:
    """What is wrong first, with the field's name.

    Of a field that may be of several types, each says why it is none. Whichever came furthest is what was meant.
    """
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", errors[0]["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}")
    worst = max((each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]), key=lambda each: len(each["loc"]))
    place = [str(part) for part in worst["loc"] if part != "body" and not _TYPE.search(str(part))]
    param = place[0] if place else None
    where = f"{'.'.join(place)}: " if place else ""
    if not place and worst["type"] != "value_error":  # the models' own checks name the field
        where = "the body must be a JSON object, sent as application/json: "
    return ApiError(400, where + worst["msg"].removeprefix("Value error, "), param=param)


_TYPE = re.compile(r"^str$|[^\w]")
"""In the place of an error: the type that was tried, and no field."""


def json_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: half a letter, which Python's strings can hold and UTF-8 cannot, is written as it came."""
    return Response(json.dumps(body), status_code=status, headers=headers, media_type="application/json")
