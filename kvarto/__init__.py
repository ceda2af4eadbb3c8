"""Kvarto serves and fine-tunes large language models inside a memory budget that you name."""
