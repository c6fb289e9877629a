"""Signatures of an audit log on the command line: `handrail audit verify --key` and `handrail audit key`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.audit.format import Defect
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.terminal import Screen
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.audit.signature_check import Chains, SignatureCheck, SignatureReport

__all__ = ["defect_text", "print_key", "print_signatures", "signature_check"]

MAX_FLAWS = 20  # of the signatures, in text


def defect_text(defect: Defect) -> str:
    place = one_line(defect.place, 200)
    return f"{f'record {defect.number} ({place})' if defect.number else place}: {one_line(defect.text, 600)}"


def signature_check(read: Callable[[], Chains], args: Namespace) -> SignatureCheck | None:
    """Return the check with the key and the copies of the command line; None without a key."""
    if not args.key:
        if args.checkpoints:
            raise UsageError("--checkpoints: they are checked with the public key; add --key PUBLIC-KEY")
        return None
    try:
        from handrail.audit.signature_check import SignatureCheck  # deferred: it needs the extra `signing`
        from handrail.audit.signing import parse_public_key

        is_key = args.key.startswith("ed25519:")
        key = parse_public_key(args.key if is_key else _text_of(Path(args.key), "--key"))
    except (ValueError, ModuleNotFoundError) as problem:
        raise UsageError(f"--key: {problem}") from None
    copies = _text_of(Path(args.checkpoints), "--checkpoints").splitlines() if args.checkpoints else []
    placed = [(f"{args.checkpoints}:{number}", line.encode()) for number, line in enumerate(copies, 1)]
    return SignatureCheck(key, read(), placed)


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError as problem:
        raise UsageError(f"{option}: {path}: {problem.strerror}") from None


def print_signatures(signed: SignatureReport, screen: Screen) -> None:
    for flaw in signed.flaws[:MAX_FLAWS]:
        screen.write(f"  {defect_text(flaw)}")
    if len(signed.flaws) > MAX_FLAWS:
        screen.write(f"  and {len(signed.flaws) - MAX_FLAWS} more of the signatures")
    if signed.signed.keys() == {""}:
        screen.write(f"  signed up to record {signed.signed['']}")
    elif signed.signed:
        screen.write(f"  {len(signed.signed)} writers are signed, {sum(signed.signed.values())} records")
    count, at = signed.checkpoints, one_line(signed.at, 64) or "never"
    screen.write(f"  {count} checkpoints signed with {signed.key}, the last {at}; {signed.unsigned} records after it")
    if signed.other_keys:
        screen.write(f"  other keys have signed too: {one_line(', '.join(signed.other_keys), 400)}")
    if signed.open:
        names = one_line(", ".join(signed.open), 200)
        screen.write(f"  {len(signed.open)} writers still run, were killed, or their end was cut off: {names}")


def print_key(args: Namespace, screen: Screen) -> ExitCode:
    """Make a key pair, if there is none yet, and print the public key."""
    if len(args.files) != 1:
        raise UsageError("audit key: name the file of the private key: handrail audit key signing.pem")
    path = Path(args.files[0])
    try:
        from handrail.audit.signing import load_signing_key, write_new_key  # deferred: it needs the extra `signing`

        is_new = not path.exists()
        public = write_new_key(path) if is_new else load_signing_key(str(path)).public
    except (ValueError, ModuleNotFoundError) as problem:
        raise UsageError(f"audit key: {problem}") from None
    except OSError as problem:
        raise UsageError(f"audit key: {path}: {problem.strerror}") from None
    if screen.as_json:
        screen.data({"file": str(path), "new": is_new, "public_key": public})
        return ExitCode.OK
    if is_new:
        screen.note(f"{path} is a new private key: keep it with the server, and this public key elsewhere")
    screen.write(public)
    return ExitCode.OK
