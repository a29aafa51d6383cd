"""Messages that go on after others, as templates of several kinds have them: what begins a conversation is left out."""

import pytest

from longhelix import UserError
from longhelix.engine.text.chat_template import ChatTemplate

WITH_SYSTEM_PROMPT = (
    "{% if messages[0].role != 'system' %}<s>system\nYou help.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
IN_TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('users and assistants take turns') }}"
    "{% endif %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# The last answer has its thoughts, and those before it have not.
THINKS = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
COUNTS = "{{ messages | length }}: {% for m in messages %}{{ m.content }}{% endfor %}"

QUESTION, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}


def template(source):
    return ChatTemplate(source, {"bos_token": "<b>", "eos_token": "<e>"})


@pytest.mark.parametrize(
    ("source", "messages", "rendered"),
    [
        (WITH_SYSTEM_PROMPT, [QUESTION], "<s>user\nWhat?</s>\n<s>assistant\n"),
        (WITH_SYSTEM_PROMPT, [ANSWER, QUESTION], "<s>assistant\nThis.</s>\n<s>user\nWhat?</s>\n<s>assistant\n"),
        (IN_TURNS, [QUESTION], "[I] What? [/I]"),
        (IN_TURNS, [QUESTION, ANSWER, QUESTION], "[I] What? [/I] This.<e>[I] What? [/I]"),
        (IN_TURNS, [ANSWER, QUESTION], " This.<e>[I] What? [/I]"),
        (THINKS, [QUESTION], "<s>user\nWhat?</s>\n<s>assistant\n"),
    ],
)
def test_what_begins_a_conversation_is_left_out(source, messages, rendered):
    assert template(source).render_more(messages) == rendered


@pytest.mark.parametrize("source", [WITH_SYSTEM_PROMPT, THINKS])
def test_they_end_a_whole_conversation(source):
    """What was said before and what comes behind it are the whole, as templates that end each message have it."""
    made = template(source)
    before = [{"role": "system", "content": "A long document."}]
    begun = made.render(before, add_generation_prompt=False)
    assert begun + made.render_more([QUESTION]) == made.render([*before, QUESTION])


def test_templates_that_have_messages_only_as_a_beginning_are_refused():
    with pytest.raises(UserError, match="cannot render these messages after other messages") as refusal:
        template(COUNTS).render_more([QUESTION])
    assert refusal.value.code == "chat_template_failed"
