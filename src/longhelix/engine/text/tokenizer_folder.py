"""Reads the tokenizer files of a checkpoint folder, as transformers does."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from longhelix import values
from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.errors import UserError

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_TOKENS = 1 << 20  # largest number of tokens that a file may add
_INVALID = "invalid_checkpoint"
_MAP = "special_tokens_map.json"


class TokenizerFolder:
    """The tokenizer of a checkpoint folder. Its methods and properties raise UserError if a file is broken.

    Tokens come from tokenizer.json, then from `added_tokens_decoder` of tokenizer_config.json. If there is no
    `added_tokens_decoder`, special_tokens_map.json and added_tokens.json are read too. Special tokens that no list
    contains are added last.

    The chat templates are read from the first of these sources that contains a template: chat_template.jinja with the
    folder additional_chat_templates, tokenizer_config.json, chat_template.json.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config_file = folder / "tokenizer_config.json"

    @cached_property
    def _own_config(self) -> dict[str, Any]:
        return _read_object(self._config_file)

    @cached_property
    def _map(self) -> dict[str, Any]:
        return {} if "added_tokens_decoder" in self._own_config else _read_object(self._folder / _MAP)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._own_config | self._map

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by name, such as bos_token, including those that only this model has."""
        return {name: token.content for name, token in self._named.items()}

    @cached_property
    def _named(self) -> dict[str, AddedToken]:
        """Special tokens by name, in the order that transformers adds them."""
        own = {name: token for name, token in _of_model(self._own_config).items() if isinstance(token, str)}
        others = {name: token for name, token in self._own_config.items() if name not in own} | self._map
        extra = self._extra if isinstance(self._extra, dict) else {}
        named = {name: self._config.get(name) for name in _NAMED} | _of_model(others) | own | extra
        return {name: self._special(name, token) for name, token in named.items() if token}

    def _special(self, name: str, token: object) -> AddedToken:
        if not isinstance(token, dict):
            return AddedToken(_string(self._where(name), token), special=True)
        return _token(self._where(name), {**token, "special": True} if name in self._map else token)

    def _where(self, name: str) -> str:
        return f"{name} in {self._folder / _MAP if name in self._map else self._config_file}"

    def backend(self) -> tokenizers.Tokenizer:
        """Return the tokenizer with all added tokens."""
        backend = _read_backend(self._folder / "tokenizer.json")
        known = backend.get_added_tokens_decoder()
        listed = self._listed()
        added = [listed[token_id] for token_id in sorted(listed) if repr(listed[token_id]) != repr(known.get(token_id))]
        names = {token.content for token in (*known.values(), *added)}
        # If several tokens have the same content but different flags, the last token is used.
        added += {repr(token): token for token in self._unlisted() if token.content not in names}.values()
        special = set(self.special_tokens.values())
        for token in added:
            token.special = token.special or token.content in special
        backend.add_tokens(added)
        return backend

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template, including the separate template for tools if there is one.

        Returns None if the folder has no chat template.
        """
        sources = self._template_files() or self._config_templates()
        default = sources.get("default") or sources.get("tool_use")
        return None if not default else ChatTemplate(default, self.special_tokens, sources.get("tool_use"))

    @property
    def _extra_name(self) -> str:
        """The key under which a file lists special tokens without individual names."""
        return "extra_special_tokens" if self._config.get("extra_special_tokens") else "additional_special_tokens"

    @property
    def _extra(self) -> object:
        return self._config.get(self._extra_name) or ()

    def _listed(self) -> dict[int, AddedToken]:
        """Return the added tokens by id, from the file that lists them."""
        if "added_tokens_decoder" in self._config:
            name = f"added_tokens_decoder in {self._config_file}"
            listed = values.entries(
                name, value=self._config["added_tokens_decoder"], most=_MOST_TOKENS, of="tokens", code=_INVALID
            )
            return {_id(name, key): _token(f"{name}, {key}", token) for key, token in listed}
        file, special = self._folder / "added_tokens.json", {token.content for token in self._unlisted()}
        return {
            _id(str(file), token_id): AddedToken(content, normalized=content not in special, special=content in special)
            for content, token_id in _read_object(file).items()
        }

    def _unlisted(self) -> Iterator[AddedToken]:
        """Yield all special tokens, including those that no file lists as added tokens."""
        yield from self._named.values()
        extra = self._extra
        if not isinstance(extra, dict):
            name = self._where(self._extra_name)
            for token in values.items(name, value=extra, most=_MOST_TOKENS, of="tokens", code=_INVALID):
                read = token if isinstance(token, dict) else {"content": token}
                yield _token(name, {"normalized": False, **read, "special": True})

    def _template_files(self) -> dict[str, str]:
        default, more = self._folder / "chat_template.jinja", self._folder / "additional_chat_templates"
        found = {path.stem: _read_text(path) for path in sorted(more.glob("*.jinja"))} if more.is_dir() else {}
        return found | ({"default": _read_text(default)} if default.is_file() else {})

    def _config_templates(self) -> dict[str, str]:
        file, template = self._config_file, self._config.get("chat_template")
        if template is None:
            file = self._folder / "chat_template.json"
            template = _read_object(file).get("chat_template")
        name = f"chat_template in {file}"
        if isinstance(template, list):
            template = {entry.get("name"): entry["template"] for entry in template if _has(entry, "template")}
        if isinstance(template, dict):
            return {key: _string(name, template[key]) for key in ("default", "tool_use") if key in template}
        return {} if template is None else {"default": _string(name, template)}


def _token(name: str, token: object) -> AddedToken:
    if not isinstance(token, dict):
        raise UserError(f"{name} is {values.shown(token)}, not an object with content: correct it", code=_INVALID)
    flags = {flag: values.flag(f"{flag} of {name}", token[flag], _INVALID) for flag in _FLAGS if flag in token}
    return AddedToken(_string(f"content of {name}", token.get("content")), **flags)


def _id(name: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    return values.whole(f"a token id of {name}", number, 0, 2**31 - 1, code=_INVALID)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} is missing: put the model's tokenizer.json in its folder", code=_INVALID)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no more specific exception
        raise UserError(f"{path} cannot be read ({error}): download it again", code=_INVALID) from error


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if the file is missing."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): download it again", code=_INVALID) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object: download it again", code=_INVALID)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: download it again", code=_INVALID) from error


def _of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokens that only some models have, such as image_token."""
    return {
        name: token
        for name, token in config.items()
        if name.endswith("_token") and name not in _NAMED and (isinstance(token, str) or _has(token, "content"))
    }


def _has(value: object, key: str) -> bool:
    return isinstance(value, Mapping) and key in value


def _string(name: str, value: object) -> str:
    return values.text(name, value, _INVALID)
