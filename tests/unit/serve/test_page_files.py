"""The page's files: each at its path, without a key, under a strict policy; nothing else is open."""

import asyncio
import re
from pathlib import Path

import pytest
from fastapi import FastAPI

from longhelix.serve import errors, page_files
from longhelix.serve.gate import AccessControl, Gate

pytestmark = pytest.mark.unit
FOLDER = Path(page_files.__file__).parent / "page"


def get(paths, authorization=b""):
    """Status, headers and body that an app of these files alone answers, behind a gate with a key. Paths are as servers
    hand them on, once percent signs are decoded."""
    app = FastAPI()
    errors.install(app)
    app.include_router(page_files.routes())
    app.add_middleware(Gate, admission=AccessControl(("secret",), 1000))

    async def ask(path):
        messages = []
        head = [(b"authorization", authorization)]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": head}
        await app(scope, receive, append(messages))
        headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        return messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages[1:])

    async def receive():
        return {"type": "http.request"}

    def append(messages):
        async def send(message):
            messages.append(message)

        return send

    async def ask_all():
        return [await ask(path) for path in paths]

    return asyncio.run(ask_all())


def test_every_file_is_served_and_is_strict():
    assert sorted(page_files.PATHS) == sorted(
        "/" if file.name == "index.html" else f"/page/{file.name}" for file in FOLDER.iterdir()
    )
    for path, (status, headers, body) in zip(page_files.PATHS, get(page_files.PATHS), strict=True):
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        assert (status, body) == (200, (FOLDER / name).read_bytes())
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert "*" not in policy


def test_nothing_else_is_open():
    paths = [
        "//", "/page", "/page/", "/page/app.js/", "/page/..", "/page/../v1/models", "/page/../live", "/./", "/live", "",
        "/PAGE/app.js", "/page//app.js", "/page/app.js\0", "/page/../gate.py", "/page/index.html", "/;/live",
        "/page/%2e",
    ]  # fmt: skip
    assert [status for status, _, _ in get(paths)] == [401] * len(paths)
    assert {status for status, _, _ in get(paths, b"Bearer secret")} <= {307, 404}


def test_nothing_comes_from_elsewhere():
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        for found in re.findall(r"https?://[^\s\"')]+", text):
            assert found == "http://www.w3.org/2000/svg"
        assert "innerHTML" not in text
        assert not re.search(r"\b(eval|Function)\(|\bstyle=|\bon[a-z]+=\"", text), file.name


def test_what_the_page_names_is_there():
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        named = re.findall(r"(?:src|href)=\"(/page/[^\"]+)\"", text)
        named += [f"/page/{name}" for name in re.findall(r"from \"\./([^\"]+)\"", text)]
        assert set(named) <= set(page_files.PATHS), file.name
