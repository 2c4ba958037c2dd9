"""The dashboard at /ui, in a headless Chromium."""

import json
import math
import os
import random
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kvrig.browser import Browser, find
from kvrig.engine import tokens
from kvrig.layouts import BLOCK_TOKENS
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it has no dashboard")

HOSTILE = "<img src=x onerror=document.title='hacked'>"
ADMIN, READER = "admin-0123456789abcdef", "reader-0123456789abcdef"
IS_LIVE = "document.querySelector('#live').textContent === 'live' && !document.querySelector('#dashboard').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests; each page has cookies and storage of its own."""
    command = find()
    if command is None:
        pytest.skip("there is no chromium (tests/setup.sh, or KVTIER_CHROMIUM)")
    browser = Browser(command, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def with_quotas(serve, tmp_path):
    """Starts a server that separates tenants and keeps their quotas: with_quotas(...) -> Server."""

    def start(*flags, mode="engine_shm"):
        return serve(mode, eviction="IsolatedLRU", flags=["--quota-file", str(tmp_path / "quotas"), *flags])

    return start


@pytest.fixture
def visit(browser):
    """Opens the dashboard of a server: visit(server, ...) -> Page. Its console must stay empty, but for refusals by status."""
    pages = []

    def open_page(server, expected=(), **view):
        page = browser.open(f"{server.http}/ui", **view)
        pages.append((page, server, expected))
        return page

    yield open_page
    for page, server, expected in pages:
        page.run("1")
        unexpected = [error for error in page.errors if not any(part in error for part in expected)]
        assert not unexpected, unexpected
        places = {urlsplit(request["url"])[:2] for request in page.requests}
        assert places <= {urlsplit(server.http)[:2], ("about", "")}, places
        assert not any(token in request["url"] for request in page.requests for token in (ADMIN, READER))


def give_tokens(tmp_path):
    """Flags of a server with an admin's and a reader's token."""
    file = tmp_path / "tokens"
    file.write_text(f"admin ops {ADMIN}\nread watcher {READER}\n")
    file.chmod(0o600)
    return ["--http-token-file", str(file)]


def with_token(server, method, path, token, body=None):
    """Status and answer of a request with a token."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.http + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def facts(page, place, title):
    """What the card of this title says, by name."""
    return page.run(
        f"Object.fromEntries([...[...document.querySelectorAll('{place} article')].find(it =>"
        f" it.querySelector('h3').textContent.startsWith({json.dumps(title)})).querySelectorAll('dl div')].map(it =>"
        " [it.querySelector('dt').textContent, it.querySelector('dd').textContent]))"
    )


def cells(page, table):
    """The rows of a table as texts."""
    return page.run(f"[...document.querySelectorAll('{table} tbody tr')].map(row => [...row.children].map(it => it.textContent))")


def wait_for_text(page, selector, text):
    """Waits until an element has this in its text."""
    page.wait(f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(text)})")


def history(server):
    """The series that the server keeps, by name."""
    with urllib.request.urlopen(f"{server.http}/ui/events", timeout=60) as events:
        assert events.readline() == b"event: history\n"
        return json.loads(events.readline().removeprefix(b"data: "))["series"]


def count(number):
    """A number as the page shows it."""
    return f"{number:,}"


# proves: docs/compare.md#dashboard
# proves: docs/operate.md#dashboard
def test_page_says_what_status_says(serve, engines, visit, tmp_path):
    """Memory, tiers, workers, lookups, requests and flags, from files that are small; nothing is asked of another server."""
    tier = json.dumps({"type": "fs", "base_path": str(tmp_path / "tier")})
    (tmp_path / "tier").mkdir()
    server = serve("engine_shm", l1_gb=0.25, flags=["--l2-adapter", tier, "--instance-id", "node-7"])
    engine = engines(server)
    prompt = tokens(64)
    engine.store_prompt(prompt)
    page = visit(server)
    page.wait(IS_LIVE)

    def is_stored():
        status = server.get("/status")[1]["storage_manager"]
        return status if status["l2_adapters"][0]["stored_object_count"] == 4 else None

    status = wait_until(is_stored, 30, "the objects in the tier")
    page.wait("document.querySelector('#places').textContent.includes('fs-0')")
    page.wait("[...document.querySelectorAll('#places article')][1].querySelector('dd').textContent === '4'")
    l1, tier = facts(page, "#places", "L1"), facts(page, "#places", "fs-0")
    assert l1["Objects"] == count(status["l1_manager"]["total_object_count"])
    assert l1["Leased"] == count(status["l1_manager"]["read_locked_count"])
    assert l1["Policy"].startswith(status["l1_eviction_controller"]["eviction_policy"])
    assert tier["Objects"] == "4" and tier["Failed stores"] == "none"
    assert "closed" in tier["Breakers"]
    used = status["l1_manager"]["memory_used_bytes"]
    assert f"{used / 1024:.1f} KiB of 256 MiB" in page.text("#places .usage")
    assert page.text("#health") == "healthy"
    assert page.text("#instance") == "node-7"
    [worker] = cells(page, "#worker-table")
    assert worker[1:3] == [engine.model, "copies by itself"]
    engine.wait_hit(prompt, 64)
    page.wait("document.querySelectorAll('#lookup-table tbody tr').length > 0")
    [lookup, *_] = cells(page, "#lookup-table")
    assert lookup[1:4] == [engine.model, "_default", "64 of 64"] and lookup[4] == "all found"
    while not page.run("document.querySelector('#operations').textContent.includes('lookup')"):
        engine.wait_hit(prompt, 64)
    page.click("#configuration summary")
    wait_for_text(page, "#flags", "instance_id")
    assert not page.run("document.querySelector('#caller:not([hidden])')")
    paths = {urlsplit(request["url"]).path for request in page.requests}
    files = [path for path in paths if path == "/ui" or path.startswith("/ui/") and path != "/ui/events"]
    sizes = [len(urllib.request.urlopen(server.http + path).read()) for path in files]
    assert len(files) == 11 and sum(sizes) < 300 * 1024, (files, sum(sizes))


def test_gpus_say_what_copies(serve, engines, visit):
    """A GPU's card has the share of each executor in the bytes that it copied, as /status counts them."""
    server = serve("cuda", fresh=True)
    engine = engines(server)
    prompt = tokens(64)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 64)
    page = visit(server)
    page.wait(IS_LIVE)
    page.wait("[...document.querySelectorAll('#gpus dd')].some(it => it.textContent.includes('100 %'))")
    [gpu] = [gpu for gpu in server.get("/status")[1]["devices"]["cuda"]["gpus"] if gpu["in_use"]]
    [executor] = {moved["executor"] for moved in gpu["state"]["moved"] if moved["bytes"] > 0}
    card = facts(page, "#gpus", f"GPU {gpu['ordinal']}")
    assert card["Copied by"] == f"{executor} 100 %" and card["Open allocations"] == str(gpu["state"]["open_allocations"])


