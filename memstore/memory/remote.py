"""Memories whose shards lie in object storage: ``zarr+s3://bucket/prefix``, and what else ``obstore`` can reach.

The shards lie where the url says. Documents, tokens, landmarks, recent blocks and the manifest change with every
commit, so they stay in a folder of a local disk, the *tail*: ``?tail=PATH`` behind the url names it, and without that
it lies among the user's data, under a hash of the url. The two belong together; neither is a memory without the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

import platformdirs
from xxhash import xxh3_128_hexdigest

from memstore.errors import InvalidArgument

if TYPE_CHECKING:
    from obstore.store import RetryConfig
    from zarr.abc.store import Store

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
"""What may stand behind ``zarr+``."""
RETRIES: RetryConfig = {"max_retries": 5}
"""How often ``obstore`` tries again before a storage counts as not reached."""


class Remote(NamedTuple):
    """The two places of such a memory."""

    shards: str
    """Url that ``obstore`` understands."""
    tail: Path
    """Folder on a local disk."""


def is_remote(url: str | Path) -> bool:
    """Whether a url is one of these."""
    return str(url).startswith("zarr+")


def places(url: str) -> Remote:
    """Where the parts of the memory at ``url`` lie. Raises ``InvalidArgument``."""
    parts = urlsplit(url.removeprefix("zarr+"))
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.scheme not in SCHEMES or not (parts.netloc or parts.path.strip("/")) or parts.fragment:
        known = ", ".join(f"zarr+{scheme}://..." for scheme in SCHEMES)
        raise InvalidArgument(f"cannot open {url!r}: expected one of {known}, such as zarr+s3://bucket/prefix")
    if set(options) - {"tail"} or options.get("tail") == [""]:
        raise InvalidArgument(f"cannot open {url!r}: behind the question mark only tail=PATH is understood")
    shards = parts._replace(query="").geturl().rstrip("/")
    if "tail" in options:
        return Remote(shards, Path(options["tail"][-1]))
    return Remote(shards, platformdirs.user_data_path("memstore") / "tails" / xxh3_128_hexdigest(shards.encode()))


def open_shards(remote: Remote, *, read_only: bool) -> Store:
    """The shards as a store of the ``zarr`` library; the keys to it are where ``obstore`` looks for them.

    Raises ``InvalidArgument``.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
        from zarr.storage import ObjectStore
    except ImportError:
        raise InvalidArgument("memories in Zarr need 'pip install torch-memstore[zarr]'.") from None
    try:
        if remote.shards.startswith("file:"):
            return ObjectStore(LocalStore(urlsplit(remote.shards).path, mkdir=not read_only), read_only=read_only)
        return ObjectStore(from_url(remote.shards, retry_config=RETRIES), read_only=read_only)
    except (BaseError, ValueError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InvalidArgument(f"the storage of zarr+{remote.shards} cannot be opened: {why}") from None
