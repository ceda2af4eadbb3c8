"""Arena, page pool, arbiter, transfers, ledger, offset planner, and the limits of this process."""
