"""The flows with canned answers: each rule of discovery, registration, authorization and tokens, and what breaks it."""

from __future__ import annotations

import builtins
import json
import sys
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Generator
from hashlib import sha256
from itertools import count
from typing import Any, TypeVar
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest
from hypothesis import given, strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey
from msgspec.structs import replace

from handrail.errors import AuthorizationError
from handrail.model import Object
from handrail.oauth.flow import (
    AuthorizationRequest,
    AuthorizationServerError,
    Challenge,
    ClientRegistration,
    Discovered,
    FlowRequest,
    FlowResponse,
    OAuthClient,
    ServerMetadata,
    Token,
    TokenGrant,
    discover,
    read_challenge,
    validate_url,
)
from requirements import requirement

T = TypeVar("T")

NOW = 1_800_000_000.0
URL = "https://mcp.example/mcp"
ISSUER = "https://id.example"
REDIRECT = "http://127.0.0.1:4000/callback"
RESOURCE_AT = "https://mcp.example/.well-known/oauth-protected-resource"
SERVER_AT = f"{ISSUER}/.well-known/oauth-authorization-server"
RESOURCE: Object = {"resource": URL, "authorization_servers": [ISSUER]}
SERVER: Object = {
    "issuer": ISSUER,
    "authorization_endpoint": f"{ISSUER}/authorize",
    "token_endpoint": f"{ISSUER}/token",
    "registration_endpoint": f"{ISSUER}/register",
    "code_challenge_methods_supported": ["plain", "S256"],
    "token_endpoint_auth_methods_supported": ["none", "client_secret_basic"],
}
TOKEN: Object = {"access_token": "access", "token_type": "Bearer", "expires_in": 3600}
CLIENT = ClientRegistration("client", redirect=REDIRECT)

Documents = dict[str, Any]


def applicant(**more: Any) -> OAuthClient:
    numbers = count(1)
    return OAuthClient(clock=lambda: NOW, random=lambda: f"random-{next(numbers)}-{'x' * 43}", **more)


def walk(flow: Generator[Any, Any, T], documents: Documents) -> tuple[T, list[str]]:
    """The result of `flow` where only `documents` exist, and what it asked for. A number is a status without one."""
    asked: list[str] = []
    reply: Any = None
    try:
        while True:
            url = flow.send(reply).url
            asked.append(url)
            found = documents.get(url, 404)
            reply = FlowResponse(found) if isinstance(found, int) else FlowResponse(200, found)
    except StopIteration as end:
        result: T = end.value
        return result, asked


def found(**server: Any) -> Discovered:
    return walk(discover(URL, Challenge()), {f"{RESOURCE_AT}/mcp": RESOURCE, SERVER_AT: SERVER | server})[0]


def steps(flow: Generator[Any, Any, T], *replies: Any) -> tuple[T, list[Any]]:
    """The result of `flow` and its steps, which are replied to with `replies`; one that is callable gets the step."""
    taken = [flow.send(None)]
    try:
        for reply in replies:
            taken.append(flow.send(reply(taken[-1]) if callable(reply) else reply))
    except StopIteration as end:
        result: T = end.value
        return result, taken
    raise AssertionError(f"the flow goes on: {taken[-1]!r}")


def back(redirect: str = REDIRECT, **more: str | None) -> Callable[[AuthorizationRequest], str]:
    """The user agrees, and is sent back with `more`, or without what is None."""

    def go(step: AuthorizationRequest) -> str:
        said = {"code": "the-code", "state": step.state, "iss": ISSUER} | more
        return f"{redirect}?{urlencode({name: value for name, value in said.items() if value is not None})}"

    return go


def code_flow(me: OAuthClient | None = None, **server: Any) -> Generator[Any, Any, TokenGrant]:
    return (me or applicant()).authorize(found(**server), CLIENT, REDIRECT, ("read",))


# The challenge


@pytest.mark.parametrize(
    ("header", "challenge"),
    [
        ("", Challenge()),
        ("Bearer", Challenge()),
        ('Bearer scope="a b", error="invalid_token"', Challenge("", ("a", "b"), "invalid_token")),
        ("bearer scope=a", Challenge("", ("a",))),
        ("Bearer resource_metadata=https://x.example/y?z, scope=a", Challenge("https://x.example/y?z", ("a",))),
        ('Basic realm="a, Bearer scope=no", Bearer realm="r", scope="yes"', Challenge("", ("yes",))),
        ('Negotiate YWJj==, DPoP scope="no", Bearer scope="yes"', Challenge("", ("yes",))),
        ('Bearer scope="yes", Basic realm="r", scope="no"', Challenge("", ("yes",))),
        (r'Bearer error="a\"b\\c", scope="a"', Challenge("", ("a",), 'a"b\\c')),
        ('Bearer realm="x", Bearer resource_metadata="https://x.example"', Challenge("https://x.example")),
        ('Bearer scope="first", scope="second"', Challenge("", ("first",))),
        ('Bearer scope="a a \x07b \\"c d"', Challenge("", ("a", "d"))),
        ('Bearer scope="a", error="open', Challenge("", ("a",))),
        ('Bearer SCOPE = "a" ,, error = b', Challenge("", ("a",), "b")),
    ],
)
@requirement("CLI-42")
def test_a_challenge_is_read_as_it_was_meant(header: str, challenge: Challenge) -> None:
    assert read_challenge(header) == challenge


