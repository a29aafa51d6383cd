"""A conversation as its user meets it, over an engine that answers by count: commands, files, limits, interrupts."""

import io
from types import SimpleNamespace

import pytest
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from longhelix.cli.chat import dialogue
from longhelix.cli.chat.commands import COMMANDS, is_command, run_command
from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.chat.editor import Editor, _CommandCompleter
from longhelix.cli.chat.message_source import Pipe
from longhelix.cli.chat.notes import notes_on
from longhelix.cli.options import ChatSamplingOptions
from longhelix.engine.exchanges import HopB
from longhelix.engine.result import Delta, Result
from longhelix.engine.text.reasoning import ReasoningSplitter
from longhelix.errors import RequestError, UserError
from longhelix.scheduler.guide import ReasoningTags
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

CONTEXT, CHUNK = 48, 8


class CountingEngine:
    """Answers "1 2 3 ..." up to `answer_tokens`, if it may. A message has a token for each word, and one more."""

    def __init__(self, answer_tokens=3, error=None):
        self.tokenizer = SimpleNamespace(encode_chat=self.encode_chat, reasoning_tags=lambda form, prompt: form)
        self.config = SimpleNamespace(scheduler=scheduler_config(1, CONTEXT, CONTEXT, 1, chunk_tokens=CHUNK))
        self.answer_tokens = answer_tokens
        self.error = error
        self.asked = []  # what each request's prompt said
        self.interrupts = []
        self.interrupt_at = None  # a step
        self._messages = ""
        self.has_work = False

    def encode_chat(self, messages):
        self.reasoned = [message.get("reasoning_content") for message in messages]
        if messages[0]["content"] == "refused":
            raise UserError("the model's chat template failed")
        self._messages = " / ".join(f"{message['role']}: {message['content']}" for message in messages)
        return [1] * sum(1 + len(message["content"].split()) for message in messages)

    def add(self, prompt_ids, params, reasoning):
        self.reasoning = ReasoningSplitter(reasoning) if reasoning else None
        assert len(prompt_ids) + params.max_new_tokens <= CONTEXT
        self.asked.append(self._messages)
        self._prompt, self._params, self._words, self._steps = len(prompt_ids), params, [], 0
        self.has_work = True
        return 0

    def prefilled_tokens(self, request_id):
        assert request_id == 0
        return min(self._steps * CHUNK, self._prompt)

    def step(self):
        self._steps += 1
        if self._steps == self.interrupt_at:
            self.interrupts.append(1)
        if self._steps * CHUNK < self._prompt:
            return []
        self._words.append(f"{len(self._words) + 1} ")
        count = len(self._words)
        if self.error:
            return [Delta(0, "", self._result("error"))]
        stopped = count == self.answer_tokens
        ended = stopped or count == self._params.max_new_tokens
        reasoning, text = self.reasoning.push(self._words[-1]) if self.reasoning else (None, self._words[-1])
        result = self._result("stop" if stopped else "length") if ended else None
        return [Delta(0, text, result, reasoning=reasoning)]

    def abort(self, request_id):
        return self._result("abort") if self.has_work else None

    def _result(self, reason):
        self.has_work = False
        text, ids = "".join(self._words), list(range(len(self._words)))
        reasoning = None
        if self.reasoning:
            reasoning, text = self.reasoning.text, text.partition(self.reasoning._end)[2]
        return Result(
            text,
            ids,
            self._prompt,
            reason,
            None,
            [],
            {},
            [],
            *[0] * 7,
            0.0,
            HopB(1, 0, None),
            None,
            self.error,
            reasoning=reasoning,
        )


class Talk:
    """A dialogue over a counting engine, and what it printed since it was last looked at."""

    def __init__(self, capsys, engine=None, **sampling):
        self._capsys = capsys
        self._notes = io.StringIO()
        self.engine = engine or CountingEngine()
        self.dialogue = Dialogue(self.engine, ChatSamplingOptions(**sampling).params(), notes_on(self._notes))
        self.conversation = self.dialogue.conversation

    def say(self, text):
        """The answer and the notes."""
        if is_command(text):
            run_command(self.dialogue, text)
        else:
            self.dialogue.answer(text, self.engine.interrupts)
        notes = self._notes.getvalue()
        self._notes.seek(0)
        self._notes.truncate()
        return self._capsys.readouterr().out, notes


@pytest.fixture
def talk(capsys):
    return Talk(capsys)


def test_a_conversation_goes_on(talk):
    assert talk.say("hello") == ("1 2 3 \n", "")
    assert talk.say("and") == ("1 2 3 \n", "")
    assert talk.engine.asked[-1] == "user: hello / assistant: 1 2 3  / user: and"
    assert talk.conversation.fill == f"{2 + 4 + 2 + 3} of {CONTEXT} tokens"


def test_an_answer_runs_to_the_end_of_the_context_and_says_so(capsys):
    talk = Talk(capsys, CountingEngine(answer_tokens=None))
    answer, note = talk.say("hello")
    assert len(answer.split()) == CONTEXT - 2
    assert note == (
        f"[The answer is incomplete: the context of {CONTEXT} tokens is full. Start a new conversation with /reset.]\n"
    )
    with pytest.raises(UserError, match=f"the context holds {CONTEXT}: shorten the message, or .* /reset"):
        talk.say("more")
    talk.say("/reset")
    assert len(talk.say("hello")[0].split()) == CONTEXT - 2


