"""Authorization: who calls a server over HTTP, and how a client gets its tokens.

`Server.run(http=…, auth=…)` takes `ApiKeys`, `JwtVerifier`, `Introspection` or a `Verifier` of your own;
`Client(url, auth=…)` takes `OAuth`. Names are imported from their modules at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.lazy import lazy_names

if TYPE_CHECKING:
    from handrail.guards.identity import ApiKeys as ApiKeys, Verifier as Verifier
    from handrail.oauth.client import OAuth as OAuth, open_browser as open_browser
    from handrail.oauth.resource_server import Introspection as Introspection, JwtVerifier as JwtVerifier
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "guards.identity": "ApiKeys Verifier",
            "oauth.client": "open_browser OAuth",
            "oauth.resource_server": "Introspection JwtVerifier",
        },
    )