# proves: docs/operate.md#dashboard
def test_charts_have_the_past(serve, engines, visit):
    """What happened before the page was opened is drawn, and a cursor names the values of a moment."""
    server = serve()
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    while sum(1 for number in history(server)["lookups"] if number) < 2:
        engine.wait_hit(prompt, 48)
    page = visit(server)
    page.wait(IS_LIVE)
    page.wait("document.querySelectorAll('.chart').length === 6")
    drawn = "document.querySelectorAll('.chart .line')[%d].getAttribute('d').length"
    page.wait(f"{drawn % 0} > 10 && {drawn % 1} > 10")
    said = "document.querySelector('.plot').getAttribute('aria-valuetext')"
    page.wait(f"{said}.startsWith('now: found ')")
    page.click("[name=span][value='3600']")
    wait_for_text(page, ".times", "60 min ago")
    page.run(
        "(() => { const it = document.querySelector('.plot'); const at = it.getBoundingClientRect();"
        " it.dispatchEvent(new PointerEvent('pointermove', {clientX: at.right - 2, bubbles: true})); })()"
    )
    moment = "/\\d\\d:\\d\\d:\\d\\d/.test(document.querySelector('.chart h3').textContent)"
    page.wait(moment)
    # The same from the keyboard.
    page.run("(() => { const it = document.querySelector('.plot'); it.dispatchEvent(new PointerEvent('pointerleave')); it.focus(); })()")
    page.wait(f"!{moment}")
    for key, steps in (("ArrowLeft", 1), ("ArrowLeft", 2), ("PageUp", 12), ("ArrowRight", 11)):
        page.press(key)
        assert page.run(moment) and page.run(f"/^\\d\\d:\\d\\d:\\d\\d: found /.test({said})")
        assert page.run("(it => it.ariaValueMax - it.ariaValueNow)(document.querySelector('.plot'))") == steps
    page.press("Home")
    assert page.run("document.querySelector('.plot').ariaValueNow") == "0"
    page.press("End")
    assert not page.run(moment) and page.run(said).startswith("now: found ")


