"""Who may ask: tokens, an environment's own token, and pages of origins that were named."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest
from server_tools import REGISTER, REGISTER_ENV, LocalServer, group

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.client import AsyncBatchClient, BatchClient, without_token
from atropos_gym.batch_server.serve import serve
from atropos_gym.errors import ConfigError, ServerError

TOKEN, ENV_TOKEN = "secret-token", "env-token"  # noqa: S105


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(password: str, user: str = "x") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def server() -> LocalServer:
    server = LocalServer()
    server.app = create_app(clock=server.clock, access=Access(TOKEN, ENV_TOKEN))
    return server


@pytest.mark.parametrize(
    "headers", [bearer(TOKEN), basic(TOKEN), basic(TOKEN, ""), {"Authorization": f"bearer {TOKEN}"}]
)
def test_the_token_opens_everything(server: LocalServer, headers: dict[str, str]) -> None:
    assert server.call("POST", "/register", json=REGISTER, headers=headers).status_code == 200
    assert server.call("GET", "/batch", headers=headers).status_code == 200
    assert server.call("GET", "/reset_data", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("other"),
        bearer(""),
        {"Authorization": "Bearer sécret".encode()},
        basic("other"),
        basic("", TOKEN),
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(b"\xff\xfe").decode()},
        {"Authorization": TOKEN},
        {"Authorization": f"Digest {TOKEN}"},
    ],
)
@pytest.mark.parametrize("path", ["/status", "/batch", "/reset_data", "/docs", "/openapi.json", "/nowhere"])
def test_without_it_nothing_is_open(server: LocalServer, headers: dict[str, Any], path: str) -> None:
    reply = server.call("GET", path, headers=headers)
    assert reply.status_code == 401
    assert reply.json() == {"detail": "missing or wrong token"}
    assert reply.headers["WWW-Authenticate"] == 'Bearer, Basic realm="rollouts"'


def test_that_it_is_there_and_works_anyone_may_read(server: LocalServer) -> None:
    assert server.get("/") == {"message": "AtroposLib API"}
    assert server.get("/health")["status"] == "ok"
    assert server.call("POST", "/health").status_code == 405


def test_an_environments_token_opens_what_environments_call(server: LocalServer) -> None:
    server.call("POST", "/register", json=REGISTER, headers=bearer(TOKEN))
    server.call("GET", "/batch", headers=bearer(TOKEN))
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/register-env", REGISTER_ENV),
        ("GET", "/status-env", {"env_id": 0}),
        ("POST", "/scored_data", group(env_id=0)),
        ("POST", "/scored_data_list", [group(env_id=0)]),
        ("GET", "/info", None),
        ("GET", "/wandb_info", None),
        ("GET", "/policy", None),
        ("POST", "/disconnect-env", {"env_id": 0}),
    ]
    for method, path, body in calls:
        assert server.call(method, path, json=body, headers=basic(ENV_TOKEN)).status_code == 200, path
    refused = [("GET", "/batch"), ("GET", "/status"), ("GET", "/reset_data"), ("POST", "/policy")]
    for method, path in refused:
        reply = server.call(method, path, json={}, headers=bearer(ENV_TOKEN))
        assert reply.status_code == 403
        assert reply.json()["detail"] == f"an environment's token is not good for {method} {path}"


def test_a_token_makes_up_for_the_host(server: LocalServer) -> None:
    assert server.call("GET", "/status", headers={"Host": "gpu-1:8000", **bearer(TOKEN)}).status_code == 200
    cross_site = {"Sec-Fetch-Site": "cross-site", **bearer(TOKEN)}
    assert server.call("GET", "/status", headers=cross_site).status_code == 403


def test_pages_of_a_named_origin_may_ask() -> None:
    server = LocalServer()
    board = "https://board.example"
    server.app = create_app(clock=server.clock, access=Access(TOKEN, cors_origins=(board,)))
    page = {"Origin": board, "Sec-Fetch-Site": "cross-site"}
    asked = server.call("OPTIONS", "/status", headers={**page, "Access-Control-Request-Method": "GET"})
    assert asked.status_code == 204
    assert asked.headers["Access-Control-Allow-Origin"] == board
    assert "Authorization" in asked.headers["Access-Control-Allow-Headers"]
    reply = server.call("GET", "/status", headers={**page, **bearer(TOKEN)})
    assert (reply.status_code, reply.headers["Access-Control-Allow-Origin"]) == (200, board)
    assert "Access-Control-Allow-Credentials" not in reply.headers
    assert "Origin" in reply.headers["Vary"]
    assert server.call("GET", "/status", headers=page).status_code == 401
    other = server.call("GET", "/status", headers={"Origin": "https://other.example", **bearer(TOKEN)})
    assert other.status_code == 403
    assert "Access-Control-Allow-Origin" not in other.headers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token": ""}, "token must be one word"),
        ({"token": "two words"}, "token must be one word"),
        ({"env_token": "x"}, "env_token is set but token is not"),
        ({"token": "x", "env_token": "x"}, "env_token equals token"),
        ({"cors_origins": ("board.example",)}, "cors_origin must be such as https://board.example"),
        ({"cors_origins": ("https://board.example/page",)}, "got 'https://board.example/page'"),
        ({"cors_origins": ("http://[",)}, "got 'http://\\['"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Access(**settings)


def test_tokens_come_from_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_GYM_TOKEN", "a")
    monkeypatch.setenv("ATROPOS_GYM_ENV_TOKEN", "b")
    assert Access.find() == Access("a", "b")
    assert Access.find("c") == Access("c", "b")
    monkeypatch.setenv("ATROPOS_GYM_TOKEN", "")
    monkeypatch.delenv("ATROPOS_GYM_ENV_TOKEN")
    assert Access.find() == Access()


def test_other_machines_need_a_token_or_the_word() -> None:
    with pytest.raises(ConfigError, match="ATROPOS_GYM_TOKEN or --token, use 127.0.0.1, or --insecure"):
        serve("0.0.0.0", 0)


LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def test_a_link_on_another_page_leads_to_the_dashboard(server: LocalServer) -> None:
    """Its reader still needs the token; no script of that page sees what it shows."""
    assert server.call("GET", "/dashboard", headers={**LINK, **basic(TOKEN)}).status_code == 200
    assert server.call("GET", "/dashboard", headers=LINK).status_code == 401
    open_server = LocalServer()
    page = open_server.call("GET", "/dashboard", headers=LINK)
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("method", "path", "changes"),
    [
        ("GET", "/reset_data", {}),
        ("GET", "/batch", {}),
        ("GET", "/status", {}),
        ("GET", "/dashboard/data", {}),
        ("GET", "/dashboard/trajectories", {}),
        ("GET", "/dashboard/", {}),
        ("GET", "/dashboard", {"Sec-Fetch-Dest": "iframe"}),
        ("GET", "/dashboard", {"Sec-Fetch-Dest": "object"}),
        ("GET", "/dashboard", {"Sec-Fetch-Mode": "no-cors"}),
        ("GET", "/dashboard", {"Sec-Fetch-Mode": "cors", "Origin": "https://other.example"}),
        ("GET", "/dashboard", {"Origin": "null"}),
        ("POST", "/dashboard", {"Origin": "https://other.example"}),
        ("POST", "/register", {}),
    ],
)
def test_a_link_leads_nowhere_else(method: str, path: str, changes: dict[str, str]) -> None:
    server = LocalServer()
    assert server.call(method, path, headers={**LINK, **changes}).status_code == 403


def test_a_link_does_not_make_up_for_the_host() -> None:
    """After DNS rebinding the page would be of the other site."""
    reply = LocalServer().call("GET", "/dashboard", headers={**LINK, "Host": "evil.example"})
    assert reply.status_code == 400


# The clients.


def sent(url: str, **options: Any) -> httpx.Request:
    """What a client with these options sends."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    with BatchClient(url, transport=httpx.MockTransport(answer), **options) as client:
        client.status()
        assert "TOKEN" not in client.url
    return seen[0]


