"""Units, errors, ids, and the plain values that rooms hand to each other. Imports nothing above it."""
