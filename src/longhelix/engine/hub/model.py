"""A model on the hub as a user names it, and which files of its repository the engine needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from longhelix.errors import UserError

Files = Mapping[str, int | None]  # path in the repository to size in bytes, None if the hub does not say
CONFIG = ("config.json", "hf_quant_config.json")
_PATTERNS = (
    *CONFIG,
    "*.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
WEIGHTS, INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
_TEMPLATES = "additional_chat_templates/"
# Copies of the same weights in the format of their publisher, such as Mistral's.
_SECOND_COPIES = "consolidated*.safetensors"
_GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
# Other files of repositories with GGUF models: image encoders, and statistics for quantisation.
_NO_MODELS = ("mmproj", "imatrix")
_GGUF_DEFAULT = "Q4_K_M"  # as in llama.cpp


@dataclass(frozen=True)
class HubModel:
    """Model on the hub, as a user names it.

    That is ORG/NAME, or for a GGUF model ORG/NAME/FILE.gguf, ORG/NAME:FILE.gguf or ORG/NAME:QUANTISATION.
    """

    name: str  # ORG/NAME
    gguf: str | None  # name of the GGUF file, or its quantisation such as Q4_K_M
    revision: str  # branch, tag or commit
    local: str  # what the user may have meant on this machine: "folder ORG/NAME" or "file ORG/NAME/FILE.gguf"

    @classmethod
    def of(cls, model: str, revision: str | None = None) -> HubModel | None:
        """Parse a model name.

        Returns None if it has another form, if a file or folder of that name exists, or if ORG/NAME/FILE.gguf begins
        with the name of a folder.
        """
        part = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
        match = re.fullmatch(rf"({part}/{part})(?::([A-Za-z0-9._/-]+)|/([A-Za-z0-9._/-]+\.gguf))?", model)
        if match is None or os.path.exists(model) or re.search(r"--|\.\.|[.-](/|$)|\.git$", match[1]):
            return None
        if match[3] is None:
            return cls(match[1], match[2], revision or "main", f"folder {match[1]}")
        if os.path.isdir(model.partition("/")[0]):
            return None
        return cls(match[1], match[3], revision or "main", f"file {model}")

    def wanted(self, files: Files) -> list[str]:
        """Return which of a repository's files to download. Raises UserError if it has no model that can run."""
        ggufs = gguf_models(files)
        if self.gguf is not None:
            return self._parts(self._chosen(ggufs, self.gguf), files)
        if "config.json" in files and (WEIGHTS in files or INDEX in files):
            if "tokenizer.json" not in files:
                raise UserError(
                    f"{self.name} has no tokenizer.json, which longhelix needs: choose a repository that has one",
                    "invalid_checkpoint",
                )
            is_single = WEIGHTS in files
            wanted = (file for file in files if _is_wanted(file))
            return [file for file in wanted if file == WEIGHTS or not (is_single and file.endswith(_SUFFIX))]
        if ggufs:
            usual = _of_quantisation(ggufs, _GGUF_DEFAULT)
            return self._parts(self._chosen(usual, _GGUF_DEFAULT) if usual else ggufs[0], files)
        raise UserError(
            f"{self.name} has no config.json and safetensors weights: choose a repository of a model that has both, "
            "or a GGUF file",
            "invalid_checkpoint",
        )

    def _chosen(self, ggufs: list[str], asked: str) -> str:
        """Return the GGUF file that has the given name, or the only one of the given quantisation."""
        match = _GGUF_PART.fullmatch(asked)
        first = f"{match[1]}-00001-of-{match[3]}.gguf" if match else asked
        if first in ggufs:
            return first
        found = _of_quantisation(ggufs, asked)
        found = [file for file in found if not _GGUF_PART.fullmatch(file)] or found
        if not found:
            advice = f"choose one of {', '.join(ggufs)}" if ggufs else f"leave out {asked}"
            which = f"{self.name} has no GGUF file for {asked}"
            if self.local.startswith("file"):
                which = f"there is no {self.local} on this machine, and on the hub {which}"
            raise UserError(f"{which}: {advice}", "invalid_checkpoint")
        if len(found) > 1:
            raise UserError(
                f"{self.name} has {len(found)} GGUF files for {asked}: choose one of {', '.join(found)}",
                "invalid_checkpoint",
            )
        return found[0]

    def _parts(self, file: str, files: Files) -> list[str]:
        """Return all parts of the model that a GGUF file is the first part of, in order."""
        match = _GGUF_PART.fullmatch(file)
        if match is None:
            return [file]
        parts = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]
        missing = [part for part in parts if part not in files]
        if missing:
            raise UserError(
                f"{self.name} has no {missing[0]}, which is one of the {len(parts)} parts of a split model: choose "
                "another file",
                "invalid_checkpoint",
            )
        return parts


def gguf_models(files: Files) -> list[str]:
    """Return the GGUF models of a repository, sorted. The first part stands for a split model."""
    found = []
    for file in sorted(files):
        match = _GGUF_PART.fullmatch(file)
        is_model = file.endswith(".gguf") and not any(word in file.lower() for word in _NO_MODELS)
        if is_model and (match is None or int(match[2]) == 1):
            found.append(file)
    return found


def _of_quantisation(ggufs: list[str], name: str) -> list[str]:
    """Return the GGUF models with this quantisation, or another end of a name, in any case."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    ending = re.compile(rf"(^|[-._/]){re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.gguf\Z", re.IGNORECASE)
    return [file for file in ggufs if ending.search(file)]


def _is_wanted(file: str) -> bool:
    if "/" in file:
        return file.startswith(_TEMPLATES) and file.endswith(".jinja")
    return any(fnmatch(file, pattern) for pattern in _PATTERNS) and not fnmatch(file, _SECOND_COPIES)
