"""What a release consists of: one version everywhere, and files that their readers accept."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import longhelix

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert longhelix.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_workflows_run_what_the_project_has():
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(file.read_text())
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"^make (\S+)$", step.get("run", ""), re.MULTILINE):
                    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                for path in re.findall(r"^(\.ci/\S+)$", step.get("run", ""), re.MULTILINE):
                    assert (ROOT / path).is_file()


def test_no_wheel_is_made_for_one_processor():
    assert "march=native" not in (ROOT / "CMakeLists.txt").read_text()
