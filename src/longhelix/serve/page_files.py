"""Serves the web page at /. Each file in `page` has a fixed path."""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Load nothing from other sites, do not run inline scripts, and do not evaluate text as a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _path(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


_FILES = {_path(file): file for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}
PATHS = tuple(_FILES)  # paths after percent-decoding


def routes() -> APIRouter:
    router = APIRouter()
    for path, file in _FILES.items():
        response = Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS)

        async def send(request: Request, response: Response = response) -> Response:
            return response

        router.add_route(path, send, methods=["GET"], include_in_schema=False)
    return router
