"""Turns the error that ends a rank into a message for the engine."""

import traceback

from longhelix.compute.parallel.collectives import is_lost_peer
from longhelix.engine.workers.transport import Failed
from longhelix.errors import PeerLostError, UserError


def failure(error: Exception) -> Failed:
    """Return the message for an error. Also print the traceback, unless the user or a lost peer caused the error."""
    if isinstance(error, UserError):
        return Failed(str(error), lost_peer=False, user_error_code=error.code)
    # While ranks join, they call process groups directly, so no RankGroup has converted the error to PeerLostError.
    lost_peer = isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and is_lost_peer(error))
    if not lost_peer:
        traceback.print_exception(error)
    return Failed(f"{type(error).__name__}: {error}", lost_peer, user_error_code="")
