"""Which modules of a checkpoint are quantised, and how each is stored."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from longhelix.spec.formats import ACTIVATION_DTYPES, FORMATS
from longhelix.spec.tensor_names import canonical

# Modules with matrices that no method quantises: embeddings, routers, and what decides or weighs like a router.
_PLAIN = re.compile(
    r".*(?:embed_tokens|norm|conv1d\w*|(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router)|shared_expert_gate"
    r"|indexer\.weights_proj)",
    re.DOTALL,
)
# Prefixes under which decoders are published. The canonical one is "model.".
_PLACES = ("", "model.language_model.", "language_model.model.", "language_model.")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}


class Storage(msgspec.Struct, frozen=True):
    """How a checkpoint stores the weight of one module.

    Attributes:
        scheme: Which tensors there are: a key of `compute.models.schemes.SCHEMES`.
        format: A number format of `longhelix.spec.formats`. GGUF files also have numbers without codes.
        ordered: The inputs of a scale block do not lie side by side (act-order): a tensor says the block of each.
        input_dtype: The number format to which products round their inputs: "int8" or "fp8". None: they do not.
        repacked: Another number format, which has the same numbers and is used in memory. None: there is none.
    """

    scheme: str
    format: str
    ordered: bool = False
    input_dtype: str | None = None
    repacked: str | None = None

    @property
    def kept(self) -> str:
        """The number format in memory."""
        return "w8a8" if (self.input_dtype, self.format) == ("int8", "int8-channel") else self.repacked or self.format

    @property
    def is_number(self) -> bool:
        """Whether weights are numbers without codes in memory."""
        return FORMATS[self.kept].arithmetic.activation

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs, and multiply them with packed codes."""
        return self.input_dtype is not None and FORMATS[self.kept].codes is not None


class Modules(msgspec.Struct, frozen=True):
    """Modules that settings name, under the names of any publisher.

    A projection also has the name of the fused module that some engines make of it, such as qkv_proj.

    Attributes:
        names: Canonical names. Modules inside a named one belong to it.
        endings: Ends of names, or of the name of the module that has all experts of a layer.
        patterns: Regular expressions, which match from the beginning of a name.
    """

    names: frozenset[str] = frozenset()
    endings: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def include(self, module: str) -> bool:
        """Return whether a module of a canonical name is one of them."""
        names = (module, *_fused(module))
        return (
            any(each in self.names for name in names for each in _enclosing(name))
            or any(name.endswith(self.endings) for name in (*names, *_all_experts(module)))
            or any(pattern.match(name) for name in _published(names) for pattern in _compiled(self.patterns))
        )


class Rule(msgspec.Struct, frozen=True):
    """How some modules are stored.

    Attributes:
        storage: How they are stored.
        modules: Which modules. None: all with a matrix.
    """

    storage: Storage
    modules: Modules | None = None


class Quantisation(msgspec.Struct, frozen=True):
    """Which modules of a checkpoint are quantised, and how.

    Attributes:
        rules: The first rule that a module meets applies to it.
        plain: Modules that stay in the model's dtype, whatever the rules say.
        gguf: The checkpoint is a GGUF file. Rules name every quantised module, even embeddings and routers, and weights
            become numbers if an option asks for it.
    """

    rules: tuple[Rule, ...]
    plain: Modules = Modules()
    gguf: bool = False

    @property
    def packs(self) -> bool:
        """Whether any weights stay packed. Those of other GGUF files are numbers, not all of the model's dtype."""
        return any(not rule.storage.is_number for rule in self.rules)

    def without_numbers(self) -> "Quantisation | None":
        """Return the same without the rules for weights that are numbers in memory. None: no rule is left."""
        rules = tuple(rule for rule in self.rules if not rule.storage.is_number)
        return msgspec.structs.replace(self, rules=rules) if rules else None

    @property
    def formats(self) -> str:
        """The number formats of quantised modules, in words."""
        return " and ".join(dict.fromkeys(rule.storage.format for rule in self.rules))

    def rounding_inputs(self, dtype: str) -> "Quantisation | None":
        """Return the same with products that round their inputs to `dtype`, other than those of numbers.

        None: it does not fit some weights.
        """
        if any(
            rule.storage.format not in ACTIVATION_DTYPES[dtype] for rule in self.rules if not rule.storage.is_number
        ):
            return None
        rules = (
            rule
            if rule.storage.is_number
            else msgspec.structs.replace(rule, storage=msgspec.structs.replace(rule.storage, input_dtype=dtype))
            for rule in self.rules
        )
        return msgspec.structs.replace(self, rules=tuple(rules))

    def storage_of(self, module: str) -> Storage | None:
        """Return how a module's weight is stored. None: in the model's dtype.

        Args:
            module: Its canonical name, such as "model.layers.3.mlp.experts.7.down_proj" or "lm_head".
        """
        if self.gguf and module in self.plain.names:
            return None
        if not self.gguf and (_PLAIN.fullmatch(module) or self.plain.include(module)):
            return None
        meets = (rule for rule in self.rules if rule.modules is None or rule.modules.include(module))
        rule = next(meets, None)
        return None if rule is None else rule.storage


def canonical_module(name: str) -> str:
    """Return the canonical name of a module, or part of a name as it is."""
    return canonical(f"{name}.weight").removesuffix(".weight")


def _fused(module: str) -> Iterator[str]:
    """Yield the name of the fused module that may contain this module's weight."""
    place, _, last = module.rpartition(".")
    if last in _FUSED:
        yield f"{place}.{_FUSED[last]}"


def _all_experts(module: str) -> Iterator[str]:
    """Yield the name of the module with all experts of a layer, if this is an expert's."""
    place, found, _ = module.partition(".experts.")
    if found:
        yield f"{place}.experts"


def _enclosing(name: str) -> Iterator[str]:
    """Yield a name, and the names of all modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _published(names: Iterable[str]) -> Iterator[str]:
    """Yield canonical names, and the other names under which the modules are published."""
    for name in names:
        yield name
        inside = name.removeprefix("model.")
        for place in _PLACES:
            yield place + inside


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.DOTALL) for pattern in patterns)
