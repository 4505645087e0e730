"""Every exception of llmserve, with what a client is told.

LLMServeError
├── ConfigError                 a flag, variable, file or folder is wrong (exit status 2)
├── ListenError                 the address or port cannot be listened on (exit status 1)
├── EngineStartError            a local engine did not come up (exit status 1)
├── JournalError                a journal file cannot be read or does not replay
├── CannotMeasure               an engine does not do what is asked of it (exit status 1)
├── NoPlan                      models cannot be grouped onto GPUs within their limits (exit status 1)
└── RequestError                answered to a client in OpenAI's error shape
    ├── BadRequest          400
    ├── Unauthorized        401
    ├── NotFound            404  unknown path, or ModelNotFound
    ├── MethodNotAllowed    405
    ├── RateLimited         429  with Retry-After
    ├── EngineFailed        502
    ├── Unavailable         503  with Retry-After
    └── DeadlineExceeded    504
"""

from __future__ import annotations

from typing import Any, ClassVar


class LLMServeError(Exception):
    """Root of the tree."""


class ConfigError(LLMServeError):
    """The configuration cannot be used; the message names the key and the nearest right one."""


class ListenError(LLMServeError):
    """The address or port cannot be listened on."""


class EngineStartError(LLMServeError):
    """A local engine process ended or stayed silent before it was ready."""


class JournalError(LLMServeError):
    """A journal cannot be read, or its replay differs from what it recorded."""


class CannotMeasure(LLMServeError):
    """An engine that is to be measured does not do what is asked of it; the message says what."""


class NoPlan(LLMServeError):
    """No plan keeps an instance's limits, or none was found in time. The message says why, and by how much."""


class RequestError(LLMServeError):
    """An answer other than success. Class attributes give the HTTP status and OpenAI's type and code.

    `param` names the offending field; `retry_after_s` becomes the Retry-After header (whole seconds, rounded up).
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

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    default_code = "model_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


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


class DeadlineExceeded(RequestError):
    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"
