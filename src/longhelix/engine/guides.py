"""Checks guides and builds the token table that they need."""

from functools import cached_property

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.engine.workers.guide_checker import GuideChecker
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, TokenTable
from longhelix.spec import ModelSpec


class Guides:
    """Checks guides for one model and builds the model's token table."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._eos_ids = spec.vocabulary.size, spec.vocabulary.eos_token_ids
        self._checker = GuideChecker(lambda: self.table)

    def check(self, guide: Guide) -> float:
        """Check that some text of this model can follow a guide. Any thread may call this method.

        Returns:
            Seconds of CPU time that it takes to compile the guide.

        Raises:
            UserError: no text of this model can follow the guide.
        """
        return self._checker.check(guide)

    def knows(self, guide: Guide) -> bool:
        """Return whether `check` has already accepted the guide.

        Raises:
            UserError: `check` has already rejected the guide. The error is the same.
        """
        return self._checker.knows(guide)

    @cached_property
    def table(self) -> TokenTable:
        """The bytes of each of the model's tokens. Raises UserError if the model does not support guides."""
        eos_ids = tuple(token_id for token_id in self._eos_ids if token_id < self._vocab_size)
        if not eos_ids:
            raise UserError("guides need a token that ends a text, but the model has none: leave the guide out")
        found = self._tokenizer.token_bytes
        special_ids = {token_id for token_id in self._tokenizer.special_ids if token_id < self._vocab_size}
        # Guides distinguish tokens by their bytes, so each special token needs some bytes even if it has no text.
        tokens = [found.get(token_id, b"") for token_id in range(self._vocab_size)]
        for token_id in special_ids.union(eos_ids):
            tokens[token_id] = tokens[token_id] or b"<%d>" % token_id
        return TokenTable(tuple(tokens), tuple(sorted(special_ids.union(eos_ids))), eos_ids)

    def close(self) -> None:
        """End the process that checks guides."""
        self._checker.close()
