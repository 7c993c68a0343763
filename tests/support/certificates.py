"""Certificates for tests of TLS, made on the spot."""

import subprocess
from pathlib import Path


def write_certificates(directory: Path) -> Path:
    """An authority (ca.pem), and one certificate of it (cert.pem, key.pem) for loopback."""
    directory.mkdir(exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test-ca")
    openssl("req", *curve, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=localhost")
    (directory / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext", "-days", "2")
    openssl("x509", "-req", "-in", "csr.pem", "-out", "cert.pem", *signing)
    return directory
