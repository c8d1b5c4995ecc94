"""A real browser for tests: Debian's chromium, headless, driven over a pipe by its own DevTools protocol.

That is the way that puppeteer and playwright take; it needs no driver, no port and no package.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"),
)


class Page:
    """One page in a running browser."""

    def __init__(self, to_browser: Any, from_browser: Any) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the console got: errors, warnings, exceptions, and requests that failed."""
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come meanwhile are taken note of."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        raw = bytearray()
        while not raw.endswith(b"\0"):
            some = self._from.read(1)
            assert some, "the browser is gone"
            raw += some
        message: dict[str, Any] = json.loads(raw[:-1])
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, given: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(given["exceptionDetails"].get("exception", {}).get("description")))
        elif event == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value", each.get("description")) for each in given["args"]]))
        elif event == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    # ---- what a person does ------------------------------------------------------------------------------------------

    def open(self, file: Path, *, size: tuple[int, int] = (1280, 900), theme: str = "light") -> None:
        """Open a file, and wait until its charts are drawn."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=file.resolve().as_uri())
        waited = self.run(
            "new Promise(done => { const look = () => document.documentElement?.dataset.drawn ? done(true) : "
            "setTimeout(look, 20); look(); setTimeout(() => done(false), 40000); })"
        )
        assert waited, f"charts were not drawn; {self.complaints}"

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of an element, with a mouse.

        A browser takes no clicks before its first frame, and one that is still scrolling brings other things there.
        """
        found = self.run(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)}); "
            "const frame = () => new Promise(requestAnimationFrame); "
            "const place = () => { e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }; "
            "let here = place(), frames = 0; "
            "while (frames < 3) { await frame(); const now = place(); "
            "frames = String(now) === String(here) ? frames + 1 : 0; here = now; } "
            "return here; })()"
        )
        where = {"x": found[0], "y": found[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return found

    def screenshot(self, file: Path, *, is_whole: bool = False) -> None:
        """What is seen, or all of the page, as a PNG."""
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=is_whole, **self._clip(is_whole)
        )
        file.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, is_whole: bool) -> dict[str, Any]:
        if not is_whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def browsing(profile: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """A browser with a page, that is gone afterwards. `profile` is a folder for its own files."""
    assert CHROMIUM is not None
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    words = [CHROMIUM, *_OPTIONS, *options, f"--user-data-dir={profile}"]
    with (profile / "stderr.txt").open("wb") as told:
        process = subprocess.Popen(  # the browser reads from 3 and writes to 4
            ["bash", "-c", f'exec 103<&{child_reads} 104>&{child_writes} 3<&103 4>&104; exec "$@"', "bash", *words],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
        )
    os.close(child_reads)
    os.close(child_writes)
    try:
        with os.fdopen(we_write, "wb") as to_browser, os.fdopen(we_read, "rb") as from_browser:
            page = Page(to_browser, from_browser)
            yield page
            page._session = None
            page.call("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
