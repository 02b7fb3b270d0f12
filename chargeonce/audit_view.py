"""The audit's result for people: the three sums, what was found, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chargeonce.audit_result import AuditResult
from chargeonce.judgement import EXPLANATIONS, MEANINGS, Age, Kind
from shared.money import format_amount


def audit_view(result: AuditResult) -> RenderableType:
    """Return sums, counts, findings and verdict, to be printed by rich."""
    style = "bold red" if not result.clean else "bold yellow" if result.late else "bold green"
    return Group(audit_tables(result), Text(result.verdict(), style=style))


def audit_tables(result: AuditResult) -> RenderableType:
    """Return sums, counts and findings, to be printed by rich."""
    return Group(_sums(result), _counts(result), *_findings(result), *_waiting(result))


def _sums(result: AuditResult) -> RenderableType:
    table = Table(title="Money", title_justify="left", title_style="bold")
    table.add_column("currency")
    for name in ("orders", "charged", "provider", "declined", "on its way", "of it late", "overdue"):
        table.add_column(name, justify="right")
    for currency, sums in sorted(result.sums.items()):
        agree = sums.orders == sums.charges_captured + sums.declined and sums.charges_captured == sums.provider_captured
        amounts = (
            *(sums.orders, sums.charges_captured, sums.provider_captured, sums.declined),
            *(sums.pending, sums.late, sums.overdue),
        )
        table.add_row(
            currency,
            *(format_amount(amount, currency) for amount in amounts),
            style="" if agree and not sums.overdue else "bold red",
        )
    return table


def _counts(result: AuditResult) -> RenderableType:
    table = Table(title="Counts", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "orders confirmed": result.orders_confirmed,
        "of these on their way": result.pending,
        "of these late": result.late,
        "charges captured": result.charges_captured,
        "charges declined": result.charges_declined,
        "payments captured at the provider": result.payments_captured,
        "duplicates absorbed": result.duplicates_absorbed,
        "dead letters open": result.dead_letters.total(),
    }
    for name, count in rows.items():
        table.add_row(name, str(count))
    for reason, count in sorted(result.dead_letters.items()):
        table.add_row(f"    {reason}", str(count))
    for kind in Kind:
        count = result.counts[kind]
        table.add_row(kind.replace("_", " "), str(count), style="bold red" if count else "")
    return table


def _waiting(result: AuditResult) -> Iterator[RenderableType]:
    for waiting, order_ids in sorted(result.waiting_orders.items()):
        style = "red" if waiting.age is Age.OVERDUE else "yellow"
        ids = _ids(order_ids, result.waiting[waiting])
        yield Text(f"{waiting.age}: {MEANINGS[waiting.place]}\n  orders {ids}", style=style)


def _findings(result: AuditResult) -> Iterator[RenderableType]:
    for kind, order_ids in sorted(result.findings.items()):
        if kind is Kind.OVERDUE:
            continue  # told by the place where they wait
        ids = _ids(order_ids, result.counts[kind])
        yield Text(f"{kind.replace('_', ' ')}: {EXPLANATIONS[kind]}\n  orders {ids}", style="red")


def _ids(order_ids: Sequence[int], count: int) -> str:
    more = count - len(order_ids)
    return ", ".join(map(str, order_ids)) + (f" and {more} more" if more else "")
