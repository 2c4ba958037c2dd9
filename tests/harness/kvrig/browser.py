"""A headless Chromium, driven over its DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from websockets.sync.client import connect

from .waiting import wait_until

PATIENCE = 60


def find():
    """The browser's command; none without one. `KVTIER_CHROMIUM` names another than Debian's."""
    return os.environ.get("KVTIER_CHROMIUM") or shutil.which("chromium")


class Browser:
    """The process, and one connection to it."""

    def __init__(self, command, folder):
        """`folder` is for its profile and its log."""
        profile, log = Path(folder, "profile"), Path(folder, "chromium.log")
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                # It ends with this process, however that ends.
                ["setpriv", "--pdeathsig", "KILL", command, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        place = profile / "DevToolsActivePort"
        try:
            wait_until(lambda: self.process.poll() is not None or place.exists() and place.read_text().count("\n"), PATIENCE,
                       "start of the browser")  # fmt: skip
            assert self.process.poll() is None, f"the browser ended: {log.read_text()[-2000:]}"
            port, path = place.read_text().split("\n")[:2]
            self.socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, compression=None, proxy=None, ping_interval=None)
        except BaseException:
            self.close()
            raise
        self._number, self.pages = 0, {}

    def call(self, method, session=None, **parameters):
        """The result of one command; what happens meanwhile is passed to its page."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = self._take()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _take(self):
        answer = json.loads(self.socket.recv(PATIENCE))
        if page := self.pages.get(answer.get("sessionId")):
            page.note(answer)
        return answer

    def open(self, address, **view):
        """A page at this address, in a context of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, address, **view)

    def close(self):
        """Ends the process and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        # Children outlive a browser that crashed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Page:
    """A tab. `errors` has what its console says, with violations of its security policy."""

    def __init__(self, browser, session, address, width=1280, height=900, dark=False, phone=False):
        self.browser, self.session, self.errors, self.requests = browser, session, [], []
        browser.pages[session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.show(width, height, dark, phone)
        self.call("Page.navigate", url=address)

    def call(self, method, **parameters):
        """The result of a command."""
        return self.browser.call(method, self.session, **parameters)

    def show(self, width, height, dark=False, phone=False):
        """Sets the size of the window and the colours that its user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def note(self, event):
        """Keeps what an event says of errors and requests."""
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in about["args"]))
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"])

    def run(self, expression):
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, expression, patience=PATIENCE):
        """Waits until an expression is true. An error, such as for what is not there yet, is not."""
        tried = f"(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()"
        wait_until(lambda: self.run(tried), patience, expression, interval=0.05)

    def text(self, selector):
        """The text that is seen there; none without such an element."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText")

    def click(self, selector):
        """Clicks an element, once it is there."""
        self.wait(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it?.click(); return !!it; }})()")

    def fill(self, selector, value):
        """Types into an input."""
        self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};"
            " it.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def press(self, key):
        """Presses and releases a key by its name, such as `ArrowLeft`."""
        codes = {"Enter": 13, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            typed = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **typed)

    def picture(self, path, whole=False):
        """Writes what is seen, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, optimizeForSpeed=False)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
