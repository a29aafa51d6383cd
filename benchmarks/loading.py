"""How fast a rank loads a folder of safetensors: beside reading its files alone, and beside taking as much new memory
as its weights need, which on virtual machines may be the slowest of the three.

python benchmarks/loading.py FOLDER [--threads 2] [--weight-dtypes bfloat16 int8 int4] [--repeats 3] [--cold]
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from longhelix.compute.kernels import native
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.rank import load_model
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.workers.environment import rank_environment
from longhelix.measure.bench.environment import environment
from longhelix.spec.layout import Layout

PIECE_BYTES = 8 * 2**20
SAMPLE_S = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weight-dtypes", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="forget the files before each reading and loading")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(*measure(given.folder, given.threads, given.weight_dtypes[0], given.cold))
        return 0
    print(environment(time.strftime("%Y-%m-%d")))
    file_bytes = sum(path.stat().st_size for path in files(given.folder))
    place = "read from the disk" if given.cold else "in the page cache"
    print(f"{file_bytes / 1e9:.2f} GB, {place}; {given.threads} threads; medians of {given.repeats} turns\n")
    print("Seconds, in parentheses those of processors.\n")
    print("| weights | reading alone | new memory alone | loading | GB/s | peak memory, GB | longest wait, s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for dtype in given.weight_dtypes:
        turns = [in_process(given, dtype) for _ in range(given.repeats)]
        *times, peak_bytes, wait_s = map(statistics.median, zip(*turns, strict=True))
        pairs = " | ".join(
            f"{wall_s:.2f} ({used_s:.2f})" for wall_s, used_s in zip(times[::2], times[1::2], strict=True)
        )
        rate = file_bytes / times[-2] / 1e9
        print(f"| {dtype} | {pairs} | {rate:.2f} | {peak_bytes / 1e9:.2f} | {wait_s:.2f} |")
    return 0


def in_process(given: argparse.Namespace, dtype: str) -> list[float]:
    """`measure` in a process like a rank's."""
    command = [sys.executable, __file__, str(given.folder), "--threads", str(given.threads), "--weight-dtypes", dtype]
    command += ["--once"] + ["--cold"] * given.cold
    ran = subprocess.run(command, env=rank_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in ran.stdout.split()]


def measure(folder: Path, threads: int, dtype: str, cold: bool) -> list[float]:
    """Seconds, and those of processors, to read the files, to take the memory that the weights need, and to load them;
    the peak of what loading takes, in bytes; the longest time between two pieces that it tells of."""
    native.set_num_threads(threads)
    options = EngineOptions.of({"weight_dtype": dtype, "max_model_len": 1024})
    config = resolve(open_checkpoint(str(folder)), Layout(), options)
    if cold:
        forget(folder)
    reading_s = seconds(lambda: read(folder, threads))
    memory_s = seconds(lambda: take_memory(config.weight_bytes(0)))
    if cold:
        forget(folder)
    told_s = [time.perf_counter()]
    with Peak() as peak:
        loading_s = seconds(lambda: load(config, lambda elements: told_s.append(time.perf_counter())))
    waits_s = (after - before for before, after in pairwise(told_s))
    return [*reading_s, *memory_s, *loading_s, peak.num_bytes, max(waits_s)]


def load(config: EngineConfig, progress: Callable[[int], None]) -> None:
    load_model(config, Mesh.build(Layout(), 0), progress)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of the files."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, threads: int) -> None:
    """Every byte once, into memory of each thread that fits its caches."""

    def read_share(thread: int) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        for path in files(folder):
            with path.open("rb", buffering=0) as file:
                for start in range(thread * PIECE_BYTES, path.stat().st_size, threads * PIECE_BYTES):
                    os.preadv(file.fileno(), [buffer], start)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read_share, range(threads)))


def take_memory(num_bytes: int) -> None:
    pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(num_bytes // PIECE_BYTES)]
    for piece in pieces:
        piece.zero_()


def seconds(call: Callable[[], None]) -> tuple[float, float]:
    """How long a call takes, and how much time of processors."""
    start_s, used_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start_s, time.process_time() - used_s


class Peak:
    """The most memory that this process takes while a `with` statement runs, beyond what it had, without pages of
    files."""

    def __enter__(self) -> "Peak":
        self._before, self.num_bytes = _own_bytes(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.num_bytes = max(self.num_bytes, _own_bytes() - self._before)


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
