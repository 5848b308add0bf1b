"""The figures of the gallery: runs the code of its pages, which writes them.

    python docs/scripts/gallery_figures.py                          # all
    python docs/scripts/gallery_figures.py --page two_moons         # one

What a page prints is printed here too.
"""

import argparse
import contextlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch

GALLERY = Path(__file__).parents[1] / "gallery"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONG_NUMBER = re.compile(r"(\d\.\d)\d+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="append", help="a page's name; all when left out")
    parser.add_argument("--folder", type=Path, default=GALLERY, help="of the figures")
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gallery"
    matplotlib.rcParams["svg.fonttype"] = "none"
    names = options.page or sorted(page.stem for page in GALLERY.glob("*.md"))
    for name in names:
        print(f"{name}, with local reparameterization where its guide has it")
        run(GALLERY / f"{name}.md", options.folder.resolve())


def run(page: Path, folder: Path) -> None:
    """Run a page's code in a folder that is then removed, and keep the figures that it writes."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for code in BLOCK.findall(page.read_text()):
            exec(compile(code, page, "exec"), namespace)
        for path in (path for path in Path().iterdir() if path.suffix in {".svg", ".png"}):
            if path.suffix == ".svg":
                shorten(path)
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
            shutil.copy(path, folder / path.name)


def shorten(path: Path) -> None:
    """Round the coordinates of a figure, and drop the date at which it was made."""
    text = LONG_NUMBER.sub(r"\1", path.read_text())
    text = re.sub(r"<dc:date>.*?</dc:date>", "", text)
    path.write_text(text)


if __name__ == "__main__":
    main()
