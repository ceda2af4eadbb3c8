"""Scheduler, step loop, engine process and its client."""
