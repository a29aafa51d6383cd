"""Calls of functions in answers: found in any pieces, and in grammars that allow nothing else."""

import json
import random

import numpy as np
import pytest

from longhelix.compute.runner.matchers import Matchers
from longhelix.engine.text import tool_calls
from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.engine.text.tool_calls import HERMES, LLAMA, Arguments, ContentDelta, ToolCalls, ToolCallStart
from longhelix.scheduler.guide import Guide, TokenTable

pytestmark = pytest.mark.unit

NAMES = ("add", "look_up")
HEAD, FOOT = "<tool_call>\n", "\n</tool_call>"
ADD, LOOK = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}', '{"name": "look_up", "arguments": {"q": "a\\"{b"}}'
LLAMA_ADD = ADD.replace("arguments", "parameters")
ADDED, LOOKED = ("add", {"a": 1, "b": [2, "}"]}), ("look_up", {"q": 'a"{b'})
CASES = [
    (HERMES, "Hello <there>, \n{", ("Hello <there>, \n{", [])),
    (HERMES, "", ("", [])),
    (HERMES, f"{HEAD}{ADD}{FOOT}", ("", [("add", {"a": 1, "b": [2, "}"]})])),
    (
        HERMES,
        f"I look.\n{HEAD}{ADD}{FOOT}\n{HEAD}{LOOK}{FOOT}",
        ("I look.", [("add", {"a": 1, "b": [2, "}"]}), ("look_up", {"q": 'a"{b'})]),
    ),
    (HERMES, f"{HEAD}{ADD}{FOOT}\nDone.", ("\nDone.", [("add", {"a": 1, "b": [2, "}"]})])),
    (HERMES, f'{HEAD}{{"arguments": {{"q": 1}}, "name": "look_up"}}{FOOT}', ("", [("look_up", {"q": 1})])),
    (HERMES, f'{HEAD}{{"name": "other", "arguments": {{}}}}{FOOT}!', None),
    (HERMES, f"{HEAD}no JSON{FOOT}", None),
    (HERMES, f"Use the <tool_call> tag. {HEAD}{LOOK}{FOOT}\n ", ("Use the <tool_call> tag.", [LOOKED])),
    (HERMES, " \n<tool_call> <tool_call>\n<tool_call>", None),
    (HERMES, f"{HEAD}{ADD}{FOOT}\n <tool_call>", ("\n <tool_call>", [ADDED])),
    (HERMES, f"{HEAD}{ADD}\n{HEAD}{LOOK}{FOOT}Done. ", ("Done. ", [ADDED, LOOKED])),  # without an end
    (HERMES, f"{HEAD}{ADD} Done.", (" Done.", [ADDED])),
    (HERMES, f'{HEAD}{{"type": "function", "name": "add", "arguments": {{}}}}{FOOT}', ("", [("add", {})])),
    (HERMES, f'{HEAD}{{"name": "add", "id": 1, "arguments": {{}}, "x": ["}}"]}}{FOOT}', ("", [("add", {})])),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{"q": "{FOOT[1:]}"}}}}{FOOT}', ("", [("add", {"q": FOOT[1:]})])),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{}}, "x": "}}]{{\\""}}{FOOT}.', (".", [("add", {})])),
    (HERMES, f'{HEAD}{{"name": "{"a" * 500}", "arguments": {{}}}}{FOOT}', None),
    (HERMES, f'{HEAD}{{"type": "<tool_call>\n{HEAD}{LOOK}{FOOT}', (f'{HEAD}{{"type": "<tool_call>', [LOOKED])),
    (HERMES, f'{HEAD}{{"\\u006eame": "\\u0061dd", "arguments": {{}}}}{FOOT}', ("", [("add", {})])),
    (HERMES, f"{HEAD}[1]{FOOT}", None),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": 5}}{FOOT}', None),
    (HERMES, f"{HEAD}{{", None),
    (HERMES, "x <tool_ca", None),
    (LLAMA, "Hello {there}", None),
    (LLAMA, " \n", None),
    (LLAMA, LLAMA_ADD, ("", [("add", {"a": 1, "b": [2, "}"]})])),
    (LLAMA, f"{LLAMA_ADD}; {LLAMA_ADD}", ("", [("add", {"a": 1, "b": [2, "}"]})] * 2)),
    (LLAMA, '{"parameters": {"q": 1}, "name": "look_up"}', ("", [("look_up", {"q": 1})])),
    (LLAMA, '{"name": "Bob", "parameters": {}} is a person', None),
    (LLAMA, '{"a": 1}', None),
    (LLAMA, '{"a": 1', None),
    (LLAMA, f" {LLAMA_ADD};\n", ("", [ADDED])),
    (LLAMA, f"{LLAMA_ADD}\nDone.\n", ("\nDone.\n", [ADDED])),
    (LLAMA, f'{LLAMA_ADD}; {{"a": 1}}', ('; {"a": 1}', [ADDED])),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", {})])),
]
BROKEN = [  # what is said and called, where arguments are no JSON
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{"a": [1{FOOT}\nDone.', "\nDone.", '{"a": [1\n'),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{"a": "b{FOOT}\nDone.', "\nDone.", '{"a": "b'),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{"a": "b\\{FOOT}!', "!", '{"a": "b\\'),
    (HERMES, f'{HEAD}{{"name": "add", "arguments": {{"a": "b\nc"}}}} Done.', '\nc"}} Done.', '{"a": "b'),
    (LLAMA, '{"name": "add", "parameters": {"a": "b\n\nDone.', "\n\nDone.", '{"a": "b'),
]


def joined(pieces):
    """What is said, and what is called."""
    text, calls = "", []
    for piece in pieces:
        match piece:
            case ContentDelta(more):
                text += more
            case ToolCallStart(place, name):
                assert place == len(calls)
                calls.append([name, ""])
            case Arguments(place, more):
                assert place == len(calls) - 1
                calls[-1][1] += more
    return text, [(name, arguments) for name, arguments in calls]


def parsed(text, calls):
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def found_in(text, form, chance, sizes, several=True):
    """In an answer that comes in such pieces."""
    calls, pieces, at = ToolCalls(form, NAMES, several), [], 0
    while at < len(text):
        size = chance.choice(sizes)
        pieces += calls.push(text[at : at + size])
        at += size
    pieces += calls.finish()
    assert calls.num_calls == len(joined(pieces)[1])
    return joined(pieces)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_found_however_the_text_comes(form, text, expected, seed):
    """None: all of it is text."""
    found = found_in(text, form, random.Random(seed), [1, 2, 5, 1000] if seed else [1])
    assert parsed(*found) == ((text, []) if expected is None else expected)


@pytest.mark.parametrize("sizes", [[1], [1, 2, 5], [1000]])
@pytest.mark.parametrize(("form", "text", "said", "arguments"), BROKEN)
def test_arguments_that_are_no_json_end_before_what_is_none(form, text, said, arguments, sizes):
    """Nothing behind them is lost."""
    assert found_in(text, form, random.Random(1), sizes) == (said, [("add", arguments)])


@pytest.mark.parametrize(("form", "text", "expected"), [case for case in CASES if case[2] is not None])
def test_behind_the_only_call_that_may_be_all_is_dropped(form, text, expected):
    said, called = expected
    for sizes in [1], [1, 2, 5], [1000]:
        found, alone = parsed(*found_in(text, form, random.Random(2), sizes, several=False))
        assert alone == called[:1]
        assert said.startswith(found)
        assert not called or text.startswith(found)


PARTS = [
    HEAD, FOOT, ADD, LOOK, LLAMA_ADD, "<tool_call>", "</tool_call>", "{", "}", '"', "\\", "\n", " ", ";", "; ", "[",
    "]", "<", "text", ":", ",", '{"name": "add", "arguments": {', '{"name": "add", "parameters": {', '{"type": "x',
    '"name"', '"add"', '{"name": ', '{"name": "add", ', "é",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_what_is_found_does_not_depend_on_the_pieces(seed):
    """In texts of anything that plays a part."""
    chance = random.Random(seed)
    text, form = "".join(chance.choices(PARTS, k=chance.choice([3, 8, 20]))), chance.choice([HERMES, LLAMA])
    for several in True, False:
        whole = found_in(text, form, chance, [len(text)], several)
        for sizes in [1], [1, 2, 3], [1, 7, 30]:
            assert found_in(text, form, chance, sizes, several) == whole


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        (LLAMA, '{"a": "'),
        (LLAMA, '{"type": "'),
        (HERMES, "<tool_call>{" + '"name": "'),
        (HERMES, "<tool_call>" + '{"type": "'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "'),
    ],
)
def test_a_long_answer_is_looked_at_once(form, begin):
    """By how many characters are shown to the patterns that look at them."""
    looked = 0

    class Counted:
        def __init__(self, pattern):
            self.pattern = pattern

        def __getattr__(self, name):
            def look(text, place=0):
                nonlocal looked
                looked += len(text) - place
                return getattr(self.pattern, name)(text, place)

            return look

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_TOKEN", "_BEGUN", "_QUOTED", "_UNQUOTED"):
            patch.setattr(tool_calls, name, Counted(getattr(tool_calls, name)))
        calls = ToolCalls(form, NAMES)
        calls.push(begin)
        for _ in range(20_000):
            calls.push("a")
    assert looked < 20 * 20_000


@pytest.mark.parametrize(
    ("form", "text"),
    [(LLAMA, '{"a"'), (LLAMA, '{"name": "Bob"'), (HERMES, "<tool_call>["), (HERMES, "<tool_call> {5")],
)
def test_what_can_be_no_call_is_told_at_once(form, text):
    assert joined(ToolCalls(form, NAMES).push(text)) == (text, [])


@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_arguments_come_while_they_are_written(form):
    text = f'{HEAD if form is HERMES else ""}{{"name": "add", "{form.arguments}": {{"a": 1'
    *_, call, arguments = ToolCalls(form, NAMES).push(text)
    assert (call, arguments) == (ToolCallStart(0, "add"), Arguments(0, '{"a": 1'))


TABLE = TokenTable((*(bytes([byte]) for byte in range(256)), b"<tool_call>", b'{"name": "', b"</s>"), (258,), (258,))
SCHEMAS = {
    "add": {
        "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"enum": [True, None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"digit": {"enum": [1, 2, 3]}},
    },
    "look_up": {
        "type": "object",
        "properties": {"q": {"const": "x"}},
        "required": ["q"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_answers_of_the_grammar_are_calls(form, several, seed):
    """And references in a schema find what is in this one."""
    matcher = Matchers(TABLE).new(Guide("grammar", form.lark(SCHEMAS, several)))
    chance, text = random.Random(seed), b""
    while not matcher.has_ended:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        chosen = 258 if 258 in allowed and chance.random() < 0.5 else chance.choice(allowed)
        matcher.add_one(chosen)
        text += TABLE.tokens[chosen] if chosen != 258 else b""
    calls = ToolCalls(form, SCHEMAS)
    said, called = parsed(*joined([*calls.push(text.decode()), *calls.finish()]))
    assert said == ""
    assert 1 <= len(called) <= (100 if several else 1)
    for name, arguments in called:
        if name == "add":
            assert arguments["a"] in (1, 2, 3)
            assert arguments["b"] in (True, None)
        else:
            assert arguments == {"q": "x"}


QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}
{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools>\\nReturn <tool_call>" }}
{{- "\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- message.content + '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN, HERMES),
        (QWEN.replace("tools", "functions"), None),  # takes none
        (QWEN.replace("<args-json-object>", "<function=name>"), None),
        ('{{ tools }}Respond in the format {"name": function name, "parameters": dictionary of arguments}.', LLAMA),
        ("{{ tools }}", None),
        ("{% if", None),
    ],
)
def test_a_template_shows_the_form(source, form):
    assert ChatTemplate(source, {}).tool_form is form


def test_a_template_gets_tools_and_calls():
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    text = ChatTemplate(QWEN, {}).render(messages, [tool])
    assert json.dumps(tool) in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert "# Tools" not in ChatTemplate(QWEN, {}).render(messages)
