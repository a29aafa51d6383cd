"""Turns prompts that users give into what the token core takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.engine.contexts import Contexts, ReadContext
from longhelix.engine.images import Images
from longhelix.engine.prompt import ImagePrompt, Prompt, ReadPrompt
from longhelix.engine.shown_images import ShownImage
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError
from longhelix.scheduler.request import SamplingParams, ServiceLevel


@dataclass(frozen=True)
class GivenTokens:
    """A prompt as the token core takes it."""

    token_ids: Sequence[int]  # those of the saved context, if there is one, followed by those of the prompt
    images: Sequence[ShownImage] = ()  # in the order of their positions
    hashes: Sequence[bytes] = ()  # block hashes that are already known, from the first block
    context: str | None = None  # name of the saved context


class PromptReader:
    """Reads prompts with the tokenizer, the images and the saved contexts of an engine."""

    def __init__(self, tokenizer: Tokenizer, images: Images, contexts: Contexts) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._contexts = contexts

    def read(
        self, prompt: Prompt, context: str | ReadContext | None, sampling: SamplingParams, service: ServiceLevel
    ) -> GivenTokens:
        """Return a prompt's token ids and images. If it continues a saved context, load the context into the ranks.

        Args:
            prompt: text, token ids, or a prompt with images.
            context: the saved context, or its name. None if there is none.
            sampling: sampling settings of the request, which decide its capacity.
            service: service level of the request, which has its cache salt.

        Raises:
            UserError: the prompt or the context is invalid, or they do not fit together.
        """
        if isinstance(prompt, ImagePrompt | ReadPrompt):
            if context is not None:
                raise UserError(
                    "a saved context cannot be combined with images: leave out context, or give the prompt without "
                    "images"
                )
            read = prompt if isinstance(prompt, ReadPrompt) else self._images.read(prompt, self.token_ids)
            return GivenTokens(read.token_ids, read.images)
        if context is None:
            return GivenTokens(self.token_ids(prompt))
        context = self._read_context(context, service)
        more = self._tokenizer.encode_more(prompt) if isinstance(prompt, str) else prompt
        token_ids, hashes = self._contexts.before(context, more, sampling)
        return GivenTokens(token_ids, hashes=hashes, context=context.saved.name)

    def token_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt without images. Raises UserError for a prompt with images."""
        if isinstance(prompt, ImagePrompt | ReadPrompt):
            raise UserError(
                "a saved context holds text only: save it without images, and give the images in each prompt"
            )
        if isinstance(prompt, str):  # a tokenizer may convert empty text to a BOS token
            return self._tokenizer.encode(prompt) if prompt else []
        return prompt

    def _read_context(self, context: str | ReadContext, service: ServiceLevel) -> ReadContext:
        if not isinstance(context, ReadContext):
            return self._contexts.read(context, service.cache_salt)
        if context.cache_salt != service.cache_salt:
            raise UserError(
                "the request's cache_salt differs from the one that its context was loaded with: use the same value"
            )
        return context
