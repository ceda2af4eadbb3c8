"""Runs the benchmarks one after another: all files of this folder, or those whose path contains one of the words given.

Each file answers one question by one command, `python -m benchmarks.NAME`, and ends with one JSON line. A folder with
a `__main__.py` is a command with arguments of its own (`python -m benchmarks.peers`), which this does not guess.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def modules(words: list[str]) -> list[str]:
    """Names of the modules to run, in order."""
    commands = [path.parent for path in FOLDER.glob("*/__main__.py")]
    files = (path for path in FOLDER.rglob("*.py") if not path.name.startswith("_"))
    paths = sorted(path for path in files if not any(path.is_relative_to(folder) for folder in commands))
    names = [".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in paths]
    return [name for name in names if not words or any(word in name for word in words)]


def main() -> int:
    """Run them; the number that failed is the exit code."""
    names = modules(sys.argv[1:])
    if not names:
        print(f"no benchmark's name contains {' or '.join(sys.argv[1:])}; there are {', '.join(modules([]))}")
        return 2
    num_failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        num_failed += subprocess.run([sys.executable, "-m", name], cwd=FOLDER.parent, check=False).returncode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
