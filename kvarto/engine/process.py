"""The engine process: `python -m kvarto.engine.process --fd N`. Its settings are the first frame on the socket.

It loads, says `Ready` or `LoadFailed`, runs until `Shutdown`, and ends when the other end of the socket closes. What
it cannot explain goes to stderr with a traceback; what a person should read goes to the server as a message.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import signal
import socket
import sys

from kvarto.core.errors import EngineError, KvartoError
from kvarto.engine.assemble import build
from kvarto.engine.channel import EXIT_MALFORMED, SocketChannel
from kvarto.engine.config import EngineConfig
from kvarto.engine.engine import Engine
from kvarto.engine.malloc import keep_heap_small
from kvarto.engine.messages import LoadFailed, Phase, Progress

EXIT_LOAD_FAILED = 1
SWITCH_INTERVAL_S = 0.0005
"""After so long a thread that runs Python gives the interpreter's lock to one that waits: the loop must not wait for a
thread that reads an adapter's header. Python's own is ten times as long."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run an engine on an inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvarto.engine.process", description="The engine; started by the server.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of our end of the socket pair")
    channel = SocketChannel(socket.socket(fileno=parser.parse_args().fd))
    _prepare_process()
    try:
        config = channel.read_config()
    except EngineError as error:
        log.error("%s", error)
        return EXIT_MALFORMED
    channel.start()
    engine = _load(config, channel)
    if engine is None:
        return EXIT_LOAD_FAILED
    channel.send(engine.ready())
    engine.loop.run()
    engine.close()
    return 0


def _prepare_process() -> None:
    keep_heap_small()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    faulthandler.enable()
    logging.basicConfig(format="kvarto engine: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains first


def _load(config: EngineConfig, channel: SocketChannel) -> Engine | None:
    try:
        engine = build(
            config,
            channel,
            on_phase=lambda name: channel.send(Phase(name)),
            on_progress=lambda fraction: channel.send(Progress(fraction)),
        )
    except KvartoError as error:
        channel.send(LoadFailed(error=type(error).__name__, message=str(error)))
        return None
    except (OSError, MemoryError) as error:
        log.exception("loading failed")
        channel.send(LoadFailed(error=EngineError.__name__, message=f"{type(error).__name__}: {error}"))
        return None
    # What loading made lives as long as the process: collections need not look at it again.
    gc.collect()
    gc.freeze()
    return engine


if __name__ == "__main__":
    sys.exit(main())