@given(st.text(alphabet=' "\\,=aB/', max_size=60) | st.text(max_size=200))
def test_no_challenge_makes_the_reader_fail(header: str) -> None:
    assert isinstance(read_challenge("Bearer " + header), Challenge)


def test_a_long_challenge_is_read_in_linear_time() -> None:
    assert read_challenge("Bearer " + '"\\' * 100_000) == Challenge()
    assert read_challenge("Bearer " + "a=b," * 100_000) == Challenge()


# What may be asked


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "file:///etc/passwd",
        "data:text/html,x",
        "-Fhttps://id.example",
        "--new-window",
        "",
        "//id.example/x",
        "http://id.example/x",
        "http://127.0.0.1.example/x",
        "http://localhost.example/x",
        "http://127.1/x",
        "http://2130706433/x",
        "https://user:secret@id.example/x",
        "https://id.example\\@evil.example/x",
        "https://id.example/x y",
        "https://id.example/x\r\nHost: y",
        "https://id.example/`id`",
        'https://id.example/"x"',
        "https://id.example:0/",
        "https://id.example:99999/",
        "https://id.example:x/",
        "https://[::1/",
        "https:///x",
        "https://id.example/#x",
        "https://ïd.example/",
        "https://id.example/" + "x" * 9000,
    ],
)
@requirement("P-26", "P-27")
def test_a_url_that_is_not_plain_https_is_neither_asked_nor_opened(url: str) -> None:
    with pytest.raises(AuthorizationError, match="https is needed"):
        validate_url(url, "it", local=True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://localhost/x", "http://[::1]:8000/"])
@requirement("P-26", "P-27")
def test_http_is_for_this_machine_and_a_server_on_it(url: str) -> None:
    assert validate_url(url, "it", local=True) == url
    with pytest.raises(AuthorizationError, match="https is needed"):
        validate_url(url, "it", local=False)


# The resource


@requirement("CLI-42")
def test_the_metadata_the_challenge_names_is_asked_for_first() -> None:
    documents = {"https://mcp.example/there": RESOURCE, SERVER_AT: SERVER}
    result, asked = walk(discover(URL, Challenge("https://mcp.example/there")), documents)
    assert asked == ["https://mcp.example/there", SERVER_AT]
    assert result.server.issuer == ISSUER


@requirement("CLI-42")
def test_without_a_challenge_the_path_comes_before_the_root() -> None:
    documents = {
        RESOURCE_AT: RESOURCE | {"resource": "https://mcp.example", "scopes_supported": ["a"]},
        SERVER_AT: SERVER,
    }
    result, asked = walk(discover(URL, Challenge()), documents)
    assert asked == [f"{RESOURCE_AT}/mcp", RESOURCE_AT, SERVER_AT]
    assert (result.resource, result.scopes) == ("https://mcp.example", ("a",))


@pytest.mark.parametrize(
    "resource",
    [
        "https://mcp.example/mcp",
        "https://mcp.example/mcp/",
        "https://mcp.example",
        "https://mcp.example/",
        "https://MCP.example:443/mcp",
        "HTTPS://mcp.example/mcp",
    ],
)
@requirement("CLI-42")
def test_the_resource_is_the_server_or_what_it_is_a_part_of(resource: str) -> None:
    documents = {f"{RESOURCE_AT}/mcp": RESOURCE | {"resource": resource}, SERVER_AT: SERVER}
    assert walk(discover(URL, Challenge()), documents)[0].resource == resource


@pytest.mark.parametrize(
    "resource",
    [
        "https://evil.example/mcp",
        "https://mcp.example.evil.example/mcp",
        "https://mcp.example:8443/mcp",
        "http://mcp.example/mcp",
        "https://mcp.example/mc",
        "https://mcp.example/mcp/other",
        "https://mcp.example/other",
        "https://mcp.example/mcp#x",
        "https://mcp.example/mcp?x",
        "https://user@mcp.example/mcp",
        "https://mcp.example\\.evil.example/mcp",
        "mcp.example",
        "",
    ],
)
@requirement("CLI-42", "P-26")
def test_another_resource_is_refused(resource: str) -> None:
    documents = {f"{RESOURCE_AT}/mcp": RESOURCE | {"resource": resource}, SERVER_AT: SERVER}
    with pytest.raises(AuthorizationError, match="another resource"):
        walk(discover(URL, Challenge()), documents)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (RESOURCE | {"authorization_servers": []}, "names no authorization server"),
        ({"resource": URL}, "names no authorization server"),
        (RESOURCE | {"authorization_servers": ["http://id.example"]}, "https is needed"),
        (RESOURCE | {"authorization_servers": ["javascript:alert(1)"]}, "https is needed"),
        (RESOURCE | {"authorization_servers": ["http://127.0.0.1:1"]}, "https is needed"),
        (RESOURCE | {"authorization_servers": [f"{ISSUER}?x"]}, "query"),
        (RESOURCE | {"authorization_servers": "https://id.example"}, "cannot be read"),
        ({"authorization_servers": [ISSUER]}, "cannot be read"),
        (500, "status 500"),
    ],
)
@requirement("P-26", "P-27")
def test_metadata_of_a_resource_that_cannot_be_used(document: object, complaint: str) -> None:
    with pytest.raises(AuthorizationError, match=complaint):
        walk(discover(URL, Challenge()), {f"{RESOURCE_AT}/mcp": document, SERVER_AT: SERVER})


