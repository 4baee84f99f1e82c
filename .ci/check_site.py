"""Check that no page of a built site loads anything from the network: `python .ci/check_site.py FOLDER`."""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# Elements whose attribute makes a browser load something; links to follow are not among them.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
NOT_LOADED = {"canonical", "next", "prev", "author", "search", "index", "license"}  # relations of <link>
REMOTE_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\") ]+)")


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address that an element loads."""
        values = dict(attrs)
        address = values.get(LOADED.get(tag, "")) or ""
        if not (tag == "link" and NOT_LOADED.intersection((values.get("rel") or "").split())):
            self.addresses.append(address)


def list_remote_loads(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a site with an address on the network that it loads."""
    for path in sorted(folder.rglob("*.html")):
        page = _Loads()
        page.feed(path.read_text(encoding="utf-8"))
        yield from ((path, address) for address in page.addresses if re.match(r"(?:https?:)?//", address))
    for path in sorted(folder.rglob("*.css")):
        yield from ((path, address) for address in REMOTE_STYLE.findall(path.read_text(encoding="utf-8")))


def main(folder: Path) -> int:
    """Print what a site loads from the network; return 1 if there is anything, or no page."""
    pages = len(list(folder.rglob("*.html")))
    loads = list(list_remote_loads(folder))
    for path, address in loads:
        print(f"{path} loads {address}", file=sys.stderr)
    print(f"{pages} pages, {len(loads)} loads from the network")
    return 1 if loads or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
