"""Many streams for a minute while clients go away and ranks are killed; benchmarks/load.py has more of them for ten."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load.py"
OPTIONS = {"seconds": 60, "streams": 8, "prompt-tokens": 24, "new-tokens": 24, "kill": 0.04, "checked": 10}


@pytest.mark.timeout(280)
def test_no_token_is_lost_and_every_stream_ends_once():
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"started again (\d+) times", done.stdout)[1]) >= 1
    assert int(re.search(r"(\d+) cancelled", done.stdout)[1]) >= 1
    assert int(re.search(r"(\d+) length", done.stdout)[1]) >= 20
    print(done.stdout)