@pytest.mark.parametrize("url", ["http://mcp.example/x", "file:///etc/passwd", "https://a@mcp.example/x"])
@requirement("P-27")
def test_a_challenge_cannot_send_us_anywhere(url: str) -> None:
    with pytest.raises(AuthorizationError, match="resource_metadata"):
        walk(discover(URL, Challenge(url)), {})


# The authorization server


@pytest.mark.parametrize(
    ("issuer", "order"),
    [
        (
            "https://id.example",
            [
                "https://id.example/.well-known/oauth-authorization-server",
                "https://id.example/.well-known/openid-configuration",
            ],
        ),
        (
            "https://id.example/tenant1",
            [
                "https://id.example/.well-known/oauth-authorization-server/tenant1",
                "https://id.example/.well-known/openid-configuration/tenant1",
                "https://id.example/tenant1/.well-known/openid-configuration",
            ],
        ),
    ],
)
@requirement("CLI-42")
def test_the_metadata_of_the_authorization_server_is_looked_for_in_the_order_of_the_specification(
    issuer: str, order: list[str]
) -> None:
    documents: Documents = {f"{RESOURCE_AT}/mcp": RESOURCE | {"authorization_servers": [issuer]}}
    for number, place in enumerate(order, 1):
        result, asked = walk(discover(URL, Challenge()), documents | {place: SERVER | {"issuer": issuer}})
        assert asked[1:] == order[:number]
        assert result.server.token_endpoint == f"{ISSUER}/token"
    with pytest.raises(AuthorizationError, match="no metadata"):
        walk(discover(URL, Challenge()), documents)


@pytest.mark.parametrize(
    "issuer", ["https://evil.example", f"{ISSUER}/", "https://ID.example", f"{ISSUER}:443", f"{ISSUER}/tenant"]
)
@requirement("CLI-42", "P-26")
def test_metadata_of_another_issuer_is_refused_however_like_it_looks(issuer: str) -> None:
    with pytest.raises(AuthorizationError, match="another issuer"):
        found(issuer=issuer)


@pytest.mark.parametrize("field", ["authorization_endpoint", "token_endpoint", "registration_endpoint"])
@pytest.mark.parametrize("url", ["http://id.example/x", "javascript:alert(1)", "-x", "http://127.0.0.1/x"])
@requirement("P-26", "P-27")
def test_no_endpoint_is_used_that_is_not_https(field: str, url: str) -> None:
    with pytest.raises(AuthorizationError, match=f"{field} is .* https is needed"):
        found(**{field: url})


@requirement("P-26")
def test_the_issuer_the_client_belongs_to_is_taken_or_none() -> None:
    two = RESOURCE | {"authorization_servers": ["https://other.example", ISSUER]}
    documents = {f"{RESOURCE_AT}/mcp": two, SERVER_AT: SERVER}
    assert walk(discover(URL, Challenge(), ISSUER), documents)[0].server.issuer == ISSUER
    with pytest.raises(AuthorizationError, match="does not name the authorization server of the client_id"):
        walk(discover(URL, Challenge(), "https://third.example"), documents)


@requirement("CLI-42")
def test_a_server_of_2025_03_26_is_its_own_authorization_server() -> None:
    home = "https://mcp.example"
    place = f"{home}/.well-known/oauth-authorization-server"
    for issuer in (home, f"{home}/"):
        result, asked = walk(discover(URL, Challenge()), {place: SERVER | {"issuer": issuer}})
        assert asked == [f"{RESOURCE_AT}/mcp", RESOURCE_AT, place]
        assert (result.resource, result.server.issuer) == (URL, issuer)
    with pytest.raises(AuthorizationError, match="another issuer"):
        walk(discover(URL, Challenge()), {place: SERVER})


