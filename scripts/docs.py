#!/usr/bin/env python3
"""Builds the documentation as a book: build/docs/html/index.html.

mdBook renders the pages of one folder. The pages of docs/SUMMARY.md are in several, and their links have to work in the
repository, too. So this script copies the pages to build/docs/src with the layout of the repository. A link to a file that
is not in the book, such as a source, becomes text.
"""

import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# A code span, or a link or an image with its text and its target.
LINK = re.compile(r"`[^`\n]+`|(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^()\s]+)\)")
BLOCK = re.compile(r"^( *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)


def outside_code(text, replace):
    """The text with `replace` applied to what is not in a fenced block."""
    parts = BLOCK.split(text)
    return "".join(part if index % 2 else replace(part) for index, part in enumerate(parts))


def links_in(text):
    """The links and images outside of code."""
    found = []
    outside_code(text, lambda part: found.extend(match for match in LINK.finditer(part) if match[3]) or part)
    return found


def decisions():
    """The pages of decisions, each with its title."""
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        yield page.read_text().split("\n", 1)[0].removeprefix("# "), page


def summary():
    """docs/SUMMARY.md for the root of the repository, with a line for each decision."""
    def rebase(match):
        if not match[3]:
            return match[0]
        path = (DOCS / match[3]).resolve().relative_to(ROOT)
        return f"{match[1]}[{match[2]}]({path})"

    lines = []
    for line in (DOCS / "SUMMARY.md").read_text().splitlines():
        lines.append(LINK.sub(rebase, line))
        if "(decisions.md)" in line:
            lines += [f"  - [{title}]({page.relative_to(ROOT)})" for title, page in decisions()]
    return "\n".join(lines) + "\n"


def pages_of(text):
    """The pages that a summary lists, relative to the root."""
    return [pathlib.Path(match[3]) for match in links_in(text)]


def without_foreign_links(page, text, pages):
    """The text of a page, in which links to files that are not in the book are text."""
    def keep_or_write_out(match):
        path = (match[3] or "").split("#")[0]
        if match[1] or not path or "://" in path:
            return match[0]
        target = (ROOT / page.parent / path).resolve()
        return match[0] if target.is_relative_to(ROOT) and target.relative_to(ROOT) in pages else match[2]

    return outside_code(text, lambda part: LINK.sub(keep_or_write_out, part))


def images_of(page, text):
    return [(page.parent / match[3]) for match in links_in(text) if match[1] and "://" not in match[3]]


def write_pages(target):
    """Copies all pages to a folder, with a summary."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    listed = summary()
    (target / "SUMMARY.md").write_text(listed)
    pages = set(pages_of(listed))
    for page in sorted(pages):
        text = (ROOT / page).read_text()
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(without_foreign_links(page, text, pages))
        for image in images_of(page, text):
            (target / image).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / image, target / image)


def main():
    book = ROOT / "build/docs"
    write_pages(book / "src")
    shutil.copy(DOCS / "book.toml", book / "book.toml")
    subprocess.run(["mdbook", "build", str(book)], check=True)
    print(f"the book is in {book / 'html/index.html'}")


if __name__ == "__main__":
    sys.exit(main())
