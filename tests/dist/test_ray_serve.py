"""Ray Serve with two replicas, in a network of its own: answers as `longhelix serve` gives them, routing, failures."""

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import yaml
from networks import Network
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

    def __init__(self, network, process):
        self.network, self.process = network, process

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
        self.process.stdin.write(replica + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


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
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # a short path, because it contains sockets
        ranks = Path(folder, "ranks")
        ranks.mkdir()
        with Network(1) as network:
            arguments = SETTINGS | {"model": "builtin", "device": "cpu", "num_replicas": 2}
            process = network.start(
                0,
                [PROGRAM, folder, PORT, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"TMPDIR": str(ranks)},
            )
            assert process.stdout.readline() == "ready\n"
            yield Fleet(network, process)
            process.stdin.close()
            assert process.wait(WAIT_S) == 0
        assert not list(ranks.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_memory if "plasma" in name]
    assert ray_was_here or not os.path.exists("/tmp/ray")


def test_answers_are_those_of_longhelix_serve(expected, fleet):
    found = fleet.inside(answers, URL)
    for name, answer in expected.items():
        assert found[name] == answer, name


def test_an_answer_has_one_request_id(fleet):
    answer = fleet.inside(fleet.post, TEXT)
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_stream_comes_in_pieces_and_ends_with_its_client(fleet):
    def ask():
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client(URL) as to, to.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            first = "".join(next(pieces) for _ in range(3))
            running = fleet.metric("num_requests_running")
        return first, running

    first, running = fleet.inside(ask)
    assert first.count("data: ") < 100
    assert sum(running.values()) == 1
    fleet.inside(fleet.await_metric, lambda found: not any(found.values()), "num_requests_running")
    assert sum(fleet.inside(fleet.metric, "request_success_total", finished_reason="abort").values()) == 1


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
