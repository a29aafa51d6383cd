"""What can go wrong, in three kinds: the user's input, one request, and the world of ranks."""


class UserError(ValueError):
    """Input that cannot be served: the message says what is wrong, what to set, and to what value.

    `code` is the stable name that `--json` and the HTTP interface report.
    """

    def __init__(self, message: str, code: str = "invalid_argument") -> None:
        super().__init__(message)
        self.code = code


class RequestError(RuntimeError):
    """One request failed, and it alone: others go on, and so does the engine."""

    code = "request_failed"


class PassingError(RequestError):
    """The same, for a reason that may pass and is not in the request: sent again, it may go well."""

    code = "not_now"


class EngineError(RuntimeError):
    """The engine cannot go on: names the rank that failed and the cause."""

    code = "engine_failed"


class PeerLostError(RuntimeError):
    """A collective failed because another rank is gone: a consequence, never the first cause."""


class CollectivesDifferError(RuntimeError):
    """Ranks are in different collectives of one group, which only an error of ours can bring about. Names both."""
