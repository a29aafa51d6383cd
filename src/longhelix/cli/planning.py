"""Options that the planning verbs share."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter
from rich.console import Console

from longhelix.errors import UserError
from longhelix.layout import Layout
from longhelix.perf.setting import Setting
from longhelix.presets import load_model, load_system
from longhelix.spec import number_format

_TABLE_WIDTH = 160  # where standard output is no terminal


@Parameter(name="*", group="Model and system")
@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """Which model, in which dtypes, on which system."""

    model: str
    "A preset such as deepseek-r1, a folder with a Hugging Face config.json, or `builtin`."
    system: str
    "A preset such as gb200, a TOML file, or `local` as `longhelix calibrate` measured it."
    weight_dtype: str | None = None
    "The weights' dtype, experts' and all others'. [default: the checkpoint's]"
    expert_dtype: str | None = None
    "The experts' dtype, where it is another one. [default: --weight-dtype, or the checkpoint's]"
    kv_dtype: str | None = None
    "The KV cache's dtype. [default: the model's, such as bfloat16]"
    attention_dtype: str | None = None
    "In which attention computes. [default: the KV cache's; fp8, or bfloat16 without it, where that has four bits]"

    def setting(self) -> Setting:
        """Load both; raises UserError for names that are not known and dtypes that the system does not have."""
        model, system = load_model(self.model), load_system(self.system)
        if self.expert_dtype is not None and model.moe is None:
            raise UserError(f"the model {self.model} has no experts: leave out --expert-dtype")
        weights, experts = (self.weight_dtype,) * 2 if self.weight_dtype is not None else model.checkpoint_dtypes
        experts = self.expert_dtype or experts
        return Setting(
            model,
            system,
            _known("weight-dtype", weights),
            _known("kv-dtype", self.kv_dtype or model.dtype),
            None if self.attention_dtype is None else _known("attention-dtype", self.attention_dtype),
            None if _known("expert-dtype", experts) == weights else experts,
        )


def stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from error


def parse_layout(text: str) -> tuple[Layout, bool, bool]:
    """`kvp=8,tpa=8,tied`: a layout, whether it is local, whether HOP-B overlaps. Words: tied, local, no-hop-b."""
    degrees: dict[str, int] = {}
    words = set()
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        if name in ("kvp", "tpa", "tpf", "ep", "pp") and re.fullmatch("[0-9]{1,9}", value):
            degrees[name] = int(value)
        elif entry.strip() in ("tied", "local", "no-hop-b"):
            words.add(entry.strip())
        else:
            raise UserError(
                f"{entry.strip()!r} in the layout {text!r} is not known: write it as kvp=8,tpa=8,tpf=64,ep=1,pp=1 and "
                "tied, local or no-hop-b where wanted",
                "invalid_layout",
            )
    if "tied" in words:
        degrees |= {"tpf": degrees.get("tpa", 1), "ffn_replicas": degrees.get("kvp", 1)}
    return Layout(**degrees), "local" in words, not words & {"no-hop-b", "tied"}


def _known(name: str, dtype: str) -> str:
    return number_format(dtype, name).name