def test_a_client_sends_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_GYM_TOKEN", raising=False)
    assert "authorization" not in sent("http://127.0.0.1:8000").headers
    assert sent("http://127.0.0.1:8000", token=TOKEN).headers["authorization"] == f"Bearer {TOKEN}"
    with_url = sent("http://x:TOKEN@127.0.0.1:8000/")
    assert with_url.headers["authorization"] == basic("TOKEN")["Authorization"]
    assert str(with_url.url) == "http://127.0.0.1:8000/status"
    assert sent("http://x:TOKEN@h:1", token=TOKEN).headers["authorization"] == f"Bearer {TOKEN}"
    monkeypatch.setenv("ATROPOS_GYM_TOKEN", "from-variable")
    assert sent("http://h:1").headers["authorization"] == "Bearer from-variable"
    assert sent("http://x:TOKEN@h:1").headers["authorization"] == basic("TOKEN")["Authorization"]


@pytest.mark.parametrize("url", ["x:TOKEN@127.0.0.1:8000", "ftp://x:TOKEN@host", "http://x:TOKEN@"])
def test_a_url_that_is_none_is_refused_without_its_token(url: str) -> None:
    with pytest.raises(ConfigError, match="server must be a URL") as error:
        BatchClient(url)
    assert "TOKEN" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://x:TOKEN@host:8000/", "http://host:8000"),
        ("http://:TOKEN@[::1]:8000/under", "http://[::1]:8000/under"),
        ("https://x:TO@KEN@host", "https://host"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://host?to=a@b", "http://host?to=a@b"),
    ],
)
def test_urls_are_shown_without_tokens(url: str, shown: str) -> None:
    assert without_token(url) == shown


def test_both_clients_pass_the_guard(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_GYM_TOKEN", raising=False)

    async def story(url: str, token: str | None) -> dict[str, Any]:
        async with AsyncBatchClient(url, token=token, transport=server.transport()) as client:
            return await client.status()

    for url, token in (("http://127.0.0.1:8000", TOKEN), (f"http://x:{TOKEN}@127.0.0.1:8000", None)):
        assert asyncio.run(story(url, token))["current_step"] == 0
    with pytest.raises(ServerError, match="missing or wrong token; give token=, or ATROPOS_GYM_TOKEN"):
        asyncio.run(story("http://127.0.0.1:8000", None))
