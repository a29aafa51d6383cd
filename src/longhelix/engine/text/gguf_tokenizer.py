"""Builds a tokenizer from the `tokenizer.*` keys of a GGUF file, as llama.cpp does."""

from array import array
from collections.abc import Collection, Mapping, Sequence

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, decoders, models, normalizers, processors

from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.engine.text.encoder import BackendEncoder, Encoder
from longhelix.engine.text.gguf_splits import SPLITS, GGUFSplit
from longhelix.engine.text.piece_encoder import SPACE, PieceEncoder
from longhelix.errors import UserError
from longhelix.values import refused, shown, text, whole


def read_tokenizer(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, Encoder, ChatTemplate | None]:
    """Return the tokenizer, its encoder and its chat template. The template is None if the file has none.

    Raises:
        UserError: the tokenizer's kind is not supported, or the file is broken.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _GGUF_MODELS:
        raise UserError(
            f"the GGUF file's tokenizer.ggml.model is {shown(model)}, which is not supported: use a file with one of "
            f"{', '.join(_GGUF_MODELS)}",
            code="unsupported_model",
        )
    backend, encoder = _GGUF_MODELS[model](metadata)
    tokens = _tokens(metadata)
    special_tokens = {f"{name}_token": tokens[token_id] for name, token_id in _special_ids(metadata).items()}
    template, for_tools = (
        None if metadata.get(key) is None else text(f"{key} in the GGUF file", metadata[key], "invalid_checkpoint")
        for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    )
    return backend, encoder, ChatTemplate(template, special_tokens, for_tools) if template else None


# Maps the name of a special token in chat templates to the name of the token's GGUF key.
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
# llama.cpp's defaults for SentencePiece vocabularies without these keys.
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}


def _special_ids(metadata: Mapping[str, object]) -> dict[str, int]:
    last = len(_tokens(metadata)) - 1
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    found = {name: i for name, i in _SENTENCEPIECE_IDS.items() if i <= last} if is_sentencepiece else {}
    for name, key in _SPECIAL.items():
        key = f"tokenizer.ggml.{key}"
        value = metadata.get(key)
        # Only templates need tokens other than BOS and EOS. If their ids are outside the vocabulary, such as -1,
        # llama.cpp ignores them.
        is_none = name not in ("bos", "eos") and isinstance(value, int) and not 0 <= value <= last
        if key in metadata and not is_none:
            found[name] = whole(key, value, 0, last, code="invalid_checkpoint")
    return found


def _ids_around(metadata: Mapping[str, object]) -> tuple[list[int], list[int]]:
    """Return the ids to add before and after a prompt."""
    ids = _special_ids(metadata)
    begins = "bos" in ids and _gguf_flag(metadata, "add_bos_token", _adds_bos_by_default(metadata))
    ends = "eos" in ids and _gguf_flag(metadata, "add_eos_token", False)
    return [ids["bos"]] if begins else [], [ids["eos"]] if ends else []


# Tokens that end an answer in any model that has them, from llama.cpp's list.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
        # Tokens of code models: padding, next repository, next file.
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
# Tokens that are special even if the file says otherwise: the tokens above, and fill-in-the-middle tokens.
_SPECIAL_NAMES = _ENDS | frozenset(
    {
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|prefix|>", "<|suffix|>", "<|middle|>",
    }
)  # fmt: skip


def end_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids of tokens that end an answer.

    These are the tokens that the file names, and the tokens on llama.cpp's list.
    """
    tokens = _tokens(metadata)
    found = {token_id for name, token_id in _special_ids(metadata).items() if name == "eos"}
    for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            found.add(whole(key, metadata[key], 0, len(tokens) - 1, code="invalid_checkpoint"))
    found |= {token_id for token_id, token in enumerate(tokens) if token in _ENDS}
    # If a vocabulary has the tokens tested below, some other tokens on the list have a different meaning.
    named = {tokens[token_id] for token_id in found}
    if named >= {"<|return|>", "<|call|>"} or ("<|flush|>" in named and named & {"<|call|>", "<|calls|>"}):
        found -= {token_id for token_id in found if tokens[token_id] == "<|end|>"}
    if "<|tool_response>" in named:
        found -= {token_id for token_id in found if tokens[token_id] == "</s>"}
    return tuple(sorted(found))


