"""A model folder with random weights, for `longhelix bench layouts --model FOLDER`: Qwen2.5-0.5B's layers, fewer of
them, with four KV heads in place of two so that four ranks can share them.

    python benchmarks/random_model.py build/random-model
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=896,
    intermediate_size=4864,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_hidden_layers=12,
    vocab_size=32000,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: random_model.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
