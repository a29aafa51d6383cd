"""The quantisation settings of each method: which modules it quantises, and how they are stored."""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.formats import FORMATS
from longhelix.spec.quantised_modules import Modules, Quantisation, Rule, Storage, canonical_module
from longhelix.values import flag, items, refused, shown

Settings = Mapping[str, Any]

_READ = (
    "fp8 (per tensor, or in blocks of 128 x 128), compressed-tensors (FP8, INT8 per channel, INT4 in groups of 32, 64 "
    "or 128, NVFP4, MXFP4, MXFP8), modelopt (FP8, NVFP4, MXFP8), awq and gptq (4 bits in groups of 32, 64 or 128), and "
    "mxfp4"
)
_MOST_NAMES = 1_000_000
_BLOCK = [128, 128]
_HEAD = Modules(names=frozenset({"lm_head"}))


def unread(what: str) -> UserError:
    """Return the error for settings that longhelix does not read. what: a noun with the value that is not read."""
    return UserError(
        f"the checkpoint is quantised with {what}, which longhelix does not read: use a checkpoint of {_READ}, or one "
        "that is not quantised",
        "invalid_model",
    )


def _fp8(settings: Settings, float16: bool) -> Quantisation:
    """FP8 of transformers and vLLM. Linear modules alone, so that the head stays as it is."""
    _one_of(settings, "fmt", "e4m3", "float8_e4m3fn")
    _one_of(settings, "activation_scheme", "dynamic", "static")
    _one_of(settings, "scale_fmt", "float", "ue8m0")
    _one_of(settings, "expert_dtype", "fp8")
    if _names(settings, "modules_to_convert"):
        raise unread(f"fp8 and modules_to_convert {shown(settings['modules_to_convert'])}")
    block = settings.get("weight_block_size")
    if block is None:
        # transformers writes null for scales of tensors, and calls them what it calls the scales of blocks.
        scheme = "fp8_inverse" if "weight_block_size" in settings else "fp8"
        storage = Storage(scheme, "fp8-channel")
    elif _block(block):
        storage = Storage("fp8_block", "fp8-block")
    else:
        raise unread(f"fp8 and weight_block_size {shown(block)}")
    names = (*_names(settings, "modules_to_not_convert"), *_names(settings, "ignored_layers"), "lm_head")
    return Quantisation((Rule(storage),), _as_transformers(names))


def _mxfp4(settings: Settings, float16: bool) -> Quantisation:
    """MXFP4 of gpt-oss: the experts alone."""
    experts = Modules(patterns=(r".*\.mlp\.experts\.",))
    plain = _as_transformers(_names(settings, "modules_to_not_convert"))
    return Quantisation((Rule(Storage("gpt_oss", "mxfp4"), experts),), plain)


