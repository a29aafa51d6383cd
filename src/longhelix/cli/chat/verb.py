"""`longhelix chat`: a conversation in the terminal, or over a pipe."""

from typing import Literal

from longhelix.cli.chat.commands import is_command, run_command
from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.chat.interrupts import on_interrupt
from longhelix.cli.chat.lines import open_lines
from longhelix.cli.options import ChatSamplingOptions, EngineFlags, ModelOptions
from longhelix.engine.text.reasoning import PARSERS
from longhelix.errors import RequestError, UserError


def chat(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: ChatSamplingOptions = ChatSamplingOptions(),  # noqa: B008 - frozen
    *,
    reasoning_parser: Literal[PARSERS] = "auto",
) -> None:
    """Talk with a model. Ctrl-C ends an answer, /help lists commands, /exit leaves. From a pipe every line is a
    message, and only answers go to standard output.

    Parameters
    ----------
    reasoning_parser
        How the model writes its reasoning, which is shown dimmed, and from a pipe goes to standard error. auto looks at
        the chat template and the vocabulary; none shows the reasoning as a part of the answer.
    """
    params = sampling.params()
    lines = open_lines()
    interrupts: list[int] = []
    # Noted, and not raised: an interrupted step would leave ranks and engine at odds. The editor has its own Ctrl-C.
    with model.start(engine) as llm, on_interrupt(lambda number, frame: interrupts.append(number)):
        dialogue = Dialogue(llm, params, lines.notes, llm.tokenizer.reasoning_form(reasoning_parser))
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
