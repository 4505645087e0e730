"""Checksums of the bytes of files and of results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    for table in ("parts", "segments"):
        op.add_column(table, sa.Column("crc", Big))
