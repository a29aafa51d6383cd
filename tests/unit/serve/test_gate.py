"""Who may ask a server on loopback that has no keys: programs of this machine, and no page of another site."""

import asyncio

import httpx
import pytest

from longhelix.serve.gate import Admission, Gate
from longhelix.serve.server import Address

pytestmark = pytest.mark.unit


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def ask(admission, path="/v1/models", **headers):
    async def asked():
        transport = httpx.ASGITransport(Gate(application, admission))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.get(path, headers=named)

    return asyncio.run(asked())


HERE = Admission((), 1000, is_loopback=True)
HOSTS = ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:80", "[::1]", "[::1]:8000", "127.0.0.2:1"]
OTHERS = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "localhost:80:80"),
    *(
        "",
        ":8000",
        "10.0.0.1",
        "[::2]:8000",
        "::1",
        "127.0.0.1@evil.example",
        "127.0.0.1:evil",
        "[localhost",
        "0.0.0.0",
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_this_machine_are_served(host):
    assert ask(HERE, host=host).text == "served"


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not(host):
    answer = ask(HERE, host=host)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_from_here")
    assert "localhost" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)]
)
def test_pages_of_other_sites_are_not(site, status):
    assert ask(HERE, sec_fetch_site=site).status_code == status


def test_what_is_open_to_all_stays_so():
    """A link on another site leads to the page, which then asks for itself."""
    for path in ("/", "/health"):
        assert ask(HERE, path, host="evil.example", sec_fetch_site="cross-site").text == "served"


@pytest.mark.parametrize("admission", [Admission((), 1000), Admission(("k",), 1000), Admission(("k",), 1000, True)])
def test_servers_with_keys_or_for_others_are_asked_by_any_name(admission):
    found = ask(admission, host="here.example", sec_fetch_site="cross-site", authorization="Bearer k")
    assert found.text == "served"


@pytest.mark.parametrize(
    ("host", "found"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_which_addresses_are_loopback(host, found):
    assert Address(host).is_loopback is found
