"""Texts of a model with a SentencePiece-style tokenizer: an answer keeps the blank that begins it, and its bytes become
characters as Python decodes them."""

import json
import time

import pytest
import torch
from served import events, served
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

from longhelix import LLM, Layout, SamplingParams
from longhelix.scheduler.guide import Guide

pytestmark = pytest.mark.dist

PROMPT = "The capital of France is"
PARIS = {"guided_regex": " Paris", "temperature": 0, "max_tokens": 16}
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %} [assistant]"


def save(folder):
    """A toy llama whose tokenizer adds a BOS and a blank, as Llama 2's does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([f"{PROMPT} Paris"] * 3, trainer)
    spelled = json.loads(backend.to_str())
    vocab = spelled["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    backend = Tokenizer.from_str(json.dumps(spelled))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("spaced")
    save(found)
    return found


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    contexts = tmp_path_factory.mktemp("contexts")
    with served(model=str(folder), layout=Layout(), contexts_dir=contexts, kv_cache_tokens=4096, block_tokens=4) as (
        client,
        llm,
    ):
        yield client, llm


def complete(client, **body):
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(client, path, **body):
    with client.stream("POST", path, json=body | {"stream": True}) as got:
        return [event["choices"][0] for event in events(got) if event["choices"]]


def test_the_engine_keeps_the_blank_and_counts_invalid_bytes_once(folder, tmp_path):
    with LLM(str(folder), Layout(), contexts_dir=str(tmp_path), kv_cache_tokens=4096, block_tokens=4) as llm:
        paris = SamplingParams(max_new_tokens=16, guide=Guide("regex", " Paris"))
        (result,) = llm.generate(PROMPT, paris)
        assert result.text == " Paris"
        assert "".join(delta.text for delta in llm.stream(PROMPT, paris)) == " Paris"
        llm.save_context("france", PROMPT)
        for more in (" is", llm.tokenizer.encode_more("is")):
            (result,) = llm.generate(more, paris, context="france")
            assert result.text == " Paris"
        (stopped,) = llm.generate(PROMPT, SamplingParams(max_new_tokens=16, guide=paris.guide, stop=(" Pa",)))
        assert (stopped.text, stopped.finish_reason) == ("", "stop")
        # Nothing is shown before the answer, so that it begins the text.
        (result,) = llm.generate([1], paris)
        assert result.text == "Paris"
        emoji = Guide("regex", "😀a😀")
        for most, text in enumerate(["\ufffd"] * 3 + ["😀", "😀a"] + ["😀a\ufffd"] * 3 + ["😀a😀"], 1):
            sampling = SamplingParams(max_new_tokens=most, guide=emoji, logprobs=0)
            (result,) = llm.generate(PROMPT, sampling)
            assert (result.text, "".join(result.token_texts)) == (text, text)
            assert "".join(delta.text for delta in llm.stream(PROMPT, sampling)) == text
        # A client that goes on from tokens that end inside of a character.
        begun = llm.tokenizer.encode(PROMPT) + result.token_ids[:2]
        for guide, text in (("a", "a"), ("😀", "😀")):
            (more,) = llm.generate(begun, SamplingParams(max_new_tokens=16, guide=Guide("regex", guide)))
            assert more.text == text


def test_an_answer_begins_with_its_blank(server):
    client, llm = server
    for prompt in (PROMPT, llm.tokenizer.encode(PROMPT)):
        assert complete(client, prompt=prompt, **PARIS)["text"] == " Paris"
        come = streamed(client, "/v1/completions", prompt=prompt, **PARIS)
        assert "".join(choice["text"] for choice in come) == " Paris"
        assert complete(client, prompt=prompt, stop=" P", **PARIS)["text"] == ""
    messages = [{"role": "user", "content": PROMPT}]
    (choice,) = client.post("/v1/chat/completions", json={"messages": messages, **PARIS}).json()["choices"]
    assert choice["message"]["content"] == " Paris"
    come = streamed(client, "/v1/chat/completions", messages=messages, **PARIS)
    assert "".join(choice["delta"].get("content", "") for choice in come) == " Paris"
    body = {"input": PROMPT, "temperature": 0, "max_output_tokens": 16, "guided_regex": " Paris"}
    output = client.post("/v1/responses", json=body).json()["output"]
    assert output[0]["content"][0]["text"] == " Paris"


@pytest.mark.parametrize("given", ["text", "ids"])
def test_an_echo_is_where_its_offsets_say(server, given):
    client, llm = server
    ids = llm.tokenizer.encode(PROMPT)
    choice = complete(client, prompt=PROMPT if given == "text" else ids, echo=True, logprobs=1, **PARIS)
    assert choice["text"] == ("" if given == "text" else "<s> ") + f"{PROMPT} Paris"
    found = choice["logprobs"]
    ends = [*found["text_offset"][1:], len(choice["text"])]
    assert [choice["text"][at:end] for at, end in zip(found["text_offset"], ends, strict=True)] == found["tokens"]
    for text, best in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert text in best


@pytest.mark.parametrize("most", range(1, 6))
def test_logprobs_of_an_answer_that_is_cut_inside_of_a_character(server, most):
    client, _ = server
    body = {"prompt": PROMPT, "guided_regex": "a😀", "temperature": 0, "logprobs": 1, "max_tokens": most}
    choice = complete(client, **body)
    text = "a" if most == 1 else "a\ufffd" if most < 5 else "a😀"
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == text
    come = streamed(client, "/v1/completions", **body)
    assert "".join(choice["text"] for choice in come) == text
    logprobs = [choice["logprobs"] for choice in come if choice["logprobs"]]
    assert [token for each in logprobs for token in each["tokens"]] == choice["logprobs"]["tokens"]
    assert [at for each in logprobs for at in each["text_offset"]] == choice["logprobs"]["text_offset"]
    del body["prompt"]
    chat = body | {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    content = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == "a😀".encode()[:most]


def test_detokenized_text_is_that_of_the_tokens(server):
    client, llm = server

    def detokenized(tokens):
        return client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    plain = llm.tokenizer.encode_more(PROMPT)
    assert detokenized(plain) == PROMPT
    cut = llm.tokenizer.encode_more(PROMPT + " 😀")[:-2]
    assert detokenized(cut + plain) == f"{PROMPT} \ufffd {PROMPT}"
    assert detokenized(cut[-2:] * 3) == "\ufffd" * 3


def test_an_echo_behind_a_context_goes_on_in_its_text(server):
    client, llm = server
    client.post("/v1/contexts", json={"id": "france", "prompt": "The capital of"})
    deadline_s = time.monotonic() + 60
    while client.get("/v1/contexts/france").json()["status"] != "ready":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    ids = llm.tokenizer.encode_more("France is")
    choice = complete(client, prompt=ids, context="france", echo=True, **PARIS)
    assert choice["text"] == " France is Paris"
    only = complete(client, prompt=ids, context="france", echo=True, max_tokens=0)
    assert only["text"] == " France is"


def test_the_tokenizers_own_eos_ends_an_answer(server):
    client, llm = server
    assert llm.config.spec.vocabulary.eos_token_ids == (0, 2)
    choice = complete(client, prompt=PROMPT, temperature=0, max_tokens=4, logit_bias={"2": 100})
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
