"""Settings of the scheduler for tests, described by a few fields."""

from dataclasses import fields
from typing import Any

from longhelix.scheduler.config import CacheConfig, PlacementConfig, SchedulerConfig, ServiceConfig, StepConfig


def scheduler_config(
    kvp: int, num_blocks: int, max_model_len: int, block_tokens: int = 16, placement: str = "striped", **more: Any
) -> SchedulerConfig:
    """Return settings.

    Args:
        placement: name of the placement.
        more: fields of the records that the settings have.
    """

    def record(kind: type, **named: Any) -> Any:
        return kind(**named, **{each.name: more.pop(each.name) for each in fields(kind) if each.name in more})

    found = SchedulerConfig(
        kvp,
        num_blocks,
        max_model_len,
        block_tokens,
        steps=record(StepConfig),
        placement=record(PlacementConfig, name=placement),
        service=record(ServiceConfig),
        cache=record(CacheConfig),
    )
    assert not more, f"the scheduler has no {', '.join(more)}"
    return found
