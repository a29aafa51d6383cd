"""/v1/contexts: saved contexts. The engine computes their KV while other requests run and stores it on disk."""

import asyncio
from functools import partial

from fastapi import APIRouter

from longhelix.compute.cache.saved_context import SavedContext
from longhelix.engine.saving import Saving
from longhelix.errors import UserError
from longhelix.serve import answers as forms
from longhelix.serve.bodies import ContextBody
from longhelix.serve.errors import ClientError, reason, statuses
from longhelix.serve.reading import BodyRoute
from longhelix.serve.refusals import OverloadedError, ShuttingDownError
from longhelix.serve.serving import Serving

_MOST_AT_A_TIME = 4  # maximum number of contexts being saved. Each may be as long as the model's context.
_MOST_FAILED = 64  # failed contexts whose errors are kept


def routes(serving: Serving) -> APIRouter:
    router, contexts = APIRouter(route_class=BodyRoute), _Contexts(serving)

    @router.post("/v1/contexts", status_code=202, responses=statuses(404, 409, 429, 503))
    async def save(body: ContextBody) -> forms.Context:
        """Start saving a context. Saving continues if the client disconnects."""
        serving.check_model(body.model)
        return await contexts.begin(body)

    @router.get("/v1/contexts", responses=statuses())
    async def all_contexts() -> forms.ContextList:
        """List saved contexts, contexts that are being saved, and contexts that could not be saved."""
        return forms.ContextList(data=await contexts.all())

    @router.get("/v1/contexts/{name:path}", responses=statuses(404))
    async def one_context(name: str) -> forms.Context:
        """Describe a context, or its progress while it is being saved."""
        return await contexts.one(name)

    @router.delete("/v1/contexts/{name:path}", responses=statuses(404, 503))
    async def delete(name: str) -> forms.DeletedContext:
        """Delete a context. If the context is being saved, saving stops. The record of a failure is also deleted."""
        await contexts.delete(name)
        return forms.DeletedContext(id=name)

    return router


class _Contexts:
    """Contexts on disk and contexts that are being saved. While a context is replaced, only the new one is visible."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._folder = serving, serving.llm.contexts_folder
        self._found: dict[str, Saving] = {}  # contexts that are being saved or have failed, by name
        self._beginning = asyncio.Lock()

    async def begin(self, body: ContextBody) -> forms.Context:
        """Start saving a context. Raises ClientError, UserError, OverloadedError or ShuttingDownError."""
        serving = self._serving
        if serving.is_draining:
            raise ShuttingDownError
        if not serving.llm.config.scheduler.cache.prefix_cache:
            raise ClientError(
                "this server cannot save contexts, because its prefix cache is off: start it without --no-prefix-cache",
                None,
            )
        self._check_room(body.id)
        tokenizer = serving.llm.tokenizer
        no_images = "a saved context holds text only: send images with each prompt"
        encode_messages = partial(tokenizer.encode_chat, add_generation_prompt=False)
        token_ids = await serving.token_ids_alone(body, tokenizer.encode, encode_messages, no_images)
        if len(token_ids) >= serving.max_model_len:
            raise ClientError(
                f"the context has {len(token_ids)} tokens, but the model's context of {serving.max_model_len} must "
                "also hold the prompt that follows: shorten it",
                "prompt",
                "context_length_exceeded",
            )
        async with self._beginning:
            self._check_room(body.id)  # another request may have started saving in the meantime
            begin = partial(serving.llm.begin_saving, body.id, token_ids, replace=bool(body.replace))
            saving = await serving.driver.call(begin)
            self._found.pop(body.id, None)
            self._found[body.id] = saving
        return _of_saving(saving)

    def _check_room(self, name: str) -> None:
        """Raise ClientError if this context is already being saved. Raise OverloadedError if too many others are."""
        names = self._names_being_saved()
        if name in names:
            raise ClientError(f"context {name!r} is being saved: wait, or delete it", "id", "context_exists")
        if len(names) >= _MOST_AT_A_TIME:
            raise OverloadedError(f"{_MOST_AT_A_TIME} contexts are being saved: try again later")

    async def all(self) -> list[forms.Context]:
        """Return all contexts, sorted by name."""
        self._names_being_saved()
        # Collect these before reading the disk, so that a context that becomes ready in between is not missed.
        being_saved = {name: _of_saving(saving) for name, saving in self._found.items()}
        found = await asyncio.to_thread(self._on_disk) | being_saved
        return [found[name] for name in sorted(found)]

    async def one(self, name: str) -> forms.Context:
        """Return a context by its name. Raises ClientError if no context has this name."""
        self._names_being_saved()
        if name in self._found:
            return _of_saving(self._found[name])
        return await asyncio.to_thread(self._saved, name)

    async def delete(self, name: str) -> None:
        """Delete a context. Raises UserError if no context has this name."""
        saving = self._found.get(name)
        if saving is not None and not saving.has_ended:
            await self._serving.driver.call(
                partial(saving.end, UserError("the context was deleted while it was being saved"))
            )
        if saving is not None and saving.status == "failed":
            if self._found.get(name) is saving:
                del self._found[name]
        else:
            await asyncio.to_thread(self._folder.remove, name)

    def _names_being_saved(self) -> list[str]:
        """Return the names of the contexts that are being saved.

        Also drops the records of ready contexts, which are on disk, and the records of all but the latest failures.
        """
        self._found = {name: saving for name, saving in self._found.items() if saving.status != "ready"}
        failed = [name for name, saving in self._found.items() if saving.has_ended]
        for name in failed[: max(len(failed) - _MOST_FAILED, 0)]:
            del self._found[name]
        return [name for name, saving in self._found.items() if not saving.has_ended]

    def _on_disk(self) -> dict[str, forms.Context]:
        return {name: _of_saved(name, found) for name, found in self._folder.manifests().items()}

    def _saved(self, name: str) -> forms.Context:
        """Return a context on disk, which may be damaged. Raises ClientError if no context has this name."""
        try:
            return _of_saved(name, self._folder.manifest(name))
        except UserError as error:
            if error.code == "unknown_context":
                raise ClientError(f"there is no context {name!r}", "id", error.code) from error
            if error.code == "invalid_argument" and name not in self._folder.names():
                raise
            return _of_saved(name, error)


def _of_saving(saving: Saving) -> forms.Context:
    if saving.saved is not None:
        return _of_saved(saving.new.name, saving.saved)
    return forms.Context(
        id=saving.new.name,
        status=saving.status,
        prefilled_tokens=saving.prefilled_tokens,
        num_tokens=len(saving.new.token_ids),
        error=None if saving.error is None else reason(saving.error),
    )


def _of_saved(name: str, saved: SavedContext | UserError) -> forms.Context:
    """Return the description of a context on disk.

    Args:
        name: its name.
        saved: its manifest, or the error if the context is damaged.
    """
    if isinstance(saved, UserError):
        return forms.Context(id=name, status="failed", prefilled_tokens=0, num_tokens=0, error=reason(saved))
    return forms.Context(
        id=name,
        status="ready",
        prefilled_tokens=saved.num_tokens,
        num_tokens=saved.num_tokens,
        saved_at=saved.saved_at,
        bytes=saved.num_bytes,
    )
