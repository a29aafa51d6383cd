"""Options that the planning verbs share."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from longhelix.cli.values import tied_layout
from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.plan.question import MOST_GPUS
from longhelix.spec import FORMATS, number_format
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from longhelix.values import whole

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
        if self.weight_dtype is None and model.stored_dtype and model.stored_dtype not in FORMATS:
            raise UserError(
                f"the weights of {self.model} are quantised as {model.stored_dtype}, which longhelix cannot price: set "
                f"--weight-dtype to the nearest of {', '.join(FORMATS)}",
                "unsupported_dtype",
            )
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


@Parameter(name="*", group="Speculative decoding")
@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Drafts that steps verify, and what they are worth."""

    draft_tokens: int = 0
    "Tokens of a request that every step verifies beside its own (speculative decoding, multi-token prediction)."
    accepted_tokens: Annotated[float | None, Parameter(show_default=False)] = None
    "How many tokens such a step gives a request on average, from 1 to 1 + --draft-tokens, as measured."

    def added(self, setting: Setting) -> Setting:
        """The setting with these; raises UserError for drafts whose worth nobody says, and for numbers out of range."""
        if self.accepted_tokens is None and self.draft_tokens > 0:
            raise UserError(
                f"how many of {self.draft_tokens} draft tokens are accepted depends on the model and the text: set "
                f"--accepted-tokens to what was measured, from 1 to {1 + self.draft_tokens}"
            )
        accepted = 1.0 if self.accepted_tokens is None else self.accepted_tokens
        return replace(setting, draft_tokens=self.draft_tokens, accepted_tokens=accepted)


@dataclass(frozen=True)
class GroupedLayout:
    """A layout as planning verbs take it. layout: all KVP ranks of `dp` groups, which have requests of their own and
    share the FFN; local: each of these ranks has whole requests; hop_b: HOP-B overlaps."""

    layout: Layout
    dp: int
    local: bool
    hop_b: bool

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
        """kvp: of one group. Raises UserError for numbers out of range, and where they do not go together."""
        whole("dp", dp, 1, MOST_GPUS, code="invalid_layout")
        if not tied:
            return cls(Layout(dp * kvp, tpa, tpf, ep, pp), dp, local, hop_b)
        if dp > 1:
            raise UserError(
                f"the tied layout has a copy of the FFN on every KVP rank, and {dp} groups share one: set dp to 1, or "
                "leave out tied",
                "invalid_layout",
            )
        return cls(tied_layout(kvp, tpa, tpf, ep, pp), dp, local, hop_b=False)


def stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from error


def parse_layout(text: str) -> GroupedLayout:
    """`kvp=8,tpa=8,tied`: degrees, and the words tied, local and no-hop-b."""
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
                f"{entry.strip()!r} in the layout {text!r} is not known: write it as dp=1,kvp=8,tpa=8,tpf=64,ep=1,pp=1 "
                "and tied, local or no-hop-b where wanted",
                "invalid_layout",
            )
    return GroupedLayout.of(**degrees, tied="tied" in words, local="local" in words, hop_b="no-hop-b" not in words)


def _known(name: str, dtype: str) -> str:
    return number_format(dtype, name).name
