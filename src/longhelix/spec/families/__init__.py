"""Model families: each module reads the configs of one of them.

A module's `FAMILIES` has its families by `model_type`. A new module in this folder needs no other change.
"""

import importlib
import pkgutil

from longhelix.spec.family import Family

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    FAMILIES |= importlib.import_module(f"{__name__}.{_module.name}").FAMILIES