def _gguf_byte_level(metadata: Mapping) -> tuple[tokenizers.Tokenizer, Encoder]:
    split = _split(metadata)
    merges = [pair.partition(" ")[::2] for pair in _gguf_list(metadata, "merges", str)]
    backend = _gguf_bpe(metadata, merges, ignore_merges=split.takes_whole_words)
    if split.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_gguf_added_tokens(metadata, made={"".join(pair) for pair in merges}))
    begin, end = _ids_around(metadata)
    if begin or end:
        # The template names the tokens "begin" and "end", because it would misread tokens such as "$A" and "a:1".
        spelled = [
            {"id": name, "ids": ids, "tokens": [backend.id_to_token(token_id) for token_id in ids]}
            for name, ids in (("begin", begin), ("end", end))
            if ids
        ]
        single = " ".join([*(["begin"] if begin else []), "$A", *(["end"] if end else [])])
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=spelled)
    return backend, BackendEncoder(backend)


def _gguf_sentencepiece(metadata: Mapping) -> tuple[tokenizers.Tokenizer, Encoder]:
    backend = _gguf_bpe(metadata, [])
    prefix = _gguf_flag(metadata, "add_space_prefix", True)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    added = _gguf_added_tokens(metadata)
    backend.add_tokens(added)
    begin, end = _ids_around(metadata)
    encoder = PieceEncoder(
        backend.get_vocab(),
        # llama.cpp merges pieces into any token except byte tokens. Like SentencePiece, it treats <0x41> in a text as
        # plain text.
        {token: score for token, kind, score in _gguf_rows(metadata) if kind != TokenType.BYTE},
        [token.content for token in added],
        unknown=[token_id for name, token_id in _special_ids(metadata).items() if name == "unk"],
        starts_with_space=prefix,
        begin=begin,
        end=end,
    )
    return backend, encoder


def _split(metadata: Mapping) -> GGUFSplit:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in SPLITS:
        raise UserError(
            f"the GGUF file's tokenizer.ggml.pre is {shown(name)}, which is not supported: use a model with a "
            "byte-level pre-tokenizer of llama.cpp, such as llama-bpe, qwen2, smollm or tekken",
            code="unsupported_model",
        )
    return SPLITS[name]


_GGUF_MODELS = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}


def _adds_bos_by_default(metadata: Mapping) -> bool:
    """Return llama.cpp's default for files without add_bos_token."""
    return metadata["tokenizer.ggml.model"] == "llama" or _split(metadata).begins_with_bos


def _gguf_bpe(metadata: Mapping, merges: list[tuple[str, ...]], **options: bool) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(_tokens(metadata))}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # tokenizers raises no more specific exception
        raise UserError(
            f"the GGUF file's merges do not match its tokens ({shown(str(error))}): convert the model again",
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
        raise UserError(f"the GGUF file has no {key}: convert the model again", code="invalid_checkpoint")
    values = metadata[key]
    if not isinstance(values, (list, tuple, array)) or not all(isinstance(value, kind) for value in values):
        raise UserError(
            f"{key} in the GGUF file is {shown(values)}, which is not valid: convert the model again",
            code="invalid_checkpoint",
        )
    return values


def _tokens(metadata: Mapping) -> Sequence[str]:
    found = _gguf_list(metadata, "tokens", str)
    return [
        token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(found)
    ]  # llama.cpp's names for empty tokens


def _gguf_rows(metadata: Mapping) -> list[tuple[str, int, float]]:
    """Return each token with its kind and its score. As in llama.cpp, the defaults are "normal" and 0."""
    tokens = _tokens(metadata)
    kinds, scores = (
        _gguf_list(metadata, key, kind) if f"tokenizer.ggml.{key}" in metadata else [default] * len(tokens)
        for key, kind, default in (("token_type", int, TokenType.NORMAL), ("scores", (int, float), 0.0))
    )
    if not len(tokens) == len(kinds) == len(scores):
        raise UserError(
            f"the GGUF file has {len(tokens)} tokens, but {len(kinds)} token types and {len(scores)} scores: "
            "convert the model again",
            code="invalid_checkpoint",
        )
    return list(zip(tokens, kinds, scores, strict=True))


def _gguf_added_tokens(metadata: Mapping, made: Collection[str] = ()) -> list[AddedToken]:
    """Return the special and user-defined tokens, which are found in a text before it is split.

    made: tokens that merges produce. A name on llama.cpp's list does not make such a token special.
    """
    special = {TokenType.UNKNOWN, TokenType.CONTROL}
    found = (
        (token, kind in special or (token in _SPECIAL_NAMES and token not in made), kind == TokenType.USER_DEFINED)
        for token, kind, _ in _gguf_rows(metadata)
    )
    return [
        AddedToken(token, special=is_special, normalized=False)
        for token, is_special, is_defined in found
        if is_special or is_defined
    ]
