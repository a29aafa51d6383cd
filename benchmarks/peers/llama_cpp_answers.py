"""Greedy tokens of longhelix against llama.cpp's: random models of every architecture, quantised by llama.cpp itself.

longhelix answers prompts, as its users' requests, and says the log-probabilities of the best tokens of each step. Then
llama.cpp computes the log-probabilities of the same steps, after the same tokens. It rounds activations to 8 bits, so
the two differ by some amount, which is measured: the median over all steps of a file, of the largest difference among
longhelix's best tokens. A step counts if the two best tokens differ by more than twice that. There, the best token of
both should be the same. It need not be where a router chooses another expert: that step differs much more than others,
and later ones of the answer may. With --all-experts, routers have no choice. With --expanded, llama.cpp expands the
weights of its file to F32 first. It then rounds no activations, and all steps should be the same.
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "dist")]

from test_gguf import CONFIGS, of_blocks  # noqa: E402 - the models of tests

from gguf_files import GgufWriter  # noqa: E402
from longhelix import LLM, Layout, SamplingParams  # noqa: E402
from oracle import VOCAB, make_oracle  # noqa: E402

QUANTISATIONS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
                 "IQ4_NL", "IQ4_XS", "MXFP4_MOE")  # fmt: skip
COMPARED = 20  # best tokens of a step whose log-probabilities are compared
CONTEXT = 128
FAR = 5  # steps that differ by this many times the median are most likely of other experts


@dataclass(frozen=True)
class Steps:
    """All steps of the answers for one file, of which each is one new token.

    Attributes:
        gaps_S: By how much the log-probabilities of the two best tokens differ.
        differences_S: Largest difference between the engines among the best tokens.
        agrees_S: Whether both have the same best token.
    """

    gaps_S: np.ndarray
    differences_S: np.ndarray
    agrees_S: np.ndarray

    @property
    def difference(self) -> float:
        return float(np.median(self.differences_S))

    def row(self) -> dict[str, float]:
        clear_S = self.gaps_S > 2 * self.difference
        far_S = self.differences_S > FAR * self.difference
        return {
            "steps": len(self.gaps_S),
            "agree": int(self.agrees_S.sum()),
            "difference": float(f"{self.difference:.3g}"),
            "largest difference": float(f"{self.differences_S.max():.3g}"),
            "far": int(far_S.sum()),
            "clear": int(clear_S.sum()),
            "clear that differ": int((clear_S & ~self.agrees_S).sum()),
            "clear that differ, not far": int((clear_S & ~self.agrees_S & ~far_S).sum()),
            "largest gap that differs": float(f"{self.gaps_S[~self.agrees_S].max(initial=0.0):.3g}"),
        }


def quantise(source: Path, target: Path, name: str) -> bool:
    """Write a file in another quantisation with llama.cpp. Returns whether it can."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread = 1
    settings.ftype = (
        llama_cpp.LLAMA_FTYPE_ALL_F32 if name == "F32" else getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    )
    settings.allow_requantize = name == "F32"
    return llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(settings)) == 0


def num_experts(config: PreTrainedConfig) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 0)


def made(family: str, all_experts: bool) -> PreTrainedConfig:
    config = of_blocks(CONFIGS[family])
    config.initializer_range = config.hidden_size**-0.5  # else attention magnifies any difference
    if family == "mistral":
        config.sliding_window = None  # llama.cpp does not read it from files of architecture llama
    if family == "deepseek_v2":
        config.n_group = config.topk_group = 1  # llama.cpp chooses groups as DeepSeek-V3 does: by two experts of each
    if hasattr(config, "q_lora_rank"):  # llama.cpp needs one, unless the model has 26 or 27 layers
        config.q_lora_rank = 256
    if all_experts and num_experts(config):
        config.num_experts_per_tok = num_experts(config)
        if hasattr(config, "n_group"):
            config.n_group = config.topk_group = 1
    return config


