"""Change constants of a setting, to test how sensitive the results are to these constants."""

from collections.abc import Mapping
from dataclasses import replace

from longhelix.perf.setting import Setting


def on_system(setting: Setting, changed: Mapping[str, float]) -> Setting:
    """Replace constants of the setting's system. Nested names have dots, such as "scale_up.bytes_per_s"."""
    return replace(setting, system=setting.system.replaced(changed, "assumed: to test the sensitivity"))
