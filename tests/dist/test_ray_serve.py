"""Ray Serve with two replicas, in a network of its own: answers as `longhelix serve` gives them, routing, failures."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import yaml
from networks import Network, all_processes
from prometheus_client.parser import text_string_to_metric_families
from serving_process import serving

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("all_cores")]
if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve: pip install 'longhelix[ray]'", allow_module_level=True)

PROGRAM = str(Path(__file__).with_name("ray_program.py"))
DEPLOY = Path(__file__).parents[2] / "deploy"
URL, PORT = "http://127.0.0.1:8000", "8000"
KEY = "a-key-for-tests"
WAIT_S = 120
SETTINGS = {
    "dtype": "float32",  # other numbers of threads round differently, but not as differently as to choose other tokens
    "max_model_len": 2048,
    "kv_cache_tokens": 8192,
    "max_body_bytes": 100_000,
    "served_model_name": "small",
    "max_running": 16,
    "max_waiting_requests": 8,
    "drain": "300s",
}

TEXT = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 12, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = {
    "text": ("POST", "/v1/completions", {"json": TEXT}),
    "token ids": ("POST", "/v1/completions", {"json": TEXT | {"prompt": [504, 3575, 282, 4649, 314]}}),
    "two prompts": ("POST", "/v1/completions", {"json": TEXT | {"prompt": ["One, two,", "Red, green,"], "n": 2}}),
    "text stream": ("POST", "/v1/completions", {"json": TEXT | STREAM}),
    "chat": ("POST", "/v1/chat/completions", {"json": CHAT}),
    "chat stream": ("POST", "/v1/chat/completions", {"json": CHAT | STREAM}),
    "response": ("POST", "/v1/responses", {"json": {"input": "Say hello.", "max_output_tokens": 8, "temperature": 0}}),
    "models": ("GET", "/v1/models", {}),
    "version": ("GET", "/version", {}),
    "schema": ("GET", "/openapi.json", {}),
    "page": ("GET", "/", {}),
    "tokens": ("POST", "/tokenize", {"json": {"prompt": "To be"}}),
    "no such model": ("POST", "/v1/completions", {"json": TEXT | {"model": "large"}}),
    "no such path": ("GET", "/v1/nothing?a=1", {}),
    "no such method": ("DELETE", "/v1/completions", {}),
    "no key": ("GET", "/v1/models", {"headers": {"authorization": "Bearer of bad news"}}),
    "no JSON": ("POST", "/v1/completions", {"content": b'{"prompt": '}),
    "no bytes": ("POST", "/v1/completions", {"content": b"\xff\xfe"}),
    "no prompt": ("POST", "/v1/completions", {"json": {"prompt": ""}}),
    "too long": ("POST", "/v1/completions", {"json": TEXT | {"max_tokens": 5000}}),
    "too large": ("POST", "/v1/completions", {"content": b" " * 200_000}),
}
HEADERS = ("content-type", "cache-control", "allow", "retry-after")
VARYING = re.compile(r'[0-9a-f]{24}|"(?:created|created_at|cached_tokens)": ?\d+')
SHARED = "Whales breathe air, and they sleep with one half of the brain at a time. " * 20


@contextlib.contextmanager
def client(url):
    with httpx.Client(base_url=url, timeout=WAIT_S, headers={"authorization": f"Bearer {KEY}"}) as found:
        yield found


def answers(url):
    """Status, headers and body of each answer, without what is never the same twice."""
    with client(url) as to:
        found = {name: to.request(method, path, **more) for name, (method, path, more) in REQUESTS.items()}
    return {
        name: (each.status_code, [each.headers.get(header) for header in HEADERS], VARYING.sub("", each.text))
        for name, each in found.items()
    }


class Fleet:
    """Ray with the application, in a network namespace."""

    def __init__(self, network, process, folder):
        self.network, self.process, self.folder = network, process, folder

    def inside(self, function, *arguments, **more):
        """Call a function in the network. Returns or raises what it does."""

        def call():
            try:
                return function(*arguments, **more), None
            except Exception as error:
                return None, error

        found, error = self.network.inside(0, call)
        if error is not None:
            raise error
        return found

    def post(self, body):
        with client(URL) as to:
            return to.post("/v1/completions", json=body)

    def metric(self, name, **labels):
        """The values of a metric, by replica."""
        with client(URL) as to:
            text = to.get("/metrics").raise_for_status().text
        return Counter(
            {
                sample.labels["replica"]: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == f"longhelix:{name}" and sample.labels.items() >= labels.items()
            }
        )

    def await_metric(self, holds, name, **labels):
        """Wait until something is true of a metric, and return its values."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds(found := self.metric(name, **labels)):
            assert time.monotonic() < deadline_s, (name, found)
            time.sleep(0.2)
        return found

    def replica_of(self, body):
        """The replica that answers a request, and the answer."""
        before = self.metric("request_success_total", finished_reason="length")
        answer = self.post(body).raise_for_status().json()
        (replica,) = self.metric("request_success_total", finished_reason="length") - before
        return replica, answer

    def kill(self, replica):
        self.tell(replica)
        self.hears("killed\n")

    def hears(self, line):
        while self.process.stdout.readline() != line:  # Ray's own lines come in between
            assert self.process.poll() is None

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill_process(self, title):
        """Kill the process of Ray whose title contains these words."""
        (found,) = (each for each in all_processes(self.process) if title in " ".join(each.cmdline()))
        found.send_signal(signal.SIGKILL)

    def errors(self):
        """Lines of errors in the logs of the ingress."""
        logs = list(Path(self.folder).glob("session_*/logs/serve/replica_default_Ingress_*.log"))
        assert logs
        return [line for log in logs for line in log.read_text().splitlines() if line.startswith("ERROR ")]


