"""The public surface: four modules, their names, and what the documentation imports."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PUBLIC = {
    "handrail": """
        Answer Audio AuthorizationError BlockingClient Call CallFailed CallResult CallTimeout Client ClientInfo
        Clocks Completion ConfigError Confirmation ConfirmationRequired Console Denied Elicitation
        EmbeddedResource EndpointOptions Form Gateway HandrailError HttpLimits HttpOptions HttpRefused Image
        InvalidResult Kind Limits ListedPrompt ListedResource ListedTemplate ListedTool LocalProtocolError Log
        MemoryStore PeerError Principal Progress Prompt PromptMessage PromptMessages PromptOptions ReadResult
        Refused RemoteProtocolError Resource ResourceLink ResourceNotFound ResourceOptions ResourceTemplate
        Roots Sample Sampling SchemaError Sent Server ServerEntry ServerOptions SqliteStore Store StoreError
        Text Tool ToolError ToolOptions ToolResult Tools TransportError Unrecorded Url allow load_config
    """,
    "handrail.guards": """
        Approval ApprovalError ApprovalGrant ApprovalQueue Approvals Blocked Checkpoints Finding GuardOptions Policy
        Predicate Rate Rates Rule Sanitize ToolRate ToolSanitize Trail TrailError TrailSettings UpstreamRate Webhook
        open_trail
    """,
    "handrail.auth": "ApiKeys Introspection JwtVerifier OAuth Verifier open_browser",
    "handrail.testing": "Peer PeerChannel",
}
"""Adding a name is a decision: it is documented, and stays."""

IMPORT = re.compile(r"\bfrom (handrail[\w.]*) import ([\w, ]+)|\bimport (handrail[\w.]*)")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_of_a_module_are_these(name: str) -> None:
    public: list[str] = vars(module(name))["__all__"]
    assert sorted(public) == sorted(PUBLIC[name].split())
    for each in public:
        assert getattr(module(name), each).__name__ == each
        assert each in dir(module(name))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Nothing'"):
        getattr(module(name), "Nothing")  # noqa: B009  # which types do not allow


@pytest.mark.parametrize("name", ["handrail", "handrail.guards", "handrail.auth"])
def test_type_checkers_see_the_public_names_that_are_loaded_at_first_use(name: str) -> None:
    source = ast.parse(Path(str(module(name).__file__)).read_text("utf-8"))
    [block] = [each for each in source.body if isinstance(each, ast.If)]
    imported = [alias for each in block.body if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert sorted(alias.name for alias in imported) == sorted(PUBLIC[name].split())
    assert [alias.name for alias in imported if alias.asname != alias.name] == []  # only so it is re-exported


def test_a_public_name_stands_in_one_module() -> None:
    names = [name for names in PUBLIC.values() for name in names.split()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_lists_the_public_names_of_a_module(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "public-names.md").read_text("utf-8")
    section = page.split(f"## `{name}`\n", 1)[1].split("\n## ", 1)[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [each for cell in first_cells for each in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(PUBLIC[name].split())


def imports(text: str) -> list[tuple[str, str]]:
    """The modules of handrail that a text imports, each with a name."""
    pairs: list[tuple[str, str]] = []
    for from_module, names, plain_module in IMPORT.findall(text):
        pairs += [(from_module, name.strip()) for name in names.split(",")] if names else [(plain_module, "")]
    return pairs


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documentation_imports_public_names_only(page: Path) -> None:
    wrong = [(place, name) for place, name in imports(page.read_text("utf-8")) if place not in PUBLIC]
    wrong += [
        (place, name)
        for place, name in imports(page.read_text("utf-8"))
        if name and place in PUBLIC and name not in PUBLIC[place].split() and name not in ("auth", "guards", "testing")
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documentation_names_no_module_that_is_not_public(page: Path) -> None:
    if page.name in ("architecture.md", "requirements.md"):  # for those who change the package
        return
    private = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in (ROOT / "src").rglob("*.py")}
    private = {name.removesuffix(".__init__") for name in private} - PUBLIC.keys()
    names = re.findall(r"\bhandrail(?:\.\w+)+", "".join(re.findall(r"`[^`\n]+`", page.read_text("utf-8"))))
    assert [name for name in names if name in private or name.rpartition(".")[0] in private] == []


def test_imports_are_read_from_every_form() -> None:
    text = "from handrail import Server, Call\nimport handrail.guards\n`from handrail.client import Client`: x\n"
    assert imports(text) == [
        ("handrail", "Server"),
        ("handrail", "Call"),
        ("handrail.guards", ""),
        ("handrail.client", "Client"),
    ]
