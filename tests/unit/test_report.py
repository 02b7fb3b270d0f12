"""The demo's report says what happened, passes only what was proved, and needs nothing but its own file."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from chargeonce.audit import AuditResult, Kind, Sums
from chargeonce.demo.measure import Snapshot
from chargeonce.demo.story import Kill, Outage, PhaseRecord, Story, thinned
from chargeonce.ledgers import Inbox
from chargeonce.report import page, timeline, write_report

BEGAN = datetime(2026, 7, 1, tzinfo=UTC)


def proved() -> AuditResult:
    audit = AuditResult(BEGAN, settled=True, finding_limit=20, orders_confirmed=3, charges_captured=3)
    audit.payments_captured = 3
    audit.sums["JPY"] = Sums(Decimal(300), Decimal(300), Decimal(300))
    audit.inboxes = {
        "billing-service": Inbox(group="g", duplicates_absorbed=2, dead=4, dead_letters_open={"not_json": 4})
    }
    return audit


def wrong() -> AuditResult:
    audit = proved()
    audit.counts[Kind.DOUBLE_CHARGE] = 1
    audit.findings[Kind.DOUBLE_CHARGE].append(42)
    return audit


@pytest.fixture
def story() -> Story:
    story = Story(3, BEGAN, poison_sent=4, copies_sent=2, seconds=12.0, audit=proved())
    story.samples.extend(Snapshot(float(second), second, second, second, second) for second in range(10))
    story.kills.append(Kill("order-relay", 77, 3.0, 5, "events <in> flight: 5", 1.5))
    story.outages.append(Outage(5.0, 7.0, 20, 21))
    story.phases.append(PhaseRecord(1, "Kill & look", 0.0, 2.0, ["said <so>"]))
    return story


def test_the_json_report_has_what_was_counted_and_what_the_audit_found(story: Story, tmp_path: Path) -> None:
    write_report(story, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert (report["orders_confirmed"], report["charges_captured"], report["payments_captured"]) == (3, 3, 3)
    assert (report["duplicates_absorbed"], report["dead_letters"], report["poison_sent"]) == (2, 4, 4)
    assert (report["double_charges"], report["missing_charges"]) == (0, 0)
    assert (report["kills"], report["broker_restarts"]) == (1, 1)
    assert report["orders_total"] == report["provider_total"] == {"JPY": "300"}
    assert report["kill_details"][0]["in_flight"] == 5
    assert report["phases"][0]["lines"] == ["said <so>"]
    assert report["machine"]["cpus"] >= 1


def test_money_that_is_wrong_does_not_pass_and_names_its_orders(story: Story) -> None:
    story.audit = wrong()
    assert not story.passed
    report = story.as_json()
    assert (report["passed"], report["double_charges"]) == (False, 1)
    assert report["audit"]["findings"] == {"double_charges": {"order_ids": [42]}}
    assert "42" in page(story)
    assert 'class="verdict failed"' in page(story)


def test_a_demo_that_failed_does_not_pass_though_its_audit_is_clean(story: Story) -> None:
    story.failures.append("nothing was in flight")
    assert not story.passed
    assert "nothing was in flight" in story.verdict


def test_a_demo_without_audit_has_proved_nothing(story: Story) -> None:
    story.audit = None
    assert not story.passed
    assert story.as_json()["orders_confirmed"] is None
    assert "Not proved" in page(story)


def test_the_page_is_one_file_with_its_picture_and_every_kill_and_outage_in_it(story: Story) -> None:
    html = page(story)
    assert html.count("<svg") == 1
    assert "All 3 orders were charged exactly once." in html
    assert not re.search(r'(src|href)="(?!#)', html.replace('xlink:href="#', ""))
    assert "events &lt;in&gt; flight: 5" in html
    assert "said &lt;so&gt;" in html
    picture = timeline(story)
    assert "kill order-relay" in picture
    assert "Kafka down" in picture


def test_a_demo_that_ended_before_anything_was_counted_has_no_picture(story: Story) -> None:
    story.samples.clear()
    assert timeline(story) == ""
    assert "<svg" not in page(story)


def test_thinning_keeps_the_first_and_the_last_sample(story: Story) -> None:
    few = thinned(tuple(story.samples), 4)
    assert (few[0].at_seconds, few[-1].at_seconds) == (0.0, 9.0)
    assert len(few) <= 5
