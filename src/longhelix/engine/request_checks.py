"""Checks of a new request that need no scheduler."""

from array import array
from collections.abc import Sequence

from longhelix.engine.shown_images import ShownImage
from longhelix.errors import UserError
from longhelix.scheduler.request import SamplingParams, ServiceLevel
from longhelix.spec.vision import VisionSpec
from longhelix.spec.vocabulary import Vocabulary
from longhelix.values import shown


def check_types(sampling: SamplingParams, service: ServiceLevel) -> None:
    """Raise UserError if an argument has the wrong type."""
    if not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling is {shown(sampling)}: give SamplingParams")
    if not isinstance(service, ServiceLevel):
        raise UserError(f"service is {shown(service)}: give a ServiceLevel")


def check_token_ids(sampling: SamplingParams, vocabulary: Vocabulary) -> None:
    """Raise UserError if a stop or biased token is outside the vocabulary, or if `min_tokens` can never be reached."""
    vocab_size, eos_token_ids = vocabulary.size, vocabulary.eos_token_ids
    for name, asked in (("stop token", sampling.stop_token_ids), ("logit_bias: token", sampling.logit_bias)):
        beyond = next((token_id for token_id in asked if token_id >= vocab_size), None)
        if beyond is not None:
            raise UserError(
                f"{name} id {beyond} is outside the model's vocabulary of {vocab_size}: use ids from 0 to "
                f"{vocab_size - 1}"
            )
    stops = {token_id for token_id in (*sampling.stop_token_ids, *eos_token_ids) if token_id < vocab_size}
    if sampling.min_tokens and len(stops) == vocab_size:
        raise UserError(
            f"every token of the model's vocabulary is a stop token, but min_tokens is {sampling.min_tokens}: give "
            "fewer stop_token_ids, or set min_tokens to 0"
        )


def check_images(prompt_ids: "array[int]", images: Sequence[ShownImage], vision: VisionSpec | None) -> None:
    """Raise UserError if a prompt of token ids has more or fewer image tokens than its images need."""
    needed = sum(image.span.num_tokens for image in images)
    if vision is not None and prompt_ids.count(vision.image_token_id) != needed:
        raise UserError(
            f"the prompt has {prompt_ids.count(vision.image_token_id)} image tokens (id {vision.image_token_id}), "
            f"but its images need {needed}: give an ImagePrompt with the images, or leave the image tokens out"
        )
