"""A span for each call, through OpenTelemetry: the one file that imports it, loaded when a server has `tracing=True`.

Names and attributes are those of OpenTelemetry's conventions for MCP. Neither arguments nor results are in them, and no
session id, which is as good as a password.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace as otel
from opentelemetry.context import Context, attach

from handrail import __version__
from handrail.engine.call_state import CallState
from handrail.engine.outcome import CallEnd, RefusedCall
from handrail.errors import Kind
from handrail.protocol.trace import Trace
from handrail.revisions.base import ErrorMapping

MAX_ID_CHARS = 100
_FINE = ("ok", "input_required")
_KINDS = {kind.value: kind for kind in Kind}


class SpanSink:
    """Makes a span of each call. It is the current one inside the call: spans of the tool belong to it."""

    def __init__(self, forms: Mapping[Kind, ErrorMapping]) -> None:
        self._forms = forms
        self._tracer = otel.get_tracer("handrail", __version__)
        self._spans: dict[CallState, otel.Span] = {}

    def on_start(self, call: CallState) -> None:
        parent, links = _parent(call)
        name = f"{call.entry.method} {call.entry.limit_name}"
        self._spans[call] = span = self._tracer.start_span(name, parent, otel.SpanKind.SERVER, _attributes(call), links)
        attach(otel.set_span_in_context(span))  # never detached: the context is the call's own

    def on_end(self, call: CallState, end: CallEnd, answer: bytes | None) -> None:
        span = self._spans.pop(call)
        _describe_end(span, end.outcome, call.revision.error_mappings, self._forms)
        span.end()

    def on_refusal(self, refusal: RefusedCall) -> None:
        """Make no span: there was no call."""


def _parent(call: CallState) -> tuple[Context | None, list[otel.Link]]:
    """Return the parent: the context of `_meta`, linked to the current span; else that span; else the headers."""
    around = otel.get_current_span().get_span_context()
    if call.named_trace is not None:
        return _context(call.named_trace), [otel.Link(around)] if around.is_valid else []
    return None if around.is_valid or call.trace is None else _context(call.trace), []


def _context(trace: Trace) -> Context:
    state = otel.TraceState.from_header([trace.state])
    span_context = otel.SpanContext(
        int(trace.trace_id, 16), int(trace.parent_id, 16), True, otel.TraceFlags(trace.flags), state
    )
    return otel.set_span_in_context(otel.NonRecordingSpan(span_context))


def _attributes(call: CallState) -> dict[str, str]:
    kinds = {
        "tool": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name},
        "resource": {"mcp.resource.uri": call.name},
        "prompt": {"gen_ai.prompt.name": call.name},
    }
    return {
        "mcp.method.name": call.entry.method,
        "mcp.protocol.version": call.revision.name,
        **kinds[call.entry.kind],
        "jsonrpc.request.id": str(call.id)[:MAX_ID_CHARS],
        **({"network.protocol.name": "http"} if call.over_http else {}),
        "network.transport": "tcp" if call.over_http else "pipe",
    }


def _describe_end(
    span: otel.Span, outcome: str, faults: Mapping[Kind, ErrorMapping], forms: Mapping[Kind, ErrorMapping]
) -> None:
    if outcome in _FINE:
        return
    kind = _KINDS.get(outcome)
    code = 0 if kind is None else (forms.get(kind) or faults[kind]).code  # 0: the answer is a result
    if code:
        span.set_attribute("rpc.response.status_code", str(code))
    span.set_attribute("error.type", str(code) if code else outcome if outcome == "cancelled" else "tool_error")
    span.set_status(otel.Status(otel.StatusCode.ERROR, outcome))
