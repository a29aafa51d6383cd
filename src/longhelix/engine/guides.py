"""What requests with guides need beside their prompts."""

from functools import cached_property

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.engine.workers.guide_checker import GuideChecker
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, TokenTable
from longhelix.spec import ModelSpec


class Guides:
    """Guides of one model's texts."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._eos_ids = spec.vocab_size, spec.eos_token_ids
        self._checker = GuideChecker(lambda: self.table)

    def check(self, guide: Guide) -> float:
        """The seconds of CPU time that it takes to be compiled. Raises UserError if no text of this model can follow
        it. Any thread may ask."""
        return self._checker.check(guide)

    def knows(self, guide: Guide) -> bool:
        """Whether `check` has found before that it can be followed. Raises the UserError that it was refused with."""
        return self._checker.knows(guide)

    @cached_property
    def table(self) -> TokenTable:
        """What the model's tokens stand for. Raises UserError for a model whose texts no guide can be for."""
        eos_ids = tuple(token_id for token_id in self._eos_ids if token_id < self._vocab_size)
        if not eos_ids:
            raise UserError("the model has no token that ends a text, which guides need: ask for no guide")
        found = self._tokenizer.token_bytes
        special_ids = {token_id for token_id in self._tokenizer.special_ids if token_id < self._vocab_size}
        # One that marks something has a name, whatever else it lacks.
        tokens = [found.get(token_id, b"") for token_id in range(self._vocab_size)]
        for token_id in special_ids.union(eos_ids):
            tokens[token_id] = tokens[token_id] or b"<%d>" % token_id
        return TokenTable(tuple(tokens), tuple(sorted(special_ids.union(eos_ids))), eos_ids)

    def close(self) -> None:
        self._checker.close()
