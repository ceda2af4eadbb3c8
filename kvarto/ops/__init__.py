"""The op set behind one signature: `reference/` is PyTorch on any device."""
