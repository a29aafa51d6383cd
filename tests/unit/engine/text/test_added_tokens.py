"""Tokens and templates that a folder's other files add to its tokenizer.json, as transformers reads them."""

import json
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

NAMES = ("<|a|>", "<tool_call>", "[PAD]", "AE-OE", "<img>", "word")
TEXTS = (
    "x <|a|> y",
    "<tool_call>\n{}[PAD]",
    "AE-OE ae-oe words word<img>  <img> .",
    "a<|a|><|a|>b [PAD]",
    "",
    "plain text",
)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def backend_json() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator([*TEXTS, "the words of a text that is longer than the others"] * 3, trainer)
    return backend.to_str()


def write(folder, backend_json, config=None, **files):
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / "tokenizer.json").write_text(backend_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def assert_as_transformers(folder, texts):
    ours, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in texts:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_more(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(oracle)


flags = st.fixed_dictionaries({}, optional={
    "lstrip": st.booleans(), "rstrip": st.booleans(), "single_word": st.booleans(), "normalized": st.booleans(),
    "special": st.booleans(),
})  # fmt: skip


def object_of(name):
    """No two objects of a file have the same content: transformers then chooses by rules that no file needs."""
    return flags.map(lambda of_it: {"__type": "AddedToken", "content": name, **of_it})


named = st.fixed_dictionaries({}, optional={
    "pad_token": st.sampled_from(NAMES) | object_of("[PAD]"), "unk_token": st.sampled_from(["<s>", *NAMES]),
    "eos_token": st.sampled_from(["</s>", {"__type": "AddedToken", "content": "</s>", "lstrip": False}, "<|a|>"]),
    "image_token": st.sampled_from(["<img>", "word"]) | object_of("<img>"),
    "call_token": st.sampled_from(["<tool_call>", "<s>"]),
})  # fmt: skip
lists = st.lists(st.sampled_from(NAMES), unique=True, max_size=4)


@st.composite
def folders(draw):
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json."""
    config, more = draw(named), draw(lists)
    first, listed = 300, draw(lists)
    if draw(st.booleans()):
        gap = draw(st.sampled_from([1, 1, 3]))
        tokens = {str(first + gap * at): {"content": name, **draw(flags)} for at, name in enumerate(listed)}
        if draw(st.booleans()):
            tokens["1"] = {"content": "</s>", "special": True, "rstrip": draw(st.booleans())}
        config["added_tokens_decoder"] = tokens
    if draw(st.booleans()):
        config[draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens"]))] = more
    elif draw(st.booleans()):
        config["extra_special_tokens"] = {f"{name.strip('<>|[]')}_token": name for name in more}
    special_map = draw(st.none() | named)
    added = draw(st.none() | lists.map(lambda some: {name: first + at for at, name in enumerate(some)}))
    return config, {"special_tokens_map": special_map, "added_tokens": added}


@given(files=folders())
def test_added_tokens_are_those_of_transformers(files, backend_json, tmp_path_factory):
    config, others = files
    folder = tmp_path_factory.getbasetemp() / "folder"
    assert_as_transformers(write(folder, backend_json, config, **others), TEXTS)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_drawn_texts_have_transformers_ids(count, backend_json, tmp_path):
    seed = random.SystemRandom().randrange(2**32) if count > 20 else 7
    print(f"seed {seed}")
    chance = random.Random(seed)
    alphabet = [*string.printable, *NAMES, *"éß日本語한국어😀\u200d\u0301ﬁ", " ", "  ", "\u00a0"]
    texts = ["".join(chance.choices(alphabet, k=chance.randrange(40))) for _ in range(count)]
    tokens = {str(300 + at): {"content": name, "special": at % 2 == 0} for at, name in enumerate(NAMES)}
    assert_as_transformers(write(tmp_path / "folder", backend_json, {"added_tokens_decoder": tokens}), texts)


@pytest.mark.parametrize(
    ("config", "others", "words"),
    [
        ({"added_tokens_decoder": [1]}, {}, "added_tokens_decoder in"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, {}, "a token id of added_tokens_decoder"),
        ({"added_tokens_decoder": {"300": "a"}}, {}, "not an object with content"),
        ({"added_tokens_decoder": {"300": {"content": "a", "lstrip": 1}}}, {}, "lstrip of added_tokens_decoder"),
        ({"additional_special_tokens": [3]}, {}, "additional_special_tokens in .*tokenizer_config.json"),
        ({}, {"added_tokens": {"a": "b"}}, "a token id of"),
        ({}, {"special_tokens_map": [1]}, "special_tokens_map.json is not a JSON object"),
        ({}, {"special_tokens_map": {"pad_token": 5}}, "pad_token in .*special_tokens_map.json"),
        ({"pad_token": 5}, {}, "pad_token in .*tokenizer_config.json"),
        ({"image_token": {"content": 5}}, {}, "content of image_token in .*tokenizer_config.json"),
    ],
)
def test_broken_files_are_refused_by_name(config, others, words, backend_json, tmp_path):
    with pytest.raises(UserError, match=words) as raised:
        Tokenizer.from_folder(write(tmp_path / "folder", backend_json, config, **others))
    assert raised.value.code == "invalid_checkpoint"


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("kind", ["list", "files", "one file", "processor"])
def test_conversations_that_offer_tools_have_the_template_for_tools(kind, tools, backend_json, tmp_path):
    plain, for_tools = "plain {{ messages[0].content }}", "tools {{ tools[0].function.name }}"
    templates = [{"name": "default", "template": plain}, {"name": "tool_use", "template": for_tools}]
    config, others = {"chat_template": templates if kind == "list" else "never"}, {}
    if kind == "processor":  # which transformers reads with the images' processor, and not with the tokenizer
        config, others = {}, {"chat_template": {"chat_template": plain}}
    folder = write(tmp_path / "folder", backend_json, config, **others)
    if "file" in kind:
        (folder / "chat_template.jinja").write_text(plain)
    if kind == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    ours = Tokenizer.from_folder(folder)
    text = ours.spell(ours.encode_chat(MESSAGES, tools))
    assert text == ("tools add" if tools and kind in ("list", "files") else "plain hi")
    if kind != "processor":
        oracle = PreTrainedTokenizerFast.from_pretrained(folder)
        assert text == oracle.apply_chat_template(MESSAGES, tools=tools, tokenize=False)


def test_a_template_for_tools_alone_serves_all_conversations(backend_json, tmp_path):
    config = {"chat_template": [{"name": "tool_use", "template": "{{ tools | length if tools else 'no' }} tools"}]}
    ours = Tokenizer.from_folder(write(tmp_path / "folder", backend_json, config))
    assert ours.spell(ours.encode_chat(MESSAGES)) == "no tools"
    assert ours.spell(ours.encode_chat(MESSAGES, TOOLS)) == "1 tools"


def test_tokens_that_only_one_model_has_are_known_to_its_template(backend_json, tmp_path):
    config = {"image_token": "<img>", "chat_template": "{{ image_token }} here"}
    folder = write(tmp_path / "folder", backend_json, config)
    ours, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = ours.encode_chat(MESSAGES)
    assert ids == oracle.apply_chat_template(MESSAGES, return_dict=False)
    assert ids[0] == 300


def test_a_template_for_tools_says_how_calls_are_written(backend_json, tmp_path):
    for_tools = (
        '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
    )
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": for_tools}]
    folder = write(tmp_path / "folder", backend_json, {"chat_template": templates})
    assert Tokenizer.from_folder(folder).tool_form is not None
