"""Has schemathesis ask for the model that is served, where it means to be right: names that it draws are of none."""

import os
from typing import Any

import schemathesis
from schemathesis import GenerationMode


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    right = case.meta is None or case.meta.generation.mode is GenerationMode.POSITIVE
    if right and isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = os.environ["MODEL"]
