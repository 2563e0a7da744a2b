"""Refusals and failures as the API's own error JSON."""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from openv41.errors import ConfigError, ImageError, InputError, OverloadedError, PromptError

logger = logging.getLogger(__name__)

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER = 1  # seconds; sent where a later attempt may succeed
SHOWN = 3  # problems of one body that are named


class ApiError(Exception):
    """One request that ends with an error; the others do not notice."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """Return the error JSON."""
        kind = KINDS.get(self.status, "invalid_request_error")
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def error_json(error: ApiError) -> bytes:
    """Encode an error; messages may quote what is no valid Unicode, hence ASCII."""
    return json.dumps(error.as_dict()).encode()


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Build the HTTP response of an error."""
    extra = dict(headers or {})
    if error.status in (429, 503):
        extra["Retry-After"] = str(RETRY_AFTER)
    if error.status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    return Response(error_json(error), error.status, extra, "application/json")


def as_api_error(error: BaseException) -> ApiError:
    """Tell what went wrong: the client's doing, no room, or a fault of ours, which is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded")
    if isinstance(error, (ConfigError, ImageError, InputError, PromptError)):
        return _refusal(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    logger.error("a request failed", exc_info=error)
    return internal_error()


def _refusal(error: ConfigError | ImageError | InputError | PromptError) -> ApiError:
    if isinstance(error, ConfigError):
        return ApiError(400, "; ".join(error.problems), code="invalid_value")
    if isinstance(error, ImageError):
        return ApiError(400, str(error), code="invalid_image", param="messages")
    param = error.param if isinstance(error, PromptError) else None
    return ApiError(400, str(error), code="invalid_value", param=param)


def internal_error() -> ApiError:
    """A fault of ours, whose text is not the client's business."""
    return ApiError(500, "internal error; the server's log tells more", code="internal_error")


def validation_error(problems: Sequence[Mapping[str, Any]], known: Sequence[str]) -> ApiError:
    """Describe a body that does not fit; ``known`` are the fields that one may have meant."""
    texts = [_describe(problem, known) for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        texts.append(f"and {len(problems) - SHOWN} more problems")
    place = [str(part) for part in problems[0]["loc"][1:]]
    is_field = bool(place) and not place[0].isdigit()
    return ApiError(
        400, "; ".join(texts), code="invalid_value", param=place[0] if is_field else None
    )


def _describe(problem: Mapping[str, Any], known: Sequence[str]) -> str:
    place = [str(part) for part in problem["loc"][1:]]
    if problem["type"] == "json_invalid":
        return "the body is no valid JSON"
    if not place and problem["type"] == "model_attributes_type":
        return "the body is no JSON object, or was sent without 'Content-Type: application/json'"
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown field {'.'.join(place)!r}{hint}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(place) or 'body'}: {message}"
