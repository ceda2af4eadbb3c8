"""Assemble: from settings to an engine that runs. The engine process, `kvarto.LLM` and tests all come through here.

    settings ─> program ─> step limits ─> budget ─> layout ─> backend.open ─> weights ─> warm-up ─> cache ─> loop

Everything that can be refused is refused before the arena is reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvarto.core.clock import Clock, MonotonicClock
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.calibration import measure_flops_per_s
from kvarto.engine.channel import Channel
from kvarto.engine.config import EngineConfig
from kvarto.engine.engine import Engine
from kvarto.engine.malloc import trim_heap
from kvarto.engine.phases import ByteCount, Phases
from kvarto.engine.settings import check_settings, open_backend, plan_layout, row_major_dtype
from kvarto.engine.wiring import PlannedModel, wire
from kvarto.memory.limits import read_limits
from kvarto.memory.system_memory import process_bytes
from kvarto.models.base import WeightFiles
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import open_weights
from kvarto.models.loader import check_tensors, load_weights
from kvarto.models.packing import pack_matrices
from kvarto.ops.base import Backend


def open_program(config: EngineConfig, backend: Backend) -> tuple[WeightFiles, Program]:
    """Headers and configuration of the model, and the program that they make for that backend. Nothing big is read. The
    caller closes the files. Raises BadFile, UnsupportedModel or UsageError.
    """
    check_settings(config)
    files = open_weights(Path(config.model))
    try:
        program = build_program(parse_config(files.config), row_major_dtype(config, backend))
        check_tensors(program, files)
        program = pack_matrices(program, files, backend.weight_format)
    except BaseException:
        files.close()
        raise
    return files, program


def plan_engine(config: EngineConfig) -> tuple[Program, Layout]:
    """What `build` would lay out, without reserving anything; for `kvarto plan`."""
    backend = open_backend(config)
    files, program = open_program(config, backend)
    files.close()
    return program, plan_layout(config, program, backend)


def build(
    config: EngineConfig,
    channel: Channel,
    *,
    clock: Clock | None = None,
    backend: Backend | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Engine:
    """Load the model and wire an engine to `channel`. Raises KvartoError, and leaves no memory behind then.

    `backend` takes the place of the one that `config.device` names; `on_phase` hears the name of each phase of loading,
    `on_progress` how far the one that reads weights is.
    """
    clock = clock or MonotonicClock()
    phases = Phases(clock, on_phase)
    with phases.phase("read model"):
        backend = backend or open_backend(config)
        files, program = open_program(config, backend)
    try:
        with phases.phase("plan memory"):
            layout = plan_layout(config, program, backend)
        model = PlannedModel(files, program, layout, backend, process_bytes())
        return _open(config, channel, clock, phases, model, on_progress)
    finally:
        files.close()


def _open(
    config: EngineConfig,
    channel: Channel,
    clock: Clock,
    phases: Phases,
    model: PlannedModel,
    on_progress: Callable[[float], None],
) -> Engine:
    backend, layout, program = model.backend, model.layout, model.program
    with phases.phase("reserve memory"):
        backend.open(program, layout)
    try:
        with phases.phase("load weights"):
            num_threads = config.threads or read_limits().num_cpus
            count = ByteCount(sum(weight.size_bytes for weight in program.weights.values()), clock, on_progress)
            load_weights(program, model.files, backend, count.add, num_threads=num_threads)
            trim_heap()
        with phases.phase("warm up"):
            flops_per_s = measure_flops_per_s(backend, program, layout, clock)
            _touch_pages(backend, layout, waits=config.prefault)
        return wire(config, channel, clock, phases, model, flops_per_s)
    except BaseException:
        backend.close()
        raise


def _touch_pages(backend: Backend, layout: Layout, *, waits: bool) -> None:
    """First touch is slow, so a thread does it ahead. Only arenas in host memory need it."""
    arena = getattr(backend, "arena", None)
    if arena is not None:
        prefault = arena.prefault(layout.activations.offset, layout.total_bytes - layout.activations.offset)
        if waits:
            prefault.wait()
