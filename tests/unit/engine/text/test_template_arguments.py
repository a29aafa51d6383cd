"""What requests ask of a chat template beside messages: variables, and where the prompt ends. transformers is the
oracle."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from longhelix import UserError
from longhelix.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.unit

PLAIN = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
THINKS = PLAIN[: -len("{% endif %}")] + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/]{% endfor %}"
PARTS = (
    "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
)
RAG = "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{% endif %}" + PLAIN
SHORTENS = "{% for m in messages %}<s>{{ m.content[:3] }}</s>{% endfor %}"
DROPS = "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}</s>{% endif %}{% endfor %}"

QUESTION = {"role": "user", "content": "What?"}
HISTORIES = [
    [QUESTION],
    [QUESTION, {"role": "assistant", "content": "It is"}],
    [QUESTION, {"role": "assistant", "content": "It is "}],
    [QUESTION, {"role": "assistant", "content": "  It is \n"}],
    [QUESTION, {"role": "assistant", "content": ""}],
    [QUESTION, {"role": "assistant", "content": "What?"}],
    [QUESTION, {"role": "assistant", "content": "</s>\n<s>"}],
    [QUESTION, {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG LONGHELIX_CONTINUES_HERE"}],
]


def rendered_by_transformers(source, messages, **arguments):
    ((found,), _) = render_jinja_template([messages], chat_template=source, **arguments)
    return found


@pytest.mark.parametrize("messages", HISTORIES)
@pytest.mark.parametrize("source", [PLAIN, THINKS, TRIMS, PARTS])
def test_a_prompt_that_ends_inside_of_its_last_message(source, messages):
    found = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == rendered_by_transformers(source, messages, continue_final_message=True)
    assert found.rstrip().endswith(messages[-1]["content"].strip())


def test_the_last_text_of_several_parts_goes_on():
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image"},
        {"type": "text", "text": "it is"},
        {"type": "image"},
    ]
    messages = [{"role": "user", "content": parts}]
    found = ChatTemplate(PARTS, {}).render(messages, continue_final_message=True)
    assert found == rendered_by_transformers(PARTS, messages, continue_final_message=True) == "<s>Look: <image>it is"
    assert parts[2]["text"] == "it is"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (PLAIN, []),
        (PARTS, [{"role": "user", "content": [{"type": "image"}]}]),
        (PARTS, [{"role": "user", "content": []}]),
        (DROPS, HISTORIES[1]),
        (SHORTENS, HISTORIES[1]),
    ],
)
def test_what_cannot_go_on_is_refused(source, messages):
    with pytest.raises(UserError, match="continue_final_message is set, but the"):
        ChatTemplate(source, {}).render(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message is set"):
        rendered_by_transformers(source, messages, continue_final_message=True)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_prompt_may_end_behind_its_last_message(add_generation_prompt):
    found = ChatTemplate(PLAIN, {}).render([QUESTION], add_generation_prompt=add_generation_prompt)
    assert found == rendered_by_transformers(PLAIN, [QUESTION], add_generation_prompt=add_generation_prompt)
    assert found.endswith("assistant\n") == add_generation_prompt


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"other": [1, {}]}])
def test_variables_reach_the_template(variables):
    found = ChatTemplate(THINKS, {}).render([QUESTION], variables=variables)
    assert found == rendered_by_transformers(THINKS, [QUESTION], add_generation_prompt=True, **variables)
    assert ("<think>" in found) == (variables.get("enable_thinking") is False)


def test_documents_are_variables():
    documents = [{"title": "A", "text": "b"}]
    found = ChatTemplate(RAG, {}).render([QUESTION], variables={"documents": documents})
    assert found == rendered_by_transformers(RAG, [QUESTION], documents=documents, add_generation_prompt=True)
    assert found.startswith("A: b\n")


def test_variables_reach_messages_behind_others():
    template = ChatTemplate(THINKS, {})
    more = template.render_more([QUESTION], {"enable_thinking": False})
    assert more == template.render([QUESTION], variables={"enable_thinking": False})
    assert template.render_more(HISTORIES[1], continue_final_message=True).endswith("<s>assistant\nIt is")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"messages": []}, "chat_template_kwargs has messages"),
        ({"tools": []}, "chat_template_kwargs has tools"),
        ({"add_generation_prompt": False}, "chat_template_kwargs has add_generation_prompt"),
        ({"chat_template": "x"}, "chat_template_kwargs has chat_template"),
        ({5: 1}, "a name in chat_template_kwargs is 5"),
        ({"a\ud800": 1}, "half a surrogate pair"),
        ({str(number): 1 for number in range(65)}, "chat_template_kwargs has 65 entries"),
        ([], "chat_template_kwargs is"),
    ],
)
def test_variables_that_are_none_are_refused(variables, words):
    template = ChatTemplate(PLAIN, {})
    for render in (
        lambda: template.render([QUESTION], None, variables),
        lambda: template.render_more([QUESTION], variables),
    ):
        with pytest.raises(UserError, match=words):
            render()
