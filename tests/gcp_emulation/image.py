"""Google's Debian 12 image as a container: systemd, sshd and Google's guest agent, and a test's CA.

Beyond Debian's minbase it has only the parts of Google's image that are named below: a host that needs more fails here.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "gcp-emulation"
# Source: Compute Engine documentation, "Operating system details", and the package lists of Debian's cloud images.
PACKAGES = (
    "ca-certificates", "curl", "dbus", "google-guest-agent", "iproute2", "openssh-server", "procps", "python3", "sudo",
    "systemd-sysv", "udev", "unattended-upgrades",
)  # fmt: skip
_OPTIONS = ("--aptopt=APT::Install-Recommends false", "--dpkgopt=path-exclude=/usr/share/doc/*", "--quiet")
_HOOKS = (
    f'cp {CACHE}/ca.pem "$1/usr/local/share/ca-certificates/gcp-emulation.crt"',
    'chroot "$1" update-ca-certificates',
    # Google's Python client trusts the authorities of the package certifi, unless the environment names others.
    'mkdir -p "$1/etc/systemd/system.conf.d"',
    'printf "[Manager]\\nDefaultEnvironment=REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt\\n" '
    '>"$1/etc/systemd/system.conf.d/authorities.conf"',
    'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/resolv.conf "$1"/etc/hostname',
    # An empty id becomes a new one at boot; without the file systemd would enable all of its units.
    ': >"$1/etc/machine-id"',
)
NAMES = ("storage.googleapis.com", "www.googleapis.com", "compute.googleapis.com", "sts.googleapis.com")
_DAYS = 3650


def require_squashfs() -> Path:
    """Return the root file system; build it if it is missing."""
    require_authority()
    recipe = json.dumps([PACKAGES, _HOOKS, (CACHE / "ca.pem").read_text()])
    cached = CACHE / f"{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.squashfs"
    if not cached.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            root, part = Path(scratch, "root"), Path(scratch, "part")
            hooks = [f"--customize-hook={hook}" for hook in _HOOKS]
            _run("mmdebstrap", "--variant=minbase", *_OPTIONS, f"--include={','.join(PACKAGES)}", *hooks, "bookworm", str(root))
            _run("mksquashfs", str(root), str(part), "-noappend", "-quiet", "-comp", "zstd", "-Xcompression-level", "3")
            part.replace(cached)
    return cached


def require_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the CA that the hosts trust; it is created once, and its key stays in the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    certificate, key = CACHE / "ca.pem", CACHE / "ca.key"
    if not certificate.exists():
        new_key = ec.generate_private_key(ec.SECP256R1())
        key.touch(mode=0o600)
        key.write_bytes(_pem(new_key))
        certificate.write_bytes(_sign("scaletier GCP emulation", new_key, None, None).public_bytes(serialization.Encoding.PEM))
    ca_key = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    return x509.load_pem_x509_certificate(certificate.read_bytes()), ca_key


def write_server_certificate(folder: Path) -> Path:
    """Write a key and a certificate for Google's names, in one file."""
    issuer, signer = require_authority()
    key = ec.generate_private_key(ec.SECP256R1())
    file = folder / "google.pem"
    file.write_bytes(_pem(key) + _sign(NAMES[0], key, issuer, signer).public_bytes(serialization.Encoding.PEM))
    return file


def _sign(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None, signer: ec.EllipticCurvePrivateKey | None
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in NAMES]), critical=False)
    return builder.sign(signer or key, hashes.SHA256())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    kind = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command[0]}: {result.stderr[-2000:]}"
