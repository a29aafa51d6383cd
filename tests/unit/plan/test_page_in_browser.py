"""The planner's page in a headless Chromium that has no network."""

import json
import shutil

import psutil
import pytest

from longhelix.plan.page import write_page
from longhelix.presets import load_model, load_system

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
const plot = document.getElementById("frontier");
return {
  lines: plot.data.map(({ name, x, y }) => [name ?? "", Array.from(x), Array.from(y)]),
  target: plot.layout.shapes?.map(({ x0 }) => x0) ?? [],
  title: document.getElementById("chosen-title").textContent,
  chosen: document.getElementById("chosen").textContent,
  items: document.getElementById("items").textContent,
  layout: document.getElementById("layout-title").textContent,
};
"""
SET = """
const control = document.getElementById(arguments[0]);
if (control.type === "checkbox") control.click(); else control.value = arguments[1];
control.dispatchEvent(new Event("input", { bubbles: true }));
"""
FASTEST = """
const plot = document.getElementById("frontier");
const line = plot.data.findIndex(({ name }) => name === arguments[0]);
const points = plot.querySelectorAll(".scatterlayer .trace")[line].querySelectorAll(".points path");
const box = points[points.length - 1].getBoundingClientRect();
return [box.x + box.width / 2, box.y + box.height / 2].map(Math.round);
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(30)
    driver.implicitly_wait(30)
    processes = [driver.service.process, *psutil.Process(driver.service.process.pid).children(recursive=True)]
    yield driver
    driver.quit()
    _, alive = psutil.wait_procs([psutil.Process(each.pid) for each in processes if psutil.pid_exists(each.pid)], 10)
    assert not alive


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(
        path, load_model("llama-3.1-405b"), "llama-3.1-405b", load_system("gb200"),
        max_gpus=16, context=1e6, weight_dtype="fp4", kv_dtype="fp4", ttl_s=0.02,
    )  # fmt: skip
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The page as it opens; no test may leave an error in the console, or have asked for anything but files."""
    browser.get(address)
    browser.find_element("css selector", "#frontier .scatterlayer .points path")
    yield browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert address in requested
    assert {url.split(":")[0] for url in requested} <= {"file", "data", "blob"}


def shown(page):
    return page.execute_script(SHOWN)


def test_the_page_opens_with_what_was_asked(page):
    found = shown(page)
    assert "Best within 20 ms per token" in found["title"]
    assert found["target"] == [pytest.approx(50)]
    assert "Helix" in [name for name, _, _ in found["lines"]]
    assert "attention" in found["items"]
    assert page.find_element("id", "context-shown").text == "1M tokens"
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("control", "setting"), [("context", 2), ("gpus", 3), ("weight-dtype", "bfloat16"), ("kv-dtype", "fp8")]
)
def test_a_control_changes_the_frontiers(page, control, setting):
    before = shown(page)
    page.execute_script(SET, control, setting)
    after = shown(page)
    assert after["lines"] != before["lines"]
    assert after["chosen"] != before["chosen"]


def test_without_hop_b_helix_is_another_line(page):
    before = [name for name, _, _ in shown(page)["lines"]]
    page.execute_script(SET, "hop-b", None)
    after = [name for name, _, _ in shown(page)["lines"]]
    assert ("Helix" in before, "Helix" in after) == (True, False)
    assert ("Helix without HOP-B" in before, "Helix without HOP-B" in after) == (False, True)


def test_the_target_moves_and_the_best_with_it(page):
    before = shown(page)
    page.execute_script(SET, "ttl", 0.35)
    after = shown(page)
    assert after["target"] != before["target"]
    assert (after["title"], after["chosen"], after["items"]) != (before["title"], before["chosen"], before["items"])


def test_a_target_out_of_reach_is_said_to_be(page):
    page.execute_script(SET, "ttl", 0)
    assert "No configuration takes" in shown(page)["chosen"]


def test_what_does_not_fit_is_said_with_what_is_short(page):
    page.execute_script(SET, "gpus", 0)
    assert "Nothing fits" in shown(page)["chosen"]
    assert "GB on a GPU" in shown(page)["chosen"]


def test_a_click_on_a_point_shows_its_configuration(page):
    x, y = page.execute_script(FASTEST, "Helix")
    actions = webdriver.ActionChains(page)
    actions.w3c_actions.pointer_action.move_to_location(x, y).click()
    actions.perform()
    found = shown(page)
    users = next(users for name, users, _ in found["lines"] if name == "Helix")
    assert found["title"] == "As picked"
    assert found["chosen"].startswith(f"{users[-1]:.4g} tokens/s per user")
    assert "Helix: KVP" in found["chosen"]
    page.find_element("id", "back").click()
    assert "Best within" in shown(page)["title"]


def test_a_strategys_row_shows_its_best(page):
    page.find_element("css selector", "#strategies button[aria-pressed='false']").click()
    assert shown(page)["title"] == "As picked"


def test_arrow_keys_go_from_gpu_to_gpu(page):
    grid = page.find_element("id", "attention-grid")
    words = page.find_element("id", "gpu").text
    grid.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert page.find_element("css selector", "#gpu dd").text == "1"
    assert page.find_element("id", "gpu").text != words
