"""GGUF files of small Hugging Face checkpoints, written as llama.cpp's converter writes them."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from oracle import NEW_TOKENS, PROMPT_LENGTHS, VOCAB, Oracle, greedy

Q = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}


class _Interleaved:
    """Rows of heads for interleaved rotation, of tensors with `size` rows in a head."""

    def __init__(self, size):
        self.size = size

    def stored(self, rows):
        return self._swapped(rows, (2, self.size // 2))

    def read(self, rows):
        return self._swapped(rows, (self.size // 2, 2))

    def _swapped(self, rows, dims):
        return rows.reshape(-1, *dims, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class GgufWriter:
    """Writes a GGUF file, and the numbers that its blocks have as a Hugging Face checkpoint.

    kind: the type of weights whose rows are whole blocks. It may be a function of the tensor's name in GGUF.
    split_latents: whether the up-projection of latents is two tensors, as in new files.
    """

    def __init__(self, path, folder, kind=Q.F32, *, split_latents=True, seed=0):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.tensors = {
            name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.arch = ARCHITECTURES[self.config["model_type"]]
        self.writer = gguf.GGUFWriter(path, self.arch)
        self.path, self.folder = Path(path), Path(folder)
        self.kind, self.split_latents = kind, split_latents
        self.random = np.random.default_rng(seed)
        self.read_back = {}
        layers = self.config["num_hidden_layers"]
        self.names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.arch.upper()], layers)

    def write(self, **overrides):
        """Write the file with these metadata in place of its own. None leaves a key out."""
        entries = self.metadata() | {f"{self.arch}.{key}": value for key, value in overrides.items()}
        for key, value in entries.items():
            if value is not None:
                kind = {bool: self.writer.add_bool, int: self.writer.add_uint32, float: self.writer.add_float32}
                kind.get(type(value), self.writer.add_string)(key, value)
        self._write_tokenizer()
        self._write_tensors()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def save_numbers(self, folder):
        """Save the checkpoint that has the file's numbers, and return its folder."""
        folder.mkdir()
        shutil.copy(self.folder / "config.json", folder)
        numbers = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.read_back.items()}
        save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def metadata(self):
        config, arch = self.config, self.arch
        rope = config["rope_parameters"]
        found = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config.get("num_key_value_heads"),
            "attention.key_length": config.get("head_dim"),
            "attention.value_length": config.get("head_dim"),
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "rope.freq_base": float(rope["rope_theta"]),
            "vocab_size": VOCAB,
        }
        if config["model_type"] in ("mistral", "mixtral"):
            found["attention.sliding_window"] = config["sliding_window"]
        if config["model_type"] in ("mistral", "mixtral", "llama"):
            found["rope.dimension_count"] = config["head_dim"]
        if rope["rope_type"] == "yarn":
            found |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            }
        experts = next(
            (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config), None
        )
        if experts is not None:
            found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
            found |= {"expert_feed_forward_length": config.get("moe_intermediate_size")}
            found |= {"expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size")}
        if arch == "deepseek2":
            found |= self._latent_metadata(rope)
        return {f"{arch}.{key}": value for key, value in found.items()}

    def _latent_metadata(self, rope):
        config = self.config
        of_head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
        of_latent = config["kv_lora_rank"] + config["qk_rope_head_dim"], config["kv_lora_rank"]
        is_sigmoid = config["model_type"] == "deepseek_v3"
        key, value = of_latent if self.split_latents else of_head
        return {
            "attention.head_count_kv": 1 if self.split_latents else config["num_attention_heads"],
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": key,
            "attention.value_length": value,
            "attention.key_length_mla": of_head[0] if self.split_latents else None,
            "attention.value_length_mla": of_head[1] if self.split_latents else None,
            "rope.dimension_count": config["qk_rope_head_dim"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": True if is_sigmoid and config["norm_topk_prob"] else None,
            "expert_gating_func": 2 if is_sigmoid else 1,
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
        }

    def _write_tokenizer(self):
        """Write a vocabulary of single bytes and a pair. None of its tokens ends an answer."""
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1], "ab"]
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(tokens)
        self.writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
        self.writer.add_token_merges(["a b"])

    def _write_tensors(self):
        experts = {}
        for name, array in self.tensors.items():
            if ".experts." in name:
                prefix, _, rest = name.partition(".experts.")
                number, projection = rest.split(".", 1)
                experts.setdefault((prefix, projection), {})[int(number)] = (name, array)
            elif name.endswith("kv_b_proj.weight") and self.split_latents:
                self._write_latents(name, array)
            elif name != "lm_head.weight" or not self.config.get("tie_word_embeddings"):
                self._write_one(name, array)
        for (prefix, projection), of_layer in experts.items():
            found = [of_layer[number] for number in range(len(of_layer))]
            stored = self._gguf_name(f"{prefix}.experts.{projection}")
            numbers = self._add(stored, np.stack([array for _, array in found]))
            self.read_back |= {name: numbers[number] for number, (name, _) in enumerate(found)}

    def _write_one(self, name, array):
        module = name.split(".")[-2]
        if self.arch == "llama" and module in ("q_proj", "k_proj"):
            order = _Interleaved(self.config["head_dim"])
            self.read_back[name] = order.read(self._add(self._gguf_name(name), order.stored(array)))
        else:
            self.read_back[name] = self._add(self._gguf_name(name), array.squeeze()).reshape(array.shape)

    def _write_latents(self, name, array):
        config = self.config
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        layer = name.split(".")[2]
        keys = self._add(f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)).swapaxes(1, 2)
        values = self._add(f"blk.{layer}.attn_v_b.weight", values)
        self.read_back[name] = np.concatenate([keys, values], axis=1).reshape(array.shape)

    def _gguf_name(self, name):
        if name.endswith("e_score_correction_bias"):  # the converter renames it first
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    def _add(self, name, array):
        """Add a tensor, and return its numbers."""
        kind = self.kind(name) if callable(self.kind) else self.kind
        array = np.ascontiguousarray(array, np.float32)
        is_weight = array.ndim > 1 and "norm" not in name and "ffn_gate_inp" not in name
        if not is_weight or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Q.F32
        blocks = self._blocks(array, kind)
        self.writer.add_tensor(name, blocks, raw_dtype=kind)
        return gguf.quants.dequantize(blocks, kind).reshape(array.shape)

    def _blocks(self, array, kind):
        if kind.name not in ("Q4_K", "Q6_K"):
            return gguf.quants.quantize(array, kind)
        # The package cannot make these blocks of numbers. Random ones with sound scales are numbers as well.
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.random.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block, block_bytes), np.uint8)
        scales = {"Q4_K": ([0, 2], [1e-3, 7e-3]), "Q6_K": ([-2], [2e-4])}[kind.name]
        for at, scale in zip(*scales, strict=True):
            at %= block_bytes
            blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        return blocks.reshape(*array.shape[:-1], -1)


