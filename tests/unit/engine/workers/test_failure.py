"""What a rank says of the error that ends it."""

import pytest
import torch.distributed as dist

from longhelix.engine.workers.failure import failure
from longhelix.engine.workers.transport import Failed
from longhelix.errors import PeerLostError, UserError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "said", "printed"),
    [
        (UserError("too much: set less", "out_of_memory"), Failed("too much: set less", False, "out_of_memory"), False),
        (PeerLostError("barrier 1"), Failed("PeerLostError: barrier 1", True, ""), False),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer"),
            Failed("RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection reset by peer", True, ""),
            False,
        ),
        (
            RuntimeError("[gloo/transport/tcp/device.cc:84] Unable to find address for: nosuch0"),
            Failed("RuntimeError: [gloo/transport/tcp/device.cc:84] Unable to find address for: nosuch0", False, ""),
            True,
        ),
        (dist.DistBackendError("a peer is gone"), Failed("DistBackendError: a peer is gone", True, ""), False),
        (RuntimeError("shapes differ"), Failed("RuntimeError: shapes differ", False, ""), True),
        (KeyError("weight"), Failed("KeyError: 'weight'", False, ""), True),
    ],
)
def test_causes_are_told_from_consequences(error, said, printed, capsys):
    assert failure(error) == said
    assert capsys.readouterr().err == (f"{type(error).__name__}: {error}\n" if printed else "")
