"""From numbers to decisions: layout, costs, capacity. Nothing here runs anything."""
