"""Module patterns of `rank_pattern` and `alpha_pattern`: regular expressions that a stranger wrote.

Python's `re` backtracks, so twenty characters of pattern can take hours. Here a pattern is parsed as a subset
(literals, `.`, `\\d`, `\\w`, classes, groups, `|`, `*`, `+`, `?`, `{m,n}`, `^`, `$`), compiled to a list of
instructions, and all of its threads walk the text together: time is at most instructions times characters, and every
step is counted. What lies outside the subset is refused by name. Source: Thompson, CACM 11(6), 1968.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.adapters.pattern_parser import WORD, CharSet, Instruction, PatternParser, Split
from kvarto.core.errors import BadAdapter

MAX_PATTERNS = 4096
"""Writers that choose ranks by module list one key per module; real models have below 2,000."""
MAX_PATTERN_CHARS = 512
MAX_STEPS = 4_000_000
"""Thread steps for all matches of one table: under two seconds, where real ones take milliseconds."""

_PLAIN = WORD | frozenset(".-")


class PatternSet:
    """The keys of one pattern table, in their order.

    Raises UnsupportedAdapter for a pattern outside the subset, BadAdapter for one that is none, or too many.
    """

    def __init__(self, patterns: Sequence[str], what: str) -> None:
        if len(patterns) > MAX_PATTERNS:
            raise BadAdapter(f"`{what}` has {len(patterns)} keys; at most {MAX_PATTERNS} are read")
        self._what = what
        self._steps_left = MAX_STEPS
        self._programs: dict[str, list[Instruction] | None] = {}
        num_instructions = 0
        for pattern in patterns:
            if not 0 < len(pattern) <= MAX_PATTERN_CHARS or not pattern.isprintable():
                raise BadAdapter(
                    f"`{what}` has a key of {len(pattern)} characters; 1 to {MAX_PATTERN_CHARS} printable ones are read"
                )
            program = None if _PLAIN.issuperset(pattern) else PatternParser(pattern, what).compile()
            num_instructions += len(program or ())
            self._programs[pattern] = program
            if num_instructions > MAX_PATTERNS * 16:
                raise BadAdapter(f"the keys of `{what}` are too large together; list modules by name")

    def first_match(self, path: str) -> str | None:
        """The first pattern k for which `(.*\\.)?(k)$` matches the module path."""
        for pattern, program in self._programs.items():
            is_match = _is_plain_match(pattern, path) if program is None else self._is_match(program, path)
            if is_match:
                return pattern
        return None

    def _is_match(self, program: list[Instruction], path: str) -> bool:
        # A match may begin at the start, and after any dot, and has to reach the end.
        threads: set[int] = set()
        for position in range(len(path) + 1):
            if position == 0 or path[position - 1] == ".":
                threads.add(0)
            threads = self._follow(program, threads, position, len(path))
            if position < len(path):
                threads = _step(program, threads, path[position])
        return len(program) in threads

    def _follow(self, program: list[Instruction], threads: set[int], position: int, end: int) -> set[int]:
        """Every instruction that can be reached without taking a character."""
        reached: set[int] = set()
        waiting = list(threads)
        while waiting:
            at = waiting.pop()
            if at in reached:
                continue
            reached.add(at)
            instruction = program[at] if at < len(program) else None
            if isinstance(instruction, Split):
                waiting += instruction.targets
            elif instruction == ("^" if position == 0 else "") or (instruction == "$" and position == end):
                waiting.append(at + 1)
        self._steps_left -= len(reached)
        if self._steps_left < 0:
            raise BadAdapter(
                f"the keys of `{self._what}` take more than {MAX_STEPS} steps to match; list modules by name"
            )
        return reached


def _step(program: list[Instruction], threads: set[int], char: str) -> set[int]:
    taken: set[int] = set()
    for at in threads:
        instruction = program[at] if at < len(program) else None
        if isinstance(instruction, CharSet) and instruction.has(char):
            taken.add(at + 1)
    return taken


def _is_plain_match(pattern: str, path: str) -> bool:
    """As the general match, for patterns of letters, digits and dots alone, which most are."""
    start = len(path) - len(pattern)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    tail = path[start:]
    return tail == pattern or all(key in (".", char) for key, char in zip(pattern, tail, strict=True))
