"""Who decided about a charge that waited for a person, and why."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        ALTER TABLE charge
            ADD COLUMN decided_at timestamptz, ADD COLUMN decided_by text, ADD COLUMN decision_reason text,
            ADD CONSTRAINT ck_charge_decision_whole CHECK (num_nulls(decided_at, decided_by, decision_reason) IN (0, 3))
    """)


def downgrade() -> None:
    op.execute("""
        ALTER TABLE charge DROP CONSTRAINT ck_charge_decision_whole,
            DROP COLUMN decided_at, DROP COLUMN decided_by, DROP COLUMN decision_reason
    """)
