"""What was measured, for people and for programs: tables in the terminal, Markdown, JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from longhelix.measure.bench import plots
from longhelix.measure.bench.environment import IDLE_LOAD
from longhelix.measure.bench.section import Section

# Quartiles further apart than this share of the median are called noisy.
NOISE = 0.2
MEDIANS = "Times are medians of rounds in which what is compared takes turns; spread is from quartile to quartile."


@dataclass
class Report:
    """Sections of one run, with its environment. `remarks`: sentences on what was left out and why."""

    environment: dict[str, object]
    sections: list[Section] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """The remarks, and whether the machine was busy and the numbers noisy."""
        found = list(self.remarks)
        load = self.environment["load_average"][0]
        if load > IDLE_LOAD:
            found.append(f"The machine was not idle: its load was {load} when the run began. Quote ratios, not times.")
        rows = (row for section in self.sections for row in section.rows)
        spreads = [row["spread"] for row in rows if row.get("spread") is not None]
        noisy = sum(spread > NOISE for spread in spreads)
        if noisy:
            found.append(
                f"{noisy} of {len(spreads)} medians are noisy: their quartiles lie more than {NOISE:.0%} of the median "
                "apart."
            )
        return found

    def as_json(self) -> str:
        sections = {section.name: {"note": section.note, "rows": list(section.rows)} for section in self.sections}
        return json.dumps({"environment": self.environment, "remarks": self.sentences, **sections})

    def shown(self) -> list[Table | str]:
        """Tables and sentences, in the order in which a terminal shows them."""
        tables = []
        for section in self.sections:
            table = Table(title=section.title, title_justify="left", caption=section.note, caption_justify="left")
            for column in section.columns:
                table.add_column(column.title, justify="right" if column.format else "left")
            for row in section.rows:
                table.add_row(*(column.show(row) for column in section.columns))
            tables.append(table)
        return [_conditions(self.environment), *tables, MEDIANS, *self.sentences]

    def as_markdown(self, images: dict[str, str]) -> str:
        """The report in Markdown. `images`: a section's name to the file name of its image."""
        lines = [f"# longhelix bench, {self.environment['date']}", "", _conditions(self.environment), MEDIANS, ""]
        lines += [f"- {sentence}" for sentence in self.sentences] + [""] * bool(self.sentences)
        for section in self.sections:
            lines += [f"## {section.title}", "", section.note, ""]
            lines.append("| " + " | ".join(column.title for column in section.columns) + " |")
            lines.append("|" + "|".join("--:" if column.format else "---" for column in section.columns) + "|")
            lines += ["| " + " | ".join(column.show(row) for column in section.columns) + " |" for row in section.rows]
            lines.append("")
            if section.name in images:
                lines += [f"![{section.title}]({images[section.name]})", ""]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Markdown at `path`, JSON and plots beside it; without matplotlib a sentence in place of the plots."""
        drawn = [section for section in self.sections if section.plot]
        if drawn and not plots.available():
            drawn = []
            self.remarks.append("No plots: matplotlib is not installed; install longhelix[bench].")
        path.with_suffix(".json").write_text(self.as_json() + "\n", encoding="utf-8")
        images = {section.name: plots.draw(section, path) for section in drawn}
        path.write_text(self.as_markdown(images), encoding="utf-8")


def _conditions(environment: dict[str, object]) -> str:
    """The environment in one sentence."""
    total_gb, free_gb = (environment[name] / 1e9 for name in ("memory_bytes", "available_memory_bytes"))
    load = ", ".join(map(str, environment["load_average"]))
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['instruction_set']} kernels; "
        f"{total_gb:.0f} GB of memory, {free_gb:.0f} GB of it free; longhelix {environment['longhelix']} "
        f"({environment['commit'] or 'no checkout'}), torch {environment['torch']}, Python {environment['python']}, "
        f"{environment['system']}; load averages at the start {load}."
    )
