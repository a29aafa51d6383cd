"""Options of vLLM, SGLang and llama.cpp, and what longhelix has instead."""

import re
from collections.abc import Collection

_ONE_COPY = "longhelix serves one copy of the model: start more servers behind a router"
# Option without its dashes, with - for _, to the advice.
_ADVICE = {
    # vLLM and SGLang
    "tensor-parallel-size": "use --tpa for attention, and --tpf for the FFN (by default all ranks split the FFN)",
    "tp": "use --tpa for attention, and --tpf for the FFN (by default all ranks split the FFN)",
    "tp-size": "use --tpa for attention, and --tpf for the FFN (by default all ranks split the FFN)",
    "pipeline-parallel-size": "use --pp",
    "pp-size": "use --pp",
    "decode-context-parallel-size": "use --kvp",
    "prefill-context-parallel-size": "use --kvp",
    "dcp-size": "use --kvp",
    "cp-size": "use --kvp",
    "enable-expert-parallel": "use --ep N",
    "ep-size": "use --ep",
    "data-parallel-size": f"use --kvp with --placement local; {_ONE_COPY}",
    "dp-size": f"use --kvp with --placement local; {_ONE_COPY}",
    "gpu-memory-utilization": "use --kv-cache-tokens N, or --kv-cache-tokens auto to size it by free memory",
    "mem-fraction-static": "use --kv-cache-tokens N, or --kv-cache-tokens auto to size it by free memory",
    "max-num-seqs": "use --max-running",
    "max-running-requests": "use --max-running",
    "max-num-batched-tokens": "use --chunk-tokens, which counts the prompt tokens of a step",
    "chunked-prefill-size": "use --chunk-tokens",
    "enable-chunked-prefill": "leave it out: prefill is always chunked, see --chunk-tokens",
    "enable-prefix-caching": "leave it out: the prefix cache is on, --no-prefix-cache turns it off",
    "no-enable-prefix-caching": "use --no-prefix-cache",
    "disable-radix-cache": "use --no-prefix-cache",
    "kv-cache-dtype": "use --kv-dtype",
    "kv-events-config": "use --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic",
    "quantization": "leave it out for a quantised checkpoint; --weight-dtype quantises others while loading",
    "block-size": "use --block-tokens",
    "page-size": "use --block-tokens",
    "enforce-eager": "use --execution eager",
    "disable-cuda-graph": "use --execution eager",
    "context-length": "use --max-model-len",
    "model-path": "use --model",
    "tokenizer": "leave it out: the tokenizer comes with the model",
    "trust-remote-code": "leave it out: longhelix never runs code from a model repository",
    "api-key": "use --api-key-file, or set LONGHELIX_API_KEY, so that the key is not in the list of processes",
    "scheduling-policy": "use --policy",
    "schedule-policy": "use --policy",
    "hf-overrides": "use --rope-scaling for RoPE; other fields of config.json are read from the model",
    "swap-space": "use --swap-tokens",
    "cpu-offload-gb": "leave it out: weights stay on their device, and --swap-tokens moves evicted KV to memory",
    "speculative-config": "leave it out: longhelix does not support speculative decoding yet",
    "enable-lora": "leave it out: longhelix does not support LoRA",
    "max-tokens": "use --max-new-tokens",
    "download-dir": "set HF_HOME to the folder of downloads",
    "override-generation-config": "use --generation-config none, and set the values in requests",
    # llama.cpp
    "ngl": "use --device cuda, which puts all layers on GPUs, or --device cpu",
    "n-gpu-layers": "use --device cuda, which puts all layers on GPUs, or --device cpu",
    "gpu-layers": "use --device cuda, which puts all layers on GPUs, or --device cpu",
    "ctx-size": "use --max-model-len",
    "c": "use --max-model-len",
    "n-predict": "use --max-new-tokens",
    "predict": "use --max-new-tokens",
    "n": "use --max-new-tokens",
    "m": "use --model",
    "hf": "give the hub ID as the model: ORG/NAME, or ORG/NAME:Q4_K_M",
    "hf-repo": "give the hub ID as the model: ORG/NAME, or ORG/NAME:Q4_K_M",
    "p": "use --prompt",
    "f": "use --prompt-file",
    "file": "use --prompt-file",
    "threads": "leave it out: ranks divide all cores; taskset limits them",
    "t": "leave it out: ranks divide all cores; taskset limits them",
    "parallel": "use --max-running",
    "np": "use --max-running",
    "batch-size": "use --chunk-tokens",
    "ubatch-size": "use --chunk-tokens",
    "cache-type-k": "use --kv-dtype, which sets keys and values",
    "cache-type-v": "use --kv-dtype, which sets keys and values",
    "flash-attn": "leave it out: attention never stores all scores",
    "fa": "leave it out: attention never stores all scores",
    "temp": "use --temperature",
    "repeat-penalty": "use --repetition-penalty",
    "json-schema-file": "use --json-schema FILE",
    "grammar-file": "use --grammar FILE",
    "jinja": "leave it out: the model's own chat template is always used",
    "alias": "use --served-model-name",
    "lora": "leave it out: longhelix does not support LoRA",
    "model-draft": "leave it out: longhelix does not support speculative decoding yet",
}


def advice(option: str, known: Collection[str]) -> str | None:
    """Return what to use instead of another program's option, such as "--tensor-parallel-size=8".

    Args:
        known: options of the command. None is returned if the advice names others.
    """
    name = option.lstrip("-").partition("=")[0].replace("_", "-")
    found = _ADVICE.get(name)
    return found if found is not None and set(re.findall(r"--[a-z0-9-]+", found)) <= set(known) else None
