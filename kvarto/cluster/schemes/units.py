"""Schemes that ask for memory in units of their own: HAMi, Volcano, Alibaba, Tencent. Each rounds up, never down."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.cluster.need import Need
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme, check_fits, resource
from kvarto.core.errors import UsageError
from kvarto.core.units import GIB, MIB, ceil_div, format_bytes

VCUDA_BLOCK_BYTES = 256 * MIB
WHOLE_GPU_CORES = 100


class _MemoryUnits(Scheme):
    memory: str
    """The resource that carries memory."""
    percentage: str | None = None
    """The resource that says the same as a share of the card."""
    count: str | None = None
    """The resource that must stand beside it."""
    is_own_count: bool = True
    """Whether no other scheme uses the count."""
    scheduler_name: str | None = None

    def unit_bytes(self, options: ClusterOptions) -> int:
        """Bytes of one unit."""
        return MIB * options.memory_factor

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """Whole units, rounded up."""
        check_fits(need, options.card)
        unit = self.unit_bytes(options)
        units = ceil_div(need.limit_bytes, unit)
        self._check_rounded(need, units, unit, options)
        resources = {self.memory: units}
        if self.count is not None:
            resources = {self.count: self._count(units * unit, options), **resources}
        return PodParts(units * unit, resources, scheduler_name=self.scheduler_name)

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """The resource that carries memory, or stands for it."""
        names = (self.memory, self.percentage, self.count if self.is_own_count else None)
        return any(name is not None and resource(container, name) is not None for name in names)

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """Units times their size, or a share of the card; all of it where only devices are counted."""
        units = resource(container, self.memory)
        if units is not None:
            return units * self.unit_bytes(options)
        share = None if self.percentage is None else resource(container, self.percentage)
        if options.card is None:
            return None
        return options.card.memory_bytes * (100 if share is None else share) // 100

    def _check_rounded(self, need: Need, units: int, unit: int, options: ClusterOptions) -> None:
        """A card whose last unit is not whole has less to give than its memory."""
        card = options.card
        if card is not None and units * unit > card.memory_bytes:
            raise UsageError(
                f"`--scheme {self.name}` counts in {format_bytes(unit)}: {format_bytes(need.limit_bytes)} are {units}, "
                f"and `{card.name}` has {card.memory_bytes // unit}; take `--scheme whole`"
            )

    def _count(self, granted_bytes: int, options: ClusterOptions) -> int:
        return 1


class Hami(_MemoryUnits):
    """`nvidia.com/gpu: 1` with `nvidia.com/gpumem`."""

    name = "hami"
    memory = "nvidia.com/gpumem"
    percentage = "nvidia.com/gpumem-percentage"
    count = "nvidia.com/gpu"
    is_own_count = False
    is_enforced = True
    facts = Facts(
        title="HAMi",
        unit="MiB per GPU",
        enforced_by="a preloaded library (cooperation: a process that goes round it is not stopped)",
        reported="the limit",
        over_commit="with deviceMemoryScaling",
        isolates_faults=False,
        compute="SM percentage by a token bucket",
    )


class Volcano(_MemoryUnits):
    """`volcano.sh/vgpu-number: 1` with `volcano.sh/vgpu-memory`."""

    name = "volcano"
    memory = "volcano.sh/vgpu-memory"
    percentage = "volcano.sh/vgpu-memory-percentage"
    count = "volcano.sh/vgpu-number"
    scheduler_name = "volcano"
    is_enforced = True
    facts = Facts(
        title="Volcano vGPU",
        unit="MiB per GPU",
        enforced_by="a preloaded library, HAMi's (cooperation)",
        reported="the limit",
        over_commit="by a factor",
        isolates_faults=False,
        compute="SM percentage",
    )


class Aliyun(_MemoryUnits):
    """`aliyun.com/gpu-mem`."""

    name = "aliyun"
    memory = "aliyun.com/gpu-mem"
    is_enforced = False
    facts = Facts(
        title="Alibaba gpushare",
        unit="GiB, or MiB where the plugin was started so; one GPU",
        enforced_by="nothing in the open part (cGPU is closed)",
        reported="whole card",
        over_commit="no, but nothing holds a container to its part",
        isolates_faults=False,
        compute="none",
    )

    def unit_bytes(self, options: ClusterOptions) -> int:
        """By how the plugin was started."""
        return MIB if options.aliyun_unit == "MiB" else GIB


class Tencent(_MemoryUnits):
    """`tencent.com/vcuda-core` with `tencent.com/vcuda-memory`."""

    name = "tencent"
    memory = "tencent.com/vcuda-memory"
    count = "tencent.com/vcuda-core"
    is_enforced = True
    facts = Facts(
        title="Tencent gpu-manager",
        unit="blocks of 256 MiB",
        enforced_by="a replaced libcuda (cooperation); it knows few of the driver's entries",
        reported="the limit",
        over_commit="no",
        isolates_faults=False,
        compute="hundredths of a GPU",
    )

    def unit_bytes(self, options: ClusterOptions) -> int:
        """A block."""
        return VCUDA_BLOCK_BYTES

    def _count(self, granted_bytes: int, options: ClusterOptions) -> int:
        """The same share of the cores as of the memory; a tenth where the card is not known."""
        if options.card is None:
            return WHOLE_GPU_CORES // 10
        return min(WHOLE_GPU_CORES - 1, ceil_div(granted_bytes * WHOLE_GPU_CORES, options.card.memory_bytes))
