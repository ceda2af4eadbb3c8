"""Every op in plain PyTorch: slow, obvious, the oracle."""
