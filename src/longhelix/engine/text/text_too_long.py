"""Text that cannot become a prompt."""

from longhelix.errors import UserError


class TextTooLongError(UserError):
    """Text of more characters than the tokens of a context can stand for."""

    def __init__(self, max_model_len: int, most_characters: int) -> None:
        super().__init__(
            f"the text has more than {most_characters} characters, which is the most that {max_model_len} tokens, the "
            "model's context, can stand for: shorten it",
            "context_length_exceeded",
        )