def test_an_answer_that_is_cut_by_its_limit_names_it(capsys):
    talk = Talk(capsys, CountingEngine(answer_tokens=None), max_new_tokens=5)
    assert talk.say("hello") == ("1 2 3 4 5 \n", "[The answer is incomplete: it reached --max-new-tokens 5.]\n")


def test_the_least_tokens_of_an_answer_are_no_more_than_there_is_room_for(capsys):
    talk = Talk(capsys, CountingEngine(answer_tokens=None), min_tokens=CONTEXT)
    answer, note = talk.say("hello")
    assert len(answer.split()) == CONTEXT - 2
    assert talk.engine._params.min_tokens == CONTEXT - 2
    assert "context" in note


def test_an_interrupt_keeps_what_was_answered(capsys):
    talk = Talk(capsys, CountingEngine(answer_tokens=None))
    talk.engine.interrupt_at = 4
    assert talk.say("hello") == ("1 2 3 4 \n", "[Stopped after 4 tokens.]\n")
    talk.engine.interrupts.clear()
    talk.engine.interrupt_at = 1
    talk.say("and")
    assert talk.engine.asked[-1] == "user: hello / assistant: 1 2 3 4  / user: and"


def test_an_interrupt_before_the_answer_takes_the_message_back_and_leaves_its_file(talk, tmp_path):
    (tmp_path / "a.txt").write_text("a b c")
    talk.say(f"/file {tmp_path}/a.txt")
    talk.engine.interrupt_at = 1
    answer, note = talk.say("a message that takes more than one step")
    assert answer == "\n"
    assert "The message is not part of the conversation" in note
    talk.engine.interrupts.clear()
    talk.engine.interrupt_at = None
    talk.say("again")
    assert "a b c" in talk.engine.asked[-1]
    assert "step" not in talk.engine.asked[-1]


def test_a_failed_answer_is_not_kept(capsys):
    talk = Talk(capsys, CountingEngine(error="a cause"))
    with pytest.raises(RequestError, match="a cause"):
        talk.say("hello")
    assert talk.conversation.fill == f"2 of {CONTEXT} tokens"


def test_a_long_prompt_shows_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(dialogue, "_LONG_TOKENS", CHUNK)
    talk = Talk(capsys)
    screen = io.StringIO()
    talk.dialogue.notes = Console(file=screen, force_terminal=True, width=80)
    talk.say("short")
    assert screen.getvalue() == ""
    talk.say("word " * (2 * CHUNK))
    assert f"reading {2 + 4 + 1 + 2 * CHUNK} tokens" in screen.getvalue()
    assert " 70%" in screen.getvalue()  # 16 of 23


def test_help_names_every_command(talk):
    _, notes = talk.say("/help")
    for name, command in COMMANDS.items():
        assert f"/{name} {command.argument}".strip() in notes
        assert command.help in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/rest", "unknown command /rest: did you mean /reset?"),
        ("/", "unknown command /: see /help"),
        ("/xyzzy plugh", "unknown command /xyzzy: see /help"),
    ],
)
def test_an_unknown_command_names_the_nearest(talk, text, words):
    with pytest.raises(UserError, match="put a space before it") as caught:
        talk.say(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["/usr/bin is what?", " /help", "// a comment", "/* C */\nint x;", "1/2"])
def test_some_messages_only_look_like_commands(text):
    assert not is_command(text)


def test_system_begins_a_new_conversation(talk):
    assert "no system prompt" in talk.say("/system")[1]
    talk.say("hello")
    talk.say("/system be\nbrief")
    talk.say("and")
    assert talk.engine.asked[-1] == "system: be\nbrief / user: and"
    assert talk.say("/system")[1] == "be\nbrief\n"
    assert "same system prompt" in talk.say("/reset")[1]
    talk.say("again")
    assert talk.engine.asked[-1] == "system: be\nbrief / user: again"


@pytest.mark.parametrize("prompt", ["refused", "word " * CONTEXT])
def test_a_system_prompt_that_cannot_be_changes_nothing(talk, prompt):
    talk.say("hello")
    with pytest.raises(UserError):
        talk.say(f"/system {prompt}")
    talk.say("and")
    assert talk.engine.asked[-1].startswith("user: hello")


def test_a_model_without_a_template_is_refused_before_anything_is_said(capsys):
    def refuse(messages):
        raise UserError("the model has no chat template")

    engine = CountingEngine()
    engine.tokenizer = SimpleNamespace(encode_chat=refuse)
    with pytest.raises(UserError, match="no chat template"):
        Talk(capsys, engine)


