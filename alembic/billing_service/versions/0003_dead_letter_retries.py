"""Dead letters are retried in sequence."""

from __future__ import annotations

from alembic import op

from shared.inbox import migrations as inbox

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    inbox.upgrade_2(op)


def downgrade() -> None:
    inbox.downgrade_2(op)