def files(
    families: list[str], quantisations: list[str], folder: Path, seed: int, all_experts: bool
) -> Iterator[tuple[str, str, Path]]:
    """Yield the family, the quantisation and the path of each file."""
    for family in families:
        config = made(family, all_experts)
        saved = make_oracle(config, folder / family, seed, prompt_lengths=(1,), new_tokens=1)
        plain = GgufWriter(folder / f"{family}-F32.gguf", saved.path).write()
        for name in quantisations:
            path = folder / f"{family}-{name}.gguf"
            if name == "MXFP4_MOE" and not num_experts(config):
                continue
            if name == "F32" or quantise(plain, path, name):
                yield family, name, path
            else:
                print(json.dumps({"family": family, "quantisation": name, "error": "llama.cpp does not quantise it"}))


def compare(path: Path, peers: Path, prompts: list[list[int]], new_tokens: int, dtype: str, layout: Layout) -> Steps:
    """Answer prompts with longhelix, and compare each step with llama.cpp, which reads the file `peers`."""
    import llama_cpp

    settings = {"dtype": dtype, "device": "cpu", "kv_cache_tokens": 16384}
    with warnings.catch_warnings(action="ignore"), LLM(str(path), layout, **settings) as llm:
        results = llm.generate(prompts, SamplingParams(max_new_tokens=new_tokens, logprobs=COMPARED))
    peer = llama_cpp.Llama(
        str(peers), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    gaps, differences, agrees = [], [], []
    for prompt, result in zip(prompts, results, strict=True):
        peer.reset()
        peer.eval([*prompt, *result.token_ids[:-1]])
        logits_SV = peer.scores[len(prompt) - 1 : peer.n_tokens].astype(np.float64)
        theirs_SV = logits_SV - np.logaddexp.reduce(logits_SV, axis=1, keepdims=True)
        for step, theirs_V in zip(result.logprobs, theirs_SV, strict=True):
            ours = {token: float(value) for token, value in step.items()}
            best, second, *_ = sorted(ours.values(), reverse=True)
            gaps.append(best - second)
            differences.append(max(abs(value - theirs_V[token]) for token, value in ours.items()))
            agrees.append(max(ours, key=ours.get) == int(theirs_V.argmax()))
    peer.close()
    return Steps(*map(np.array, (gaps, differences, agrees)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"[default: {' '.join(CONFIGS)}]")
    parser.add_argument("--quantisations", nargs="+", default=QUANTISATIONS)
    parser.add_argument("--prompts", type=int, default=50, help="prompts for each file, of 1 to 64 tokens")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--dtype", default="float32", help="of longhelix's activations")
    parser.add_argument("--kvp", type=int, default=1)
    parser.add_argument("--tpa", type=int, default=1)
    parser.add_argument("--all-experts", action="store_true", help="routers choose all experts, whatever is rounded")
    parser.add_argument(
        "--expanded", action="store_true", help="llama.cpp reads the same weights as F32, rounds nothing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llama-cpp", help="folder with the llama_cpp package, if this Python has none")
    asked = parser.parse_args()
    if asked.llama_cpp:
        sys.path.append(asked.llama_cpp)  # last, so that all else is longhelix's own
    random = np.random.default_rng(asked.seed)
    prompts = [random.integers(VOCAB, size=random.integers(1, 65)).tolist() for _ in range(asked.prompts)]
    layout = Layout(kvp=asked.kvp, tpa=asked.tpa)
    with tempfile.TemporaryDirectory() as folder:
        families = asked.families or list(CONFIGS)
        for family, name, path in files(families, asked.quantisations, Path(folder), asked.seed, asked.all_experts):
            peers = path.with_suffix(".expanded.gguf") if asked.expanded else path
            if asked.expanded and not quantise(path, peers, "F32"):
                raise RuntimeError(f"llama.cpp does not expand {name}")
            found = compare(path, peers, prompts, asked.new_tokens, asked.dtype, layout)
            print(json.dumps({"family": family, "quantisation": name, "dtype": asked.dtype} | found.row()), flush=True)


if __name__ == "__main__":
    main()
