"""Text to token ids and back: from a checkpoint folder or a GGUF file's metadata, whole or token by token."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from longhelix.errors import UserError
from longhelix.text.chat_template import ChatTemplate
from longhelix.values import refused, shown, whole


class Tokenizer:
    """A model's tokenizer and, where it has one, its chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        # A tokenizer.json may carry its training's truncation and padding; a prompt is never cut.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja; UserError if one is broken."""
        backend = _read_backend(folder / "tokenizer.json")
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = _read_config(config_file)
        special_tokens = {
            name: _string(f"{name} in {config_file}", token["content"] if _has(token, "content") else token)
            for name in ("bos_token", "eos_token")
            if (token := config.get(name))
        }
        template = _read_text(template_file) if template_file.is_file() else _config_template(config_file, config)
        return cls(backend, ChatTemplate(template, special_tokens) if template else None)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's `tokenizer.*` keys describe; UserError if it is not known."""
        model = metadata.get("tokenizer.ggml.model")
        if not isinstance(model, str) or model not in _GGUF_MODELS:
            raise UserError(
                f"the GGUF file's tokenizer model is {shown(model)}; convert the model with one of: "
                f"{', '.join(_GGUF_MODELS)}",
                code="unsupported_model",
            )
        backend = _GGUF_MODELS[model](metadata)
        tokens = _gguf_list(metadata, "tokens", str)
        special_tokens = {
            f"{name}_token": tokens[whole(key, metadata[key], 0, len(tokens) - 1, code="invalid_checkpoint")]
            for name in ("bos", "eos")
            if (key := f"tokenizer.ggml.{name}_token_id") in metadata
        }
        bos = special_tokens.get("bos_token")
        if bos and _gguf_flag(metadata, "add_bos_token", _adds_bos_by_default(metadata)):
            # Under a name of its own: in a template, "$A" and "a:1" would not stand for themselves.
            spelled = {"id": "bos", "ids": [backend.token_to_id(bos)], "tokens": [bos]}
            backend.post_processor = processors.TemplateProcessing(single="bos $A", special_tokens=[spelled])
        template = metadata.get("tokenizer.chat_template")
        if template is not None:
            template = _string("tokenizer.chat_template in the GGUF file", template)
        return cls(backend, ChatTemplate(template, special_tokens) if template else None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with a BOS if this tokenizer adds one."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to where the assistant speaks; UserError without a chat template."""
        if self._chat_template is None:
            raise UserError("the model has no chat template; use generate without --chat", code="no_chat_template")
        # The template has written every special token that it wants.
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the ids, special tokens left out."""
        return self._backend.decode(list(token_ids))

    def stream(self) -> "TextStream":
        """A decoder for ids that come one by one."""
        return TextStream(self._backend)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt has half a surrogate pair at character {error.start}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids


class TextStream:
    """Decodes a growing sequence; the pieces joined are what `Tokenizer.decode` gives for all of it."""

    # A character has at most four bytes: after this many tokens without one complete, the bytes are not text.
    _PATIENCE = 16

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._silent = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        # Decoders drop the space that begins a text, so new tokens are decoded behind those of the last piece.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The characters that this id completes, or ""."""
        if token_id in self._silent or self._backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        piece = self._pending_text()
        if not piece or (piece.endswith("\ufffd") and len(self._pending) < self._PATIENCE):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._backend.decode(self._context)
        return piece

    def finish(self) -> str:
        """The rest; a character still incomplete comes out as U+FFFD."""
        return self._pending_text()

    def _pending_text(self) -> str:
        return self._backend.decode(self._context + self._pending)[len(self._context_text) :]


class StopStrings:
    """Cuts a stream of text where the first stop string to complete begins."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that no stop string can claim any more, and whether one is complete."""
        text = self._held + text
        # By end, then by start: the cut does not depend on how the text was split into pushes.
        matches = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        safe = len(text) - max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} is missing; put the model's tokenizer.json in its folder", code="invalid_checkpoint")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{path} cannot be read ({error}); download it again", code="invalid_checkpoint") from error


