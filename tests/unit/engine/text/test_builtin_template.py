"""The built-in model's chat template, which adds tools to the template in its GGUF file."""

import pytest

from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.engine.text.tool_calls import HERMES

pytestmark = pytest.mark.unit

KEY = "tokenizer.chat_template"
USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "Answer in verse."}
ANSWER = {"role": "assistant", "content": "It rains."}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


@pytest.fixture(scope="module")
def templates():
    """Ours, and the one in the file."""
    builtin = open_checkpoint("builtin")
    return [ChatTemplate(each.metadata[KEY], {}) for each in (builtin, GgufCheckpoint(builtin.path))]


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER]])
@pytest.mark.parametrize("prompted", [True, False])
def test_conversations_without_tools_are_as_in_the_file(templates, messages, prompted):
    ours, own = (each.render(messages, add_generation_prompt=prompted) for each in templates)
    assert ours == own


def test_tools_calls_and_their_results_are_shown(templates):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "rain"}
    text = templates[0].render([SYSTEM, USER, called, result], tools=[TOOL], add_generation_prompt=True)
    assert templates[0].tool_form == HERMES
    assert text.count("<|im_start|>system") == 1
    for words in (
        "Answer in verse.",
        '"name": "get_weather"',
        "<tool_call>\n",
        "<tool_response>\nrain\n</tool_response>",
    ):
        assert words in text
    assert text.endswith("<|im_start|>assistant\n")
