"""Fields that clients of other servers send, over HTTP."""

import gzip
import json

import pytest
from served import events, served

from longhelix.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.dist

GREEDY = {"max_tokens": 8, "temperature": 0}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
BEGUN = [QUESTION, {"role": "assistant", "content": "The capital of France is"}]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def server():
    with served() as both:
        yield both


@pytest.fixture
def thinking(server, monkeypatch):
    client, llm = server
    monkeypatch.setattr(llm.tokenizer, "_chat_template", ChatTemplate(THINKS, {}))
    return client


def post(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(client, **body):
    """What /tokenize makes of messages, as text."""
    tokens = post(client, "/tokenize", **body)["tokens"]
    return post(client, "/detokenize", tokens=tokens)["prompt"]


ENDINGS = [
    ({"continue_final_message": True}, "assistant\nThe capital of France is"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "assistant\nThe capital of France is"),
    ({"add_generation_prompt": False}, "The capital of France is<|im_end|>\n"),
    ({}, "The capital of France is<|im_end|>\n<|im_start|>assistant\n"),
]


@pytest.mark.parametrize(("fields", "end"), ENDINGS)
def test_a_prompt_ends_where_it_is_asked_to(server, fields, end):
    client, _ = server
    assert prompt_of(client, messages=BEGUN, **fields).endswith(end)
    tokens = post(client, "/tokenize", messages=BEGUN, **fields)["tokens"]
    wanted = post(client, "/v1/completions", prompt=tokens, **GREEDY)["choices"][0]["text"]
    chat = post(client, "/v1/chat/completions", messages=BEGUN, **fields, **GREEDY)
    assert chat["choices"][0]["message"]["content"] == wanted
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    response = post(client, "/v1/responses", input=BEGUN, **fields, max_output_tokens=8, temperature=0)
    assert response["output"][0]["content"][0]["text"] == wanted


def test_an_answer_goes_on_with_the_last_message(server):
    client, _ = server
    chat = post(client, "/v1/chat/completions", messages=BEGUN, continue_final_message=True, **GREEDY)
    assert chat["choices"][0]["message"]["content"].startswith(" Paris")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_endings_that_contradict_each_other_are_refused(server, path):
    client, _ = server
    field = "input" if path == "/v1/responses" else "messages"
    fields = {field: BEGUN, "continue_final_message": True, "add_generation_prompt": True}
    refused = client.post(path, json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_variables_reach_the_template(thinking):
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    plain, thoughtless = (post(thinking, "/tokenize", messages=[QUESTION], **each)["count"] for each in ({}, variables))
    assert prompt_of(thinking, messages=[QUESTION], **variables).endswith("assistant\n<think></think>")
    for fields, count in (({}, plain), (variables, thoughtless), ({"chat_template_kwargs": None}, plain)):
        chat = post(thinking, "/v1/chat/completions", messages=[QUESTION], **fields, **GREEDY)
        response = post(thinking, "/v1/responses", input=[QUESTION], **fields, max_output_tokens=1)
        assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == count
    own = thinking.post("/v1/chat/completions", json={"messages": [QUESTION], "chat_template_kwargs": {"tools": []}})
    assert (own.status_code, own.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(("effort", "end"), [("none", "<think></think>none"), ("high", "high")])
def test_how_much_to_reason_reaches_the_template(thinking, effort, end):
    chat = post(thinking, "/v1/chat/completions", messages=[QUESTION], reasoning_effort=effort, **GREEDY)
    response = post(thinking, "/v1/responses", input=[QUESTION], reasoning={"effort": effort}, max_output_tokens=1)
    variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    tokens = post(thinking, "/tokenize", messages=[QUESTION], chat_template_kwargs=variables)["tokens"]
    assert post(thinking, "/detokenize", tokens=tokens)["prompt"].endswith(f"assistant\n{end}")
    assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == len(tokens)


def test_a_prompt_may_come_without_special_tokens(server, monkeypatch):
    client, llm = server
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [1, *llm.tokenizer.encode_more(text)])
    with_bos, without = (
        post(client, "/v1/completions", prompt="x", max_tokens=1, add_special_tokens=adds)["usage"]["prompt_tokens"]
        for adds in (True, False)
    )
    assert with_bos == without + 1


def test_usage_is_null_until_the_last_event(server):
    client, _ = server
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [QUESTION]})):
        for options, is_there in (({"include_usage": True}, True), ({"include_usage": False}, False), (None, False)):
            body = prompt | {"stream": True, "stream_options": options} | GREEDY
            with client.stream("POST", path, json=body) as got:
                lines = [line[6:] for line in got.iter_lines() if line.startswith("data: {")]
            *events, last = map(json.loads, lines)
            assert all(("usage" in event) == is_there for event in [*events, last])
            if is_there:
                assert {event["usage"] for event in events} == {None}
                assert last["usage"]["completion_tokens"] > 0


