"""The demo's report: `report.json` for machines, `report.html` with a timeline picture for people, in one file each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from chargeonce.audit import EXPLANATIONS, AuditResult, Kind
from chargeonce.demo.story import Story, machine, thinned
from shared.money import format_amount

_PICTURE_SAMPLES = 2000


def write_report(story: Story, directory: Path) -> Sequence[Path]:
    """Write both reports and return their paths. A reader never sees half a file."""
    contents = {
        directory / "report.json": json.dumps(story.as_json(), indent=2) + "\n",
        directory / "report.html": page(story),
    }
    for path, content in contents.items():
        aside = path.with_suffix(".new")
        aside.write_text(content, encoding="utf-8")
        aside.rename(path)
    return tuple(contents)


def timeline(story: Story) -> str:
    """An SVG picture of what was counted over time; empty when nothing was."""
    if not story.samples:
        return ""
    picture = io.StringIO()
    draw(story).savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    text = picture.getvalue()
    return text[text.index("<svg") :]


def draw(story: Story) -> Figure:
    """Orders, published events, charges and duplicates over time, with every kill and every time without broker."""
    samples = thinned(tuple(story.samples), _PICTURE_SAMPLES)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.add_subplot()
    times = [sample.at_seconds for sample in samples]
    axes.plot(times, [sample.orders for sample in samples], label="orders confirmed", color="#1f77b4", linewidth=2)
    axes.plot(times, [sample.published for sample in samples], label="events published", color="#ff7f0e")
    axes.plot(times, [sample.charged for sample in samples], label="charges captured", color="#2ca02c", linewidth=2)
    axes.plot(
        times, [sample.duplicates for sample in samples], label="duplicates absorbed", color="#7f7f7f", linestyle=":"
    )
    for number, outage in enumerate(story.outages):
        axes.axvspan(
            outage.began_at_seconds,
            outage.ended_at_seconds,
            color="#d62728",
            alpha=0.12,
            label="Kafka down" if number == 0 else None,
        )
    top = max(sample.orders for sample in samples) or 1
    for kill in story.kills:
        axes.axvline(kill.at_seconds, color="#d62728", linestyle="--", linewidth=1)
        axes.text(kill.at_seconds, top, f" kill {kill.process}", rotation=90, va="top", ha="right", fontsize=8)
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def page(story: Story) -> str:
    """The whole HTML page; it needs no other file and no network."""
    return _PAGE.format(
        state="passed" if story.passed else "failed",
        verdict=escape(story.verdict),
        facts=_facts(story),
        money=_money(story.audit) if story.audit else "",
        findings=_findings(story.audit) if story.audit else "",
        picture=timeline(story),
        broken=_broken(story),
        phases=_phases(story),
        machine=escape(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine().items())),
        began=escape(story.began.isoformat(sep=" ", timespec="seconds")),
        seconds=f"{story.seconds:.0f}",
    )


def _facts(story: Story) -> str:
    audit = story.audit
    facts: list[tuple[str, object]] = [("kills", len(story.kills)), ("broker outages", len(story.outages))]
    if audit is not None:
        facts = [
            ("orders confirmed", audit.orders_confirmed),
            ("charges captured", audit.charges_captured),
            ("double charges", audit.counts[Kind.DOUBLE_CHARGE]),
            ("missing charges", audit.counts[Kind.MISSING_CHARGE]),
            ("duplicates absorbed", audit.duplicates_absorbed),
            (f"dead letters of {story.poison_sent} sent", audit.dead_letters.total()),
            *facts,
            ("answers lost and repeated", f"{story.answers_lost} / {story.answers_repeated}"),
        ]
    return "".join(f"<li><b>{escape(str(value))}</b> {escape(name)}</li>" for name, value in facts)


def _money(audit: AuditResult) -> str:
    rows = (
        (
            currency,
            format_amount(sums.orders, currency),
            format_amount(sums.charges_captured, currency),
            format_amount(sums.provider_captured, currency),
        )
        for currency, sums in sorted(audit.sums.items())
    )
    return _table(("currency", "orders", "charged", "paid at the provider"), rows)


def _findings(audit: AuditResult) -> str:
    rows = (
        (kind.replace("_", " "), EXPLANATIONS[kind], audit.counts[kind], ", ".join(map(str, order_ids)))
        for kind, order_ids in sorted(audit.findings.items())
    )
    letters = _table(("dead letters", "reason"), ((count, why) for why, count in sorted(audit.dead_letters.items())))
    if not audit.findings:
        return letters
    return _table(("found", "meaning", "orders", "ids (first ones)"), rows) + letters


def _broken(story: Story) -> str:
    kills = _table(
        ("at", "killed", "what was in flight", "back after"),
        (
            (f"{kill.at_seconds:.1f} s", kill.process, kill.in_flight_words, f"{kill.back_after_seconds:.1f} s")
            for kill in story.kills
        ),
    )
    outages = _table(
        ("at", "Kafka down for", "orders accepted meanwhile", "events that waited"),
        (
            (
                f"{outage.began_at_seconds:.1f} s",
                f"{outage.ended_at_seconds - outage.began_at_seconds:.1f} s",
                outage.orders_accepted,
                outage.events_waiting,
            )
            for outage in story.outages
        ),
    )
    return kills + outages


def _phases(story: Story) -> str:
    return _table(
        ("phase", "", "time"),
        (
            (
                f"{phase.number}. {phase.title}",
                "; ".join(phase.lines),
                "not finished" if phase.seconds is None else f"{phase.seconds:.1f} s",
            )
            for phase in story.phases
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return ""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>{body}</table>"


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>chargeonce demo: {state}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; background: #fff }}
h1 {{ font-size: 1.4rem }}
h2 {{ font-size: 1.1rem; margin-top: 2rem }}
.verdict {{ padding: .8rem 1rem; border-left: .4rem solid; font-size: 1.1rem }}
.passed {{ border-color: #2ca02c; background: #eaf7ea }}
.failed {{ border-color: #d62728; background: #fdecec }}
ul.facts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr));
  gap: .4rem; padding: 0; list-style: none }}
table {{ border-collapse: collapse; margin: 1rem 0; width: 100% }}
th, td {{ text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }}
td {{ font-variant-numeric: tabular-nums }}
svg {{ max-width: 100%; height: auto }}
footer {{ color: #666; font-size: .9rem; margin-top: 2rem }}
</style>
<h1>Was every order charged exactly once?</h1>
<p class="verdict {state}">{verdict}</p>
<ul class="facts">{facts}</ul>
<h2>The three ledgers</h2>
{money}{findings}
<h2>What happened</h2>
{picture}
<h2>What was broken</h2>
{broken}
<h2>Phases</h2>
{phases}
<h2>What to try next</h2>
<p><code>.venv/bin/chargeonce up</code> runs it all in the foreground: create orders with curl, kill what you like, then
<code>.venv/bin/chargeonce audit</code>. <code>.venv/bin/chargeonce demo --orders 5000</code> does the same as here with
more of everything.</p>
<footer>{began}, {seconds} s; {machine}</footer>
</html>
"""
