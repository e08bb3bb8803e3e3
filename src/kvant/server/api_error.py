"""Every failure that a client can see, in OpenAI's format with all four keys."""

from __future__ import annotations

from kvant.errors import RequestError
from kvant.server.messages import Failure


class ApiError(Exception):
    """One error response. retry_after: whole seconds, if a retry makes sense."""

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
    """The client has left; there is no one to answer."""


def bad_request(message: str, param: str | None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def of_request(fault: RequestError) -> ApiError:
    return bad_request(str(fault), fault.param)


def unavailable(message: str, *, code: str, retry_after: int = 2) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)


def overloaded(message: str, *, retry_after: int) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="server_full", retry_after=retry_after
    )


def internal() -> ApiError:
    """The response for a bug in Kvant. Only the log has the details."""
    return ApiError(500, "the server failed on this request", type="server_error", code="internal")


def of_failure(failure: Failure) -> ApiError:
    """The response for a sequence that ended without a result."""
    if failure.kind == "refused":
        return bad_request(failure.message, failure.param)
    if failure.kind in ("engine_died", "shutting_down"):
        return unavailable(failure.message, code=failure.kind)
    return ApiError(500, failure.message, type="server_error", code=failure.kind)