def _read_config(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again", code="invalid_checkpoint") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object; download it again", code="invalid_checkpoint")
    return config


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; download it again", code="invalid_checkpoint") from error


def _config_template(path: Path, config: Mapping) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = (entry for entry in template if _has(entry, "template") and entry.get("name") == "default")
        template = next(named, {"template": None})["template"]
    return None if template is None else _string(f"chat_template in {path}", template)


def _has(value: object, key: str) -> bool:
    return isinstance(value, dict) and key in value


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "a string", "invalid_checkpoint")
    return value


def _byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The words that the byte-level models were trained on, by the name GGUF gives each way of splitting.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_GGUF_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _byte_level(_WORDS % "1,3"),
    "qwen2": _byte_level(_WORDS % "1"),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}


def _gguf_byte_level(metadata: Mapping) -> tokenizers.Tokenizer:
    split = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(split, str) or split not in _GGUF_SPLITS:
        raise UserError(
            f"the GGUF file's pre-tokenizer is {shown(split)}; use a model with one of: {', '.join(_GGUF_SPLITS)}",
            code="unsupported_model",
        )
    merges = [pair.partition(" ")[::2] for pair in _gguf_list(metadata, "merges", str)]
    backend = _gguf_bpe(metadata, merges, ignore_merges=split == "llama-bpe")
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _GGUF_SPLITS[split]
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_gguf_added_tokens(metadata))
    return backend


def _gguf_sentencepiece(metadata: Mapping) -> tokenizers.Tokenizer:
    backend = _gguf_bpe(metadata, _merges_by_score(metadata), byte_fallback=True)
    space, prefix = "▁", _gguf_flag(metadata, "add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(space)] if prefix else []), normalizers.Replace(" ", space)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    backend.add_tokens(_gguf_added_tokens(metadata))
    return backend


_GGUF_MODELS = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}


def _adds_bos_by_default(metadata: Mapping) -> bool:
    """What llama.cpp does for files that do not say."""
    return metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"


def _gguf_bpe(metadata: Mapping, merges: list[tuple[str, ...]], **options: bool) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(_gguf_list(metadata, "tokens", str))}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(
            f"the GGUF file's merges do not fit its tokens ({shown(str(error))}); convert the model again",
            code="invalid_checkpoint",
        ) from error


def _gguf_flag(metadata: Mapping, key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise refused(f"tokenizer.ggml.{key} in the GGUF file", value, "true or false", "invalid_checkpoint")
    return value


def _gguf_list(metadata: Mapping, key: str, kind: type | tuple[type, ...]) -> Sequence:
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise UserError(f"the GGUF file has no {key}; convert the model again", code="invalid_checkpoint")
    values = metadata[key]
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind) for value in values):
        raise UserError(
            f"{key} in the GGUF file is {shown(values)}; convert the model again", code="invalid_checkpoint"
        )
    return values


def _gguf_rows(metadata: Mapping, **kinds: type | tuple[type, ...]) -> list[tuple]:
    """Lists with an item for each token, side by side."""
    lists = [_gguf_list(metadata, key, kind) for key, kind in kinds.items()]
    lengths = {len(values) for values in lists}
    if len(lengths) > 1:
        raise UserError(
            f"the GGUF file's {', '.join(kinds)} are not of one length; convert the model again",
            code="invalid_checkpoint",
        )
    return list(zip(*lists, strict=True))


def _gguf_added_tokens(metadata: Mapping) -> list[AddedToken]:
    """The tokens found in a text before it is split: special ones, and those that the model's user defined."""
    special = {TokenType.UNKNOWN, TokenType.CONTROL}
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in _gguf_rows(metadata, tokens=str, token_type=int)
        if kind in special or kind == TokenType.USER_DEFINED
    ]


def _merges_by_score(metadata: Mapping) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union scores best; as BPE ranks: every pair, best union first."""
    rows = _gguf_rows(metadata, tokens=str, token_type=int, scores=(int, float))
    scores = {token: score for token, kind, score in rows if kind == TokenType.NORMAL}
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in reversed(range(1, len(token)))
        if token[:cut] in scores and token[cut:] in scores
    ]