@pytest.fixture(scope="module", autouse=True)
def key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGHELIX_API_KEY", KEY)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())  # otherwise Ray writes one to the home directory
        yield


@pytest.fixture(scope="module")
def expected(key):
    """What `longhelix serve` answers."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with serving("builtin", *flags) as server:
        return answers(server.url)


@pytest.fixture(scope="module")
def fleet(expected):
    """Ray with two replicas. When it ends, nothing stays behind."""
    shared_memory, ray_was_here = set(os.listdir("/dev/shm")), os.path.exists("/tmp/ray")
    # Ray's folder has a short path, because it contains sockets.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder, Network(1) as network:
        arguments = SETTINGS | {"model": "builtin", "device": "cpu", "num_replicas": 2}
        process = network.start(
            0, [PROGRAM, folder, PORT, json.dumps(arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == "ready\n"
        yield Fleet(network, process, folder)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
        assert network.left_over() == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert ray_was_here or not os.path.exists("/tmp/ray")


def test_answers_are_those_of_longhelix_serve(expected, fleet):
    found = fleet.inside(answers, URL)
    for name, answer in expected.items():
        assert found[name] == answer, name


def test_an_answer_has_one_request_id(fleet):
    answer = fleet.inside(fleet.post, TEXT)
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert len(answer.headers["x-replica-request-id"]) == 24  # the id in the log of the replica


def test_probes_need_no_key(fleet):
    def ask():
        with httpx.Client(base_url=URL, timeout=WAIT_S) as to:
            return [to.get(path) for path in ("/health", "/ready", "/metrics")]

    health, ready, metrics = fleet.inside(ask)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "replicas": 2, "ready": 2})
    assert metrics.status_code == 401


def test_each_replica_has_cores_of_its_own(fleet):
    ranks = [each for each in all_processes(fleet.process) if each.name().startswith("longhelix ")]
    cores = [tuple(each.cpu_affinity()) for each in ranks]
    assert sorted(map(len, cores)) == [1, 1]
    assert len(set(cores)) == 2


def test_clients_that_leave_or_speak_websocket_are_no_errors(fleet):
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\nauthorization: Bearer {}\r\n\r\n"
    upgrade = (
        "GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )

    def ask():
        with socket.create_connection(("127.0.0.1", int(PORT))) as to:
            to.sendall(head.format(KEY).encode() + b"{")
            time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", int(PORT))) as to:
            to.sendall(upgrade.encode())
            return to.recv(100).split(b"\r\n")[0], fleet.post(TEXT).status_code

    assert fleet.inside(ask) == (b"HTTP/1.1 403 Forbidden", 200)
    assert fleet.errors() == []


def test_too_many_requests_are_refused(fleet):
    body = {"prompt": "One, two, three,", "max_tokens": 300, "ignore_eos": True}

    def ask():
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            return list(pool.map(lambda _: fleet.post(body), range(64)))

    answers = fleet.inside(ask)
    assert {each.status_code for each in answers} == {200, 429}
    refused = next(each for each in answers if each.status_code == 429)
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"


def test_large_bodies_are_not_held_while_their_answers_run(fleet):
    body = {"prompt": [504] * 20, "max_tokens": 1900, "ignore_eos": True, "stream": True, "user": "x" * 80_000}

    def ask():
        with contextlib.ExitStack() as streams:
            to, open_texts = streams.enter_context(client(URL)), []
            for _ in range(24):  # 16 bodies of the maximum size fit at a time
                response = streams.enter_context(to.stream("POST", "/v1/completions", json=body))
                assert response.status_code == 200
                open_texts.append(response.iter_text())

    fleet.inside(ask)
    fleet.inside(fleet.await_metric, lambda found: not any(found.values()), "num_requests_running")


def test_a_stream_comes_in_pieces_and_ends_with_its_client(fleet):
    def ask():
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client(URL) as to, to.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            first = "".join(next(pieces) for _ in range(3))
            running = fleet.metric("num_requests_running")
        return first, running

    aborts = fleet.inside(fleet.metric, "request_success_total", finished_reason="abort")
    first, running = fleet.inside(ask)
    assert first.count("data: ") < 100
    assert sum(running.values()) == 1
    fleet.inside(fleet.await_metric, lambda found: not any(found.values()), "num_requests_running")
    aborts = fleet.inside(fleet.metric, "request_success_total", finished_reason="abort") - aborts
    assert sum(aborts.values()) == 1


def test_requests_with_the_same_prefix_go_to_the_same_replica(fleet):
    def ask(beginning, end):
        body = {"prompt": beginning + end, "max_tokens": 2, "ignore_eos": True}
        return fleet.inside(fleet.replica_of, body)

    beginnings = ["Red " + SHARED, "Blue " + SHARED]
    replicas = [ask(beginning, "")[0] for beginning in beginnings]
    assert len(set(replicas)) == 2  # a prompt without a known prefix goes where the fewest are
    for end in ("What do they eat?", "How long do they live?", "Why?"):
        for beginning, replica in zip(beginnings, replicas, strict=True):
            found, answer = ask(beginning, end)
            assert found == replica
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


def test_a_busy_replica_leaves_requests_to_the_other(fleet):
    def ask():
        body = {"prompt": "Green " + SHARED, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as streams:
            to, open_texts = streams.enter_context(client(URL)), []  # a text that is dropped would close its stream
            for _ in range(11):
                open_texts.append(streams.enter_context(to.stream("POST", "/v1/completions", json=body)).iter_text())
                next(open_texts[-1])
            return fleet.metric("num_requests_running")

    running = fleet.inside(ask)
    assert len(running) == 2
    assert min(running.values()) >= 1
    assert max(running.values()) >= 8
    fleet.inside(fleet.await_metric, lambda found: not any(found.values()), "num_requests_running")


def test_a_killed_replica_is_replaced_and_requests_go_on(fleet):
    def ask(end=""):
        return fleet.post({"prompt": "Yellow " + SHARED + end, "max_tokens": 2, "ignore_eos": True})

    def waiting():
        """A request that runs on one replica until that is killed."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(fleet.post, {"prompt": "Yellow " + SHARED, "max_tokens": 1500, "ignore_eos": True})
            found = fleet.await_metric(lambda found: sum(found.values()) == 1, "num_requests_running")
            (replica,) = +found
            fleet.kill(replica)
            return replica, sorted(found), running.result()

    replica, before, lost = fleet.inside(waiting)
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert lost.json()["error"]["code"] == "restarting"
    assert fleet.inside(ask, "Where?").status_code == 200
    found = fleet.inside(
        fleet.await_metric, lambda found: len(found) == 2 and replica not in found, "num_requests_running"
    )
    assert set(found) - {replica} > set(before) - {replica}
    for end in ("When?", "How?"):
        assert fleet.inside(ask, end).status_code == 200


