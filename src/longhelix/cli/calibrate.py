"""`longhelix calibrate`: measures this machine and writes the results as the system `local`."""

import json as json_module
from datetime import datetime
from pathlib import Path

from longhelix.cli.measuring_hosts import tell, together
from longhelix.cli.options import HostFlags
from longhelix.cli.report_output import check_out, show
from longhelix.cli.values import Flag
from longhelix.errors import UserError
from longhelix.spec.layout import Layout
from longhelix.spec.presets import local_system_path, write_system


def calibrate(
    *,
    out: Path | None = None,
    short: Flag = False,
    json: Flag = False,
    hosts: HostFlags = HostFlags(),  # noqa: B008 - frozen
) -> None:
    """Measure this machine and write the system that `--system local` reads. Takes two minutes on an idle machine.

    With --nnodes, each host measures itself, and then all measure the links between them. Each host writes its system.

    Parameters
    ----------
    out
        TOML file to write the system to, for `--system FILE.toml`. [default: the file that `--system local` reads]
    short
        Take fewer and shorter measurements, in under a minute.
    json
        Print one JSON object instead of tables.
    """
    path = local_system_path() if out is None else out
    if path is None:
        raise UserError(
            "this user has no home folder to write the system `local` to: set XDG_DATA_HOME, or give --out FILE.toml"
        )
    check_out(path, "TOML", "machine.toml")
    from longhelix.measure import host_link, progress
    from longhelix.measure.bench import host_layouts
    from longhelix.measure.bench.environment import environment
    from longhelix.measure.bench.predictions import sections
    from longhelix.measure.bench.report import BenchReport
    from longhelix.measure.bench.section import Section
    from longhelix.measure.calibrate.measurements import FULL, SHORT, Measurements
    from longhelix.measure.calibrate.system import local_system
    from longhelix.measure.memory import check_native
    from longhelix.perf.fit import LINK_CONSTANTS

    check_native()
    conditions = environment(datetime.now().astimezone().isoformat(timespec="seconds"))
    scope = SHORT if short else FULL
    config = scope.config(Layout(), "bfloat16")
    links: list[Section] = []
    on_point = progress.by_name(tell)
    with together(hosts) as met:
        measured = Measurements.take(scope, [config], on_point, met)
        system = local_system(measured, config, scope)
        if met is not None:
            rows, (linked,) = host_link.measure(system, met.hosts(met.nnodes), (None,), on_point("links"), met)
            constants = {name: linked.constants[name] for name in LINK_CONSTANTS}
            system = system.replaced(constants, linked.sources[LINK_CONSTANTS[0]])
            links.append(host_layouts.link_section(rows))
    write_system(system, path)
    report = BenchReport(conditions, [*sections(system, measured, [config], scope), *links])
    if json:
        print(json_module.dumps({"path": str(path)} | json_module.loads(report.as_json())))
        return
    show(report)
    print(f"Wrote {path}.")
