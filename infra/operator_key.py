"""The SSH key pair of a stack, generated once and stored in the stack's state (the private key as a secret)."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pulumi import Output, ResourceOptions

from infra.dynamic import ModuleResource, Props


class OperatorKey(ModuleResource, module="operator", name="OperatorKey"):
    """The key pair of the operator, the person or machine that runs `fab`.

    Input: comment. Outputs: publicKey (for authorized_keys), privateKey (OpenSSH's, secret).
    """

    module_name = __name__
    outputs = ("publicKey", "privateKey")
    publicKey: Output[str]
    privateKey: Output[str]

    def __init__(self, name: str, comment: str, opts: ResourceOptions | None = None) -> None:
        # A renamed stack keeps its key, because a new key would replace every local host.
        secret = ResourceOptions(additional_secret_outputs=["privateKey"], ignore_changes=["comment"])
        super().__init__(name, {"comment": comment}, ResourceOptions.merge(opts, secret))


def create(props: Props) -> tuple[str, Props]:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return props["comment"], {**props, "publicKey": f"{public} {props['comment']}", "privateKey": private}


def update(name: str, old: Props, new: Props) -> Props:
    return {**old, **new}
