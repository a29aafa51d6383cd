"""`longhelix chat`: a conversation in the terminal or over a pipe."""

from typing import Literal

from longhelix.cli.chat.commands import is_command, run_command
from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.chat.interrupts import on_interrupt
from longhelix.cli.chat.message_source import open_message_source
from longhelix.cli.options import ChatSamplingOptions, EngineFlags, GenerationConfig, ModelOptions
from longhelix.engine.text.reasoning import PARSERS
from longhelix.errors import RequestError, UserError


def chat(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: ChatSamplingOptions = ChatSamplingOptions(),  # noqa: B008 - frozen
    *,
    generation_config: GenerationConfig = "auto",
    reasoning_parser: Literal[PARSERS] = "auto",
) -> None:
    """Chat with a model. Ctrl-C stops an answer, /help lists the commands, /exit quits. With piped input, each line is
    one message, and only answers go to standard output.

    Parameters
    ----------
    generation_config
        Where the defaults for sampling come from: auto takes them from the model's generation_config.json or GGUF
        file, none always takes the most likely token.
    reasoning_parser
        Format of the model's reasoning, which is shown dimmed, or on standard error with piped input. auto detects it
        from the chat template and the vocabulary; none shows the reasoning as part of the answer.
    """
    sampling.params()  # checks the values before the engine starts
    messages = open_message_source()
    interrupts: list[int] = []
    # Record interrupts instead of raising an exception, because an interrupted step would leave the ranks and the
    # engine out of sync. The editor handles Ctrl-C itself.
    with model.start(engine) as llm, on_interrupt(lambda number, frame: interrupts.append(number)):
        params = sampling.params(llm.sampling_defaults() if generation_config == "auto" else {})
        dialogue = Dialogue(llm, params, messages.notes, llm.tokenizer.reasoning_form(reasoning_parser))
        while not dialogue.over:
            interrupts.clear()
            text = messages.read(dialogue.conversation.fill)
            if text is None:
                break
            try:
                _handle(dialogue, text, interrupts)
            except (UserError, RequestError) as error:  # the earlier conversation stays valid
                messages.notes.print(f"error: {error}")


def _handle(dialogue: Dialogue, text: str, interrupts: list[int]) -> None:
    """Run a command, or answer a message."""
    if is_command(text):
        run_command(dialogue, text)
    elif text.strip():
        dialogue.answer(text.strip("\n"), interrupts)
