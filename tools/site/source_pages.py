"""Pages of the site that show source files and folders which other pages link to, as a repository would."""

from __future__ import annotations

import ast
import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from pygments.lexers import guess_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
AT = "source"  # the folder of these pages
Page = tuple[str, dict[str, str], str]


def page_name(path: str) -> str:
    """Returns the name of the page that shows a file or a folder of the repository."""
    return f"{AT}/{path}"


def link_to_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Leads links to files and folders that are no pages of the site to pages that show them."""
    here = app.env.docname
    shown = app.env.metadata[here].setdefault("shows", [])
    for node in list(
        doctree.findall(lambda each: isinstance(each, addnodes.download_reference | addnodes.pending_xref))
    ):
        if node.get("reftype") != "myst" or node.get("refdomain") == "doc":
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), node["reftarget"]))
        if not (ROOT / path).exists():
            continue  # an anchor, or a link that leads nowhere, which the build will say
        shown.append(path)
        uri = app.builder.get_relative_uri(here, page_name(path))
        node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def pages(app: Sphinx) -> Iterator[Page]:
    """Returns the pages of all files and folders that are linked to."""
    for path in sorted({path for document in app.env.metadata.values() for path in document.get("shows", ())}):
        body = folder_body(ROOT / path) if (ROOT / path).is_dir() else file_body(app, ROOT / path)
        title = html.escape(path)
        yield page_name(path), {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def file_body(app: Sphinx, path: Path) -> str:
    """Returns a file's highlighted text."""
    text = path.read_text()
    try:
        language = guess_lexer_for_filename(path.name, text).aliases[0]
    except ClassNotFound:
        language = "text"
    return app.builder.highlighter.highlight_block(text, language)


def folder_body(folder: Path) -> str:
    """Returns a table of a folder's files, each with the first line of its docstring."""
    files = [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]
    rows = "".join(
        f"<tr><td><p>{literal(str(path.relative_to(folder)))}</p></td>"
        f"<td><p>{re.sub('`(.*?)`', lambda quoted: literal(quoted[1]), html.escape(opening(path)))}</p></td></tr>"
        for path in files
    )
    return f'<div class="table-wrapper"><table class="docutils"><tbody>{rows}</tbody></table></div>'


def literal(text: str) -> str:
    """Returns a text in the site's type for code."""
    return f'<code class="docutils literal notranslate">{text}</code>'


def opening(path: Path) -> str:
    """Returns the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def setup(app: Sphinx) -> None:
    """Adds the pages of source files, and the links to them, to a build."""
    app.connect("doctree-read", link_to_sources)
    app.connect("html-collect-pages", pages)