# proves: docs/operate.md#dashboard
def test_failing_tier_is_named_with_its_cause(serve, engines, visit, tmp_path):
    """A tier whose breaker opens makes the server degraded, and the page says which, and why."""
    (tmp_path / "tier").mkdir()
    faults = [{"kind": "fail", "operation": "store", "error": "unavailable"}]
    tier = {"type": "fault_inject", "inner": {"type": "fs", "base_path": str(tmp_path / "tier")}, "rate": 0, "faults": faults}
    server = serve("engine_shm", flags=["--l2-adapter", json.dumps(tier)])
    server.expect_trouble("fault|breaker|could not be stored|unavailable")
    engine = engines(server)
    page = visit(server)
    page.wait(IS_LIVE)
    seed = 0
    while not server.get("/healthcheck")[1].get("failed_tiers"):
        engine.store_prompt(tokens(48, seed))
        seed += 1
    [name] = server.get("/healthcheck")[1]["failed_tiers"]
    page.wait("document.querySelector('#health').textContent === 'degraded'")
    # Open, or half open while it tries.
    reason = page.text("#reasons")
    assert reason.startswith(f"tier {name}: the breaker of store is ") and "fails on purpose" in reason, reason
    card = facts(page, "#places", name)
    assert "store closed" not in card["Breakers"] and "unavailable" in card["Failed stores"], card
    wait_for_text(page, "#warnings", name)


# proves: docs/operate.md#dashboard
def test_hostile_names_stay_text(with_quotas, engines, visit):
    """A tenant and a model that are markup are shown as such."""
    server = with_quotas()
    engine = engines(server, model="<b>model</b>")
    prompt = tokens(48)
    engine.store_prompt(prompt, salt=HOSTILE)
    engine.hits(prompt, HOSTILE)
    page = visit(server)
    page.wait(IS_LIVE)
    wait_for_text(page, "#tenant-table", HOSTILE)
    wait_for_text(page, "#lookup-table", HOSTILE)
    wait_for_text(page, "#worker-table", "<b>model</b>")
    page.click("#tenant-table td button")
    wait_for_text(page, "#quota-title", HOSTILE)
    assert page.run("document.querySelectorAll('img').length") == 1
    assert page.run("document.querySelectorAll('td b, th b').length") == 0
    assert page.run("document.title") == "kvtier"
    page.fill("#quota-limit", "64MiB")
    page.click("#quota [value=save]")
    wait_for_text(page, "#toast", HOSTILE)
    assert server.get("/tenants")[1]["tenants"][0]["tiers"]["l1"]["limit_bytes"] == 64 * 2**20


# proves: docs/compare.md#dashboard
# proves: docs/operate.md#dashboard
def test_quotas_are_edited(with_quotas, engines, visit):
    """An operator sets, changes and removes limits, and reads why one is refused."""
    server = with_quotas()
    engine = engines(server)
    engine.store_prompt(tokens(48), salt="alice")
    page = visit(server, expected=["status of 400"])
    page.wait(IS_LIVE)
    wait_for_text(page, "#tenant-table", "alice")
    quota = lambda name: server.get(f"/quota/{name}")[1]
    page.click("#tenant-table td button")
    page.wait("document.querySelector('#quota').open")
    page.fill("#quota-limit", "much")
    page.click("#quota [value=save]")
    wait_for_text(page, "#quota .error", "users.alice.limit_gb")
    page.fill("#quota-limit", "512MiB")
    page.run("document.querySelector('#quota details').open = true")
    page.fill("#quota-reserved-0", "1MiB")
    page.click("#quota [value=save]")
    wait_for_text(page, "#toast", "Set the quota of alice.")
    assert quota("alice")["limit_gb"] == 0.5
    assert quota("alice")["tiers"]["l1"]["reserved_bytes"] == 2**20
    wait_for_text(page, "#tenant-table", "of 512 MiB in l1")
    # What was set for one tier alone stays.
    page.click("#tenant-table td button")
    page.wait("document.querySelector('#quota').open")
    page.fill("#quota-limit", "unlimited")
    page.click("#quota [value=save]")
    page.wait("!document.querySelector('#quota').open")
    assert quota("alice")["limit_gb"] == "unlimited" and quota("alice")["tiers"]["l1"]["reserved_bytes"] == 2**20
    page.click("#tenant-add")
    page.fill("#quota-name", "__proto__")
    page.fill("#quota-limit", "2")
    page.click("#quota [value=save]")
    wait_for_text(page, "#tenant-table", "__proto__")
    assert quota("__proto__")["limit_gb"] == 2.0
    wait_for_text(page, "#tenant-table tbody tr:first-child button", "Edit")
    page.click("#tenant-table td button")
    page.click("#quota [value=remove]")
    wait_for_text(page, "#toast", "Removed the quota of alice.")
    assert not quota("alice")["exists"]


