"""`longhelix chat`: a conversation in the terminal, or over a pipe."""

from longhelix.cli.chat.commands import is_command, run_command
from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.chat.interrupts import on_interrupt
from longhelix.cli.chat.lines import open_lines
from longhelix.cli.options import ChatSamplingOptions, EngineFlags, ModelOptions
from longhelix.errors import RequestError, UserError


def chat(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: ChatSamplingOptions = ChatSamplingOptions(),  # noqa: B008 - frozen
) -> None:
    """Talk with a model. Ctrl-C ends an answer, /help lists commands, /exit leaves. From a pipe every line is a
    message, and only answers go to standard output."""
    params = sampling.params()
    lines = open_lines()
    interrupts: list[int] = []
    # Noted, and not raised: an interrupted step would leave ranks and engine at odds. The editor has its own Ctrl-C.
    with model.start(engine) as llm, on_interrupt(lambda number, frame: interrupts.append(number)):
        dialogue = Dialogue(llm, params, lines.notes)
        while not dialogue.over:
            interrupts.clear()
            text = lines.read(dialogue.conversation.fill)
            if text is None:
                break
            try:
                _hear(dialogue, text, interrupts)
            except (UserError, RequestError) as error:  # the conversation so far is still good
                lines.notes.print(f"error: {error}")


def _hear(dialogue: Dialogue, text: str, interrupts: list[int]) -> None:
    if is_command(text):
        run_command(dialogue, text)
    elif text.strip():
        dialogue.answer(text.strip("\n"), interrupts)
