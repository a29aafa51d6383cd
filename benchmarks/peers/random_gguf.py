"""GGUF files of random weights, in the sizes of published models, quantised by llama.cpp itself.

Speed does not depend on the values of weights, and published files are not at hand everywhere. The tokenizer is the
built-in model's, with unused tokens behind its own if the vocabulary is larger. Runs in longhelix's environment, with
llama-cpp-python's folder on its path:

    .venv/bin/python benchmarks/peers/random_gguf.py FOLDER --llama-cpp build/peers/llama-cpp/lib/python*/site-packages
"""

import argparse
import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from longhelix.compute.models.model_files import open_checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with tied embeddings.

    Attributes:
        hidden, ffn: Widths of the hidden state and of the FFN.
        vocabulary: Number of tokens.
        heads, kv_heads, head_size: Of attention.
        qkv_biases: Projections of queries, keys and values have biases.
    """

    architecture: str
    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    qkv_biases: bool = False


SHAPES = {
    # meta-llama/Llama-3.2-1B, with a smaller vocabulary: 1.07 billion parameters
    "llama-1b": Shape("llama", 16, 2048, 8192, 49152, 32, 8, 64),
    # Qwen/Qwen2.5-1.5B: 1.54 billion parameters
    "qwen2-1.5b": Shape("qwen2", 28, 1536, 8960, 151936, 12, 2, 128, qkv_biases=True),
}
QUANTISATIONS = ("Q4_K_M", "Q6_K", "Q8_0")


def write(path: Path, shape: Shape) -> None:
    """Write a file of BF16 weights."""
    writer, rng = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(0)
    writer.add_block_count(shape.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    add_tokenizer(writer, shape.vocabulary)

    def vector(name: str, size: int, mean: float) -> None:
        writer.add_tensor(name, np.full(size, mean, np.float32))

    def matrix(name: str, outputs: int, inputs: int) -> None:
        numbers = rng.standard_normal(outputs * inputs, np.float32) * np.float32(inputs**-0.5)
        halves = (numbers.view(np.uint32) >> 16).astype(np.uint16).reshape(outputs, inputs)
        writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrix("token_embd.weight", shape.vocabulary, shape.hidden)
    vector("output_norm.weight", shape.hidden, 1)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"{block}{norm}.weight", shape.hidden, 1)
        for name, outputs in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            matrix(f"{block}{name}.weight", outputs, shape.hidden)
            if shape.qkv_biases:
                vector(f"{block}{name}.bias", outputs, 0)
        matrix(f"{block}attn_output.weight", shape.hidden, queries)
        matrix(f"{block}ffn_gate.weight", shape.ffn, shape.hidden)
        matrix(f"{block}ffn_up.weight", shape.ffn, shape.hidden)
        matrix(f"{block}ffn_down.weight", shape.hidden, shape.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Write the built-in model's tokenizer, with unused tokens up to the size of the vocabulary."""
    metadata = open_checkpoint("builtin").metadata
    of_tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokens = list(of_tokenizer.pop("tokenizer.ggml.tokens"))
    types = list(of_tokenizer.pop("tokenizer.ggml.token_type"))
    unused = vocabulary - len(tokens)
    writer.add_token_list(tokens + [f"<|unused {index}|>" for index in range(unused)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges(list(of_tokenizer.pop("tokenizer.ggml.merges")))
    for key, value in of_tokenizer.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)


def quantise(source: Path, target: Path, name: str, threads: int) -> None:
    """Write a file in another quantisation with llama.cpp."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread = threads
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp cannot quantise {source} to {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("--llama-cpp", required=True, help="site-packages with llama-cpp-python")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--quantisations", nargs="+", default=list(QUANTISATIONS))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sys.path.append(arguments.llama_cpp)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.shapes:
        plain = arguments.folder / f"{name}.BF16.gguf"
        write(plain, SHAPES[name])
        for quantisation in arguments.quantisations:
            quantise(plain, arguments.folder / f"{name}.{quantisation}.gguf", quantisation, arguments.threads)
        plain.unlink()


if __name__ == "__main__":
    main()
