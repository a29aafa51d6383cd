"""Table of the accuracy benchmark: what each number format costs in perplexity and in errors."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.hub.download import find
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError
from longhelix.measure import accuracy
from longhelix.measure.accuracy import AccuracyScores
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.configuration import check_positive, configure
from longhelix.measure.decode import conditions
from longhelix.measure.world import Row
from longhelix.spec import ACTIVATION_DTYPES, DTYPES, KV_DTYPES, WEIGHT_DTYPES
from longhelix.spec.layout import Layout

REFERENCE, BASELINE = "float32", "bfloat16"
DOCUMENTATION = Path(__file__).with_name("documentation.txt")
PARTS = ("weights", "activations", "kv", "attention")
_STANDARD_ERRORS = 2  # half of the shown interval

COLUMNS = (
    Column("case", "changed"),
    Column("dtype", "dtype"),
    Column("weight_dtype", "weights"),
    Column("activation_dtype", "--activation-dtype"),
    Column("kv_dtype", "KV"),
    Column("attention_dtype", "--attention-dtype"),
    Column("perplexity", "perplexity", ".3f"),
    Column("increase", "increase, %", "+.2f", 100),
    Column("uncertainty", "+-, %", ".2f", 100),
    Column("attention_error", "attention error, %", ".2f", 100),
    Column("logits_error", "logits error, %", ".2f", 100),
    Column("top1_agreement", "top-1 agreement, %", ".1f", 100),
)


@dataclass(frozen=True)
class AccuracyText:
    """A text in windows of tokens. The tokens in the second half of each window are scored.

    Each window begins in the middle of the previous one. No token is scored twice.
    """

    name: str
    windows: tuple[tuple[int, ...], ...]
    scored: int  # scored tokens of a window
    num_tokens: int  # of the text

    @classmethod
    def of(cls, model: str, files: Sequence[Path], window: int, tokens: int) -> "AccuracyText":
        """Split a text into windows of `window` tokens, of which `tokens` or a few more are scored.

        If the model's tokenizer starts prompts with a BOS, each window has one more token, the BOS.

        Args:
            files: Text files in UTF-8. If there are none, the text is longhelix's documentation.

        Raises:
            UserError: a file cannot be read, or the text is too short.
        """
        check_positive("tokens", tokens)
        if window < 2:
            raise UserError(f"--window is {window}: set it to 2 or more")
        tokenizer = _tokenizer(model)
        begin = tuple(tokenizer.encode(""))
        token_ids = tokenizer.encode_more("".join(map(_read, files or (DOCUMENTATION,))))
        scored = window // 2
        context, count = window - scored, -(-tokens // scored)
        most = (len(token_ids) - context) // scored
        if most < 1:
            raise UserError(
                f"the text has {len(token_ids)} tokens, but one window has {window}: set --window to {len(token_ids)} "
                "or less, or give a longer --text"
            )
        if count > most:
            raise UserError(
                f"the text has {len(token_ids)} tokens, but --tokens {tokens} needs {context + count * scored}: set "
                f"--tokens to {most * scored} or less, or give a longer --text"
            )
        windows = tuple((*begin, *token_ids[start : start + window]) for start in range(0, count * scored, scored))
        name = ", ".join(path.name for path in files) or "paragraphs of longhelix's documentation"
        return cls(name, windows, scored, len(token_ids))


def _tokenizer(model: str) -> Tokenizer:
    checkpoint = open_checkpoint(find(model))
    if isinstance(checkpoint, GgufCheckpoint):
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 at byte {error.start}"
        raise UserError(f"--text {path} cannot be read ({reason}): give the path of a text file in UTF-8") from error


def cases(vary: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each case, by name. The reference and the baseline come first.

    Raises:
        UserError: `vary` has a name that is not in PARTS.
    """
    vary = tuple(vary)
    unknown = next((part for part in vary if part not in PARTS), None)
    if unknown is not None or not vary:
        found = "empty" if unknown is None else f"{unknown!r}, which is not known"
        raise UserError(f"--vary is {found}: use one or more of {', '.join(PARTS)}")
    others = (name for name in DTYPES if name not in (REFERENCE, BASELINE))
    found_cases: dict[str, dict[str, Any]] = {
        f"all: {name}": {"dtype": name, "weight_dtype": name} for name in (REFERENCE, BASELINE, *others)
    }
    for part in PARTS:
        # Weights of GGUF files are expanded, so that they have the baseline's dtype as well.
        same = {"dtype": BASELINE} if part == "activations" else {"dtype": BASELINE, "weight_dtype": BASELINE}
        if part in vary:
            found_cases |= {f"{part}: {name}": same | settings for name, settings in _settings(part)}
    return found_cases


