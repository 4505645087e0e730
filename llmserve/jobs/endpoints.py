"""The endpoints of files and batches.

POST, GET /v1/files   GET, DELETE /v1/files/{id}   GET /v1/files/{id}/content
POST, GET /v1/batches   GET /v1/batches/{id}   POST /v1/batches/{id}/cancel
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmserve.errors import BadRequest, BodyTooLarge, NotFound, RequestError, Unavailable
from llmserve.gateway.answers import json_response
from llmserve.gateway.api_document import json_body
from llmserve.gateway.bodies import BodyLimits, read_body
from llmserve.gateway.endpoints import BATCH_PATHS
from llmserve.gateway.own_routes import Answering, OwnRoute
from llmserve.http.exchange import Exchange
from llmserve.jobs.sums import JobSums
from llmserve.tenants.guards import Guard, key_of
from llmserve.wire.json_text import without_bom

if TYPE_CHECKING:
    from llmserve.jobs.service import JobService
    from llmserve.jobs.uploads import Upload

log = logging.getLogger("llmserve")

FILES, BATCHES = "/v1/files", "/v1/batches"
LIST_MAX, FILES_LIST_MAX = 100, 10_000
CHUNK_BYTES = 256 << 10
IDEMPOTENCY_CHARS_MAX = 255
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}
"""The body of an upload, in the document of the API."""


class NoBatches:
    """The endpoints of a server without a store: each refuses. remedy : what the operator has to do"""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        paths = [path + tail for path in (FILES, BATCHES) for tail in ("", "/{rest:path}")]
        self.routes = [OwnRoute(method, path, self._answer) for method in ("GET", "POST", "DELETE") for path in paths]

    def upload(self, exchange: Exchange[Any]) -> Upload:
        """Refuse every upload before its body."""
        raise self._refusal()

    async def _answer(self, _: Request) -> Response:
        raise self._refusal()

    def _refusal(self) -> NotFound:
        return NotFound(f"this server keeps no files and batches: {self._remedy}", code="no_store")


class BatchEndpoints:
    """The endpoints of a server with a store. Each key sees only its own files and batches.

    sums : of the batches of all keys, for the page
    """

    def __init__(self, jobs: JobService, client_key: Guard) -> None:
        self.sums = JobSums(jobs)
        self._jobs = jobs
        self._client_key = client_key
        self.routes = self._routes(client_key)

    def _routes(self, client_key: Guard) -> list[OwnRoute]:
        from llmserve.jobs.objects import NewBatch

        def route(
            method: str, path: str, answer: Answering, guard: Guard | None = client_key, **extra: Any
        ) -> OwnRoute:
            tag = "files" if path.startswith(FILES) else "batches"
            return OwnRoute(method, path, _while_the_store_works(answer), guard=guard, tag=tag, extra=extra)

        file, batch = FILES + "/{file_id}", BATCHES + "/{batch_id}"
        return [
            route("POST", FILES, self.add_file, None, **UPLOAD),  # `upload` asks for the key
            route("GET", FILES, self.list_files),
            route("GET", file, self.file),
            route("DELETE", file, self.delete_file),
            route("GET", file + "/content", self.content),
            route("POST", BATCHES, self.create, client_key.with_body, **json_body(NewBatch)),
            route("GET", BATCHES, self.list_batches),
            route("GET", batch, self.batch),
            route("POST", batch + "/cancel", self.cancel),
        ]

    def upload(self, exchange: Exchange[Any]) -> Upload:
        """What takes the body of an upload whose head has arrived. Raises RequestError."""
        from llmserve.jobs.uploads import Upload

        key = self._client_key.check(exchange.headers)
        length = exchange.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > Upload.bytes_max:
            raise BodyTooLarge(f"the body is larger than {Upload.bytes_max:,} bytes")
        return Upload(exchange.headers.get("content-type", ""), partial(self._jobs.new_file, key), key)

    # ---- files ----

    async def add_file(self, request: Request) -> Response:
        """Upload an input file."""
        upload: Upload = request.scope["exchange"].sink
        file = await upload.finish()
        try:
            row = await self._jobs.add_file(upload.key, upload.form.filename or "", file, _checked(upload.form.fields))
        except RequestError:
            file.discard()
            raise
        finally:
            file.close()
        return json_response(row.shown())

    async def list_files(self, request: Request) -> Response:
        """The files of the key: `after`, `limit`, `order` and `purpose` as OpenAI's."""
        key, query = key_of(request), request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order`: must be asc or desc", param="order", code="invalid_value")
        rows, more = await self._jobs.files.list_files(
            key,
            after=query.get("after"),
            limit=_limit(query.get("limit"), FILES_LIST_MAX, FILES_LIST_MAX),
            purpose=query.get("purpose"),
            ascending=order == "asc",
        )
        return _page([row.shown() for row in rows], more)

    async def file(self, request: Request) -> Response:
        """What is known of a file."""
        row = await self._jobs.files.file(key_of(request), request.path_params["file_id"])
        return json_response(row.shown())

    async def delete_file(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["file_id"]
        await self._jobs.delete_file(key_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        row, parts = await self._jobs.content(key_of(request), request.path_params["file_id"])
        files = [(path.open("rb"), size) for path, size in parts]  # open, the bytes stay when the file is deleted
        headers = {"content-length": str(row.bytes)}
        return StreamingResponse(_chunks(files), headers=headers, media_type="application/octet-stream")

    # ---- batches ----

    async def create(self, request: Request) -> Response:
        """Make a batch of an input file. A request with the Idempotency-Key of an earlier one gets its batch."""
        from llmserve.jobs.objects import NewBatch

        key, body = key_of(request), await request.body()
        new, _ = read_body(msgspec.json.Decoder(NewBatch), without_bom(body), BodyLimits())
        if new.endpoint not in BATCH_PATHS:
            raise BadRequest(
                f"`endpoint`: must be one of {', '.join(BATCH_PATHS)}", param="endpoint", code="invalid_value"
            )
        idempotency_key = request.headers.get("idempotency-key")
        if idempotency_key is not None and not 0 < len(idempotency_key) <= IDEMPOTENCY_CHARS_MAX:
            raise BadRequest(f"Idempotency-Key: 1 to {IDEMPOTENCY_CHARS_MAX} characters", code="invalid_value")
        row = await self._jobs.create(key, body, new, idempotency_key)
        return json_response(self._jobs.shown(row))

    async def batch(self, request: Request) -> Response:
        """How far a batch is, and when it will end."""
        row = await self._jobs.batches.batch(key_of(request), request.path_params["batch_id"])
        return json_response(self._jobs.shown(row))

    async def list_batches(self, request: Request) -> Response:
        """The batches of the key, the newest first."""
        key, query = key_of(request), request.query_params
        limit = _limit(query.get("limit"), 20, LIST_MAX)
        rows, more = await self._jobs.batches.list_batches(key, after=query.get("after"), limit=limit)
        return _page([self._jobs.shown(row) for row in rows], more)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch: what has been answered is kept."""
        row = await self._jobs.cancel(key_of(request), request.path_params["batch_id"])
        return json_response(self._jobs.shown(row))


def _checked(fields: dict[str, str]) -> int | None:
    """Seconds after which an uploaded file expires; None: the server's default. Raises BadRequest."""
    from llmserve.jobs.objects import ExpiresAfter

    purpose = fields.get("purpose")
    if purpose is None:
        raise BadRequest("`purpose` is required", param="purpose", code="missing_required_parameter")
    if purpose != "batch":
        raise BadRequest(f"`purpose`: must be batch, not {purpose!r}", param="purpose", code="invalid_value")
    names = {name: f"expires_after[{name}]" for name in ("anchor", "seconds")}
    given = {name: fields[field] for name, field in names.items() if field in fields}
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise BadRequest(f"`expires_after`: {error}", param="expires_after", code="invalid_value") from None


def _while_the_store_works(answer: Answering) -> Answering:
    """The same answer; clients are told when the store cannot be used now."""
    from sqlalchemy.exc import SQLAlchemyError

    @wraps(answer)
    async def answer_or_refuse(request: Request) -> Response:
        try:
            return await answer(request)
        except SQLAlchemyError as error:
            log.error("the store of batch jobs failed: %s", error)
            raise Unavailable("the store cannot be used now", code="store_unavailable", retry_after_s=5.0) from error

    return answer_or_refuse


def _limit(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise BadRequest(f"`limit`: must be 1 to {most:,}", param="limit", code="invalid_value")
    return int(text)


def _page(rows: list[dict[str, Any]], more: bool) -> Response:
    ids = [row["id"] for row in rows]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return json_response({"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": more})


async def _chunks(files: Sequence[tuple[BinaryIO, int]]) -> AsyncIterator[bytes]:
    """The bytes of all parts, read in a thread."""
    try:
        for file, size in files:
            left = size
            while left:
                data = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
                if not data:
                    raise OSError("a file of the store is shorter than its row says")
                left -= len(data)
                yield data
    finally:
        for file, _ in files:
            file.close()
