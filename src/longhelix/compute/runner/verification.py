"""Verifies draft tokens: samples a token after every row of a draft, and compares it with the next draft token."""

from longhelix.compute.runner.adjustments import Adjustments
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import LAST_TOKEN, LENGTH, SequenceState, token_ids
from longhelix.scheduler.step import Draft


class DraftRow:
    """One row of a draft. Its token is sampled as if all draft tokens up to the row were accepted.

    Attributes:
        new: As of its sequence.
        numbers: As of its sequence.
        line: Line of the row in `numbers`: the number of tokens before the sampled one, and that token.
        seen: As of its sequence, with the draft tokens up to the row.
        adjustments: As of its sequence, with the draft tokens up to the row.
    """

    def __init__(
        self, seq: SequenceState, length: int, seen: SeenTokens | None, adjustments: Adjustments | None
    ) -> None:
        self.new, self.numbers = seq.new, seq.numbers
        self.line = seq.numbers.take()
        self.numbers.values[self.line, LENGTH] = length
        self.seen, self.adjustments = seen, adjustments

    @property
    def last_token(self) -> int:
        return self.numbers.values.item(self.line, LAST_TOKEN)

    def end(self) -> None:
        self.numbers.give_back(self.line)


class Verification:
    """Verifies the draft of one sequence, on a rank that samples its tokens.

    Every token is drawn with the key of its position. The tokens are therefore the same as without drafts.
    """

    def __init__(self, seq: SequenceState, draft: Draft) -> None:
        self.id = draft.id
        self._draft_ids = token_ids(draft.token_ids)[1:].tolist()
        seen, adjustments = seq.seen, seq.adjustments
        rows = [DraftRow(seq, draft.start + 1, seen, adjustments)]
        for length, token_id in enumerate(self._draft_ids, start=draft.start + 2):
            seen = None if seen is None else seen.with_token(token_id)
            adjustments = None if adjustments is None else adjustments.with_draft_token(token_id)
            rows.append(DraftRow(seq, length, seen, adjustments))
        self.rows = tuple(rows)

    def accepted(self) -> list[int]:
        """Return the sampled tokens, up to the first one that is not the next draft token."""
        sampled = [row.last_token for row in self.rows]
        num_accepted = 0
        while num_accepted < len(self._draft_ids) and self._draft_ids[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        return sampled[: num_accepted + 1]

    def end(self) -> None:
        """Free the rows. The sampled tokens are then lost."""
        for row in self.rows:
            row.end()
