"""The encrypted connections between the first host and its followers: ZeroMQ over TCP with CURVE."""

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from longhelix.engine.hosts.secret import Keys
from longhelix.errors import UserError

_DOMAIN = "longhelix"
# ZeroMQ's own threads send heartbeats, even while Python is busy. A connection is lost after 7 s of silence at most,
# which leaves a host 3 s to end its ranks.
_BEAT_MS, _SILENCE_MS = 1000, 6000
_PIECE_BYTES = 1 << 17
_UNREAD = 64
_CRYPTOGRAPHIC, _MECHANISM = 0x11000001, 0x11000002  # reasons why a handshake failed, in zmq.h


class FirstLink:
    """The first host's end, one socket for all followers. Only hosts with the same secret can connect."""

    def __init__(self, address: str, port: int, keys: Keys | None) -> None:
        """Raises UserError: the port cannot be used."""
        self._context = zmq.Context()
        self._authenticator = None
        self.socket = self._context.socket(zmq.ROUTER)
        try:
            if keys is not None:
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(_DOMAIN, _Allowed(keys.followers.public))
                self.socket.curve_server = True
                self.socket.curve_secretkey = keys.first.secret
                self.socket.zap_domain = _DOMAIN.encode()
            _set_heartbeats(self.socket)
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.SNDHWM, 0)  # a host that has stopped reading must not block the engine
            self.socket.setsockopt(zmq.RCVHWM, _UNREAD)
            # Only failed handshakes, because a monitor that nobody reads would block ZeroMQ.
            self._monitor = _Monitor(self.socket, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            self.socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            self.close()
            taken = f"port {port} of {address} is already in use: set --master-port to another port on every host"
            if error.errno != errno.EADDRINUSE:
                taken = f"this host cannot listen on {address}:{port} ({error}): correct --master-addr"
            raise UserError(taken, "invalid_cluster") from error
        except BaseException:
            self.close()
            raise

    def send(self, identity: bytes, *frames: bytes) -> bool:
        """Send a message. Returns False if the follower is gone."""
        try:
            self.socket.send_multipart((identity, *frames))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def strangers(self) -> bool:
        """Return whether somebody has tried to connect with another secret since the last call."""
        return not _STRANGE.isdisjoint(self._monitor.events())

    def close(self) -> None:
        """Close the socket. Messages to followers are sent for at most a second."""
        self.socket.close(linger=1000)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=1000)


class FollowerLink:
    """A follower's end."""

    def __init__(self, identity: str, address: str, port: int, keys: Keys | None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.followers.public, keys.followers.secret
            self.socket.curve_serverkey = keys.first.public
        _set_heartbeats(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 200)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._monitor = _Monitor(self.socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.is_connected = self.was_lost = False
        self.refusals = 0  # connections that the other end has closed before they could be used
        self.socket.connect(f"tcp://{address}:{port}")

    def look(self) -> None:
        """Update the attributes from what has happened to the connection."""
        for event, _ in self._monitor.events():
            match event:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.is_connected = True
                case zmq.EVENT_DISCONNECTED if self.is_connected:
                    self.is_connected, self.was_lost = False, True
                case zmq.EVENT_DISCONNECTED:
                    self.refusals += 1

    def close(self) -> None:
        self.socket.close(linger=200)
        self._context.destroy(linger=200)


class _Monitor:
    """What happens to a socket's connections."""

    def __init__(self, watched: zmq.Socket, events: int) -> None:
        self._socket = watched.get_monitor_socket(events)

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield events and their values since the last call."""
        while self._socket.poll(0):
            found = recv_monitor_message(self._socket)
            yield found["event"], found["value"]


class _Allowed:
    """Tells the authenticator which key may connect."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


_STRANGE = {
    (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, _CRYPTOGRAPHIC),
    (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, _MECHANISM),
    (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400),
}


def _set_heartbeats(own: zmq.Socket) -> None:
    own.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    own.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def pieces(payload: bytes) -> list[bytes]:
    """Cut a payload into frames of 128 KiB.

    ZeroMQ notices what arrives only at the end of a frame. A frame that takes 6 s would be silence, and end the
    connection.
    """
    return [payload[start : start + _PIECE_BYTES] for start in range(0, len(payload), _PIECE_BYTES)]


def listener(address: str) -> socket.socket:
    """Open a port for the check of connections. Nobody accepts: the system completes the connections by itself."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.bind((address, 0))
        opened.listen(1024)
    except OSError as error:
        opened.close()
        raise UserError(f"this host cannot listen on {address} ({error.strerror}): correct --interface") from error
    return opened


def failures(addresses: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Connect to all of these addresses at once. Returns why some of them cannot be reached.

    Args:
        addresses: ADDRESS:PORT by node rank.
    """

    def failure(address: str) -> str:
        name, port = address.rsplit(":", 1)
        try:
            socket.create_connection((name, int(port)), timeout_s).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        found = dict(zip(addresses, pool.map(failure, addresses.values()), strict=True))
    return {node: why for node, why in found.items() if why}


def drop_connections(opened: socket.socket) -> None:
    """Close the connections that a listener has not accepted."""
    opened.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            opened.accept()[0].close()
