"""KAI: annotations on the pod, counted by its own scheduler. Nothing holds a container to its part."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.cluster.need import Need
from kvarto.cluster.quantity import whole_number
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme, annotation, check_fits
from kvarto.core.units import MIB, ceil_div

MEMORY = "gpu-memory"
FRACTION = "gpu-fraction"
NUM_DEVICES = "gpu-fraction-num-devices"
SCHEDULER = "kai-scheduler"
QUEUE_LABEL = "kai.scheduler/queue"


class Kai(Scheme):
    """`gpu-memory: "16384"` on the pod."""

    name = "kai"
    is_enforced = False
    facts = Facts(
        title="KAI",
        unit="MiB, as text in an annotation",
        enforced_by="nothing, unless HAMi-core was added",
        reported="whole card",
        over_commit="no, but nothing holds a container to its part",
        isolates_faults=False,
        compute="none",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """Whole MiB."""
        check_fits(need, options.card)
        mib = ceil_div(need.limit_bytes, MIB)
        return PodParts(
            mib * MIB,
            annotations={MEMORY: str(mib)},
            labels={QUEUE_LABEL: options.queue},
            scheduler_name=SCHEDULER,
        )

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """Either annotation."""
        return annotation(template, MEMORY) is not None or annotation(template, FRACTION) is not None

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """MiB, or a fraction of a card that is known."""
        mib, fraction = annotation(template, MEMORY), annotation(template, FRACTION)
        if mib is not None:
            number = whole_number(mib)
            return None if number is None else number * MIB
        if fraction is None or options.card is None:
            return None
        try:
            share = float(fraction)
        except ValueError:
            return None
        return int(share * options.card.memory_bytes) if 0 < share <= 1 else None