# proves: docs/operate.md#dashboard
def test_focus_stays_while_tenants_change(with_quotas, visit):
    """What did not change is not replaced; else focus is where it was: on a button of a tenant, also after its dialog."""
    server = with_quotas()
    limit = lambda name, gib: server.request("PUT", f"/quota/{name}", {"limit_gb": gib})[0] == 200
    assert limit("alice", 1) and limit("bob", 1)
    page = visit(server)
    page.wait(IS_LIVE)
    wait_for_text(page, "#tenant-table", "bob")
    page.run("document.querySelector('#tenants').scrollIntoView()")
    page.run("window.table = document.querySelector('#tenant-table table')")
    asked = lambda: sum(1 for request in page.requests if "/tenants?" in request["url"])
    before = asked()
    while asked() < before + 3:
        page.run("new Promise(done => setTimeout(done, 100))")
    assert page.run("table.isConnected")
    focused = "document.activeElement.getAttribute('aria-label')"
    page.run("[...document.querySelectorAll('#tenant-table td button')].find(it => it.ariaLabel.endsWith(' bob')).focus()")
    assert limit("alice", 3)
    wait_for_text(page, "#tenant-table", "of 3.00 GiB")
    assert page.run(focused) == "Edit the quota of bob"
    page.press("Enter")
    page.wait("document.querySelector('#quota').open")
    assert limit("alice", 4)
    wait_for_text(page, "#tenant-table", "of 4.00 GiB")
    page.click("#quota [value=cancel]")
    page.wait(f"{focused} === 'Edit the quota of bob'")


# proves: docs/operate.md#dashboard
@pytest.mark.parametrize("name", [".", ".."])
def test_quota_of_a_name_that_paths_resolve_is_removed(with_quotas, visit, name):
    """A browser makes another path of these, so the page names them otherwise."""
    server = with_quotas()
    assert server.request("PUT", "/quota", {"users": {name: {"limit_gb": 1}}})[0] == 200
    page = visit(server)
    page.wait(IS_LIVE)
    page.click("#tenant-table td button")
    page.click("#quota [value=remove]")
    wait_for_text(page, "#toast", f"Removed the quota of {name}.")
    assert server.get("/quota")[1] == {"users": {}}


# proves: docs/compare.md#dashboard
# proves: docs/operate.md#dashboard
def test_tokens_decide_what_is_shown_and_changed(with_quotas, visit, tmp_path):
    """The page asks for a token, keeps it in its tab, and offers a reader no change; the route refuses one by hand."""
    server = with_quotas(*give_tokens(tmp_path))
    page = visit(server, expected=["status of 401", "status of 403"])
    sign_in = "document.querySelector('#sign-in')"
    page.wait(f"!{sign_in}.hidden && document.activeElement.id === 'token'")
    assert page.run("document.querySelector('#dashboard').hidden")
    page.fill("#token", "wrong-0123456789abcdef")
    page.click("#sign-in button")
    wait_for_text(page, "#sign-in .error", "no token known here")
    page.fill("#token", READER)
    page.click("#sign-in button")
    page.wait(IS_LIVE)
    wait_for_text(page, "#caller", "watcher (read)")
    assert with_token(server, "PUT", "/quota/alice", ADMIN, {"limit_gb": 1})[0] == 200
    page.fill("#tenant-search", "alice")
    wait_for_text(page, "#tenant-table", "alice")
    assert page.run("document.querySelector('#tenant-add').hidden")
    assert page.run("document.querySelectorAll('#tenant-table td button').length") == 0
    by_hand = (
        "fetch('quota/alice', {method: 'PUT', body: '{\"limit_gb\": 9}',"
        " headers: {authorization: 'Bearer ' + sessionStorage.getItem('kvtier-token')}}).then(it => it.status)"
    )
    assert page.run(by_hand) == 403
    assert with_token(server, "GET", "/quota/alice", READER)[1]["limit_gb"] == 1.0
    page.call("Page.reload")
    page.wait("performance.getEntriesByType('navigation')[0].type === 'reload'")
    page.wait(IS_LIVE)
    page.click("#caller button")
    page.wait(f"!{sign_in}.hidden")
    assert page.run("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    assert "alice" not in page.run("document.body.innerText")
    page.fill("#token", ADMIN)
    page.click("#sign-in button")
    wait_for_text(page, "#caller", "ops (admin)")
    page.wait("document.querySelectorAll('#tenant-table td button').length > 0")
    assert page.run(by_hand) == 200
    # A token that was revoked ends the stream, and the page asks again.
    file = tmp_path / "tokens"
    file.write_text(f"admin other {'x' * 32}\n")
    server.process.send_signal(signal.SIGHUP)
    page.wait(f"!{sign_in}.hidden")
    file.write_text(f"admin ops {ADMIN}\n")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: with_token(server, "GET", "/", ADMIN)[0] == 200, 30, "the token again")
    server.expect_trouble("refused: no token that is known")
    server.expect_trouble("refused: that takes the role admin")


