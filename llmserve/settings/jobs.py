"""The section [jobs]: batch jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class JobsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Batch jobs: files of requests that run beside online requests. They need --state or --store"""

    store: Annotated[
        str | None,
        Meta(
            description="database of files and batches, postgresql://USER@HOST/NAME, which several servers may share "
            "(default: jobs.sqlite in the folder of --state)",
            extra={"metavar": "URL"},
        ),
    ] = None
    store_folder: Annotated[
        str | None,
        Meta(
            description="folder for the bytes of files; servers that share a --store share it, too (default: jobs in "
            "the folder of --state)",
            extra={"metavar": "DIR"},
        ),
    ] = None
    batch_days: Annotated[int, Meta(ge=1, le=3650, description="how long files and ended batches are kept")] = 30
    batch_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="estimated tokens of prompts and answers that one key's batches in progress may have; 0: no "
            "limit",
        ),
    ] = 0
    batch_active_max: Annotated[
        int,
        Meta(
            ge=0,
            description="unfinished batches of one key; a further one is refused with 429. Each costs some kB of "
            "memory, and is looked at every second; 0: no limit",
        ),
    ] = 200
    batch_active_total_max: Annotated[int, Meta(ge=0, description="unfinished batches of all keys; 0: no limit")] = (
        2_000
    )
    batch_files_max: Annotated[int, Meta(ge=0, description="files of one key; 0: no limit")] = 10_000
    batch_bytes_max: Annotated[int, Meta(ge=0, description="bytes of all files together; 0: no limit")] = 0
    batch_webhook: Annotated[
        str | None,
        Meta(
            description="URL that gets each batch by POST when the batch has ended, as GET /v1/batches/{id} shows it; "
            "a receiver that does not answer with 2xx is told again, with growing pauses",
            extra={"metavar": "URL"},
        ),
    ] = None
    batch_webhook_key_file: Annotated[
        str | None,
        Meta(
            description="file with the key that signs these requests (HMAC-SHA256, standardwebhooks.com), so that "
            "the receiver can trust them (default: they are not signed)",
            extra={"metavar": "FILE"},
        ),
    ] = None
