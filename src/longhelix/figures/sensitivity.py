"""Change constants of a setting, to test how sensitive the results are to these constants."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longhelix.perf.setting import Setting


def on_system(setting: Setting, changed: Mapping[str, float]) -> Setting:
    """Replace constants of the setting's system. Nested names have dots, such as "scale_up.bytes_per_s"."""
    system = setting.system
    for name, value in changed.items():
        level, _, inner = name.rpartition(".")
        new: dict[str, Any] = {level: replace(getattr(system, level), **{inner: value})} if level else {inner: value}
        system = replace(system, **new)
    return replace(setting, system=system)
