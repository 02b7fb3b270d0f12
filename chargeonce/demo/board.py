"""What a person sees of the demo: the phases as lines, and below them one live board; without a terminal lines only."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from chargeonce.demo.measure import Snapshot


class Board:
    """Phases as lines that stay, counts in place below them."""

    def __init__(self, console: Console, orders: int, phases: int) -> None:
        self._console = console
        self._orders = orders
        self._phases = phases
        self._snapshot = Snapshot()
        self._lines: list[str] = []
        self._kills = 0
        self._broker = "starting"
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, number: int, title: str, lines: list[str]) -> None:
        """Tell that a phase begins; what is said in it is added to `lines`."""
        self._lines = lines
        self._print(f"[bold]{number:>2}/{self._phases}  {title}[/bold]")

    def say(self, text: str, style: str = "") -> None:
        """Tell what happened in the present phase."""
        self._lines.append(text)
        self._print(f"       {text}", style)

    def done(self, seconds: float) -> None:
        """Tell that the present phase has ended."""
        self._print(f"       {seconds:.1f} s", "dim")

    def show(self, snapshot: Snapshot | None = None, *, kills: int | None = None, broker: str | None = None) -> None:
        """Update the board."""
        self._snapshot = snapshot or self._snapshot
        self._kills = self._kills if kills is None else kills
        self._broker = broker or self._broker
        if self._live:
            self._live.update(self._render(), refresh=True)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style or None, highlight=False, soft_wrap=not self._console.is_terminal)

    def _render(self) -> RenderableType:
        seen = self._snapshot
        bars = Table.grid(padding=(0, 2))
        for name, count in (("orders", seen.orders), ("published", seen.published), ("charged", seen.charged)):
            bars.add_row(name, ProgressBar(total=self._orders, completed=count, width=40), f"{count:,}")
        facts = Table.grid(padding=(0, 2))
        broker = self._broker if self._broker == "up" else f"[bold red]{self._broker}[/bold red]"
        facts.add_row(
            f"duplicates absorbed {seen.duplicates:,}",
            f"dead letters {seen.dead_letters:,}",
            f"kills {self._kills}",
            f"broker {broker}",
            f"{seen.at_seconds:.0f} s",
        )
        return Group("", bars, facts)
