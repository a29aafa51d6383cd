"""The messages between the first host and its followers. No message is ever executed as code."""

import msgspec


class Facts(msgspec.Struct, frozen=True):
    """What a host has."""

    address: str
    probe_port: int  # the other hosts connect to it to check the network
    cores: int
    free_bytes: int  # free memory
    gpu_bytes: list[int]  # free memory of each GPU
    gpu_capabilities: list[tuple[int, int]]  # compute capability of each GPU


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A follower asks to join. The fields after `time_s` must be the same on all hosts."""

    node_rank: int
    process: str  # random name of the follower's process
    facts: Facts
    time_s: float  # Unix time
    version: str
    kernels: str  # instruction set of the native kernels
    nnodes: int
    model: str  # fingerprint of the model's files
    layout: str
    settings: str


class Launch(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower to start the processes of its ranks. Ranks of an earlier launch end first."""

    launch: int  # number of this launch


class Halt(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower to end its ranks."""


class Admitted(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower that it has joined."""


class Probe(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower that the engine listens. Without it, heartbeats would fill the queues of an idle engine."""

    number: int  # ascends


class Here(msgspec.Struct, tag=True, frozen=True):
    """A follower's answer to `Probe`."""

    number: int  # that of the probe


class Check(msgspec.Struct, tag=True, frozen=True):
    """Asks a follower to connect to these addresses of the other hosts, by node rank."""

    addresses: dict[int, str]  # "ADDRESS:PORT"


class Checked(msgspec.Struct, tag=True, frozen=True):
    """Which of the addresses could not be reached, and why, by node rank."""

    failures: dict[int, str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower to end because of an error of the user."""

    reason: str
    code: str = "invalid_cluster"


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Tells a follower that the engine has ended, so it ends too."""


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """Tells the first host how the process of a rank has ended."""

    launch: int
    rank: int
    words: str
    is_cause: bool  # False if the rank may have ended because another rank had failed


ToFollower = Launch | Halt | Admitted | Probe | Check | Refused | Leave
FromFollower = Hello | Here | RankEnded | Checked
ENCODER = msgspec.msgpack.Encoder()
TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
FROM_FOLLOWER = msgspec.msgpack.Decoder(FromFollower)

# First frames. HOST: one of the structs above. RANKS: messages from ranks of a launch, or to ranks. START: the first
# message to ranks, in which a follower replaces what differs between hosts.
HOST, RANKS, START = b"host", b"ranks", b"start"
