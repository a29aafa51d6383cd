"""A simulation's page in a headless Chromium that has no network: every plot has a line for each run."""

import shutil

import pytest

from longhelix.cli.main import main

pytest.importorskip("plotly", reason="needs plotly, of the extra plan")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver"),
]
SHOWN = """
const lines = (id) => document.getElementById(id).data.map(({ name, x }) => [name, Array.from(x).length]);
const plots = ["ttft", "tbt", "kv_tokens", "kvp_mean", "running", "waiting"];
return {
  plots: Object.fromEntries(plots.map((id) => [id, lines(id)])),
  table: document.getElementById("runs").textContent,
  capacity: document.getElementById("capacity-section").hidden,
};
"""


@pytest.fixture
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--host-resolver-rules=MAP * ~NOTFOUND"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.implicitly_wait(30)
    yield driver
    driver.quit()


def test_the_page_shows_all_runs(browser, tmp_path):
    arguments = ("simulate", "--model", "llama-3.1-405b", "--system", "gb200", "--tpa", "8", "--synthetic")
    assert main([*arguments, "--requests", "20", "--policy", "fcfs,srpt", "--out", str(tmp_path)]) == 0
    browser.get((tmp_path / "simulation.html").as_uri())
    browser.find_element("css selector", "#waiting .scatterlayer path")
    shown = browser.execute_script(SHOWN)
    for plot, lines in shown["plots"].items():
        assert [name.split(",")[0] for name, _ in lines] == ["fcfs", "srpt"], plot
        assert all(points > 1 for _, points in lines), plot
    assert "20 / 20" in shown["table"]
    assert shown["capacity"] is True
    assert browser.get_log("browser") == []