def test_a_stream_of_a_killed_replica_ends_without_its_end(fleet):
    def ask():
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client(URL) as to, to.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            found = next(pieces)
            (replica,) = +fleet.metric("num_requests_running")
            fleet.kill(replica)
            with contextlib.suppress(httpx.RemoteProtocolError):
                found += "".join(pieces)
            return found

    assert "[DONE]" not in fleet.inside(ask)
    fleet.inside(fleet.await_metric, lambda found: len(found) == 2, "num_requests_running")


def test_prompts_are_answered_after_the_actor_with_the_prefixes_is_killed(fleet):
    def ask(end):
        return fleet.inside(fleet.replica_of, {"prompt": "Pink " + SHARED + end, "max_tokens": 2, "ignore_eos": True})

    ask("Where?")
    fleet.kill_process("PrefixTreeActor")
    replica, _ = ask("When?")
    for end in ("How?", "Why?", "Who?"):
        found, answer = ask(end)
        assert found == replica
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_requests_go_on_after_the_ingress_is_killed(fleet):
    fleet.kill_process("ServeReplica:default:Ingress")
    deadline_s = time.monotonic() + WAIT_S
    while fleet.inside(fleet.post, TEXT).status_code != 200:
        assert time.monotonic() < deadline_s
    bodies = [{"prompt": f"{n} " + SHARED, "max_tokens": 1} for n in range(4)]
    assert len({fleet.inside(fleet.replica_of, body)[0] for body in bodies}) == 2


