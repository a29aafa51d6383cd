"""The planner's page in a headless Chromium that has no network."""

import json
import re
import shutil
from dataclasses import replace

import psutil
import pytest

from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.plan import report
from longhelix.plan.answer import answer
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.page import write_page
from longhelix.plan.question import Question
from longhelix.plan.space import STRATEGIES
from longhelix.spec.presets import load_model, load_system

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver"),
]

SHOWN = """
const cells = (row) => Array.from(row.children, (cell) => cell.textContent);
const words = (id) => document.getElementById(id).textContent;
return {
  lines: Array.from(document.querySelectorAll("#frontier .line"), (line) =>
    [line.dataset.name, line.querySelectorAll(".mark").length, line.querySelector("path").getAttribute("d")]),
  target: document.querySelector("#frontier .target-name")?.textContent ?? null,
  gain: document.getElementById("gain")?.textContent ?? "",
  headline: words("headline"), title: words("chosen-title"), chosen: words("chosen"), items: words("items"),
  complaint: words("complaint"), captions: [words("attention-caption"), words("ffn-caption")],
  columns: cells(document.querySelector("#strategies thead tr")),
  rows: Array.from(document.querySelectorAll("#strategies tbody tr"), cells),
};
"""
SET = """
const control = document.getElementById(arguments[0]);
if (control.type === "checkbox") control.click(); else control.value = arguments[1];
control.dispatchEvent(new Event("input", { bubbles: true }));
"""
LAST = """
const lines = Array.from(document.querySelectorAll("#frontier .line"));
const line = lines.find(({ dataset }) => dataset.name === arguments[0]);
const box = Array.from(line.querySelectorAll(".mark")).at(-1).getBoundingClientRect();
return [box.x + box.width / 2, box.y + box.height / 2].map(Math.round);
"""
# Pairs of words and marks in the plot and its legend whose boxes meet, one of them the target's name.
OVERLAPS = """
const name = document.querySelector("#frontier .target-name").getBoundingClientRect();
const others = document.querySelectorAll("#frontier text:not(.target-name), #frontier .mark, #frontier .stroke, "
  + "#frontier .ring, #legend li, #frontier-title");
return Array.from(others).filter((each) => {
  const box = each.getBoundingClientRect();
  return box.left < name.right && name.left < box.right && box.top < name.bottom && name.top < box.bottom;
}).map((each) => each.textContent || each.getAttribute("class"));
"""
# What is wider than the screen, or than what holds it.
TOO_WIDE = """
const wide = Array.from(document.querySelectorAll("body *")).filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && getComputedStyle(each).position !== "absolute" && !each.closest("thead")
    && (box.right > document.documentElement.clientWidth + 0.5 || box.left < 0);
});
const scrolled = document.documentElement.scrollWidth > document.documentElement.clientWidth;
return [...wide.map(({ tagName, id, className }) => `${tagName} ${id} ${className}`), ...(scrolled ? ["page"] : [])];
"""
DENSE = Question(
    Setting(load_model("llama-3.1-405b"), load_system("gb200"), Dtypes("fp4", "fp4")),
    1_000_000, 16, ttl_s=0.03, ttft_s=400.0,
)  # fmt: skip
DEMAND = Demand((Kind(0.9, 10_000, 500), Kind(0.1, 100_000, 200)), rate_per_s=2.0)
SPARSE = Question(
    Setting(load_model("qwen3-30b-a3b"), load_system("h100"), Dtypes("bfloat16", "bfloat16")),
    DEMAND.longest, 16, ttl_s=0.03, ttft_s=30.0, demand=DEMAND, gpu_hour=2.5,
)  # fmt: skip
# As the page opens, with HOP-B.
TITLES = {strategy.name: strategy.title for strategy in STRATEGIES} | {"helix_exposed": "Helix"}


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,900",
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


class Written:
    """A plan's folder."""

    def __init__(self, folder, question, model):
        self.plan = answer(question)
        self.object = {"model": model} | report.as_json(self.plan, 1.0, [], [], [])
        self.page, self.json = folder / f"{model}.html", folder / f"{model}.json"
        write_page(self.page, self.plan, self.object)
        self.json.write_text(json.dumps(self.object))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("dense"), DENSE, "llama-3.1-405b")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("sparse"), SPARSE, "qwen3-30b-a3b")


