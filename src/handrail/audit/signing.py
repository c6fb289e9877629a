"""Ed25519 keys that sign the checkpoints of an audit log: where they come from, and how they are written down.

A private key is PKCS #8, as PEM or as the base64 inside it: `openssl genpkey -algorithm ed25519` makes one too. A
public key is `ed25519:` and the base64 of its 32 bytes, or PEM.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

from msgspec.json import encode

from handrail.errors import missing_extra
from handrail.model import Json

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_der_private_key,
        load_der_public_key,
    )
except ModuleNotFoundError as missing:
    raise missing_extra("signing", "signing an audit log needs cryptography", missing.name) from None

__all__ = ["SigningKey", "is_signed", "load_signing_key", "parse_public_key", "write_new_key"]

COMMAND_SECONDS = 10.0  # how long a program that prints a key may take
MAX_KEY_BYTES = 16 * 1024
PUBLIC = "ed25519:"
CONTEXT = b"handrail-checkpoint-v1\n"
"""Goes before what is signed: no signature made for another purpose is one of a checkpoint."""

_PEM_LINE = re.compile(r"-----[^-\n]*-----")


class SigningKey:
    """A private key, and the text of its public one."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = _public_text(private.public_key())

    def sign(self, statement: Json) -> str:
        return b64encode(self._private.sign(_signed_bytes(statement))).decode()


def is_signed(public: str, signature: str, statement: Json) -> bool:
    """Return whether the signature of the statement was made with the private key of `public`."""
    try:
        key = Ed25519PublicKey.from_public_bytes(b64decode(public.removeprefix(PUBLIC), validate=True))
        key.verify(b64decode(signature, validate=True), _signed_bytes(statement))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(statement: Json) -> bytes:
    """What is signed is the JSON without blanks, its members in their order: copies may be laid out differently."""
    return CONTEXT + encode(statement)


def load_signing_key(source: str) -> SigningKey:
    """Return the private key of a file, of `env:VARIABLE`, or the output of `command:PROGRAM …`.

    ValueError says what is wrong, and never has any of the key in it. This waits for files and programs.
    """
    kind, _, rest = source.partition(":")
    if kind == "env":
        text, where = os.environ.get(rest, ""), f"the environment variable {rest}"
        if not text:
            raise ValueError(f"{where} is not set")
    elif kind == "command":
        text, where = _output_of(rest), "the output of the command"
    else:
        text, where = _private_text(Path(source)), source
    if "ENCRYPTED" in text:
        raise ValueError(f"{where} is a key with a passphrase; give it without, or from a command that decrypts it")
    try:
        key = load_der_private_key(_der(text), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError(f"{where} is not a private key; `handrail audit key FILE` makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{where} is a key of another kind than Ed25519; `handrail audit key FILE` makes one")
    return SigningKey(key)


def _private_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if sys.platform != "win32" and os.fstat(file.fileno()).st_mode & 0o007:
                raise ValueError(f"{path} can be read by every user of this machine: chmod 600 {path}")
            return file.read(MAX_KEY_BYTES).decode("ascii", "replace")
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}") from None


def _output_of(command: str) -> str:
    """Return what a program prints; what it says on standard error may have secrets, and is dropped."""
    words = shlex.split(command)
    if not words:
        raise ValueError("`command:` names no program")
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as problem:
        raise ValueError(f"the program {words[0]} cannot be started: {problem.strerror}") from None
    try:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ValueError(f"the program {words[0]} has not ended within {COMMAND_SECONDS:g} s") from None
    if process.returncode:
        raise ValueError(f"the program {words[0]} has ended with status {process.returncode}")
    return output[:MAX_KEY_BYTES].decode("ascii", "replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with what it has started, and wait for its end, but not for that of its output."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def parse_public_key(text: str) -> str:
    """Return a public key as `ed25519:…`; ValueError if the text is none."""
    text = text.strip()
    if "PRIVATE KEY" in text:
        raise ValueError("a private key, which stays with the server; `handrail audit key FILE` prints its public key")
    try:
        if text.startswith(PUBLIC):
            return _public_text(Ed25519PublicKey.from_public_bytes(b64decode(text.removeprefix(PUBLIC), validate=True)))
        key = load_der_public_key(_der(text))
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("not a public key, ed25519:… or PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("a key of another kind than Ed25519")
    return _public_text(key)


def write_new_key(path: Path) -> str:
    """Write a new private key to a file that does not exist yet, for its owner alone; return the public key."""
    private = Ed25519PrivateKey.generate()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        os.fsync(file.fileno())
    return _public_text(private.public_key())


def _public_text(key: Ed25519PublicKey) -> str:
    return PUBLIC + b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def _der(text: str) -> bytes:
    return b64decode("".join(_PEM_LINE.sub("", text).split()), validate=True)
