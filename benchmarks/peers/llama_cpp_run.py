"""Prefill and decode of a GGUF model by llama.cpp (llama-cpp-python) on the CPU, flash attention on.

Where only decode is wanted, the KV cache is not computed but filled: a short prompt's saved state is repeated until it
is as long as the context, and loaded. What a step costs depends on how many rows it reads, not on what they hold.
"""

import ctypes
import struct

import llama_cpp
import numpy as np
from common import make_parser, parse, quantization, seconds, show

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
UNKNOWN_STATE = "this llama.cpp saves its state in another format: install llama-cpp-python 0.3.36"
SHORT_TOKENS = 64  # of the prompt whose state is repeated
FIRST_TOKEN, LAST_TOKEN = 100, 40000  # ordinary ones, in any vocabulary worth measuring


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()


def saved_state(model: llama_cpp.Llama) -> bytes:
    """The KV cache's sequence 0, as llama.cpp writes it."""
    state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(model.ctx, 0))()
    written = llama_cpp.llama_state_seq_get_data(model.ctx, state, len(state), 0)
    return bytes(state[:written])


def repeated(state: bytes, tokens: int) -> np.ndarray:
    """The state of `tokens` tokens whose rows are those of a shorter one, over and over.

    The format is that of llama-cpp-python 0.3.36 with flash attention on, which leaves V as it is: magic, sequence,
    streams, cells; of each cell its position, how many sequences it is of, and the sequence; whether V is transposed,
    layers; of each layer's K, then of each layer's V: type, bytes per row (64 bits) and the rows.
    """
    magic, sequence, streams, cells = struct.unpack_from("<IiII", state)
    at = 16 + 12 * cells
    transposed, layers = struct.unpack_from("<II", state, at)
    if (streams, transposed) != (1, 0):
        raise RuntimeError(UNKNOWN_STATE)
    at += 8
    positions = np.stack([np.arange(tokens), np.ones(tokens), np.full(tokens, sequence)], axis=1).astype("<i4")
    header = struct.pack("<IiII", magic, sequence, streams, tokens)
    parts = [np.frombuffer(header, np.uint8), positions.view(np.uint8).ravel()]
    parts.append(np.frombuffer(struct.pack("<II", transposed, layers), np.uint8))
    for _ in range(2 * layers):
        row_bytes = struct.unpack_from("<Q", state, at + 4)[0]
        rows = np.frombuffer(state, np.uint8, cells * row_bytes, at + 12)
        parts += [np.frombuffer(state, np.uint8, 12, at), np.resize(rows, tokens * row_bytes)]
        at += 12 + cells * row_bytes
    if at != len(state):
        raise RuntimeError(UNKNOWN_STATE)
    return np.concatenate(parts)


def fill(model: llama_cpp.Llama, rng: np.random.Generator, tokens: int) -> None:
    """Makes the model's KV cache hold `tokens` tokens without their prefill."""
    model.reset()
    model.eval(random_tokens(rng, min(SHORT_TOKENS, tokens)))
    state = repeated(saved_state(model), tokens)
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    if llama_cpp.llama_state_seq_set_data(model.ctx, pointer, state.size, 0) == 0:
        raise RuntimeError("llama.cpp refused the filled KV cache")
    model.n_tokens = tokens


def prefill(model: llama_cpp.Llama, tokens: list[int]) -> float:
    """Seconds of one prefill, into an empty cache."""
    model.reset()
    return seconds(lambda: model.eval(tokens))


def decode(model: llama_cpp.Llama, context: int, count: int) -> list[float]:
    """Seconds of each of `count` steps after the context's last token; what they add to the cache is dropped first."""
    model.n_tokens = context  # eval() drops the rows after these
    return [seconds(lambda token=token: model.eval([token])) for token in range(FIRST_TOKEN, FIRST_TOKEN + count)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kv", choices=KV_TYPES, default="f16", help="the KV cache's format")
    arguments = parse(parser)
    rng = np.random.default_rng(0)
    for context in arguments.contexts:
        model = llama_cpp.Llama(
            arguments.model,
            n_ctx=context + arguments.decode_tokens,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            n_batch=512,
            flash_attn=True,
            type_k=KV_TYPES[arguments.kv],
            type_v=KV_TYPES[arguments.kv],
            verbose=False,
        )
        prefill_s, decode_s = [], []
        if arguments.prefill:
            prefill(model, random_tokens(rng, 16))  # warms up
            prefill_s = [prefill(model, random_tokens(rng, context)) for _ in range(arguments.repeats)]
        else:
            fill(model, rng, context)
        if arguments.decode:
            decode(model, context, 2)
            decode_s = [s for _ in range(arguments.repeats) for s in decode(model, context, arguments.decode_tokens)]
        show(
            "llama.cpp",
            llama_cpp.__version__,
            context,
            arguments.threads,
            prefill_s,
            decode_s,
            weights=quantization(arguments.model),
            kv=arguments.kv,
            kv_from="prefill" if arguments.prefill else "filled",
        )
        model.close()


if __name__ == "__main__":
    main()
