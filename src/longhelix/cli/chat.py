"""`longhelix chat`: a conversation in the terminal."""

import signal
import sys

from longhelix.cli.options import EngineFlags, ModelOptions, SamplingOptions
from longhelix.engine.llm import LLM
from longhelix.errors import RequestError, UserError
from longhelix.request import SamplingParams


def chat(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
) -> None:
    """Talk with a model: one line a turn; an empty line or end of input ends it. Ctrl-C cuts an answer short."""
    params = sampling.params()
    messages: list[dict[str, str]] = []
    with model.start(engine) as llm:
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except (UserError, RequestError) as error:  # too long, say: the conversation so far is still good
                messages.pop()
                print(f"error: {error}", file=sys.stderr)


def _read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    request_id = llm.add(llm.tokenizer.encode_chat(messages), params)
    interrupts: list[int] = []
    # Between steps, not inside one: an interrupted step would leave ranks and engine at odds.
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    text = ""
    try:
        while llm.has_work:
            for delta in llm.step():
                text += delta.text
                print(delta.text, end="", flush=True)
                if delta.result is not None and delta.result.error is not None:
                    raise RequestError(f"the answer failed: {delta.result.error}")
            if interrupts:
                llm.abort(request_id)
    finally:
        signal.signal(signal.SIGINT, previous)
    print()
    return text
