"""`longhelix figures`: reproduces the figures and numbers of a paper with the performance model."""

import json
import sys
from pathlib import Path
from typing import Literal

from rich.table import Table

from longhelix.cli.planning import stdout
from longhelix.cli.values import Flag
from longhelix.errors import UserError
from longhelix.figures import drawings, report
from longhelix.figures.claims import Reproduction
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import HardwareSpec
from longhelix.spec.presets import load_model, load_system


def figures(paper: Literal["helix", "medha"], /, *, out: Path, json: Flag = False) -> None:
    """Reproduce the figures of a paper, and print its published numbers next to those of the performance model.

    Parameters
    ----------
    paper
        Paper to reproduce: helix (arXiv 2507.07120) or medha (arXiv 2409.17264).
    out
        Folder to write PAPER.md and the figures (PNG and SVG) to.
    json
        Print one JSON object instead of a table.
    """
    drawings.require()
    _make(out)
    print("computing predictions, which takes up to half a minute", file=sys.stderr)
    found = _helix() if paper == "helix" else _medha()
    try:
        (out / f"{found.name}.md").write_text(report.as_markdown(found), encoding="utf-8")
        for path in drawings.save(found.drawings, out):
            print(path, file=sys.stderr)
    except OSError as error:
        raise UserError(f"the folder {out} is not writable ({error.strerror}): set --out to another folder") from error
    _print(found, as_json=json)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be created ({error.strerror}): set --out to another folder"
        ) from error


def _system(name: str) -> HardwareSpec:
    """Load the system of a paper, with constants that are fitted only to that paper. Plans use the preset instead."""
    return load_system(str(Path(drawings.__file__).parent / "systems" / f"{name}.toml"))


def _helix() -> Reproduction:
    from longhelix.figures.helix import helix

    system = _system("gb200")
    r1, dense = (
        Setting(model=load_model(name), system=system, dtypes=Dtypes(weights="fp4", kv="fp4", attention="fp4"))
        for name in ("deepseek-r1", "llama-3.1-405b")
    )
    preset = Setting(r1.model, load_system("gb300"), Dtypes("nvfp4", "nvfp4"))
    return helix(r1, dense, load_model("helix-figure-1"), preset)


def _medha() -> Reproduction:
    from longhelix.figures.medha import medha

    system = _system("h100")
    bfloat16 = Dtypes("bfloat16", "bfloat16")
    small, large = (Setting(load_model(name), system, bfloat16) for name in ("llama-3-8b", "llama-3-70b"))
    return medha(small, large)


def _print(found: Reproduction, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_dict(found)))
        return
    table = Table(title=found.title)
    claims = report.claims_table(found)
    for column in claims.columns:
        table.add_column(column)
    for row in claims.rows:
        table.add_row(*map(str, row))
    stdout().print(table)
