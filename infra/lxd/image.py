"""The image of a local host, named by a hash of `ansible/`: a checkout with other files there has another image.

`python -m infra.lxd.image` prints whether it exists; `import DIR` imports DIR/image.squashfs, `remove` removes all.
"""

from __future__ import annotations

import hashlib
import io
import platform
import re
import sys
import tarfile
import time
from pathlib import Path

from infra.lxd.api import LxdError, client, errors
from infra.runtime.build import folder_path
from infra.runtime.recipe import default_runtime_spec
from infra.templates import ROOT, source_files

# Python environments of jobs (`fab train --runtime`), each in a folder here.
LOCAL_RUNTIMES = ROOT / ".cache" / "runtimes"
_ALIAS = re.compile(r"scaletier-[0-9a-f]{12}")
_ANSIBLE = ROOT / "ansible"


def name() -> str:
    """Return `scaletier-` and a hash of the files of `ansible/`."""
    digest = hashlib.sha256()
    for file in source_files(_ANSIBLE):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return f"scaletier-{digest.hexdigest()[:12]}"


def exists() -> bool:
    """Return True if the image is on this machine."""
    with errors("image"):
        return bool(client().images.exists(name(), alias=True))


def require() -> str:
    """Return the image's name; LxdError if it is not built yet."""
    if not exists():
        raise LxdError("the image of the hosts is missing: make it with `make image`")
    return name()


def require_runtime() -> Path:
    """Return the folder of the hosts' Python; LxdError if it is not built yet."""
    folder = folder_path(default_runtime_spec())
    if not folder.exists():
        raise LxdError("the Python of the hosts is missing: make it with `make image`")
    return folder


def _metadata() -> bytes:
    text = (
        f"architecture: {platform.machine()}\ncreation_date: {int(time.time())}\nproperties: {{description: scaletier host}}\n"
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("metadata.yaml")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def import_image(folder: Path) -> None:
    """Import folder/image.squashfs as the image `name()`, unless LXD has that; LxdError if LXD refuses it."""
    alias = name()
    with errors(f"image {alias}"):
        if not client().images.exists(alias, alias=True):
            rootfs = (folder / "image.squashfs").read_bytes()
            client().images.create(rootfs, metadata=_metadata(), wait=True).add_alias(alias, "scaletier host")


def remove_images() -> None:
    """Remove this and earlier images from LXD."""
    with errors("images"):
        for image in client().images.all():
            if any(_ALIAS.fullmatch(alias["name"]) for alias in image.aliases):
                image.delete(wait=True)


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["import"]:
            import_image(Path(arguments[1]))
        if arguments == ["remove"]:
            remove_images()
            return 0
        present = exists()
    except LxdError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    print(f"{name()} {'is there' if present else 'is missing'}")
    return 0 if present else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