def test_a_file_goes_with_the_next_message_alone(talk, tmp_path):
    (tmp_path / "two words.txt").write_text("a b c\n")
    _, note = talk.say(f"/file {tmp_path}/two words.txt")
    added = 7  # <file name="two words.txt"> a b c </file>
    assert note == (
        f"Attached two words.txt to your next message: {added} tokens. {CONTEXT - 2 - added} tokens are left for the "
        "message and its answer.\n"
    )
    assert talk.conversation.fill.endswith(", 1 file attached")
    talk.say("what is it?")
    assert talk.engine.asked[-1] == 'user: <file name="two words.txt">\na b c\n</file>\n\nwhat is it?'
    talk.say("and")
    assert talk.engine.asked[-1].count("<file") == 1


def test_a_file_is_taken_back(talk, tmp_path):
    (tmp_path / "a.txt").write_text("a b c")
    talk.say(f"/file {tmp_path}/a.txt")
    talk.say("/file")
    talk.say("hello")
    assert talk.engine.asked[-1] == "user: hello"


FILES = {
    "missing": (None, r"cannot be read \(No such file"),
    "a folder": ("", "is not a file"),
    "not UTF-8": (b"ab\xff", "is not UTF-8 at byte 2"),
    "zeros": (b"ab\0", "is not text, because it contains a null character"),
    "too long": (
        b"a " * CONTEXT,
        f"has {CONTEXT + 3} tokens, but only {CONTEXT - 2} of the context's {CONTEXT} tokens are free",
    ),
    "huge": (b"a" * 100_000, f"has 100000 bytes, more than a context of {CONTEXT} tokens can hold"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_cannot_be_attached(talk, tmp_path, kind):
    content, words = FILES[kind]
    path = tmp_path / "given"
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        talk.say(f"/file {path}")
    talk.say("hello")
    assert talk.engine.asked[-1] == "user: hello"


@pytest.mark.parametrize("path", ["~nobody/notes.txt", "a\0b", "a" * 5000])
def test_a_path_that_no_file_can_have(talk, path):
    with pytest.raises(UserError, match="cannot be read"):
        talk.say(f"/file {path}")


def test_stats_before_an_answer_have_the_context(talk):
    assert talk.say("/stats")[1].split() == ["context", "2", "of", str(CONTEXT), "tokens"]


def test_exit_ends_the_chat(talk):
    assert not talk.dialogue.over
    talk.say("/exit")
    assert talk.dialogue.over


def test_a_pipe_has_a_message_on_each_line():
    pipe = Pipe(io.BytesIO("eins\r\n\nzwölf".encode() + b"\n\xff\n"), Console())
    assert [pipe.read("") for _ in range(3)] == ["eins", "", "zwölf"]
    with pytest.raises(UserError, match="not UTF-8 at byte 0"):
        pipe.read("")
    assert pipe.read("") is None


@pytest.fixture
def typed(capsys):
    """What an editor makes of keys: its messages up to its end, and what it printed."""

    def messages(keys):
        with create_pipe_input() as pipe:
            editor = Editor(pipe, DummyOutput())
            pipe.send_text(keys)
            return list(iter(lambda: editor.read("0 of 9 tokens"), None)), capsys.readouterr().err

    return messages


ENTER, ESCAPE, CTRL_A, CTRL_C, CTRL_D = "\r", "\x1b", "\x01", "\x03", "\x04"


def test_a_paste_is_one_message(typed):
    assert typed(f"\x1b[200~one\r\ntwo\n  three\x1b[201~ four{ENTER}{CTRL_D}")[0] == ["one\ntwo\n  three four"]


def test_lines_are_edited_and_begun(typed):
    assert typed(f"one{CTRL_A}the {ENTER}a{ESCAPE}{ENTER}b{ENTER}{CTRL_D}")[0] == ["the one", "a\nb"]


def test_ctrl_c_at_an_empty_prompt_leaves_when_pressed_twice(typed):
    messages, said = typed(f"gone{CTRL_C}one{ENTER}{CTRL_C}gone{CTRL_C}{CTRL_C}two{ENTER}{CTRL_C}{CTRL_C}")
    assert messages == ["one", "two"]
    assert said == "Press Ctrl-C again or type /exit to quit.\n" * 3


def test_tab_completes_commands_and_paths(tmp_path):
    (tmp_path / "notes.txt").touch()

    def completed(text):
        return [
            text[: len(text) + found.start_position] + found.text
            for found in _CommandCompleter().get_completions(Document(text), None)
        ]

    assert completed("/s") == ["/system", "/stats"]
    assert completed("say /s") == []
    assert completed(f"/file {tmp_path}/no") == [f"/file {tmp_path}/notes.txt"]


def test_reasoning_is_no_part_of_the_answer(capsys):
    """Counting is reasoning up to 2: it goes to the notes, and back into the conversation beside the answer."""
    engine = CountingEngine(answer_tokens=4)
    talk = Talk(capsys, engine)
    talk.dialogue._reasoning_form = ReasoningTags("<", "2 ", is_open=True)
    assert talk.say("hello") == ("3 4 \n", "1 \n\n")
    engine.answer_tokens = 1
    assert talk.say("more") == ("\n", "1 \n\n")
    assert engine.reasoned == [None, "1 ", None]
    assert engine.asked[-1] == "user: hello / assistant: 3 4  / user: more"
