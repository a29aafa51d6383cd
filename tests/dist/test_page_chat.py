"""The server's page in a headless Chromium, before a real engine of two ranks: every word and number of it is the
engine's, and nothing comes from elsewhere."""

import json
import re
import shutil
import threading
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from longhelix import LLM, Layout
from longhelix.serve.driver import Driver, Limits
from longhelix.serve.gate import AccessControl
from longhelix.serve.server import Address, _Server, run
from longhelix.serve.serving import Serving

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
WebDriverException = pytest.importorskip("selenium.common").WebDriverException
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver"),
]
KEY, MODEL = "a-key", "<b>small</b> & exact"
QUESTION = "What is the capital of France?"
Keys = webdriver.Keys
# Of every change of an answer and of the live view, what is shown then.
WATCH = """
window.shown = {texts: [], progress: [], live: []};
const text = (node) => node?.textContent ?? "";
new MutationObserver(() => {
  const answer = document.querySelector(".answer:last-child");
  shown.texts.push(text(answer?.querySelector(".text")));
  const bar = answer?.querySelector("progress");
  if (bar?.hasAttribute("value")) shown.progress.push([bar.value, bar.max, text(bar.nextSibling)]);
}).observe(document.getElementById("turns"), {subtree: true, childList: true, characterData: true, attributes: true});
new MutationObserver(() => shown.live.push({
  counts: [...document.querySelectorAll(".pool .counts")].map(text),
  requests: [...document.querySelectorAll("#requests li")].map((row) =>
    [Number(row.dataset.request), text(row.querySelector(".said")), text(row.querySelector(".blocks")),
     text(row.querySelector(".placement")), text(row.querySelector("em"))]),
  waiting: text(document.getElementById("waiting")),
})).observe(document.getElementById("requests"), {childList: true});
"""
# The least contrast of visible text, and whose it is.
CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const channels = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = (colour) => channels(colour).slice(0, 3).map((channel) => channel / 255)
  .map((share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4))
  .reduce((sum, share, place) => sum + share * [0.2126, 0.7152, 0.0722][place], 0);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (channels(colour)[3] === 255) return colour;
  }
};
let least = [21, ""];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.checkVisibility() || node.closest(".unseen") || node.closest(".skip")) continue;
  const [high, low] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < least[0]) least = [ratio, node.tagName + "." + node.className + " " + node.textContent.slice(0, 40)];
}
return least;
"""
# How far anything reaches beyond the window or its own room.
OVERFLOW = """
const rooms = [...document.querySelectorAll("main, header, #live, #chat, #turns, #composer")];
return [document.documentElement.scrollWidth - innerWidth,
  ...rooms.filter((node) => node.checkVisibility()).map((node) => node.scrollWidth - node.clientWidth)];
"""
DROP = """
const files = new DataTransfer();
for (const [name, text] of arguments[0]) files.items.add(new File([text], name, {type: "text/plain"}));
document.getElementById("chat").dispatchEvent(
  new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true}));