@requirement("CLI-42")
def test_a_server_of_2025_03_26_without_metadata_has_the_usual_endpoints() -> None:
    result, _ = walk(discover(URL, Challenge()), {})
    home = "https://mcp.example"
    assert result.server == ServerMetadata(home, f"{home}/authorize", f"{home}/token", f"{home}/register", ["S256"])


def test_a_server_in_trouble_is_not_taken_for_one_of_2025_03_26() -> None:
    for trouble in ({f"{RESOURCE_AT}/mcp": 503}, {f"{RESOURCE_AT}/mcp": RESOURCE, SERVER_AT: 502}):
        with pytest.raises(AuthorizationError, match="status 50"):
            walk(discover(URL, Challenge()), trouble)


# Registration


@requirement("CLI-42", "P-26")
def test_a_client_registers_for_the_redirect_it_will_use() -> None:
    answer = FlowResponse(201, {"client_id": "made", "client_secret": "unasked"})
    client, (step,) = steps(applicant().register(found(), REDIRECT, None), answer)
    assert (step.url, step.headers) == (f"{ISSUER}/register", {"Content-Type": "application/json"})
    assert json.loads(step.data) == {
        "client_name": "Handrail",
        "redirect_uris": [REDIRECT],
        "application_type": "native",
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": "none",
    }
    assert (client.id, client.method, client.redirect) == ("made", "none", REDIRECT)


@pytest.mark.parametrize(
    ("offered", "asked"),
    [
        (["client_secret_basic", "none"], "none"),
        (["client_secret_post"], "client_secret_post"),
        (["client_secret_post", "client_secret_basic"], "client_secret_basic"),
    ],
)
@requirement("CLI-42")
def test_a_client_registers_with_a_method_the_server_offers(offered: list[str] | None, asked: str) -> None:
    answer = FlowResponse(201, {"client_id": "made", "client_secret": "secret"})
    flow = applicant().register(found(token_endpoint_auth_methods_supported=offered), REDIRECT, None)
    client, (step,) = steps(flow, answer)
    assert json.loads(step.data)["token_endpoint_auth_method"] == client.method == asked


def test_a_server_that_says_nothing_of_methods_means_the_usual_one() -> None:
    at = found(token_endpoint_auth_methods_supported=None)
    for made, method in (({}, "none"), ({"client_secret": "secret"}, "client_secret_basic")):
        client, (step,) = steps(
            applicant().register(at, REDIRECT, None), FlowResponse(201, {"client_id": "made", **made})
        )
        assert (json.loads(step.data)["token_endpoint_auth_method"], client.method) == ("none", method)


def test_the_method_the_server_registered_counts() -> None:
    made = {"client_id": "made", "client_secret": "secret", "token_endpoint_auth_method": "client_secret_post"}
    client, _ = steps(applicant().register(found(), REDIRECT, None), FlowResponse(201, made))
    assert (client.secret, client.method) == ("secret", "client_secret_post")


@requirement("CLI-42")
def test_a_client_is_who_the_user_says_before_who_a_document_says_before_who_it_is_registered_as() -> None:
    supported = found(client_id_metadata_document_supported=True)
    document = "https://app.example/client.json"

    def registered(me: OAuthClient, at: Discovered) -> str:
        flow = me.register(at, REDIRECT, CLIENT)
        with pytest.raises(StopIteration) as end:
            next(flow)
        client: ClientRegistration = end.value.value
        return client.id

    assert registered(applicant(client_id="mine", metadata_url=document), supported) == "mine"
    assert registered(applicant(metadata_url=document), supported) == document
    assert registered(applicant(metadata_url=document), found()) == "client"
    assert registered(applicant(), supported) == "client"


@requirement("P-26")
def test_a_registration_counts_for_its_redirect_and_until_its_secret_expires() -> None:
    other = ClientRegistration("old", redirect="http://127.0.0.1:4001/callback")
    over = ClientRegistration("old", "secret", "client_secret_basic", REDIRECT, NOW)
    for known in (other, over):
        client, _ = steps(applicant().register(found(), REDIRECT, known), FlowResponse(200, {"client_id": "new"}))
        assert client.id == "new"


def test_if_any_port_will_do_the_registered_one_is_taken() -> None:
    assert applicant().redirect_for(None) == "http://127.0.0.1:0/callback"
    assert applicant().redirect_for(CLIENT) == REDIRECT
    assert applicant(redirect="http://127.0.0.1:0/other").redirect_for(CLIENT) == "http://127.0.0.1:0/other"
    assert applicant(redirect="http://127.0.0.1:5000/callback").redirect_for(CLIENT) == "http://127.0.0.1:5000/callback"