def test_requests_go_on_while_a_replica_restarts_its_engine(fleet):
    def ask(end):
        return fleet.post({"prompt": "Grey " + SHARED + end, "max_tokens": 2, "ignore_eos": True})

    before, _ = fleet.inside(fleet.replica_of, {"prompt": "Grey " + SHARED, "max_tokens": 2, "ignore_eos": True})
    fleet.tell(before + " rank")
    fleet.hears("killed\n")
    deadline_s, statuses = time.monotonic() + WAIT_S, [0]
    while statuses[-1] != 200:
        answer = fleet.inside(ask, "Where?")
        statuses.append(answer.status_code)
        assert answer.status_code == 200 or answer.headers["retry-after"] == "1"
        assert time.monotonic() < deadline_s
    assert set(statuses) <= {0, 200, 503}
    assert before in fleet.inside(fleet.metric, "num_requests_running")  # Ray did not replace it


class Replica:
    """What the router asks of a replica."""

    def __init__(self, is_ready=None):
        self.routing_stats = {} if is_ready is None else {"is_ready": is_ready}


@pytest.mark.parametrize(
    ("chosen", "ready", "expected"),
    [
        ([0], [True, True], [[0], [0], [0], [0, 1]]),
        ([0], [None, None], [[0], [0], [0], [0, 1]]),
        ([0], [False, True], [[], [], [], [1]]),
        ([0, 1], [False, True], [[1], [1], [1], [1]]),
        ([1], [False, False], [[1], [1], [1], [0, 1]]),
    ],
)
def test_replicas_that_are_not_ready_are_chosen_last(monkeypatch, chosen, ready, expected):
    from longhelix.ray_serve import router

    replicas = [Replica(each) for each in ready]

    async def choose_replicas(self, candidate_replicas, pending_request):
        return [[replicas[at] for at in chosen]]

    monkeypatch.setattr(router.PrefixCacheAffinityRouter, "choose_replicas", choose_replicas)
    found = asyncio.run(object.__new__(router.PrefixRouter).choose_replicas(replicas))
    assert [[replicas.index(each) for each in group] for group in found] == expected


def test_serve_run_refuses_an_unknown_option_in_a_sentence(fleet):
    command = ["-m", "ray.serve.scripts", "run", "longhelix.ray_serve:build", "model=builtin", "kv_dtyp=int8"]
    process = fleet.network.start(0, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode
    last = said.strip().splitlines()[-1]
    assert last == "longhelix.errors.UserError: unknown setting 'kv-dtyp': did you mean kv-dtype?"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own code
def test_ray_knows_the_form_of_the_file_in_deploy():
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray/longhelix.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == "longhelix.ray_serve:build"
    (replicas,) = application.deployments
    assert (replicas.name, replicas.num_replicas) == ("EngineReplica", 2)


def test_running_streams_end_before_the_application_does(fleet):
    def ask():
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True} | STREAM
        with client(URL) as to, to.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            found = next(pieces)
            fleet.tell("delete")
            return found + "".join(pieces)

    text = fleet.inside(ask)
    assert "[DONE]" in text
    assert '"completion_tokens":1900' in text.replace(": ", ":")
    fleet.hears("deleted\n")
