"""Compile a module pattern to a list of instructions for pattern.py: recursive descent over the subset it allows."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarto.core.errors import BadAdapter, UnsupportedAdapter

MAX_INSTRUCTIONS = 2048
MAX_DEPTH = 32

WORD = frozenset(string.ascii_letters + string.digits + "_")
_DIGITS = frozenset(string.digits)
_ESCAPES = {"d": (_DIGITS, False), "D": (_DIGITS, True), "w": (WORD, False), "W": (WORD, True)}


@dataclass(slots=True)
class CharSet:
    """One character in `chars`, or not in them."""

    chars: frozenset[str]
    is_negated: bool = False

    def has(self, char: str) -> bool:
        """Whether the character may stand here."""
        return (char in self.chars) != self.is_negated


@dataclass(slots=True)
class Split:
    """Go on at each of `targets`."""

    targets: list[int] = field(default_factory=list)


Instruction = CharSet | Split | str
"""A string is an anchor: `^` or `$`."""


class PatternParser:
    """Recursive descent over one pattern; each rule returns its piece of the program, with targets relative to it."""

    def __init__(self, pattern: str, what: str) -> None:
        self._pattern = pattern
        self._what = what
        self._at = 0
        self._depth = 0

    def compile(self) -> list[Instruction]:
        """The whole pattern; its end is the place after the last instruction."""
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

    def _alternatives(self) -> list[Instruction]:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._take()
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        # split | branch, jump to the end | branch, jump to the end | ...
        program: list[Instruction] = [Split()]
        starts, jumps = [], []
        for branch in branches:
            starts.append(len(program))
            program += _moved(branch, len(program))
            jumps.append(len(program))
            program.append(Split())
        program[0] = Split(starts)
        for jump in jumps:
            program[jump] = Split([len(program)])
        return self._bounded(program)

    def _sequence(self) -> list[Instruction]:
        program: list[Instruction] = []
        while self._peek() not in ("", "|", ")"):
            program += _moved(self._repeated(), len(program))
            self._bounded(program)
        return program

    def _bounded(self, program: list[Instruction]) -> list[Instruction]:
        if len(program) > MAX_INSTRUCTIONS:
            raise self._bad(f"it needs more than {MAX_INSTRUCTIONS} steps; list modules by name")
        return program

    def _repeated(self) -> list[Instruction]:
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

    def _copies(self, piece: list[Instruction], least: int, most: int | None) -> list[Instruction]:
        if (max(least, most or 0) + 1) * (len(piece) + 1) > MAX_INSTRUCTIONS:
            raise self._bad(f"it needs more than {MAX_INSTRUCTIONS} steps; list modules by name")
        program: list[Instruction] = []
        for _ in range(least):
            program += _moved(piece, len(program))
        if most is None:
            start = len(program)
            program += [Split([start + 1, start + len(piece) + 2]), *_moved(piece, start + 1), Split([start])]
            return program
        end = len(program) + (most - least) * (len(piece) + 1)
        for _ in range(most - least):
            program.append(Split([len(program) + 1, end]))
            program += _moved(piece, len(program))
        return program

    def _atom(self) -> list[Instruction]:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return [self._class()]
        if char == ".":
            return [CharSet(frozenset("\n"), True)]
        if char == "\\":
            return [self._escape()]
        if char in "^$":
            return [char]
        if char in "*+?{":
            raise self._bad(f"`{char}` repeats nothing")
        return [CharSet(frozenset(char))]

    def _group(self) -> list[Instruction]:
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

    def _escape(self) -> CharSet:
        char = self._take()
        if char in _ESCAPES:
            return CharSet(*_ESCAPES[char])
        if char.isalnum():
            raise self._unsupported("\\" + char)
        return CharSet(frozenset(char))

    def _class(self) -> CharSet:
        is_negated = self._peek() == "^"
        self._at += is_negated
        chars: set[str] = set()
        while self._peek() != "]" or not chars:
            chars |= self._class_item()
        self._take()
        return CharSet(frozenset(chars), is_negated)

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


def _moved(piece: Sequence[Instruction], by: int) -> list[Instruction]:
    return [Split([t + by for t in i.targets]) if isinstance(i, Split) else i for i in piece]
