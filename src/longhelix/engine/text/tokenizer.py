"""The tokenizer. It converts text to token ids and back, for whole texts or token by token."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.engine.text.encoder import BackendEncoder, Encoder
from longhelix.engine.text.gguf_tokenizer import end_ids, read_tokenizer
from longhelix.engine.text.reasoning import ReasoningForm, form_of
from longhelix.engine.text.text_stream import ByteStream, DecodedStream, TextStream
from longhelix.engine.text.text_too_long import TextTooLongError
from longhelix.engine.text.token_bytes import token_bytes
from longhelix.engine.text.tokenizer_folder import TokenizerFolder
from longhelix.engine.text.tool_calls import ToolForm
from longhelix.errors import UserError
from longhelix.scheduler.guide import ReasoningTags

_KNOWN_PIECES = 1 << 17
_TAIL_TOKENS = 64  # tokens to decode at the end of a prompt, for a reasoning tag and the whitespace after it


class Tokenizer:
    """A model's tokenizer and its chat template, if it has one.

    Attributes:
        max_model_len: largest number of tokens in a prompt, or None. Text that is too long for this number of tokens is
            rejected before it is tokenized.
        end_ids: tokens that end an answer according to the tokenizer. The model's configuration may list more tokens.
    """

    max_model_len: int | None = None

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        end_ids: Sequence[int] = (),
        encoder: Encoder | None = None,
    ) -> None:
        # A tokenizer.json may contain truncation and padding settings from training, but prompts must not be truncated.
        backend.no_truncation()
        backend.no_padding()
        self.end_ids = tuple(end_ids)
        self._backend = backend
        self._encoder = encoder or BackendEncoder(backend)
        self._chat_template = chat_template
        if chat_template is not None:
            chat_template.check_length = self._check_length
        self._bytes = token_bytes(backend)  # None if tokens do not represent bytes
        self.piece = lru_cache(_KNOWN_PIECES)(self._piece)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer's files (see `TokenizerFolder`). Raises UserError if a file is damaged."""
        files = TokenizerFolder(folder)
        backend = files.backend()
        eos_id = backend.token_to_id(files.special_tokens.get("eos_token", ""))
        return cls(backend, files.chat_template(), () if eos_id is None else (eos_id,))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Build the tokenizer that a GGUF file's `tokenizer.*` keys describe. Raises UserError if it is unsupported."""
        backend, encoder, template = read_tokenizer(metadata)
        return cls(backend, template, end_ids(metadata), encoder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with a BOS if this tokenizer adds one."""
        return self._encode(text, add_special_tokens=True)

    def parts(self, text: str) -> list[str]:
        """Return the part of a plain prompt that each of its tokens represents (see `Encoder.parts`)."""
        _check_unicode(text)
        return self._encoder.parts(text)

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of text that follows other tokens."""
        return self._encode(text, add_special_tokens=False)

    @property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls. None if this engine does not support the model's form."""
        form = None if self._chat_template is None else self._chat_template.tool_form
        # Decoded text has no special tokens, so the engine could not find calls between special tokens.
        hidden = {self._backend.id_to_token(token_id) for token_id in self.special_ids}
        return None if form is None or {form.begin, form.end} & hidden else form

    def reasoning_form(self, parser: str) -> ReasoningForm | None:
        """Return how the model writes its reasoning, or None if it writes none. parser: name of a parser, or "auto"."""
        template = "" if self._chat_template is None else self._chat_template.source
        return form_of(parser, template, self._backend.get_vocab())

    def reasoning_tags(
        self, form: ReasoningForm, prompt: Sequence[int], is_continued: bool = False
    ) -> ReasoningTags | None:
        """Return the tags that an answer to `prompt` may have around its reasoning.

        Args:
            form: how the model writes its reasoning.
            prompt: token ids of the prompt.
            is_continued: whether the prompt ends inside a message that the answer continues.

        Returns:
            The tags, or None if the prompt already ends after the reasoning. Templates render such prompts if reasoning
            is turned off.
        """
        begin_id, end_id = (
            token_id if token_id in self.special_ids else None
            for token_id in map(self._backend.token_to_id, (form.begin, form.end))
        )
        tags = ReasoningTags(begin=form.begin, end=form.end, begin_id=begin_id, end_id=end_id, is_open=form.is_implied)
        if is_continued:
            turn = self._last_turn(prompt, tags.special_ids)
            is_open = turn.rfind(form.begin) > turn.rfind(form.end)
            return replace(tags, is_open=True) if is_open else None
        ending = self.spell(prompt[-_TAIL_TOKENS:]).rstrip()
        if ending.endswith(form.end):
            return None
        return replace(tags, is_open=tags.is_open or ending.endswith(form.begin))

    def _last_turn(self, prompt: Sequence[int], tag_ids: Collection[int]) -> str:
        """Return the text after the last special token that is not a tag.

        Chat templates begin each turn with such a token.
        """
        marks = self.special_ids.difference(tag_ids)
        start = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in marks), 0)
        return self.spell(prompt[start:])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **ending: bool,
    ) -> list[int]:
        """Return the ids of a conversation up to the beginning of the assistant's answer.

        Accepts the arguments of `ChatTemplate.render`. Raises UserError if the model has no chat template.
        """
        return self._encode_rendered(self._template.render(messages, tools, variables, **ending))

    def encode_more_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None, **ending: bool
    ) -> list[int]:
        """Return the ids of messages that follow other tokens, such as a conversation or a saved context."""
        return self._encode_rendered(self._template.render_more(messages, variables, **ending))

    @property
    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise UserError("the model has no chat template: use generate without --chat", code="no_chat_template")
        return self._chat_template

    def _encode_rendered(self, text: str) -> list[int]:
        # The template has already written all special tokens.
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of the ids without special tokens."""
        return self.spell([token_id for token_id in token_ids if token_id not in self.special_ids])

    def spell(self, token_ids: Sequence[int], begins: bool = True) -> str:
        """Return the text of the ids, including special tokens. begins: whether the ids begin a text."""
        if self._bytes is not None:
            return self._bytes.text(token_ids, begins)
        if not begins:
            return "".join(map(self.piece, token_ids))
        # `decode_batch`, unlike `decode`, lets other threads run.
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)[0]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each of these tokens adds, including special tokens."""
        stream = self._stream((), ())
        found = [stream.push(token_id) for token_id in token_ids]
        if found:
            found[-1] += stream.finish()
        return found

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of each token inside a text, by id. For a special token, they are the bytes of its name.

        Raises:
            UserError: the tokenizer's tokens do not represent bytes.
        """
        if self._bytes is None:
            raise UserError(
                "guides need a byte-level or SentencePiece tokenizer, but the model's tokens do not stand for bytes: "
                "leave the guide out, or use another model",
                "unsupported_model",
            )
        return self._bytes.all_tokens()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which have no text of their own."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def longest_token(self) -> int:
        """Largest number of characters that a token can represent."""
        return max(map(len, self._backend.get_vocab()))

    def most_characters(self, token_ids: "array[int]") -> int:
        """Return an upper bound on the number of characters in the text of some tokens."""
        return int(self._lengths.take(np.frombuffer(token_ids, np.int32), mode="clip").sum()) if token_ids else 0

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Number of characters of each token's name, by id. A token's text is never longer than its name."""
        vocabulary = self._backend.get_vocab()
        found = np.zeros(max(vocabulary.values()) + 1, np.int64)
        for name, token_id in vocabulary.items():
            found[token_id] = len(name)
        return found

    def _check_length(self, num_characters: int) -> None:
        """Raise TextTooLongError if a text of this length certainly has more tokens than a prompt may have."""
        most = self.max_model_len
        if most is not None and num_characters > most and num_characters > most * self.longest_token:
            raise TextTooLongError(most, most * self.longest_token)

    def _piece(self, token_id: int) -> str:
        """Return the text of one token that is not the first of a text."""
        if self._bytes is not None:
            return self._bytes.text([token_id], begins=False)
        # Decoders remove a space at the beginning of a text.
        return self.spell([token_id, token_id])[len(self.spell([token_id])) :]

    def stream(
        self, before: Sequence[int] = (), skip_special_tokens: bool = True, shown: Collection[int] = ()
    ) -> TextStream:
        """Return a decoder for ids that arrive one by one.

        Args:
            before: the ids that precede the decoded ids.
            skip_special_tokens: whether to leave special tokens out of the text.
            shown: special tokens that are never left out.
        """
        return self._stream(before, self.special_ids.difference(shown) if skip_special_tokens else ())

    def _stream(self, before: Sequence[int], hidden: Collection[int]) -> TextStream:
        if self._bytes is not None:
            return ByteStream(self._bytes, before, hidden)
        return DecodedStream(self._backend, before, hidden)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._check_length(len(text))
        _check_unicode(text)
        return self._encoder.ids(text, add_special_tokens)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt has half a surrogate pair at character {error.start}: remove it") from error
