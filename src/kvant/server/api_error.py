"""All errors that a client can get, in OpenAI's format with all four keys."""

from __future__ import annotations

from collections.abc import Mapping

from kvant.errors import RequestError
from kvant.server.messages import Failure

_MOST_SHOWN = 64


class ApiError(Exception):
    """One error response. retry_after: seconds, if the client should retry."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        # openai-python retries every 5xx that does not forbid it.
        return {"x-should-retry": "false"} if self.status == 500 else {}


class Disconnected(Exception):
    """Raised if the client has disconnected, so that no response can be sent."""


def bad_request(message: str, param: str | None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(fault: RequestError) -> ApiError:
    """Returns the error 400 with the message and the parameter of `fault`."""
    return bad_request(str(fault), fault.param)


def unavailable(message: str, *, code: str, retry_after: int = 2) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)


def overloaded(message: str, *, retry_after: int) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="server_full", retry_after=retry_after
    )


def internal() -> ApiError:
    """Returns the error for a bug in Kvant; only the log has details."""
    return ApiError(500, "the server failed on this request", type="server_error", code="internal")


def api_error_of(failure: Failure) -> ApiError:
    """Returns the error for a sequence that ended without a result."""
    if failure.kind == "refused":
        return bad_request(failure.message, failure.param)
    if failure.kind in ("engine_died", "shutting_down"):
        return unavailable(failure.message, code=failure.kind)
    return ApiError(500, failure.message, type="server_error", code=failure.kind)


CODES: Mapping[str, tuple[int, str, str]] = {
    "bad_http": (400, "The bytes are not HTTP.", "send HTTP/1.1"),
    "body_too_large": (413, "The body exceeds a limit.", "`--max-body-bytes`"),
    "context_length_exceeded": (
        400, "Prompt and answer do not fit into the context.",
        "lower `max_tokens`, shorten the prompt, or raise `--max-model-len`",
    ),
    "draining": (503, "The server is shutting down.", "try again, or another server"),
    "engine_died": (503, "The engine died while it served the request.", "try again; the log says why"),
    "engine_fault": (500, "The engine failed on this request.", "the log has the place; report it"),
    "engine_restarting": (503, "The engine is started again.", "try again"),
    "engine_starting": (503, "The engine starts.", "GET `/health` names the phase"),
    "engine_stopped": (503, "The engine has ended.", "start the server again"),
    "foreign_host": (403, "The `Host` is not this machine's.", "`--allowed-origins` or `--api-key`"),
    "foreign_origin": (403, "A web page of another origin.", "`--allowed-origins` or `--api-key`"),
    "headers_too_large": (431, "The header exceeds a limit.", "`--max-header-bytes`"),
    "internal": (500, "A bug in Kvant.", "the log has the place; report it"),
    "invalid_api_key": (401, "No valid key came.", "`Authorization: Bearer KEY` or `X-Api-Key: KEY`"),
    "model_not_found": (404, "Another model is served.", "GET `/v1/models`; `--served-model-name`"),
    "no_replica": (503, "No replica can answer.", "try again; GET `/health` counts them"),
    "not_offered": (404, "An endpoint of another server.", "the message names one"),
    "numerical_error": (
        500, "The model computed NaN or Inf.", "another `--dtype`, or another KV format",
    ),
    "session_foreign": (
        409, "Another model, format or arithmetic made the session's pages.",
        "start the server as it was when the session was saved, or save it again",
    ),
    "session_not_found": (404, "No session has this id.", "GET `/v1/kv/sessions`"),
    "sessions_off": (404, "The server keeps no files.", "`--kv-offload host:SIZE,disk:DIRECTORY:SIZE`"),
    "sessions_unwritable": (503, "The directory cannot be read or written.", "the log has the reason"),
    "receipt_timeout": (408, "The request did not arrive in time.", "`--header-timeout`, `--body-timeout`"),
    "replica_lost": (503, "The replica ended while it answered.", "try again"),
    "request_timeout": (503, "The answer took too long.", "`--request-timeout`"),
    "response_not_found": (
        404, "No response of this id is stored.", "`--max-stored-responses`, or send the items again",
    ),
    "server_full": (429, "All places are taken.", "wait `Retry-After`; `--max-num-queued-reqs`"),
    "shutting_down": (503, "The server ended before the answer was complete.", "`--shutdown-timeout`"),
    "slow_reader": (503, "The client did not read its stream.", "`--max-stream-buffer-bytes`"),
    "template_process": (503, "Chat templates cannot be rendered.", "try again; the machine may lack memory"),
    "too_many_connections": (503, "All connections are taken.", "`--max-connections`"),
}  # fmt: skip
"""Every `code` of an error: its HTTP status, its meaning, and the way out."""


def shown(text: str) -> str:
    """Returns a client's text, shortened for an error message."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + ".."
