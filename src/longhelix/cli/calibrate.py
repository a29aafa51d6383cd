"""`longhelix calibrate`: the system "local", measured and fitted on this machine."""

import json as json_module
import sys
from datetime import datetime
from pathlib import Path

from longhelix.cli.bench import check_out, show
from longhelix.cli.values import Flag
from longhelix.presets import local_system_path, write_system


def calibrate(*, out: Path | None = None, short: Flag = False, json: Flag = False) -> None:
    """Measure this machine and write what `--system local` means: two minutes on an idle machine.

    Parameters
    ----------
    out
        Write the system there, for `--system FILE.toml`. [default: where `--system local` reads it]
    short
        Fewer and shorter measurements: under a minute.
    json
        Print one JSON object in place of tables.
    """
    path = local_system_path() if out is None else out
    check_out(path, "TOML", "machine.toml")
    from longhelix.bench.suite import Suite

    date = datetime.now().astimezone().isoformat(timespec="seconds")
    suite = Suite(date, None, lambda line: print(line, file=sys.stderr))
    system = suite.calibrate(short)
    write_system(system, path)
    report = suite.finish()
    if json:
        print(json_module.dumps({"path": str(path)} | json_module.loads(report.as_json())))
        return
    show(report)
    print(f"Written to {path}.")
