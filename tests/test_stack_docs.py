"""docs/stacks: every page is reachable, links lead somewhere, what it imports and calls exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STACKS = ROOT / "docs" / "stacks"
PAGES = sorted(STACKS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_names_every_page_and_the_readme_names_the_index() -> None:
    linked = set(re.findall(r"\]\(([a-z_0-9]+\.md)\)", (STACKS / "README.md").read_text()))
    assert linked == {page.name for page in PAGES} - {"README.md"}
    assert "docs/stacks/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_the_code_imports_and_calls_exists(page) -> None:
    """Of dash: modules that a page imports, and names that it takes from them."""
    for block in re.findall(r"```(?:python)?\n(.*?)```", page.read_text(), re.DOTALL):
        for module in re.findall(r"^import (dash\S*)", block, re.MULTILINE):
            importlib.import_module(module)
        for path in re.findall(r"\b(dash(?:\.\w+)+)\(", block):
            *module, name = path.split(".")
            assert callable(getattr(importlib.import_module(".".join(module)), name)), path


def test_the_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"\b((?:tests|examples)/\w+\.py)\b", page.read_text()):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"


def test_importing_dash_imports_no_adapter_and_no_adapter_imports_a_stack() -> None:
    code = """
import sys, dash
assert not [name for name in sys.modules if name.startswith("dash.compat")]
import dash.compat.flash_attn_3, dash.compat.kernels, dash.compat.torch_attention
import dash.compat.transformers
assert not {"transformers", "kernels", "trl", "flash_attn_interface"} & set(sys.modules)
from torch.nn import attention
if hasattr(attention, "list_flash_attention_impls"):
    assert "DASH" not in attention.list_flash_attention_impls()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