ENDS = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
ENDING = {"max_tokens": 40, "temperature": 0, "return_token_ids": True}


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_token_that_ends_a_chat_comes_with_the_others(server, logprobs):
    client, llm = server
    body = {"messages": ENDS, "logprobs": logprobs, **ENDING}
    whole = post(client, "/v1/chat/completions", **body)["choices"][0]
    assert whole["finish_reason"] == "stop"
    *ids, ending = whole["token_ids"]
    assert ending in llm.config.spec.vocabulary.eos_token_ids
    assert llm.tokenizer.decode(ids) == whole["message"]["content"]
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
        choices = [event["choices"][0] for event in events(got)]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == whole["token_ids"]
    if logprobs:
        content = [each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]]
        assert content == whole["logprobs"]["content"]
        assert len(content) == len(whole["token_ids"])


def test_the_token_that_ends_a_completion_comes_with_the_others(server):
    client, llm = server
    prompt = post(client, "/tokenize", messages=ENDS)["tokens"]
    body = {"prompt": prompt, "logprobs": 1, **ENDING}
    whole = post(client, "/v1/completions", **body)["choices"][0]
    assert whole["token_ids"][-1] in llm.config.spec.vocabulary.eos_token_ids
    assert len(whole["logprobs"]["tokens"]) == len(whole["token_ids"])
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
        choices = [event["choices"][0] for event in events(got)]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        told = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]]
        assert told == pytest.approx(whole["logprobs"][name], abs=1e-4) if "probs" in name else whole["logprobs"][name]
    plain = post(client, "/v1/completions", **body | {"return_token_ids": False})["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == len(whole["token_ids"]) - 1
    stopped = post(client, "/v1/completions", **body | {"stop_token_ids": [whole["token_ids"][0]]})["choices"][0]
    assert (stopped["token_ids"], stopped["text"]) == (whole["token_ids"][:1], "")


def texts(client, path, body, **fields):
    """The text of an answer, whole and as a stream."""
    whole = post(client, path, **body, **fields)
    if path == "/v1/responses":
        return {whole["output"][0]["content"][0]["text"]}
    with client.stream("POST", path, json=body | fields | {"stream": True}) as got:
        choices = [event["choices"][0] for event in events(got)]
    if path == "/v1/completions":
        return {whole["choices"][0]["text"], "".join(choice["text"] for choice in choices)}
    streamed = "".join(choice["delta"].get("content", "") for choice in choices)
    return {whole["choices"][0]["message"]["content"], streamed}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_stops_and_special_tokens_are_shown_where_they_are_asked_for(server, path):
    client, _ = server
    prompt = {
        "/v1/completions": {"prompt": post(client, "/tokenize", messages=ENDS)["tokens"], "max_tokens": 40},
        "/v1/chat/completions": {"messages": ENDS},
        "/v1/responses": {"input": ENDS},
    }[path]
    body = prompt | {"temperature": 0}
    (text,) = texts(client, path, body)
    assert text
    assert texts(client, path, body, skip_special_tokens=True, include_stop_str_in_output=False) == {text}
    assert texts(client, path, body, skip_special_tokens=False) == {text}
    assert texts(client, path, body, include_stop_str_in_output=True) == {text}  # the token that ends it has no text
    shown = texts(client, path, body, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown == {text + "<|im_end|>"}
    stop, end = text[2:4], text.index(text[2:4])
    assert texts(client, path, body, stop=stop) == {text[:end]}
    assert texts(client, path, body, stop=[stop], include_stop_str_in_output=True) == {text[: end + 2]}


PROMPT = "The capital of France is Paris."


def check_prompt_logprobs(client, llm, found, tokens, num_best):
    """Of a prompt, as vLLM has them; echo has the same numbers."""
    echo = {"prompt": tokens, "echo": True, "max_tokens": 0, "logprobs": num_best}
    known = post(client, "/v1/completions", **echo)["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert len(found) == len(tokens)
    for token_id, entry, logprob in zip(tokens[1:], found[1:], known[1:], strict=True):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert own["decoded_token"] == llm.tokenizer.piece(token_id)
        ranks = [each["rank"] for each in entry.values()]
        assert ranks == ([*range(1, num_best + 1)] if own["rank"] else [*range(1, num_best + 1), None])
        assert sorted(each["logprob"] for each in entry.values()) == [each["logprob"] for each in entry.values()][::-1]


@pytest.mark.parametrize("num_best", [0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_log_probabilities_of_a_prompt(server, num_best, max_tokens):
    client, llm = server
    fields = {"prompt_logprobs": num_best, "max_tokens": max_tokens, "temperature": 0, "n": 2}
    tokens = llm.tokenizer.encode(PROMPT)
    choices = post(client, "/v1/completions", prompt=PROMPT, **fields)["choices"]
    for choice in choices:
        assert choice["logprobs"] is None
        check_prompt_logprobs(client, llm, choice["prompt_logprobs"], tokens, num_best)
    messages = [{"role": "user", "content": PROMPT}]
    tokens = post(client, "/tokenize", messages=messages)["tokens"]
    chat = post(client, "/v1/chat/completions", messages=messages, **fields)
    check_prompt_logprobs(client, llm, chat["prompt_logprobs"], tokens, num_best)
    assert chat["usage"]["completion_tokens"] == 2 * max_tokens
    assert post(client, "/v1/completions", prompt=PROMPT, max_tokens=1)["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 3), (3, 1), (2, 2)])
def test_echo_and_prompt_logprobs_have_as_many_as_each_asked_for(server, logprobs, prompt_logprobs):
    client, llm = server
    fields = {"echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "max_tokens": 0}
    tokens = llm.tokenizer.encode(PROMPT)
    choice = post(client, "/v1/completions", prompt=PROMPT, **fields)["choices"][0]
    assert choice["text"] == PROMPT
    check_prompt_logprobs(client, llm, choice["prompt_logprobs"], tokens, prompt_logprobs)
    assert len(choice["logprobs"]["tokens"]) == len(tokens)
    plain = post(client, "/v1/completions", prompt=PROMPT, **fields | {"prompt_logprobs": None})["choices"][0]
    for one, other in zip(choice["logprobs"]["top_logprobs"][1:], plain["logprobs"]["top_logprobs"][1:], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 101}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": True}, "prompt_logprobs"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"prompt_logprobs": 1}, None),
    ],
)
def test_log_probabilities_that_cannot_come_are_refused(server, path, fields, param):
    client, _ = server
    prompts = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": ENDS},
        "/v1/responses": {"input": "x"},
    }
    refused = client.post(path, json=prompts[path] | fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == (param or "prompt_logprobs")


@pytest.mark.parametrize("encoding", ["gzip", "br", "x" * 500])
def test_a_compressed_body_is_refused_in_words(server, encoding):
    client, _ = server
    headers = {"content-type": "application/json", "content-encoding": encoding}
    refused = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert refused.status_code == 400
    words = f"the body has content-encoding {encoding[:40]}: send it uncompressed"
    assert refused.json()["error"]["message"] == words
    plain = client.post(
        "/v1/completions",
        content=b'{"prompt": "x", "max_tokens": 1}',
        headers=headers | {"content-encoding": "identity"},
    )
    assert plain.status_code == 200
