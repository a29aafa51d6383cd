"""The norms of a layer, and of the heads of its attention."""

import msgspec


class Norms(msgspec.Struct, frozen=True):
    """The RMSNorms of hidden states around mixers and FFNs.

    Attributes:
        before: Inputs of mixers and FFNs are normed.
        after: Outputs of mixers and FFNs are normed before they are added to the residual.
        plus_one: Checkpoints have the weights minus one. This includes the norms of heads.
    """

    before: bool = True
    after: bool = False
    plus_one: bool = False


class HeadNorms(msgspec.Struct, frozen=True):
    """The norms of heads.

    Attributes:
        qk: Queries and keys are normed, head by head, before they are rotated.
        value: Values are divided by their root mean square, head by head.
        l2: Rotated queries and keys are divided by their root mean square, head by head.
    """

    qk: bool = False
    value: bool = False
    l2: bool = False