"""


class Served:
    """A server in this process, with all that its engine was seen to do."""

    def __init__(self, llm):
        self.llm, self.seen = llm, []
        driver = Driver(llm, Limits(64, 1_000_000))
        observe = driver.observe

        async def recorded():
            self.seen.append(await observe())
            return self.seen[-1]

        driver.observe = recorded
        self.serving = Serving(llm, driver, MODEL, 0)

    def chat(self, content, **fields):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | fields
        return self.client.post("/v1/chat/completions", json=body).json()

    def health(self):
        return self.client.get("/health").json()


@pytest.fixture(scope="module")
def server():
    with LLM("builtin", Layout(kvp=2), kv_cache_tokens=16384, max_model_len=8192, placement="striped") as llm:
        served, servers, urls, ready = Served(llm), [], [], threading.Event()
        started = _Server.startup

        def on_ready(url):
            urls.append(url)
            ready.set()

        async def startup(self, sockets=None):
            servers.append(self)
            await started(self, sockets)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Server, "startup", startup)
            address, admission = Address("127.0.0.1", 0, drain_s=5), AccessControl((KEY,), 10_000_000)
            thread = threading.Thread(target=run, args=(served.serving, admission, address, on_ready))
            thread.start()
            assert ready.wait(60)
        served.url = urls[0]
        try:
            with httpx.Client(base_url=served.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
                served.client = client
                yield served
        finally:
            servers[0].should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    driver.implicitly_wait(20)
    processes = [driver.service.process, *psutil.Process(driver.service.process.pid).children(recursive=True)]
    yield driver
    driver.quit()
    _, alive = psutil.wait_procs([psutil.Process(each.pid) for each in processes if psutil.pid_exists(each.pid)], 10)
    assert not alive


@pytest.fixture
def page(browser, server):
    """The page as it opens with a key. No test may leave an error in the console, or have asked another host."""
    resize(browser, 1280, 900)
    browser.get(server.url)
    browser.execute_script("sessionStorage.setItem('longhelix-key', arguments[0]); localStorage.clear()", KEY)
    browser.get_log("browser")
    browser.refresh()
    until(lambda: browser.find_element("id", "connection").text == "Connected")
    until(lambda: browser.find_element("css selector", ".pool .counts").text)
    browser.execute_script(WATCH)
    yield browser
    until(lambda: server.health()["running"] == server.health()["waiting"] == 0)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    hosts = {urlsplit(url).netloc for url in requested if not url.startswith("data:")}
    assert hosts == {urlsplit(server.url).netloc}


def until(holds, seconds=150):
    deadline_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.05)


def resize(browser, width, height):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def sampling(page, **fields):
    for name, value in fields.items():
        page.execute_script(
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))",
            name.replace("_", "-"),
            str(value),
        )


def ask(page, text):
    page.find_element("id", "question").send_keys(text, Keys.ENTER)


def answered(page):
    until(lambda: page.find_element("id", "send").text == "Send")
    return page.execute_script(
        "const answer = document.querySelector('.answer:last-child');"
        "return [answer.querySelector('.text').textContent, answer.querySelector('.figures').textContent]"
    )


def shown(page, what):
    return page.execute_script("return window.shown[arguments[0]]", what)


def test_the_page_asks_for_the_key_that_the_server_wants(browser, server):
    browser.get(server.url)
    until(lambda: browser.find_element("id", "connection").text == "Wants a key")
    field = browser.switch_to.active_element
    assert field.get_attribute("id") == "key"
    field.send_keys("wrong", Keys.ENTER)
    until(lambda: browser.switch_to.active_element.get_attribute("id") == "key")
    field.clear()
    field.send_keys(KEY, Keys.ENTER)
    until(lambda: browser.find_element("id", "connection").text == "Connected")
    assert browser.find_element("id", "model").text == MODEL
    assert all("401" in entry["message"] for entry in browser.get_log("browser"))


def test_an_answer_comes_piece_by_piece_and_is_the_apis(page, server):
    expected = server.chat(QUESTION, max_tokens=40)
    sampling(page, temperature=0, max_tokens=40)
    ask(page, QUESTION)
    text, figures = answered(page)
    assert text == expected["choices"][0]["message"]["content"].strip()
    usage = expected["usage"]
    assert f"{usage['completion_tokens']} tokens" in figures
    assert f"prompt {usage['prompt_tokens']}" in figures
    assert "to the first token" in figures
    texts = shown(page, "texts")
    assert len({each for each in texts if each}) >= 3
    assert all(text.startswith(each.strip()) for each in texts)
    announced = page.execute_script("return document.getElementById('announcer').textContent")
    assert announced.strip() == text
    again = page.find_element("css selector", ".answer .again")
    again.click()
    assert answered(page)[0] == text
    assert len(page.find_elements("css selector", ".answer")) == 1
    page.find_element("id", "clear").click()
    assert page.find_element("id", "welcome").is_displayed()


def test_a_stop_ends_the_request_on_the_server(page, server):
    sampling(page, temperature=0, max_tokens=2000)
    ask(page, "Write a very long story about a river.")
    until(lambda: page.execute_script("return document.querySelector('.answer .text').textContent"))
    assert server.health()["running"] == 1
    assert page.find_element("id", "send").text == "Stop"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    text, figures = answered(page)
    until(lambda: server.health()["running"] == 0, 10)
    assert text
    assert figures.startswith("Stopped. ")


def test_a_dropped_document_is_read_and_its_blocks_are_seen(page, server):
    document = "".join(f"Line {line} says that {line * 7 % 101} is a number. " for line in range(140))
    name, question = '<img src="x" onerror="fail()">.txt', "Which number comes first? <i>Answer</i> shortly."
    content = f'Document "{name}":\n\n{document}\n\n{question}'
    ids = server.llm.tokenizer.encode_chat([{"role": "user", "content": content}])
    assert len(ids) > 1500
    server.seen.clear()
    page.execute_script("window.shown.live.length = 0")
    page.execute_script(DROP, [[name, document], ["a.bin", "\0"]])
    until(lambda: page.find_elements("css selector", "#documents .name"))
    assert page.find_element("css selector", "#documents .name").text == name
    assert f"{len(document) / 1000:.3g} kB" in page.find_element("css selector", "#documents .quiet").text
    assert "a.bin is not plain text" in page.find_element("id", "composer-note").text
    sampling(page, temperature=0, max_tokens=60)
    ask(page, question)
    text, figures = answered(page)
    until(lambda: server.health()["running"] == 0)
    assert f"prompt {len(ids):,}" in figures

    progress = shown(page, "progress")
    values = [value for value, _, _ in progress]
    assert values == sorted(values)
    assert len(set(values)) >= 2
    assert {most for _, most, _ in progress} == {len(ids)}
    assert all(words.startswith(f"Reading {value:,} of {len(ids):,} tokens") for value, _, words in progress)
    assert any("tokens/s" in words for _, _, words in progress)

    looks = [look(seen) for seen in server.seen]
    live = shown(page, "live")
    assert all(each in looks for each in [without_client(each) for each in live])
    ours = [request for each in live for request in each["requests"] if request[4] == "this page"]
    both = [request[2] for request in ours if min(map(int, request[2].removesuffix(" blocks").split(" + "))) > 0]
    assert both
    assert {request[3] for request in ours} == {"striped"}
    assert any(request[1].startswith("reading ") for request in ours)
    assert text == server.chat(content, max_tokens=60)["choices"][0]["message"]["content"].strip()

    shown_question = page.find_element("css selector", ".turn.question p").text
    assert shown_question == question
    assert page.execute_script("return document.querySelectorAll('#turns img, #turns i, #live img').length") == 0


def look(seen):
    """An observation as the page shows it."""
    counts = []
    for rank in seen.ranks:
        free = rank.total - rank.held - rank.cached - rank.promised
        promised = f" · {rank.promised:,} promised" if rank.promised else ""
        counts.append(f"{rank.held:,} held · {rank.cached:,} cached · {free:,} free{promised}")
    requests = []
    for each in seen.running:
        reads = each.prefilled_tokens < each.prompt_tokens
        said = [
            f"reading {each.prefilled_tokens:,} of {each.prompt_tokens:,}"
            if reads
            else f"prompt {each.prompt_tokens:,}"
        ]
        said += [f"{each.cached_tokens:,} cached"] if each.cached_tokens else []
        said.append(f"{each.new_tokens:,} new token{'' if each.new_tokens == 1 else 's'}")
        blocks = " + ".join(f"{count:,}" for count in each.kv_blocks_per_rank)
        requests.append([each.id, " · ".join(said), f"{blocks} blocks", each.placement])
    return {"counts": counts, "requests": requests, "waiting": f"{seen.num_waiting} waiting"}


def without_client(live):
    return live | {"requests": [request[:4] for request in live["requests"]]}


def test_what_clients_and_models_say_is_text(page, server):
    """A hostile text in every place that shows what others wrote."""
    hostile = '<img src="x" onerror="document.title=1"><script>document.title=1</script>'
    fields = {"max_tokens": 200, "ignore_eos": True, "client": hostile}
    running = threading.Thread(target=server.chat, args=(QUESTION,), kwargs=fields)
    running.start()
    until(lambda: any(request[4] == hostile for each in shown(page, "live") for request in each["requests"]))
    running.join()
    found = page.execute_async_script(
        """
        const [text, done] = arguments;
        import("/page/markdown.js").then(({ Rendering }) => {
          const place = document.createElement("div"), ended = [];
          document.getElementById("turns").append(place);
          const rendering = new Rendering(place, (words) => ended.push(words));
          for (let end = 1; end <= text.length; end += 1) rendering.update(text.slice(0, end));
          rendering.finish();
          done([[...place.querySelectorAll("*")].map((node) => node.tagName), place.textContent, ended.length]);
        });
        """,
        f"# A {hostile}\n\n**bold** and `{hostile}`\n- one\n- **two**\n\n7. seven\n\n"
        f"```html\n{hostile}\n```\n{hostile}",
    )
    tags, text, ended = found
    assert tags == [
        "H4", "P", "STRONG", "CODE", "UL", "LI", "LI", "STRONG", "OL", "LI",
        "DIV", "DIV", "SPAN", "BUTTON", "PRE", "CODE", "P",
    ]  # fmt: skip
    assert text.count(hostile) == 4
    assert ended == 6
    assert page.title == f"{MODEL} · longhelix"
    assert page.get_log("browser") == []
    with pytest.raises(WebDriverException, match="TrustedHTML"):
        page.execute_script("document.body.innerHTML = '<b>x</b>'")
    page.get_log("browser")  # which has the refusal


def test_all_of_it_works_by_keyboard(page):
    press = lambda *keys: webdriver.ActionChains(page).send_keys(*keys).perform()  # noqa: E731
    page.execute_script("document.activeElement.blur(); document.querySelector('.skip').focus()")
    assert page.switch_to.active_element.text == "Skip to the question"
    press(Keys.ENTER)
    press("One line")
    webdriver.ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    press("and another")
    assert page.find_element("id", "question").get_attribute("value") == "One line\nand another"
    sampling(page, temperature=0, max_tokens=5)
    press(Keys.ENTER)
    answered(page)
    assert page.find_element("css selector", ".question p").text == "One line\nand another"
    reached = []
    page.execute_script("document.activeElement.blur(); document.querySelector('.skip').focus()")
    for _ in range(30):
        press(Keys.TAB)
        active = page.execute_script(
            "const node = document.activeElement, ring = getComputedStyle(node.closest('.box') ?? node);"
            "return [node.id || node.className || node.tagName, node.textContent.slice(0, 20),"
            " getComputedStyle(node).outlineStyle !== 'none' || ring.boxShadow !== 'none' || node.type === 'file']"
        )
        if active[0] == "BODY":
            break
        assert active[2], f"{active} shows no focus"
        reached.append(active)
    names = [name for name, _, _ in reached]
    assert {"theme", "conversation", "question", "files", "clear", "send", "live"} <= set(names)
    assert "Key" in [text for _, text, _ in reached]
    assert "Regenerate" in [text for _, text, _ in reached]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_contrast(page, scheme):
    # A colour is read while it changes from one to another where motion is not reduced.
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    emulated = [{"name": name, "value": value} for name, value in features.items()]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": emulated})
    sampling(page, temperature=0, max_tokens=5)
    ask(page, QUESTION)
    answered(page)
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    least, whose = page.execute_script(CONTRAST)
    assert least >= 4.5, whose
    page.find_element("id", "theme").click()
    other = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) == (scheme == "light")
    assert (sum(map(int, other[4:-1].split(","))) > 380) == (scheme == "dark")
    page.refresh()
    until(lambda: page.find_element("id", "connection").text == "Connected")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == other
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_narrow_window_scrolls_down_only(page):
    resize(page, 360, 740)
    sampling(page, temperature=0, max_tokens=30)
    page.execute_script(DROP, [["a" * 120 + ".txt", "Short."]])
    until(lambda: page.find_elements("css selector", "#documents .name"))
    assert max(page.execute_script(OVERFLOW)) <= 0
    ask(page, "w" * 300)
    answered(page)
    assert max(page.execute_script(OVERFLOW)) <= 0
    page.find_element("css selector", ".views [data-view=live]").click()
    assert page.find_element("id", "numbers").is_displayed()
    assert not page.find_element("id", "chat").is_displayed()
    assert max(page.execute_script(OVERFLOW)) <= 0


def test_a_refusal_is_a_sentence_and_a_server_that_comes_back_is_found(page, server):
    sampling(page, max_tokens=9000)
    ask(page, QUESTION)
    answered(page)
    assert "the model's context length is 8192" in page.find_element("css selector", ".problem").text
    server.serving.is_draining = True
    until(lambda: page.find_element("id", "connection").text == "Reconnecting")
    assert "shutting down" in page.find_element("id", "live-note").text
    server.serving.is_draining = False
    until(lambda: page.find_element("id", "connection").text == "Connected")
    logged = [entry["message"] for entry in page.get_log("browser")]
    assert {re.search(r"status of (\d+)", each)[1] for each in logged} - {"503"} == {"400"}
