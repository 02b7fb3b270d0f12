"""Parked events end: published after a release, or discarded."""

from __future__ import annotations

from alembic import op

from shared.outbox import migrations as outbox

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    outbox.upgrade_2(op)


def downgrade() -> None:
    outbox.downgrade_2(op)
