"""`longhelix generate`: answers one prompt and prints measurements."""

import json as json_module
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from longhelix.cli.measurements import fullest, measurements, scattered
from longhelix.cli.options import EngineFlags, ModelOptions, SamplingOptions, contexts_folder, stderr
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag
from longhelix.engine.llm import LLM
from longhelix.engine.prompt import ImagePrompt, Prompt
from longhelix.engine.result import Result
from longhelix.errors import RequestError, UserError


def generate(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    image: Annotated[tuple[Path, ...], Parameter(negative=(), show_default=False)] = (),
    context: str | None = None,
    chat: Flag = False,
    json: Flag = False,
) -> None:
    """Generate an answer to one prompt. Streams the text to standard output, and prints measurements to standard error.

    Parameters
    ----------
    prompt
        Text of the prompt, used as it is.
    prompt_file
        UTF-8 file to read the prompt from. A newline at its end is part of the prompt.
    image
        Image file for vision-language models; may be given several times. Images come before the text, unless the
        prompt marks their places, such as with <|image_pad|>.
    context
        Name of a saved context (see longhelix context) to put before the prompt. Its KV is not computed again.
    chat
        Apply the model's chat template, with the prompt as the user's message.
    json
        Print one JSON object instead of text and table.
    """
    text = _prompt(prompt, prompt_file)
    if chat and context is not None:
        raise UserError(
            "--context cannot be combined with --chat, since a saved context has no chat template: leave one out"
        )
    if image and context is not None:
        raise UserError(
            "--context cannot be combined with --image, since a saved context holds text only: leave one out"
        )
    params = sampling.params()
    if context is not None:
        contexts_folder(engine).at(context)
    with model.start(engine) as llm:
        given = llm.tokenizer.encode_chat([{"role": "user", "content": _content(text, image)}]) if chat else text
        given = ImagePrompt(given, image) if image else given
        result = _run(llm, given, params, context, echo=not json)
        load, factors = llm.expert_load(), llm.cost_factors
        report = llm.sequence_parallel_report()
    if json:
        asked = {"expert_load": load, "sequence_parallel": report}
        given = {name: value for name, value in asked.items() if value is not None}
        print(json_module.dumps(_as_json(result) | given))
    else:
        table = measurements(result, llm.config)
        table.add_row("predictions", "corrected by {:.2f} for decodes, {:.2f} for chunks of prompts".format(*factors))
        if load is not None:
            table.add_row("fullest expert", fullest(load))
        if report is not None:
            table.add_row("sequence parallelism", scattered(report))
        stderr.print(table)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UserError("give exactly one of --prompt and --prompt-file")
    return prompt if prompt is not None else read_text(prompt_file)


def _content(text: str, images: tuple[Path, ...]) -> str | list[dict[str, str]]:
    """Return the content of the user's message in the format of chat templates: images first, then the text."""
    return [*({"type": "image"} for _ in images), {"type": "text", "text": text}] if images else text


def _run(llm: LLM, prompt: Prompt, params, context: str | None, echo: bool) -> Result:
    is_line_open = False
    try:
        for delta in llm.stream(prompt, params, context=context):
            if echo:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                is_line_open = True
            if delta.result is not None:
                result = delta.result
    finally:  # an error has a line of its own too
        if is_line_open:
            print()
    if result.error is not None:
        raise RequestError(f"the request failed: {result.error}")
    return result


def _as_json(result: Result) -> dict:
    """Convert the result to a dict, without optional fields that are None."""
    optional = (
        "logprobs",
        "token_texts",
        "prompt_logprobs",
        "ending_token_id",
        "ending_logprobs",
        "error",
        "reasoning",
        "reasoning_tokens",
    )
    return {name: value for name, value in asdict(result).items() if name not in optional or value is not None}
