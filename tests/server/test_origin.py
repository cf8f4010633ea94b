"""By which names and from which pages the server may be asked; `tests/browser/test_other_sites.py` has a browser."""

import json
import socket

import pytest

from splittime.core.errors import ConfigError, RequestError
from splittime.web.edge import Names

KEY = "k"
PATHS = ("/ledger/requests", "/metrics", "/v1/models", "/", "/dashboard/static/app.js", "/nowhere")


def raw(port: int, method: str = "GET", path: str = "/v1/models", *lines: str, body: bytes = b"") -> tuple[int, dict]:
    """Status and JSON body of a request with exactly these header lines."""
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "Connection: close"])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head.encode("latin-1") + b"\r\n\r\n" + body)
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, rest = answer.partition(b"\r\n\r\n")
    is_json = b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(rest) if is_json and rest else {"head": head.decode("latin-1")}


def own(port: int) -> str:
    return f"Host: 127.0.0.1:{port}"


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:9", "localhost.", "localhost.:80", "[::1]", "[::1]:8000"],
)
def test_a_loopback_server_is_called_by_the_names_it_listens_on(launch, name: str) -> None:
    """On any port: it differs behind a tunnel."""
    assert raw(launch().port, "GET", "/v1/models", f"Host: {name}")[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example#127.0.0.1",
        "localhost:80:80",
        "localhost:x",
        "localhost/",
        "0.0.0.0:8000",
        "10.0.0.1",
        "[::2]",
        "[::1",
        "::1",
        "",
        "\xff",
        "a" * 5000,
    ],
)
def test_other_names_are_refused_everywhere_but_at_the_probes(launch, name: str) -> None:
    server = launch()
    for path in PATHS:
        status, body = raw(server.port, "GET", path, f"Host: {name}")
        assert (status, body["error"]["code"]) == (403, "host_not_allowed"), path
        assert "--allowed-hosts" in body["error"]["hint"]
        assert len(body["error"]["message"]) < 200
    for path in ("/sleep?mode=abort", "/v1/completions"):
        assert raw(server.port, "POST", path, f"Host: {name}")[0] == 403
    for path in ("/health", "/ready", "/ping"):
        assert raw(server.port, "GET", path, f"Host: {name}")[0] == 200
    assert server.engine.rest.state == "awake"


def test_two_names_or_none_are_refused(launch) -> None:
    port = launch().port
    assert raw(port, "GET", "/v1/models", own(port), "Host: evil.example")[0] == 403
    assert raw(port, "GET", "/v1/models", own(port), own(port))[0] == 403
    assert raw(port, "GET", "/v1/models", "Host: local", "Host: host")[0] == 403
    assert raw(port, "GET", "/v1/models")[0] == 403


def test_allowed_hosts_come_beside_its_own(launch) -> None:
    port = launch(config={"allowed_hosts": ("api.example", "*.Inside.example", "10.1.2.3")}).port
    for name in ("api.example", "API.example:443", "a.inside.example", "b.a.inside.example:1", "10.1.2.3", "localhost"):
        assert raw(port, "GET", "/v1/models", f"Host: {name}")[0] == 200, name
    for name in ("xapi.example", "inside.example", "ainside.example", "evil.example", "10.1.2.4", "*.inside.example"):
        assert raw(port, "GET", "/v1/models", f"Host: {name}")[0] == 403, name
    anything = launch(config={"allowed_hosts": ("*",)}).port
    assert raw(anything, "GET", "/v1/models", "Host: evil.example")[0] == 200


def scope(host: str, at: str = "10.0.0.5", **more: str) -> dict:
    fields = [(b"host", host.encode()), *((k.replace("_", "-").encode(), v.encode()) for k, v in more.items())]
    return {"type": "http", "method": "GET", "path": "/", "headers": fields, "server": (at, 8000)}


def is_taken(names: Names, asked: dict) -> bool:
    try:
        names.check(asked)
    except RequestError:
        return False
    return True


def test_an_address_that_others_reach_has_a_key_and_any_name_unless_it_is_told_which() -> None:
    """A rebound page has no key; a balancer or a probe calls by a name of its own."""
    assert is_taken(Names("0.0.0.0"), scope("svc.cluster.local"))
    told = Names("0.0.0.0", ("api.example",))
    assert is_taken(told, scope("api.example"))
    assert is_taken(told, scope("10.0.0.5:8000"))  # the address the connection came to
    assert not is_taken(told, scope("10.0.0.6:8000"))
    assert not is_taken(told, scope("110.0.0.5:8000"))  # it ends as that address does, and is another's
    assert not is_taken(told, scope("10.0.0.50:8000"))
    assert not is_taken(told, scope("svc.cluster.local"))
    named = Names("Box.internal", ("api.example",))
    assert is_taken(named, scope("box.internal:8000"))
    assert is_taken(Names("127.0.0.9"), scope("127.0.0.9:1", at="127.0.0.9"))


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost:{other}",
        "http://localhost:{port}",  # it was called 127.0.0.1
        "http://127.0.0.1",
        "http://127.0.0.1:{port}.evil.example",
        "http://evil@127.0.0.1:{port}",
        "null",
        "http://",
        "",
        "http://[",
        "127.0.0.1:{port}",
        "file://",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/ledger/requests"), ("POST", "/sleep"), ("HEAD", "/metrics")])
def test_a_page_of_another_origin_neither_reads_nor_changes(launch, origin: str, method: str, path: str) -> None:
    server = launch()
    line = f"Origin: {origin.format(port=server.port, other=server.port + 1)}"
    assert raw(server.port, method, path, own(server.port), line)[0] == 403
    assert server.engine.rest.state == "awake"


