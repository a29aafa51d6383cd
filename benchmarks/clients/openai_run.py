"""OpenAI's own client against a server: what its users do, and what they are told.

python benchmarks/clients/openai_run.py URL MODEL [--key KEY]
Prints {"version", "checks", "failed": [what failed]}.
"""

import argparse
import json
import sys

import openai


class Checks:
    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client, self.model = client, model
        self.messages = [{"role": "user", "content": "Name three colours."}]

    def chat(self) -> None:
        got = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=12, temperature=0
        )
        assert got.choices[0].message.role == "assistant"
        assert got.choices[0].message.content
        assert got.usage.completion_tokens <= 12
        assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens

    def chat_stream(self) -> None:
        asked = {"model": self.model, "messages": self.messages, "max_tokens": 12, "temperature": 0}
        whole = self.client.chat.completions.create(**asked)
        events = list(self.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text == whole.choices[0].message.content
        assert events[0].choices[0].delta.role == "assistant"
        assert events[-1].usage == whole.usage
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] in ("stop", "length")

    def several_choices(self) -> None:
        got = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=12, n=3, temperature=1, seed=1
        )
        assert [choice.index for choice in got.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in got.choices}) > 1

    def log_probabilities(self) -> None:
        got = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
        content = got.choices[0].logprobs.content
        assert len(content) == got.usage.completion_tokens
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)

    def completion(self) -> None:
        got = self.client.completions.create(model=self.model, prompt="One, two,", max_tokens=8, stop=["five"], seed=1)
        assert "five" not in got.choices[0].text

    def echo(self) -> None:
        got = self.client.completions.create(model=self.model, prompt="One, two,", max_tokens=2, echo=True, logprobs=1)
        assert got.choices[0].text.startswith("One, two,")
        assert got.choices[0].logprobs.token_logprobs[0] is None

    def models(self) -> None:
        assert [each.id for each in self.client.models.list()] == [self.model]
        assert self.client.models.retrieve(self.model).id == self.model

    def errors(self) -> None:
        assert self._refused(max_tokens=-1) == "invalid_argument"
        assert self._refused(max_tokens=10**9) == "context_length_exceeded"
        try:
            self.client.models.retrieve("none")
        except openai.NotFoundError:
            return
        raise AssertionError("a model that is not there was found")

    def _refused(self, **fields: int) -> str | None:
        try:
            self.client.chat.completions.create(model=self.model, messages=self.messages, **fields)
        except openai.BadRequestError as error:
            return error.code
        return None

    def leaves(self) -> None:
        with self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        ) as events:
            for _ in zip(range(3), events, strict=False):
                pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()
    checks = Checks(openai.OpenAI(base_url=f"{given.url}/v1", api_key=given.key, max_retries=0), given.model)
    names = [name for name in vars(Checks) if not name.startswith("_")]
    failed = []
    for name in names:
        try:
            getattr(checks, name)()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    print(json.dumps({"version": openai.__version__, "checks": len(names), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
