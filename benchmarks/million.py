"""A prompt of a million tokens over HTTP: how long its body, its prefill and its tokens take, and what its stream says
meanwhile. The weights are random, in one layer with one head of 64 or, with --layers, in so many of Llama 3.2 1B's.

python benchmarks/million.py [--tokens 1000000] [--new-tokens 8] [--kvp 2] [--layers 8]
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from longhelix.measure.bench.environment import environment

VOCAB = 256
JSON = {"content-type": "application/json"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--kvp", type=int, default=2)
    parser.add_argument("--layers", type=int, help="so many of Llama 3.2 1B's, in place of one with one head")
    given = parser.parse_args()
    print(environment(time.strftime("%Y-%m-%d")))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.tokens + given.new_tokens, given.layers)
        command = [sys.executable, "-m", "longhelix", "serve", "--model", folder, "--port", "0"]
        command += ["--kvp", str(given.kvp), "--served-model-name", "toy"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line)))
                ask(url, given.tokens, given.new_tokens)
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(120)
    return 0


ONE_HEAD = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


def make_model(folder: Path, positions: int, layers: int | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        head_dim=64,
        num_hidden_layers=layers or 1,
        vocab_size=VOCAB,
        max_position_embeddings=positions,
        **(LLAMA_1B if layers else ONE_HEAD),
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{token_id}": token_id for token_id in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def ask(url: str, tokens: int, new_tokens: int) -> None:
    chance = random.Random(0)
    prompt = chance.choices(range(VOCAB), k=tokens)
    body = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_progress": True, "include_usage": True}, "return_token_ids": True}
    content = json.dumps(body).encode()
    begun_s, reports, comments, first_s, token_ids = time.monotonic(), 0, 0, 0.0, []
    timeout = httpx.Timeout(60)  # between two lines: comments come in between
    with httpx.stream("POST", f"{url}/v1/completions", content=content, headers=JSON, timeout=timeout) as got:
        if got.status_code != 200:
            raise SystemExit(got.read().decode())
        headers_s, progress = time.monotonic() - begun_s, False
        for line in got.iter_lines():
            comments += line.startswith(":")
            if line.startswith("event: progress"):
                progress = True
            elif line.startswith("data: {"):
                event = json.loads(line[6:])
                if progress:
                    reports, progress = reports + 1, False
                    if reports % 20 == 1:
                        print(f"{time.monotonic() - begun_s:8.1f} s  {event['prefilled_tokens']:>9} tokens", flush=True)
                elif event["choices"]:
                    first_s = first_s or time.monotonic() - begun_s
                    token_ids += event["choices"][0]["token_ids"]
                else:
                    usage = event["usage"]
    took_s = time.monotonic() - begun_s
    print(
        f"{len(content) / 1e6:.1f} MB of body, taken after {headers_s:.1f} s; {usage['prompt_tokens']} prompt tokens, "
        f"first token after {first_s:.1f} s ({tokens / first_s:.0f} tokens/s), {reports} events of progress, "
        f"{comments} comments; {len(token_ids)} tokens by {took_s:.1f} s: {token_ids}"
    )


if __name__ == "__main__":
    sys.exit(main())
