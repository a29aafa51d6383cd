"""EXAONE 4.0: norms after attention and FFNs only, and normed queries and keys.

In models with a window, layers that see everything have no positions.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from longhelix.spec.attention import Visibility
from longhelix.spec.config import count, count_or_none
from longhelix.spec.config_parts import dense, grouped_query, has_windows, num_layers, stack
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.norms import HeadNorms, Norms
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention, window = grouped_query(config, rope, norms=HeadNorms(qk=True)), count_or_none(config, "sliding_window")
    mixers = [attention] * num_layers(config)
    if window is not None:
        local = msgspec.structs.replace(attention, visibility=Visibility(window_tokens=window))
        full = msgspec.structs.replace(attention, rotated_size=0)
        period = count(config, "sliding_window_pattern") if config["layer_types"] is None else 1
        mixers = [local if has_window else full for has_window in has_windows(config, period)]
    return stack(mixers, [dense(config)] * num_layers(config), Norms(before=False, after=True))


FAMILIES = {
    "exaone4": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 32,
                "head_dim": None,
                "eos_token_id": 2,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "layer_types": None,
            },
            nullable=frozenset({"sliding_window", "sliding_window_pattern"}),
        ),
    )
}
