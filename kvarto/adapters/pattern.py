"""Module patterns of `rank_pattern` and `alpha_pattern`: regular expressions that a stranger wrote.

Python's `re` backtracks, so twenty characters of pattern can take hours. Here a pattern is parsed as a subset
(literals, `.`, `\\d`, `\\w`, classes, groups, `|`, `*`, `+`, `?`, `{m,n}`, `^`, `$`), compiled to a list of
instructions, and all of its threads walk the text together: time is at most instructions times characters, and every
step is counted.
What lies outside the subset is refused by name. Source: Thompson, CACM 11(6), 1968; Pike's virtual machine.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarto.core.errors import BadAdapter, UnsupportedAdapter

MAX_PATTERNS = 4096
"""Writers that choose ranks by module list one key per module; real models have below 2,000."""
MAX_PATTERN_CHARS = 512
MAX_INSTRUCTIONS = 2048
MAX_DEPTH = 32
MAX_STEPS = 20_000_000
"""Thread steps for all matches of one adapter: seconds, where real ones take milliseconds."""

_WORD = frozenset(string.ascii_letters + string.digits + "_")
_DIGITS = frozenset(string.digits)
_PLAIN = _WORD | frozenset(".-")
_ESCAPES = {"d": (_DIGITS, False), "D": (_DIGITS, True), "w": (_WORD, False), "W": (_WORD, True)}


@dataclass(slots=True)
class _Set:
    """One character in `chars`, or not in them."""

    chars: frozenset[str]
    is_negated: bool = False

    def has(self, char: str) -> bool:
        return (char in self.chars) != self.is_negated


@dataclass(slots=True)
class _Split:
    """Go on at each of `targets`."""

    targets: list[int] = field(default_factory=list)


_Instruction = _Set | _Split | str
"""A string is an anchor: `^` or `$`."""


class PatternSet:
    """The keys of one pattern table, in their order.

    Raises UnsupportedAdapter for a pattern outside the subset, BadAdapter for one that is none, or too many.
    """

    def __init__(self, patterns: Sequence[str], what: str) -> None:
        if len(patterns) > MAX_PATTERNS:
            raise BadAdapter(f"`{what}` has {len(patterns)} keys; at most {MAX_PATTERNS} are read")
        self._what = what
        self._steps_left = MAX_STEPS
        self._programs: dict[str, list[_Instruction] | None] = {}
        num_instructions = 0
        for pattern in patterns:
            program = None if _PLAIN.issuperset(pattern) and pattern else _Parser(pattern, what).compile()
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

    def _is_match(self, program: list[_Instruction], path: str) -> bool:
        # A match may begin at the start, and after any dot, and has to reach the end.
        threads: set[int] = set()
        for position in range(len(path) + 1):
            if position == 0 or path[position - 1] == ".":
                threads.add(0)
            threads = self._follow(program, threads, position, len(path))
            if position < len(path):
                threads = _step(program, threads, path[position])
        return len(program) in threads

    def _follow(self, program: list[_Instruction], threads: set[int], position: int, end: int) -> set[int]:
        """Every instruction that can be reached without taking a character."""
        reached: set[int] = set()
        waiting = list(threads)
        while waiting:
            at = waiting.pop()
            if at in reached:
                continue
            reached.add(at)
            instruction = program[at] if at < len(program) else None
            if isinstance(instruction, _Split):
                waiting += instruction.targets
            elif instruction == ("^" if position == 0 else "") or (instruction == "$" and position == end):
                waiting.append(at + 1)
        self._steps_left -= len(reached)
        if self._steps_left < 0:
            raise BadAdapter(
                f"the keys of `{self._what}` take more than {MAX_STEPS} steps to match; list modules by name"
            )
        return reached


def _step(program: list[_Instruction], threads: set[int], char: str) -> set[int]:
    taken: set[int] = set()
    for at in threads:
        instruction = program[at] if at < len(program) else None
        if isinstance(instruction, _Set) and instruction.has(char):
            taken.add(at + 1)
    return taken


def _is_plain_match(pattern: str, path: str) -> bool:
    """As the general match, for patterns of letters, digits and dots alone, which most are."""
    start = len(path) - len(pattern)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    tail = path[start:]
    return tail == pattern or all(key in (".", char) for key, char in zip(pattern, tail, strict=True))


class _Parser:
    """Recursive descent over one pattern; each rule returns its piece of the program, with targets relative to it."""

    def __init__(self, pattern: str, what: str) -> None:
        self._pattern = pattern
        self._what = what
        self._at = 0
        self._depth = 0

    def compile(self) -> list[_Instruction]:
        """The whole pattern; its end is the place after the last instruction."""
        if not self._pattern or len(self._pattern) > MAX_PATTERN_CHARS or not self._pattern.isprintable():
            raise self._bad(f"1 to {MAX_PATTERN_CHARS} printable characters are read")
        program = self._alternatives()
        if self._at < len(self._pattern):
            raise self._bad("a `)` closes nothing")
        return program

    def _bad(self, why: str) -> BadAdapter:
        return BadAdapter(f"`{self._what}`: the pattern `{self._pattern:.80}` does not compile: {why}")

    def _unsupported(self, construct: str) -> UnsupportedAdapter:
        return UnsupportedAdapter(
            f"`{self._what}`: the pattern `{self._pattern:.80}` uses `{construct}`, which is not built in because it "
            "cannot be matched in bounded time; list modules by name, or use `.`, `*`, `|`, classes and groups"
        )

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._bad("it ends too early")
        self._at += 1
        return char

    def _alternatives(self) -> list[_Instruction]:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._take()
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        # split | branch, jump to the end | branch, jump to the end | ...
        program: list[_Instruction] = [_Split()]
        starts, jumps = [], []
        for branch in branches:
            starts.append(len(program))
            program += _moved(branch, len(program))
            jumps.append(len(program))
            program.append(_Split())
        program[0] = _Split(starts)
        for jump in jumps:
            program[jump] = _Split([len(program)])
        return self._bounded(program)

    def _sequence(self) -> list[_Instruction]:
        program: list[_Instruction] = []
        while self._peek() not in ("", "|", ")"):
            program += _moved(self._repeated(), len(program))
            self._bounded(program)
        return program

    def _bounded(self, program: list[_Instruction]) -> list[_Instruction]:
        if len(program) > MAX_INSTRUCTIONS:
            raise self._bad(f"it needs more than {MAX_INSTRUCTIONS} steps; list modules by name")
        return program

    def _repeated(self) -> list[_Instruction]:
        piece = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return piece
        if piece and isinstance(piece[0], str):
            raise self._bad("an anchor cannot be repeated")
        if self._peek() == "?":  # a lazy match finds the same words
            self._take()
        if self._peek() and self._peek() in "+*?":
            raise self._unsupported(self._pattern[self._at - 1 : self._at + 1])
        return self._copies(piece, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """How often the atom before may stand; None where nothing says so."""
        char = self._peek()
        if not char or char not in "*+?{":
            return None
        self._take()
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : end].partition(",")
        if end < 0 or not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in (low, high or "0")):
            raise self._bad("`{` needs bounds such as `{2}` or `{1,3}`; write `\\{` for the character")
        self._at = end + 1
        least, most = int(low), (int(high) if high else None) if comma else int(low)
        if most is not None and most < least:
            raise self._bad(f"`{{{least},{most}}}` is empty")
        return least, most

    def _copies(self, piece: list[_Instruction], least: int, most: int | None) -> list[_Instruction]:
        if (max(least, most or 0) + 1) * (len(piece) + 1) > MAX_INSTRUCTIONS:
            raise self._bad(f"it needs more than {MAX_INSTRUCTIONS} steps; list modules by name")
        program: list[_Instruction] = []
        for _ in range(least):
            program += _moved(piece, len(program))
        if most is None:
            start = len(program)
            program += [_Split([start + 1, start + len(piece) + 2]), *_moved(piece, start + 1), _Split([start])]
            return program
        end = len(program) + (most - least) * (len(piece) + 1)
        for _ in range(most - least):
            program.append(_Split([len(program) + 1, end]))
            program += _moved(piece, len(program))
        return program

    def _atom(self) -> list[_Instruction]:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return [self._class()]
        if char == ".":
            return [_Set(frozenset("\n"), True)]
        if char == "\\":
            return [self._escape()]
        if char in "^$":
            return [char]
        if char in "*+?{":
            raise self._bad(f"`{char}` repeats nothing")
        return [_Set(frozenset(char))]

    def _group(self) -> list[_Instruction]:
        if self._peek() == "?":
            if self._pattern[self._at : self._at + 2] != "?:":
                raise self._unsupported("(" + self._pattern[self._at : self._at + 2])
            self._at += 2
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._bad(f"groups are nested deeper than {MAX_DEPTH}")
        program = self._alternatives()
        if self._peek() != ")":
            raise self._bad("a `(` is never closed")
        self._take()
        self._depth -= 1
        return program

    def _escape(self) -> _Set:
        char = self._take()
        if char in _ESCAPES:
            return _Set(*_ESCAPES[char])
        if char.isalnum():
            raise self._unsupported("\\" + char)
        return _Set(frozenset(char))

    def _class(self) -> _Set:
        is_negated = self._peek() == "^"
        self._at += is_negated
        chars: set[str] = set()
        while self._peek() != "]" or not chars:
            chars |= self._class_item()
        self._take()
        return _Set(frozenset(chars), is_negated)

    def _class_item(self) -> frozenset[str]:
        first = self._take()
        if first == "[":
            raise self._unsupported("[[")
        if first == "\\":
            item = self._escape()
            if item.is_negated:
                raise self._unsupported("[\\" + self._pattern[self._at - 1])
            if len(item.chars) > 1:
                return item.chars
            (first,) = item.chars
        if self._peek() != "-" or self._pattern[self._at + 1 : self._at + 2] in ("]", ""):
            return frozenset(first)
        self._take()
        last = self._take()
        if not (first.isascii() and last.isascii() and last.isalnum() and first <= last):
            raise self._bad(f"`{first}-{last}` is no range")
        return frozenset(map(chr, range(ord(first), ord(last) + 1)))


def _moved(piece: Sequence[_Instruction], by: int) -> list[_Instruction]:
    return [_Split([t + by for t in i.targets]) if isinstance(i, _Split) else i for i in piece]
