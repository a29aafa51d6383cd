"""Write a reproduction as Markdown or as one JSON object."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from longhelix.figures.claims import TOLERANCE, Claim, Reproduction, Table


def as_dict(found: Reproduction) -> dict[str, Any]:
    """Return the reproduction as a JSON object. The keys are stable, so scripts can rely on them."""
    return {
        "paper": found.name,
        "title": found.title,
        "system": found.system.name,
        "conditions": list(found.conditions),
        "claims": [_claim(claim) for claim in found.claims],
        "constants": [
            {"name": constant.name, "value": constant.value, "source": constant.source, "fitted": constant.fitted}
            for constant in found.constants
        ],
        "tables": {
            table.name: {"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}
            for table in found.tables
        },
        "left_out": list(found.left_out),
        "drawings": [drawing.name for drawing in found.drawings],
    }


def as_markdown(found: Reproduction) -> str:
    """Return the report as Markdown. The report lists the drawings but does not include them."""
    fitted = [constant for constant in found.constants if constant.fitted]
    modelled = [claim for claim in found.claims if not claim.formula]
    outside = [claim for claim in modelled if not claim.holds]
    blocks = [
        f"# {found.title}: published and modelled numbers",
        f"Written by `longhelix figures {found.name} --out DIR`. The performance model, with {len(fitted)} fitted "
        f"constants, predicts {len(modelled)} numbers. {len(modelled) - len(outside)} of these numbers are within "
        f"{TOLERANCE:.0%} of the paper or satisfy the published bound. {len(found.claims) - len(modelled)} other "
        "numbers do not depend on fitted constants.",
        "## Published and modelled numbers",
        _markdown(claims_table(found)),
        *_noted(found.claims),
        "## Conditions",
        *(f"- {condition}" for condition in found.conditions),
        f"## Constants of {found.system.name}",
        _rows(("constant", "value", "source"), ((c.name, f"{c.value:g}", c.source) for c in found.constants)),
        *(block for table in found.tables for block in (f"## {table.title}", _markdown(table), table.note) if block),
        *(["## Not modelled", *(f"- {line}" for line in found.left_out)] if found.left_out else []),
        "## Figures",
        *(f"- {drawing.name}: {drawing.title}" for drawing in found.drawings),
    ]
    return _joined(blocks)


def claims_table(found: Reproduction) -> Table:
    """Return a table with one row per claim: the published and modelled numbers, and their relative difference."""
    rows = tuple(
        (claim.figure, claim.what, claim.setting, _number(claim.published, claim.unit, claim.bound),
         _number(claim.modelled, claim.unit), f"{claim.residual:+.1%}" + ("" if claim.holds else " (outside)"))
        for claim in found.claims
    )  # fmt: skip
    return Table("claims", "Published and modelled numbers", _CLAIM_COLUMNS, rows)


_CLAIM_COLUMNS = ("figure", "what", "setting", "published", "modelled", "residual")


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "figure": claim.figure,
        "what": claim.what,
        "setting": claim.setting,
        "bound": claim.bound,
        "published": claim.published,
        "modelled": claim.modelled,
        "unit": claim.unit,
        "residual_percent": 100 * claim.residual,
        "holds": claim.holds,
        "formula": claim.formula,
        "note": claim.note,
    }


def _noted(claims: Sequence[Claim]) -> list[str]:
    return [f"- {claim.figure}, {claim.what} ({claim.setting}): {claim.note}." for claim in claims if claim.note]


def _number(value: float, unit: str, bound: str = "") -> str:
    return f"{bound} {value:,.4g} {unit}".strip() if value < 10_000 else f"{bound} {value:,.0f} {unit}".strip()


def _markdown(table: Table) -> str:
    return _rows(table.columns, (tuple(map(_cell, row)) for row in table.rows))


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else _number(value, "")


def _rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _joined(blocks: Sequence[str]) -> str:
    """Join blocks with blank lines, and items of a list without blank lines."""
    text = blocks[0]
    for before, block in pairwise(blocks):
        text += ("\n" if before.startswith("- ") and block.startswith("- ") else "\n\n") + block
    return text + "\n"
