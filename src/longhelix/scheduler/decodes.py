"""The sequences that decode: each has one row in every step."""

from longhelix.scheduler.sequence import Sequence


class Decodes:
    """A set of sequences that grow by one token in every round. A round costs only what it changes, however many
    sequences there are.

    A sequence is looked at only in the rounds in which it is due: when its row needs a KV block, and after its last
    row. In between, its length follows from the number of rounds.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._round = 0
        self._seen: dict[Sequence, int] = {}  # the round that each one's length is of
        self._due: dict[int, list[Sequence]] = {}
        self._next: dict[Sequence, int] = {}  # the round that each is due in
        self._most_blocks: int | None = 0
        self.kv_tokens = 0  # of all of them

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._seen

    @property
    def most_blocks(self) -> int:
        """The most KV blocks that any of the sequences has on one rank."""
        if self._most_blocks is None:
            self._most_blocks = max((seq.most_blocks for seq in self._seen), default=0)
        return self._most_blocks

    def join(self, seq: Sequence) -> None:
        """From the next round on, the sequence has a row."""
        self._seen[seq] = self._round
        self.kv_tokens += seq.length
        self.look_again(seq)

    def look_again(self, seq: Sequence) -> None:
        """Set the round in which the sequence is due, from the KV blocks that it has now."""
        room_tokens = seq.num_blocks * self._block_tokens - seq.length
        self._next[seq] = due = self._round + 1 + min(room_tokens, seq.decodes_left)
        self._due.setdefault(due, []).append(seq)
        if self._most_blocks is not None:
            self._most_blocks = max(self._most_blocks, seq.most_blocks)

    def leave(self, seq: Sequence) -> None:
        self._follow(seq)
        del self._seen[seq], self._next[seq]
        self.kv_tokens -= seq.length
        if seq.most_blocks == self._most_blocks:
            self._most_blocks = None

    def advance(self) -> tuple[list[Sequence], list[Sequence]]:
        """Begin the next round. Returns the sequences that were done before it, and those whose row in it needs a KV
        block."""
        due = [seq for seq in self._due.pop(self._round + 1, ()) if self._next.get(seq) == self._round + 1]
        done = [seq for seq in due if self._follow(seq).decodes_left == 0]
        for seq in done:
            self.leave(seq)
        self._round += 1
        self.kv_tokens += len(self._seen)
        return done, [self._follow(seq) for seq in due if seq in self._seen]

    def _follow(self, seq: Sequence) -> Sequence:
        """Bring the length of a sequence up to this round."""
        seq.length += self._round - self._seen[seq]
        self._seen[seq] = self._round
        return seq
