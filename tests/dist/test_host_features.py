"""What engines can do, over several hosts, which are network namespaces: the same answers as those of one host."""

import json
import os
import re
import subprocess
from itertools import chain
from pathlib import Path

import httpx
import pytest
from host_cases import SECRET
from host_features_program import answers
from networks import Network, program, ranks
from served import events
from shown import NEW_TOKENS as SHOWN_TOKENS
from shown import VISION_LANGUAGE, make_shown_oracle
from test_guided import GUIDES, is_of, model_of
from test_hosts import say
from test_prompt_logprobs import assert_of

from oracle import FAMILIES, NEW_TOKENS, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

PROGRAM = str(Path(__file__).with_name("host_features_program.py"))
TIMEOUT_S = 240
SETTINGS = {"dtype": "float32", "block_tokens": 4, "max_model_len": 64, "chunk_tokens": 8, "kv_cache_tokens": 1024}
GREEDY = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}


def case(oracle, layout, rounds, settings=None, **more):
    return {
        "model": str(oracle.path),
        "layout": layout,
        "settings": SETTINGS | (settings or {}),
        "rounds": rounds,
    } | more


def greedy(*prompts, **more):
    return [{"prompt": prompt, "sampling": GREEDY} | more for prompt in prompts]


def start(network, node, nnodes, cases, node_rank=None, **more):
    """Start a host's program. Host 0 is where the network says, or has the name `first`."""
    place = {"nnodes": nnodes, "master_addr": more.pop("first", network.address(0))}
    cases = [each | {"settings": each["settings"] | place} for each in cases]
    arguments = [PROGRAM, str(node if node_rank is None else node_rank), json.dumps(cases)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return network.start(node, arguments, env=os.environ | SECRET, **pipes, **more)


def run(network, nnodes, cases, folders=None):
    """Run the cases on all hosts. Returns what host 0 has printed for each. folders: what only host 1 has mounted."""
    started = [start(network, node, nnodes, cases, folders=folders if node == 1 else None) for node in range(nnodes)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0] * nnodes, outputs
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def alone(case):
    """The same case on one rank, as it is printed."""
    return json.loads(json.dumps(answers(case | {"layout": {}})))


def every(found, name):
    """That field of all results."""
    return [result[name] for result in chain(*found["rounds"])]


def features(oracle):
    """Prompts that begin alike, one after the other; drawn tokens; log-probabilities of prompts."""
    document = oracle.prompts[3]
    drawn = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "ignore_eos": True}
    scored = {"max_new_tokens": 4, "prompt_logprobs": 3, "ignore_eos": True}
    rounds = [
        greedy(document),
        greedy([*document[:30], 5, 6, 7]),
        greedy(document),
        [{"prompt": prompt, "sampling": drawn | {"seed": seed}} for seed in (1, 2) for prompt in oracle.prompts],
        [{"prompt": prompt, "sampling": scored} for prompt in oracle.prompts],
    ]
    return case(oracle, {"kvp": 2}, rounds)


def pressed(oracle, **settings):
    """In a pool that holds no two of the longer prompts with their answers."""
    return case(oracle, {"kvp": 2}, [greedy(*oracle.prompts * 2)], {"kv_cache_tokens": 96} | settings)


def moving(oracle):
    """Two requests of one rank, which get more than it holds, and one of the other with room to spare."""
    settings = {"placement": "local", "max_model_len": 48, "kv_cache_tokens": 2 * 17 * 4, "chunk_tokens": "auto"}
    return case(oracle, {"kvp": 2}, [greedy(*oracle.prompts)], settings)


@pytest.fixture(scope="module")
def found(oracles):
    oracle, three = oracles("llama"), oracles("llama", 24, 26, 14)
    cases = {
        "features": features(oracle),
        "pressed": pressed(oracle, prefix_cache=False),
        "kvp 2": case(oracle, {"kvp": 2}, [greedy(*oracle.prompts)]),
        "kvp 2 x tpa 2": case(oracle, {"kvp": 2, "tpa": 2}, [greedy(*oracle.prompts)]),
        "moving": moving(three),
    }
    with Network(2) as network:
        return dict(zip(cases, run(network, 2, list(cases.values())), strict=True))


def test_cached_prefixes_and_drawn_tokens_are_those_of_one_rank(oracles, found):
    expected, own = alone(features(oracles("llama"))), found["features"]
    for name in ("token_ids", "text", "finish_reason"):
        assert every(own, name) == every(expected, name)
    assert every(own, "cached_tokens")[:3] == every(expected, "cached_tokens")[:3] == [0, 28, 40]
    assert every(own, "token_ids")[0] == every(own, "token_ids")[2] == oracles("llama").tokens[3]


