"""A drafter that knows how requests go on."""

import random
from array import array


class KnownTokens:
    """Drafts of any number of right tokens, then of any number of others, mostly wrong ones.

    prompts, continuations: of each request, by its id. requests: the ids of those that have drafts.
    """

    def __init__(self, prompts, continuations, requests, seed):
        self._texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, continuations, strict=True)]
        self._requests, self._chance = requests, random.Random(seed)
        self.num_drafted = 0

    def drafts(self, request):
        return request.id in self._requests

    def propose(self, seq):
        known = seq.tokens.num_prompt + len(seq.tokens.output)
        right = self._texts[seq.id][known:][: self._chance.randrange(5)]
        found = right + [self._chance.randrange(20) for _ in range(self._chance.randrange(3))]
        self.num_drafted += len(found)
        return array("i", found)
