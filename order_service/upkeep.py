"""Keeps the table of clients' keys short."""

from __future__ import annotations

from order_service import repository
from shared.lifecycle import READY
from shared.schedule import PeriodicService
from shared.unit_of_work import UnitsOfWork

_DELETED_AT_ONCE = 1000


class KeyUpkeep(PeriodicService):
    """Deletes keys past their retention. Several processes may have one: they pass over each other's rows."""

    name = "key-upkeep"

    def __init__(self, units: UnitsOfWork, retention_hours: float, interval_seconds: float = 300.0) -> None:
        super().__init__(interval_seconds)
        self._units = units
        self._retention_hours = retention_hours

    async def do(self) -> None:
        deleted = _DELETED_AT_ONCE
        while deleted == _DELETED_AT_ONCE and not self.stopping.is_set():
            async with self._units.begin() as work:
                deleted = await repository.delete_old_keys(work.session, self._retention_hours, _DELETED_AT_ONCE)
        self.readiness = READY
