"""Which weights of a GGUF file stay packed, and how, from the kinds of its tensors."""

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
_COMMON, _HAVE_COMMON = "any_k", frozenset({"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"})
# Modules whose weights are one matrix in memory, or lie beside each other in one format. The first group of a match
# says which.
_TOGETHER = re.compile(
    r"(.*self_attn\.)[qkv]_proj|(.*self_attn\.)(?:q_a_proj|kv_a_proj_with_mqa)|(.*\.experts\.)[0-9]+\.\w+"
    r"|(.*shared_experts?\.)\w+_proj|(.*mlp\.)(?:gate|up)_proj"
)


def gguf_quantisation(kinds: Mapping[str, str]) -> Quantisation | None:
    """Return how the modules of a GGUF file are quantised. None: none of them is.

    Weights that lie together in memory and are stored as different K-quants are kept in one format, which has the same
    numbers. With other kinds, they become numbers of the model's dtype.

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
        formats = {GGUF_FORMATS.get(kinds[name], "") for name in names}
        has_common = len(formats) > 1 and formats <= _HAVE_COMMON
        if len(formats) > 1 and not has_common and ".experts." in names[0]:
            mixed_experts.update(names)  # all experts of a layer need one format
            continue
        for name in names:
            format = GGUF_FORMATS.get(kinds[name])
            if format is not None:
                modules[Storage("gguf", format, repacked=_COMMON if has_common else None)].add(name)
    if not modules:
        return None
    rules = (Rule(storage, Modules(frozenset(names))) for storage, names in modules.items())
    return Quantisation(tuple(rules), Modules(frozenset(mixed_experts)), gguf=True)
