"""A small Hugging Face Hub on loopback: the part of its API that downloads use, and faults on request."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub holds, and what it was asked for."""

    repositories: dict[str, Path]
    "Folder of each repository."
    gated: set[str] = field(default_factory=set)
    "Repositories that need the token."
    token: str = "hf_secret"
    cut_after: int | None = None
    "Close the connection after this many bytes of a safetensors file, once."
    downloads: list[str] = field(default_factory=list)
    "Files that were sent, as NAME/FILE."
    commit: str = COMMIT
    pushed: list[Path] = field(default_factory=list)
    "Folders of commits that somebody pushes, one after each listing."
    url: str = ""

    @contextmanager
    def serve(self):
        """Serve until the end of the block, at `url`."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def files(self, name):
        folder = self.repositories[name]
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Tests read what the command prints, so the hub prints nothing."""

    def do_HEAD(self):
        self.respond(has_body=False)

    def do_GET(self):
        self.respond(has_body=True)

    def respond(self, has_body):
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.describe(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.list_tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_file(found[1], found[2], found[3], has_body)
        else:
            self.refuse(404, "EntryNotFound")

    def is_open(self, name, revision):
        if name not in self.hub.repositories:
            self.refuse(401, "RepoNotFound")
        elif name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.refuse(403, "GatedRepo")
        elif revision not in ("main", COMMIT, COMMIT[::-1]):
            self.refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def describe(self, name, revision):
        if self.is_open(name, revision):
            files = self.hub.files(name)
            siblings = [{"rfilename": file, "size": path.stat().st_size} for file, path in files.items()]
            self.send_json({"id": name, "sha": self.hub.commit, "siblings": siblings, "private": False})
            if self.hub.pushed:
                self.hub.repositories[name] = self.hub.pushed.pop(0)
                self.hub.commit = self.hub.commit[::-1]

    def list_tree(self, name, revision):
        if self.is_open(name, revision):
            self.send_json(
                [
                    {"type": "file", "path": file, "size": path.stat().st_size, "oid": digest(path.read_bytes())}
                    for file, path in self.hub.files(name).items()
                ]
            )

    def send_file(self, name, revision, file, has_body):
        if not self.is_open(name, revision):
            return
        path = self.hub.files(name).get(file)
        if path is None:
            self.refuse(404, "EntryNotFound")
            return
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", f'"{digest(content)}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if has_body:
            self.hub.downloads.append(f"{name}/{file}")
            self.send_body(file, content[begin:])

    def send_body(self, file, content):
        if self.hub.cut_after is not None and file.endswith(".safetensors"):
            self.wfile.write(content[: self.hub.cut_after])
            self.close_connection = True
        else:
            self.wfile.write(content)

    def send_json(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def digest(content):
    return hashlib.sha1(content).hexdigest()