@pytest.mark.parametrize(
    ("server", "answer", "complaint"),
    [
        ({"registration_endpoint": None}, None, r"does not register clients\. Register one there by hand"),
        ({"code_challenge_methods_supported": None}, None, "PKCE"),
        (
            {},
            FlowResponse(400, {"error": "invalid_redirect_uri", "error_description": "No."}),
            r"invalid_redirect_uri \(No\.",
        ),
        ({}, FlowResponse(403), "status 403"),
        ({}, FlowResponse(201, {"client_secret": "x"}), "cannot be read"),
        ({}, FlowResponse(201), "cannot be read"),
        (
            {},
            FlowResponse(201, {"client_id": "x", "token_endpoint_auth_method": "client_secret_basic"}),
            "without a secret",
        ),
    ],
)
@requirement("CLI-42")
def test_a_registration_that_fails(server: Object, answer: FlowResponse | None, complaint: str) -> None:
    with pytest.raises(AuthorizationError, match=complaint):
        steps(applicant().register(found(**server), REDIRECT, None), *([answer] if answer else []))


# Authorization


@requirement("CLI-42", "P-26")
def test_a_code_is_asked_for_and_exchanged() -> None:
    grant, (ask, exchange) = steps(code_flow(), back(), FlowResponse(200, TOKEN | {"refresh_token": "refresh"}))
    said = dict(parse_qsl(urlsplit(ask.url).query))
    verifier = exchange.data["code_verifier"]
    assert ask.url.startswith(f"{ISSUER}/authorize?")
    assert said == {
        "response_type": "code",
        "client_id": "client",
        "redirect_uri": REDIRECT,
        "code_challenge": urlsafe_b64encode(sha256(verifier.encode()).digest()).decode().rstrip("="),
        "code_challenge_method": "S256",
        "state": ask.state,
        "resource": URL,
        "scope": "read",
    }
    assert len(verifier) >= 43 and verifier != ask.state
    assert exchange.url == f"{ISSUER}/token"
    assert exchange.data == {
        "grant_type": "authorization_code",
        "code": "the-code",
        "redirect_uri": REDIRECT,
        "code_verifier": verifier,
        "resource": URL,
        "client_id": "client",
    }
    token = Token("access", "refresh", ("read",), ("read",), NOW + 3570, NOW + 3600)
    assert grant == TokenGrant(ISSUER, URL, f"{ISSUER}/token", CLIENT, token)


@requirement("P-26")
def test_every_request_has_its_own_state_and_verifier() -> None:
    me = applicant()
    first, second = (steps(code_flow(me), back(), FlowResponse(200, TOKEN))[1] for _ in range(2))
    assert first[0].state != second[0].state
    assert first[1].data["code_verifier"] != second[1].data["code_verifier"]


@requirement("P-26")
def test_an_answer_to_an_earlier_request_is_refused() -> None:
    me, kept = applicant(), []

    def remembered(step: AuthorizationRequest) -> str:
        kept.append(back()(step))
        return kept[0]

    steps(code_flow(me), remembered, FlowResponse(200, TOKEN))
    with pytest.raises(AuthorizationError, match="`state`"):
        steps(code_flow(me), kept[0])


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (back(state=None), "`state`"),
        (back(state=""), "`state`"),
        (back(state="another"), "`state`"),
        (back(code=None), "no authorization code"),
        (back(code=""), "no authorization code"),
        (back(code="x" * 20_000), "no authorization code"),
        (back(redirect="http://127.0.0.1:4001/callback"), "another address"),
        (back(redirect="http://127.0.0.1:4000/callback/"), "another address"),
        (back(redirect="http://localhost:4000/callback"), "another address"),
        (back(redirect="https://evil.example/callback"), "another address"),
        (lambda step: back()(step) + "#x", "another address"),
        (lambda step: back()(step) + "&code=second", "not what an authorization server sends"),
        (lambda step: back()(step) + "&x" * 40, "not what an authorization server sends"),
        (lambda step: "", "another address"),
        (back(error="access_denied", code=None), "does not authorize us: access_denied$"),
        (back(error="access_denied", error_description="You said no."), r"access_denied \(You said no\.\)$"),
        (back(error="\x1b[2Jx", error_description="\x1b]0;x\x07"), "no printable reason$"),
    ],
)
@requirement("CLI-42", "P-26", everywhere=True)
def test_p26_what_comes_back_is_checked_before_a_code_is_sent_anywhere(reply: Any, complaint: str) -> None:
    with pytest.raises(AuthorizationError, match=complaint):
        steps(code_flow(), reply)


