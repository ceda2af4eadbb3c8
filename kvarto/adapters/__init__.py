"""LoRA adapters: files, validated descriptions, exact pages, content digests."""
