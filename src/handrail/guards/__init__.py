"""Guards: checks around a call. Each is one object with one job, and each is optional.

The names below are public, with those of `handrail`. They are imported from their modules at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.lazy import lazy_names
from handrail.text import log_filter as log_filter  # cleans log lines from the first import of any guard

if TYPE_CHECKING:
    from handrail.approvals.queue import (
        Approval as Approval,
        ApprovalError as ApprovalError,
        ApprovalQueue as ApprovalQueue,
        Approvals as Approvals,
    )
    from handrail.approvals.request import ApprovalGrant as ApprovalGrant
    from handrail.approvals.webhook import Webhook as Webhook
    from handrail.audit.checkpoints import Checkpoints as Checkpoints
    from handrail.audit.format import TrailError as TrailError
    from handrail.audit.log import Trail as Trail, TrailSettings as TrailSettings, open_trail as open_trail
    from handrail.engine.guard_set import GuardOptions as GuardOptions
    from handrail.guards.limits import (
        Rate as Rate,
        Rates as Rates,
        ToolRate as ToolRate,
        UpstreamRate as UpstreamRate,
    )
    from handrail.guards.policy import Policy as Policy, Rule as Rule
    from handrail.guards.predicates import Predicate as Predicate
    from handrail.guards.sanitize import (
        Blocked as Blocked,
        Finding as Finding,
        Sanitize as Sanitize,
        ToolSanitize as ToolSanitize,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "approvals.request": "ApprovalGrant",
            "approvals.queue": "Approval ApprovalError ApprovalQueue Approvals",
            "approvals.webhook": "Webhook",
            "audit.checkpoints": "Checkpoints",
            "audit.format": "TrailError",
            "audit.log": "Trail TrailSettings open_trail",
            "engine.guard_set": "GuardOptions",
            "guards.policy": "Policy Rule",
            "guards.predicates": "Predicate",
            "guards.limits": "Rate Rates ToolRate UpstreamRate",
            "guards.sanitize": "Blocked Finding Sanitize ToolSanitize",
        },
    )