def _awq(settings: Settings, float16: bool) -> Quantisation:
    version = settings.get("version", settings.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise unread(f"awq and version {shown(version)}")
    size = settings.get("group_size", settings.get("q_group_size", 128))
    bits = settings.get("bits", settings.get("w_bit", 4))
    # AutoAWQ writes scales in float16, whatever the model's dtype is.
    storage = Storage(
        "awq", _grouped("awq", bits, size, float16=True, symmetric=not _flag(settings, "zero_point", True))
    )
    names = _names(settings, "modules_to_not_convert")
    plain = Modules(names=frozenset({"lm_head"}), patterns=tuple(f".*{re.escape(name)}" for name in names))
    return Quantisation((Rule(storage),), plain)


def _gptq(settings: Settings, float16: bool) -> Quantisation:
    form = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if not isinstance(form, str) or form not in ("gptq", "gptq_v2"):
        raise unread(f"gptq and checkpoint_format {shown(form)}")
    if _flag(settings, "is_marlin_format", False):
        raise unread("gptq and is_marlin_format True")
    symmetric = _flag(settings, "sym", True)
    # AutoGPTQ writes scales in float16, whatever the model's dtype is.
    number_format = _grouped(
        "gptq", settings.get("bits", 4), settings.get("group_size", 128), float16=True, symmetric=symmetric
    )
    storage = Storage(form, number_format, ordered=_flag(settings, "desc_act", False))
    plain = _as_transformers(_names(settings, "modules_to_not_convert"))
    if not _flag(settings, "lm_head", False):
        plain = _both(plain, _HEAD)
    inside = settings.get("modules_in_block_to_quantize")
    targets = None if inside is None else Modules(endings=tuple(f".{name}" for name in _flat(inside)))
    return Quantisation((Rule(storage, targets),), _both(plain, _exceptions(settings)))


def _exceptions(settings: Settings) -> Modules:
    """Return the modules that `dynamic` of GPTQModel leaves plain. It may not store others in other formats."""
    dynamic = settings.get("dynamic")
    if dynamic is None:
        return Modules()
    if not isinstance(dynamic, Mapping):
        raise _malformed("dynamic", dynamic, "settings by pattern, or null")
    patterns = []
    for pattern, changed in dynamic.items():
        if not isinstance(pattern, str) or not pattern.startswith("-:"):
            raise unread(f"gptq and dynamic settings {shown(changed)} for {shown(pattern)}")
        patterns.append(_pattern(pattern.removeprefix("-:")))
    return Modules(patterns=tuple(patterns))


def _modelopt(settings: Settings, float16: bool) -> Quantisation:
    """NVIDIA's Model Optimizer: config.json, or hf_quant_config.json with the settings one level deeper."""
    inner = settings.get("quantization")
    if isinstance(inner, Mapping):
        settings = inner
    plain = _wildcards((*_names(settings, "exclude_modules"), *_names(settings, "ignore")))
    _check_scheme(settings, "kv_cache_scheme")
    algorithm = settings.get("quant_algo")
    if algorithm != "MIXED_PRECISION" if isinstance(algorithm, str) else True:
        return Quantisation((Rule(_algorithm(settings)),), plain)
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise _malformed("quantized_layers", layers, "settings by module")
    modules: dict[Storage, set[str]] = {}
    for name, layer in layers.items():
        if not isinstance(name, str) or not isinstance(layer, Mapping):
            raise _malformed(f"quantized_layers of {shown(name)}", layer, "settings by name")
        modules.setdefault(_algorithm(layer), set()).add(canonical_module(name))
    rules = (Rule(storage, Modules(names=frozenset(names))) for storage, names in modules.items())
    return Quantisation(tuple(rules), plain)


_ALGORITHMS = {
    "FP8": Storage("fp8", "fp8-channel"),
    "FP8_PER_CHANNEL_PER_TOKEN": Storage("fp8", "fp8-channel"),
    "FP8_PB_WO": Storage("float_quantized_block", "fp8-block"),
    "NVFP4": Storage("modelopt_nvfp4", "nvfp4"),
    "W4A16_NVFP4": Storage("modelopt_nvfp4", "nvfp4"),
    "MXFP8": Storage("mxfp8_quantized", "mxfp8"),
}


def _algorithm(settings: Settings) -> Storage:
    algorithm, size = settings.get("quant_algo"), settings.get("group_size")
    storage = _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if storage is None:
        raise unread(f"modelopt and quant_algo {shown(algorithm)}")
    numbers = FORMATS[storage.format].weight_scales.numbers
    if storage.format in ("nvfp4", "mxfp8") and size is not None and not _equals(size, numbers):
        raise unread(f"modelopt, {algorithm} and group_size {shown(size)}")
    return storage


def _compressed_tensors(settings: Settings, float16: bool) -> Quantisation:
    sparsity, transforms = settings.get("sparsity_config"), settings.get("transform_config")
    if not isinstance(sparsity, Mapping | None) or (sparsity and not _equals(sparsity.get("format"), "dense")):
        raise unread(f"compressed-tensors and sparsity_config {shown(sparsity)}")
    if not isinstance(transforms, Mapping | None) or transforms:
        raise unread(f"compressed-tensors and transform_config {shown(transforms)}")
    _check_scheme(settings, "kv_cache_scheme")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        raise _malformed("config_groups", groups, "settings by group")
    rules = [rule for group in groups.values() for rule in _group_rules(group, settings.get("format"), float16)]
    if not rules:
        raise unread("compressed-tensors and config_groups without weights")
    # Names come before patterns, and those before classes.
    rules.sort(key=lambda rule: 2 if rule.modules is None else 1 if rule.modules.patterns else 0)
    return Quantisation(tuple(rules), _targets(_names(settings, "ignore")))


def _group_rules(group: object, form: object, float16: bool) -> list[Rule]:
    """Return the rules of one group. form: the format of groups that have none of their own."""
    if not isinstance(group, Mapping):
        raise _malformed("a group of config_groups", group, "settings by name")
    for name in ("input_activations", "output_activations"):
        _check_scheme(group, name)
    weights = group.get("weights")
    if weights is None:
        return []
    if not isinstance(weights, Mapping):
        raise _malformed("weights of a group", weights, "settings by name, or null")
    own = group.get("format")
    storage = _group_storage(weights, form if own is None else own, float16)
    names = _names(group, "targets")
    classes = [name for name in names if name[:1].isupper() and "." not in name]
    for name in classes:
        if name != "Linear":
            raise unread(f"compressed-tensors and the target {shown(name)}")
    targets = _targets([name for name in names if name not in classes])
    rules = [
        Rule(storage, each)
        for each in (Modules(names=targets.names), Modules(patterns=targets.patterns))
        if each.names or each.patterns
    ]
    return [*rules, Rule(storage)] if classes else rules


def _group_storage(weights: Settings, form: object, float16: bool) -> Storage:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    symmetric = _flag(weights, "symmetric", True)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if _equals(size, -1) else "group"
    whole_outputs, grouped = _word(strategy) in ("tensor", "channel"), _word(strategy) in ("group", "tensor_group")
    blocks = _word(strategy) == "block" and _block(weights.get("block_structure"))
    order, dynamic = weights.get("actorder"), weights.get("dynamic")
    ordered = order is True or _word(order) in ("group", "dynamic")
    unordered = order is None or order is False or _word(order) in ("weight", "static")
    if not (unordered or (ordered and _word(form) == "pack-quantized" and grouped)):
        raise unread(f"compressed-tensors and actorder {shown(order)}")
    if dynamic is not None and dynamic is not False:
        raise unread(f"compressed-tensors and dynamic weights {shown(dynamic)}")
    match _word(form), _word(kind), bits if type(bits) is int else 0:
        case "float-quantized" | "naive-quantized", "float", 8 if symmetric and whole_outputs:
            return Storage("fp8", "fp8-channel")
        case "float-quantized" | "naive-quantized", "float", 8 if symmetric and blocks:
            return Storage("float_quantized_block", "fp8-block")
        case "int-quantized" | "naive-quantized", "int", 8 if symmetric and whole_outputs:
            return Storage("int_quantized", "int8-channel")
        case "pack-quantized", "int", 8 if symmetric and whole_outputs:
            return Storage("pack_quantized", "int8-channel")
        case "pack-quantized", "int", 4 if grouped:
            return Storage("pack_quantized", _grouped("compressed-tensors", bits, size, float16, symmetric), ordered)
        case "nvfp4-pack-quantized", "float", 4 if symmetric and grouped and _equals(size, 16):
            return Storage("nvfp4_pack_quantized", "nvfp4")
        case "mxfp4-pack-quantized", "float", 4 if symmetric and grouped and _equals(size, 32):
            return Storage("mxfp4_pack_quantized", "mxfp4")
        case "mxfp8-quantized", "float", 8 if symmetric and grouped and _equals(size, 32):
            return Storage("mxfp8_quantized", "mxfp8")
    sizes = "".join(
        f", {key} {shown(weights[key])}" for key in ("group_size", "block_structure") if weights.get(key) is not None
    )
    raise unread(
        f"compressed-tensors, format {shown(form)} and {'' if symmetric else 'asymmetric '}weights of type "
        f"{shown(kind)}, {shown(bits)} bits, strategy {shown(strategy)}{sizes}"
    )


def _grouped(method: str, bits: object, size: object, float16: bool, symmetric: bool) -> str:
    """Return the format of integers in groups."""
    if not _equals(bits, 4):
        raise unread(f"{method} and {shown(bits)} bits")
    if not any(_equals(size, known) for known in (32, 64, 128)):
        raise unread(f"{method} and group_size {shown(size)}")
    return f"int4-g{size}" + ("-float16" if float16 else "") + ("" if symmetric else "-zero")


def _as_transformers(names: Sequence[str]) -> Modules:
    """Return the modules that lists of transformers name: beginnings or ends of names, or patterns of beginnings."""
    literal = [name for name in names if re.fullmatch(r"[\w.]*", name)]
    patterns = (_pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names if name not in literal)
    return Modules(frozenset(map(canonical_module, literal)), tuple(name for name in literal if name), tuple(patterns))


def _wildcards(names: Sequence[str]) -> Modules:
    """Return the modules that lists of modelopt name: names, or wildcards of whole names."""
    literal = [name for name in names if not re.search(r"[*?\[]", name)]
    patterns = (_pattern(translate(name)) for name in names if name not in literal)
    return Modules(frozenset(map(canonical_module, literal)), patterns=tuple(patterns))


def _targets(names: Sequence[str]) -> Modules:
    """Return the modules that lists of compressed-tensors name: names, or patterns after "re:"."""
    literal = [name for name in names if not name.startswith("re:")]
    patterns = (_pattern(name.removeprefix("re:")) for name in names if name.startswith("re:"))
    return Modules(frozenset(map(canonical_module, literal)), patterns=tuple(patterns))


def _both(some: Modules, others: Modules) -> Modules:
    return Modules(some.names | others.names, some.endings + others.endings, some.patterns + others.patterns)


def _pattern(text: str) -> str:
    """Return a regular expression. Raises UserError if it is none."""
    try:
        re.compile(text, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"the quantisation settings of the model have the pattern {shown(text)}, which is no regular expression "
            f"({error}): correct it in the model's config",
            "invalid_model",
        ) from error
    return text


def _names(settings: Settings, key: str) -> tuple[str, ...]:
    """Return a list of names. Empty if there is none."""
    given = settings.get(key)
    return () if given is None else _strings(key, given)


def _strings(key: str, given: object) -> tuple[str, ...]:
    name = f"{key} in the model's quantisation settings"
    names = items(name, given, _MOST_NAMES, "names", "invalid_model")
    strings = tuple(each for each in names if isinstance(each, str))
    if len(strings) < len(names):
        raise _malformed(key, given, "a list of names")
    return strings


def _flat(given: object) -> tuple[str, ...]:
    """Return the names of a list of names, or of a list of such lists."""
    key = "modules_in_block_to_quantize"
    groups = items(f"{key} in the model's quantisation settings", given, _MOST_NAMES, "names", "invalid_model")
    return tuple(name for group in groups for name in ((group,) if isinstance(group, str) else _strings(key, group)))


def _check_scheme(settings: Settings, key: str) -> None:
    """Check how activations, or keys and values, are quantised. It does not change how weights are stored."""
    scheme = settings.get(key)
    if scheme is None:
        return
    known = isinstance(scheme, Mapping) and isinstance(kind := scheme.get("type", "int"), str)
    if not known or kind not in ("int", "float") or type(scheme.get("num_bits", 8)) is not int:
        raise _malformed(key, scheme, "settings with type and num_bits, or null")


def _one_of(settings: Settings, key: str, *known: str) -> None:
    """Raise UserError if a setting is given, and none of these."""
    value = settings.get(key)
    if value is not None and not (isinstance(value, str) and value in known):
        raise unread(f"fp8 and {key} {shown(value)}")


def _flag(settings: Settings, key: str, default: bool) -> bool:
    value = settings.get(key)
    return default if value is None else flag(f"{key} in the model's quantisation settings", value, "invalid_model")


def _block(value: object) -> bool:
    """Return whether these are the rows and columns of a block of 128 x 128."""
    return isinstance(value, (list, tuple)) and all(type(each) is int for each in value) and list(value) == _BLOCK


def _word(value: object) -> str:
    """Return a string, or "" for anything else."""
    return value if isinstance(value, str) else ""


def _equals(value: object, wanted: object) -> bool:
    return type(value) is type(wanted) and value == wanted


def _malformed(key: str, value: object, allowed: str) -> UserError:
    return refused(f"{key} in the model's quantisation settings", value, allowed, "invalid_model")


METHODS: Mapping[str, Callable[[Settings, bool], Quantisation]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}
