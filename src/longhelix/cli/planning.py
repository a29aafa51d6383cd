"""Options that the planning commands share."""

import re
import sys
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from longhelix.cli.values import tied_layout
from longhelix.compute.models.model_files import model_spec
from longhelix.engine.hub.download import find_config
from longhelix.errors import UserError
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.plan.question import MOST_GPUS
from longhelix.spec import number_format
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system
from longhelix.values import whole

_TABLE_WIDTH = 160  # number of columns if standard output is not a terminal


@Parameter(name="*", group="Model and system")
@dataclass(frozen=True)
class PlannedModel:
    """Options for the model, the dtypes and the system to plan for."""

    model: str
    """Model to plan for: a preset such as deepseek-r1, a folder with a Hugging Face config.json, a GGUF file, a model
    on the hub such as Qwen/Qwen3-8B, or `builtin`."""
    _: KW_ONLY
    system: str
    "System to plan for: a preset such as gb200, a TOML file, or `local` (this machine, see `longhelix calibrate`)."
    revision: str | None = None
    "Branch, tag or commit of a model on the hub. [default: main]"
    weight_dtype: str | None = None
    "Dtype of all weights. [default: the formats in which the checkpoint stores them]"
    expert_dtype: str | None = None
    "Dtype of the experts, if it differs from other weights. [default: --weight-dtype, or the checkpoint's]"
    kv_dtype: str | None = None
    "Dtype of the KV cache. [default: the model's, such as bfloat16]"
    attention_dtype: str | None = None
    "Dtype of attention's arithmetic. [default: --kv-dtype; with 4-bit KV fp8, or bfloat16 if the system lacks fp8]"

    def setting(self) -> Setting:
        """Load the model and the system. Raises UserError for an unknown name or an unsupported dtype."""
        model, system = model_spec(find_config(self.model, self.revision)), load_system(self.system)
        if self.expert_dtype is not None and not model.moes:
            raise UserError(f"the model {self.model} has no experts: leave out --expert-dtype")
        weights, experts = self.weight_dtype or model.checkpoint.dtype, self.expert_dtype
        if self.weight_dtype is not None:
            model = model.expanded()
        return Setting(
            model=model if system.shared else model.on_gpus(),
            system=system,
            dtypes=Dtypes(
                weights=_known("weight-dtype", weights),
                kv=_known("kv-dtype", self.kv_dtype or model.checkpoint.dtype),
                attention=None if self.attention_dtype is None else _known("attention-dtype", self.attention_dtype),
                experts=None if experts is None else _known("expert-dtype", experts),
                packed=self.weight_dtype is None,
            ),
        )


@Parameter(name="*", group="Speculative decoding")
@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options for speculative decoding: the number of draft tokens, and how many of them are accepted."""

    draft_tokens: int = 0
    "Draft tokens per request that every step verifies (speculative decoding, multi-token prediction)."
    accepted_tokens: Annotated[float | None, Parameter(show_default=False)] = None
    """Average number of new tokens per step and request, from 1 to 1 + --draft-tokens. Needed with --draft-tokens;
    measure it on your model and text."""

    def added(self, setting: Setting) -> Setting:
        """Return `setting` with these options. Raises UserError if --accepted-tokens is missing or out of range."""
        if self.accepted_tokens is None and self.draft_tokens > 0:
            raise UserError(
                f"--draft-tokens is {self.draft_tokens}, but --accepted-tokens is not set: set it to the average that "
                f"you measured for your model and text, from 1 to {1 + self.draft_tokens}"
            )
        accepted = 1.0 if self.accepted_tokens is None else self.accepted_tokens
        return replace(setting, drafts=Drafts(self.draft_tokens, accepted))


@dataclass(frozen=True)
class GroupedLayout:
    """Layout in the planning commands: the engine's layout with data-parallel groups and a placement."""

    layout: Layout  # layout with the KVP ranks of all `dp` groups
    dp: int  # number of groups with separate requests and a common FFN
    local: bool  # whether each KVP rank holds the KV of whole requests
    hop_b: bool  # whether HOP-B overlaps the exchange with attention

    @classmethod
    def of(
        cls,
        dp: int = 1,
        kvp: int = 1,
        tpa: int = 1,
        tpf: int | None = None,
        ep: int = 1,
        pp: int = 1,
        *,
        tied: bool = False,
        local: bool = False,
        hop_b: bool = True,
    ) -> "GroupedLayout":
        """Create a layout from degrees. `kvp` is the number of KVP ranks of one group.

        Raises:
            UserError: a degree is out of range, or the degrees are not compatible.
        """
        whole("dp", dp, 1, MOST_GPUS, code="invalid_layout")
        if not tied:
            return cls(Layout(kvp=dp * kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp), dp, local, hop_b)
        if dp > 1:
            raise UserError(
                f"a tied layout has a copy of the FFN on every KVP rank, but {dp} groups share one FFN: set dp to 1, "
                "or leave out tied",
                "invalid_layout",
            )
        return cls(tied_layout(kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp), dp, local, hop_b=False)


def stdout() -> Console:
    """Create a console on standard output. Its width is fixed if standard output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def make_folder(folder: Path) -> None:
    """Create the folder of --out. Raises UserError if the folder cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be created ({error.strerror}): set --out to another folder"
        ) from error


def parse_layout(text: str) -> GroupedLayout:
    """Parse a layout such as `kvp=8,tpa=8,tied`: degrees, and the keywords tied, local and no-hop-b."""
    degrees: dict[str, int] = {}
    words = set()
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        if name in ("dp", "kvp", "tpa", "tpf", "ep", "pp") and re.fullmatch("[0-9]{1,9}", value):
            degrees[name] = int(value)
        elif entry.strip() in ("tied", "local", "no-hop-b"):
            words.add(entry.strip())
        else:
            raise UserError(
                f"the layout {text!r} contains {entry.strip()!r}, which is neither a degree nor one of tied, local and "
                "no-hop-b: write it like dp=1,kvp=8,tpa=8,tpf=64,ep=1,pp=1,local",
                "invalid_layout",
            )
    return GroupedLayout.of(**degrees, tied="tied" in words, local="local" in words, hop_b="no-hop-b" not in words)


def _known(name: str, dtype: str) -> str:
    """Return the name of a dtype. Raises UserError if the dtype is unknown."""
    return number_format(dtype, name).name