@pytest.mark.parametrize("announced", [True, False, None])
@pytest.mark.parametrize("iss", [ISSUER, None, f"{ISSUER}/", "https://ID.example", "https://evil.example", ""])
@requirement("CLI-42", "P-26")
def test_what_comes_back_names_the_authorization_server_that_was_asked(announced: bool | None, iss: str | None) -> None:
    """The table of 2026-07-28, Authorization Response Validation."""
    flow = code_flow(authorization_response_iss_parameter_supported=announced)
    if iss == ISSUER or (iss is None and not announced):
        steps(flow, back(iss=iss), FlowResponse(200, TOKEN))
        return
    with pytest.raises(AuthorizationError, match="authorization server"):
        steps(flow, back(iss=iss))


@requirement("P-26")
def test_an_error_of_another_issuer_is_not_shown() -> None:
    with pytest.raises(AuthorizationError, match="another authorization server") as raised:
        steps(code_flow(), back(iss="https://evil.example", error="access_denied", error_description="Call 555-1234"))
    assert "555" not in str(raised.value)


@pytest.mark.parametrize("methods", [None, [], ["plain"], ["s256"]])
@requirement("CLI-42", "P-26", everywhere=True)
def test_p26_without_s256_nobody_is_asked(methods: list[str] | None) -> None:
    with pytest.raises(AuthorizationError, match="PKCE with S256"):
        next(code_flow(code_challenge_methods_supported=methods))


def test_the_query_of_an_authorization_endpoint_cannot_speak_for_us() -> None:
    flow = code_flow(authorization_endpoint=f"{ISSUER}/authorize?tenant=1&redirect_uri=https://evil.example&state=x")
    _, (ask, _) = steps(flow, back(), FlowResponse(200, TOKEN))
    said = parse_qs(urlsplit(ask.url).query)
    assert said["tenant"] == ["1"]
    assert said["redirect_uri"] == [REDIRECT] and said["state"] == [ask.state]


@pytest.mark.parametrize("field", ["authorization_endpoint", "token_endpoint"])
def test_an_authorization_server_without_endpoints(field: str) -> None:
    with pytest.raises(AuthorizationError, match="has no"):
        steps(code_flow(**{field: None}), back())


# Tokens


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (FlowResponse(200, TOKEN | {"token_type": "mac"}), "not a bearer token"),
        (FlowResponse(200, TOKEN | {"token_type": "DPoP"}), "not a bearer token"),
        (FlowResponse(200, {"access_token": "access"}), "cannot be read"),
        (FlowResponse(200, TOKEN | {"access_token": 7 * [1]}), "cannot be read"),
        (FlowResponse(200, TOKEN | {"access_token": ""}), "does not look like one"),
        (FlowResponse(200, TOKEN | {"access_token": "a\r\nCookie: x"}), "does not look like one"),
        (FlowResponse(200, TOKEN | {"access_token": "a" * 20_000}), "too long"),
        (FlowResponse(200, TOKEN | {"refresh_token": "a b"}), "does not look like one"),
        (FlowResponse(200), "cannot be read"),
        (FlowResponse(302, TOKEN), "does not give a token: status 302"),
        (FlowResponse(400, {"error": "invalid_grant"}), "invalid_grant"),
        (FlowResponse(500), "status 500"),
    ],
)
@requirement("CLI-42", "P-26")
def test_an_answer_that_is_no_bearer_token_is_refused(answer: FlowResponse, complaint: str) -> None:
    with pytest.raises(AuthorizationError, match=complaint):
        steps(code_flow(), back(), answer)


@pytest.mark.parametrize(
    ("said", "renew_at", "expires_at"),
    [
        ({"expires_in": 3600}, NOW + 3570, NOW + 3600),
        ({"expires_in": "3600"}, NOW + 3570, NOW + 3600),
        ({"expires_in": 20}, NOW + 18, NOW + 20),
        ({"expires_in": 0}, NOW, NOW),
        ({"expires_in": -1}, float("inf"), float("inf")),
        ({"expires_in": None}, float("inf"), float("inf")),
    ],
)
def test_a_token_is_renewed_shortly_before_it_expires(said: Object, renew_at: float, expires_at: float) -> None:
    grant, _ = steps(code_flow(), back(), FlowResponse(200, TOKEN | said))
    assert (grant.token.renew_at, grant.token.expires_at) == (renew_at, expires_at)


def test_the_scope_that_was_granted_is_known() -> None:
    grant, _ = steps(code_flow(), back(), FlowResponse(200, TOKEN | {"scope": "other"}))
    assert (grant.token.asked, grant.token.granted) == (("read",), ("other",))


@pytest.mark.parametrize("echo", ["the-code", "random-2-" + "x" * 43])
@requirement("P-26", "P-34")
def test_an_authorization_server_that_repeats_a_secret_is_not_quoted(echo: str) -> None:
    answer = FlowResponse(400, {"error": "invalid_grant", "error_description": f"{echo} is not good"})
    with pytest.raises(AuthorizationServerError, match=r"invalid_grant$") as raised:
        steps(code_flow(), back(), answer)
    assert raised.value.error == "invalid_grant"


