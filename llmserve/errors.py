"""All exceptions of llmserve, and the HTTP status of each.

LLMServeError
├── ConfigError                 a flag, variable, file or folder is wrong (exit status 2)
├── ListenError                 the server cannot listen on the address or port (exit status 1)
├── EngineStartError            a local engine did not start (exit status 1)
├── JournalError                a journal file cannot be read or does not replay
├── CannotMeasure               an engine cannot be measured (exit status 1)
├── NoAnswer                    a running server does not answer an operator's command (exit status 1)
├── NoPlan                      models cannot be grouped onto GPUs within their limits (exit status 1)
└── RequestError                sent to a client in OpenAI's error format
    ├── BadRequest          400
    ├── Unauthorized        401
    ├── Forbidden           403  a web page of another site
    ├── NotFound            404  unknown path, or ModelNotFound
    ├── MethodNotAllowed    405
    ├── RequestTimeout      408
    ├── BodyTooLarge        413
    ├── UnsupportedMediaType 415
    ├── RateLimited         429  with Retry-After
    ├── HeadTooLarge        431
    ├── EngineFailed        502
    ├── Unavailable         503  with Retry-After
    ├── EngineTimeout       504
    └── DeadlineExceeded    504
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


class LLMServeError(Exception):
    """Root of the tree."""


class ConfigError(LLMServeError):
    """The configuration is invalid. The message names the key, and for an unknown key the nearest known key."""


class ListenError(LLMServeError):
    """The server cannot listen on the address or port."""


class EngineStartError(LLMServeError):
    """A local engine process ended, or was not ready within its time limit."""


class JournalError(LLMServeError):
    """A journal cannot be read, or its replay differs from the recorded actions."""


class CannotMeasure(LLMServeError):
    """An engine cannot be measured. The message says why."""


class NoAnswer(LLMServeError):
    """A running server cannot be reached, or its answer makes no sense."""


class NoPlan(LLMServeError):
    """No plan meets an instance's limits, or the search ran out of time. The message says why, and by how much."""


class RequestError(LLMServeError):
    """An error response to a client. Class attributes give the HTTP status and OpenAI's type and code.

    `param` names the wrong field; `retry_after_s` becomes the Retry-After header (whole seconds, rounded up). `headers`
    are further headers of the answer.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        self.headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "invalid_request_error"
    default_code = "forbidden"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    default_code = "model_not_found"


def model_not_found(id_: str, models: Iterable[str]) -> ModelNotFound:
    """models : ids of the models that there are"""
    return ModelNotFound(f"there is no model {id_!r}; this server has {', '.join(sorted(models))}", param="model")


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_encoding"


class HeadTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    default_code = "head_too_large"


class RateLimited(RequestError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class EngineFailed(RequestError):
    status = 502
    default_code = "engine_failed"


class Unavailable(RequestError):
    status = 503
    default_code = "unavailable"


class EngineTimeout(RequestError):
    """An answer passed a limit of time. The engine may still work on it: official clients do not ask again."""

    status = 504
    type = "timeout_error"
    default_code = "engine_timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = ((b"x-should-retry", b"false"),)


class DeadlineExceeded(RequestError):
    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"