def test_log_probabilities_of_prompts_are_those_of_transformers(oracles, found):
    oracle = oracles("llama")
    for result, prompt, logits_TV in zip(found["features"]["rounds"][4], oracle.prompts, oracle.logits, strict=True):
        scored = [
            entry and {int(token): value for token, value in entry.items()} for entry in result["prompt_logprobs"]
        ]
        assert_of(scored, prompt, logits_TV, 3)


def test_requests_go_on_after_preemptions(oracles, found):
    assert every(found["pressed"], "token_ids") == oracles("llama").tokens * 2
    assert sum(every(found["pressed"], "preemptions")) > 0


def exchanged_bytes(rows):
    """Of each row and layer, one of two KVP ranks sends each query head to the other one, with its log-sum-exp."""
    config = FAMILIES["llama"]
    return rows * config.num_hidden_layers * config.num_attention_heads * 4 * (config.head_dim + 1)


def summed_bytes(rows, sampled, ranks=1):
    """What two hosts of so many ranks send to each other beside exchanges. sampled: the tokens of each step.

    Each of them sends its part of the sums: of the embedding and of two blocks of each layer, for each row. Where S
    tokens are sampled, each sends S candidates of each of its ranks: ids, sums of weights and, two of them in 8 bytes,
    logits. Then host 0 sends the S tokens.
    """
    config = FAMILIES["llama"]
    row_bytes = 4 * config.hidden_size * (1 + 2 * config.num_hidden_layers)
    candidates = sum(2 * count + (count + 1) // 2 for count in sampled)
    return 2 * rows * row_bytes + 2 * ranks * 8 * candidates + 8 * sum(sampled)


@pytest.mark.parametrize(("layout", "ranks"), [("kvp 2", 1), ("kvp 2 x tpa 2", 2)])
def test_bytes_between_hosts_are_those_of_the_formula(oracles, found, layout, ranks):
    own, rows = found[layout], rows_of(oracles("llama"))
    assert every(own, "token_ids") == oracles("llama").tokens
    assert (own["rows"], own["exchanged_bytes"]) == (rows, exchanged_bytes(rows))
    assert own["network_bytes"] == exchanged_bytes(rows) + summed_bytes(rows, own["sampled"], ranks)


def rows_of(oracle):
    """What is computed for all prompts and answers: the last token of an answer is no row."""
    return sum(len(prompt) + NEW_TOKENS - 1 for prompt in oracle.prompts)


def test_kv_that_moves_to_another_host_counts(oracles, found):
    own, moved = found["moving"], sum(every(found["moving"], "moved_bytes"))
    assert every(own, "token_ids") == oracles("llama", 24, 26, 14).tokens
    assert moved > 0
    assert own["network_bytes"] == own["exchanged_bytes"] + summed_bytes(own["rows"], own["sampled"]) + moved


@pytest.mark.slow
def test_swapped_kv_guides_and_images_are_those_of_one_rank(oracles, tmp_path_factory):
    guided = model_of(FAMILIES["llama"], tmp_path_factory.mktemp("guided"))
    shown = make_shown_oracle(VISION_LANGUAGE["qwen3_vl"], tmp_path_factory.mktemp("qwen3_vl"))
    save_tokenizer_files(shown.path)
    for name, image in shown.images.items():
        image.save(shown.path / f"{name}.png")
    guides = [guide for guide in GUIDES if guide.reasoning is None]
    with_guides = [
        {"prompt": guided.prompts[2], "sampling": {"max_new_tokens": 40, "guide": [guide.kind, guide.text]} | how}
        for how in ({}, {"temperature": 1.0, "seed": 1})
        for guide in guides
    ]
    with_images = [
        {
            "prompt": shown.given[index],
            "images": [str(shown.path / f"{name}.png") for name in names],
            "sampling": GREEDY | {"max_new_tokens": SHOWN_TOKENS},
        }
        for index, names in enumerate(shown.shown)
    ]
    images = {"max_model_len": 128, "chunk_tokens": 7}
    cases = [
        pressed(oracles("llama"), swap_tokens=256, policy="fcfs", tbt_target_s=0.004),
        case(guided, {"kvp": 2}, [with_guides], {"max_model_len": 128}),
        case(shown, {"kvp": 2}, [with_images], images),
        case(shown, {"kvp": 2, "pp": 2}, [with_images], images),
    ]
    with Network(2) as network:
        swapped, of_guides, *of_images = run(network, 2, cases)
    assert every(swapped, "token_ids") == oracles("llama").tokens * 2
    assert sum(every(swapped, "swapped_tokens")) > 0
    assert every(of_guides, "token_ids") == every(alone(cases[1]), "token_ids")
    ended = [
        each for each in zip(guides * 2, of_guides["rounds"][0], strict=True) if each[1]["finish_reason"] == "stop"
    ]
    assert ended
    for guide, result in ended:
        is_of(guide, result["text"])
    for each in of_images:
        assert every(each, "token_ids") == shown.tokens


@pytest.mark.slow
def test_saved_contexts_come_from_a_shared_folder_or_from_copies(oracles, tmp_path):
    """Host 1 has `copied` and `lacking` for itself alone: in one it has copies, and nothing in the other."""
    oracle = oracles("llama")
    context, question = oracle.prompts[3][:35], oracle.prompts[3][35:]
    names = ("shared", "copied", "lacking", "copied on host 1", "nothing")
    shared, copied, lacking, own, nothing = (tmp_path / name for name in names)
    for folder in (shared, copied, lacking, own, nothing):
        folder.mkdir()

    def using(folder, **more):
        return case(oracle, {"kvp": 2}, [greedy(question, context="it")], {"contexts_dir": str(folder)}, **more)

    copies = [(str(shared), str(folder)) for folder in (copied, lacking, own)]
    cases = [
        using(shared, saves={"it": context}),
        using(shared, copies=copies),
        using(copied, saves={"other": context}),
        using(lacking),
    ]
    with Network(2) as network:
        *answered, refused = run(network, 2, cases, folders={copied: own, lacking: nothing})
    assert [len(each["refusals"]) for each in answered] == [0, 0, 1]
    assert "is missing on a host: set --contexts-dir to a folder that all hosts share" in answered[2]["refusals"][0]
    for each in [*answered, alone(cases[1])]:
        assert every(each, "token_ids") == [oracle.tokens[3]]
        assert every(each, "cached_tokens") == [32]
    assert "context 'it' is damaged (file rank-0.safetensors: it is missing)" in refused["rounds"][0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_stages_of_kvp_and_tpa_on_four_hosts(oracles, model):
    """Each host has a KVP rank of a stage, with two ranks."""
    oracle = oracles(model)
    cases = [case(oracle, {"kvp": 2, "tpa": 2, "pp": 2}, [greedy(*oracle.prompts)])]
    with Network(4) as network:
        (found,) = run(network, 4, cases)
    assert every(found, "token_ids") == oracle.tokens


@pytest.mark.slow
def test_a_host_0_that_has_moved_is_found_by_its_name(oracles):
    oracle = oracles("llama")
    cases = [case(oracle, {"kvp": 2}, [greedy(*oracle.prompts)])]
    with Network(3) as network:
        network.name("first", 0)
        first = start(network, 0, 2, cases, first="first")
        follower = start(network, 1, 2, cases, first="first")
        await_line(follower, "joined 10.77.0.1:29501")
        first.kill()
        network.name("first", 2)
        second = start(network, 2, 2, cases, node_rank=0, first="first")
        out, err = second.communicate(timeout=TIMEOUT_S)
        assert second.returncode == 0, err
        await_line(follower, "joined 10.77.0.3:29501")
        assert follower.wait(60) == 0
    assert every(json.loads(out), "token_ids") == oracle.tokens


def await_line(process, text):
    """Read standard error until a line has the text."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(lines)


def words(oracle, index):
    return " ".join(f"w{token}" for token in oracle.prompts[index])


def engine(oracle, *layout):
    return [str(oracle.path), "--dtype", "float32", "--block-tokens", "4", "--max-model-len", "64", *layout]


@pytest.mark.slow
def test_a_server_on_two_hosts_streams_and_ends_with_its_followers(oracles):
    oracle, rows = oracles("llama"), rows_of(oracles("llama"))
    with Network(2) as network:
        layout = ["--kvp", "2", "--placement", "striped", "--nnodes", "2", "--master-addr", network.address(0)]
        serve = ["-m", "longhelix", "serve", *engine(oracle, *layout), "--log-format", "json"]
        hosts = [say(network, node, [*serve, "--node-rank", str(node)]) for node in range(2)]
        await_line(hosts[0], '"event": "ready"')
        prompts = [words(oracle, index) for index in range(len(oracle.prompts))]
        ready, texts, metrics = network.inside(0, ask, oracle.path.name, prompts)
        program(hosts[0]).terminate()
        errors = [host.communicate(timeout=60)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert errors[1].splitlines()[-1] == "longhelix: host 0 has ended the engine"
    assert ready == 200
    assert [[int(word) for word in re.findall(r"w(\d+)", text)] for text in texts] == oracle.tokens
    (network_bytes,) = re.findall(r"^longhelix:network_bytes_total{.*} (\S+)$", metrics, re.MULTILINE)
    tokens = NEW_TOKENS * len(prompts)
    assert float(network_bytes) == exchanged_bytes(rows) + summed_bytes(rows, [1] * tokens)


def ask(model, prompts):
    """/ready, the streamed answers to prompts, and /metrics."""
    with httpx.Client(base_url="http://127.0.0.1:8000", timeout=60) as client:
        ready, texts = client.get("/ready").status_code, []
        for prompt in prompts:
            body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
            with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
                deltas = [event["choices"][0]["text"] for event in events(response)]
            assert len(deltas) >= NEW_TOKENS
            texts.append("".join(deltas))
        return ready, texts, client.get("/metrics").text


def generate(oracle, *layout):
    sampling = ["--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--json"]
    return ["longhelix", "generate", *engine(oracle, *layout), "--prompt", words(oracle, 2), *sampling]


def assert_generates(oracle, hosts):
    """Processes that print the answer on host 0 alone."""
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in hosts]
    assert [process.returncode for process in hosts] == [0] * len(hosts), outputs
    assert json.loads(outputs[0][0])["token_ids"] == oracle.tokens[2]
    assert not any(out for out, _ in outputs[1:])


# How torchrun finds the other host, by the address of this one, its number and that of host 0.
RENDEZVOUS = {
    "static": lambda own, node, first: ["--node-rank", str(node), "--master-addr", first, "--master-port", "29500"],
    "c10d": lambda own, node, first: [
        "--rdzv-backend", "c10d", "--rdzv-id", "it", "--rdzv-endpoint", f"{first}:29500", "--local-addr", own,
        # Without this, torchrun asks whether the name of this machine has the address of the endpoint.
        "--rdzv-conf", f"is_host={node == 0}",
    ],
}  # fmt: skip


def torchrun(network, per_host, rendezvous, arguments, *more):
    """Start `python -m ARGUMENTS` for so many ranks on each of two hosts."""
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host), *more]
    return [
        say(
            network,
            node,
            [*command, *RENDEZVOUS[rendezvous](network.address(node), node, network.address(0)), "-m", *arguments],
        )
        for node in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("per_host", "rendezvous"), [(1, "static"), (2, "static"), (2, "c10d")])
def test_torchrun_on_two_hosts_gives_the_tokens_of_one_rank(oracles, per_host, rendezvous):
    oracle = oracles("llama")
    with Network(2) as network:
        layout = ["--kvp", "2", "--tpa", str(per_host)]
        assert_generates(oracle, torchrun(network, per_host, rendezvous, generate(oracle, *layout)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_a_server_again_after_a_rank_was_killed(oracles):
    oracle = oracles("llama")
    serve = ["longhelix", "serve", *engine(oracle, "--kvp", "2"), "--log-format", "json"]
    with Network(2) as network:
        hosts = torchrun(network, 1, "static", serve, "--max-restarts", "2")
        await_line(hosts[0], '"event": "ready"')
        (rank,) = ranks(hosts[1])
        rank.kill()
        await_line(hosts[0], '"event": "ready"')
        _, texts, _ = network.inside(0, ask, oracle.path.name, [words(oracle, 0)])
        for host in hosts:
            program(host).terminate()
        for host in hosts:
            host.communicate(timeout=120)
        left = network.left_over()
    assert [each for each in left if "torchelastic" not in each] == []  # torchrun's own folders
    assert [int(word) for word in re.findall(r"w(\d+)", texts[0])] == oracle.tokens[0]


@pytest.mark.slow
def test_torchrun_with_the_wrong_number_of_ranks_names_that_of_all_hosts(oracles):
    with Network(2) as network:
        for host in torchrun(network, 1, "static", generate(oracles("llama"), "--kvp", "4")):
            out, _ = host.communicate(timeout=TIMEOUT_S)
            assert host.returncode != 0
            assert "torchrun started 2: set --nproc-per-node so that 2 hosts start 4 ranks together" in out


@pytest.mark.slow
def test_srun_tells_hosts_their_places(oracles):
    oracle = oracles("llama")
    with Network(2) as network:
        for node in range(2):
            network.name(f"node{node + 7}", node)
        step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[7-8]"}
        arguments = ["-m", *generate(oracle, "--kvp", "2", "--tpa", "2")]
        assert_generates(oracle, [say(network, node, arguments, **step, SLURM_NODEID=str(node)) for node in range(2)])
