"""Which request kills engines? Strikes, as a plain decision without processes or clocks.

Requests in the step that died get a strike. With two they run alone, so the next death names the culprit, which is
never tried again. Because a request is computed the same way each time, one that runs alone past the place where it
last died is innocent of that death, and its strikes are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STRIKES_TO_RUN_ALONE = 2
STRIKES_WHEN_KILLED = 5
"""What is needed before a request is blamed for a SIGKILL. It comes from outside: from an operator, who may do so again
and again, or from a system short of memory, behind which a request may be."""


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    num_tokens_at_death: int = 0


class Suspects:
    """Strikes by request id. Ids that are forgotten cost nothing."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def strikes(self, request_id: str) -> int:
        """Deaths of which the request is suspected."""
        record = self._records.get(request_id)
        return 0 if record is None else record.strikes

    def runs_alone(self, request_id: str) -> bool:
        """Must its steps hold no other request?"""
        return self.strikes(request_id) >= STRIKES_TO_RUN_ALONE

    def died(self, num_tokens: Mapping[str, int], *, was_killed: bool = False) -> list[str]:
        """An engine died in a step that held these requests, with so many output tokens each. Gives the culprits.

        `was_killed`: somebody else ended it.
        """
        enough = STRIKES_WHEN_KILLED if was_killed else STRIKES_TO_RUN_ALONE
        culprits = [request_id for request_id in num_tokens if self.strikes(request_id) >= enough]
        for request_id, count in num_tokens.items():
            record = self._records.setdefault(request_id, _Record())
            record.strikes += 1
            record.num_tokens_at_death = count
        return culprits

    def advanced(self, request_id: str, num_tokens: int) -> bool:
        """The request has so many output tokens now. True when that clears a request that ran alone."""
        record = self._records.get(request_id)
        if record is None or record.strikes < STRIKES_TO_RUN_ALONE or num_tokens <= record.num_tokens_at_death:
            return False
        del self._records[request_id]
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._records.pop(request_id, None)
