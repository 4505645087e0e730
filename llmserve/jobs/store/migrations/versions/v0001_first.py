"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "servers",
        sa.Column("generation", Big, primary_key=True, autoincrement=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "files",
        sa.Column("seq", Big, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("bytes", Big, nullable=False),
        sa.Column("created_at", Big, nullable=False),
        sa.Column("expires_at", Big),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "parts",
        sa.Column("file_id", sa.Text, sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("place", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, index=True),
        sa.Column("bytes", Big, nullable=False),
    )
    _create_batches()
    op.create_table(
        "segments",
        sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("epoch", Big, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, index=True),
        sa.Column("safe_bytes", Big, nullable=False),
    )


def _create_batches() -> None:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    op.create_table(
        "batches",
        sa.Column("seq", Big, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("key", "endpoint")),
        sa.Column("input_file_id", sa.Text, nullable=False, index=True),
        sa.Column("completion_window", sa.Text, nullable=False),
        sa.Column("metadata", sa.Text),
        sa.Column("output_expires_s", Big),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("asked", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False, index=True),
        sa.Column("epoch", Big, nullable=False),
        sa.Column("owner", Big),
        sa.Column("created_at", Big, nullable=False),
        sa.Column("expires_at", Big, nullable=False),
        *(sa.Column(f"{name}_at", Big) for name in times),
        *(sa.Column(name, Big, nullable=False) for name in ("total", "completed", "failed", "tokens")),
        *(sa.Column(name, sa.Text) for name in ("errors", "output_file_id", "error_file_id")),
        sa.UniqueConstraint("key", "idempotency_key"),
        sqlite_autoincrement=True,
    )
