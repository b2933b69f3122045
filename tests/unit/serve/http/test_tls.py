"""Certificates and keys that make no TLS: each is told in words that say what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launch.serve.http.tls import check_tls
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: install the package openssl")


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and the first key encrypted."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", "/CN=test", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")  # fmt: skip
    openssl("pkey", "-in", folder / "one.key", "-aes128", "-passout", "pass:secret", "-out", folder / "secret.key")
    torn = (folder / "one.pem").read_text().splitlines()
    (folder / "torn.pem").write_text("\n".join(torn[:3]) + "\n")
    return folder


def test_a_pair_that_fits_is_taken_and_none_is_needed(folder: Path) -> None:
    check_tls(ServerSection(tls_cert=folder / "one.pem", tls_key=folder / "one.key"))
    check_tls(ServerSection())


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("one.pem", "two.key", "server.tls_key {}/two.key is not the key of server.tls_cert {}/one.pem"),
        ("one.pem", "secret.key", "server.tls_key {}/secret.key is encrypted"),
        ("one.key", "one.key", "server.tls_cert {}/one.key holds no certificate in PEM"),
        ("one.pem", "one.pem", "server.tls_key {}/one.pem holds no private key in PEM"),
        ("torn.pem", "one.key", "server.tls_cert {}/torn.pem, server.tls_key {}/one.key: OpenSSL cannot read them: "),
        ("none.pem", "one.key", "server.tls_cert {}/none.pem cannot be read: No such file or directory"),
        ("one.pem", ".", "server.tls_key {} cannot be read: Is a directory"),
    ],
)
def test_what_is_wrong_with_them_is_one_line(folder: Path, cert: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_tls(ServerSection(tls_cert=folder / cert, tls_key=folder / key))
    assert str(raised.value).startswith(message.replace("{}", str(folder)))
    assert "\n" not in str(raised.value)