def _settings(part: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings that one part of the engine offers, other than those of the baseline."""
    match part:
        case "weights":
            return [(name, {"weight_dtype": name}) for name in WEIGHT_DTYPES if name not in DTYPES]
        case "activations":
            return [(name, {"activation_dtype": name}) for name in ACTIVATION_DTYPES]
        case "kv":
            return [(name, {"kv_dtype": name}) for name in KV_DTYPES if name != BASELINE]
        case _:
            return [(f"int8 over {kv}", {"attention_dtype": "int8", "kv_dtype": kv}) for kv in ("int8", "int4")]


def configured(
    model: str, vary: Iterable[str], window: int, threads: int | None
) -> tuple[dict[str, EngineConfig], list[str]]:
    """Configure each case that this machine and the model support.

    Args:
        window: Tokens of the longest window.

    Returns:
        The configurations by name, and a sentence for each reason why cases were left out.

    Raises:
        UserError: the reference or the baseline is not supported, or an argument is invalid.
    """
    make = partial(configure, model, Layout(), (window,), threads=threads, execution="eager")
    configs: dict[str, EngineConfig] = {}
    left_out: dict[str, list[str]] = {}  # names by reason
    for name, settings in cases(vary).items():
        try:
            configs[name] = make(**settings)
        except UserError as error:
            if len(configs) < 2:
                raise
            left_out.setdefault(str(error), []).append(name)
    spec = next(iter(configs.values())).spec
    if window > spec.max_positions:
        raise UserError(
            f"a window has {window} tokens, but the model supports {spec.max_positions}: set --window to a smaller "
            "number"
        )
    return configs, [f"Left out: {', '.join(names)}, because {reason}." for reason, names in left_out.items()]


def section(
    configs: Mapping[str, EngineConfig],
    text: AccuracyText,
    on_point: Callable[[Row], None],
) -> Section:
    """Score the text with each configuration of `configured`. Returns the table."""

    def on_scored(name: str, scores: AccuracyScores) -> None:
        on_point({"case": name, "perplexity": f"{scores.perplexity:.3f}"})

    found = accuracy.measure(configs, text.windows, text.scored, on_scored)
    return Section(
        name="accuracy",
        title="Accuracy of number formats",
        note=_note(text, next(iter(found.values())).compared),
        columns=COLUMNS,
        rows=rows(configs, found),
        plot=Plot(("increase",), ("case",)),
    )


def rows(configs: Mapping[str, EngineConfig], found: Mapping[str, AccuracyScores]) -> list[Row]:
    """Compare the scores of each case. The first case is the reference of errors, the second the baseline."""
    reference, baseline, *_ = found.values()
    return [
        {"case": name, "dtype": configs[name].formats.dtype}
        | conditions(configs[name])
        | compare(scores, reference, baseline)
        for name, scores in found.items()
    ]


def compare(scores: AccuracyScores, reference: AccuracyScores, baseline: AccuracyScores) -> Row:
    """Compare the scores of a case with those of the reference and of the baseline."""
    differences_S = scores.losses_S - baseline.losses_S
    ratio = float(np.exp(differences_S.mean()))
    deviation = float(differences_S.std(ddof=1)) if len(differences_S) > 1 else math.nan
    return {
        "perplexity": scores.perplexity,
        "increase": ratio - 1,
        "uncertainty": _known(_STANDARD_ERRORS * ratio * deviation / math.sqrt(len(differences_S))),
        "attention_error": _known(scores.attention_error),
        "logits_error": _known(scores.logits_error),
        "top1_agreement": float((scores.best_S == reference.best_S).mean()),
    }


def _known(value: float) -> float | None:
    """Return a value, or None in place of NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def _note(text: AccuracyText, compared: int) -> str:
    windows, scored = len(text.windows), text.scored
    context = len(text.windows[0]) - scored
    return (
        f"Text: {text.name}. All rows score the same {windows * scored:,d} tokens. Number of windows: {windows}, of "
        f"{context + scored:,d} tokens each. Only the last {scored:,d} tokens of each window are scored, so each has a "
        f"context of {context:,d} to {context + scored - 1:,d} tokens. Attention reads the whole context from the KV "
        "cache, in the format of the cache. perplexity: exp of the mean negative log-probability. increase: of the "
        "perplexity, compared with the row all: bfloat16. +-: two standard errors of the increase, from the paired "
        "differences of tokens. The other columns compare with the row all: float32. An error is the RMS of the "
        f"difference divided by the RMS of the reference, over {compared:,d} of the scored tokens. attention error: of "
        "attention outputs before the output projection, averaged over layers. It includes the errors of earlier "
        "layers. logits error: of logits minus the mean of each row, which softmax ignores. top-1 agreement: share of "
        "scored tokens for which both runs predict the same token."
    )
