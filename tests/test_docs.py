"""What the documents say of the code: options with their defaults, files and anchors that links lead to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from aspire_jax.methods import METHODS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def sections(text: str) -> dict[str, dict[str, str]]:
    """Of each policy class that docs/options.md names, its options and their defaults."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"\n(?=`)", text):
        name = re.search(r"\(`(\w+)`\)", part)
        if name:
            found[name[1]] = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", part, re.MULTILINE))
    return found


POLICIES = {
    type(p).__name__: (p, {name for name, m in METHODS.items() if p in (m.context, m.draft_length)})
    for method in METHODS.values()
    for p in (method.context, method.draft_length)
    if dataclasses.fields(p)  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_is_documented_with_its_default(name: str) -> None:
    policy, methods = POLICIES[name]
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    fields = [f for f in dataclasses.fields(policy) if f.metadata.get("option", True)]  # type: ignore[arg-type]
    assert sections(text)[name] == {f.name: str(f.default) for f in fields}
    line = next(line for line in text.splitlines() if f"(`{name}`)" in line)
    assert set(re.findall(r"`([a-z-]+)`", line)) == methods


def test_the_options_name_no_other_policy() -> None:
    assert set(sections((ROOT / "docs" / "options.md").read_text(encoding="utf-8"))) == set(POLICIES)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        document = (file.parent / path).resolve() if path else file
        assert document.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, target