def make_gguf_oracle(
    path,
    folder,
    kind=Q.F32,
    seed=0,
    split_latents=True,
    prompt_lengths=PROMPT_LENGTHS,
    prepare=lambda model: None,
    **overrides,
):
    """Write a saved model as a GGUF file. Returns what transformers says about the file's numbers.

    prepare: changes the model of transformers first.
    """
    writer = GgufWriter(path, folder, kind, split_latents=split_latents)
    writer.write(**overrides)
    numbers = writer.save_numbers(Path(f"{path}.numbers"))
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(numbers, dtype=torch.float32, **forms).eval()
    prepare(model)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in prompt_lengths]
    tokens, logits = zip(*(greedy(model, prompt, NEW_TOKENS) for prompt in prompts), strict=True)
    return Oracle(Path(path), prompts, list(tokens), list(logits))


def split_gguf(path, num_parts):
    """Split a GGUF file into parts as llama-gguf-split does, and return their paths."""
    reader = gguf.GGUFReader(path)
    per_part = -(-len(reader.tensors) // num_parts)
    paths = [path.with_name(f"{path.stem}-{part + 1:05}-of-{num_parts:05}.gguf") for part in range(num_parts)]
    for part, target in enumerate(paths):
        writer = gguf.GGUFWriter(target, "")
        writer.kv_data[0].clear()
        for field in reader.fields.values() if part == 0 else ():
            if not field.name.startswith("GGUF."):
                main, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), main, sub)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[part * per_part : (part + 1) * per_part]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
