"""Text that every Python installation has: its help pages, for calibration and, apart from those, for judging.

    python examples/python_text.py calibration > calib.txt
    python examples/python_text.py held-out > eval.txt

Help pages repeat each other by the paragraph, so a page that is held out is not enough: no paragraph of the pages that
are held out is in the others, and none is there twice. Which pages are held out depends on their names alone.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterable
from pydoc_data.topics import topics

END = "<|endoftext|>"


def held_out_texts() -> list[str]:
    """Help pages that are kept for judging, about a tenth of all: the demo model has not seen them."""
    return without_repeats((topics[name] for name in sorted(topics) if _is_held_out(name)), set())


def calibration_texts() -> list[str]:
    """All other help pages, without the paragraphs that are also in those that are held out."""
    pages = (topics[name] for name in sorted(topics) if not _is_held_out(name))
    return without_repeats(pages, {key_of(each) for text in held_out_texts() for each in text.split("\n\n")})


def without_repeats(texts: Iterable[str], seen: set[str]) -> list[str]:
    """The texts without the paragraphs that are in `seen`, which grows by all the others."""
    kept = []
    for text in texts:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            if key_of(paragraph) not in seen:
                seen.add(key_of(paragraph))
                paragraphs.append(paragraph.rstrip())
        if "".join(paragraphs).strip():
            kept.append("\n\n".join(paragraphs).strip("\n") + "\n")
    return kept


def key_of(paragraph: str) -> str:
    """Paragraphs that differ in nothing but their white space are the same."""
    return " ".join(paragraph.split())


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0


def main() -> None:
    """Print the pages, with a line between them that `scalewright` takes for the end of a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("calibration", "held-out"))
    texts = calibration_texts() if parser.parse_args().which == "calibration" else held_out_texts()
    print(f"\n{END}\n".join(texts), end="")


if __name__ == "__main__":
    main()