# proves: docs/operate.md#dashboard
def test_server_that_returns_is_followed(serve, visit):
    """The page says that the connection is lost and that its values are old, and goes on by itself."""
    server = serve(fresh=True)
    page = visit(server, expected=["net::ERR_"])
    page.wait(IS_LIVE)
    server.kill()
    page.wait("!document.querySelector('#trouble').hidden")
    assert "Trying again" in page.text("#trouble") and "Values are from" in page.text("#trouble")
    assert page.run("document.body.classList.contains('stale')")
    assert page.text("#live") == "no connection"
    # The countdown is not announced, and the button stays the same one.
    page.run(
        "window.announced = []; document.querySelector('#trouble button').focus();"
        " new MutationObserver(them => announced.push(...them)).observe("
        "document.querySelector('#trouble [role=alert]'), {childList: true, characterData: true, subtree: true});"
        " window.counted = 0; window.button = document.activeElement;"
        " new MutationObserver(() => counted += 1).observe(document.querySelector('#trouble'), {childList: true, subtree: true})"
    )
    page.wait("counted >= 3")
    assert page.run("announced.length") == 0
    assert page.run("button === document.activeElement && button.isConnected && button.textContent === 'Try now'")
    server.start()
    page.click("#trouble button")
    page.wait(IS_LIVE)
    assert page.run("document.querySelector('#trouble').hidden && !document.body.classList.contains('stale')")


# proves: docs/operate.md#dashboard
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_has_no_sideways_scrolling(with_quotas, engines, visit, dark):
    """All fits a small screen, in the colours that its user prefers."""
    server = with_quotas()
    engine = engines(server, model="models/" + "long-" * 20)
    engine.store_prompt(tokens(48), salt="tenant-" * 15)
    engine.hits(tokens(48), "tenant-" * 15)
    page = visit(server, width=360, height=740, phone=True, dark=dark)
    page.wait(IS_LIVE)
    wait_for_text(page, "#tenant-table", "tenant-")
    wait_for_text(page, "#lookup-table", "tenant-")
    assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    brightness = lambda it, what: sum(
        int(part) for part in page.run(f"getComputedStyle(document.querySelector('{it}')).{what}.match(/\\d+/g).slice(0, 3)")
    )
    back, text = brightness("body", "backgroundColor"), brightness("body", "color")
    assert (back < 150 and text > 600) if dark else (back > 600 and text < 150), (back, text)


# proves: docs/operate.md#dashboard
def test_ten_thousand_tenants_stay_usable(with_quotas, visit):
    """They are sorted and searched by the server, and few of them are in the page at a time."""
    server = with_quotas()
    users = {f"tenant-{number:05}": {"limit_gb": number} for number in range(10_000)}
    assert server.request("PUT", "/quota", {"users": users})[0] == 200
    page = visit(server)
    page.wait(IS_LIVE)
    wait_for_text(page, "#tenant-range", "1 to 50 of 10,000")
    page.click("[data-key='by name']")
    page.wait("document.querySelector('#tenant-table th[aria-sort=ascending]').textContent.startsWith('Tenant')")
    assert cells(page, "#tenant-table")[0][0] == "tenant-00000"
    page.click("[data-key='by name']")
    page.wait("document.querySelector('#tenant-table tbody th').textContent === 'tenant-09999'")
    page.click("#tenant-next")
    wait_for_text(page, "#tenant-range", "51 to 100 of 10,000")
    page.fill("#tenant-search", "0123")
    wait_for_text(page, "#tenant-range", "1 to 11 of 11")
    page.fill("#tenant-search", "absent")
    wait_for_text(page, "#tenant-table", "No tenant has that in its name.")
    page.fill("#tenant-search", "")
    wait_for_text(page, "#tenant-range", "1 to 50 of 10,000")
    assert page.run("document.querySelectorAll('*').length") < 2500


