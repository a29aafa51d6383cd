"""How the weights of a GGUF file are kept, from the kinds of its tensors."""

import re
from collections import defaultdict
from collections.abc import Mapping

from longhelix.spec.quantised_modules import Modules, Quantisation, Rule, Storage

# The number format that holds the numbers of a kind of tensors, as they are.
GGUF_FORMATS = {
    "Q4_0": "int4-g32-float16",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_k",
    "Q3_K": "q3_k",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
}
_NUMBERS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FORMATS = GGUF_FORMATS | _NUMBERS
_MODEL_DTYPE = "bfloat16"
_COMMON, _HAVE_COMMON = "any_k", frozenset({"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"})
_WIDEST = "float32"  # has the numbers of all kinds
# Modules whose weights are one matrix in memory, or lie beside each other in one format. The first group of a match
# says which.
_TOGETHER = re.compile(
    r"(.*self_attn\.)[qkv]_proj|(.*self_attn\.)(?:q_a_proj|kv_a_proj_with_mqa)|(.*\.experts\.)[0-9]+\.\w+"
    r"|(.*shared_experts?\.)\w+_proj|(.*mlp\.)(?:gate|up)_proj"
)
# Modules without a product. Their numbers are converted while they load, whatever their dtype.
_ROUTERS = re.compile(r".*mlp\.(?:gate|shared_expert_gate)")


def gguf_quantisation(kinds: Mapping[str, str]) -> Quantisation | None:
    """Return how the modules of a GGUF file are kept. None: all as numbers of the model's dtype.

    Weights that lie together in memory and are stored as different kinds are kept in one format, which has the same
    numbers. Different kinds of experts would take too much memory so, unless all are K-quants or none is quantised.
    Such experts become numbers of the model's dtype.

    Args:
        kinds: The kind of each weight with two dims, such as "Q4_K", by the canonical name of its module.
    """
    together = defaultdict(list)
    for module in kinds:
        match = _TOGETHER.fullmatch(module)
        together[(0, module) if match is None else (match.lastindex, match[match.lastindex or 0])].append(module)
    modules: dict[Storage, set[str]] = defaultdict(set)
    mixed_experts = set[str]()
    for names in together.values():
        formats = {_FORMATS.get(kinds[name]) for name in names}
        common = None
        if len(formats) > 1:
            if formats <= _HAVE_COMMON:
                common = _COMMON
            elif ".experts." in names[0] and not formats <= set(_NUMBERS.values()):
                mixed_experts.update(names)  # all experts of a layer need one format
                continue
            elif None not in formats:
                common = _WIDEST
        for name in names:
            format = _FORMATS.get(kinds[name])
            if format in _NUMBERS.values() and _ROUTERS.fullmatch(name):
                continue
            if format is not None and (common or format) != _MODEL_DTYPE:
                modules[Storage("gguf", format, repacked=common)].add(name)
    if not modules:
        return None
    rules = (Rule(storage, Modules(frozenset(names))) for storage, names in modules.items())
    return Quantisation(tuple(rules), Modules(frozenset(mixed_experts)), gguf=True)