@pytest.mark.parametrize(
    ("method", "header", "fields"),
    [
        ("client_secret_basic", "a%2Fb:c%3Ad%20e", {}),
        ("client_secret_post", None, {"client_id": "a/b", "client_secret": "c:d e"}),
        ("none", None, {"client_id": "a/b"}),
    ],
)
@requirement("CLI-42")
def test_a_client_shows_who_it_is_in_one_way(method: str, header: str | None, fields: Object) -> None:
    client = ClientRegistration("a/b", "c:d e", method, REDIRECT)
    flow = applicant().authorize(found(), client, REDIRECT, ())
    _, (_, exchange) = steps(flow, back(), FlowResponse(200, TOKEN))
    shown = exchange.headers.get("Authorization")
    assert (shown and b64decode(shown.removeprefix("Basic ")).decode()) == header
    shown_fields = {name: value for name, value in exchange.data.items() if name.startswith("client_")}
    assert shown_fields == fields


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (None, "client_secret_basic"),
        (["client_secret_post"], "client_secret_post"),
        (["client_secret_post", "client_secret_basic"], "client_secret_basic"),
        (["tls_client_auth"], "client_secret_basic"),
    ],
)
def test_a_client_with_a_secret_uses_a_method_the_server_offers(offered: list[str] | None, chosen: str) -> None:
    me = applicant(client_id="mine", client_secret="secret")
    at = found(token_endpoint_auth_methods_supported=offered)
    grant, (step,) = steps(me.client_credentials(at, ()), FlowResponse(200, TOKEN))
    assert grant.client == ClientRegistration("mine", method=chosen)  # the secret stays with the user
    assert ("Authorization" in step.headers) == (chosen == "client_secret_basic")


def test_a_method_we_do_not_have_is_named() -> None:
    flow = applicant().authorize(found(), ClientRegistration("client", method="tls_client_auth"), REDIRECT, ())
    with pytest.raises(AuthorizationError, match="tls_client_auth"):
        steps(flow, back())


@requirement("CLI-42")
def test_client_credentials_with_a_secret() -> None:
    me = applicant(client_id="mine", client_secret="secret")
    grant, (step,) = steps(me.client_credentials(found(), ("a", "b")), FlowResponse(200, TOKEN))
    assert step.data == {"grant_type": "client_credentials", "resource": URL, "scope": "a b"}
    assert grant.token.access == "access"
    with pytest.raises(AuthorizationError, match="client_secret or private_key"):
        next(applicant(client_id="mine").client_credentials(found(), ()))


@requirement("CLI-42")
def test_client_credentials_with_a_signed_assertion() -> None:
    key = ECKey.generate_key("P-256")
    me = applicant(client_id="mine", private_key=key.as_pem(private=True).decode(), signing_algorithm="ES256")
    _, (step,) = steps(me.client_credentials(found(), ()), FlowResponse(200, TOKEN))
    said = jwt.decode(step.data["client_assertion"], key, algorithms=["ES256"])
    assert step.data["client_assertion_type"] == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    assert said.claims | {"jti": ""} == {
        "iss": "mine",
        "sub": "mine",
        "aud": ISSUER,
        "iat": NOW,
        "exp": NOW + 60,
        "jti": "",
    }


@pytest.mark.parametrize(("key", "algorithm"), [("not a key", "ES256"), ("not a key", "XX"), ("not a key", "HS256")])
@requirement("P-34")
def test_a_private_key_that_is_none_is_not_quoted(key: str, algorithm: str) -> None:
    me = applicant(client_id="mine", private_key=key, signing_algorithm=algorithm)
    with pytest.raises(AuthorizationError, match="private_key cannot sign") as raised:
        next(me.client_credentials(found(), ()))
    assert key not in str(raised.value)


def test_without_joserfc_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "joserfc"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "joserfc":
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    me = applicant(client_id="mine", private_key="x", signing_algorithm="ES256")
    with pytest.raises(ModuleNotFoundError, match=r"python -m pip install 'joserfc"):
        next(me.client_credentials(found(), ()))


# Refresh


def held(**token: Any) -> TokenGrant:
    first = Token("old", "refresh-1", ("read",), ("read",), NOW, NOW)
    return TokenGrant(ISSUER, URL, f"{ISSUER}/token", CLIENT, replace(first, **token))


