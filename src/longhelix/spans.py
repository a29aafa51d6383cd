"""Where a step's time goes: those who do something say so as it begins and as it ends."""


class Spans:
    """Who is told. This one keeps nothing, so that a step that nobody watches costs next to nothing more."""

    def layer(self, index: int | None) -> None:
        """What comes is of layer `index`; None: of none."""

    def begin(self, name: str, kind: str = "compute", part: int | None = None) -> object:
        """Something begins: `kind` is what does it (compute, exchange, collective, or host: what no kernel does) or
        "step", `part` the part of a batch. Returns what `end` wants. An exchange is that of the part that attended
        last."""
        return None

    def follow(self, name: str) -> object:
        """As `begin`, for what began when the last attention and exchange of the layer ended."""
        return None

    def end(self, span: object) -> None:
        """It ends now. May be said on another thread."""

    def end_with(self, span: object, work: object) -> None:
        """It ends when `work`, a collective of torch.distributed, is complete, whoever waits for that."""

    def count(self) -> int:
        """How many have begun and are kept."""
        return 0

    def taped(self, count: int) -> tuple[object, ...]:
        """Those after the first `count`, which are on a tape: it will write over their times."""
        return ()

    def again(self, spans: tuple[object, ...]) -> None:
        """A tape runs, and these with it once more: what others have left of their times is read now."""


UNTRACED = Spans()
