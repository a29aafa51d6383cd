"""Errors for requests that the server cannot accept now."""


class OverloadedError(RuntimeError):
    """The server is overloaded, for example because too many requests are waiting."""


class RestartingError(RuntimeError):
    """The engine has failed and is restarting."""

    def __init__(self) -> None:
        super().__init__("the engine has failed and is restarting: try again later")


class NoReplicaError(RestartingError):
    """No replica of the server is running."""


class ShuttingDownError(RuntimeError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
