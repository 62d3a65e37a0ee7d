#!/usr/bin/env python3
"""Checks the Markdown files: links and paths inside the repository exist, `make` targets are in the Makefile, and
each C++ or Python block stands in a file of examples/. Prints each one that does not hold."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
# The first part of a path that git keeps; build folders and demo/ come and go.
FOLDERS = {".ci", "bench", "cli", "cmake", "docs", "examples", "include", "integrations", "kernels", "python", "scripts", "src",
           "tactics", "tests"}


def anchors_of(path):
    """The anchors that a Markdown file offers: its headings, in lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_finding(document, link):
    if re.match(r"[a-z]+:", link):
        return None
    name, _, anchor = link.partition("#")
    target = (document.parent / name).resolve() if name else document
    if not target.exists():
        return f"link to {link}: no such file"
    if anchor and anchor not in anchors_of(target):
        return f"link to {link}: no such heading"
    return None


def findings_of(document, targets, examples):
    text = document.read_text()
    blocks = BLOCK.findall(text)
    prose = BLOCK.sub("", text)
    snippets = CODE.findall(prose) + [body for language, body in blocks if language == "sh"]

    found = [link_finding(document, link) for link in LINK.findall(CODE.sub("", prose))]
    for snippet in snippets:
        for path in PATH.findall(snippet):
            if path.split("/")[0] in FOLDERS and not (ROOT / path).exists():
                found.append(f"path {path}: no such file")
        found += [f"make {name}: no such target" for name in MAKE.findall(snippet) if name not in targets]
    for language, body in blocks:
        if language in ("cpp", "python") and not any(body in example for example in examples):
            found.append(f"the block that begins '{body.splitlines()[0]}' stands in no file of examples/")
    return [f"{document.relative_to(ROOT)}: {finding}" for finding in found if finding]


def main():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    examples = [path.read_text() for path in (ROOT / "examples").rglob("*") if path.suffix in (".cpp", ".py")]
    documents = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "integrations").rglob("*.md")])
    findings = [finding for document in documents for finding in findings_of(document, targets, examples)]
    print("\n".join(findings + [f"link check: {len(documents)} documents, {len(findings)} findings"]))
    return 1 if findings or not documents else 0


if __name__ == "__main__":
    sys.exit(main())
