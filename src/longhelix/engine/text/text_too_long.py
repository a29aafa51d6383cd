"""The error for text that is too long for a prompt."""

from longhelix.errors import UserError


class TextTooLongError(UserError):
    """The text has more characters than `max_model_len` tokens can represent."""

    def __init__(self, max_model_len: int, most_characters: int) -> None:
        super().__init__(
            f"the text has more than {most_characters} characters, the most that the model's context of "
            f"{max_model_len} tokens can hold: shorten the text",
            "context_length_exceeded",
        )
