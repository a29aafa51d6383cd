"""What a rank says of the error that ends it."""

import traceback

from longhelix.compute.parallel.collectives import is_lost_peer
from longhelix.engine.workers.transport import Failed
from longhelix.errors import PeerLostError, UserError


def failure(error: Exception) -> Failed:
    """What the engine is told. An error of this rank's own is printed too, with its traceback."""
    if isinstance(error, UserError):
        return Failed(str(error), lost_peer=False, user_error_code=error.code)
    # While ranks meet they call process groups themselves, whose errors no RankGroup has named.
    lost_peer = isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and is_lost_peer(error))
    if not lost_peer:
        traceback.print_exception(error)
    return Failed(f"{type(error).__name__}: {error}", lost_peer, user_error_code="")
