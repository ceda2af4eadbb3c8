"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.models.demo import pull_demo


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file (98 MB), fetched once to the model cache."""
    return pull_demo()
