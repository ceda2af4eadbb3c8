"""What `EngineClient.submit` gives: the outputs of some prompts as they come, and the way to stop them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from kvarto.engine.outputs import ChoiceOutput


class Generation:
    """Outputs of all choices of prompts that were submitted together, in order of arrival.

    A reader waits for them (`batch`, or a loop), or is called when some came (`listen`) and takes them.

    Leaving it early cancels what still runs: `async with client.submit(...) as generation: ...`.
    """

    def __init__(self, num_choices: int, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._num_unfinished = num_choices
        self._outputs: list[ChoiceOutput] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._on_news: Callable[[], None] = self._news.set

    # --- for the client ---------------------------------------------------------------------------------------------

    def put(self, output: ChoiceOutput) -> bool:
        """Something came. True: the first since the last `take`; `announce` it, after what came together with it."""
        self._outputs.append(output)
        return len(self._outputs) == 1

    def announce(self) -> None:
        """Tell the reader that something came."""
        self._on_news()

    def fail(self, error: Exception) -> None:
        """Nothing more comes; the reader gets what came before, then the error."""
        self._error = error
        self.announce()

    # --- for the reader ---------------------------------------------------------------------------------------------

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` from now on when something came or failed, after all that came together; it may not raise."""
        self._on_news = on_news

    def take(self) -> list[ChoiceOutput]:
        """All that has come since the last call."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self._num_unfinished -= output.finish_reason is not None
        return outputs

    @property
    def is_over(self) -> bool:
        """Was everything taken, and comes nothing more?"""
        return not self._outputs and (self._num_unfinished == 0 or self._error is not None)

    def check(self) -> None:
        """Raise what `fail` was given, if choices are missing: a RequestError, or EngineError when the engine is at
        fault.
        """
        if self._error is not None and self._num_unfinished > 0:
            raise self._error

    async def arrival(self) -> None:
        """Wait until there is something to take, or nothing more comes. Raises as `check`, when there is nothing."""
        while not self._outputs and not self.is_over:
            self._news.clear()
            await self._news.wait()
        if not self._outputs:
            self.check()

    async def batch(self) -> list[ChoiceOutput]:
        """All that has come since the last call, at least one output; empty once every choice has ended.

        Raises as `check`, after what came before.
        """
        await self.arrival()
        return self.take()

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
