"""The server's certificate and key: looked at before anything listens, so that what is wrong with them is one line.

It knows PEM files through OpenSSL. It does not know who listens (`application.http_server`, `kserve.grpc_server`).
"""

from __future__ import annotations

import ssl
from pathlib import Path

from trtrun.configuration.server_config import ServerSection
from trtrun.errors import ConfigError, one_line, reading

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
"""OpenSSL's reasons for a key that does not fit the certificate."""


class _EncryptedError(Exception):
    """OpenSSL asks for a passphrase."""


def check_tls(section: ServerSection) -> None:
    """Raise ConfigError for files that make no TLS."""
    cert, key = section.tls_cert, section.tls_key
    if cert is None or key is None:
        return
    _check_file("server.tls_cert", cert, _CERTIFICATE, "certificate")
    _check_file("server.tls_key", key, _KEY, "private key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _refuse_to_ask)
    except _EncryptedError:
        raise ConfigError(
            f"server.tls_key {key} is encrypted, and nobody is there to type its passphrase: store it without one "
            f"(openssl pkey -in {key} -out NEW_FILE)"
        ) from None
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise ConfigError(f"server.tls_key {key} is not the key of server.tls_cert {cert}") from None
        raise ConfigError(
            f"server.tls_cert {cert}, server.tls_key {key}: OpenSSL cannot read them: {one_line(error)}"
        ) from None


def _check_file(name: str, path: Path, mark: bytes, content: str) -> None:
    with reading(f"{name} {path}", ConfigError):
        is_there = mark in path.read_bytes()
    if not is_there:
        raise ConfigError(f"{name} {path} holds no {content} in PEM")


def _refuse_to_ask() -> str:
    raise _EncryptedError
