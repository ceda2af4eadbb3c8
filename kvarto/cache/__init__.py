"""KV cache: page tables, prefix cache, forks."""