def _opened(browser, written):
    """The page as it opens; no test may leave an error in the console, or have asked for anything but files."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(written.page.as_uri())
    browser.find_element("css selector", "#frontier .mark")
    yield browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert written.page.as_uri() in requested
    assert {url.split(":")[0] for url in requested} <= {"file", "data", "blob"}


@pytest.fixture
def page(browser, dense):
    yield from _opened(browser, dense)


@pytest.fixture
def demanded(browser, sparse):
    yield from _opened(browser, sparse)


def shown(page):
    return page.execute_script(SHOWN)


def number(words):
    return float(re.sub("[^0-9.]", "", words))


def fitting(found):
    """The rows of strategies that have numbers."""
    rows = [row for row in found["rows"] if len(row) == len(found["columns"])]
    assert rows
    assert all(row[1:] == ["does not fit"] for row in found["rows"] if row not in rows)
    return rows


def row_of(found, title):
    return dict(next(zip(found["columns"], row, strict=False) for row in found["rows"] if row[0] == title))


def check_row(row, choice):
    """A row of the table against what Python chose, in the digits that it has."""
    expected = {
        "Tokens/s per user": choice.tokens_per_s_per_user,
        "Tokens/s per GPU": choice.tokens_per_s_per_gpu,
        "ms during a prefill": 1e3 * choice.ttl_p95_s,
        "TTFT, s": choice.ttft_s,
        "Users": choice.users,
        "GPUs": choice.gpus,
    }
    if choice.rate_per_s is not None:
        expected["Requests/s"] = choice.rate_per_s
    if choice.cost_per_million_tokens is not None:
        expected["Cost of 1M tokens"] = choice.cost_per_million_tokens
    assert {name: number(row[name]) for name in expected} == pytest.approx(expected, rel=6e-3)


def test_the_page_opens_with_the_plans_answer(page, dense):
    found, best = shown(page), dense.plan.best
    assert found["title"] == "The best within the targets"
    assert found["target"] == "30 ms per token"
    assert found["columns"] == [
        "Strategy", "Tokens/s per user", "Tokens/s per GPU", "ms during a prefill", "TTFT, s", "Users", "Requests/s",
        "Cost of 1M tokens", "GPUs",
    ]  # fmt: skip
    check_row(row_of(found, TITLES[best.strategy]), best)
    assert "attention" in found["items"]
    assert page.find_element("id", "length-shown").text == "1M tokens"
    assert page.find_element("id", "rate").get_attribute("disabled")


def test_a_demands_page_opens_with_the_plans_answer(demanded, sparse):
    found, best = shown(demanded), sparse.plan.best
    assert found["title"] == "The best within the targets"
    check_row(row_of(found, TITLES[best.strategy]), best)
    assert number(demanded.find_element("id", "rate").get_attribute("value")) == 2
    assert number(demanded.find_element("id", "price").get_attribute("value")) == 2.5


def test_drafts_are_in_the_pages_answer_as_in_the_plans(browser, tmp_path):
    setting = replace(SPARSE.setting, drafts=Drafts(3, 2.25))
    drafted = Written(tmp_path, replace(SPARSE, setting=setting), "drafted")
    for page in _opened(browser, drafted):
        found, best = shown(page), drafted.plan.best
        check_row(row_of(found, TITLES[best.strategy]), best)
        title = page.find_element("id", "step-title").text
        assert title.startswith("One token's share of a decode step with 2.25 tokens on one GPU: ")


def test_the_headline_is_the_answer_and_then_the_gains(page, dense):
    found, plan = shown(page), dense.plan
    best = plan.best
    assert page.find_element("id", "answer").text == f"{best.users} users on {best.gpus} GPUs"
    assert found["headline"].startswith(f"{best.users} users on {best.gpus} GPUs")
    ratio = r"At {} ms per token, Helix has ([0-9.]+)× the tokens/s per GPU of the best other strategy"
    assert re.match(ratio.format(30), found["gain"])[1] == f"{plan.at_ttl.ratio:.2f}"
    assert number(re.search("Largest gain of Helix: ([0-9.]+)×", found["gain"])[1]) == pytest.approx(
        plan.headline.throughput, rel=6e-3
    )
    page.execute_script(SET, "ttl", "31")
    moved = shown(page)
    assert number(re.match(ratio.format(31), moved["gain"])[1]) == pytest.approx(plan.at_ttl.ratio, rel=0.1)
    page.execute_script(SET, "ttl", "0.001")
    assert "no strategy gets there" in shown(page)["gain"]
    assert "it misses a target" in shown(page)["headline"]
    page.execute_script(SET, "ttl", "")
    assert shown(page)["gain"].startswith("Largest gain of Helix")
    assert shown(page)["target"] is None


@pytest.mark.parametrize(("control", "setting"), [("length", 1), ("gpus", 3), ("dtypes", 2), ("hop-b", None)])
def test_a_control_changes_the_frontiers(page, control, setting):
    before = shown(page)
    page.execute_script(SET, control, setting)
    assert shown(page)["lines"] != before["lines"]


@pytest.mark.parametrize(
    ("control", "setting"), [("ttl", "20"), ("ttlBeside", "100"), ("ttft", "150"), ("users", "60"), ("fewest", None)]
)
def test_a_target_changes_the_best_and_is_kept(page, control, setting):
    before = shown(page)
    page.execute_script(SET, control, setting)
    after = shown(page)
    assert (after["title"], after["rows"]) != (before["title"], before["rows"])
    assert after["lines"] == before["lines"]
    if "closest" in after["title"]:
        assert "It misses" in after["chosen"]
        assert all("✗" in " ".join(row) for row in fitting(after))
        return
    kept = [dict(zip(after["columns"], row, strict=True)) for row in fitting(after) if "✗" not in " ".join(row)]
    assert kept
    limits = {"ttlBeside": ("ms during a prefill", 1), "ttft": ("TTFT, s", 1), "users": ("Users", -1)}
    if control in limits:
        column, sign = limits[control]
        assert all(sign * number(row[column]) <= sign * float(setting) * (1 + sign * 1e-2) for row in kept)


def test_the_price_makes_the_cost(page):
    assert {row[7] for row in fitting(shown(page))} == {"–"}
    page.execute_script(SET, "price", "3.6")
    for row in fitting(shown(page)):
        assert number(row[7]) == pytest.approx(1000 / number(row[2]), rel=1e-2)


def test_a_rate_takes_replicas(demanded):
    before = {row[0]: number(row[8]) for row in shown(demanded)["rows"]}
    demanded.execute_script(SET, "rate", "0.01")
    found = shown(demanded)
    assert all(number(row[8]) <= before[row[0]] for row in found["rows"])
    assert any(number(row[8]) < before[row[0]] for row in found["rows"])
    demanded.execute_script(SET, "rate", "")
    rates = [number(row[6]) for row in shown(demanded)["rows"] if "✗" not in " ".join(row)]
    assert max(rates) > 0.01


@pytest.mark.parametrize(
    ("control", "wrong", "words"),
    [
        ("ttl", "0", "Set ms per token to a number above 0, or leave it empty."),
        ("ttft", "-1", "Set TTFT to a number above 0, or leave it empty."),
        ("users", "1.5", "Set users to an integer of 1 or more, or leave it empty."),
        ("price", "0", "Set the price of a GPU hour to a number above 0, or leave it empty."),
    ],
)
def test_a_number_that_cannot_be_is_named_in_one_sentence(page, control, wrong, words):
    before = shown(page)
    page.execute_script(SET, control, wrong)
    assert shown(page) == before | {"complaint": words}
    assert page.find_element("id", control).get_attribute("aria-invalid") == "true"
    page.find_element("id", "reset").click()
    assert shown(page) == before


def test_users_beside_a_rate_are_named(demanded):
    demanded.execute_script(SET, "users", "3")
    assert shown(demanded)["complaint"].startswith("The number of users follows from the rate")


def test_what_does_not_fit_is_said_with_what_is_short(page):
    page.execute_script(SET, "gpus", 0)
    found = shown(page)
    assert found["title"] == "Nothing fits"
    assert "GB per GPU" in found["chosen"]
    assert not page.find_element("id", "step-title").is_displayed()


def test_requests_apart_are_labelled_so(demanded):
    name = next(
        button
        for button in demanded.find_elements("css selector", "#strategies tbody button")
        if button.text == "DP attention + EP"
    )
    name.click()
    found = shown(demanded)
    assert re.search(r"DP attention \+ EP: (\d+ × )?DP \d+ × TPA", found["chosen"])
    assert found["captions"][0].startswith("Attention: DP ")
    assert "KVP" not in found["captions"][0] + found["chosen"]


def test_groups_of_kvp_ranks_are_drawn_whole(page):
    row = next(each for each in page.find_elements("css selector", "#strategies button") if each.text == "DP x KVP")
    row.click()
    found = shown(page)
    words, *degrees = re.search(r"DP (\d+) × KVP (\d+) × TPA (\d+)", found["chosen"]).group(0, 1, 2, 3)
    dp, kvp, tpa = map(int, degrees)
    assert found["captions"][0] == f"Attention: {words}"
    cells = page.find_elements("css selector", "#attention-grid > div")
    assert len(cells) == dp * kvp * tpa
    webdriver.ActionChains(page).move_to_element(cells[-1]).perform()
    told = page.find_element("id", "gpu").text
    assert f"{dp - 1} of {dp}, KVP rank {kvp - 1} of {kvp}" in told
    assert f"blocks {kvp - 1}, {2 * kvp - 1}, " in told
    assert f"one request in {dp}" in told


def test_without_hop_b_no_strategy_has_it(page):
    assert {"Helix", "DP x KVP"} <= {row[0] for row in shown(page)["rows"]}
    page.execute_script(SET, "hop-b", None)
    titles = {row[0] for row in shown(page)["rows"]}
    assert "Helix without HOP-B" in titles
    assert titles.isdisjoint({"Helix", "DP x KVP"})


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("ttl_ms", ["1", "8", "30", "60", "5000"])
def test_nothing_overlaps_the_targets_name(page, width, ttl_ms):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    page.execute_script(SET, "ttl", ttl_ms)
    assert page.execute_script(OVERLAPS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_screen(demanded, dense, width, scheme):
    demanded.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    demanded.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    demanded.find_element("id", "other-plan").send_keys(str(dense.json))
    demanded.find_element("css selector", "#compared-frontiers .mark")
    demanded.execute_script(SET, "price", "98765")  # long numbers
    demanded.execute_script(SET, "rate", "")
    assert demanded.execute_script(TOO_WIDE) == []
    background = demanded.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")


def test_a_click_on_a_point_shows_its_configuration(page):
    x, y = page.execute_script(LAST, "Helix")
    actions = webdriver.ActionChains(page)
    actions.w3c_actions.pointer_action.move_to_location(x, y).click()
    actions.perform()
    found = shown(page)
    assert found["title"] == "Your selection"
    assert "Helix: " in found["chosen"]
    assert page.find_element("id", "readout").text == ""
    page.find_element("id", "back").click()
    assert shown(page)["title"] == "The best within the targets"


def test_the_keyboard_reaches_everything(page):
    reached, keys = [], webdriver.Keys
    page.execute_script("document.activeElement.blur()")
    for _ in range(44):
        webdriver.ActionChains(page).send_keys(keys.TAB).perform()
        reached.append(page.execute_script("return document.activeElement.id || document.activeElement.textContent"))
    for wanted in ("length", "gpus", "ttl", "ttlBeside", "ttft", "users", "price", "dtypes", "fewest", "hop-b", "reset",
                   "frontier", "Helix", "attention-grid", "ffn-grid", "other-plan"):  # fmt: skip
        assert wanted in reached
    frontier = page.find_element("id", "frontier")
    frontier.send_keys(keys.ARROW_RIGHT)
    first = shown(page)
    assert first["title"] == "Your selection"
    readout = page.find_element("id", "readout").text
    assert "tokens/s per user" in readout
    frontier.send_keys(keys.ARROW_RIGHT)
    assert page.find_element("id", "readout").text != readout
    frontier.send_keys(keys.ARROW_UP)
    assert shown(page)["title"] == "Your selection"
    page.find_element("css selector", "#strategies button[aria-pressed='false']").send_keys(keys.ENTER)
    assert shown(page)["chosen"] != first["chosen"]
    page.find_element("id", "back").send_keys(keys.ENTER)
    assert shown(page)["title"] == "The best within the targets"


def test_arrow_keys_go_from_gpu_to_gpu(page):
    grid = page.find_element("id", "attention-grid")
    words = page.find_element("id", "gpu").text
    grid.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert page.find_element("css selector", "#gpu dd").text == "1"
    assert page.find_element("id", "gpu").text != words


@pytest.mark.parametrize("kind", ["json", "page"])
def test_two_plans_are_side_by_side(page, dense, sparse, kind):
    page.find_element("id", "other-plan").send_keys(str(getattr(sparse, kind)))
    page.find_element("css selector", "#compared-frontiers .mark")
    rows = page.execute_script(
        "return Array.from(document.querySelectorAll('#answers tbody tr'), (row) => "
        "Array.from(row.children, (cell) => cell.textContent))"
    )
    told = {name: (ours, other) for name, ours, other in rows}
    assert told["Model"] == ("llama-3.1-405b on gb200", "qwen3-30b-a3b on h100")
    for name, field in (("Tokens/s per GPU", "tokens_per_s_per_gpu"), ("GPUs", "gpus"), ("Users", "users")):
        expected = [getattr(each.plan.best, field) for each in (dense, sparse)]
        assert [number(words) for words in told[name]] == pytest.approx(expected, rel=6e-3)
    assert told["Cost of 1M tokens"][0] == "–"
    lines = page.find_elements("css selector", "#compared-frontiers .line")
    assert [line.get_attribute("data-name") for line in lines] == ["This plan", "Other plan"]
    page.find_element("id", "compare-close").click()
    assert not page.find_element("id", "compared").is_displayed()


def test_a_file_that_is_no_plan_is_named(page, tmp_path):
    for name, content in (("a.json", "{}"), ("b.html", "<p>no plan"), ("c.json", "nothing")):
        (tmp_path / name).write_text(content)
        page.find_element("id", "other-plan").send_keys(str(tmp_path / name))
        words = f"{name} is not a plan: choose the plan.json or plan.html of another plan."
        page.find_element("xpath", f"//*[@id='compare-note'][text()='{words}']")
        assert not page.find_element("id", "compared").is_displayed()
