"""The source of a figure, in its file, so that a test finds figures older than their results."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHORT = 20  # steps of training whose ELBO stands for a trained figure
SOURCE = re.compile(r"<dc:source>(.*?)</dc:source>")
DATE = re.compile(r"<dc:date>.*?</dc:date>")


def digest(results: Any) -> str:
    """Return a digest of results, or of code, that JSON can write."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def short_run(model: Any, guide: Any, x: Any, y: Any) -> str:
    """Return the ELBO of a short training as text, for a figure that takes a long one."""
    import pyro_structvi as ps

    history = ps.fit(model, guide, (x, y), num_steps=SHORT, progress=False)
    return f"ELBO {history.elbo[-1]:.5g} after {SHORT} steps"


def metadata(path: Path, source: str) -> Mapping[str, str | None] | None:
    """Return the metadata with which matplotlib saves a figure: its source, and no date."""
    return {"Date": None, "Source": source} if path.suffix == ".svg" else None


def write_source(path: Path, source: str) -> None:
    """Write the source into a figure that is already saved, in place of its date."""
    if path.suffix == ".svg":
        path.write_text(DATE.sub(f"<dc:source>{source}</dc:source>", path.read_text()))
        return
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Source", source)
    with Image.open(path) as image:
        image.copy().save(path, pnginfo=text, optimize=True)


def read_source(path: Path) -> str | None:
    """Return the source of a figure; None if it has none."""
    if path.suffix == ".svg":
        found = SOURCE.search(path.read_text())
        return found and found[1]
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get("Source")