@requirement("CLI-42", "P-26")
def test_a_refresh_goes_to_the_issuer_of_the_token_and_takes_the_next_one() -> None:
    answer = FlowResponse(200, TOKEN | {"refresh_token": "refresh-2"})
    grant, (step,) = steps(applicant().refresh(held()), answer)
    assert step.url == f"{ISSUER}/token"
    assert step.data == {
        "grant_type": "refresh_token",
        "refresh_token": "refresh-1",
        "resource": URL,
        "client_id": "client",
    }
    assert grant.token == Token("access", "refresh-2", ("read",), ("read",), NOW + 3570, NOW + 3600)


def test_a_refresh_token_that_is_not_replaced_stays() -> None:
    grant, _ = steps(applicant().refresh(held(granted=("less",))), FlowResponse(200, TOKEN))
    assert (grant.token.refresh, grant.token.granted) == ("refresh-1", ("less",))


@requirement("P-34")
def test_a_refresh_that_is_refused_says_why_and_not_what() -> None:
    with pytest.raises(AuthorizationServerError, match="invalid_grant") as raised:
        steps(
            applicant().refresh(held()),
            FlowResponse(400, {"error": "invalid_grant", "error_description": "refresh-1?"}),
        )
    assert raised.value.error == "invalid_grant"
    assert "refresh-1" not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "is_verdict"),
    [
        (FlowResponse(400, {"error": "invalid_grant"}), True),
        (FlowResponse(400), True),
        (FlowResponse(401), True),
        (FlowResponse(503), False),
        (FlowResponse(502, "<html>"), False),
        (FlowResponse(429), False),
        (FlowResponse(302), False),
    ],
)
def test_trouble_on_the_way_is_no_verdict_on_a_refresh_token(answer: FlowResponse, is_verdict: bool) -> None:
    with pytest.raises(AuthorizationError) as raised:
        steps(applicant().refresh(held()), answer)
    assert isinstance(raised.value, AuthorizationServerError) == is_verdict


# Scopes


@pytest.mark.parametrize(
    ("challenge", "resource", "held", "offered", "asked"),
    [
        (Challenge(), None, (), None, ()),
        (Challenge(), ["a", "b"], (), None, ("a", "b")),
        (Challenge(scopes=("c",)), ["a", "b"], (), None, ("c",)),
        (Challenge(scopes=("c",)), ["a"], ("b",), None, ("b", "c")),
        (Challenge(), ["a"], ("b",), None, ("b",)),
        (Challenge(error="insufficient_scope"), ["a"], ("b",), None, ("b", "a")),
        (Challenge(scopes=("a",)), None, (), ["a", "offline_access"], ("a", "offline_access")),
        (Challenge(), None, (), ["a", "offline_access"], ()),
        (Challenge(scopes=("a", "offline_access")), None, (), ["a"], ("a",)),
        (Challenge(), ["a", "offline_access"], (), None, ("a",)),
        (Challenge(), ["a", "a", "b\n", ""], (), None, ("a",)),
    ],
)
@requirement("CLI-42")
def test_the_scopes_that_are_asked_for(
    challenge: Challenge, resource: Any, held: tuple[str, ...], offered: Any, asked: tuple[str, ...]
) -> None:
    documents = {
        f"{RESOURCE_AT}/mcp": RESOURCE | {"scopes_supported": resource},
        SERVER_AT: SERVER | {"scopes_supported": offered},
    }
    at, _ = walk(discover(URL, Challenge()), documents)
    assert applicant().scopes_to_request(challenge, at, held) == asked


@requirement("P-26")
def test_no_more_is_asked_for_than_the_user_allows() -> None:
    me = applicant(scopes=("a",))
    assert me.scopes_to_request(Challenge(scopes=("a", "b")), found(), ()) == ("a",)
    with pytest.raises(AuthorizationError, match=r"wants the scope 'b'. Add it to `scopes`"):
        me.scopes_to_request(Challenge(scopes=("a", "b"), error="insufficient_scope"), found(), ("a",))


@requirement("CLI-42")
def test_for_offline_access_the_user_is_asked_again() -> None:
    flow = applicant().authorize(found(), CLIENT, REDIRECT, ("a", "offline_access"))
    _, (ask, _) = steps(flow, back(), FlowResponse(200, TOKEN))
    assert parse_qs(urlsplit(ask.url).query)["prompt"] == ["consent"]


# Secrets


@requirement("P-34")
def test_nothing_shows_its_secrets() -> None:
    me = applicant(client_id="mine", client_secret="canary", private_key="canary", signing_algorithm="ES256")
    grant = TokenGrant(ISSUER, URL, f"{ISSUER}/token", ClientRegistration("id", "canary"), Token("canary", "canary"))
    shown = [
        me,
        grant,
        FlowResponse(200, {"access_token": "canary"}),
        FlowRequest(URL, {"code": "canary"}, {"x": "canary"}),
    ]
    assert "canary" not in repr([*shown, AuthorizationRequest("https://x?state=canary", "canary", ISSUER)])