# proves: docs/operate.md#dashboard
def test_prompt_is_explained(serve, engines, visit):
    """The form asks why a prompt misses, and takes what vLLM answers to /tokenize."""
    server = serve("engine_shm")
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt[:32])
    page = visit(server)
    page.wait(IS_LIVE)
    page.fill("#explain-model", engine.model)
    page.fill("#explain-tokens", "no numbers")
    page.click("#explain [type=submit]")
    wait_for_text(page, "#explain .error", "Give token ids")
    page.fill("#explain-tokens", json.dumps({"count": 48, "tokens": list(prompt)}))
    page.click("#explain [type=submit]")
    page.wait("document.querySelectorAll('#explain tbody tr').length === 2")
    assert cells(page, "#explain") == [["0 to 1", "in L1"], ["2", "never stored, as far back as the server remembers"]]
    assert page.text("#explain .error") == ""


@pytest.mark.skipif(not os.environ.get("KVTIER_SCREENSHOTS"), reason="pictures for docs/images: only with KVTIER_SCREENSHOTS=FOLDER")
def test_screenshots(serve, engines, visit, tmp_path):
    """Pictures of a server with some minutes of load, small enough for the repository."""
    from PIL import Image

    folder = Path(os.environ["KVTIER_SCREENSHOTS"])
    (tmp_path / "nvme").mkdir()
    tier = {"type": "fs", "name": "nvme", "base_path": str(tmp_path / "nvme"), "max_capacity_gb": 0.05,
            "eviction": {"eviction_policy": "IsolatedLRU"}}  # fmt: skip
    flags = ["--l2-adapter", json.dumps(tier), "--instance-id", "node-7", "--quota-file", str(tmp_path / "quotas")]
    server = serve("lmcache_driven", l1_gb=0.03, eviction="IsolatedLRU", flags=flags)
    models = ["meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-32B"]
    busy = [engines(server, model=model) for model in models]
    tenants = ["search", "support-chat", "code-review", "batch-eval", "internal-docs", "mobile"]
    for salt, limit in zip(tenants, ["8MiB", "24MiB", "16MiB", "unlimited", "12MiB", "4MiB"], strict=True):
        assert server.request("PUT", f"/quota/{salt}", {"limit_gb": limit})[0] == 200
    until, chance = time.monotonic() + float(os.environ.get("KVTIER_SCREENSHOT_SECONDS", 240)), random.Random(18)
    while (left := until - time.monotonic()) > 0:
        salt = chance.choices(tenants, [6, 5, 4, 3, 2, 1])[0]
        # Some prompts return often, and those of one tenant hardly ever.
        seed = chance.randrange(5000) if salt == "batch-eval" else int(chance.paretovariate(0.8)) % 200
        prompt, engine = tokens(96 + 16 * (seed % 4), seed), busy[seed % 2]
        request, hit = engine.lookup(prompt, salt=salt)
        blocks, first = engine.blocks_for(len(prompt)), hit // BLOCK_TOKENS
        if hit > 0:
            assert engine.worker.retrieve(request, prompt, 0, hit, blocks[:first], salt).ok
        if hit < len(prompt):
            engine.worker.store(request, prompt, hit, len(prompt), blocks[first:], salt)
        engine.end(request)
        time.sleep(0.005 + 0.015 * abs(math.sin(left / 25)))

    def save(name, page, width, height, section="overview", **view):
        page.show(width, height, **view)
        page.run(f"document.querySelector('{'body' if section == 'overview' else '#' + section}').scrollIntoView()")
        page.wait(IS_LIVE)
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.picture(folder / name)
        with Image.open(folder / name) as picture:
            picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(folder / name, optimize=True)
        assert (folder / name).stat().st_size < 150 * 1024

    page = visit(server, width=1280, height=860)
    page.wait(IS_LIVE)
    page.wait("document.querySelectorAll('#lookup-table tbody tr').length > 10")
    save("dashboard.png", page, 1280, 860)
    save("dashboard-dark.png", page, 1280, 860, dark=True)
    save("dashboard-phone.png", page, 390, 844, phone=True)
    save("dashboard-tenants.png", page, 1280, 620, section="tenants")
