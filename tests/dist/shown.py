"""Tiny random vision-language models, prompts that show images, and what transformers says about them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen3VLConfig, Qwen3VLMoeConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.vision.patches import Patcher
from longhelix.engine.vision.tower import Tower
from longhelix.scheduler.request import ImageSpan
from longhelix.spec import read_hf_config
from oracle import VOCAB, greedy_of

IMAGE, START, END = 190, 192, 193
NEW_TOKENS = 12
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 90,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 3, 1],  # of columns so few that theirs end before the last pair
        "mrope_interleaved": True,
    },
}
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 90,
    "num_position_embeddings": 16,
    "initializer_range": 0.25,
    "deepstack_visual_indexes": [0, 2],
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 191,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
VISION_LANGUAGE: dict[str, PreTrainedConfig] = {
    "qwen3_vl": Qwen3VLConfig(text_config=_DECODER, vision_config=_TOWER, tie_word_embeddings=True, **_TOKENS),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config=_DECODER | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 23},
        vision_config=_TOWER,
        **_TOKENS,
    ),
}
# Of sizes that native kernels pack and tapes record.
PACKED = Qwen3VLConfig(
    text_config=_DECODER | {"hidden_size": 96, "intermediate_size": 96},
    vision_config=_TOWER | {"out_hidden_size": 96},
    **_TOKENS,
)
PACKED_EXPERTS = Qwen3VLMoeConfig(
    text_config=_DECODER
    | {"hidden_size": 96, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 192},
    vision_config=_TOWER | {"out_hidden_size": 96},
    **_TOKENS,
)
# Columns and rows of the images' tokens, of 8 x 8 pixels; each prompt is text (how many tokens) and images (which).
GRIDS = ((5, 3), (2, 4), (1, 1))
PROMPTS = ((3, "a", 5), (18,), (1, "b", 2, "a", "c", 4), ("a", 1), (2, "b"))


def draw(columns, rows, seed):
    """An image of so many tokens."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8 * rows, 8 * columns, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


@dataclass(frozen=True)
class ShownOracle:
    """A saved model, images with their states by digest (float32), and prompts that show some: with an image's token
    once for each image (`given`) and for each of its tokens. tokens, logits: transformers' greedy ones, the latter at
    every position."""

    path: Path
    images: dict[str, PIL.Image.Image]
    states: dict[bytes, np.ndarray]
    shown: list[list[str]]
    given: list[list[int]]
    prompts: list[list[int]]
    spans: list[list[ImageSpan]]
    tokens: list[list[int]]
    logits: list[np.ndarray]


def save_model(config, folder, seed=0):
    """The model, with norms and biases that are seen where they are missing, and how its images are scaled."""
    torch.manual_seed(seed)
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, **forms).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.2)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor = Qwen2VLImageProcessorPil(patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size)
    processor.save_pretrained(folder)
    return model, processor


def make_shown_oracle(config, folder, seed=0, new_tokens=NEW_TOKENS):
    model, processor = save_model(config, folder, seed)
    images = {name: draw(*grid, seed) for seed, (name, grid) in enumerate(zip("abc", GRIDS, strict=True))}
    checkpoint = open_checkpoint(str(folder))
    patcher, spec = Patcher(Path(folder)), read_hf_config(checkpoint.config)
    tower = Tower(checkpoint, spec, "float32", 2**20)
    patches = {name: patcher.patches(image) for name, image in images.items()}
    states = {
        one.digest: np.frombuffer(tower.states(one), np.float32).reshape(3, one.num_tokens, -1)
        for one in patches.values()
    }
    chance, found = np.random.default_rng(seed), []
    for parts in PROMPTS:
        given, prompt, spans = [], [], []
        for part in parts:
            if isinstance(part, int):
                text = chance.integers(0, IMAGE, part).tolist()
                given, prompt = given + text, prompt + text
                continue
            one = patches[part]
            spans.append(ImageSpan(len(prompt) + 1, one.rows, one.columns, one.digest))
            given += [START, IMAGE, END]
            prompt += [START, *[IMAGE] * one.num_tokens, END]
        shown = [part for part in parts if isinstance(part, str)]
        logits = _with_images(model, processor, [images[name] for name in shown])
        found.append((shown, given, prompt, spans, *greedy_of(logits, prompt, new_tokens)))
    return ShownOracle(Path(folder), images, states, *map(list, zip(*found, strict=True)))


def _with_images(model, processor, images):
    """logits_SV of a whole prompt, by a forward pass without cache."""
    found = processor(images=images, return_tensors="pt") if images else {}

    def logits(ids):
        ids_1S = torch.tensor([ids])
        kinds_1S = (ids_1S == IMAGE).int()
        return model(ids_1S, mm_token_type_ids=kinds_1S, use_cache=False, **found).logits[0]

    return logits
