"""A load generator for OpenAI-compatible servers: workload, client, run, report."""
