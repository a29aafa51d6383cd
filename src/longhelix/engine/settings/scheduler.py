"""The scheduler's settings, as the engine's options choose them."""

from longhelix.engine.options import MOST_CHUNK_TOKENS, EngineOptions
from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.perf.threshold import local_threshold_tokens
from longhelix.scheduler.config import CacheConfig, PlacementConfig, SchedulerConfig, ServiceConfig, StepConfig
from longhelix.scheduler.kv.windows import KVWindow
from longhelix.spec import ModelSpec
from longhelix.spec.layout import Layout


def scheduler_config(options: EngineOptions, layout: Layout, max_model_len: int, setting: Setting) -> SchedulerConfig:
    """Return the scheduler's settings, except for the size of its pools.

    setting: the model and the machine. The performance model uses them to distinguish short requests from long ones.
    """
    threshold_tokens = options.kvp_threshold_tokens
    placement = options.placement or ("striped" if threshold_tokens is None else "auto")
    if placement == "auto" and threshold_tokens is None:
        threshold_tokens = local_threshold_tokens(setting, layout, max_model_len)
    elif placement != "auto" and threshold_tokens is not None:
        raise UserError(
            f"kvp_threshold works only with placement auto, but placement is {placement}: set placement to auto, or "
            "leave one of them out"
        )
    return SchedulerConfig(
        kvp=layout.kvp,
        num_blocks=1,
        max_model_len=max_model_len,
        block_tokens=options.block_tokens,
        steps=StepConfig(
            chunk_tokens=MOST_CHUNK_TOKENS if options.chunk_tokens == "auto" else options.chunk_tokens,
            adaptive=options.chunk_tokens == "auto",
            max_running=options.max_running,
            pp=layout.pp,
            # With striped placement, every request uses all instances, so no instance can run a step alone.
            own_clocks=layout.ffn_replicas > 1 and layout.pp == 1 and placement != "striped",
        ),
        placement=PlacementConfig(
            name=placement,
            growth_limit_tokens=None if options.growth_limit_tokens == "auto" else options.growth_limit_tokens,
            kvp_threshold_tokens=threshold_tokens or 0,
            batch_invariant=options.batch_invariant,
        ),
        service=ServiceConfig(
            policy=options.policy,
            tbt_target_s=options.tbt_target_s,
            slo_scale=options.slo_scale,
            client_weights=options.client_weights or {},
        ),
        cache=CacheConfig(
            prefix_cache=options.prefix_cache,
            swap_blocks=-(-options.swap_tokens // (options.block_tokens * layout.kvp)),
        ),
    )


def with_pools(
    scheduler: SchedulerConfig, spec: ModelSpec, windows: tuple[KVWindow, ...], held: int
) -> SchedulerConfig:
    """Return the scheduler's settings with pools of `held` KV blocks on each KVP rank, and those of windows."""
    is_free = bool(windows) and all(spec.groups)  # no layer needs the KV blocks of those that see everything
    return scheduler.with_pools(max(held, scheduler.most_listed_blocks) if is_free else held, windows)
