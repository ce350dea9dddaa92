"""The schedulers of the playground: the stages of phases 5 to 9, with the options that the phases are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from minicache.scheduler.base import Scheduler
from scripts.browser.playground.workloads import Settings

PACKAGE: Final = "minicache.scheduler"
INCIDENTS: Final = "minicache_course.incidents"


@dataclass(frozen=True, slots=True)
class Choice:
    """A scheduler that can be chosen.

    Attributes:
        title: for people.
        module: the module whose decisions it shows, which the editor opens.
        stage: its name for `create_scheduler`; "" for one that is no stage.
        options: options of `create_scheduler` besides those of the sliders.
    """

    title: str
    module: str
    stage: str
    options: dict[str, Any]

    def create(
        self, settings: Settings, imported: Callable[[str], ModuleType], more: Mapping[str, Any] | None = None
    ) -> Scheduler:
        """A new scheduler.

        Args:
            settings: the sliders.
            imported: gives a module by its name: `importlib.import_module`, or one that knows edited sources.
            more: options that a link says, in place of its own.

        Raises:
            ValueError, TypeError: `create_scheduler` refuses the options.
        """
        common = {
            "num_blocks": settings.blocks,
            "block_size": settings.block_size,
            "max_num_seqs": settings.slots,
            "max_num_batched_tokens": settings.budget,
        }
        if not self.stage:
            scheduler: Scheduler = imported(self.module).ThrashScheduler(**common)
            return scheduler
        options = self.options | ({"num_host_blocks": settings.blocks} if "preemption" in self.options else {})
        scheduler = imported(PACKAGE).create_scheduler(self.stage, **common, **options | dict(more or {}))
        return scheduler


PREFIX: Final = {"prefix_caching": True}

SCHEDULERS: Final = {
    "static": Choice("static batching (phase 5)", f"{PACKAGE}.static", "static", {}),
    "continuous": Choice("continuous batching (phase 5)", f"{PACKAGE}.continuous", "continuous", {}),
    "paged": Choice("paged, recompute (phase 6)", f"{PACKAGE}.paged", "paged", {}),
    "paged+swap": Choice("paged, swap (phase 6)", f"{PACKAGE}.paged", "paged", {"preemption": "swap"}),
    "fair": Choice("fair (phase 7)", f"{PACKAGE}.fair", "fair", {}),
    "thrash": Choice("incident 3, the thrash (phase 7)", f"{INCIDENTS}.broken", "", {}),
    "paged+prefix": Choice("paged, prefix cache (phase 8)", f"{PACKAGE}.prefix_caching", "paged", PREFIX),
    "fair+prefix": Choice("fair, prefix cache (phase 8)", f"{PACKAGE}.prefix_caching", "fair", PREFIX),
    "chunked": Choice("chunked prefill (phase 9)", f"{PACKAGE}.chunked", "chunked", {}),
    "chunked+prefix": Choice("chunked, prefix cache (phase 9)", f"{PACKAGE}.chunked", "chunked", PREFIX),
}
"""Name in a link → what it stands for."""
