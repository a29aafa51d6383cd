"""Measures how exactly the engine predicts a text: losses, logits and attention outputs, compared with a reference.

Prefill writes keys and values into the KV cache, and attention reads all of them from there, including those of the
same chunk. Each token is therefore scored against KV in the format of the cache.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from longhelix.compute.models.decoder import Decoder
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.runner import ModelRunner
from longhelix.measure.model import RankModel, prefill_steps
from longhelix.measure.world import Row, collect

_ROWS = 256  # logits of this many rows are in memory at a time
_COMPARED = 50  # scored tokens of a window whose logits and attention outputs are compared, at most


@dataclass(frozen=True)
class AccuracyScores:
    """Results of one configuration.

    Attributes:
        losses_S: Negative log-probability of each scored token, in nats.
        best_S: The most likely token in place of each scored token.
        attention_error: Relative RMS error of attention outputs: the mean over layers. NaN without attention layers.
        logits_error: Relative RMS error of logits, after the mean of each row is subtracted.
        compared: Number of scored tokens over which both errors are computed.
    """

    losses_S: np.ndarray
    best_S: np.ndarray
    attention_error: float
    logits_error: float
    compared: int

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses_S.mean()))


class AccuracyJob(msgspec.Struct, frozen=True):
    """Job of one rank: scores the last tokens of each window. Each point is a window."""

    config: EngineConfig
    windows: tuple[tuple[int, ...], ...]  # token ids
    scored: int  # tokens at the end of each window that are scored
    reference: str  # folder of the reference's logits and attention outputs
    is_reference: bool  # write the files of the folder, and compare with them

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        model = RankModel.join(self.config, rank, directory)
        runner, outputs = model.runner(max(map(len, self.windows))), AttentionOutputs(model.decoder)
        for index, token_ids in enumerate(self.windows):
            yield self._score(model, runner, outputs, index, token_ids)

    @torch.inference_mode()
    def _score(
        self,
        model: RankModel,
        runner: ModelRunner,
        outputs: "AttentionOutputs",
        index: int,
        token_ids: tuple[int, ...],
    ) -> Row:
        first = len(token_ids) - self.scored - 1  # the row that predicts the first scored token
        compared_X = torch.arange(0, self.scored, -(-self.scored // _COMPARED))
        hidden: list[Tensor] = []
        for step in prefill_steps(model, index, token_ids):
            runner.running.admit(step)
            outputs.rows_X = compared_X + first - sum(map(len, hidden))
            hidden.append(runner.forward(step).clone())
        rows_SH = torch.cat(hidden)[first:-1]
        targets_S = torch.tensor(token_ids[-self.scored :])
        losses, best = [], []
        for rows, targets in zip(rows_SH.split(_ROWS), targets_S.split(_ROWS), strict=True):
            logits = model.decoder.logits(rows).double()
            losses += cross_entropy(logits, targets, reduction="none").tolist()
            best += logits.argmax(-1).tolist()
        found = {"logits": model.decoder.logits(rows_SH[compared_X])} | outputs.take()
        path = Path(self.reference) / f"{index}.safetensors"
        if self.is_reference:
            save_file(found, path)
        reference = load_file(path)
        errors = {name: squares(found[name], reference[name], name == "logits") for name in reference}
        return {"losses": losses, "best": best, "compared": len(compared_X), "squares": errors}


class AttentionOutputs:
    """Records outputs of attention, before the output projection, by layer.

    Attributes:
        rows_X: Rows of the next chunk to record. Others than the chunk's rows are left out.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.rows_X = torch.arange(0)
        self._recorded: dict[str, list[Tensor]] = {}
        for index, layer in zip(decoder.indices, decoder.layers, strict=True):
            layer.attention.attend = partial(self._attend, f"layer {index}", layer.attention.attend)

    def _attend(self, name: str, attend: Callable[..., tuple[Tensor, Tensor]], *arguments) -> tuple[Tensor, Tensor]:
        out_tqC, lse_tq = attend(*arguments)
        rows_X = self.rows_X[(self.rows_X >= 0) & (self.rows_X < len(out_tqC))]
        self._recorded.setdefault(name, []).append(out_tqC[rows_X].float())
        return out_tqC, lse_tq

    def take(self) -> dict[str, Tensor]:
        """Return what was recorded since the last call."""
        recorded, self._recorded = self._recorded, {}
        return {name: torch.cat(chunks) for name, chunks in recorded.items()}


def squares(found: Tensor, reference: Tensor, centred: bool) -> tuple[float, float]:
    """Return the sum of squared differences, and the sum of squares of the reference.

    centred: subtract the mean of each row first, which softmax ignores.
    """
    found, reference = found.double(), reference.double()
    if centred:
        found, reference = (rows - rows.mean(-1, keepdim=True) for rows in (found, reference))
    return (found - reference).square().sum().item(), reference.square().sum().item()


def measure(
    configs: Mapping[str, EngineConfig],
    windows: Sequence[Sequence[int]],
    scored: int,
    on_scored: Callable[[str, AccuracyScores], None],
) -> dict[str, AccuracyScores]:
    """Score the windows with each configuration, in new rank processes. The first configuration is the reference.

    Args:
        configs: Configurations of one rank whose layers run op by op, by name.
        windows: Token ids.
        scored: Number of tokens at the end of each window that are scored.
        on_scored: Called with the name and the results of each configuration as soon as they are known.
    """
    found: dict[str, AccuracyScores] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, config in configs.items():
            job = AccuracyJob(config, tuple(map(tuple, windows)), scored, directory, is_reference=not found)
            found[name] = _scores([ranks[0] for ranks in collect(job, 1, lambda row: None)])
            on_scored(name, found[name])
    return found


def _scores(rows: Sequence[Row]) -> AccuracyScores:
    """Combine the rows of all windows."""
    totals = {name: np.sum([row["squares"][name] for row in rows], axis=0) for name in rows[0]["squares"]}
    errors = {name: float(np.sqrt(error / reference)) for name, (error, reference) in totals.items()}
    logits_error = errors.pop("logits")
    return AccuracyScores(
        losses_S=np.concatenate([row["losses"] for row in rows]),
        best_S=np.concatenate([row["best"] for row in rows]),
        attention_error=float(np.mean(list(errors.values()))) if errors else float("nan"),
        logits_error=logits_error,
        compared=sum(row["compared"] for row in rows),
    )
