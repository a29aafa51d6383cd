"""Options that several commands of `longhelix bench` have."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from longhelix.cli.measuring_hosts import tell, together
from longhelix.cli.options import HostFlags
from longhelix.cli.report_output import check_out, show
from longhelix.cli.values import Flag, Size
from longhelix.spec.layout import Layout

if TYPE_CHECKING:  # these modules import torch, so commands import them only when they run
    from longhelix.compute.runner.config import EngineConfig
    from longhelix.measure.bench.suite import Suite


def _as_typed(values: tuple[object, ...]) -> str:
    """Format a default with several values for help texts, in the form that users type."""
    return " ".join(map(str, values))


MANY = Parameter(consume_multiple=True, negative=(), show_default=_as_typed)
Sizes = Annotated[tuple[Size, ...], MANY]
Numbers = Annotated[tuple[int, ...], MANY]
Names = Annotated[tuple[str, ...], MANY]


@Parameter(name="*", group="Peers")
@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options for other engines to measure in the same run."""

    peers: Path = Path("build/peers")
    "Folder of other engines, as benchmarks/peers/install.sh creates it. Engines that are not installed are skipped."
    no_peers: Flag = False
    "Do not measure other engines."

    @property
    def directory(self) -> Path | None:
        return None if self.no_peers else self.peers


@Parameter(name="*", group="Output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options for the output of results."""

    out: Path | None = None
    "Markdown file to write the report to. JSON goes to the same folder, and plots if matplotlib is installed."
    json: Flag = False
    "Print one JSON object instead of tables."

    @contextmanager
    def suite(self, peers: Path | None, hosts: HostFlags = HostFlags()) -> "Iterator[Suite]":  # noqa: B008 - frozen
        """Yield a suite with the peers in a folder, and afterwards write and print its results.

        With several hosts, the suite meets the others first, and host 0 has the results.

        Raises:
            UserError: --out is invalid, or the hosts do not fit together.
        """
        if self.out is not None:
            check_out(self.out, "Markdown", "report.md")
        from longhelix.measure.bench.suite import Suite

        date = datetime.now().astimezone().isoformat(timespec="seconds")
        with together(hosts) as met:
            suite = Suite(date, peers, tell, met)
            yield suite
        if suite.node_rank:
            tell("host 0 has the results")
            return
        report = suite.finish()
        if self.out is not None:
            report.write(self.out)
        if self.json:
            print(report.as_json())
            return
        show(report)


@Parameter(name="*", group="Model and layout")
@dataclass(frozen=True, kw_only=True)
class BenchModelOptions:
    """Options for the model to measure and its layout over ranks."""

    model: str = "builtin"
    "Model to measure: a folder in Hugging Face format, a GGUF file, or `builtin`."
    kvp: int = 1
    "KV parallelism: ranks that split the request's KV cache along the sequence."
    tpa: int = 1
    "Tensor parallelism of attention: ranks that split the heads."
    threads: int | None = None
    "Threads per rank. [default: cores / ranks]"

    def config(self, suite: "Suite", lengths: Sequence[int], **settings: Any) -> "EngineConfig":
        """Return the configuration for the hosts of a suite, with room for the longest of `lengths`."""
        from longhelix.measure.configuration import configure

        layout = Layout(kvp=self.kvp, tpa=self.tpa)
        places = suite.places(layout.world_size)
        return configure(self.model, layout, lengths, threads=self.threads, places=places, **settings)
