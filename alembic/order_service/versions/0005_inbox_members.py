"""Members of a consumer group are on record, so that others are careful when one died."""

from __future__ import annotations

from alembic import op

from shared.inbox import migrations as inbox

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    inbox.upgrade_3(op)


def downgrade() -> None:
    inbox.downgrade_3(op)
