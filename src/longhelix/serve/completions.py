"""/v1/completions: continues prompts of text or token ids."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers as forms
from longhelix.serve.answer_format import AnswerFormat, Events
from longhelix.serve.bodies import CompletionBody
from longhelix.serve.driver import RequestGroup
from longhelix.serve.engine_request import EngineRequest
from longhelix.serve.errors import statuses, streamed
from longhelix.serve.json_pieces import json_pieces
from longhelix.serve.reading import AnswerRoute
from longhelix.serve.serving import Serving
from longhelix.serve.streams import answer
from longhelix.serve.token_logprobs import completion_logprobs, fewer_best, prompt_logprobs

_DEFAULT_TOKENS = 16  # OpenAI's default


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(route_class=AnswerRoute.after(serving.check_open))

    @router.post(
        "/v1/completions", response_model=forms.Completion, responses=statuses(404, 422, 429, 500, 503) | streamed()
    )
    async def complete(body: CompletionBody) -> Response:
        """Complete a prompt of text or token ids."""
        serving.check_model(body.model)
        before = await serving.context_tokens(body.context)
        adds_special = body.context is None and body.add_special_tokens is not False
        encode = serving.llm.tokenizer.encode if adds_special else serving.llm.tokenizer.encode_more
        prompts = await serving.prompts(body.prompt, encode)
        if body.only_echoes:
            requests = serving.requests(body, prompts, most_tokens=1, logprobs=None, context_tokens=before)
            echoed = await _echoed(serving, body, prompts)
            return answer(
                RequestGroup(serving.driver),
                _Echo(serving=serving, body=body, requests=requests, echoed=echoed, token_texts=()),
            )
        most_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        guide = await serving.guide(body.guide, body.guide_field)
        requests = serving.requests(
            body,
            prompts,
            most_tokens=most_tokens,
            logprobs=body.logprobs,
            context_tokens=before,
            guide=guide,
        )
        echoed = await _echoed(serving, body, prompts)
        token_texts = await _token_texts(serving, body)
        return answer(
            await serving.submit(requests),
            _Format(serving=serving, body=body, requests=requests, echoed=echoed, token_texts=token_texts),
        )

    return router


async def _echoed(serving: Serving, body: CompletionBody, prompts: "Sequence[array[int]]") -> list[str]:
    """Return the text of each prompt if answers begin with the prompt, otherwise an empty list.

    Raises:
        ClientError: a token id is outside the vocabulary.
        OverloadedError: too many long answers are in progress.
    """
    if not body.echoes:
        return []
    texts = [given for given in body.prompt if isinstance(given, str)]
    if texts:
        serving.reserve(sum(map(len, texts)))
    return [
        given if isinstance(given, str) else await serving.text(token_ids, "prompt", begins=body.context is None)
        for given, token_ids in zip(body.prompt, prompts, strict=True)
    ]


async def _token_texts(serving: Serving, body: CompletionBody) -> list[list[str]]:
    """Return the text that each prompt token adds, if the answer shows log-probabilities of an echoed prompt."""
    return [await serving.token_texts(given) for given in body.prompt if body.echoes and body.logprobs is not None]


class _Format(AnswerFormat):
    """Writes completions.

    Args:
        serving: the server.
        body: the request body.
        requests: the engine requests made from the body.
        echoed: text of each prompt if choices begin with their prompt, otherwise empty.
        token_texts: text that each prompt token adds, if the answer shows log-probabilities of prompt tokens.
    """

    prefix, kind = "cmpl-", "text_completion"

    body: CompletionBody

    def __init__(
        self,
        serving: Serving,
        body: CompletionBody,
        requests: Sequence[EngineRequest],
        echoed: Sequence[str],
        token_texts: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(serving, body, requests, keeps_prompts=body.num_prompt_logprobs is not None)
        body.prompt.clear()
        self._echoed, self._token_texts = echoed, token_texts
        self.is_long = bool(echoed) or body.logprobs is not None or body.prompt_logprobs is not None
        self._written: dict[int, int] = {}  # characters of token text sent so far, by index of the request

    def first(self) -> Events:
        if self._echoed:
            for place in range(len(self.requests)):
                text = self._prompt_text(place)
                yield self.event([{"index": place, "text": text, "logprobs": None, "finish_reason": None}])

    def pieces(self, results: list[Result]) -> Iterator[bytes]:
        choices = (self._choice(place, results).model_dump() for place in range(len(results)))
        return self._answer(choices, forms.usage(results, self.body.choices))

    def _answer(self, choices: Iterator[dict[str, Any]], usage: forms.UsageAnswer) -> Iterator[bytes]:
        head = {
            "id": self.head["id"],
            "object": self.kind,
            "created": self.head["created"],
            "model": self.head["model"],
        }
        return json_pieces(head | {"choices": choices, "usage": usage.model_dump()})

    def _choice(self, place: int, results: list[Result]) -> forms.CompletionChoice:
        result = results[place]
        text = result.text
        new_ids, logprobs = forms.new_tokens(result, with_ending=bool(self.body.return_token_ids))
        token_ids, texts = new_ids, result.token_texts or []
        texts = texts + [""] * (len(new_ids) - len(texts))  # the token that ended the answer adds no text
        if self._echoed:
            text = self._prompt_text(place) + text
        of_prompt = results[place - place % self.body.choices].prompt_logprobs
        scored = None
        if of_prompt is not None:
            prompt = self.requests[place].prompt
            if self.body.prompt_logprobs is not None:
                best = fewer_best(of_prompt, prompt, self.body.prompt_logprobs)
                scored = prompt_logprobs(self.tokenizer, best, self.body.prompt_logprobs)
            if self._token_texts and self.body.logprobs is not None and logprobs is not None:
                token_ids = [*prompt, *token_ids]
                texts = [*self._token_texts[place // self.body.choices], *texts]
                logprobs = [*fewer_best(of_prompt, prompt, self.body.logprobs), *logprobs]
        return forms.CompletionChoice(
            index=place,
            text=text,
            token_ids=new_ids if self.body.return_token_ids else None,
            logprobs=self._logprobs(token_ids, texts, logprobs, 0),
            finish_reason=forms.finish_reason(result),
            prompt_logprobs=scored,
        )

    def choices(self, place: int, delta: Delta) -> Iterator[Mapping[str, Any]]:
        reason = None if delta.result is None else forms.finish_reason(delta.result)
        token_id, of_token, logprobs = delta.token_id, delta.logprobs, None
        if token_id is None and delta.result is not None and self.body.return_token_ids:
            token_id, of_token = delta.result.ending_token_id, delta.result.ending_logprobs
        if token_id is not None and of_token is not None:
            written, text = self._written.get(place, 0), delta.token_text or ""
            logprobs = self._logprobs([token_id], [text], [of_token], written)
            self._written[place] = written + len(text)
        ids: dict[str, list[int]] = {}
        if self.body.return_token_ids:
            ids["token_ids"] = [] if token_id is None else [token_id]
        if delta.text or reason is not None or logprobs is not None or ids.get("token_ids"):
            yield {
                "index": place,
                "text": delta.text,
                "logprobs": None if logprobs is None else logprobs.model_dump(),
                "finish_reason": reason,
                **ids,
            }

    def _prompt_text(self, place: int) -> str:
        return self._echoed[place // self.body.choices]

    def _logprobs(
        self,
        token_ids: list[int],
        texts: list[str] | None,
        logprobs: Sequence[dict[int, float] | None] | None,
        offset: int,
    ) -> forms.CompletionLogprobs | None:
        if self.body.logprobs is None or logprobs is None or texts is None:
            return None
        return completion_logprobs(self.tokenizer, token_ids=token_ids, texts=texts, logprobs=logprobs, offset=offset)


class _Echo(_Format):
    """Writes completions that only echo their prompts. The engine is not used."""

    def pieces(self, results: list[Result]) -> Iterator[bytes]:
        return self._answer((choice.model_dump() for choice in self._choices()), self._usage)

    def first(self) -> Events:
        for choice in self._choices():
            yield self.event([choice.model_dump()])

    def _choices(self) -> Iterator[forms.CompletionChoice]:
        for place in range(len(self.requests)):
            yield forms.CompletionChoice(index=place, text=self._prompt_text(place), finish_reason="length")

    def last(self) -> Events:
        if self.body.asks_for("include_usage"):
            yield self.head | {"object": self.kind, "choices": [], "usage": self._usage.model_dump()}

    @property
    def _usage(self) -> forms.UsageAnswer:
        count = self.prompt_tokens
        details = forms.PromptDetails(cached_tokens=0)
        return forms.UsageAnswer(
            prompt_tokens=count, completion_tokens=0, total_tokens=count, prompt_tokens_details=details
        )
