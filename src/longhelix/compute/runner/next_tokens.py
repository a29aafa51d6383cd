"""Turns the hidden states of a step into sampled tokens and scores of prompts, on ranks of the last pipeline stage."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice

import torch
from torch import Tensor

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.running_sequences import RunningSequences
from longhelix.compute.runner.sampling import SampledRow, Sampling
from longhelix.compute.runner.scoring import Scoring
from longhelix.compute.runner.sequence_state import SequenceState, by_instances, token_ids
from longhelix.compute.runner.verification import Verification
from longhelix.scheduler.step import Chunk, Draft, PromptLogprobs, SampledToken, Step
from longhelix.spans import Spans


class NextTokens:
    """Samples a token after the last row of each sequence and after each row of a draft, and scores prompts.

    Attributes:
        sampling: Chooses tokens from logits.

    Args:
        logits: Returns the logits of rows in this rank's part of the vocabulary, logits_Tv. float32.
    """

    def __init__(
        self,
        running: RunningSequences,
        logits: Callable[[Tensor], Tensor],
        mesh: Mesh,
        vocab_size: int,
        device: torch.device,
        spans: Spans,
    ) -> None:
        self._running, self._logits, self._mesh, self._device, self._spans = running, logits, mesh, device, spans
        self.sampling = Sampling(mesh, vocab_size, device, spans)
        self._scoring = Scoring(mesh, vocab_size, device)
        self._accepted_tokens: list[SampledToken] = []  # in the step that ran last

    def sample(self, step: Step, hidden_TH: Tensor) -> tuple[SampledToken, ...]:
        """Choose the tokens of a step. Every rank of the last stage then knows them.

        Returns:
            The tokens, on the first rank of the stage. If instances have their own clocks, the first rank of each
            instance returns the tokens of the sequences that it leads.
        """
        leads = self._running.leads
        decodes, ends = self._running.decoding.sequences, self._running.ending(step)
        if step.turn.instances:
            decodes, ends = tuple(filter(leads, decodes)), tuple(filter(leads, ends))
        drafts = ((self._running.by_id[draft.id], draft) for draft in step.drafts)
        verifications = [Verification(seq, draft) for seq, draft in drafts if leads(seq)]
        rows: tuple[SampledRow, ...] = decodes
        if verifications or ends:
            rows = (*decodes, *(row for verification in verifications for row in verification.rows), *ends)
        sampled = self._sample(step, rows, hidden_TH) if rows else ()
        accepted = [verification.accepted() for verification in verifications]
        ids_of_drafts = zip(verifications, accepted, strict=True)
        self._accepted_tokens = [
            SampledToken(verification.id, token_id) for verification, ids in ids_of_drafts for token_id in ids
        ]
        if verifications and sampled:
            counts = zip((len(verification.rows) for verification in verifications), map(len, accepted), strict=True)
            sampled = tuple(_without_rejected(sampled, len(decodes), counts))
        for verification in verifications:
            verification.end()
        if step.turn.instances:
            self._receive_tokens(self._running.sampled(step))
        return sampled

    def _sample(self, step: Step, rows: tuple[SampledRow, ...], hidden_TH: Tensor) -> tuple[SampledToken, ...]:
        span = self._spans.begin("head")
        is_whole = not step.chunks and len(rows) == len(hidden_TH)
        logits_Sv = self._logits(hidden_TH if is_whole else hidden_TH[self._sampled_rows(step)])
        self._spans.end(span)
        span = self._spans.begin("sampling", "host")
        sampled = self.sampling(logits_Sv, rows, self._sampling_ranks(step))
        self._spans.end(span)
        return sampled

    def score(self, step: Step, hidden_TH: Tensor) -> tuple[PromptLogprobs, ...]:
        """Return the requested log-probabilities of prompt tokens, on the ranks that return sampled tokens."""
        scores: list[PromptLogprobs] = []
        for start, chunk in self._segment_starts(step):
            seq = self._running.by_id[chunk.id]
            if not isinstance(chunk, Chunk) or chunk.scored is None or not self._running.leads(seq):
                continue
            targets_T, first = token_ids(chunk.scored.targets), start + chunk.scored.first
            count, rows_TH = seq.new.sampling.prompt_logprobs, hidden_TH[first : first + len(targets_T)]
            assert count is not None, "it asks for them"
            span = self._spans.begin("scoring", "host")
            entry = self._scoring(chunk.id, rows_TH, targets_T, count, self._logits, self._sampling_ranks(step))
            self._spans.end(span)
            if entry is not None:
                scores.append(entry)
        return tuple(scores)

    def last_sampled(self, step: Step) -> tuple[SampledToken, ...]:
        """Return the tokens of the last step, without log-probabilities and errors, on all ranks of the stage.

        If instances have their own clocks, only the instance that samples a draft knows its tokens.
        """

        def last_tokens(sequences: Iterable[SequenceState]) -> Iterator[SampledToken]:
            return (SampledToken(seq.new.id, seq.last_token) for seq in sequences)

        of_drafts = self._accepted_tokens if step.drafts else ()
        return (*last_tokens(self._running.decoding.sequences), *of_drafts, *last_tokens(self._running.ending(step)))

    def _sampling_ranks(self, step: Step) -> RankGroup:
        """Return the ranks that sample together. The first of them returns the results."""
        return self._mesh.ffn if step.turn.instances else self._mesh.stage

    def _segment_starts(self, step: Step) -> Iterator[tuple[int, Draft | Chunk]]:
        """Yield the first row of each draft and chunk."""
        starts = accumulate((segment.num_tokens for segment in step.segments), initial=len(self._running.decoding))
        return zip(starts, step.segments, strict=False)

    def _sampled_rows(self, step: Step) -> list[int]:
        """Return the rows after which this rank samples."""
        leads, by_id = self._running.leads, self._running.by_id
        places = [row for row, seq in enumerate(self._running.decoding.sequences) if leads(seq)]
        for start, segment in self._segment_starts(step):
            stop = start + segment.num_tokens
            if not leads(by_id[segment.id]):
                continue
            if isinstance(segment, Draft):
                places += range(start, stop)
            elif segment.sample:
                places.append(stop - 1)
        return places

    def _receive_tokens(self, sequences: Iterable[SequenceState]) -> None:
        """Receive the tokens of sequences shared by several instances from the instances that sampled them."""
        for instances, shared in by_instances(sequences):
            assert self._mesh.instance_groups is not None
            group = self._mesh.instance_groups.of(tuple(sorted(instances)))
            tokens_S = torch.tensor([seq.last_token for seq in shared], device=self._device)
            token_ids = group.broadcast(tokens_S, root=sorted(instances).index(instances[0]))
            for seq, token_id in zip(shared, token_ids.tolist(), strict=True):
                seq.last_token = token_id


def _without_rejected(
    sampled: tuple[SampledToken, ...], num_decodes: int, counts: Iterable[tuple[int, int]]
) -> Iterator[SampledToken]:
    """Yield the tokens of a step's rows, without those that were sampled after rejected draft tokens.

    Args:
        counts: For each draft, the number of its rows, and the number of rows whose tokens are kept.
    """
    remaining = iter(sampled)
    yield from islice(remaining, num_decodes)
    for num_rows, num_kept in counts:
        yield from list(islice(remaining, num_rows))[:num_kept]
    yield from remaining
