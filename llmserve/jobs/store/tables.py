"""The tables of the store, in SQLite or PostgreSQL.

servers   processes that may own batches, as long as they count as alive
files     the files of clients; their bytes are in parts
parts     the parts of each file in order: a name in the folder of the store, and how many of its bytes count
batches   the batches of clients
segments  files to which one owner of a batch appends results, and how many of their bytes are safe

To change the tables, change them here, and say in ADDED what the new version adds: a store of an earlier version gets
these columns when it is opened.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Integer, MetaData, String, Table, Text, UniqueConstraint

Big = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only rows of an INTEGER key

metadata = MetaData()

servers = Table(
    "servers",
    metadata,
    Column("generation", Big, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    sqlite_autoincrement=True,  # a generation is never used again
)
files = Table(
    "files",
    metadata,
    Column("seq", Big, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("key", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", Big, nullable=False),
    Column("created_at", Big, nullable=False),
    Column("expires_at", Big),
    sqlite_autoincrement=True,
)
parts = Table(
    "parts",
    metadata,
    Column("file_id", Text, ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("name", Text, nullable=False, index=True),
    Column("bytes", Big, nullable=False),
    Column("crc", Big),  # of these bytes; NULL: of an earlier version
)
batches = Table(
    "batches",
    metadata,
    Column("seq", Big, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("key", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False, index=True),
    Column("completion_window", Text, nullable=False),
    Column("metadata", Text),
    Column("output_expires_s", Big),
    Column("idempotency_key", Text),
    Column("asked", Text, nullable=False),  # digest of the request that made the job
    Column("status", Text, nullable=False, index=True),
    Column("epoch", Big, nullable=False),
    Column("owner", Big),
    Column("created_at", Big, nullable=False),
    Column("expires_at", Big, nullable=False),
    Column("in_progress_at", Big),
    Column("finalizing_at", Big),
    Column("completed_at", Big),
    Column("failed_at", Big),
    Column("expired_at", Big),
    Column("cancelling_at", Big),
    Column("cancelled_at", Big),
    Column("total", Big, nullable=False),
    Column("completed", Big, nullable=False),
    Column("failed", Big, nullable=False),
    Column("tokens", Big, nullable=False),  # of the prompts and answers of all lines, estimated
    Column("errors", Text),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    UniqueConstraint("key", "idempotency_key"),
    sqlite_autoincrement=True,
)
segments = Table(
    "segments",
    metadata,
    Column("batch_id", Text, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("epoch", Big, primary_key=True),
    Column("kind", Text, primary_key=True),  # output or error
    Column("name", Text, nullable=False, index=True),
    Column("safe_bytes", Big, nullable=False),
    Column("crc", Big),  # of these bytes; NULL: of an earlier version
)
version = Table(
    "alembic_version",  # the name that alembic gave it, by which the first stores were made
    metadata,
    Column("version_num", String(32), primary_key=True),
)

ADDED: dict[str, tuple[Column[Any], ...]] = {"0001": (), "0002": (parts.c.crc, segments.c.crc)}
"""The versions of these tables, the oldest first, and the columns that each has added to the one before."""
