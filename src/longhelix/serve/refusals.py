"""Why no request is taken now."""


class OverloadedError(RuntimeError):
    """So much waits that no more is taken now."""


class RestartingError(RuntimeError):
    """The engine has failed, and starts again."""

    def __init__(self) -> None:
        super().__init__("the engine has failed and starts again: try again later")


class ShuttingDownError(RuntimeError):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
