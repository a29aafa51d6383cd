"""Where the ranks of several hosts meet."""

import msgspec


class Meeting(msgspec.Struct, frozen=True):
    """Place of the store through which ranks find each other. Rank 0 hosts it."""

    address: str  # IPv4 address of the first host
    port: int  # 0 for rank 0, which chooses one
    interface: str  # network interface of this host
