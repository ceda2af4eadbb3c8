"""What `EngineClient.submit` gives: the outputs of some prompts as they come, and the way to stop them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from kvarto.engine.outputs import ChoiceOutput


class Generation:
    """Outputs of all choices of prompts that were submitted together, in order of arrival.

    Leaving it early cancels what still runs: `async with client.submit(...) as generation: ...`.
    """

    def __init__(self, num_choices: int, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._num_unfinished = num_choices
        self._outputs: deque[ChoiceOutput] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: ChoiceOutput) -> None:
        """For the client: something came."""
        self._outputs.append(output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """For the client: nothing more comes; the reader gets what came before, then the error."""
        self._error = error
        self._news.set()

    async def batch(self) -> list[ChoiceOutput]:
        """All that has come since the last call, at least one output; empty once every choice has ended.

        Raises what `fail` was given: a RequestError, or EngineError when the engine is at fault.
        """
        while not self._outputs:
            if self._num_unfinished == 0:
                return []
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        outputs = list(self._outputs)
        self._outputs.clear()
        self._num_unfinished -= sum(output.finish_reason is not None for output in outputs)
        return outputs

    def cancel(self) -> None:
        """Stop whatever still runs. Legal at any time, also twice."""
        self._cancel()

    async def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        while outputs := await self.batch():
            for output in outputs:
                yield output

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
