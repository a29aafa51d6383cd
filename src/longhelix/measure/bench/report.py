"""Reports of benchmarks, as tables in the terminal, as Markdown and as JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from longhelix.measure.bench import plots
from longhelix.measure.bench.environment import IDLE_LOAD
from longhelix.measure.bench.section import Section

# A median is noisy if the difference of its quartiles is more than this fraction of the median.
NOISE = 0.2
MEDIANS = (
    "Times are medians over several rounds. In each round, the compared cases run in turn. spread: difference of the "
    "quartiles, relative to the median."
)


@dataclass
class BenchReport:
    """Results of one run of benchmarks."""

    environment: dict[str, object]
    sections: list[Section] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # sentences that say which cases were not measured, and why

    @property
    def sentences(self) -> list[str]:
        """The remarks, and warnings if the machine was busy or times are noisy."""
        found = list(self.remarks)
        load = self.environment["load_average"][0]
        if load > IDLE_LOAD and self._about_times:
            found.append(
                f"The machine was not idle: its load was {load} at the start of the run. Compare ratios instead of "
                "times."
            )
        rows = (row for section in self.sections for row in section.rows)
        spreads = [row["spread"] for row in rows if row.get("spread") is not None]
        noisy = sum(spread > NOISE for spread in spreads)
        if noisy:
            found.append(
                f"{noisy} of {len(spreads)} medians are noisy: their quartiles are more than {NOISE:.0%} of the median "
                "apart."
            )
        return found

    @property
    def _about_times(self) -> list[str]:
        """How times were measured, if the report has times."""
        return [MEDIANS] if any("spread" in row for section in self.sections for row in section.rows) else []

    def as_json(self) -> str:
        """The report as JSON text."""
        sections = {section.name: {"note": section.note, "rows": list(section.rows)} for section in self.sections}
        return json.dumps({"environment": self.environment, "remarks": self.sentences, **sections})

    def shown(self) -> list[Table | str]:
        """Tables and sentences for the terminal, in order."""
        tables = []
        for section in self.sections:
            table = Table(title=section.title, title_justify="left", caption=section.note, caption_justify="left")
            for column in section.columns:
                table.add_column(column.title, justify="right" if column.format else "left")
            for row in section.rows:
                table.add_row(*(column.show(row) for column in section.columns))
            tables.append(table)
        return [_conditions(self.environment), *tables, *self._about_times, *self.sentences]

    def as_markdown(self, images: dict[str, str]) -> str:
        """The report as Markdown text. `images` maps the names of sections to file names of images."""
        about = [_conditions(self.environment), *self._about_times]
        lines = [f"# longhelix bench, {self.environment['date']}", "", *about, ""]
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
        """Write Markdown to `path`, and JSON and plots next to it.

        If matplotlib is not installed, the report has a remark instead of plots.
        """
        drawn = [section for section in self.sections if section.plot]
        if drawn and not plots.available():
            drawn = []
            self.remarks.append("No plots, because matplotlib is not installed: run pip install 'longhelix[bench]'.")
        path.with_suffix(".json").write_text(self.as_json() + "\n", encoding="utf-8")
        images = {section.name: plots.draw(section, path) for section in drawn}
        path.write_text(self.as_markdown(images), encoding="utf-8")


def _conditions(environment: dict[str, object]) -> str:
    """Describe the environment in one sentence."""
    total_gb, free_gb = (environment[name] / 1e9 for name in ("memory_bytes", "available_memory_bytes"))
    load = ", ".join(map(str, environment["load_average"]))
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['instruction_set']} kernels; "
        f"{total_gb:.0f} GB of memory, {free_gb:.0f} GB free; longhelix {environment['longhelix']} "
        f"({environment['commit'] or 'no checkout'}), torch {environment['torch']}, Python {environment['python']}, "
        f"{environment['system']}; load averages at the start: {load}."
    )