def test_two_origins_are_none_of_ours(launch) -> None:
    port = launch().port
    lines = (own(port), f"Origin: http://127.0.0.1:{port}")
    assert raw(port, "GET", "/v1/models", *lines)[0] == 200
    assert raw(port, "GET", "/v1/models", *lines, "Origin: http://evil.example")[0] == 403


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_its_own_page_may_do_all(launch, scheme: str) -> None:
    """Also behind a proxy that speaks TLS and keeps the name."""
    port = launch().port
    lines = (own(port), f"Origin: {scheme}://127.0.0.1:{port}", "Sec-Fetch-Site: same-origin")
    assert raw(port, "POST", "/sleep", *lines)[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_without_an_origin_another_sites_page_may_only_link(launch, site: str) -> None:
    server = launch()
    lines = (own(server.port), f"Sec-Fetch-Site: {site}")
    for method, path in (("POST", "/sleep"), ("PATCH", "/knobs"), ("GET", "/ledger/requests"), ("HEAD", "/metrics")):
        status, body = raw(server.port, method, path, *lines)
        assert status == 403
        assert method == "HEAD" or body["error"]["code"] == "cross_site"
    assert raw(server.port, "POST", "/sleep", *lines, "Sec-Fetch-Mode: navigate")[0] == 403  # a form
    assert raw(server.port, "GET", "/", *lines, "Sec-Fetch-Mode: navigate")[0] == 200  # a link
    assert raw(server.port, "GET", "/health", *lines)[0] == 200
    assert server.engine.rest.state == "awake"


def test_programs_and_typed_addresses_pass(launch) -> None:
    port = launch().port
    assert raw(port, "POST", "/sleep", own(port))[0] == 200
    assert raw(port, "POST", "/wake", own(port), "Sec-Fetch-Site: none")[0] == 200


PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")


def test_cors_lets_pages_of_its_origins_in_and_no_others(launch) -> None:
    """The question beforehand carries no key; a refusal can be read."""
    server = launch(config={"cors_origins": ("https://app.example", "http://localhost:3000"), "api_key": (KEY,)})
    page, host = "Origin: https://app.example", own(server.port)
    status, body = raw(server.port, "OPTIONS", "/v1/chat/completions", host, page, *PREFLIGHT)
    assert status == 200
    assert "access-control-allow-origin: https://app.example\r\n" in body["head"]
    assert "authorization, content-type" in body["head"]
    for path in ("/v1/messages", "/api/chat"):  # the answer is a plain text, whatever the API's errors are
        assert raw(server.port, "OPTIONS", path, host, page, "Access-Control-Request-Method: PUT")[0] == 400
    assert [type(each) for each in server.get("/api/tags")[2].values()] == [str]
    status, fields, _ = server.get("/v1/models", Origin="https://app.example")
    assert (status, fields["access-control-allow-origin"]) == (401, "https://app.example")
    headers = {"Origin": "https://app.example", "Authorization": f"Bearer {KEY}", "Sec-Fetch-Site": "cross-site"}
    status, fields, _ = server.post("/v1/completions", {"prompt": "x"}, headers)
    assert (status, fields["access-control-allow-origin"]) == (200, "https://app.example")
    assert "x-request-id" in fields["access-control-expose-headers"]
    for other in ("https://evil.example", "https://app.example:444", "https://app.example.evil", "null"):
        lines = (host, f"Origin: {other}")
        assert raw(server.port, "OPTIONS", "/v1/chat/completions", *lines, *PREFLIGHT)[0] == 403
        assert raw(server.port, "GET", "/v1/models", *lines, f"Authorization: Bearer {KEY}")[0] == 403
    assert raw(server.port, "GET", "/v1/models", "Host: evil.example", page)[0] == 403


def test_cors_for_all_pages(launch) -> None:
    server = launch(config={"cors_origins": ("*",)})
    status, fields, _ = server.get("/v1/models", Origin="https://any.example", **{"Sec-Fetch-Site": "cross-site"})
    assert (status, fields["access-control-allow-origin"]) == (200, "*")


def test_without_cors_nothing_is_allowed_beforehand(launch) -> None:
    server = launch()
    assert raw(server.port, "OPTIONS", "/sleep", own(server.port), "Origin: https://a.example", *PREFLIGHT)[0] == 403
    status, fields, _ = server.get("/v1/models")
    assert status == 200
    assert not [name for name in fields if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "config",
    [
        {"allowed_hosts": ("http://api.example",)},
        {"allowed_hosts": ("api.example:8000",)},
        {"allowed_hosts": ("a.example,b.example",)},
        {"allowed_hosts": ("a.*.example",)},
        {"allowed_hosts": ("",)},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/",)},
        {"cors_origins": ("https://a.example,https://b.example",)},
        {"cors_origins": ("https://*@app.example",)},
    ],
)
def test_names_that_could_match_nothing_are_refused_at_start(config: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        Names("127.0.0.1", **config)
    assert next(iter(config.values()))[0] in caught.value.info.message


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer  "])
def test_the_scheme_of_a_key_is_taken_in_any_case(launch, scheme: str) -> None:
    assert launch(config={"api_key": (KEY,)}).get("/v1/models", Authorization=f"{scheme} {KEY}")[0] == 200


@pytest.mark.parametrize(
    "given",
    ["Bearer sec", "Bearer secret2", "Bearer", "Bearer ", "secret", "Basic secret", "Bearersecret", "", "Bearer s\xff"],
)
def test_a_key_is_compared_whole_and_with_its_scheme(launch, given: str) -> None:
    assert launch(config={"api_key": ("secret",)}).get("/v1/models", Authorization=given)[0] == 401
