"""A headless Chromium that tests speak to over a pipe: open a page, run a script, press keys.

The protocol is Chromium's own (DevTools): JSON messages, each ended by a zero byte, on descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["CHROMIUM", "Chromium"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One browser with one page.

    Args:
        profile: an empty folder for what it writes.

    Attributes:
        wrong: what went wrong in the page: exceptions, errors in its log, what its policy refused.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.wrong: list[str] = []
        self._numbers = count(1)
        self._unread = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server"]
        self._process = subprocess.Popen(
            # The shell puts the pipes where Chromium looks for them.
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *flags]
            + ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Opens a page in a window of this size; the script of a test then waits for what it needs."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.ask("window.isLeft = true;")  # the page before may still answer for a moment
        self.call("Page.navigate", url=url)
        self.until("!window.isLeft && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the window another size; below 600 pixels it is a phone's."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def ask(self, script: str) -> Any:
        """Returns what an asynchronous function with this body returns, as JSON has it."""
        expression = f"(async () => {{ {script} }})()"
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(f"return !!({condition});"):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {condition}; {self.ask('return document.body.innerText')}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses and releases a key, as a person does."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol on the page."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], seconds)[0]:
                raise AssertionError(f"Chromium said nothing for {seconds:g} s")
            piece = os.read(self._in, 2**20)
            if not piece:
                raise AssertionError("Chromium ended")
            self._unread += piece
        message, self._unread = self._unread.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.wrong.append(json.dumps(details["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.wrong.append(details["entry"]["text"])
